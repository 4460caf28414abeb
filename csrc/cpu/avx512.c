/* The kernels for AVX-512 with VNNI: a vector of 16 is one register, and four int8 products are one instruction. */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")
#endif

#include <immintrin.h>

#include "kernels.h"

#include "../numeric.h"

typedef __m512 v16;

static inline v16 v_set1(float x) { return _mm512_set1_ps(x); }
static inline v16 v_zero(void) { return _mm512_setzero_ps(); }
static inline v16 v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v_store(float *p, v16 x) { _mm512_storeu_ps(p, x); }
static inline v16 v_add(v16 x, v16 y) { return _mm512_add_ps(x, y); }
static inline v16 v_sub(v16 x, v16 y) { return _mm512_sub_ps(x, y); }
static inline v16 v_mul(v16 x, v16 y) { return _mm512_mul_ps(x, y); }
static inline v16 v_div(v16 x, v16 y) { return _mm512_div_ps(x, y); }
static inline v16 v_max(v16 x, v16 y) { return _mm512_max_ps(x, y); }
static inline v16 v_fma(v16 x, v16 y, v16 z) { return _mm512_fmadd_ps(x, y, z); }
static inline v16 v_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p)); }
static inline v16 v_bf16(const uint16_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p)), 16));
}
static inline v16 v_i8(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)));
}
static inline v16 v_below(v16 x, v16 y, v16 t, v16 f) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), f, t); }
static inline v16 v_pow2(v16 n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}

static inline uint32_t v_top(v16 x, v16 y) {
  __m512i mask = _mm512_set1_epi32(0x7fffffff);
  return _mm512_reduce_max_epu32(
      _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(x), mask), _mm512_and_si512(_mm512_castps_si512(y), mask)));
}

static inline int32_t v_quant(v16 x, v16 y, float scale, int8_t *q) {
  __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(scale))), b = _mm512_cvtps_epi32(_mm512_mul_ps(y, _mm512_set1_ps(scale)));
  _mm_storeu_si128((__m128i *)(void *)q, _mm512_cvtsepi32_epi8(a));
  _mm_storeu_si128((__m128i *)(void *)(q + 16), _mm512_cvtsepi32_epi8(b));
  return _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
}

#define DOT_TILE 8
#define FLOAT_TILE 8
#define ROW_TILE 6
#define SCORE_PIECES 1
#define WIDE 4

static inline __m512i four(const int8_t *x) {
  int32_t v;
  memcpy(&v, x, 4);
  return _mm512_set1_epi32(v);
}

/* The instruction wants one side unsigned: weights get 128 added, and 128 * the sum of the activations is taken away again. */
static inline __attribute__((always_inline)) void dot_q8_0(const uint8_t *w, const int8_t *x, const int32_t *sum, uint32_t blocks,
                                                           const int tokens, v16 *out) {
  __m512i acc[DOT_TILE];
  for (int t = 0; t < tokens; t++) acc[t] = _mm512_set1_epi32(-128 * sum[(uint64_t)t * blocks]);
  for (int k = 0; k < 8; k++) {
    __m512i v = _mm512_xor_si512(_mm512_loadu_si512(w + 64 * k), _mm512_set1_epi8(-128));
    for (int t = 0; t < tokens; t++) acc[t] = _mm512_dpbusd_epi32(acc[t], v, four(x + (uint64_t)t * blocks * 32 + 4 * k));
  }
  for (int t = 0; t < tokens; t++) out[t] = _mm512_cvtepi32_ps(acc[t]);
}

static inline __attribute__((always_inline)) void dot_q4_1(const uint8_t *w, const int8_t *x, uint32_t blocks, const int tokens, v16 *out) {
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512i acc[DOT_TILE];
  for (int t = 0; t < tokens; t++) acc[t] = _mm512_setzero_si512();
  for (int k = 0; k < 4; k++) {
    __m512i both = _mm512_loadu_si512(w + 64 * k);
    __m512i low = _mm512_and_si512(both, nibble), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    for (int t = 0; t < tokens; t++) {
      const int8_t *xt = x + (uint64_t)t * blocks * 32 + 4 * k;
      acc[t] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(acc[t], low, four(xt)), high, four(xt + 16));
    }
  }
  for (int t = 0; t < tokens; t++) out[t] = _mm512_cvtepi32_ps(acc[t]);
}

#include "kernels.inc.h"

const ds4_kernels ds4_kernels_avx512 = {"avx512", k_quantize, k_matmul_float, k_matmul_quant, k_rms_norm, k_glu, k_attend};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int ds4_no_avx512;
#endif
