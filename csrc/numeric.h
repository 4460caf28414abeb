/* Scalar arithmetic that every backend shares, bit for bit. No libm: its results differ between systems. */
#ifndef DS4_NUMERIC_H
#define DS4_NUMERIC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t ds4_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
static inline float ds4_float(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

static inline float ds4_bf16(uint16_t h) { return ds4_float((uint32_t)h << 16); }

/* IEEE binary16 -> binary32, exact. */
static inline float ds4_f16(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, e = h >> 10 & 31u, m = h & 1023u;
  if (e == 31) return ds4_float(sign | 0x7f800000u | m << 13);
  if (e) return ds4_float(sign | (e + 112u) << 23 | m << 13);
  float x = (float)m * 0x1p-24f;
  return sign ? -x : x;
}

/* binary32 -> binary16, to nearest even; too large becomes infinity, NaN stays NaN. */
static inline uint16_t ds4_to_f16(float x) {
  uint32_t u = ds4_bits(x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (a >> 13 & 0x1ffu));
  if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  if (a < 0x38800000u)
    return (uint16_t)(sign | (ds4_bits(ds4_float(a) + 0.5f) - 0x3f000000u)); /* adding 0.5 rounds at the last subnormal bit */
  return (uint16_t)(sign | (a - 0x38000000u + 0xfffu + (a >> 13 & 1u)) >> 13);
}

/* To nearest even for |x| < 2^22: what float to int conversion does in SIMD. */
static inline float ds4_round(float x) {
  float big = x + 0x1.8p23f;
  return big - 0x1.8p23f;
}

/* exp(x), error below 2 ulp: 2^n * p(r), |r| <= ln2 / 2, a Taylor polynomial of degree 7 in Horner form. Above 88 it stays at exp(88), below -87 it is 0, NaN stays NaN. */
#define DS4_EXP_MAX 88.0f
#define DS4_EXP_MIN -87.0f
#define DS4_LOG2E 0x1.715476p+0f
#define DS4_LN2_HI 0x1.62e4p-1f
#define DS4_LN2_LO 0x1.7f7d1cp-20f
#define DS4_EXP_C7 0x1.a01a02p-13f
#define DS4_EXP_C6 0x1.6c16c2p-10f
#define DS4_EXP_C5 0x1.111112p-7f
#define DS4_EXP_C4 0x1.555556p-5f
#define DS4_EXP_C3 0x1.555556p-3f
static inline float ds4_exp(float x) {
  if (x < DS4_EXP_MIN) return 0.0f;
  if (x > DS4_EXP_MAX) x = DS4_EXP_MAX;
  float n = ds4_round(x * DS4_LOG2E);
  float r = fmaf(n, -DS4_LN2_LO, fmaf(n, -DS4_LN2_HI, x));
  float p = fmaf(DS4_EXP_C7, r, DS4_EXP_C6);
  p = fmaf(p, r, DS4_EXP_C5);
  p = fmaf(p, r, DS4_EXP_C4);
  p = fmaf(p, r, DS4_EXP_C3);
  p = fmaf(p, r, 0.5f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  int32_t e = n == n ? (int32_t)n : 0;
  return p * ds4_float((uint32_t)(e + 127) << 23);
}

static inline float ds4_sigmoid(float x) { return 1.0f / (1.0f + ds4_exp(-x)); }

/* log(1 + exp(x)) = max(x, 0) + log1p(t), t = exp(-|x|); log1p(t) = 2 atanh(t / (2 + t)), a series in s^2 <= 1/9. */
static inline float ds4_softplus(float x) {
  float t = ds4_exp(-fabsf(x)), s = t / (2.0f + t), z = s * s, p = 1.0f / 15.0f;
  for (int k = 13; k > 0; k -= 2) p = fmaf(p, z, 1.0f / (float)k);
  return (x > 0.0f ? x : 0.0f) + 2.0f * s * p;
}

static inline float ds4_silu(float x) { return x / (1.0f + ds4_exp(-x)); }

/* GELU in its tanh form: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), which is x / (1 + exp(-2 sqrt(2/pi) (x + 0.044715 x^3))). */
#define DS4_GELU_C1 0x1.988454p+0f /* 2 sqrt(2/pi) */
#define DS4_GELU_C3 0x1.2444f2p-4f /* 0.044715 times that */
static inline float ds4_gelu(float x) { return x / (1.0f + ds4_exp(-(x * fmaf(x * x, DS4_GELU_C3, DS4_GELU_C1)))); }

/* One number of ds4_ops.glu. `kind` is ds4_glu_kind: 1 GELU, 2 SiLU of a clamped gate times a clamped up. */
static inline float ds4_glu(int kind, float limit, float gate, float up) {
  if (kind == 1) return ds4_gelu(gate) * up;
  if (kind == 2) {
    gate = limit < gate ? limit : gate;
    up = limit < up ? limit : up;
    up = up < -limit ? -limit : up;
  }
  return ds4_silu(gate) * up;
}

/* The fixed tree of a reduction over 16 lanes. */
static inline float ds4_lane_sum(const float lane[16]) {
  float a[16];
  memcpy(a, lane, sizeof a);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) a[i] += a[i + half];
  return a[0];
}

/* One block of 32 activations as int8: scale, numbers, and scale * their sum (for formats with a minimum). A NaN or infinity gives a NaN scale. */
static inline void ds4_quant_block(const float *x, uint32_t n, int8_t *q, float *scale, float *sum) {
  uint32_t top = 0;
  for (uint32_t i = 0; i < n; i++) {
    uint32_t a = ds4_bits(x[i]) & 0x7fffffffu;
    if (a > top) top = a;
  }
  float amax = top < 0x7f800000u ? ds4_float(top) : NAN;
  float d = amax / 127.0f, inverse = d > 0.0f ? 1.0f / d : 0.0f; /* a subnormal d can make 1/d infinite */
  if (inverse > 0x1p126f) inverse = 0.0f;
  int32_t total = 0;
  for (uint32_t i = 0; i < n; i++) {
    q[i] = inverse > 0.0f ? (int8_t)ds4_round(x[i] * inverse) : 0;
    total += q[i];
  }
  *scale = d;
  *sum = d * (float)total;
}

/* One group of q8_0 KV: int8 numbers and an f16 scale, which is what the numbers are divided by. A NaN or infinity gives a NaN scale. */
static inline uint16_t ds4_quant_kv(const float *x, uint32_t n, int8_t *q) {
  uint32_t top = 0;
  for (uint32_t i = 0; i < n; i++) {
    uint32_t a = ds4_bits(x[i]) & 0x7fffffffu;
    if (a > top) top = a;
  }
  uint16_t half = ds4_to_f16(top < 0x7f800000u ? ds4_float(top) / 127.0f : NAN);
  float d = ds4_f16(half), inverse = d > 0.0f ? 1.0f / d : 0.0f;
  for (uint32_t i = 0; i < n; i++) {
    float v = inverse > 0.0f ? ds4_round(x[i] * inverse) : 0.0f; /* the rounded scale can be too small: cut at 127 */
    q[i] = (int8_t)(v > 127.0f ? 127.0f : v < -127.0f ? -127.0f : v);
  }
  return half;
}

#endif
