/* What a token step is given, and the rows that go through all layers together. step.py has Layer and Step again. */

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
  float *scratch;             /* for the activations of MOST_BLOCKS blocks */
  float *scores;              /* room for [threads][score_floats(this)] */
  int64_t depth, hidden, inner, heads, kv_heads, size, ax_features; /* ax_features: of A x; see step.py */
  int64_t threads, rows;
  int64_t width, columns, column; /* of prompts; of completions so far, and the one of this token */
  int64_t row_apart, head_apart; /* from the keys of a row to those of the next, and the same for heads */
  double eps, scaling;
} Step;

/* Up to MOST_BLOCKS * LANES rows, which go through all layers together, and their activations. */
typedef struct {
  Rows x, h, ax, q, k, v, mixed, inner, cos, sin;
  int64_t first, rows, blocks;
} Chunk;
