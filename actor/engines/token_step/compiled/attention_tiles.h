/* Attention by tiles of AMX: of all queries of one row that have room in a vector, some heads of keys at once. Sums and
   the softmax are as in attention_vectors.h, but for their order.

       scores, weights   [columns][TILE], a lane for each query; a query is 0 beside keys that are not its own
       pairs             weights of two columns in a word, transposed: [TILE queries][TILE pairs]

   Keys are left tiles as they lie in the cache. Values are interleaved two and two, as right tiles need them. A tile
   adds its columns in another order than they have, so a row's columns are counted from its oldest one: its numbers do
   not depend on when it began. */

#if USES_TILES
#define MOST_HEADS 8 /* of keys at once */
#define MIXED 64     /* values of a head that are mixed at once; a head's size is a multiple of it */
#define PAIRED 32    /* columns of a tile of weights */

/* Columns that a row sees: `count` of them from `first` on; after the last of the ring comes number 0. */
typedef struct {
  const value *keys, *values; /* of the first of the heads: [ring][size] */
  float *scores;              /* [count, a multiple of PAIRED][TILE] */
  int64_t head_apart, first, count, ring;
  int64_t next_row; /* from these keys to those of the next row, which are fetched ahead; 0: nothing is */
} Span;

INLINE int64_t column_of(const Span *span, int64_t i) {
  int64_t column = span->first + i;
  return column < span->ring ? column : column - span->ring;
}
INLINE int64_t span_floats(int64_t columns) { return (columns + PAIRED - 1) / PAIRED * PAIRED * TILE; }

/* Without the first columns that the row does not see. It sees all behind them. bias: [ring]; none: 0 */
INLINE Span without_hidden(Span span, const float *bias) {
  while (bias && span.count && bias[span.first] == -INFINITY) {
    span.first = column_of(&span, 1);
    span.count--;
  }
  return span;
}

/* What a column has of a head: the processor does not predict where the next are. */
INLINE void prefetch(const value *at, int64_t size) {
  for (int64_t i = 0; i < size; i += CACHE_LINE / sizeof(value)) __builtin_prefetch(at + i, 0, 2);
}

/* The keys of TILE columns, one below the other: where they are, or a copy if the ring ends before. Behind the last
   column is anything; nobody reads its scores. */
INLINE const value *keys_of(const Span *span, int64_t i, int64_t head, int64_t size, value *copy) {
  const value *keys = span->keys + head * span->head_apart;
  int64_t count = smaller(TILE, span->count - i), first = column_of(span, i);
  for (int64_t c = 0; c < count; c++)
    prefetch(span->values + head * span->head_apart + column_of(span, i + c) * size, size);
  if (first + TILE <= span->ring) return keys + first * size;
  for (int64_t c = 0; c < count; c++)
    memcpy(copy + c * size, keys + column_of(span, i + c) * size, size * sizeof(value));
  return copy;
}

/* queries: [heads][size / 2][LANES] words. */
INLINE void score_some(
    const Span *span, int64_t i, const words *queries, int64_t heads, int64_t size, const int tiles) {
  value copies[4][TILE * LARGEST_HEAD] __attribute__((aligned(CACHE_LINE)));
  zero_tiles(tiles);
  for (int64_t head = 0; head < heads; head++) {
    const value *keys[4];
    for (int t = 0; t < tiles; t++) keys[t] = keys_of(span, i + t * TILE, head, size, copies[t]);
    STORES_BEFORE_TILES(copies);
    for (int64_t d = 0; d < size; d += TILE_INPUTS) {
      _tile_loadd(6, queries + (head * size + d) / 2, BYTES);
      _tile_loadd(4, keys[0] + d, size * sizeof(value));
      _tile_dpbf16ps(0, 4, 6);
      if (tiles > 1) {
        _tile_loadd(5, keys[1] + d, size * sizeof(value));
        _tile_dpbf16ps(1, 5, 6);
      }
      if (tiles > 2) {
        _tile_loadd(4, keys[2] + d, size * sizeof(value));
        _tile_dpbf16ps(2, 4, 6);
      }
      if (tiles > 3) {
        _tile_loadd(5, keys[3] + d, size * sizeof(value));
        _tile_dpbf16ps(3, 5, 6);
      }
    }
    STORES_BEFORE_TILES(copies);
  }
  store_tiles(tiles, (lanes *)(span->scores + i * TILE));
}

INLINE void score_span(const Span *span, const words *queries, int64_t heads, int64_t size) {
  int64_t i = 0;
  for (; i + 3 * TILE < span->count; i += 4 * TILE) score_some(span, i, queries, heads, size, 4);
  for (; i + TILE < span->count; i += 2 * TILE) score_some(span, i, queries, heads, size, 2);
  if (i < span->count) score_some(span, i, queries, heads, size, 1);
}

/* 16 vectors of 16 words. */
INLINE void transpose(words *x) {
#define EXCHANGE(half, ...)                                                                      \
  for (int i = 0; i < LANES; i++) {                                                              \
    static const words near = {__VA_ARGS__};                                                     \
    if (i & half) continue;                                                                      \
    words a = x[i], b = x[i + half];                                                             \
    x[i] = __builtin_shuffle(a, b, near);                                                        \
    x[i + half] = __builtin_shuffle(a, b, near + half);                                          \
  }
  EXCHANGE(8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
  EXCHANGE(4, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
  EXCHANGE(2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
  EXCHANGE(1, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#undef EXCHANGE
}

/* In place: the weights of PAIRED columns become a tile. */
INLINE void pair_weights(float *weights, int64_t count, lanes share) {
  words pairs[TILE];
  lanes none = {0};
  for (int64_t c = 0; c < PAIRED; c += 2) {
    lanes even = c < count ? load(weights + c * TILE) * share : none;
    lanes odd = c + 1 < count ? load(weights + (c + 1) * TILE) * share : none;
    pack((float *)pairs, c, even, odd);
  }
  transpose(pairs);
  memcpy(weights, pairs, sizeof pairs);
}

INLINE void softmax_of_spans(const Span *spans, float scale) {
  lanes most = (lanes){0} - INFINITY, sum = {0};
  for (int k = 0; k < 2; k++)
    for (int64_t i = 0; i < spans[k].count; i++) {
      lanes some = load(spans[k].scores + i * TILE) * scale;
      store(spans[k].scores + i * TILE, some);
      most = chosen(some > most, some, most);
    }
  for (int k = 0; k < 2; k++)
    for (int64_t i = 0; i < spans[k].count; i++) {
      lanes weight = exp_of(load(spans[k].scores + i * TILE) - most);
      store(spans[k].scores + i * TILE, weight);
      sum += weight;
    }
  for (int k = 0; k < 2; k++)
    for (int64_t i = 0; i < spans[k].count; i += PAIRED)
      pair_weights(spans[k].scores + i * TILE, spans[k].count - i, 1.0f / sum);
}

/* MIXED values of PAIRED columns, two columns side by side; zeros behind the last. Fetches the next row's keys ahead,
   because the processor does not predict where they are. */
typedef uint16_t halves __attribute__((vector_size(64), aligned(2)));
INLINE void pair_values(const Span *span, int64_t i, int64_t from, int64_t size, words *to) {
#define BESIDE(k) k, 32 + k
#define FOUR_BESIDE(k) BESIDE(k), BESIDE(k + 1), BESIDE(k + 2), BESIDE(k + 3)
  static const halves near = {FOUR_BESIDE(0), FOUR_BESIDE(4), FOUR_BESIDE(8), FOUR_BESIDE(12)};
  static const value none[MIXED];
  const value *values = span->values + from, *next_keys = span->next_row ? span->keys + span->next_row + from : 0;
  for (int64_t c = 0; c < PAIRED; c += 2) {
    int64_t of_even = column_of(span, i + c) * size, of_odd = column_of(span, i + c + 1) * size;
    const value *even = i + c < span->count ? values + of_even : none;
    const value *odd = i + c + 1 < span->count ? values + of_odd : none;
    if (next_keys) prefetch(next_keys + of_even, MIXED), prefetch(next_keys + of_odd, MIXED);
    for (int i = 0; i < MIXED; i += 32, to += 2) {
      halves a = *(const halves *)(even + i), b = *(const halves *)(odd + i);
      to[0] = (words)__builtin_shuffle(a, b, near);
      to[1] = (words)__builtin_shuffle(a, b, near + 16);
    }
  }
#undef BESIDE
#undef FOUR_BESIDE
}

/* Sums of weights times MIXED values of a head, from this feature on: [MIXED / LANES][TILE] */
INLINE void mix_spans(const Span *spans, int64_t head, int64_t size, int64_t feature, lanes *mixed) {
  words values[TILE * MIXED / LANES];
  zero_tiles(4);
  for (int k = 0; k < 2; k++)
    for (int64_t i = 0; i < spans[k].count; i += PAIRED) {
      pair_values(spans + k, i, head * spans[k].head_apart + feature, size, values);
      STORES_BEFORE_TILES(values);
      _tile_loadd(4, spans[k].scores + i * TILE, BYTES);
      _tile_loadd(5, values, MIXED * sizeof(float));
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, values + 1, MIXED * sizeof(float));
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(5, values + 2, MIXED * sizeof(float));
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(6, values + 3, MIXED * sizeof(float));
      _tile_dpbf16ps(3, 4, 6);
      STORES_BEFORE_TILES(values);
    }
  store_tiles(4, mixed);
}
#else
INLINE int64_t span_floats(int64_t columns) { return 0; }
#endif
