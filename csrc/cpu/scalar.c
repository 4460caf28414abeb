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
static inline v16 v_bf16(const uint16_t *p) { EACH(ds4_bf16(p[i])); }
static inline v16 v_i8(const int8_t *p) { EACH((float)p[i]); }
static inline v16 v_below(v16 a, v16 b, v16 x, v16 y) { EACH(a.f[i] < b.f[i] ? x.f[i] : y.f[i]); }
static inline v16 v_pow2(v16 n) { EACH(ds4_float((uint32_t)((n.f[i] == n.f[i] ? (int32_t)n.f[i] : 0) + 127) << 23)); }

static inline uint32_t v_top(v16 a, v16 b) {
  uint32_t top = 0;
  for (int i = 0; i < 16; i++) {
    top = ds4_max_u32(top, ds4_bits(a.f[i]) & 0x7fffffffu);
    top = ds4_max_u32(top, ds4_bits(b.f[i]) & 0x7fffffffu);
  }
  return top;
}

static inline int32_t v_quant(v16 a, v16 b, float scale, int8_t *q) {
  int32_t sum = 0;
  for (int i = 0; i < 32; i++) {
    q[i] = (int8_t)ds4_round((i < 16 ? a.f[i] : b.f[i - 16]) * scale);
    sum += q[i];
  }
  return sum;
}

#define DOT_TILE 2
#define FLOAT_TILE 4
#define ROW_TILE 2
#define SCORE_PIECES 1
#define WIDE 2

static inline void dot_q8_0(const uint8_t *w, const int8_t *x, const int32_t *sum, uint32_t blocks, int tokens, v16 *out) {
  (void)sum;
  for (int t = 0; t < tokens; t++, x += (uint64_t)blocks * 32)
    for (int r = 0; r < 16; r++) {
      int32_t isum = 0;
      for (int k = 0; k < 32; k++) isum += (int8_t)w[(k / 4 * 16 + r) * 4 + k % 4] * x[k];
      out[t].f[r] = (float)isum;
    }
}

static inline void dot_q4_1(const uint8_t *w, const int8_t *x, uint32_t blocks, int tokens, v16 *out) {
  for (int t = 0; t < tokens; t++, x += (uint64_t)blocks * 32)
    for (int r = 0; r < 16; r++) {
      int32_t isum = 0;
      for (int k = 0; k < 16; k++) {
        uint8_t both = w[(k / 4 * 16 + r) * 4 + k % 4];
        isum += (both & 15) * x[k] + (both >> 4) * x[k + 16];
      }
      out[t].f[r] = (float)isum;
    }
}

#include "kernels.inc.h"

const ds4_kernels ds4_kernels_scalar = {"scalar", k_quantize, k_matmul_float, k_matmul_quant, k_rms_norm, k_glu, k_attend};
