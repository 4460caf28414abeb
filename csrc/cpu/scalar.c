/* The kernels in plain C, for processors without one of the instruction sets below. */
#include "kernels.h"

#include "../numeric.h"

typedef struct v16 {
  float f[16];
} v16;

#define EACH(expr)                                                                                                                         \
  v16 o;                                                                                                                                   \
  for (int i = 0; i < 16; i++) o.f[i] = (expr);                                                                                            \
  return o

static inline v16 v_set1(float x) { EACH(x); }
static inline v16 v_zero(void) { return v_set1(0.0f); }
static inline v16 v_load(const float *p) { EACH(p[i]); }
static inline void v_store(float *p, v16 a) { memcpy(p, a.f, sizeof a.f); }
static inline v16 v_add(v16 a, v16 b) { EACH(a.f[i] + b.f[i]); }
static inline v16 v_sub(v16 a, v16 b) { EACH(a.f[i] - b.f[i]); }
static inline v16 v_mul(v16 a, v16 b) { EACH(a.f[i] * b.f[i]); }
static inline v16 v_div(v16 a, v16 b) { EACH(a.f[i] / b.f[i]); }
static inline v16 v_fma(v16 a, v16 b, v16 c) { EACH(fmaf(a.f[i], b.f[i], c.f[i])); }
static inline v16 v_max(v16 a, v16 b) { EACH(a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }
static inline v16 v_f16(const uint16_t *p) { EACH(ds4_f16(p[i])); }
static inline void v_to_f16(uint16_t *p, v16 x) {
  for (int i = 0; i < 16; i++) p[i] = ds4_to_f16(x.f[i]);
}
static inline v16 v_set1_f16(uint16_t x) { return v_set1(ds4_f16(x)); }
static inline v16 v_bf16(const uint16_t *p) { EACH(ds4_bf16(p[i])); }
static inline v16 v_e4m3(const uint8_t *p) { EACH(ds4_e4m3(p[i])); }
static inline v16 v_i8(const int8_t *p) { EACH((float)p[i]); }
static inline v16 v_below(v16 a, v16 b, v16 x, v16 y) { EACH(a.f[i] < b.f[i] ? x.f[i] : y.f[i]); }
static inline v16 v_pow2(v16 n) { EACH(ds4_float((uint32_t)((n.f[i] == n.f[i] ? (int32_t)n.f[i] : 0) + 127) << 23)); }

static inline float v_sum(v16 a) { return ds4_lane_sum(a.f); }
static inline float v_largest(v16 a) {
  float top = a.f[0];
  for (int i = 1; i < 16; i++) top = a.f[i] > top ? a.f[i] : top;
  return top;
}

static inline uint32_t v_top(v16 a, v16 b) {
  uint32_t top = 0;
  for (int i = 0; i < 16; i++) {
    top = ds4_max_u32(top, ds4_bits(a.f[i]) & 0x7fffffffu);
    top = ds4_max_u32(top, ds4_bits(b.f[i]) & 0x7fffffffu);
  }
  return top;
}

static inline void v_quant(v16 a, v16 b, float scale, int8_t *q, int32_t *sum) {
  for (int i = 0; i < 32; i++) {
    q[i] = (int8_t)ds4_round((i < 16 ? a.f[i] : b.f[i - 16]) * scale);
    sum[i / 16] += q[i];
  }
}

#define UNROLL /* small code matters more here */
#define VB_ROWS 4
#define VI_BYTES(p) ((vi){(int8_t)(p)[0], (int8_t)(p)[1], (int8_t)(p)[2], (int8_t)(p)[3]})
#define VB_TABLE(p) vb_load((const uint8_t *)(p))
#define VB_LOOKUP(table, v) lookup(table, v)
typedef uint8_t bytes __attribute__((vector_size(16)));
static inline bytes lookup(bytes table, bytes v) {
  bytes o;
  for (int i = 0; i < 16; i++) o[i] = table[v[i]];
  return o;
}
#include "decode.inc.h"

#define DOT_TILE 2
#define FP4_PIECES 1
#define FLOAT_TILE 4
#define ROW_TILE 1
#define SCORE_PIECES 4
#define WIDE 1

static vq q_fma(vq a, vq b, vq c) {
  for (int i = 0; i < VB_ROWS; i++) c[i] = fmaf(a[i], b[i], c[i]);
  return c;
}
static inline vq q_f16(const uint8_t *p) {
  vq o;
  for (int i = 0; i < VB_ROWS; i++) o[i] = ds4_f16(ds4_load_u16(p + 2 * i));
  return o;
}

INLINE vi sub_scale(ds4_shape f, const uint8_t *p) { return f.minimum ? vi_bytes(p) & 15 : vi_bytes(p); }

INLINE void dot_block(int32_t format, const uint8_t *body, const uint8_t *scales, const int8_t *x, const int16_t *sum, uint32_t stride,
                      const int t, vi *isum) {
  const ds4_shape f = ds4_shape_of(format);
  (void)sum;
  for (int i = 0; i < t; i++) isum[i] = (vi){0};
  for (int j = 0; j < 8; j++) {
    vb v = quant_step(format, body, j, 0);
    int8_t value[VB_BYTES];
    for (int k = 0; k < VB_BYTES; k++) value[k] = (int8_t)(is_wide(f) ? v[k] : v[k] - f.offset);
    vi scale = f.sub == 16 ? sub_scale(f, scales + j / 4 * 16) : (vi){0} + 1;
    for (int i = 0; i < t; i++) {
      const int8_t *xi = x + (uint64_t)i * stride * 32 + 4 * j;
      vi part;
      for (int r = 0; r < VB_ROWS; r++)
        part[r] = value[4 * r] * xi[0] + value[4 * r + 1] * xi[1] + value[4 * r + 2] * xi[2] + value[4 * r + 3] * xi[3];
      isum[i] += part * scale;
    }
  }
}

INLINE vi dot_minimums(const uint8_t *scales, const int16_t *sum) {
  return (vi_bytes(scales) >> 4 & 15) * sum[0] + (vi_bytes(scales + 16) >> 4 & 15) * sum[1];
}

#include "kernels.inc.h"

const ds4_kernels ds4_kernels_scalar = {"scalar", k_quantize,     k_matmul_float, k_matmul_quant, k_rms_norm, k_to_f16, k_glu,
                                        k_attend, k_attend_merge, k_mix_in,       k_mix_out,      k_compress, k_score,  k_attend_sparse};
