/* The table of ops that a backend fills. An architecture is a list of calls to these; a backend knows nothing of sessions or the pool.
 *
 * Memory. All float buffers are memory of the backend (mem_alloc): the CPU backends hand out plain memory, a GPU backend device memory, and
 * moves bytes with copy_in / copy_out / copy. Ops may be queued: `wait` returns when everything queued is done, and only its status counts then.
 *
 * Order. What one output element sums, and in which order, may depend on its own operands and positions only (DESIGN 5.1): never on the number
 * of tokens, segments, threads or blocks of a launch. csrc/cpu/ref.c is the definition that every other backend is tested against. */
#ifndef DS4_BACKEND_H
#define DS4_BACKEND_H

#include <stdbool.h>

#include "ds4.h"

#define DS4_PAGE_ROWS 64u      /* rows of a page */
#define DS4_PAGE_ROWS_SMALL 8u /* rows of a page in a stream whose reach is below 64 */
#define DS4_KEY_BLOCK 64u      /* attention: keys are taken in blocks of 64 absolute rows */
#define DS4_KEY_SPLIT 512u     /* attention: partial results are merged at every multiple of 512 rows */
#define DS4_QUANT_BLOCK 32u    /* weights and activations of the integer formats */
#define DS4_STREAM_PARTS 4

enum ds4_glu_kind { DS4_SILU = 0, DS4_GELU = 1, DS4_SILU_CLAMPED = 2 }; /* GELU: the tanh form; clamped: gate <= limit, |up| <= limit */
/* ENGINE: what the engine's kv_dtype says; INDEX: the same, but FP4 where that is FP8 */
enum ds4_kv_type { DS4_KV_F32 = 0, DS4_KV_F16, DS4_KV_Q8_0, DS4_KV_FP8, DS4_KV_FP4, DS4_KV_INDEX = 254, DS4_KV_ENGINE = 255 };

/* One part (K or V) of a row: `heads` vectors of `width` numbers.
 *
 * In a page, layer after layer, part after part, head after head lies a tile of page_rows vectors. `across` turns the tile so that one number of all
 * rows is contiguous (K: a SIMD lane is a key), else one row is (V: a lane is a dimension):
 *
 *   across = 0   row 0: n0 n1 .. nW-1 | row 1: ..         across = 1   n0: row 0 row 1 .. row R-1 | n1: ..
 *
 * q8_0: the tile of int8 is followed by a tile of f16 scales, one per `group` numbers, turned the same way.
 * fp8, fp4: rows are never turned; the scales (E8M0 bytes, one per 64 or 32 numbers) and the bf16 tail are part of each row:
 *
 *   fp8   width - tail bytes E4M3 | scales | tail x bf16                fp4   width / 2 bytes E2M1, the even number low | scales */
typedef struct ds4_part {
  uint32_t heads, width, across, type, group; /* group 0 unless type is DS4_KV_Q8_0 */
  uint32_t tail;                              /* last numbers of a vector that fp8 rows keep as bf16 */
  uint64_t tile_bytes;                        /* of one head */
  uint64_t offset;                            /* of the part inside a layer's piece of the page */
  uint64_t row_bytes;                         /* of one row of one layer, all heads, as ds4_session_rows gives it */
} ds4_part;

typedef struct ds4_layout {
  uint32_t n_layers, page_rows, n_parts;
  ds4_part part[DS4_STREAM_PARTS];
  uint64_t layer_bytes, page_bytes, row_bytes;
} ds4_layout;

/* The pages of one session's stream as a kernel sees them: page i of the stream is pages[i - first_page]; a page out of reach is NULL. */
typedef struct ds4_view {
  uint8_t *const *pages;
  uint32_t first_page, n_pages;
} ds4_view;

/* The tokens of one round. Tokens of one segment are neighbours, in ascending position. */
typedef struct ds4_batch {
  uint32_t n, n_segments;
  const int32_t *ids;
  const uint32_t *pos;     /* [n] */
  const uint32_t *segment; /* [n] */
} ds4_batch;

typedef struct ds4_backend ds4_backend;
typedef struct ds4_weight ds4_weight; /* a matrix in the backend's own layout */

/* Asked by the calling thread between ops and inside long ones; non-zero: stop, the round is thrown away. */
typedef int (*ds4_poll)(void *user);

typedef struct ds4_attend {
  const ds4_layout *layout;
  const ds4_view *views; /* [n_segments] */
  const ds4_batch *batch;
  const uint32_t *lo, *hi; /* [n] token i reads rows lo[i] <= row < hi[i]; lo == hi gives zeros */
  uint32_t layer, n_heads; /* query heads; the stream's heads divide them (GQA) */
  uint32_t value_part;     /* 1, or 0 when one part serves as key and value */
  float scale;
  const float *q; /* [n][n_heads * width] */
  float *out;     /* [n][n_heads * width of the value part] */
} ds4_attend;

/* Attention over the rows [lo, hi) of one stream and then over rows of a second one, whose part 0 is key and value both, with a sink: a logit of
 * its own for every head that brings no value.
 *
 * Order: near rows as `attend` takes them. Far rows in blocks of 64 by their place in the list, merged at every 512 places. The sink last. */
typedef struct ds4_attend_sparse {
  const ds4_layout *layout, *far_layout; /* far_layout NULL: there are no far rows */
  const ds4_view *views, *far_views;     /* [n_segments] */
  const ds4_batch *batch;
  const uint32_t *lo, *hi; /* [n] near rows */
  const uint32_t *far_n;   /* [n] how many far rows */
  const uint32_t *list;    /* [n][list_width] far rows, ascending; NULL: rows 0 .. far_n - 1 */
  uint32_t list_width, layer, far_layer, n_heads;
  float scale;
  const float *sink; /* [n_heads] */
  const float *q;    /* [n][n_heads * width] */
  float *out;        /* [n][n_heads * width] */
} ds4_attend_sparse;

/* Which far rows a token reads: all `rows` of them when they are at most `keep`, else the `keep` with the largest
 *
 *   sum over heads, ascending, of weight[head] * max(0, q[head] . key)
 *
 * ties to the lowest row. Lists are ascending. */
typedef struct ds4_pick {
  const ds4_layout *layout;
  const ds4_view *views; /* [n_segments] */
  const ds4_batch *batch;
  uint32_t layer, part, heads, keep;
  const uint32_t *rows;       /* [n] */
  const float *q;             /* [n][heads * width] */
  const float *weight;        /* [n][heads] */
  uint32_t *list, list_width; /* out: [n][list_width], memory of the host */
  uint32_t *count;            /* out: [n] */
} ds4_pick;

/* Windows of `ratio` rows become one vector each: per number a softmax over the window's scores weighs its values. `part` holds values,
 * the next one scores, a head each. With `overlap` a row has two vectors: the window takes the second ones of its own rows, and before them the first ones of the
 * `ratio` rows before it, if there are. One chain over ascending rows for the sum and for each number. */
typedef struct ds4_compress {
  const ds4_layout *layout;
  const ds4_view *views; /* [n_segments] */
  uint32_t layer, part, ratio, overlap, width, n;
  const uint32_t *segment, *first; /* [n] first row of the window */
  float *out;                      /* [n][width] */
} ds4_compress;

/* A matrix as a file has it. Scales (E8M0 bytes) belong to FP8, one per 128 x 128 weights, and to FP4, one per 32 of a row; else NULL. */
typedef struct ds4_matrix {
  int32_t format;
  bool mapped; /* too large to copy: the backend reads `data` as long as the weight lives */
  uint64_t rows, cols, nbytes;
  const uint8_t *data, *scales;
} ds4_matrix;

typedef struct ds4_ops {
  const char *name;
  int (*open)(int32_t threads, ds4_backend **out, ds4_error *err);
  void (*close)(ds4_backend *b);
  const char *(*isa)(const ds4_backend *b);
  uint32_t (*threads)(const ds4_backend *b);

  /* device memory, asynchronous copies, completion */
  void *(*mem_alloc)(ds4_backend *b, uint64_t bytes); /* 64-byte aligned; NULL when there is none */
  void (*mem_free)(ds4_backend *b, void *mem, uint64_t bytes);
  int (*copy_in)(ds4_backend *b, void *device, const void *host, uint64_t bytes);
  int (*copy_out)(ds4_backend *b, void *host, const void *device, uint64_t bytes);
  int (*copy)(ds4_backend *b, void *to, const void *from, uint64_t bytes); /* device to device */
  int (*wait)(ds4_backend *b);
  void (*begin)(ds4_backend *b, ds4_poll poll, void *user); /* opens a round; the calling thread's floating-point mode is set already */
  void (*end)(ds4_backend *b);

  /* weights */
  int (*weight_new)(ds4_backend *b, const ds4_matrix *m, ds4_weight **out, ds4_error *err);
  void (*weight_free)(ds4_backend *b, ds4_weight *w);
  uint64_t (*weight_bytes)(const ds4_weight *w); /* memory of its own, not the caller's */

  /* ops; each returns a status. x, y, out are [n][width] row-major */
  int (*embed)(ds4_backend *b, const ds4_weight *w, const int32_t *ids, uint32_t n, float *out);
  int (*rms_norm)(ds4_backend *b, const float *x, const float *weight, uint32_t n, uint32_t width, float eps,
                  float *out); /* weight NULL: ones */
  int (*matmul)(ds4_backend *b, const ds4_weight *const *w, float *const *out, uint32_t n_w, const float *x,
                uint32_t n); /* same x for all */
  int (*rope)(ds4_backend *b, float *x, const uint32_t *pos, uint32_t n, uint32_t heads, uint32_t width, const float *table,
              uint32_t interleaved); /* table[pos][width / 2][cos, sin] */
  int (*rows_write)(ds4_backend *b, const ds4_layout *l, uint32_t layer, uint32_t part, const ds4_view *views, const ds4_batch *batch,
                    const uint32_t *row, const float *x); /* rounds to the KV type; row[i] is the row of token i */
  int (*rows_read)(ds4_backend *b, const ds4_layout *l, uint32_t layer, uint32_t part, const ds4_view *view, uint32_t row, uint32_t n,
                   float *out);
  int (*attend)(ds4_backend *b, const ds4_attend *a);
  int (*glu)(ds4_backend *b, int kind, float limit, const float *gate, const float *up, uint64_t n, float *out); /* kind(gate) * up */
  int (*add)(ds4_backend *b, float *x, const float *y, uint64_t n);                                              /* x += y */
  int (*scale)(ds4_backend *b, float *x, float factor, uint64_t n);                                              /* x *= factor */
  int (*clear)(ds4_backend *b, float *x, uint64_t n);                                                            /* x = 0 */
  int (*gather)(ds4_backend *b, const float *x, const uint32_t *row, uint32_t n, uint32_t width, float *out);
  /* out[row[i]] += weight[i] * x[i], one fused multiply-add a number; no row comes twice. row and weight are memory of the host */
  int (*scatter_add)(ds4_backend *b, const float *x, const uint32_t *row, const float *weight, uint32_t n, uint32_t width, float *out);

  /* rows of compressed attention */
  int (*add_rows)(ds4_backend *b, float *x, const float *table, const uint32_t *row, uint32_t n,
                  uint32_t width); /* x[i] += table[row[i]] */
  /* Rotates the last `tail` numbers of each head in interleaved pairs; `inverse`: by the negative angle. */
  int (*rope_tail)(ds4_backend *b, float *x, const uint32_t *pos, uint32_t n, uint32_t heads, uint32_t width, uint32_t tail,
                   const float *table, bool inverse);
  int (*compress)(ds4_backend *b, const ds4_compress *c);
  int (*pick)(ds4_backend *b, const ds4_pick *p);
  int (*attend_sparse)(ds4_backend *b, const ds4_attend_sparse *a);
  /* Rounds vectors to what fp8 rows (the tail stays as it is) and fp4 rows (after a Hadamard transform / sqrt(width)) can hold. */
  int (*round_fp8)(ds4_backend *b, float *x, uint32_t n, uint32_t width, uint32_t tail);
  int (*round_fp4)(ds4_backend *b, float *x, uint32_t n, uint32_t width);

  /* Hyper-connections: `streams` residual streams of one token, h [n][streams][width]. mix_weights turns the products m [n][k] into weights:
   * k = streams: those of mix_in; k = (2 + streams) * streams: those of mix_in, of y, and the doubly stochastic matrix of mix_out. */
  int (*mix_weights)(ds4_backend *b, float *m, const float *scale, const float *base, uint32_t n, uint32_t k, uint32_t streams,
                     uint32_t iterations, float eps);
  int (*mix_in)(ds4_backend *b, const float *h, const float *m, uint32_t n, uint32_t k, uint32_t streams, uint32_t width, float *out);
  int (*mix_out)(ds4_backend *b, float *h, const float *y, const float *m, uint32_t n, uint32_t streams, uint32_t width);
} ds4_ops;

extern const ds4_ops ds4_ref_ops, ds4_cpu_ops;

#endif
