/* Attention by vectors: of the queries of one row that share a head of keys, to the tokens so far. Those of its prompt,
   which other rows share, come first, then its own.

       scores = scale (q . k) + bias      weights = round(softmax(scores))      mixed = round(sum of weights v)

   Sums are in fp32. */

#define LARGEST_HEAD 256 /* numbers of a key */
#define MOST_VECTORS (LARGEST_HEAD / LANES) /* vectors of one */

/* Some columns of a head, `vectors` vectors each, in fp32. All queries that share them use them from the cache. */
typedef lanes Columns[LANES * MOST_VECTORS];
INLINE int widen(const value *from, int64_t first, int64_t columns, const int vectors, Columns to) {
  int count = smaller(LANES, columns - first);
  for (int c = 0; c < count; c++)
    for (int p = 0; p < vectors; p++) to[c * vectors + p] = load_values(from + ((first + c) * vectors + p) * LANES);
  return count;
}

INLINE int64_t score_stride(int64_t columns) { return (columns / LANES + 2) * LANES; }

/* query: [queries][vectors]. scores: [queries], one every `stride` floats, where LANES more than columns have room. */
INLINE void score(
    const value *keys, int64_t columns, const lanes *query, int64_t queries, const int vectors, float *scores,
    int64_t stride) {
  Columns key;
  for (int64_t first = 0; first < columns; first += LANES) {
    widen(keys, first, columns, vectors, key);
    for (int64_t q = 0; q < queries; q++) {
      lanes sums[LANES];
      /* Behind the last column are old values; their scores are overwritten. */
      for (int c = 0; c < LANES; c++) {
        sums[c] = (lanes){0};
        for (int p = 0; p < vectors; p++) sums[c] += query[q * vectors + p] * key[c * vectors + p];
      }
      store(scores + q * stride + first, totals(sums));
    }
  }
}

/* Of one or two queries: with two, additions need not wait for each other. */
INLINE void mix_some(
    const lanes *columns, int count, const float *weights, int64_t stride, const int queries, const int vectors,
    lanes *found) {
  lanes sum[2][MOST_VECTORS];
  for (int q = 0; q < queries; q++)
    for (int p = 0; p < vectors; p++) sum[q][p] = found[q * vectors + p];
  for (int c = 0; c < count; c++)
    for (int q = 0; q < queries; q++)
      for (int p = 0; p < vectors; p++) sum[q][p] += weights[q * stride + c] * columns[c * vectors + p];
  for (int q = 0; q < queries; q++)
    for (int p = 0; p < vectors; p++) found[q * vectors + p] = sum[q][p];
}

/* Adds to found: [queries][vectors]. */
INLINE void mix(
    const value *values, int64_t columns, const float *weights, int64_t stride, int64_t queries, const int vectors,
    lanes *found) {
  Columns one;
  for (int64_t first = 0; first < columns; first += LANES) {
    int count = widen(values, first, columns, vectors, one);
    int64_t q = 0;
    for (; q + 2 <= queries; q += 2)
      mix_some(one, count, weights + q * stride + first, stride, 2, vectors, found + q * vectors);
    if (q < queries) mix_some(one, count, weights + q * stride + first, stride, 1, vectors, found + q * vectors);
  }
}

/* In place, over `columns` of them; those behind, up to a whole vector, become 0. */
INLINE void softmax(float *scores, int64_t columns, float scale, const float *bias) {
  int64_t filled = (columns + LANES - 1) / LANES * LANES;
  for (int64_t c = 0; c < columns; c++) scores[c] = scores[c] * scale + (bias ? bias[c] : 0.0f);
  for (int64_t c = columns; c < filled; c++) scores[c] = -INFINITY;
  lanes most = load(scores), sum = {0};
  for (int64_t c = LANES; c < filled; c += LANES) {
    lanes some = load(scores + c);
    most = chosen(some > most, some, most);
  }
  float top = largest(most);
  for (int64_t c = 0; c < filled; c += LANES) {
    lanes some = exp_of(load(scores + c) - top);
    store(scores + c, some);
    sum += some;
  }
  float share = 1.0f / total(sum);
  for (int64_t c = 0; c < filled; c += LANES) store(scores + c, rounded(load(scores + c) * share));
}
