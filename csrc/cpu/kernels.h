/* The kernels of backend "cpu": one table per instruction set, all from kernels.inc.h and all with the same bits. */
#ifndef DS4_KERNELS_H
#define DS4_KERNELS_H

#include "host.h"

#define DS4_LANES 16u /* rows of a group of packed weights, and lanes of every vector */

/* A matrix in groups of 16 rows, so that a SIMD lane is a row and one token and many run the same order of operations (DESIGN 5.1). Missing rows of the
 * last group are zeros. Group after group, and in each:
 *
 *   F32, F16, BF16   k0: row 0..15 | k1: row 0..15 | ..
 *   Q8_0             per block of 32 k:  f16 scale of row 0..15 | k0..3 of row 0, of row 1 .. of row 15 | k4..7 of row 0 .. | .. (512 bytes)
 *   Q4_1             per block of 32 k:  f16 scale of row 0..15 | f16 minimum of row 0..15 | bytes 0..3 of row 0 .. of row 15 | bytes 4..7 .. (256 bytes);
 *                    byte i holds weight i in its low and weight i + 16 in its high half, as in the file */
typedef struct ds4_packed {
  int32_t format;
  uint32_t rows, cols, groups;
  uint64_t group_bytes, bytes;
  uint8_t *data;
} ds4_packed;
#define DS4_Q8_0_BLOCK (32u + 512u)
#define DS4_Q4_1_BLOCK (64u + 256u)

/* Activations as int8, per token and block of 32: numbers, scale, scale * sum, sum. */
typedef struct ds4_quants {
  uint32_t blocks; /* per token */
  int8_t *q;       /* [n][blocks * 32] */
  float *d, *dq;   /* [n][blocks] */
  int32_t *sum;    /* [n][blocks] */
} ds4_quants;

/* One item of attention: some tokens of one segment, one head of the stream, the splits [split, split_end). */
typedef struct ds4_attend_item {
  const ds4_attend *a;
  uint32_t token, n_tokens, kv, split, split_end;
  float *partial; /* NULL: write the result to a->out; else [rows][2 + value width] for ds4_kernels.merge */
} ds4_attend_item;

typedef struct ds4_kernels {
  const char *isa;
  void (*quantize)(const float *x, uint32_t token, ds4_quants *out);
  void (*matmul_float)(const ds4_packed *w, uint32_t group, uint32_t groups, const float *x, uint32_t n, float *out);
  void (*matmul_quant)(const ds4_packed *w, uint32_t group, uint32_t groups, const ds4_quants *x, uint32_t n, float *out);
  void (*rms_norm)(const float *x, const float *weight, uint32_t width, float eps, float *out);
  void (*glu)(int kind, const float *gate, const float *up, uint64_t n, float *out);
  void (*attend)(const ds4_attend_item *item, float *scratch);
} ds4_kernels;

/* Floats of scratch that one thread needs for attend. */
uint64_t ds4_attend_scratch(const ds4_attend *a, uint32_t n_tokens);
/* Adds the partial result `next` to `into` ([2 + width]: maximum, sum, weighted values); an empty one (sum 0, maximum -inf) changes nothing. */
void ds4_attend_merge(float *into, const float *next, uint32_t width);

static inline uint32_t ds4_lanes_up(uint32_t n) { return (n + DS4_LANES - 1) / DS4_LANES * DS4_LANES; }

extern const ds4_kernels ds4_kernels_scalar;
#if defined(__x86_64__)
extern const ds4_kernels ds4_kernels_avx2, ds4_kernels_avx512;
#endif

#endif
