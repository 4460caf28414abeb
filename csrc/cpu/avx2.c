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
static inline void v_to_f16(uint16_t *p, v16 x) {
  _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128((__m128i *)(void *)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline v16 v_set1_f16(uint16_t x) {
  __m256 one = _mm256_cvtph_ps(_mm_set1_epi16((int16_t)x));
  return (v16){one, one};
}
static inline __m256 bf16_8(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)), 16));
}
static inline v16 v_bf16(const uint16_t *p) { return (v16){bf16_8(p), bf16_8(p + 8)}; }
/* Through binary16, as ds4_e4m3. */
static inline __m256 e4m3_8(__m128i v) {
  __m128i sign = _mm_slli_epi16(_mm_and_si128(v, _mm_set1_epi16(0x80)), 8),
          rest = _mm_slli_epi16(_mm_and_si128(v, _mm_set1_epi16(0x7f)), 7);
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(sign, rest)), _mm256_set1_ps(256.0f));
}
static inline v16 v_e4m3(const uint8_t *p) {
  __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)p));
  return (v16){e4m3_8(_mm256_castsi256_si128(v)), e4m3_8(_mm256_extracti128_si256(v, 1))};
}
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

static inline float v_sum(v16 x) {
  __m256 a = _mm256_add_ps(x.a, x.b);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
static inline float v_largest(v16 x) {
  __m256 a = _mm256_max_ps(x.a, x.b);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

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

static inline void v_quant(v16 x, v16 y, float scale, int8_t *q, int32_t *sum) {
  __m256 s = _mm256_set1_ps(scale);
  __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(x.a, s)), b = _mm256_cvtps_epi32(_mm256_mul_ps(x.b, s));
  __m256i c = _mm256_cvtps_epi32(_mm256_mul_ps(y.a, s)), d = _mm256_cvtps_epi32(_mm256_mul_ps(y.b, s));
  __m256i both = _mm256_hadd_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d)); /* a half's pairs | the other's, twice */
  __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256((__m256i *)(void *)q, bytes);
  __m128i h = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  h = _mm_hadd_epi32(h, h);
  sum[0] = _mm_cvtsi128_si32(h);
  sum[1] = _mm_extract_epi32(h, 1);
}

#define VB_ROWS 8
#define VI_BYTES(p) (vi) _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(p)))
#define VB_TABLE(p) (vb) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define VB_LOOKUP(table, v) (vb) _mm256_shuffle_epi8((__m256i)(table), (__m256i)(v))
#include "decode.inc.h"

#define DOT_TILE 4
#define FP4_PIECES 2
#define FLOAT_TILE 4
#define ROW_TILE 3
#define SCORE_PIECES 2
#define WIDE 2

INLINE vq q_fma(vq a, vq b, vq c) { return (vq)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vq q_f16(const uint8_t *p) { return (vq)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p)); }

INLINE __m256i four(const void *x) {
  int32_t v;
  memcpy(&v, x, 4);
  return _mm256_set1_epi32(v);
}

/* Bytes of eight rows, from `p` and from `q`, as pairs of 16 bits. */
INLINE __m256i byte_pairs(const uint8_t *p, const uint8_t *q) {
  __m128i a = _mm_loadl_epi64((const __m128i *)(const void *)p), b = _mm_loadl_epi64((const __m128i *)(const void *)q);
  return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
}
INLINE __m256i scale_pairs(ds4_shape f, const uint8_t *p, const uint8_t *q) {
  return f.minimum ? _mm256_and_si256(byte_pairs(p, q), _mm256_set1_epi16(15)) : byte_pairs(p, q);
}

/* Steps whose 16-bit partial sums, pairs of at most 2 * 127 * the largest code, fit together. A wide format takes |weight| and the activation with
 * the weight's sign; |-128| is 128 as unsigned, and 2 * 128 * 127 fits. A sub-block of 16 has four steps. */
INLINE int dot_steps(ds4_shape f) {
  int bits = (int)(f.low + f.high);
  return is_wide(f) ? 1 : bits == 6 ? 2 : bits == 5 || f.sub == 16 ? 4 : 8;
}

/* Pins a partial sum to a register: left alone, gcc sums the steps as a tree, which needs more registers than there are. */
#define PIN(x) __asm__("" : "+x"(x))

INLINE void dot_block(int32_t format, const uint8_t *body, const uint8_t *scales, const int8_t *x, const int16_t *sum, uint32_t stride,
                      const int t, vi *isum) {
  const ds4_shape f = ds4_shape_of(format);
  const int steps = dot_steps(f);
  __m256i part[DOT_TILE], weight[2] = {_mm256_set1_epi16(1), _mm256_set1_epi16(1)};
  if (f.sub == 16) weight[0] = scale_pairs(f, scales, scales), weight[1] = scale_pairs(f, scales + 16, scales + 16);
  UNROLL for (int j = 0; j < 8; j++) {
    __m256i v = (__m256i)quant_step(format, body, j, 0), size = is_wide(f) ? _mm256_abs_epi8(v) : v;
    UNROLL for (int i = 0; i < t; i++) {
      __m256i xi = four(x + (uint64_t)i * stride * 32 + 4 * j);
      __m256i pairs = _mm256_maddubs_epi16(size, is_wide(f) ? _mm256_sign_epi8(xi, v) : xi);
      part[i] = j % steps ? _mm256_add_epi16(part[i], pairs) : pairs;
      if (t > 1) PIN(part[i]);
      if (j % steps < steps - 1) continue;
      vi whole = (vi)_mm256_madd_epi16(part[i], weight[j / 4]);
      isum[i] = j < steps ? whole : isum[i] + whole;
      if (t > 1) PIN(isum[i]);
    }
  }
  if (!f.offset || is_wide(f)) return;
  __m256i offset = _mm256_set1_epi16((int16_t)f.offset);
  if (f.sub == 16) offset = _mm256_mullo_epi16(offset, scale_pairs(f, scales, scales + 16));
  UNROLL for (int i = 0; i < t; i++) isum[i] -= (vi)_mm256_madd_epi16(offset, four(sum + (uint64_t)i * stride * 2));
}

INLINE vi dot_minimums(const uint8_t *scales, const int16_t *sum) {
  __m256i m = _mm256_and_si256(_mm256_srli_epi16(byte_pairs(scales, scales + 16), 4), _mm256_set1_epi16(15));
  return (vi)_mm256_madd_epi16(m, four(sum));
}

#include "kernels.inc.h"

const ds4_kernels ds4_kernels_avx2 = {"avx2",   k_quantize,     k_matmul_float, k_matmul_quant, k_rms_norm, k_to_f16, k_glu,
                                      k_attend, k_attend_merge, k_mix_in,       k_mix_out,      k_compress, k_score,  k_attend_sparse};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int ds4_no_avx2;
#endif
