/* One token of each row through the decoder, for Llama, Qwen2 and Qwen3 on a CPU.

       q, k, v = rotate(W_qkv norm(x)),   x += W_o attend(q),   x += W_down (silu(W_gate h) W_up h),   h = norm(x)

   The same as layers.py, rounded in the same places; sums are added in another order. There, a model spends most of a
   token step between its products: in hundreds of small operations, each of which finds the caches full of weights.
   Here all threads go through all layers together, and share the outputs of each product. step.py fills the structures.

   Here are the layers. products.h has linears, attention.h attention, draw.h the draw of tokens, logits.h the head in
   8 bits; codes.h has the values of NF4 codes. lanes.h and tiles.h are in shared/model/compiled. */

#include "lanes.h"
#include "tiles.h"
#include "codes.h"
#include "products.h"
#include "step.h"
#include "attention_vectors.h"
#include "attention_tiles.h"
#include "attention.h"
#include "draw.h"
#include "logits.h"

/* [n][features] -> lanes; what is left over in the last block is 0. */
static void to_lanes(const float *from, Rows to, const Chunk *chunk, Thread thread) {
  OWN_SHARE(to.features, first, last);
  for (int64_t b = 0; b < chunk->blocks; b++)
    for (int64_t i = first; i < last; i++)
      for (int64_t lane = 0; lane < LANES; lane++) {
        int64_t row = b * LANES + lane;
        block_of(to, b)[i * LANES + lane] = row < chunk->rows ? from[(chunk->first + row) * to.features + i] : 0.0f;
      }
}

static lanes inverse_rms(const float *x, int64_t count, double eps) {
  lanes sum = {0};
  for (int64_t i = 0; i < count; i++) sum += load(x + i * LANES) * load(x + i * LANES);
  sum = sum / (float)count + (float)eps;
  for (int i = 0; i < LANES; i++) sum[i] = 1.0f / sqrtf(sum[i]);
  return sum;
}
INLINE lanes normed(const float *x, int64_t i, lanes inverse, const value *weight) {
  return rounded(rounded(load(x + i * LANES) * inverse) * wide(weight[i]));
}

static void norm(const Step *s, const Chunk *chunk, const value *weight, Thread thread) {
  OWN_SHARE(s->hidden / 2, first, last);
  for (int64_t b = 0; b < chunk->blocks; b++) {
    const float *x = block_of(chunk->x, b);
    lanes inverse = inverse_rms(x, s->hidden, s->eps);
    for (int64_t i = 2 * first; i < 2 * last; i += 2)
      pack(block_of(chunk->h, b), i, normed(x, i, inverse, weight), normed(x, i + 1, inverse, weight));
  }
}

/* Rotates one head; in Qwen3, after its norm. */
static void rotate_head(float *x, const float *cos, const float *sin, const value *weight, const Step *s) {
  int64_t half = s->size / 2;
  if (weight) {
    lanes inverse = inverse_rms(x, s->size, s->eps);
    for (int64_t i = 0; i < s->size; i++) store(x + i * LANES, normed(x, i, inverse, weight));
  }
  for (int64_t i = 0; i < half; i++) {
    float *first = x + i * LANES, *second = first + half * LANES;
    int64_t at = i * LANES, far = at + half * LANES;
    lanes a = load(first), b = load(second);
    /* The sine of the first half is negative (rotated in layers.py). */
    store(first, rounded(rounded(a * load(cos + at)) + rounded(b * load(sin + at))));
    store(second, rounded(rounded(b * load(cos + far)) + rounded(a * load(sin + far))));
  }
}

/* In place. In fp32 it is packed as it is. */
static void pack_head(float *x, int64_t size) {
#ifdef IN_BF16
  for (int64_t i = 0; i < size; i += 2) pack(x, i, load(x + i * LANES), load(x + (i + 1) * LANES));
#endif
}

/* Rotates queries and keys, and packs the head of each, and of the values, in place. */
static void rotate_and_pack(const Step *s, const Layer *l, const Chunk *chunk, Thread thread) {
  int64_t heads = s->heads + 2 * s->kv_heads, head_floats = s->size * LANES;
  for (int64_t i = thread.number; i < heads * chunk->blocks; i += thread.all) {
    int64_t b = i / heads, head = i % heads, key = head - s->heads, is_query = key < 0, is_value = key >= s->kv_heads;
    Rows of = is_query ? chunk->q : is_value ? chunk->v : chunk->k;
    float *x = block_of(of, b) + (is_query ? head : key % s->kv_heads) * head_floats;
    if (!is_value)
      rotate_head(x, block_of(chunk->cos, b), block_of(chunk->sin, b), is_query ? l->norm_q : l->norm_k, s);
    pack_head(x, s->size);
  }
}

/* y, or x + y in place of x. */
INLINE void keep_outputs(const Outputs *o, Rows out, const int adds, int64_t blocks) {
  for (int64_t b = 0; b < blocks; b++)
    for (int i = 0; i < TILE; i++) {
      float *x = block_of(out, b) + (o->tile * TILE + i) * LANES;
      lanes y = o->y[b * TILE + i];
      store(x, adds ? rounded(load(x) + y) : y);
    }
}

INLINE void apply(const Linear *l, Rows in, Rows ax, Rows out, const int adds, int64_t blocks, Thread thread) {
  int64_t tiles = l->out / TILE, at_once = multiplies_two(l, l, blocks) ? 2 : 1;
  OWN_SHARE((tiles + at_once - 1) / at_once, first, last);
  for (int64_t t = at_once * first; t < smaller(at_once * last, tiles); t += at_once) {
    lanes y[2][MOST_BLOCKS * TILE];
    Outputs outputs[2] = {{l, t, ax, y[0]}, {l, t + 1, ax, y[1]}};
    int count = smaller(at_once, tiles - t);
    linear(outputs, count, in, blocks);
    for (int k = 0; k < count; k++) keep_outputs(outputs + k, out, adds, blocks);
  }
}

static void project(const Layer *l, const Chunk *chunk, Thread thread) {
  const Linear *linears[3] = {&l->q, &l->k, &l->v};
  Rows outs[3] = {chunk->q, chunk->k, chunk->v}, ax = chunk->ax;
  for (int j = 0; j < 3; j++) {
    apply(linears[j], chunk->h, ax, outs[j], 0, chunk->blocks, thread);
    ax = from_feature(ax, linears[j]->rank);
  }
}

/* x += y */
static void add_output(const Linear *l, Rows in, const Chunk *chunk, Thread thread) {
  apply(l, in, chunk->ax, chunk->x, 1, chunk->blocks, thread);
}

/* silu(gate) up */
static void gate_up(const Step *s, const Layer *l, const Chunk *chunk, Thread thread) {
  OWN_SHARE(s->inner / TILE, first, last);
  for (int64_t t = first; t < last; t++) {
    lanes gate[MOST_BLOCKS * TILE], up[MOST_BLOCKS * TILE];
    Outputs outputs[2] = {{&l->gate, t, chunk->ax, gate}, {&l->up, t, from_feature(chunk->ax, l->gate.rank), up}};
    linear(outputs, 2, chunk->h, chunk->blocks);
    for (int64_t i = 0; i < chunk->blocks * TILE; i++)
      gate[i] = rounded(rounded(gate[i] / (1.0f + exp_of(-gate[i]))) * up[i]);
    for (int64_t b = 0; b < chunk->blocks; b++)
      for (int i = 0; i < TILE; i += 2)
        pack(block_of(chunk->inner, b), t * TILE + i, gate[b * TILE + i], gate[b * TILE + i + 1]);
  }
}

static void layer(const Step *s, const Layer *l, const Chunk *chunk, Thread thread) {
  const Linear *qkv[] = {&l->q, &l->k, &l->v}, *o[] = {&l->o};
  const Linear *gate_and_up[] = {&l->gate, &l->up}, *down[] = {&l->down};
  norm(s, chunk, l->norm_in, thread);
  WAIT_FOR_ALL
  low_rank(qkv, 3, chunk->h, chunk->ax, chunk->blocks, thread);
  WAIT_FOR_ALL
  project(l, chunk, thread);
  WAIT_FOR_ALL
  rotate_and_pack(s, l, chunk, thread);
  WAIT_FOR_ALL
  attend(s, l, chunk, thread);
  WAIT_FOR_ALL
  low_rank(o, 1, chunk->mixed, chunk->ax, chunk->blocks, thread);
  WAIT_FOR_ALL
  add_output(&l->o, chunk->mixed, chunk, thread);
  WAIT_FOR_ALL
  norm(s, chunk, l->norm_mlp, thread);
  WAIT_FOR_ALL
  low_rank(gate_and_up, 2, chunk->h, chunk->ax, chunk->blocks, thread);
  WAIT_FOR_ALL
  gate_up(s, l, chunk, thread);
  WAIT_FOR_ALL
  low_rank(down, 1, chunk->inner, chunk->ax, chunk->blocks, thread);
  WAIT_FOR_ALL
  add_output(&l->down, chunk->inner, chunk, thread);
  WAIT_FOR_ALL
}

static void write_out(const Step *s, const Chunk *chunk, Thread thread) {
  OWN_SHARE(s->hidden, first, last);
  for (int64_t b = 0; b < chunk->blocks; b++) {
    const float *x = block_of(chunk->x, b);
    lanes inverse = inverse_rms(x, s->hidden, s->eps);
    for (int64_t i = first; i < last; i++) {
      lanes y = normed(x, i, inverse, s->norm);
      for (int64_t lane = 0; lane < smaller(LANES, chunk->rows - b * LANES); lane++)
        s->out[(chunk->first + b * LANES + lane) * s->hidden + i] = narrow(y[lane]);
    }
  }
}

INLINE Rows take(float **scratch, int64_t features, int64_t blocks) {
  Rows found = {*scratch, features};
  *scratch += features * LANES * blocks;
  return found;
}

static Chunk chunk_from(const Step *s, int64_t first) {
  int64_t rows = smaller(MOST_BLOCKS * LANES, s->rows - first), blocks = (rows + LANES - 1) / LANES;
  int64_t q = s->heads * s->size, k = s->kv_heads * s->size;
  float *scratch = s->scratch;
  return (Chunk){
      .x = take(&scratch, s->hidden, blocks), .h = take(&scratch, s->hidden, blocks),
      .ax = take(&scratch, s->ax_features, blocks),
      .q = take(&scratch, q, blocks), .k = take(&scratch, k, blocks), .v = take(&scratch, k, blocks),
      .mixed = take(&scratch, q, blocks), .inner = take(&scratch, s->inner, blocks),
      .cos = take(&scratch, s->size, blocks), .sin = take(&scratch, s->size, blocks),
      .first = first, .rows = rows, .blocks = blocks};
}

void token_step(const Step *s) {
#pragma omp parallel num_threads(s->threads)
  {
    Thread thread = {omp_get_thread_num(), omp_get_num_threads()};
    begin_tiles();
    for (int64_t first = 0; first < s->rows; first += MOST_BLOCKS * LANES) {
      Chunk chunk = chunk_from(s, first);
      to_lanes(s->x, chunk.x, &chunk, thread);
      to_lanes(s->cos, chunk.cos, &chunk, thread);
      to_lanes(s->sin, chunk.sin, &chunk, thread);
      WAIT_FOR_ALL
      for (int64_t i = 0; i < s->depth; i++) layer(s, s->layers + i, &chunk, thread);
      write_out(s, &chunk, thread);
      WAIT_FOR_ALL
    }
    end_tiles();
  }
}

/* What the caller must know, beside `score_floats`. library.py says what each is. */
int64_t step_bytes(void) { return sizeof(Step); }
int64_t layer_bytes(void) { return sizeof(Layer); }
int64_t most_rows(void) { return MOST_BLOCKS * LANES; }
int64_t rank_step(void) { return RANK_STEP; }
int64_t largest_head(void) { return LARGEST_HEAD; }
int64_t slice_bytes(void) { return sizeof(SliceSums); }
int64_t draw_slice(void) { return SLICE; }
int64_t head_bytes(void) { return sizeof(Head); }
int64_t head_slice(void) { return SLICE_OUTPUTS; }
