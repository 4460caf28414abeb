/* The kernels for NEON: a vector of 16 is four registers. Included by neon.c and neon_dot.c, which differ in NEON_DOT: what products of int8 are made
 * of. Integer sums are exact, so the bits are the same.
 *
 * The matrix instructions of i8mm have no file. USDOT gives nothing, as codes have at most 7 bits and wide formats are signed. SMMLA halves the 64
 * products of 4 rows x 32 weights x 8 tokens, but with tokens and rows laid out one after the other its operands take 16 + 8 instructions to put
 * together and its results 8 to take apart. */
#include <arm_neon.h>

#include "kernels.h"

#include "../numeric.h"

typedef struct v16 {
  float32x4_t a, b, c, d;
} v16;

#define EACH(op, x) ((v16){op((x).a), op((x).b), op((x).c), op((x).d)})
#define EACH2(op, x, y) ((v16){op((x).a, (y).a), op((x).b, (y).b), op((x).c, (y).c), op((x).d, (y).d)})
#define EACH3(op, x, y, z) ((v16){op((x).a, (y).a, (z).a), op((x).b, (y).b, (z).b), op((x).c, (y).c, (z).c), op((x).d, (y).d, (z).d)})

static inline v16 v_set1(float x) {
  float32x4_t v = vdupq_n_f32(x);
  return (v16){v, v, v, v};
}
static inline v16 v_zero(void) { return v_set1(0.0f); }
static inline v16 v_load(const float *p) { return (v16){vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
static inline void v_store(float *p, v16 x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
static inline v16 v_add(v16 x, v16 y) { return EACH2(vaddq_f32, x, y); }
static inline v16 v_sub(v16 x, v16 y) { return EACH2(vsubq_f32, x, y); }
static inline v16 v_mul(v16 x, v16 y) { return EACH2(vmulq_f32, x, y); }
static inline v16 v_div(v16 x, v16 y) { return EACH2(vdivq_f32, x, y); }
static inline v16 v_fma(v16 x, v16 y, v16 z) { return EACH3(vfmaq_f32, z, x, y); }
static inline v16 v_max(v16 x, v16 y) { return EACH2(vmaxq_f32, x, y); }
static inline float32x4_t f16_4(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
static inline v16 v_f16(const uint16_t *p) { return (v16){f16_4(p), f16_4(p + 4), f16_4(p + 8), f16_4(p + 12)}; }
static inline void to_f16_4(uint16_t *p, float32x4_t x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
static inline void v_to_f16(uint16_t *p, v16 x) { to_f16_4(p, x.a), to_f16_4(p + 4, x.b), to_f16_4(p + 8, x.c), to_f16_4(p + 12, x.d); }
static inline v16 v_set1_f16(uint16_t x) {
  float32x4_t one = vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(x)));
  return (v16){one, one, one, one};
}
static inline float32x4_t bf16_4(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
static inline v16 v_bf16(const uint16_t *p) { return (v16){bf16_4(p), bf16_4(p + 4), bf16_4(p + 8), bf16_4(p + 12)}; }
/* Through binary16, as ds4_e4m3. */
static inline float32x4_t e4m3_4(uint16x4_t v) {
  uint16x4_t half = vorr_u16(vshl_n_u16(vand_u16(v, vdup_n_u16(0x80)), 8), vshl_n_u16(vand_u16(v, vdup_n_u16(0x7f)), 7));
  return vmulq_f32(vcvt_f32_f16(vreinterpret_f16_u16(half)), vdupq_n_f32(256.0f));
}
static inline v16 v_e4m3(const uint8_t *p) {
  uint8x16_t v = vld1q_u8(p);
  uint16x8_t low = vmovl_u8(vget_low_u8(v)), high = vmovl_u8(vget_high_u8(v));
  return (v16){e4m3_4(vget_low_u16(low)), e4m3_4(vget_high_u16(low)), e4m3_4(vget_low_u16(high)), e4m3_4(vget_high_u16(high))};
}
static inline float32x4_t i16_4(int16x4_t v) { return vcvtq_f32_s32(vmovl_s16(v)); }
static inline v16 v_i8(const int8_t *p) {
  int8x16_t v = vld1q_s8(p);
  int16x8_t low = vmovl_s8(vget_low_s8(v)), high = vmovl_s8(vget_high_s8(v));
  return (v16){i16_4(vget_low_s16(low)), i16_4(vget_high_s16(low)), i16_4(vget_low_s16(high)), i16_4(vget_high_s16(high))};
}
static inline v16 v_below(v16 x, v16 y, v16 t, v16 f) {
  return (v16){vbslq_f32(vcltq_f32(x.a, y.a), t.a, f.a), vbslq_f32(vcltq_f32(x.b, y.b), t.b, f.b), vbslq_f32(vcltq_f32(x.c, y.c), t.c, f.c),
               vbslq_f32(vcltq_f32(x.d, y.d), t.d, f.d)};
}
static inline float32x4_t pow2_4(float32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
static inline v16 v_pow2(v16 n) { return EACH(pow2_4, n); }

static inline float v_sum(v16 x) {
  float32x4_t a = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
  return vpadds_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a)));
}
static inline float v_largest(v16 x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.a, x.b), vmaxq_f32(x.c, x.d))); }

static inline uint32x4_t top_4(float32x4_t x, float32x4_t y) {
  return vmaxq_u32(vreinterpretq_u32_f32(vabsq_f32(x)), vreinterpretq_u32_f32(vabsq_f32(y)));
}
static inline uint32_t v_top(v16 x, v16 y) {
  return vmaxvq_u32(vmaxq_u32(vmaxq_u32(top_4(x.a, x.b), top_4(x.c, x.d)), vmaxq_u32(top_4(y.a, y.b), top_4(y.c, y.d))));
}

/* 16 numbers * scale as int8, and their sum. */
static inline int32_t quant_16(v16 x, float scale, int8_t *q) {
  v16 y = v_mul(x, v_set1(scale));
  int32x4_t a = vcvtnq_s32_f32(y.a), b = vcvtnq_s32_f32(y.b), c = vcvtnq_s32_f32(y.c), d = vcvtnq_s32_f32(y.d);
  int16x8_t low = vcombine_s16(vqmovn_s32(a), vqmovn_s32(b)), high = vcombine_s16(vqmovn_s32(c), vqmovn_s32(d));
  vst1q_s8(q, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
  return vaddvq_s32(vaddq_s32(vaddq_s32(a, b), vaddq_s32(c, d)));
}
static inline void v_quant(v16 x, v16 y, float scale, int8_t *q, int32_t *sum) {
  sum[0] = quant_16(x, scale, q);
  sum[1] = quant_16(y, scale, q + 16);
}

static inline int32x4_t bytes_4(const uint8_t *p) {
  uint32_t v;
  memcpy(&v, p, 4);
  return vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(v))));
}

#define VB_ROWS 4
#define VI_BYTES(p) (vi) bytes_4(p)
#define VB_TABLE(p) (vb) vld1q_u8((const uint8_t *)(p))
#define VB_LOOKUP(table, v) (vb) vqtbl1q_u8((uint8x16_t)(table), (uint8x16_t)(v))
#include "decode.inc.h"

/* 32 registers: a float tile of 4 tokens and an attention tile of 4 rows have 16 of them as sums, which hides the latency of an FMA. */
#define FP4_PIECES 2
#define FLOAT_TILE 4
#define ROW_TILE 4
#define SCORE_PIECES 4
#define WIDE 1

INLINE vq q_fma(vq a, vq b, vq c) { return (vq)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE vq q_f16(const uint8_t *p) { return (vq)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }

/* The sums of four rows, from a start on: `dots_half` adds 16 weights of each row times 16 activations. */
#if !NEON_DOT

#define DOT_TILE 4
typedef struct dots { /* two lanes a row */
  int32x4_t low, high;
} dots;
INLINE dots dots_from(int32_t start) {
  int32x4_t v = vreinterpretq_s32_s64(vdupq_n_s64((int64_t)(uint32_t)start));
  return (dots){v, v};
}
INLINE int32x4_t dots_rows(dots s) { return vpaddq_s32(s.low, s.high); }

/* 16-bit sums of products hold four steps of a code (at most 63 * 127 each), or two of a whole byte. */
INLINE dots dots_half(dots s, const int8x16_t *v, int8x16_t x, const bool wide) {
  int8x16_t x0 = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), 0));
  int8x16_t x1 = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), 1));
  int8x16_t x2 = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), 2));
  int8x16_t x3 = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), 3));
  int16x8_t low = vmlal_s8(vmull_s8(vget_low_s8(v[0]), vget_low_s8(x0)), vget_low_s8(v[1]), vget_low_s8(x1));
  int16x8_t high = vmlal_high_s8(vmull_high_s8(v[0], x0), v[1], x1);
  if (wide) {
    s = (dots){vpadalq_s16(s.low, low), vpadalq_s16(s.high, high)};
    low = vmull_s8(vget_low_s8(v[2]), vget_low_s8(x2));
    high = vmull_high_s8(v[2], x2);
  } else {
    low = vmlal_s8(low, vget_low_s8(v[2]), vget_low_s8(x2));
    high = vmlal_high_s8(high, v[2], x2);
  }
  low = vmlal_s8(low, vget_low_s8(v[3]), vget_low_s8(x3));
  high = vmlal_high_s8(high, v[3], x3);
  return (dots){vpadalq_s16(s.low, low), vpadalq_s16(s.high, high)};
}

#else

#define DOT_TILE 8
typedef int32x4_t dots;
INLINE dots dots_from(int32_t start) { return vdupq_n_s32(start); }
INLINE int32x4_t dots_rows(dots s) { return s; }
INLINE dots dots_half(dots s, const int8x16_t *v, int8x16_t x, const bool wide) {
  (void)wide;
  s = vdotq_laneq_s32(s, v[0], x, 0);
  s = vdotq_laneq_s32(s, v[1], x, 1);
  s = vdotq_laneq_s32(s, v[2], x, 2);
  return vdotq_laneq_s32(s, v[3], x, 3);
}

#endif

INLINE vi sub_scale(ds4_shape f, const uint8_t *p) { return f.minimum ? vi_bytes(p) & 15 : vi_bytes(p); }

/* What a code has too much, times the sum of the activations, is taken away at the start. */
INLINE void dot_block(int32_t format, const uint8_t *body, const uint8_t *scales, const int8_t *x, const int16_t *sum, uint32_t stride,
                      const int t, vi *isum) {
  const ds4_shape f = ds4_shape_of(format);
  const int32_t less = is_wide(f) ? 0 : -f.offset;
  dots acc[DOT_TILE];
  UNROLL for (int half = 0; half < 2; half++) {
    int8x16_t v[4];
    UNROLL for (int j = 0; j < 4; j++) v[j] = (int8x16_t)quant_step(format, body, 4 * half + j, 0);
    UNROLL for (int i = 0; i < t; i++) {
      const int16_t *s = sum + (uint64_t)i * stride * 2;
      if (f.sub == 16 || !half) acc[i] = dots_from(!less ? 0 : f.sub == 16 ? less * s[half] : less * (s[0] + s[1]));
      acc[i] = dots_half(acc[i], v, vld1q_s8(x + (uint64_t)i * stride * 32 + 16 * half), is_wide(f));
      if (f.sub == 16) {
        vi part = (vi)dots_rows(acc[i]) * sub_scale(f, scales + 16 * half);
        isum[i] = half ? isum[i] + part : part;
      } else if (half) {
        isum[i] = (vi)dots_rows(acc[i]);
      }
    }
  }
}

INLINE vi dot_minimums(const uint8_t *scales, const int16_t *sum) {
  return (vi_bytes(scales) >> 4 & 15) * sum[0] + (vi_bytes(scales + 16) >> 4 & 15) * sum[1];
}

#include "kernels.inc.h"

#define NEON_TABLE(isa)                                                                                                                    \
  {isa,      k_quantize,     k_matmul_float, k_matmul_quant, k_rms_norm, k_to_f16, k_glu,                                                  \
   k_attend, k_attend_merge, k_mix_in,       k_mix_out,      k_compress, k_score,  k_attend_sparse}
