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
static inline void v_to_f16(uint16_t *p, v16 x) {
  _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline v16 v_set1_f16(uint16_t x) { return _mm512_cvtph_ps(_mm256_set1_epi16((int16_t)x)); }
static inline v16 v_bf16(const uint16_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p)), 16));
}
/* Through binary16, as ds4_e4m3. */
static inline v16 v_e4m3(const uint8_t *p) {
  __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)p));
  __m256i sign = _mm256_slli_epi16(_mm256_and_si256(v, _mm256_set1_epi16(0x80)), 8);
  __m256i rest = _mm256_slli_epi16(_mm256_and_si256(v, _mm256_set1_epi16(0x7f)), 7);
  return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, rest)), _mm512_set1_ps(256.0f));
}
static inline v16 v_i8(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)));
}
static inline v16 v_below(v16 x, v16 y, v16 t, v16 f) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), f, t); }
static inline v16 v_pow2(v16 n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}

static inline float v_sum(v16 x) {
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
static inline float v_largest(v16 x) { return _mm512_reduce_max_ps(x); }

static inline uint32_t v_top(v16 x, v16 y) {
  __m512i mask = _mm512_set1_epi32(0x7fffffff);
  return _mm512_reduce_max_epu32(
      _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(x), mask), _mm512_and_si512(_mm512_castps_si512(y), mask)));
}

static inline void v_quant(v16 x, v16 y, float scale, int8_t *q, int32_t *sum) {
  __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(scale))), b = _mm512_cvtps_epi32(_mm512_mul_ps(y, _mm512_set1_ps(scale)));
  _mm_storeu_si128((__m128i *)(void *)q, _mm512_cvtsepi32_epi8(a));
  _mm_storeu_si128((__m128i *)(void *)(q + 16), _mm512_cvtsepi32_epi8(b));
  sum[0] = _mm512_reduce_add_epi32(a);
  sum[1] = _mm512_reduce_add_epi32(b);
}

#define VB_ROWS 16
#define VI_BYTES(p) (vi) _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define VB_TABLE(p) (vb) _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define VB_LOOKUP(table, v) (vb) _mm512_shuffle_epi8((__m512i)(table), (__m512i)(v))
#include "decode.inc.h"

#define DOT_TILE 8
#define FP4_PIECES 1
#define FLOAT_TILE 8
#define ROW_TILE 6
#define SCORE_PIECES 1
#define WIDE 4

INLINE vq q_fma(vq a, vq b, vq c) { return (vq)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vq q_f16(const uint8_t *p) { return (vq)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p)); }

INLINE __m512i four(const void *x) {
  int32_t v;
  memcpy(&v, x, 4);
  return _mm512_set1_epi32(v);
}

/* The bytes of 16 rows from `p` on and 16 bytes later, as pairs of 16 bits. */
INLINE __m512i byte_pairs(const uint8_t *p) {
  __m128i a = _mm_loadu_si128((const __m128i *)(const void *)p), b = _mm_loadu_si128((const __m128i *)(const void *)(p + 16));
  return _mm512_cvtepi8_epi16(_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi8(a, b)), _mm_unpackhi_epi8(a, b), 1));
}

INLINE vi sub_scale(ds4_shape f, const uint8_t *p) { return f.minimum ? vi_bytes(p) & 15 : vi_bytes(p); }

/* The instruction wants one side unsigned: what a code has too much, times the sum of the activations, is taken away at the start, or where sub-blocks
 * of 16 are combined. Wide formats get 128 added. */
INLINE void dot_block(int32_t format, const uint8_t *body, const uint8_t *scales, const int8_t *x, const int16_t *sum, uint32_t stride,
                      const int t, vi *isum) {
  const ds4_shape f = ds4_shape_of(format);
  const __m512i zero = _mm512_setzero_si512(), less = _mm512_set1_epi16((int16_t)(is_wide(f) ? -128 : -f.offset));
  __m512i first[DOT_TILE], second[DOT_TILE];
  UNROLL for (int i = 0; i < t; i++) {
    bool now = f.sub != 16 && (is_wide(f) || f.offset);
    first[i] = now ? _mm512_dpwssd_epi32(zero, less, four(sum + (uint64_t)i * stride * 2)) : zero;
    second[i] = zero;
  }
  UNROLL for (int j = 0; j < 8; j++) {
    __m512i v = (__m512i)quant_step(format, body, j, 128);
    UNROLL for (int i = 0; i < t; i++) {
      __m512i *to = f.sub == 16 && j >= 4 ? &second[i] : &first[i];
      *to = _mm512_dpbusd_epi32(*to, v, four(x + (uint64_t)i * stride * 32 + 4 * j));
    }
  }
  UNROLL for (int i = 0; i < t; i++) {
    isum[i] = (vi)first[i];
    if (f.sub != 16) continue;
    isum[i] = isum[i] * sub_scale(f, scales) + (vi)second[i] * sub_scale(f, scales + 16);
    if (f.offset)
      isum[i] =
          (vi)_mm512_dpwssd_epi32((__m512i)isum[i], _mm512_mullo_epi16(less, byte_pairs(scales)), four(sum + (uint64_t)i * stride * 2));
  }
}

INLINE vi dot_minimums(const uint8_t *scales, const int16_t *sum) {
  __m512i m = _mm512_and_si512(_mm512_srli_epi16(byte_pairs(scales), 4), _mm512_set1_epi16(15));
  return (vi)_mm512_dpwssd_epi32(_mm512_setzero_si512(), m, four(sum));
}

#include "kernels.inc.h"

const ds4_kernels ds4_kernels_avx512 = {"avx512", k_quantize,     k_matmul_float, k_matmul_quant, k_rms_norm, k_to_f16, k_glu,
                                        k_attend, k_attend_merge, k_mix_in,       k_mix_out,      k_compress, k_score,  k_attend_sparse};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int ds4_no_avx512;
#endif
