/* The kernels of backend "cpu": one table per instruction set, all from kernels.inc.h and all with the same bits. */
#ifndef DS4_KERNELS_H
#define DS4_KERNELS_H

#include <math.h>

#include "../formats.h"
#include "../smallfloat.h"
#include "host.h"

#define DS4_LANES 16u /* rows of a group of packed weights, and lanes of every vector */

/* A matrix in groups of 16 rows, so that a SIMD lane is a row and one token and many run the same order of operations (DESIGN 5.1). Missing rows of the
 * last group are zeros. Group after group, and in each:
 *
 *   floats       k0: row 0..15 | k1: row 0..15 | ..
 *   quantised    a head, `per` bodies of 32 k (one, or the eight of a K block), the next head ..
 *
 *   head         f16 scale of row 0..15 | f16 minimum of row 0..15, if there is one          MXFP4: exponent byte of row 0..15
 *                with sub-blocks, for each of the eight bodies 32 bytes:
 *                  of 32    scale of row 0..15 | minimum of row 0..15
 *                  of 16    scale of the first half, of row 0..15 | scale of the second half, of row 0..15; Q2_K: minimums in the high four bits
 *   body         the plane of the codes' low bits | the plane of the high bits, if there are
 *
 * A plane holds b of 8, 4, 2, 1 bits of every code in b vectors of 64 bytes, four to a row. Step j of a body is weight 4 j .. 4 j + 3 of all rows: vector
 * j % b, in each byte the b bits from bit j / b * b on. So every step is a load, a shift and a mask. Q8_0 is stored signed.
 *
 * FP8 is a float format with the scales of the group's 128-column blocks, in whole lines of 16, before it. FP4 is packed as MXFP4, which has the same
 * numbers. A mapped matrix stays as the file has it, and a thread packs the groups that it needs into memory of its own: `first` is the first group that
 * lies in `data`. */
typedef struct ds4_packed {
  int32_t format;
  uint32_t rows, cols, groups, first;
  uint64_t group_bytes, bytes;
  uint8_t *data;
} ds4_packed;

typedef struct ds4_pack {
  uint32_t per, scales, head, body; /* bodies of a head; bytes before the integer scales, of a head, of a body */
} ds4_pack;

static inline __attribute__((always_inline)) ds4_pack ds4_pack_of(ds4_shape f) {
  uint32_t scales = !f.int8 ? 16 : f.minimum ? 64 : 32;
  return (ds4_pack){.per = f.sub ? 8 : 1, .scales = scales, .head = scales + (f.sub ? 256 : 0), .body = 64 * (f.low + f.high)};
}

static inline uint32_t ds4_fp8_head(uint32_t cols) { return ((cols + DS4_FP8_TILE - 1) / DS4_FP8_TILE + 15) / 16 * 16; }
/* X(format) for every format whose products take activations as int8. */
#define DS4_INT8_FORMATS(X)                                                                                                                \
  X(DS4_Q8_0)                                                                                                                              \
  X(DS4_Q4_0) X(DS4_Q4_1) X(DS4_Q5_0) X(DS4_Q5_1) X(DS4_Q2_K) X(DS4_Q3_K) X(DS4_Q4_K) X(DS4_Q5_K) X(DS4_Q6_K) X(DS4_IQ2_XXS) X(DS4_IQ4_NL)

uint64_t ds4_packed_group_bytes(int32_t format, uint64_t cols);
/* Packs one group of a matrix as it lies in a file. */
void ds4_pack_group(const ds4_packed *w, uint32_t group, const ds4_matrix *from);
/* One row as numbers, the same as ds4_format_floats gives of the file's. */
void ds4_unpack_row(const ds4_packed *w, uint32_t row, float *out);

/* Activations as int8, per token and block of 32: numbers, scale, scale * sum, and the sums of both halves. `stride` keeps the tokens of a tile out of each
 * other's cache sets: at a power of two they would all fall into the same few, at half the speed. */
typedef struct ds4_quants {
  uint32_t blocks, stride; /* blocks of a token, and from one token to the next */
  int8_t *q;               /* [n][stride * 32] */
  float *d, *dq;           /* [n][stride] */
  int16_t *sum;            /* [n][stride][2] */
} ds4_quants;

static inline uint32_t ds4_quants_stride(uint32_t blocks) { return blocks % 8 ? blocks : blocks + 2; }

/* One item of attention: some tokens of one segment, one head of the stream, the splits [split, split_end). */
typedef struct ds4_attend_item {
  const ds4_attend *a;
  uint32_t token, n_tokens, kv, split, split_end;
  /* NULL: write the result to a->out; else [rows][2 + value width in whole lanes]: maximum, sum, values, for attend_merge */
  float *partial;
} ds4_attend_item;

typedef struct ds4_kernels {
  const char *isa;
  void (*quantize)(const float *x, uint32_t token, ds4_quants *out);
  void (*matmul_float)(const ds4_packed *w, uint32_t group, uint32_t groups, const float *x, uint32_t n, float *out);
  void (*matmul_quant)(const ds4_packed *w, uint32_t group, uint32_t groups, const ds4_quants *x, uint32_t n, float *out);
  void (*rms_norm)(const float *x, const float *weight, uint32_t width, float eps, float *out);
  void (*to_f16)(const float *x, uint32_t n, uint16_t *out);
  void (*glu)(int kind, float limit, const float *gate, const float *up, uint64_t n, float *out);
  void (*attend)(const ds4_attend_item *item, float *scratch);
  void (*attend_merge)(float *into, float max, float sum, const float *values, uint32_t width);
  /* sparse.inc.h, each for one token or window */
  void (*mix_in)(const float *h, const float *m, uint32_t streams, uint32_t width, float *out);
  void (*mix_out)(float *h, const float *y, const float *m, uint32_t streams, uint32_t width);
  void (*compress)(const ds4_compress *c, uint32_t window);
  void (*score)(const ds4_pick *p, uint32_t from, uint32_t to, uint32_t row, uint32_t end, float *score, uint32_t stride, float *scratch);
  void (*attend_sparse)(const ds4_attend_sparse *a, uint32_t token, uint32_t head, float *scratch);
} ds4_kernels;

/* Floats of scratch that one thread needs for attend. */
uint64_t ds4_attend_scratch(const ds4_attend *a, uint32_t n_tokens);

/* The result of one row, [width], once all its splits are merged: maximum, sum, values. A row that read nothing is zeros. */
static inline void ds4_attend_result(const float *all, uint32_t width, float *out) {
  float inverse = 1.0f / all[1];
  for (uint32_t i = 0; i < width; i++) out[i] = all[0] == -INFINITY && all[1] == 0.0f ? 0.0f : all[2 + i] * inverse;
}

static inline uint32_t ds4_lanes_up(uint32_t n) { return (n + DS4_LANES - 1) / DS4_LANES * DS4_LANES; }

/* Floats of scratch for one item of `score`: keys, products; and of `attend_sparse`: queries, products, values, probabilities, results. */
static inline uint64_t ds4_score_scratch(const ds4_pick *p) {
  uint64_t width = p->layout->part[p->part].width;
  return (width + p->heads) * DS4_KEY_BLOCK;
}
static inline uint64_t ds4_sparse_scratch(const ds4_attend_sparse *a) {
  uint64_t width = a->layout->part[0].width, padded = ds4_lanes_up((uint32_t)width);
  uint64_t p = 16 * DS4_KEY_BLOCK > 2 + padded ? 16 * DS4_KEY_BLOCK : 2 + padded;
  return width * 16 + 16 * DS4_KEY_BLOCK + padded * DS4_KEY_BLOCK + p + 16 * padded + 16 * (2 + padded) + 32;
}

extern const ds4_kernels ds4_kernels_scalar;
#if defined(__x86_64__)
extern const ds4_kernels ds4_kernels_avx2, ds4_kernels_avx512;
#elif defined(__aarch64__)
extern const ds4_kernels ds4_kernels_neon, ds4_kernels_neon_dot;
bool ds4_neon_has_dot(void);
#endif

#endif
