/* Numbers of 8 and 4 bits: FP8 (E4M3: 4 bits of exponent, bias 7, no infinity, S.1111.111 is NaN), FP4 (E2M1: 0, .5, 1, 1.5, 2, 3, 4, 6) and the scales
 * of both (E8M0: byte b is 2^(b - 127), 255 is NaN). Shared by weights and rows. */
#ifndef DS4_SMALLFLOAT_H
#define DS4_SMALLFLOAT_H

#include "numeric.h"

#define DS4_FP8_BLOCK 64u /* numbers of a row with one scale */
#define DS4_FP4_BLOCK 32u
#define DS4_FP8_TILE 128u /* a scale of FP8 weights: so many rows and columns */
#define DS4_FP8_NAN 0x7fu

static inline float ds4_e8m0(uint32_t b) {
  if (b == 255) return NAN;
  return ds4_float(b ? b << 23 : 0x00400000u);
}

/* Through binary16, whose exponent has one bit more: the same bits, 2^8 too small. SIMD kernels do it this way. */
static inline float ds4_e4m3(uint8_t b) {
  if ((b & 0x7fu) == DS4_FP8_NAN) return NAN;
  return ds4_f16((uint16_t)((b & 0x80u) << 8 | (b & 0x7fu) << 7)) * 256.0f;
}

/* To nearest even; |x| above 448 becomes 448, NaN stays NaN. */
static inline uint8_t ds4_to_e4m3(float x) {
  uint32_t u = ds4_bits(x), sign = u >> 24 & 0x80u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return (uint8_t)(sign | DS4_FP8_NAN);
  if (a < 0x3c800000u) return (uint8_t)(sign | (uint32_t)ds4_round(ds4_float(a) * 512.0f)); /* below 2^-6: steps of 2^-9 */
  uint32_t code = ((a + 0x7ffffu + (a >> 20 & 1u)) >> 20) - (120u << 3);
  return (uint8_t)(sign | (code < 0x7eu ? code : 0x7eu));
}

/* To nearest, ties to the even code; |x| above 6 becomes 6. */
static inline uint8_t ds4_to_e2m1(float x) {
  float a = fabsf(x);
  uint32_t code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return (uint8_t)(code | (ds4_bits(x) >> 28 & 8u));
}

static inline float ds4_e2m1(uint32_t code) {
  static const float values[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return code & 8u ? -values[code & 7u] : values[code & 7u];
}

static inline uint16_t ds4_to_bf16(float x) {
  uint32_t u = ds4_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
  return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

/* E8M0 of 2^ceil(log2(max(|x|, least) / most)) over a block; 255 when it holds a NaN or an infinity. */
static inline uint8_t ds4_block_e8m0(const float *x, uint32_t n, float least, float most) {
  uint32_t top = 0;
  for (uint32_t i = 0; i < n; i++) {
    uint32_t a = ds4_bits(x[i]) & 0x7fffffffu;
    if (a > top) top = a;
  }
  if (top >= 0x7f800000u) return 255;
  float amax = ds4_float(top);
  uint32_t u = ds4_bits((amax > least ? amax : least) / most);
  return (uint8_t)((u >> 23) + ((u & 0x7fffffu) != 0));
}

/* The scales that rows use; least and most are those of the model's training. */
static inline uint8_t ds4_fp8_scale(const float *x, uint32_t n) { return ds4_block_e8m0(x, n, 1e-4f, 448.0f); }
static inline uint8_t ds4_fp4_scale(const float *x, uint32_t n) { return ds4_block_e8m0(x, n, 6.0f * 0x1p-126f, 6.0f); }
static inline float ds4_e8m0_inverse(uint32_t b) { return b == 255 ? NAN : ds4_float((254u - b) << 23); }

#endif
