/* Draws one token of each row by inverse CDF (shared/model/sampler.py has the formulas).

       w_j = exp(z_j - max z),   token = first j with  sum_{i <= j} w_i > u S,   S = sum_j w_j

   A row is read from memory once: a slice is summed with its own maximum subtracted, and its sums are scaled when the
   row's is known. In the slice that the draw falls into, the weights are computed again. Where a logit is not a number,
   the log-prob and the entropy of its row are not either. */

#define SLICE 1024 /* tokens; a slice is summed in fp32, slices in double */

typedef struct {
  double sum, of_logits; /* of w, and of w (z - max z): max is that of the slice, then that of the row */
  float top;             /* that of the slice */
} SliceSums;

INLINE lanes shifted_logits(const float *logits, int64_t from, int64_t end, float top) {
  if (from + LANES <= end) return load(logits + from) - top;
  lanes found;
  for (int i = 0; i < LANES; i++) found[i] = from + i < end ? logits[from + i] - top : -INFINITY;
  return found;
}

static float top_of(const float *logits, int64_t size) {
  float top = -FLT_MAX; /* finite, also where all are -infinity */
  int64_t whole = size / LANES * LANES;
  if (whole) {
    lanes most = load(logits);
    for (int64_t i = LANES; i < whole; i += LANES) {
      lanes some = load(logits + i);
      most = chosen(some > most, some, most);
    }
    top = fmaxf(top, largest(most));
  }
  for (int64_t i = whole; i < size; i++) top = logits[i] > top ? logits[i] : top;
  return top;
}

static SliceSums slice_sums(const float *logits, int64_t from, int64_t end) {
  lanes sum = {0}, of_logits = {0}, zero = {0};
  float top = top_of(logits + from, end - from);
  for (int64_t i = from; i < end; i += LANES) {
    __builtin_prefetch(logits + SLICE + i);
    lanes shifted = shifted_logits(logits, i, end, top), weight = exp_of(shifted);
    sum += weight;
    /* -infinity times 0 is not a number. */
    of_logits += chosen(weight > 0.0f, weight * shifted, zero);
  }
  return (SliceSums){total(sum), total(of_logits), top};
}

/* The sums with the row's maximum subtracted. `top` stays that of the slice, which place_in_slice needs. */
static SliceSums relative_to(SliceSums slice, float top) {
  double shift = (double)slice.top - top, factor = exp(shift);
  return (SliceSums){factor * slice.sum, factor * (slice.of_logits + shift * slice.sum), slice.top};
}

static int64_t first_at(const float *logits, int64_t size, float top) {
  int64_t i = 0;
  while (i + 1 < size && logits[i] != top) i++;
  return i;
}

/* The first place in a slice where the running sum exceeds this share of it. */
static int64_t place_in_slice(const float *logits, int64_t from, int64_t end, float top, double share) {
  float weights[SLICE + LANES];
  double whole = 0, upto = 0;
  for (int64_t i = from; i < end; i += LANES) store(weights + i - from, exp_of(shifted_logits(logits, i, end, top)));
  for (int64_t i = 0; i < end - from; i++) whole += weights[i];
  /* Rounding might put the share at the whole, which no sum exceeds. */
  double limit = fmin(share * whole, nextafter(whole, 0));
  for (int64_t i = 0; i < end - from; i++)
    if ((upto += weights[i]) > limit) return from + i;
  return end - 1;
}

static void draw_row(const float *logits, int64_t size, const double *uniform, SliceSums *slices, int64_t *id,
                     float *logprob, float *entropy) {
  int64_t count = (size + SLICE - 1) / SLICE, slice = 0;
  float top = -FLT_MAX;
  double sum = 0, of_logits = 0, before = 0;
  for (int64_t b = 0; b < count; b++) {
    slices[b] = slice_sums(logits, b * SLICE, smaller(size, (b + 1) * SLICE));
    top = slices[b].top > top ? slices[b].top : top;
  }
  for (int64_t b = 0; b < count; b++) {
    slices[b] = relative_to(slices[b], top);
    sum += slices[b].sum;
    of_logits += slices[b].of_logits;
  }
  if (uniform) {
    double limit = *uniform * sum;
    while (slice + 1 < count && before + slices[slice].sum <= limit) before += slices[slice++].sum;
    double share = (limit - before) / slices[slice].sum;
    *id = place_in_slice(logits, slice * SLICE, smaller(size, (slice + 1) * SLICE), slices[slice].top, share);
  } else {
    *id = first_at(logits, size, top);
  }
  *logprob = logits[*id] - top - log(sum);
  *entropy = log(sum) - of_logits / sum;
}

/* logits: [rows][size]. uniforms: [rows], or 0 for the most likely tokens. slices: room for each thread. */
void draw(const float *logits, int64_t rows, int64_t size, const double *uniforms, int64_t threads, SliceSums *slices,
          int64_t *ids, float *logprobs, float *entropies) {
  int64_t count = (size + SLICE - 1) / SLICE;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; row++)
    draw_row(logits + row * size, size, uniforms ? uniforms + row : 0, slices + omp_get_thread_num() * count,
             ids + row, logprobs + row, entropies + row);
}
