/* Products of weights with packed activations, and linears with their adapter.

       y = round(W x + b),   then round(y + s B round(A x))

   A weight is [out][in], as PyTorch has it; `out` is a multiple of TILE. It is read once for all blocks of LANES rows,
   at most MOST_BLOCKS of them. The order in which a sum adds its inputs is the same in every row and for any number of
   rows, so it depends on its own row alone. With AMX, 16 outputs are a tile of the left factor, which is read as it
   lies; a block of rows is the right one. */

#define TILE 16 /* outputs that are computed at once */
#define MOST_BLOCKS 4
#define PREFETCH_STEP TILE /* inputs between two prefetches; `in` is a multiple of it */
#define MADE_AT_ONCE (4 * SCALED) /* inputs of values that are made from codes, without AMX */
#ifdef __AVX512VL__
#define REGISTERS 32 /* for vectors */
#else
#define REGISTERS 16
#endif
#define MOST_OUTS TILE /* the most outputs that `add_some` computes at once */

#ifdef IN_BF16
#define INPUTS 2 /* that `plus` adds at once */
INLINE lanes plus(lanes sum, const value *weight, const float *x) {
#ifdef __AVX512BF16__
  int32_t pair;
  memcpy(&pair, weight, sizeof pair);
#if LANES == 16
  return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh) * (const words *)x, (__m512bh)_mm512_set1_epi32(pair));
#else
  return (lanes)_mm256_dpbf16_ps((__m256)sum, (__m256bh) * (const words *)x, (__m256bh)_mm256_set1_epi32(pair));
#endif
#else
  words pair = *(const words *)x;
  return sum + wide(weight[0]) * (lanes)(pair << 16) + wide(weight[1]) * (lanes)(pair & 0xffff0000u);
#endif
}
#else
#define INPUTS 1
INLINE lanes plus(lanes sum, const value *weight, const float *x) { return sum + *weight * *(const lanes *)x; }
#endif

/* Outputs of a weight, the next one `stride` values behind. fetches: whether to fetch ahead what follows, since by
   itself a processor does it for few outputs at a time; not for values that have just been made of codes. */
typedef struct {
  const value *at;
  int64_t stride;
  int fetches;
} Weight;
INLINE Weight from_output_of(Weight w, int64_t output) {
  return (Weight){w.at + output * w.stride, w.stride, w.fetches};
}

/* Adds to sums: [blocks][TILE] lanes. x: a block every `apart` floats. */
INLINE void add_some(
    const Weight w, int64_t in, const float *x, int64_t apart, const int outs, const int blocks, lanes *sums) {
  lanes sum[MOST_OUTS][MOST_BLOCKS];
  for (int o = 0; o < outs; o++)
    for (int b = 0; b < blocks; b++) sum[o][b] = sums[b * TILE + o];
  for (int64_t line = 0; line < in; line += PREFETCH_STEP) {
    for (int o = 0; w.fetches && o < outs; o++) __builtin_prefetch(w.at + (outs + o) * w.stride + line, 0, 2);
    for (int64_t i = line; i < line + PREFETCH_STEP; i += INPUTS)
      for (int o = 0; o < outs; o++)
        for (int b = 0; b < blocks; b++)
          sum[o][b] = plus(sum[o][b], w.at + o * w.stride + i, x + b * apart + packed_offset(i));
  }
  for (int o = 0; o < outs; o++)
    for (int b = 0; b < blocks; b++) sums[b * TILE + o] = sum[o][b];
}

INLINE void add_sums(
    const Weight w, int64_t in, const float *x, int64_t apart, const int blocks, const int at_once, lanes *sums) {
  for (int o = 0; o < TILE; o += at_once) add_some(from_output_of(w, o), in, x, apart, at_once, blocks, sums + o);
}

/* most: sums at once with one block or two. On a Zen 4 an addition of bf16 pairs takes six cycles and two begin in
   each, so 12 sums keep it busy. Where `stride` is no constant, each output takes a register for its address, of which
   there are 16, so `multiply` asks for 8. */
INLINE void add_products(
    const Weight w, int64_t in, const float *x, int64_t apart, int64_t blocks, const int most, lanes *sums) {
  switch (blocks) {
    case 1: add_sums(w, in, x, apart, 1, most, sums); return;
    case 2: add_sums(w, in, x, apart, 2, most / 2, sums); return;
    case 3: add_sums(w, in, x, apart, 3, 4, sums); return;
    default: add_sums(w, in, x, apart, 4, REGISTERS / 8, sums); return;
  }
}

#ifdef IN_BF16
/* SCALED values of each of TILE outputs, those of scale number `s`, an output every `stride` values. Fetches the same
   part of the outputs that are wanted after these, `next` times TILE behind. */
INLINE void make_values(Codes w, int64_t in, int64_t s, int64_t next, value *to, int64_t stride) {
  int64_t scales = in / SCALED, ahead = (next * scales + s) * TILE;
  for (int i = 0; i < code_bytes(TILE * SCALED); i += CACHE_LINE)
    __builtin_prefetch(w.codes + code_bytes(ahead * SCALED) + i, 0, 2);
  __builtin_prefetch(w.scales + ahead, 0, 2);
  for (int64_t o = 0; o < TILE; o++)
    scaled_values(w.levels, w.scales[o * scales + s], w.codes + code_bytes(o * in + s * SCALED), to + o * stride);
}
#endif

#if USES_TILES
/* Adds the products of TILE_INPUTS inputs to tiles 0 to 3. */
INLINE void add_tiles(const value *weight, int64_t stride, const float *x, int64_t apart, const int blocks) {
  /* Intrinsics take the number of a tile as a constant. */
  _tile_loadd(4, weight, stride * sizeof(value));
  _tile_loadd(5, x, BYTES);
  _tile_dpbf16ps(0, 4, 5);
  if (blocks > 1) {
    _tile_loadd(6, x + apart, BYTES);
    _tile_dpbf16ps(1, 4, 6);
  }
  if (blocks > 2) {
    _tile_loadd(5, x + 2 * apart, BYTES);
    _tile_dpbf16ps(2, 4, 5);
  }
  if (blocks > 3) {
    _tile_loadd(6, x + 3 * apart, BYTES);
    _tile_dpbf16ps(3, 4, 6);
  }
}

INLINE void zero_tiles(const int blocks) {
  _tile_zero(0);
  if (blocks > 1) _tile_zero(1);
  if (blocks > 2) _tile_zero(2);
  if (blocks > 3) _tile_zero(3);
}

INLINE void store_tiles(const int blocks, lanes *sums) {
  _tile_stored(0, sums, BYTES);
  if (blocks > 1) _tile_stored(1, sums + TILE, BYTES);
  if (blocks > 2) _tile_stored(2, sums + 2 * TILE, BYTES);
  if (blocks > 3) _tile_stored(3, sums + 3 * TILE, BYTES);
}

INLINE void tile_sums(const value *weight, int64_t in, const float *x, int64_t apart, const int blocks, lanes *sums) {
  zero_tiles(blocks);
  for (int64_t i = 0; i < in; i += TILE_INPUTS) {
    for (int o = 0; o < TILE; o++) __builtin_prefetch(weight + (TILE + o) * in + i, 0, 2);
    add_tiles(weight + i, in, x + packed_offset(i), apart, blocks);
  }
  store_tiles(blocks, sums);
}

/* The same with a weight as codes. */
INLINE void coded_tile_sums(Codes w, int64_t in, const float *x, int64_t apart, const int blocks, lanes *sums) {
  value values[TILE * SCALED] __attribute__((aligned(CACHE_LINE)));
  zero_tiles(blocks);
  for (int64_t s = 0; s < in / SCALED; s++) {
    make_values(w, in, s, 1, values, SCALED);
    STORES_BEFORE_TILES(values);
    for (int i = 0; i < SCALED; i += TILE_INPUTS)
      add_tiles(values + i, SCALED, x + packed_offset(s * SCALED + i), apart, blocks);
    STORES_BEFORE_TILES(values);
  }
  store_tiles(blocks, sums);
}

/* For one or two blocks: a tile of x is loaded once for two weights. */
INLINE void add_tiles_of_two(const value *values, const float *x, int64_t apart, const int blocks) {
  _tile_loadd(6, x, BYTES);
  _tile_loadd(4, values, SCALED * sizeof(value));
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, values + TILE * SCALED, SCALED * sizeof(value));
  _tile_dpbf16ps(2, 5, 6);
  if (blocks > 1) {
    _tile_loadd(7, x + apart, BYTES);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

/* TILE outputs of each of two such weights. next: to the outputs that are wanted after these, in times TILE. */
INLINE void coded_tile_sums_of_two(
    const Codes *w, int64_t in, int64_t next, const float *x, int64_t apart, const int blocks, lanes *const *sums) {
  value values[2][TILE * SCALED] __attribute__((aligned(CACHE_LINE)));
  zero_tiles(4);
  for (int64_t s = 0; s < in / SCALED; s++) {
    for (int k = 0; k < 2; k++) make_values(w[k], in, s, next, values[k], SCALED);
    STORES_BEFORE_TILES(values);
    for (int i = 0; i < SCALED; i += TILE_INPUTS)
      add_tiles_of_two(values[0] + i, x + packed_offset(s * SCALED + i), apart, blocks);
    STORES_BEFORE_TILES(values);
  }
  _tile_stored(0, sums[0], BYTES);
  _tile_stored(2, sums[1], BYTES);
  if (blocks > 1) {
    _tile_stored(1, sums[0] + TILE, BYTES);
    _tile_stored(3, sums[1] + TILE, BYTES);
  }
}
#endif

/* sums: [blocks][TILE] lanes, of TILE outputs. */
static void multiply(const value *weight, int64_t in, const float *x, int64_t apart, int64_t blocks, lanes *sums) {
#if USES_TILES
  if (in % TILE_INPUTS == 0) switch (blocks) {
      case 1: tile_sums(weight, in, x, apart, 1, sums); return;
      case 2: tile_sums(weight, in, x, apart, 2, sums); return;
      case 3: tile_sums(weight, in, x, apart, 3, sums); return;
      default: tile_sums(weight, in, x, apart, 4, sums); return;
    }
#endif
  memset(sums, 0, blocks * TILE * BYTES);
  add_products((Weight){weight, in, 1}, in, x, apart, blocks, 8, sums);
}

#ifdef IN_BF16
/* The same with a weight as codes. */
static void multiply_codes(Codes w, int64_t in, const float *x, int64_t apart, int64_t blocks, lanes *sums) {
#if USES_TILES
  switch (blocks) {
    case 1: coded_tile_sums(w, in, x, apart, 1, sums); return;
    case 2: coded_tile_sums(w, in, x, apart, 2, sums); return;
    case 3: coded_tile_sums(w, in, x, apart, 3, sums); return;
    default: coded_tile_sums(w, in, x, apart, 4, sums); return;
  }
#else
  value values[TILE * MADE_AT_ONCE];
  memset(sums, 0, blocks * TILE * BYTES);
  for (int64_t first = 0; first < in; first += MADE_AT_ONCE) {
    int64_t count = smaller(MADE_AT_ONCE, in - first);
    for (int64_t i = 0; i < count; i += SCALED) make_values(w, in, (first + i) / SCALED, 1, values + i, MADE_AT_ONCE);
    Weight made = {values, MADE_AT_ONCE, 0};
    add_products(made, count, x + packed_offset(first), apart, blocks, REGISTERS / 2, sums);
  }
#endif
}
#endif

typedef struct {
  const value *weight, *bias;    /* [out][in], [out]; no bias: 0 */
  Codes codes;                   /* of the weight; none: 0 */
  const value *a, *b;            /* [rank][in], [out][b_in]; no adapter: 0 */
  int64_t in, out, rank, b_in;   /* rank: a multiple of TILE; b_in: of RANK_STEP. Zeros fill them up. */
  double scale;
} Linear;
#if USES_TILES
#define RANK_STEP TILE_INPUTS
#else
#define RANK_STEP PREFETCH_STEP
#endif

/* Activations of some blocks of rows. */
typedef struct {
  float *at;
  int64_t features;
} Rows;
INLINE int64_t apart(Rows x) { return x.features * LANES; }
INLINE float *block_of(Rows x, int64_t block) { return x.at + block * apart(x); }
INLINE Rows from_feature(Rows x, int64_t k) { return (Rows){x.at + packed_offset(k), x.features}; }

/* Packs round(A x) of several linears, one below the other, into `ax`. */
static void low_rank(
    const Linear *const *linears, int count, Rows x, Rows ax, int64_t blocks, Thread thread) {
  int64_t tile = 0;
  for (int j = 0; j < count; j++)
    for (int64_t t = 0; t < linears[j]->rank / TILE; t++, tile++) {
      if (tile % thread.all != thread.number) continue;
      lanes sums[MOST_BLOCKS * TILE];
      multiply(linears[j]->a + t * TILE * linears[j]->in, linears[j]->in, x.at, apart(x), blocks, sums);
      for (int64_t b = 0; b < blocks; b++)
        for (int i = 0; i < TILE; i += 2)
          pack(block_of(ax, b), tile * TILE + i, sums[b * TILE + i], sums[b * TILE + i + 1]);
    }
  /* The zeros that fill up the last B are multiplied by what is behind the last A x, and zero times NaN is NaN. */
  if (tile && thread.number == 0)
    for (int64_t b = 0; b < blocks; b++)
      for (int i = 0; i < TILE; i += 2) pack(block_of(ax, b), tile * TILE + i, (lanes){0}, (lanes){0});
}

/* TILE outputs of a linear, from number `tile` times TILE on. */
typedef struct {
  const Linear *linear;
  int64_t tile;
  Rows ax;
  lanes *y; /* [blocks][TILE] */
} Outputs;

static void multiply_base(const Outputs *o, Rows x, int64_t blocks) {
  const Linear *l = o->linear;
  int64_t first = o->tile * TILE;
#ifdef IN_BF16
  if (l->codes.codes) {
    multiply_codes(from_output(l->codes, first, l->in), l->in, x.at, apart(x), blocks, o->y);
    return;
  }
#endif
  multiply(l->weight + first * l->in, l->in, x.at, apart(x), blocks, o->y);
}

/* Adds the bias, and what the adapter gives. */
static void finish(const Outputs *o, int64_t blocks) {
  const Linear *l = o->linear;
  int64_t first = o->tile * TILE;
  lanes *y = o->y;
  for (int64_t i = 0; i < blocks * TILE; i++) y[i] = rounded(l->bias ? y[i] + wide(l->bias[first + i % TILE]) : y[i]);
  if (!l->b) return;
  lanes sums[MOST_BLOCKS * TILE];
  multiply(l->b + first * l->b_in, l->b_in, o->ax.at, apart(o->ax), blocks, sums);
  for (int64_t i = 0; i < blocks * TILE; i++) y[i] = rounded(y[i] + (float)l->scale * sums[i]);
}

#if USES_TILES
/* Whether TILE outputs of each are quicker together than one after the other. */
INLINE int multiplies_two(const Linear *a, const Linear *b, int64_t blocks) {
  return blocks <= 2 && a->codes.codes && b->codes.codes;
}
static void multiply_two(const Outputs *o, Rows x, int64_t blocks) {
  int64_t in = o->linear->in, next = o[0].linear == o[1].linear ? 2 : 1;
  Codes codes[2];
  lanes *sums[2] = {o[0].y, o[1].y};
  for (int k = 0; k < 2; k++) codes[k] = from_output(o[k].linear->codes, o[k].tile * TILE, in);
  if (blocks == 1)
    coded_tile_sums_of_two(codes, in, next, x.at, apart(x), 1, sums);
  else
    coded_tile_sums_of_two(codes, in, next, x.at, apart(x), 2, sums);
}
#else
INLINE int multiplies_two(const Linear *a, const Linear *b, int64_t blocks) { return 0; }
static void multiply_two(const Outputs *o, Rows x, int64_t blocks) {}
#endif

/* One or two times TILE outputs, of linears with the same inputs. */
static void linear(const Outputs *outputs, int count, Rows x, int64_t blocks) {
  if (count == 2 && multiplies_two(outputs[0].linear, outputs[1].linear, blocks))
    multiply_two(outputs, x, blocks);
  else
    for (int k = 0; k < count; k++) multiply_base(outputs + k, x, blocks);
  for (int k = 0; k < count; k++) finish(outputs + k, blocks);
}
