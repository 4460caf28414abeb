/* DeepSeek V4, as deepseek_v4_load.c (settings, tensors, streams) and arch_deepseek_v4.c (the forward pass) share it. */
#ifndef DS4_DEEPSEEK_V4_H
#define DS4_DEEPSEEK_V4_H

#include "decoder.h"

#define V4_OVERLAP 4u /* windows of this ratio overlap with the one before */

/* Hyper-connections around one sublayer (or the head): products of the flat residual streams, made into weights. */
typedef struct v4_mix {
  const ds4_weight *fn;      /* [(2 + streams) * streams, streams * dim], the head's: [streams, ..] */
  const float *scale, *base; /* [3] or [1]; [rows of fn] */
} v4_mix;

/* Makes one row of every window of `ratio` tokens. */
typedef struct v4_compressor {
  const ds4_weight *kv, *gate; /* [c * width, dim], c = 2 where windows overlap */
  const float *ape, *norm;     /* [ratio][c * width], [width] */
} v4_compressor;

typedef struct v4_layer {
  uint32_t ratio, raw, far; /* ratio 0: no compressed rows; which layer it is in its streams */
  bool draft;               /* the MTP block: its row r belongs to position r - 1 */
  v4_mix attn_mix, ffn_mix;
  const float *attn_norm, *ffn_norm, *q_norm, *kv_norm, *sink; /* [dim] twice, [q_rank], [head_dim], [n_heads] */
  const ds4_weight *q_a, *q_b, *kv, *o_b;
  const ds4_weight **o_a; /* [o_groups], each [o_rank, n_heads / o_groups * head_dim] */
  v4_compressor rows, index;
  const ds4_weight *index_q, *index_weight; /* [index_heads * index_dim, q_rank], [index_heads, dim] */
  const ds4_weight *router;                 /* [n_experts, dim] */
  const float *bias;                        /* [n_experts]; NULL: the token decides */
  uint16_t *by_token;                       /* [vocab][n_used] */
  ds4_ffn shared, *experts;                 /* [n_experts] */
} v4_layer;

typedef struct v4 {
  uint32_t dim, n_heads, head_dim, rope_dim, q_rank, o_groups, o_rank, window;
  uint32_t index_heads, index_dim, keep;
  uint32_t n_experts, n_used, ffn, n_hash;
  uint32_t streams, mix_rows, iterations; /* mix_rows = (2 + streams) * streams */
  uint32_t rounding, mtp;
  uint32_t n4, n128; /* layers of each ratio */
  float eps, mix_eps, route_scale, limit, scale, index_scale;
  const ds4_weight *embed, *head;
  const float *norm;
  v4_mix head_mix;
  const ds4_weight *e_proj, *h_proj; /* MTP: [dim, dim] twice */
  const float *e_norm, *h_norm, *mtp_norm;
  v4_mix mtp_mix;
  v4_layer *layers; /* [n_layers], and the MTP block behind them */
} v4;

/* RoPE tables: of layers without compressed rows, of the others. */
enum { V4_PLAIN, V4_COMPRESSED };

/* Buffers, [n][width]; the first ones have the places that decoder.h gives them. */
enum {
  V4_H = DS4_X,    /* [streams][dim] residual streams */
  V4_FLAT = DS4_H, /* the same, normed */
  V4_Q = DS4_Q,    /* [n_heads * head_dim] */
  V4_KV = DS4_K,   /* [head_dim] */
  V4_Y = DS4_V,    /* [dim] what a sublayer adds */
  V4_O = DS4_ATTN, /* [n_heads * head_dim] */
  V4_X = DS4_OWN,  /* [dim] what a sublayer reads */
  V4_QR,           /* [q_rank] */
  V4_GROUP,        /* [n_heads / o_groups * head_dim] heads of one output group */
  V4_GROUP_OUT,    /* [o_rank] */
  V4_JOINED,       /* [o_groups * o_rank] */
  V4_VALUES,       /* [2 * head_dim] inputs of the compressors: values and scores of the rows, of the index rows */
  V4_SCORES,
  V4_INDEX_VALUES, /* [2 * index_dim] */
  V4_INDEX_SCORES,
  V4_ROW,          /* [head_dim or index_dim] rows that windows became */
  V4_INDEX_Q,      /* [index_heads * index_dim] */
  V4_INDEX_WEIGHT, /* [index_heads] */
  V4_MIX,          /* [mix_rows] */
  V4_ROUTER,       /* [n_experts] */
  V4_GATHERED,     /* [dim] */
  V4_RESULT,       /* [dim] */
  V4_DRAFT,        /* [streams][dim] residual streams of the MTP block */
  V4_BUFFERS
};

/* Streams. Those that no layer has are not declared. */
enum { V4_RAW, V4_INPUT_4, V4_INPUT_128, V4_ROWS_4, V4_ROWS_128, V4_HIDDEN, V4_STREAMS };
enum { V4_PART_VALUES, V4_PART_SCORES, V4_PART_INDEX_VALUES, V4_PART_INDEX_SCORES }; /* of an input stream */
enum { V4_PART_ROWS, V4_PART_INDEX };                                                /* of stream rows4 */
uint32_t v4_stream(const v4 *m, uint32_t which);                                     /* its number in the engine */

int v4_setup(ds4_engine *e, ds4_error *err);
int v4_bind(ds4_engine *e, ds4_error *err);

#endif
