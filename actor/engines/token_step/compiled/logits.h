/* Finishes logits that were multiplied in 8 bits (actor/engines/token_step/eight_bit.py has the formulas).

       z = s p + l r,   then W x for the largest of a row

   The LARGEST largest are in the blocks of COLUMNS columns with the LARGEST largest maxima. So what is at smaller as large
   as the smallest of these maxima is computed again, in fp32: all of the LARGEST, and some more. */

#define COLUMNS 128
#define LARGEST 64

/* The smallest of the LARGEST largest; all are, if there are fewer. */
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

static float exact(const value *weight, const value *x, int64_t width) {
  lanes sum = {0};
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) sum += load_values(weight + i) * load_values(x + i);
  float found = total(sum);
  for (; i < width; i++) found += wide(weight[i]) * wide(x[i]);
  return found;
}

/* Returns the largest. */
static float finish_block(float *logits, const float *sums, int64_t count, float step, float low) {
  float most = -INFINITY;
  for (int64_t i = 0; i < count; i++) {
    logits[i] = logits[i] * step + low * sums[i];
    most = logits[i] > most ? logits[i] : most;
  }
  return most;
}

static void finish_row(float *logits, const float *sums, int64_t size, float step, float low, const value *weight,
                       const value *x, int64_t width, float *maxima) {
  int64_t count = (size + COLUMNS - 1) / COLUMNS;
  for (int64_t b = 0; b < count; b++) {
    int64_t from = b * COLUMNS;
    maxima[b] = finish_block(logits + from, sums + from, smaller(COLUMNS, size - from), step, low);
  }
  float bound = bound_of(maxima, count);
  for (int64_t b = 0; b < count; b++) {
    if (maxima[b] < bound) continue;
    for (int64_t i = b * COLUMNS; i < smaller(size, (b + 1) * COLUMNS); i++)
      if (logits[i] >= bound) logits[i] = exact(weight + i * width, x, width);
  }
}

/* logits: [rows][size] p, in place. steps, lows: [rows]. sums: [size]. weight: [size][width]. x: [rows][width]. maxima:
   room for a block of each row. */
void finish_logits(float *logits, int64_t rows, int64_t size, const float *steps, const float *lows, const float *sums,
                   const value *weight, const value *x, int64_t width, float *maxima, int64_t threads) {
  int64_t count = (size + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; row++)
    finish_row(logits + row * size, sums, size, steps[row], lows[row], weight, x + row * width, width,
               maxima + row * count);
}
