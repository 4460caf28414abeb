/* Weight formats, as formats.c and the backends share them.
 *
 * A quantised weight is made of a code of a few bits:   weight = scale * value(code) + minimum
 *
 *   value     code - offset, or a table's entry
 *   scale     of the block; in the K formats times an integer scale of the sub-block
 *   minimum   of the block (Q*_1); in Q2_K, Q4_K, Q5_K -(minimum of the block * integer minimum of the sub-block); else there is none */
#ifndef DS4_FORMATS_H
#define DS4_FORMATS_H

#include <stdbool.h>

#include "ds4.h"
#include "numeric.h"

#define DS4_BLOCK_MAX 256u

/* One block of a file taken apart, so that a format's bits are decoded in one place. */
typedef struct ds4_block {
  uint16_t d, m; /* f16 scale and minimum; MXFP4, FP4: d is the exponent byte */
  int8_t sc[16]; /* integer scale and minimum of each sub-block */
  uint8_t mn[16];
  uint8_t code[DS4_BLOCK_MAX];
} ds4_block;

typedef struct ds4_format_info {
  int32_t format;
  const char *name;
  uint32_t block, bytes;                                    /* weights and bytes of a block */
  void (*floats)(const uint8_t *p, uint64_t n, float *out); /* float formats */
  void (*take_apart)(const uint8_t *p, ds4_block *out);     /* quantised formats */
} ds4_format_info;
const ds4_format_info *ds4_format_find(int32_t format); /* NULL: not known */
/* `n` weights from the first of a block on, as numbers: the definition of the format. */
void ds4_format_floats(const ds4_format_info *f, const uint8_t *p, uint64_t n, float *out);
/* Bytes of the scales that lie beside the weights: those of FP8 and FP4, else 0. No overflow where ds4_format_bytes has found none. */
uint64_t ds4_scale_bytes(int32_t format, uint64_t rows, uint64_t cols);
extern const uint64_t ds4_iq2_grid[256], ds4_iq2_signs[128]; /* IQ2_XXS: eight codes; their bits 0 and 1, and bit 3 */
void ds4_block_floats(int32_t format, const ds4_block *b, uint32_t n, float *out);

/* What kernels have to know at compile time; with a constant `format` all of it is constant. */
typedef struct ds4_shape {
  uint32_t low, high;  /* code = low bits | high bits << low */
  int32_t offset;      /* value = code - offset, or table[code] */
  const int8_t *table; /* [16] */
  uint32_t sub;        /* weights of a sub-block, 0: the format has none */
  bool minimum;
  bool eighth; /* the block's scale is an eighth of what is stored */
  bool int8;   /* products take activations as int8 in blocks of 32; else as float32 */
} ds4_shape;

static const int8_t ds4_iq4_nl_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t ds4_iq2_values[16] = {8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43}; /* times 8; the fourth bit is the sign */
static const int8_t ds4_fp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; /* doubled */

static inline __attribute__((always_inline)) ds4_shape ds4_shape_of(int32_t format) {
  switch (format) {
  case DS4_Q8_0: return (ds4_shape){.low = 8, .offset = 128, .int8 = true};
  case DS4_Q4_0: return (ds4_shape){.low = 4, .offset = 8, .int8 = true};
  case DS4_Q4_1: return (ds4_shape){.low = 4, .minimum = true, .int8 = true};
  case DS4_Q5_0: return (ds4_shape){.low = 4, .high = 1, .offset = 16, .int8 = true};
  case DS4_Q5_1: return (ds4_shape){.low = 4, .high = 1, .minimum = true, .int8 = true};
  case DS4_Q2_K: return (ds4_shape){.low = 2, .sub = 16, .minimum = true, .int8 = true};
  case DS4_Q3_K: return (ds4_shape){.low = 2, .high = 1, .offset = 4, .sub = 16, .int8 = true};
  case DS4_Q4_K: return (ds4_shape){.low = 4, .sub = 32, .minimum = true, .int8 = true};
  case DS4_Q5_K: return (ds4_shape){.low = 4, .high = 1, .sub = 32, .minimum = true, .int8 = true};
  case DS4_Q6_K: return (ds4_shape){.low = 4, .high = 2, .offset = 32, .sub = 16, .int8 = true};
  case DS4_IQ2_XXS: return (ds4_shape){.low = 4, .table = ds4_iq2_values, .sub = 32, .eighth = true, .int8 = true};
  case DS4_IQ4_NL: return (ds4_shape){.low = 4, .table = ds4_iq4_nl_values, .int8 = true};
  case DS4_MXFP4:
  case DS4_FP4: return (ds4_shape){.low = 4, .table = ds4_fp4_values};
  default: return (ds4_shape){0}; /* floats */
  }
}

static inline int32_t ds4_code_value(const ds4_shape *s, uint32_t code) { return s->table ? s->table[code] : (int32_t)code - s->offset; }

/* 2^(e - 128): the MX scale of 2^(e - 127), halved because the values are doubled. */
static inline float ds4_e8m0_half(uint32_t e) { return ds4_float(e < 2 ? 0x00200000u << e : (e - 1) << 23); }

static inline float ds4_block_scale(int32_t format, const ds4_block *b) {
  if (format == DS4_IQ2_XXS) return ds4_f16(b->d) * 0.125f;
  return format == DS4_MXFP4 || format == DS4_FP4 ? ds4_e8m0_half(b->d) : ds4_f16(b->d);
}

static inline uint16_t ds4_load_u16(const uint8_t *p) {
  uint16_t v;
  memcpy(&v, p, 2);
  return v;
}

#endif
