/* The kernels, over vectors of 16 floats. Included by one file per instruction set, which defines before:
 *
 *   v16                              a vector of 16 floats
 *   v_zero v_set1 v_load v_store v_add v_sub v_mul v_fma(a, b, c) = a * b + c   v_max
 *   v_f16(p) v_bf16(p) v_i8(p)       16 numbers of that type as floats
 *   v_to_f16(p, a)                   stores 16 numbers as binary16, to nearest even
 *   v_set1_f16(x)                    one binary16 number in all lanes
 *   v_below(a, b, x, y)              a < b ? x : y, lane by lane; false for NaN
 *   v_pow2(n)                        2^n for whole n in -126..127
 *   v_sum(a)                         the sum of the lanes, by the tree of ds4_lane_sum
 *   v_largest(a)                     the largest lane; unspecified when one is NaN
 *   v_top(a, b)                      the largest bit pattern, sign bit off, of both vectors
 *   v_quant(a, b, scale, q, sum)     stores 32 rounded numbers * scale as int8, and the sums of both halves
 *   what decode.inc.h and quants.inc.h ask for
 *   FLOAT_TILE ROW_TILE WIDE         tokens of a float tile; query rows and value vectors of an attention tile */

INLINE v16 v_exp(v16 x) { /* ds4_exp of numeric.h */
  v16 low = v_set1(DS4_EXP_MIN), high = v_set1(DS4_EXP_MAX), big = v_set1(0x1.8p23f), one = v_set1(1.0f);
  v16 y = v_below(high, x, high, x);
  v16 n = v_sub(v_add(v_mul(y, v_set1(DS4_LOG2E)), big), big);
  n = v_below(x, low, v_zero(), n); /* lanes that end as 0 must not overflow on the way */
  v16 r = v_fma(n, v_set1(-DS4_LN2_LO), v_fma(n, v_set1(-DS4_LN2_HI), y));
  v16 p = v_fma(v_set1(DS4_EXP_C7), r, v_set1(DS4_EXP_C6));
  p = v_fma(p, r, v_set1(DS4_EXP_C5));
  p = v_fma(p, r, v_set1(DS4_EXP_C4));
  p = v_fma(p, r, v_set1(DS4_EXP_C3));
  p = v_fma(p, r, v_set1(0.5f));
  p = v_fma(p, r, one);
  p = v_fma(p, r, one);
  return v_below(x, low, v_zero(), v_mul(p, v_pow2(n)));
}

/* ---- matrix products ---------------------------------------------------------------------------------------------------------------- */

#include "quants.inc.h"

/* Stores the results of one token for the rows of a group; the last group may be short. */
INLINE void store_rows(const ds4_packed *w, uint32_t group, uint64_t token, float *out, v16 value) {
  uint32_t rows = w->rows - group * DS4_LANES;
  out += token * w->rows + group * DS4_LANES;
  if (rows >= DS4_LANES) {
    v_store(out, value);
    return;
  }
  float lane[16];
  v_store(lane, value);
  memcpy(out, lane, rows * sizeof *out);
}

INLINE v16 load_weight(int32_t format, const uint8_t *p) {
  if (format == DS4_F32) return v_load((const float *)(const void *)p);
  return format == DS4_F16 ? v_f16((const uint16_t *)(const void *)p) : v_bf16((const uint16_t *)(const void *)p);
}

/* `g` groups x `t` tokens: g * t independent chains over k. */
INLINE void float_tile(int32_t format, const ds4_packed *w, uint32_t group, const int g, const float *x, uint64_t token, const int t,
                       float *out) {
  uint32_t step = DS4_LANES * (format == DS4_F32 ? 4 : 2);
  const uint8_t *p = w->data + (group - w->first) * w->group_bytes;
  _Static_assert(FLOAT_TILE <= 8, "acc has room for every g * t that float_groups asks for");
  v16 acc[8];
  for (int i = 0; i < g * t; i++) acc[i] = v_zero();
  for (uint32_t k = 0; k < w->cols; k++, p += step)
    for (int i = 0; i < g; i++) {
      v16 weight = load_weight(format, p + i * w->group_bytes);
      for (int j = 0; j < t; j++) acc[i * t + j] = v_fma(weight, v_set1(x[(token + j) * w->cols + k]), acc[i * t + j]);
    }
  for (int i = 0; i < g; i++)
    for (int j = 0; j < t; j++) store_rows(w, group + i, token + j, out, acc[i * t + j]);
}

INLINE void float_groups(int32_t format, const ds4_packed *w, uint32_t group, uint32_t groups, const float *x, uint32_t n, float *out) {
  uint32_t end = group + groups, token = 0;
  for (; token + FLOAT_TILE <= n; token += FLOAT_TILE)
    for (uint32_t g = group; g < end; g++) float_tile(format, w, g, 1, x, token, FLOAT_TILE, out);
  for (; token < n; token++) {
    uint32_t g = group;
    for (; g + 4 <= end; g += 4) float_tile(format, w, g, 4, x, token, 1, out);
    for (; g < end; g++) float_tile(format, w, g, 1, x, token, 1, out);
  }
}

static void fp8_groups(const ds4_packed *w, uint32_t group, uint32_t groups, const float *x, uint32_t n, float *out); /* sparse.inc.h */

static void k_matmul_float(const ds4_packed *w, uint32_t group, uint32_t groups, const float *x, uint32_t n, float *out) {
  if (w->format == DS4_MXFP4)
    fp4_groups(w, group, groups, x, n, out);
  else if (w->format == DS4_FP8)
    fp8_groups(w, group, groups, x, n, out);
  else if (w->format == DS4_F32)
    float_groups(DS4_F32, w, group, groups, x, n, out);
  else if (w->format == DS4_F16)
    float_groups(DS4_F16, w, group, groups, x, n, out);
  else
    float_groups(DS4_BF16, w, group, groups, x, n, out);
}

/* ---- vectors ------------------------------------------------------------------------------------------------------------------------- */

static void k_rms_norm(const float *x, const float *weight, uint32_t width, float eps, float *out) {
  uint32_t whole = width / 16 * 16;
  v16 acc = v_zero();
  for (uint32_t i = 0; i < whole; i += 16) acc = v_fma(v_load(x + i), v_load(x + i), acc);
  float lane[16];
  v_store(lane, acc);
  for (uint32_t i = whole; i < width; i++) lane[i % 16] = fmaf(x[i], x[i], lane[i % 16]);
  float scale = 1.0f / sqrtf(ds4_lane_sum(lane) / (float)width + eps);
  for (uint32_t i = 0; i < whole; i += 16) {
    v16 y = v_mul(v_load(x + i), v_set1(scale));
    v_store(out + i, weight ? v_mul(y, v_load(weight + i)) : y);
  }
  for (uint32_t i = whole; i < width; i++) out[i] = weight ? x[i] * scale * weight[i] : x[i] * scale;
}

static void k_to_f16(const float *x, uint32_t n, uint16_t *out) {
  uint32_t i = 0;
  for (; i + 16 <= n; i += 16) v_to_f16(out + i, v_load(x + i));
  for (; i < n; i++) out[i] = ds4_to_f16(x[i]);
}

/* gate / (1 + exp(-y)) * up, where y is gate (SiLU) or its GELU polynomial */
INLINE v16 glu_lanes(int kind, v16 g, v16 up) {
  v16 y = kind == DS4_GELU ? v_mul(g, v_fma(v_mul(g, g), v_set1(DS4_GELU_C3), v_set1(DS4_GELU_C1))) : g;
  return v_mul(v_div(g, v_add(v_set1(1.0f), v_exp(v_sub(v_set1(-0.0f), y)))), up);
}

static void k_glu(int kind, float limit, const float *gate, const float *up, uint64_t n, float *out) {
  uint64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    v16 g = v_load(gate + i), u = v_load(up + i), most = v_set1(limit), least = v_set1(-limit);
    if (kind == DS4_SILU_CLAMPED) {
      g = v_below(most, g, most, g);
      u = v_below(most, u, most, u);
      u = v_below(u, least, least, u);
    }
    v_store(out + i, glu_lanes(kind, g, u));
  }
  for (; i < n; i++) out[i] = ds4_glu(kind, limit, gate[i], up[i]);
}

#include "attend.inc.h"

#include "sparse.inc.h"
