/* Building blocks of decoder models, shared by the architectures: each is a short list of ops over the round. */
#ifndef DS4_DECODER_H
#define DS4_DECODER_H

#include "internal.h"

/* Runs one op of a round; cancel, progress and failure injection come before it. */
#define DS4_OP(call)                                                                                                                       \
  do {                                                                                                                                     \
    int op_status = ds4_op(r);                                                                                                             \
    if (!op_status) op_status = (call);                                                                                                    \
    if (op_status) return op_status;                                                                                                       \
  } while (0)

/* Buffers that every decoder has, [n][width]; its own follow from DS4_OWN on. */
enum { DS4_X, DS4_H, DS4_Q, DS4_K, DS4_V, DS4_ATTN, DS4_GATE, DS4_UP, DS4_OWN };
enum { DS4_LO, DS4_HI, DS4_ROW }; /* engine.row: rows [lo, hi) that a token reads, and the row it writes */

typedef struct ds4_heads {
  uint32_t n_heads, n_kv, head_dim, interleaved, dim, ffn;
  float scale, eps;
} ds4_heads;

typedef struct ds4_attention {
  const ds4_weight *q, *k, *v, *o;
  const float *q_norm, *k_norm; /* [head_dim], NULL: none */
  uint32_t stream, index, rope; /* which stream serves it, as which of its layers; which RoPE table */
} ds4_attention;

typedef struct ds4_ffn {
  const ds4_weight *gate, *up, *down;
  float limit; /* of DS4_SILU_CLAMPED */
} ds4_ffn;

/* A tensor of every layer, as `layers.N.name`. */
typedef struct ds4_shape {
  const char *name;
  uint64_t rows, cols;
  bool vector;
} ds4_shape;

/* Settings and buffers that every decoder has; scale is 1 / sqrt(head_dim). */
int ds4_decoder_setup(ds4_engine *e, ds4_heads *h, ds4_error *err);
/* embed, head (absent: tied), norm, and `n` tensors for every layer. */
int ds4_decoder_tensors(ds4_engine *e, const ds4_heads *h, const ds4_shape *shapes, size_t n, ds4_error *err);
void ds4_decoder_shapes(const ds4_heads *h, ds4_shape attention[4], ds4_shape ffn[3]); /* q k v o; gate up down */
int ds4_decoder_stream(ds4_engine *e, const char *name, const ds4_heads *h, uint32_t n_layers, uint32_t reach, ds4_error *err);
const ds4_tensor *ds4_layer_tensor(ds4_engine *e, uint32_t layer, const char *name);
void ds4_decoder_bind(ds4_engine *e, uint32_t layer, ds4_attention *a, ds4_ffn *f); /* f NULL: the layer has no dense one */
const ds4_weight *ds4_head_weight(ds4_engine *e);

/* Rows that each token of the round reads in a stream, and the row that it writes. */
void ds4_decoder_rows(ds4_run *r, uint32_t reach, uint32_t stride);
int ds4_decoder_attend(ds4_run *r, const ds4_heads *h, uint32_t stream, uint32_t index, uint32_t value_part, float *out);
/* H -> ATTN: projections, head norms, rotation, rows, attention; without the output projection. */
int ds4_decoder_attention(ds4_run *r, const ds4_heads *h, const ds4_attention *a);
/* x -> out: down(glu(gate(x), up(x))) for `n` tokens. */
int ds4_decoder_ffn(ds4_run *r, const ds4_ffn *f, uint32_t width, int glu, const float *x, uint32_t n, float *out);

/* What a round's tokens do with their experts. pick and weight [n][used], a token's picks ascending; token and part [n]: room for those of one
 * expert; gathered and result [n][dim]. */
typedef struct ds4_experts {
  const ds4_ffn *ffn; /* [count] */
  uint32_t count, used, width, dim;
  int glu;
  const uint32_t *pick;
  const float *weight;
  uint32_t *token;
  float *part, *gathered, *result;
} ds4_experts;
/* The `used` best of `count` scores, with `bias` on top where there is one; ties to the lowest index; in ascending index. */
void ds4_decoder_pick(const float *score, const float *bias, uint32_t count, uint32_t used, uint32_t *pick);
void ds4_sort_ascending(uint32_t *values, uint32_t n);
/* in [n][dim] -> sum [n][dim]: every expert over the tokens that chose it, in ascending order, so that a token's sum has its own experts' order. */
int ds4_decoder_experts(ds4_run *r, const ds4_experts *x, const float *in, float *sum);

int ds4_decoder_head(ds4_engine *e, const ds4_heads *h, const ds4_weight *head, const float *norm, const float *x, uint32_t n,
                     float *scratch, float *logits);

#endif
