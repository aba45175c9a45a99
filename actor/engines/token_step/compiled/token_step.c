/* One token of each row through the decoder, for Llama, Qwen2 and Qwen3 on a CPU.

       q, k, v = rotate(W_qkv norm(x)),   x += W_o attend(q),   x += W_down (silu(W_gate h) W_up h),   h = norm(x)

   The same as layers.py, rounded in the same places; sums are added in another order. There, a model spends most of a
   token step between its products: in hundreds of small operations, each of which finds the caches full of weights.
   Here all threads go through all layers together, and share the outputs of each product. step.py has the structures of
   this file once more, and passes the pointers. */

#include "lanes.h"
#include "tiles.h"
#include "codes.h"
#include "products.h"
#include "attention.h"
#include "draw.h"
#include "logits.h"

typedef struct {
  Linear q, k, v, o, gate, up, down;
  const value *norm_in, *norm_mlp, *norm_q, *norm_k; /* no norm of q and k: 0 */
  const value *prompt_keys, *prompt_values;          /* [P][kv_heads][width][size] */
  value *keys, *values;                              /* [n][kv_heads][room][size] */
  const float *bias;                                 /* [n][width + columns] of the scores; none: 0 */
} Layer;

typedef struct {
  const Layer *layers;
  const value *norm;
  const int64_t *prompt_of_row;
  const float *x, *cos, *sin; /* [n][hidden], [n][size] */
  value *out;                 /* [n][hidden] */
  float *room;                /* for the activations of MOST_BLOCKS blocks */
  float *scores;              /* for each thread: [queries of a key][width + columns + two vectors] */
  int64_t depth, hidden, inner, heads, kv_heads, size, low; /* low: see step.py */
  int64_t threads, rows;
  int64_t width, columns, column; /* of prompts; of completions so far, and the one of this token */
  int64_t row_apart, head_apart; /* from the keys of a row to those of the next, and the same for heads */
  double eps, scaling;
} Step;

/* Up to MOST_BLOCKS * LANES rows, which go through all layers together, and their activations. */
typedef struct {
  Rows x, h, low, q, k, v, mixed, inner, cos, sin;
  int64_t first, rows, blocks;
} Chunk;

/* [n][features] -> lanes; what is left over in the last block is 0. */
static void to_lanes(const float *from, Rows to, const Chunk *chunk, Thread thread) {
  PART(to.features, first, last);
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
  PART(s->hidden / 2, first, last);
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
    float *low = x + i * LANES, *high = low + half * LANES;
    int64_t at = i * LANES, far = at + half * LANES;
    lanes a = load(low), b = load(high);
    /* The sine of the first half is negative (rotated in layers.py). */
    store(low, rounded(rounded(a * load(cos + at)) + rounded(b * load(sin + at))));
    store(high, rounded(rounded(b * load(cos + far)) + rounded(a * load(sin + far))));
  }
}

static void rotate(const Step *s, const Layer *l, const Chunk *chunk, Thread thread) {
  int64_t heads = s->heads + s->kv_heads, head_floats = s->size * LANES;
  for (int64_t i = thread.number; i < heads * chunk->blocks; i += thread.all) {
    int64_t b = i / heads, head = i % heads, is_query = head < s->heads;
    float *x = is_query ? block_of(chunk->q, b) + head * head_floats
                        : block_of(chunk->k, b) + (head - s->heads) * head_floats;
    rotate_head(x, block_of(chunk->cos, b), block_of(chunk->sin, b), is_query ? l->norm_q : l->norm_k, s);
  }
}

static void project(const Layer *l, const Chunk *chunk, Thread thread) {
  const Linear *linears[3] = {&l->q, &l->k, &l->v};
  Rows outs[3] = {chunk->q, chunk->k, chunk->v}, low = chunk->low;
  for (int j = 0; j < 3; j++) {
    PART(linears[j]->out / TILE, first, last);
    for (int64_t t = first; t < last; t++) {
      lanes y[MOST_BLOCKS * TILE];
      linear(linears[j], t, chunk->h, low, chunk->blocks, y);
      for (int64_t b = 0; b < chunk->blocks; b++)
        memcpy(block_of(outs[j], b) + t * TILE * LANES, y + b * TILE, TILE * BYTES);
    }
    low = from_feature(low, linears[j]->rank);
  }
}

INLINE int64_t score_room(const Step *s) { return ((s->width + s->columns) / LANES + 2) * LANES; }

/* Writes the row's key and value of this token into the cache, and attends with all queries that share them. */
INLINE void attend_row(
    const Step *s, const Layer *l, const Chunk *chunk, int64_t row, int64_t head, const int parts, float *scores) {
  int64_t block = row / LANES, lane = row % LANES, size = parts * LANES, seen = s->width + s->columns;
  int64_t own = (chunk->first + row) * s->row_apart + head * s->head_apart;
  int64_t of_prompt = (s->prompt_of_row[chunk->first + row] * s->kv_heads + head) * s->width * size;
  const float *bias = l->bias ? l->bias + (chunk->first + row) * seen : 0;
  value *keys = l->keys + own, *values = l->values + own;
  for (int64_t i = 0; i < size; i++) {
    keys[s->column * size + i] = narrow(block_of(chunk->k, block)[(head * size + i) * LANES + lane]);
    values[s->column * size + i] = narrow(block_of(chunk->v, block)[(head * size + i) * LANES + lane]);
  }
  int64_t queries = s->heads / s->kv_heads, first = head * queries * size, room = score_room(s);
  lanes query[queries * parts], mixed[queries * parts];
  float *flat = (float *)query;
  for (int64_t i = 0; i < queries * size; i++) flat[i] = block_of(chunk->q, block)[(first + i) * LANES + lane];
  score(l->prompt_keys + of_prompt, s->width, query, queries, parts, scores, room);
  score(keys, s->columns, query, queries, parts, scores + s->width, room);
  for (int64_t q = 0; q < queries; q++) softmax(scores + q * room, seen, s->scaling, bias);
  memset(mixed, 0, sizeof mixed);
  mix(l->prompt_values + of_prompt, s->width, scores, room, queries, parts, mixed);
  mix(values, s->columns, scores + s->width, room, queries, parts, mixed);
  flat = (float *)mixed;
  for (int64_t i = 0; i < queries * size; i++)
    *packed_place(block_of(chunk->mixed, block), first + i, lane) = narrow(flat[i]);
}

/* The own keys and values of a row and a head: the processor does not predict where they are. */
static void prefetch_own(const Step *s, const Layer *l, const Chunk *chunk, int64_t row, int64_t head) {
  int64_t own = (chunk->first + row) * s->row_apart + head * s->head_apart;
  for (int64_t i = 0; i < s->columns * s->size; i += CACHE_LINE / sizeof(value)) {
    __builtin_prefetch(l->keys + own + i, 0, 2);
    __builtin_prefetch(l->values + own + i, 0, 2);
  }
}

static void attend(const Step *s, const Layer *l, const Chunk *chunk, Thread thread) {
  PART(chunk->rows * s->kv_heads, first, last);
  float *scores = s->scores + thread.number * (s->heads / s->kv_heads) * score_room(s);
  for (int64_t i = first; i < last; i++) {
    int64_t row = i % chunk->rows, head = i / chunk->rows;
    if (i + 1 < last) prefetch_own(s, l, chunk, (i + 1) % chunk->rows, (i + 1) / chunk->rows);
    /* The usual sizes as constants. */
    switch (s->size) {
      case 64: attend_row(s, l, chunk, row, head, 64 / LANES, scores); break;
      case 128: attend_row(s, l, chunk, row, head, 128 / LANES, scores); break;
      default: attend_row(s, l, chunk, row, head, s->size / LANES, scores); break;
    }
  }
}

/* x += y */
static void add_output(const Step *s, const Linear *l, Rows in, const Chunk *chunk, Thread thread) {
  PART(s->hidden / TILE, first, last);
  for (int64_t t = first; t < last; t++) {
    lanes y[MOST_BLOCKS * TILE];
    linear(l, t, in, chunk->low, chunk->blocks, y);
    for (int64_t b = 0; b < chunk->blocks; b++)
      for (int i = 0; i < TILE; i++) {
        float *x = block_of(chunk->x, b) + (t * TILE + i) * LANES;
        store(x, rounded(load(x) + y[b * TILE + i]));
      }
  }
}

/* silu(gate) up */
static void gate_up(const Step *s, const Layer *l, const Chunk *chunk, Thread thread) {
  PART(s->inner / TILE, first, last);
  for (int64_t t = first; t < last; t++) {
    lanes gate[MOST_BLOCKS * TILE], up[MOST_BLOCKS * TILE];
    linear(&l->gate, t, chunk->h, chunk->low, chunk->blocks, gate);
    linear(&l->up, t, chunk->h, from_feature(chunk->low, l->gate.rank), chunk->blocks, up);
    for (int64_t i = 0; i < chunk->blocks * TILE; i++)
      gate[i] = rounded(rounded(gate[i] / (1.0f + exp_of(-gate[i]))) * up[i]);
    for (int64_t b = 0; b < chunk->blocks; b++)
      for (int i = 0; i < TILE; i += 2)
        pack(block_of(chunk->inner, b), t * TILE + i, gate[b * TILE + i], gate[b * TILE + i + 1]);
  }
}

static void layer(const Step *s, const Layer *l, const Chunk *chunk, Thread thread) {
  const Linear *qkv[] = {&l->q, &l->k, &l->v}, *o[] = {&l->o}, *gate_and_up[] = {&l->gate, &l->up}, *down[] = {&l->down};
  norm(s, chunk, l->norm_in, thread);
  WAIT_FOR_ALL
  low_rank(qkv, 3, chunk->h, chunk->low, chunk->blocks, thread);
  WAIT_FOR_ALL
  project(l, chunk, thread);
  WAIT_FOR_ALL
  rotate(s, l, chunk, thread);
  WAIT_FOR_ALL
  attend(s, l, chunk, thread);
  WAIT_FOR_ALL
  low_rank(o, 1, chunk->mixed, chunk->low, chunk->blocks, thread);
  WAIT_FOR_ALL
  add_output(s, &l->o, chunk->mixed, chunk, thread);
  WAIT_FOR_ALL
  norm(s, chunk, l->norm_mlp, thread);
  WAIT_FOR_ALL
  low_rank(gate_and_up, 2, chunk->h, chunk->low, chunk->blocks, thread);
  WAIT_FOR_ALL
  gate_up(s, l, chunk, thread);
  WAIT_FOR_ALL
  low_rank(down, 1, chunk->inner, chunk->low, chunk->blocks, thread);
  WAIT_FOR_ALL
  add_output(s, &l->down, chunk->inner, chunk, thread);
  WAIT_FOR_ALL
}

static void write_out(const Step *s, const Chunk *chunk, Thread thread) {
  PART(s->hidden, first, last);
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

INLINE Rows take(float **room, int64_t features, int64_t blocks) {
  Rows found = {*room, features};
  *room += features * LANES * blocks;
  return found;
}

static Chunk chunk_from(const Step *s, int64_t first) {
  int64_t rows = smaller(MOST_BLOCKS * LANES, s->rows - first), blocks = (rows + LANES - 1) / LANES;
  int64_t q = s->heads * s->size, k = s->kv_heads * s->size;
  float *room = s->room;
  return (Chunk){
      .x = take(&room, s->hidden, blocks), .h = take(&room, s->hidden, blocks), .low = take(&room, s->low, blocks),
      .q = take(&room, q, blocks), .k = take(&room, k, blocks), .v = take(&room, k, blocks),
      .mixed = take(&room, q, blocks), .inner = take(&room, s->inner, blocks),
      .cos = take(&room, s->size, blocks), .sin = take(&room, s->size, blocks),
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

/* What the caller must know: the sizes of the structures, and the rows for which there must be room. */
int64_t step_bytes(void) { return sizeof(Step); }
int64_t layer_bytes(void) { return sizeof(Layer); }
int64_t room_rows(void) { return MOST_BLOCKS * LANES; }
int64_t draw_room(void) { return sizeof(BlockSums); }
int64_t draw_block(void) { return BLOCK; }
int64_t head_bytes(void) { return sizeof(Head); }
int64_t head_columns(void) { return COLUMNS; }
