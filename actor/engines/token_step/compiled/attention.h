/* Attention of each row of a chunk, shared out among the threads: writes the key and the value of this token, and takes
   the row's packed queries to its packed sums. Scores, softmax and sums are in attention_vectors.h, and those by tiles
   of AMX in attention_tiles.h; `attend` chooses. */

/* A head of a row's block; within it, a number is at packed_place. */
INLINE float *head_of(const Step *s, Rows x, int64_t row, int64_t head) {
  return block_of(x, row / LANES) + head * s->size * LANES;
}
INLINE int64_t own_place(const Step *s, const Chunk *chunk, int64_t row, int64_t head) {
  return (chunk->first + row) * s->row_apart + head * s->head_apart;
}
INLINE int64_t prompt_place(const Step *s, const Chunk *chunk, int64_t row, int64_t head) {
  return (s->prompt_of_row[chunk->first + row] * s->kv_heads + head) * s->width * s->size;
}
INLINE const float *bias_of(const Step *s, const Layer *l, const Chunk *chunk, int64_t row) {
  return l->bias ? l->bias + (chunk->first + row) * (s->width + s->columns) : 0;
}

/* Writes the row's key and value of this token into the cache. */
INLINE void keep_own(const Step *s, const Layer *l, const Chunk *chunk, int64_t row, int64_t head) {
  int64_t at = own_place(s, chunk, row, head) + s->column * s->size;
  float *key = head_of(s, chunk->k, row, head), *of_token = head_of(s, chunk->v, row, head);
  for (int64_t i = 0; i < s->size; i++) {
    l->keys[at + i] = *packed_place(key, i, row % LANES);
    l->values[at + i] = *packed_place(of_token, i, row % LANES);
  }
}

/* With all queries that share this head of keys. */
INLINE void attend_by_vectors(
    const Step *s, const Layer *l, const Chunk *chunk, int64_t row, int64_t head, const int vectors, float *scores) {
  int64_t lane = row % LANES, size = vectors * LANES, all = s->width + s->columns;
  int64_t own = own_place(s, chunk, row, head), of_prompt = prompt_place(s, chunk, row, head);
  int64_t queries = s->heads / s->kv_heads, first = head * queries, stride = score_stride(all);
  lanes query[queries * vectors], mixed[queries * vectors];
  float *flat = (float *)query;
  keep_own(s, l, chunk, row, head);
  for (int64_t q = 0; q < queries; q++)
    for (int64_t i = 0; i < size; i++)
      flat[q * size + i] = wide(*packed_place(head_of(s, chunk->q, row, first + q), i, lane));
  score(l->prompt_keys + of_prompt, s->width, query, queries, vectors, scores, stride);
  score(l->keys + own, s->columns, query, queries, vectors, scores + s->width, stride);
  for (int64_t q = 0; q < queries; q++)
    softmax(scores + q * stride, all, s->scaling, bias_of(s, l, chunk, row));
  memset(mixed, 0, sizeof mixed);
  mix(l->prompt_values + of_prompt, s->width, scores, stride, queries, vectors, mixed);
  mix(l->values + own, s->columns, scores + s->width, stride, queries, vectors, mixed);
  flat = (float *)mixed;
  for (int64_t i = 0; i < queries * size; i++)
    *packed_place(block_of(chunk->mixed, row / LANES), first * size + i, lane) = narrow(flat[i]);
}

#if USES_TILES
static int uses_tiles(const Step *s) { return s->size % MIXED == 0 && s->heads / s->kv_heads <= TILE; }

/* Heads of keys whose queries are computed together. */
static int64_t heads_at_once(const Step *s, const Chunk *chunk, Thread thread) {
  /* One where there are fewer blocks of rows than threads, so always with more than MOST_BLOCKS threads. Then there is
     more to share out, and with as many heads of keys as threads no two of these write side by side. */
  return chunk->blocks < thread.all ? 1 : smaller(smaller(s->kv_heads, TILE * s->kv_heads / s->heads), MOST_HEADS);
}

typedef uint32_t word __attribute__((may_alias));
/* Copies `count` words, each LANES words behind the one before. */
INLINE void copy_lane(word *to, int64_t to_step, const word *from, int64_t from_step, int64_t count) {
  for (int64_t i = 0; i < count; i++) to[i * to_step] = from[i * from_step];
}

/* The queries of some heads of keys as tiles: [heads][size / 2][LANES], 0 in the lanes of other heads. */
INLINE void query_tiles(const Step *s, const Chunk *chunk, int64_t row, int64_t first, int64_t heads, words *to) {
  int64_t pairs = s->size / 2, queries = s->heads / s->kv_heads;
  memset(to, 0, heads * pairs * sizeof *to);
  for (int64_t q = 0; q < heads * queries; q++) {
    const word *query = (const word *)head_of(s, chunk->q, row, first * queries + q) + row % LANES;
    copy_lane((word *)(to + q / queries * pairs) + q, LANES, query, LANES, pairs);
  }
}

/* mixed: [MIXED / LANES][TILE], of which this query has one vector each; feature: the number of the first value. */
INLINE void keep_mixed(const Chunk *chunk, int64_t row, int64_t feature, const lanes *mixed) {
  for (int t = 0; t < MIXED / LANES; t++, feature += LANES) {
    narrow_lanes found = __builtin_convertvector(rounded_bits(mixed[t * TILE]) >> 16, narrow_lanes);
    word pairs[LANES / 2], *to = (word *)(block_of(chunk->mixed, row / LANES) + packed_offset(feature)) + row % LANES;
    memcpy(pairs, &found, sizeof pairs);
    copy_lane(to, LANES, pairs, 1, LANES / 2);
  }
}

INLINE void attend_by_tiles(
    const Step *s, const Layer *l, const Chunk *chunk, int64_t row, int64_t first, int64_t heads, float *scores) {
  int64_t size = s->size, queries = s->heads / s->kv_heads;
  int64_t own = own_place(s, chunk, row, first), of_prompt = prompt_place(s, chunk, row, first);
  const float *bias = bias_of(s, l, chunk, row);
  words query[MOST_HEADS * LARGEST_HEAD / 2];
  for (int64_t h = first; h < first + heads; h++) keep_own(s, l, chunk, row, h);
  query_tiles(s, chunk, row, first, heads, query);
  Span prompt = {.keys = l->prompt_keys + of_prompt, .values = l->prompt_values + of_prompt, .scores = scores,
                 .head_apart = s->width * size, .count = s->width, .ring = s->width};
  Span completion = {.keys = l->keys + own, .values = l->values + own, .scores = scores + span_floats(s->width),
                     .head_apart = s->head_apart, .next_row = s->row_apart,
                     .first = (s->column + 1) % s->columns, .count = s->columns, .ring = s->columns};
  Span spans[2] = {without_hidden(prompt, bias), without_hidden(completion, bias ? bias + s->width : 0)};
  for (int k = 0; k < 2; k++) score_span(spans + k, query, heads, size);
  softmax_of_spans(spans, s->scaling);
  for (int64_t h = 0; h < heads; h++)
    for (int64_t feature = 0; feature < size; feature += MIXED) {
      lanes mixed[MIXED / LANES * TILE];
      mix_spans(spans, h, size, feature, mixed);
      for (int64_t q = h * queries; q < (h + 1) * queries; q++)
        keep_mixed(chunk, row, (first * queries + q) * size + feature, mixed + q);
    }
}
#else
static int uses_tiles(const Step *s) { return 0; }
static int64_t heads_at_once(const Step *s, const Chunk *chunk, Thread thread) { return 1; }
INLINE void attend_by_tiles(
    const Step *s, const Layer *l, const Chunk *chunk, int64_t row, int64_t first, int64_t heads, float *scores) {}
#endif

/* The own keys and values of a row and a head: the processor does not predict where they are. */
static void prefetch_own(const Step *s, const Layer *l, const Chunk *chunk, int64_t row, int64_t head) {
  int64_t own = own_place(s, chunk, row, head);
  for (int64_t i = 0; i < s->columns * s->size; i += CACHE_LINE / sizeof(value)) {
    __builtin_prefetch(l->keys + own + i, 0, 2);
    __builtin_prefetch(l->values + own + i, 0, 2);
  }
}

/* Floats that each thread needs for the scores of a row. */
int64_t score_floats(const Step *s) {
  if (uses_tiles(s)) return span_floats(s->width) + span_floats(s->columns);
  return s->heads / s->kv_heads * score_stride(s->width + s->columns);
}

static void attend(const Step *s, const Layer *l, const Chunk *chunk, Thread thread) {
  int64_t heads = uses_tiles(s) ? heads_at_once(s, chunk, thread) : 1;
  OWN_SHARE(chunk->rows * ((s->kv_heads + heads - 1) / heads), first, last);
  float *scores = s->scores + thread.number * score_floats(s);
  for (int64_t i = first; i < last; i++) {
    int64_t row = i % chunk->rows, head = i / chunk->rows * heads;
    if (uses_tiles(s)) {
      attend_by_tiles(s, l, chunk, row, head, smaller(heads, s->kv_heads - head), scores);
      continue;
    }
    if (i + 1 < last) prefetch_own(s, l, chunk, (i + 1) % chunk->rows, (i + 1) / chunk->rows);
    /* The usual sizes as constants. */
    switch (s->size) {
      case 64: attend_by_vectors(s, l, chunk, row, head, 64 / LANES, scores); break;
      case 128: attend_by_vectors(s, l, chunk, row, head, 128 / LANES, scores); break;
      default: attend_by_vectors(s, l, chunk, row, head, s->size / LANES, scores); break;
    }
  }
}
