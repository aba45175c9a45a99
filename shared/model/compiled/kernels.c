/* What an update computes between its matrix products; what a function reads again is in the cache. The formulas are in
   layer_math.py and shared/model/head.py. All matrices are row after row. Sums are in fp32, in an order that depends on
   neither the number of threads nor the other rows. kernels.py and head.py call these functions. */

#define WIDEST
#include "lanes.h"
#include "tiles.h"

#define FEW 8192 /* values; for less, waking a second thread takes longer than the work */
static int64_t useful(int64_t threads, int64_t values) { return values < FEW ? 1 : threads; }

INLINE void store_values(value *to, lanes x) {
#ifdef IN_BF16
  words bits = rounded_bits(x) >> 16;
#if defined(__x86_64__) && LANES == 16
  *(narrow_lanes *)to = (narrow_lanes)_mm512_cvtepi32_epi16((__m512i)bits);
#else
  *(narrow_lanes *)to = __builtin_convertvector(bits, narrow_lanes);
#endif
#else
  store(to, x);
#endif
}

/* `count` of them, the others 0. */
INLINE lanes load_some(const value *from, int64_t count) {
  if (count >= LANES) return load_values(from);
  lanes found = {0};
  for (int64_t i = 0; i < count; i++) found[i] = wide(from[i]);
  return found;
}
INLINE void store_some(value *to, lanes x, int64_t count) {
  if (count >= LANES) store_values(to, x);
  else
    for (int64_t i = 0; i < count; i++) to[i] = narrow(x[i]);
}

INLINE lanes sigmoid(lanes x) { return 1.0f / (1.0f + exp_of(-x)); }

#define BLOCK 32 /* rows and columns, few enough that both matrices stay in the nearest cache */

/* [width][rows] -> [rows][width] */
void row_major(const value *x, value *out, int64_t rows, int64_t width, int64_t threads) {
  int64_t across = (width + BLOCK - 1) / BLOCK, blocks = (rows + BLOCK - 1) / BLOCK * across;
#pragma omp parallel for schedule(static) num_threads(useful(threads, rows * width))
  for (int64_t block = 0; block < blocks; block++) {
    int64_t row = block / across * BLOCK, column = block % across * BLOCK;
    int64_t last_row = smaller(row + BLOCK, rows), last_column = smaller(column + BLOCK, width);
    for (int64_t i = row; i < last_row; i++)
      for (int64_t j = column; j < last_column; j++) out[i * width + j] = x[j * rows + i];
  }
}

/* Norms */

static float inverse_rms(const value *x, int64_t width, double eps) {
  lanes even = {0}, odd = {0};
  for (int64_t i = 0; i < width; i += 2 * LANES) {
    lanes a = load_some(x + i, width - i), b = {0};
    if (i + LANES < width) b = load_some(x + i + LANES, width - i - LANES);
    even += a * a;
    odd += b * b;
  }
  return 1.0f / sqrtf(total(even + odd) / width + (float)eps);
}

/* y = w r x */
void norm(const value *x, const value *weight, value *y, int64_t rows, int64_t width, double eps, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(useful(threads, rows * width))
  for (int64_t row = 0; row < rows; row++) {
    const value *from = x + row * width;
    float inverse = inverse_rms(from, width, eps);
    for (int64_t i = 0; i < width; i += LANES) {
      int64_t left = width - i;
      lanes found = rounded(load_some(from + i, left) * inverse) * load_some(weight + i, left);
      store_some(y + row * width + i, found, left);
    }
  }
}

/* dx = r (g - r^2 x mean(g x)) + added, g = w dy; added may be 0 */
void norm_gradient(const value *x, const value *weight, const value *grad, const value *added, value *out,
                   int64_t rows, int64_t width, double eps, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(useful(threads, rows * width))
  for (int64_t row = 0; row < rows; row++) {
    const value *from = x + row * width, *dy = grad + row * width;
    float inverse = inverse_rms(from, width, eps);
    lanes sum = {0};
    for (int64_t i = 0; i < width; i += LANES) {
      int64_t left = width - i;
      sum += load_some(from + i, left) * load_some(weight + i, left) * load_some(dy + i, left);
    }
    float share = inverse * inverse * total(sum) / width;
    for (int64_t i = 0; i < width; i += LANES) {
      int64_t left = width - i;
      lanes g = load_some(weight + i, left) * load_some(dy + i, left);
      lanes found = (g - load_some(from + i, left) * share) * inverse;
      if (added) found += load_some(added + row * width + i, left);
      store_some(out + row * width + i, found, left);
    }
  }
}

/* The product of the gate */

/* silu(u) v */
void gated(const value *gate, const value *up, value *out, int64_t count, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(useful(threads, count))
  for (int64_t i = 0; i < count; i += LANES) {
    int64_t left = count - i;
    lanes u = load_some(gate + i, left);
    store_some(out + i, rounded(u * sigmoid(u)) * load_some(up + i, left), left);
  }
}

/* h = silu(u) v,   du = silu'(u) v dh,   dv = silu(u) dh.   grad: dh, then h */
void gated_gradients(const value *gate, const value *up, value *grad, value *of_gate, value *of_up, int64_t count,
                     int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(useful(threads, count))
  for (int64_t i = 0; i < count; i += LANES) {
    int64_t left = count - i;
    lanes u = load_some(gate + i, left), v = load_some(up + i, left), dh = load_some(grad + i, left);
    lanes slope = sigmoid(u), active = rounded(u * slope);
    store_some(grad + i, active * v, left);
    store_some(of_up + i, active * dh, left);
    store_some(of_gate + i, v * dh * (slope + u * slope * (1.0f - slope)), left);
  }
}

/* Heads */

/* Rows, and the place of each one's heads among those of padded sequences: [sequences][heads][columns][size] */
typedef struct {
  const value *cos, *sin; /* [rows][size]; the sine of the first half is negative. None: 0 */
  const int64_t *places;  /* of each row, `length` places for a sequence; every place has a row: 0 */
  int64_t rows, heads, size, length, before, columns; /* before: columns that come first */
} Heads;

INLINE int64_t head_offset(const Heads *h, int64_t row) {
  int64_t place = h->places ? h->places[row] : row;
  return (place / h->length * h->heads * h->columns + h->before + place % h->length) * h->size;
}

/* Forward, each product is rounded, as in the modules. */
static void turned(const Heads *h, int64_t row, const value *from, value *to, int forward) {
  int64_t half = h->size / 2;
  const value *cos = h->cos + row * h->size, *sin = h->sin + row * h->size;
  for (int64_t i = 0; i < half; i += LANES) {
    int64_t left = half - i;
    lanes a = load_some(from + i, left), b = load_some(from + half + i, left);
    lanes cos_a = load_some(cos + i, left), cos_b = load_some(cos + half + i, left);
    lanes sin_a = load_some(sin + i, left), sin_b = load_some(sin + half + i, left);
    if (forward) {
      store_some(to + i, rounded(a * cos_a) + rounded(b * sin_a), left);
      store_some(to + half + i, rounded(b * cos_b) + rounded(a * sin_b), left);
    } else {
      store_some(to + i, a * cos_a + b * sin_b, left);
      store_some(to + half + i, b * cos_b + a * sin_a, left);
    }
  }
}

/* [rows][heads][size] -> padded */
void to_heads(const Heads *h, const value *rows, value *padded, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(useful(threads, h->rows * h->heads * h->size))
  for (int64_t row = 0; row < h->rows; row++)
    for (int64_t head = 0; head < h->heads; head++) {
      const value *from = rows + (row * h->heads + head) * h->size;
      value *to = padded + head_offset(h, row) + head * h->columns * h->size;
      if (h->cos) turned(h, row, from, to, 1);
      else memcpy(to, from, h->size * sizeof(value));
    }
}

/* padded -> [rows][heads][size]: the gradient of `to_heads` */
void from_heads(const Heads *h, const value *padded, value *rows, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(useful(threads, h->rows * h->heads * h->size))
  for (int64_t row = 0; row < h->rows; row++)
    for (int64_t head = 0; head < h->heads; head++) {
      const value *from = padded + head_offset(h, row) + head * h->columns * h->size;
      value *to = rows + (row * h->heads + head) * h->size;
      if (h->cos) turned(h, row, from, to, 0);
      else memcpy(to, from, h->size * sizeof(value));
    }
}

/* Attention */

typedef uint8_t flags __attribute__((vector_size(LANES), aligned(1)));

/* scale scores, and -infinity where the mask is 0 and beyond the last column */
INLINE lanes visible_scores(const float *scores, const uint8_t *seen, int64_t count, float scaling) {
  lanes nothing = (lanes){0} - INFINITY;
  if (count >= LANES) {
    integers where = __builtin_convertvector(*(const flags *)seen, integers) != 0;
    return chosen(where, load(scores) * scaling, nothing);
  }
  for (int64_t i = 0; i < count; i++)
    if (seen[i]) nothing[i] = scores[i] * scaling;
  return nothing;
}

/* softmax(scale scores + mask): scores [sequences][heads][queries][columns] fp32; mask [sequences][queries][columns] */
void attention_weights(const float *scores, const uint8_t *mask, value *weights, int64_t sequences, int64_t heads,
                       int64_t queries, int64_t columns, double scaling, int64_t threads) {
  int64_t rows = sequences * heads * queries, chunks = (columns + LANES - 1) / LANES;
#pragma omp parallel for schedule(static) num_threads(useful(threads, rows * columns))
  for (int64_t row = 0; row < rows; row++) {
    const float *from = scores + row * columns;
    const uint8_t *seen = mask + (row / (heads * queries) * queries + row % queries) * columns;
    lanes found[chunks], most = (lanes){0} - INFINITY, sum = {0};
    for (int64_t c = 0; c < chunks; c++) {
      int64_t at = c * LANES;
      found[c] = visible_scores(from + at, seen + at, columns - at, scaling);
      most = chosen(found[c] > most, found[c], most);
    }
    float top = largest(most);
    for (int64_t c = 0; c < chunks; c++) sum += found[c] = exp_of(found[c] - top);
    float share = 1.0f / total(sum);
    for (int64_t c = 0; c < chunks; c++)
      store_some(weights + row * columns + c * LANES, found[c] * share, columns - c * LANES);
  }
}

/* dS = scale P (dP - sum(P dP)), over dP: [rows][columns] */
void score_gradients(const value *weights, value *grads, int64_t rows, int64_t columns, double scaling,
                     int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(useful(threads, rows * columns))
  for (int64_t row = 0; row < rows; row++) {
    const value *p = weights + row * columns;
    value *dp = grads + row * columns;
    lanes sum = {0};
    for (int64_t c = 0; c < columns; c += LANES) sum += load_some(p + c, columns - c) * load_some(dp + c, columns - c);
    float whole = total(sum);
    for (int64_t c = 0; c < columns; c += LANES) {
      int64_t left = columns - c;
      lanes found = load_some(p + c, left) * (load_some(dp + c, left) - whole) * (float)scaling;
      store_some(dp + c, found, left);
    }
  }
}

/* The vocabulary */

/* Sums of n rows that are carried from tile to tile (head.py): m, s, u, the target's logit, and f of the last tile. */
typedef struct {
  const value *product;   /* [rows][columns] of W h, less the center of the row */
  const value *center;    /* [rows]; none: 0 */
  const int64_t *targets; /* [rows] */
  float *largest, *total, *spread, *target, *fade;
  value *shares; /* [rows][columns] exp(z - m) without the target; not wanted: 0 */
  int64_t rows, columns, start; /* the first column of the tile */
  double temperature;
} Tile;

static void add_row(const Tile *t, int64_t row) {
  int64_t columns = t->columns, chunks = (columns + LANES - 1) / LANES, inside = t->targets[row] - t->start;
  const value *product = t->product + row * columns;
  float center = t->center ? wide(t->center[row]) : 0.0f, temperature = t->temperature;
  lanes logits[chunks], most = (lanes){0} - INFINITY, sum = {0}, spread = {0};
  for (int64_t c = 0; c < chunks; c++) {
    int64_t left = columns - c * LANES;
    lanes z = (load_some(product + c * LANES, left) + center) / temperature;
    for (int64_t i = left; i < LANES; i++) z[i] = -INFINITY;
    most = chosen(z > most, z, most);
    logits[c] = z;
  }
  if (inside >= 0 && inside < columns) t->target[row] = logits[inside / LANES][inside % LANES];
  float before = t->largest[row], top = fmaxf(before, largest(most)), fade = expf(before - top);
  for (int64_t c = 0; c < chunks; c++) {
    lanes shifted = logits[c] - top, share = exp_of(shifted);
    sum += share;
    spread += chosen(share > 0.0f, share * shifted, (lanes){0});
    if (t->shares) store_some(t->shares + row * columns + c * LANES, share, columns - c * LANES);
  }
  if (t->shares && inside >= 0 && inside < columns) t->shares[row * columns + inside] = narrow(0.0f);
  t->spread[row] = (t->spread[row] + t->total[row] * (before - top)) * fade + total(spread);
  t->total[row] = t->total[row] * fade + total(sum);
  t->largest[row] = top;
  t->fade[row] = fade;
}

void add_tile(const Tile *tile, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(useful(threads, tile->rows * tile->columns))
  for (int64_t row = 0; row < tile->rows; row++) add_row(tile, row);
}

/* y = f y + x: [rows][width] */
void add_faded(float *y, const value *x, const float *fade, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(useful(threads, rows * width))
  for (int64_t row = 0; row < rows; row++) {
    float *to = y + row * width;
    for (int64_t i = 0; i + LANES <= width; i += LANES)
      store(to + i, load(to + i) * fade[row] + load_values(x + row * width + i));
    for (int64_t i = width / LANES * LANES; i < width; i++) to[i] = to[i] * fade[row] + wide(x[row * width + i]);
  }
}

/* Gradients of adapters */

#if USES_TILES
#define RANKS 16

/* The rows of `a` as left tiles: [groups of ranks][groups of rows][RANKS][TILE_INPUTS]; what is left over is 0. */
static void pack_left(const value *a, value *left, int64_t rows, int64_t rank, Thread thread) {
  int64_t groups = (rank + RANKS - 1) / RANKS, steps = (rows + TILE_INPUTS - 1) / TILE_INPUTS;
  OWN_SHARE(steps, first, last);
  for (int64_t group = 0; group < groups; group++)
    for (int64_t step = first; step < last; step++) {
      value *tile = left + (group * steps + step) * RANKS * TILE_INPUTS;
      for (int64_t i = 0; i < TILE_INPUTS; i++)
        for (int64_t j = 0; j < RANKS; j++) {
          int64_t row = step * TILE_INPUTS + i, r = group * RANKS + j;
          tile[j * TILE_INPUTS + i] = row < rows && r < rank ? a[row * rank + r] : 0;
        }
    }
}

/* TILE_INPUTS rows of 32 columns -> two right tiles. */
INLINE void pack_right(const value *x, int64_t rows, int64_t width, __mmask32 columns, value *right) {
  const __m512i near = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                        5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i far = _mm512_add_epi16(near, _mm512_set1_epi16(16));
  for (int64_t i = 0; i < TILE_INPUTS; i += 2) {
    const value *from = x + i * width;
    __m512i a = _mm512_maskz_loadu_epi16(i < rows ? columns : 0, from);
    __m512i b = _mm512_maskz_loadu_epi16(i + 1 < rows ? columns : 0, from + width);
    /* The processor does not foresee the next columns of so many rows. */
    _mm_prefetch(from + 32, _MM_HINT_T0);
    _mm_prefetch(from + width + 32, _MM_HINT_T0);
    _mm512_store_si512(right + i * 16, _mm512_permutex2var_epi16(a, near, b));
    _mm512_store_si512(right + (TILE_INPUTS + i) * 16, _mm512_permutex2var_epi16(a, far, b));
  }
}

/* 16 rows of the result in 32 columns. */
static void add_rows(const value *left, const value *x, int64_t rows, int64_t width, int64_t count, float *sums) {
  value right[2 * TILE_INPUTS * 16] __attribute__((aligned(CACHE_LINE)));
  __mmask32 columns = count < 32 ? (1u << count) - 1 : ~0u;
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t row = 0; row < rows; row += TILE_INPUTS) {
    pack_right(x + row * width, rows - row, width, columns, right);
    STORES_BEFORE_TILES(right);
    _tile_loadd(2, left + row * RANKS, CACHE_LINE);
    _tile_loadd(3, right, CACHE_LINE);
    _tile_dpbf16ps(0, 2, 3);
    _tile_loadd(4, right + TILE_INPUTS * 16, CACHE_LINE);
    _tile_dpbf16ps(1, 2, 4);
    STORES_BEFORE_TILES(right);
  }
  _tile_stored(0, sums, 2 * CACHE_LINE);
  _tile_stored(1, sums + 16, 2 * CACHE_LINE);
}

/* out = scale a^T x in fp32: a [rows][rank], x [rows][width]. Result (r, i) is at out[r * row_apart + i * apart]. left:
   room for the tiles of `pack_left`. */
void transposed_product(const value *a, const value *x, float *out, value *left, int64_t rows, int64_t rank,
                        int64_t width, int64_t row_apart, int64_t apart, double scale, int64_t threads) {
#pragma omp parallel num_threads(useful(threads, rows * width))
  {
    Thread thread = {omp_get_thread_num(), omp_get_num_threads()};
    int64_t blocks = (width + 31) / 32, steps = (rows + TILE_INPUTS - 1) / TILE_INPUTS;
    OWN_SHARE(blocks, first, last);
    float sums[RANKS * 32] __attribute__((aligned(CACHE_LINE)));
    pack_left(a, left, rows, rank, thread);
    WAIT_FOR_ALL
    begin_tiles();
    for (int64_t b = first; b < last; b++)
      for (int64_t r = 0; r < rank; r += RANKS) {
        int64_t count = smaller(32, width - b * 32), ranks = smaller(RANKS, rank - r);
        add_rows(left + r * steps * TILE_INPUTS, x + b * 32, rows, width, count, sums);
        for (int64_t j = 0; j < ranks; j++)
          for (int64_t i = 0; i < count; i++)
            out[(r + j) * row_apart + (b * 32 + i) * apart] = (float)scale * sums[j * 32 + i];
      }
    end_tiles();
  }
}
#endif
