/* Logits from a head in 8 bits (actor/engines/token_step/eight_bit.py has the formulas).

       x = s q + l,   z_v = c_v s (k_v q) + l r_v,   then W x for the largest of a row

   Codes are multiplied exactly, in int32. OUTPUTS rows of the head lie side by side, four inputs of each at a time, so
   that a row of x gives as many neighbouring logits at once.

   The LARGEST largest logits are in the LARGEST slices of SLICE_OUTPUTS tokens with the highest maxima. So each logit
   that is not below the lowest of these maxima is computed again, in fp32: all of the LARGEST, and some more. */

#define SLICE_OUTPUTS 128
#define LARGEST 64
#define OUTPUTS 16
#define HEAD_INPUTS 64 /* the width of the codes is a multiple of it; zeros fill it up */
#define SIDE_BY_SIDE 16 /* rows of x in a tile */
#define MOST_ROWS (MOST_BLOCKS * SIDE_BY_SIDE) /* that are multiplied at once */
#define STEPS 255.0f

typedef struct {
  const int8_t *codes;        /* [size / OUTPUTS, rounded up][inputs / 4][OUTPUTS][4] */
  const float *scales, *sums; /* [size, filled up to OUTPUTS] c and r */
  const value *weight, *x;    /* [size][width], [rows][width] */
  float *logits;              /* [rows][size] */
  uint8_t *rounded;           /* room for [rows, a multiple of SIDE_BY_SIDE][inputs] q */
  float *steps, *lows;        /* room for [rows] s and l */
  float *maxima;              /* room for [rows][slices of SLICE_OUTPUTS] */
  int64_t size, width, inputs; /* inputs: the width, filled up */
  int64_t rows, threads;
} Head;

INLINE int64_t slice_count(const Head *h) { return (h->size + SLICE_OUTPUTS - 1) / SLICE_OUTPUTS; }

/* q, s and l of one row. */
static void round_row(const Head *h, int64_t row) {
  const value *x = h->x + row * h->width;
  uint8_t *q = h->rounded + row * h->inputs;
  float low = wide(x[0]), high = low, not_finite = 0;
  for (int64_t i = 0; i < h->width; i++) {
    float one = wide(x[i]);
    low = one < low ? one : low;
    high = one > high ? one : high;
    not_finite += one * 0.0f;
  }
  float step = fmaxf((high - low) / STEPS, 1.17549435e-38f);
  for (int64_t i = 0; i < h->width; i++) q[i] = not_finite == 0 ? (uint8_t)nearbyintf((wide(x[i]) - low) / step) : 0;
  h->steps[row] = step + not_finite;
  h->lows[row] = low;
}

/* k q of OUTPUTS outputs for some rows. codes: of these outputs. */
typedef int32_t Sixteen __attribute__((vector_size(4 * OUTPUTS), aligned(CACHE_LINE)));
typedef int32_t Products[MOST_ROWS][OUTPUTS] __attribute__((aligned(CACHE_LINE)));
#if USES_TILES && defined(__AMX_INT8__)
INLINE void multiply_rounded(const int8_t *codes, const uint8_t *q, int64_t inputs, const int tiles, Products found) {
  zero_tiles(tiles);
  for (int64_t i = 0; i < inputs; i += HEAD_INPUTS, codes += HEAD_INPUTS * OUTPUTS, q += HEAD_INPUTS) {
    for (int line = 0; line < HEAD_INPUTS * OUTPUTS; line += CACHE_LINE)
      __builtin_prefetch(codes + OUTPUTS * inputs + line, 0, 2);
    _tile_loadd(4, codes, BYTES);
    _tile_loadd(5, q, inputs);
    _tile_dpbusd(0, 5, 4);
    if (tiles > 1) {
      _tile_loadd(6, q + SIDE_BY_SIDE * inputs, inputs);
      _tile_dpbusd(1, 6, 4);
    }
    if (tiles > 2) {
      _tile_loadd(5, q + 2 * SIDE_BY_SIDE * inputs, inputs);
      _tile_dpbusd(2, 5, 4);
    }
    if (tiles > 3) {
      _tile_loadd(6, q + 3 * SIDE_BY_SIDE * inputs, inputs);
      _tile_dpbusd(3, 6, 4);
    }
  }
  store_tiles(tiles, (lanes *)found);
}
static void products_of(const int8_t *codes, const uint8_t *q, int64_t inputs, int64_t rows, Products found) {
  switch ((rows + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE) {
    case 1: multiply_rounded(codes, q, inputs, 1, found); return;
    case 2: multiply_rounded(codes, q, inputs, 2, found); return;
    case 3: multiply_rounded(codes, q, inputs, 3, found); return;
    default: multiply_rounded(codes, q, inputs, 4, found); return;
  }
}
#else
/* Adds the products of four inputs of each output with those of a row. */
INLINE Sixteen plus_four(Sixteen sum, Sixteen codes, int32_t q) {
#if defined(__AVX512VNNI__)
  return (Sixteen)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(q), (__m512i)codes);
#else
  for (int shift = 0; shift < 32; shift += 8) sum += ((codes << (24 - shift)) >> 24) * ((q >> shift) & 255);
  return sum;
#endif
}
#define ROWS_AT_ONCE 8 /* also where fewer are left: there is room for more, and nobody reads their products */
static void products_of(const int8_t *codes, const uint8_t *q, int64_t inputs, int64_t rows, Products found) {
  for (int64_t first = 0; first < rows; first += ROWS_AT_ONCE) {
    Sixteen sum[ROWS_AT_ONCE] = {0};
    for (int64_t i = 0; i < inputs; i += 4) {
      const int8_t *four = codes + i * OUTPUTS;
      if (!first) __builtin_prefetch(four + OUTPUTS * inputs, 0, 2);
      for (int r = 0; r < ROWS_AT_ONCE; r++) {
        int32_t x;
        memcpy(&x, q + (first + r) * inputs + i, sizeof x);
        sum[r] = plus_four(sum[r], *(const Sixteen *)four, x);
      }
    }
    memcpy(found[first], sum, sizeof sum);
  }
}
#endif

/* The logits of a slice of the vocabulary, and their maxima. */
typedef float Logits __attribute__((vector_size(4 * OUTPUTS), aligned(4)));
static void slice_logits(const Head *h, int64_t slice, int64_t first_row, int64_t rows) {
  int64_t first = slice * SLICE_OUTPUTS, end = smaller(h->size, first + SLICE_OUTPUTS);
  Logits most[MOST_ROWS];
  for (int64_t r = 0; r < rows; r++) most[r] = (Logits){0} - INFINITY;
  for (int64_t from = first; from < end; from += OUTPUTS) {
    Products found;
    products_of(h->codes + from * h->inputs, h->rounded + first_row * h->inputs, h->inputs, rows, found);
    Logits scales = *(const Logits *)(h->scales + from), sums = *(const Logits *)(h->sums + from);
    int64_t count = smaller(OUTPUTS, end - from);
    for (int64_t r = 0; r < rows; r++) {
      Logits logits = __builtin_convertvector(*(const Sixteen *)found[r], Logits) * scales * h->steps[first_row + r];
      logits += h->lows[first_row + r] * sums;
      float *to = h->logits + (first_row + r) * h->size + from;
      if (count == OUTPUTS) {
        *(Logits *)to = logits;
      } else {
        memcpy(to, &logits, count * sizeof *to);
        for (int64_t o = count; o < OUTPUTS; o++) logits[o] = -INFINITY;
      }
      Sixteen larger = logits > most[r];
      most[r] = (Logits)((larger & (Sixteen)logits) | (~larger & (Sixteen)most[r]));
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    float top = most[r][0];
    for (int o = 1; o < OUTPUTS; o++) top = most[r][o] > top ? most[r][o] : top;
    h->maxima[(first_row + r) * slice_count(h) + slice] = top;
  }
}

/* The LARGEST-th largest maximum; -infinity if there are fewer, so that all are computed again. */
static float bound_of(const float *maxima, int64_t count) {
  float kept[LARGEST]; /* in descending order */
  int64_t number = 0;
  for (int64_t i = 0; i < count; i++) {
    if (number == LARGEST && maxima[i] <= kept[LARGEST - 1]) continue;
    int64_t place = number < LARGEST ? number++ : LARGEST - 1;
    for (; place && kept[place - 1] < maxima[i]; place--) kept[place] = kept[place - 1];
    kept[place] = maxima[i];
  }
  return number < LARGEST ? -INFINITY : kept[LARGEST - 1];
}

static float computed_again(const value *weight, const value *x, int64_t width) {
  lanes sum = {0};
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) sum += load_values(weight + i) * load_values(x + i);
  float found = total(sum);
  for (; i < width; i++) found += wide(weight[i]) * wide(x[i]);
  return found;
}

static void finish_row(const Head *h, int64_t row) {
  const float *maxima = h->maxima + row * slice_count(h);
  const value *x = h->x + row * h->width;
  float *logits = h->logits + row * h->size, bound = bound_of(maxima, slice_count(h));
  int64_t waiting = -1; /* whose weights are on their way */
  if (!(h->steps[row] < INFINITY)) return;
  for (int64_t b = 0; b < slice_count(h); b++) {
    if (maxima[b] < bound) continue;
    for (int64_t v = b * SLICE_OUTPUTS; v < smaller(h->size, (b + 1) * SLICE_OUTPUTS); v++) {
      if (logits[v] < bound) continue;
      const value *weight = h->weight + v * h->width;
      for (int64_t i = 0; i < h->width; i += CACHE_LINE / sizeof(value)) __builtin_prefetch(weight + i);
      if (waiting >= 0) logits[waiting] = computed_again(h->weight + waiting * h->width, x, h->width);
      waiting = v;
    }
  }
  if (waiting >= 0) logits[waiting] = computed_again(h->weight + waiting * h->width, x, h->width);
}

void head_logits(const Head *h) {
#pragma omp parallel num_threads(h->threads)
  {
    Thread thread = {omp_get_thread_num(), omp_get_num_threads()};
    begin_tiles();
    OWN_SHARE(h->rows, first_row, last_row);
    for (int64_t row = first_row; row < last_row; row++) round_row(h, row);
    WAIT_FOR_ALL
    OWN_SHARE(slice_count(h), first, last);
    for (int64_t slice = first; slice < last; slice++)
      for (int64_t row = 0; row < h->rows; row += MOST_ROWS)
        slice_logits(h, slice, row, smaller(MOST_ROWS, h->rows - row));
    WAIT_FOR_ALL
    for (int64_t row = first_row; row < last_row; row++) finish_row(h, row);
    end_tiles();
  }
}
