/* Attention of one query head of one row to the tokens so far: those of its prompt, which other rows share, then its own.

       scores = scale (q . k) + bias      weights = round(softmax(scores))      mixed = round(sum of weights v)

   Keys and values are in fp32, whatever the weights are (actor/engines/kv_cache.py). */

#define MOST_PARTS 16 /* vectors of a key */

/* columns: of one head, `parts` vectors each. scores: room for LANES more than there are columns. */
INLINE void score(const float *keys, int64_t columns, const float *query, const int parts, float *scores) {
  lanes q[MOST_PARTS];
  for (int p = 0; p < parts; p++) q[p] = load(query + p * LANES);
  for (int64_t first = 0; first < columns; first += LANES) {
    lanes sums[LANES];
    for (int c = 0; c < LANES; c++) {
      const float *key = keys + least(first + c, columns - 1) * parts * LANES;
      sums[c] = (lanes){0};
      for (int p = 0; p < parts; p++) sums[c] += q[p] * load(key + p * LANES);
    }
    store(scores + first, totals(sums));
  }
}

/* Adds to `found`. Even and odd columns have sums of their own, so that additions need not wait for each other. */
INLINE void mix(const float *values, int64_t columns, const float *weights, const int parts, lanes *found) {
  lanes sum[2][MOST_PARTS];
  for (int p = 0; p < parts; p++) sum[0][p] = found[p], sum[1][p] = (lanes){0};
  for (int64_t c = 0; c + 2 <= columns; c += 2)
    for (int i = 0; i < 2; i++)
      for (int p = 0; p < parts; p++) sum[i][p] += weights[c + i] * load(values + ((c + i) * parts + p) * LANES);
  if (columns % 2)
    for (int p = 0; p < parts; p++) sum[0][p] += weights[columns - 1] * load(values + ((columns - 1) * parts + p) * LANES);
  for (int p = 0; p < parts; p++) found[p] = sum[0][p] + sum[1][p];
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
    lanes some = power(load(scores + c) - top);
    store(scores + c, some);
    sum += some;
  }
  float share = 1.0f / total(sum);
  for (int64_t c = 0; c < filled; c += LANES) store(scores + c, rounded(load(scores + c) * share));
}
