/* The kernels for AVX2 + FMA + F16C: a vector of 16 is two registers. */
#if defined(__x86_64__)

/* Everything below, inline functions included, is compiled for these instructions; cpu.c calls it only where they are there. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include <immintrin.h>

#include "kernels.h"

#include "../numeric.h"

typedef struct v16 {
  __m256 a, b;
} v16;

#define BOTH(op, x, y) ((v16){op((x).a, (y).a), op((x).b, (y).b)})

static inline v16 v_set1(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline v16 v_zero(void) { return (v16){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline v16 v_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void v_store(float *p, v16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline v16 v_add(v16 x, v16 y) { return BOTH(_mm256_add_ps, x, y); }
static inline v16 v_sub(v16 x, v16 y) { return BOTH(_mm256_sub_ps, x, y); }
static inline v16 v_mul(v16 x, v16 y) { return BOTH(_mm256_mul_ps, x, y); }
static inline v16 v_div(v16 x, v16 y) { return BOTH(_mm256_div_ps, x, y); }
static inline v16 v_max(v16 x, v16 y) { return BOTH(_mm256_max_ps, x, y); }
static inline v16 v_fma(v16 x, v16 y, v16 z) { return (v16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline v16 v_f16(const uint16_t *p) {
  return (v16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p)),
               _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p + 8)))};
}
static inline __m256 bf16_8(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)), 16));
}
static inline v16 v_bf16(const uint16_t *p) { return (v16){bf16_8(p), bf16_8(p + 8)}; }
static inline __m256 i8_8(const int8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p)));
}
static inline v16 v_i8(const int8_t *p) { return (v16){i8_8(p), i8_8(p + 8)}; }
static inline v16 v_below(v16 x, v16 y, v16 t, v16 f) {
  return (v16){_mm256_blendv_ps(f.a, t.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
               _mm256_blendv_ps(f.b, t.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
static inline __m256 pow2_8(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline v16 v_pow2(v16 n) { return (v16){pow2_8(n.a), pow2_8(n.b)}; }

static inline uint32_t v_top(v16 x, v16 y) {
  __m256i mask = _mm256_set1_epi32(0x7fffffff), m = _mm256_and_si256(_mm256_castps_si256(x.a), mask);
  m = _mm256_max_epu32(m, _mm256_and_si256(_mm256_castps_si256(x.b), mask));
  m = _mm256_max_epu32(m, _mm256_and_si256(_mm256_castps_si256(y.a), mask));
  m = _mm256_max_epu32(m, _mm256_and_si256(_mm256_castps_si256(y.b), mask));
  __m128i h = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  h = _mm_max_epu32(h, _mm_shuffle_epi32(h, 0x4e));
  h = _mm_max_epu32(h, _mm_shuffle_epi32(h, 0xb1));
  return (uint32_t)_mm_cvtsi128_si32(h);
}

static inline int32_t v_quant(v16 x, v16 y, float scale, int8_t *q) {
  __m256 s = _mm256_set1_ps(scale);
  __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(x.a, s)), b = _mm256_cvtps_epi32(_mm256_mul_ps(x.b, s));
  __m256i c = _mm256_cvtps_epi32(_mm256_mul_ps(y.a, s)), d = _mm256_cvtps_epi32(_mm256_mul_ps(y.b, s));
  __m256i sum = _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d));
  __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256((__m256i *)(void *)q, bytes);
  __m128i h = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0x4e));
  h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0xb1));
  return _mm_cvtsi128_si32(h);
}

#define DOT_TILE 4
#define FLOAT_TILE 4
#define ROW_TILE 3
#define SCORE_PIECES 2
#define WIDE 2

static inline __m256i four(const int8_t *x) {
  int32_t v;
  memcpy(&v, x, 4);
  return _mm256_set1_epi32(v);
}

static inline __attribute__((always_inline)) void dot_q8_0(const uint8_t *w, const int8_t *x, const int32_t *sum, uint32_t blocks,
                                                           const int tokens, v16 *out) {
  (void)sum;
  const __m256i ones = _mm256_set1_epi16(1);
  for (int half = 0; half < 2; half++, w += 32) {
    __m256i acc[DOT_TILE];
    for (int t = 0; t < tokens; t++) acc[t] = _mm256_setzero_si256();
    for (int k = 0; k < 8; k++) {
      __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)(w + 64 * k)),
              size = _mm256_abs_epi8(v); /* |-128| is 128 as unsigned: 2 * 128 * 127 fits */
      for (int t = 0; t < tokens; t++) {
        __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four(x + (uint64_t)t * blocks * 32 + 4 * k), v));
        acc[t] = _mm256_add_epi32(acc[t], _mm256_madd_epi16(pairs, ones));
      }
    }
    for (int t = 0; t < tokens; t++) *(half ? &out[t].b : &out[t].a) = _mm256_cvtepi32_ps(acc[t]);
  }
}

/* 16-bit partial sums hold a whole block: 8 pairs of at most 2 * 15 * 127. */
static inline __attribute__((always_inline)) void dot_q4_1(const uint8_t *w, const int8_t *x, uint32_t blocks, const int tokens, v16 *out) {
  const __m256i ones = _mm256_set1_epi16(1), nibble = _mm256_set1_epi8(15);
  for (int half = 0; half < 2; half++, w += 32) {
    __m256i acc[DOT_TILE];
    for (int t = 0; t < tokens; t++) acc[t] = _mm256_setzero_si256();
    for (int k = 0; k < 4; k++) {
      __m256i both = _mm256_loadu_si256((const __m256i *)(const void *)(w + 64 * k));
      __m256i low = _mm256_and_si256(both, nibble), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
      for (int t = 0; t < tokens; t++) {
        const int8_t *xt = x + (uint64_t)t * blocks * 32 + 4 * k;
        acc[t] = _mm256_add_epi16(acc[t], _mm256_maddubs_epi16(low, four(xt)));
        acc[t] = _mm256_add_epi16(acc[t], _mm256_maddubs_epi16(high, four(xt + 16)));
      }
    }
    for (int t = 0; t < tokens; t++) *(half ? &out[t].b : &out[t].a) = _mm256_cvtepi32_ps(_mm256_madd_epi16(acc[t], ones));
  }
}

#include "kernels.inc.h"

const ds4_kernels ds4_kernels_avx2 = {"avx2", k_quantize, k_matmul_float, k_matmul_quant, k_rms_norm, k_glu, k_attend};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int ds4_no_avx2;
#endif
