/* Draws one token of each row by inverse CDF (shared/model/sampler.py has the formulas).

       w_j = exp(z_j - max z),   token = first j with  sum_{i <= j} w_i > u S,   S = sum_j w_j

   A row is read from memory once: a block is summed below its own maximum, and its sums are scaled when that of the row
   is known. In the block that the draw falls into, the weights are computed again. Where a logit is not a number, the
   log-prob and the entropy of its row are not either. */

#define BLOCK 1024 /* tokens; a block is summed in fp32, blocks in double */

typedef struct {
  double sum, of_logits; /* of w, and of w (z - max z): max is that of the block, then that of the row */
  float top;             /* that of the block */
} BlockSums;

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

static BlockSums block_sums(const float *logits, int64_t from, int64_t end) {
  lanes sum = {0}, of_logits = {0}, zero = {0};
  float top = top_of(logits + from, end - from);
  for (int64_t i = from; i < end; i += LANES) {
    __builtin_prefetch(logits + BLOCK + i);
    lanes shifted = shifted_logits(logits, i, end, top), weight = exp_of(shifted);
    sum += weight;
    /* -infinity times 0 is not a number. */
    of_logits += chosen(weight > 0.0f, weight * shifted, zero);
  }
  return (BlockSums){total(sum), total(of_logits), top};
}

/* The same below another maximum, which is not smaller. */
static BlockSums below(BlockSums block, float top) {
  double shift = (double)block.top - top, factor = exp(shift);
  return (BlockSums){factor * block.sum, factor * (block.of_logits + shift * block.sum), block.top};
}

static int64_t first_at(const float *logits, int64_t size, float top) {
  int64_t i = 0;
  while (i + 1 < size && logits[i] != top) i++;
  return i;
}

/* The first place in a block where the running sum exceeds this share of it. */
static int64_t place_in_block(const float *logits, int64_t from, int64_t end, float top, double share) {
  float weights[BLOCK + LANES];
  double whole = 0, upto = 0;
  for (int64_t i = from; i < end; i += LANES) store(weights + i - from, exp_of(shifted_logits(logits, i, end, top)));
  for (int64_t i = 0; i < end - from; i++) whole += weights[i];
  /* Rounding might put the share at the whole, which no sum exceeds. */
  double limit = fmin(share * whole, nextafter(whole, 0));
  for (int64_t i = 0; i < end - from; i++)
    if ((upto += weights[i]) > limit) return from + i;
  return end - 1;
}

static void draw_row(const float *logits, int64_t size, const double *uniform, BlockSums *blocks, int64_t *id,
                     float *logprob, float *entropy) {
  int64_t count = (size + BLOCK - 1) / BLOCK, block = 0;
  float top = -FLT_MAX;
  double sum = 0, of_logits = 0, before = 0;
  for (int64_t b = 0; b < count; b++) {
    blocks[b] = block_sums(logits, b * BLOCK, smaller(size, (b + 1) * BLOCK));
    top = blocks[b].top > top ? blocks[b].top : top;
  }
  for (int64_t b = 0; b < count; b++) {
    blocks[b] = below(blocks[b], top);
    sum += blocks[b].sum;
    of_logits += blocks[b].of_logits;
  }
  if (uniform) {
    double limit = *uniform * sum;
    while (block + 1 < count && before + blocks[block].sum <= limit) before += blocks[block++].sum;
    double share = (limit - before) / blocks[block].sum;
    *id = place_in_block(logits, block * BLOCK, smaller(size, (block + 1) * BLOCK), blocks[block].top, share);
  } else {
    *id = first_at(logits, size, top);
  }
  *logprob = logits[*id] - top - log(sum);
  *entropy = log(sum) - of_logits / sum;
}

/* logits: [rows][size]. uniforms: [rows], or 0 for the most likely tokens. blocks: room for each thread. */
void draw(const float *logits, int64_t rows, int64_t size, const double *uniforms, int64_t threads, BlockSums *blocks,
          int64_t *ids, float *logprobs, float *entropies) {
  int64_t count = (size + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; row++)
    draw_row(logits + row * size, size, uniforms ? uniforms + row : 0, blocks + omp_get_thread_num() * count,
             ids + row, logprobs + row, entropies + row);
}
