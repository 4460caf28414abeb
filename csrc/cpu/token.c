#include "token.h"

#include "../smallfloat.h"

void ds4_token_round_fp8(float *x, uint32_t width, uint32_t tail) {
  for (uint32_t from = 0; from < width - tail; from += DS4_FP8_BLOCK) {
    uint32_t n = ds4_min_u32(DS4_FP8_BLOCK, width - tail - from);
    uint8_t s = ds4_fp8_scale(x + from, n);
    float scale = ds4_e8m0(s), inverse = ds4_e8m0_inverse(s);
    for (uint32_t i = from; i < from + n; i++) x[i] = ds4_e4m3(ds4_to_e4m3(x[i] * inverse)) * scale;
  }
}

void ds4_token_round_fp4(float *x, uint32_t width) {
  for (uint32_t half = 1; half < width; half *= 2)
    for (uint32_t i = 0; i < width; i += 2 * half)
      for (uint32_t k = i; k < i + half; k++) {
        float a = x[k], b = x[k + half];
        x[k] = a + b;
        x[k + half] = a - b;
      }
  float norm = 1.0f / sqrtf((float)width);
  for (uint32_t i = 0; i < width; i++) x[i] *= norm;
  for (uint32_t from = 0; from < width; from += DS4_FP4_BLOCK) {
    uint32_t n = ds4_min_u32(DS4_FP4_BLOCK, width - from);
    uint8_t s = ds4_fp4_scale(x + from, n);
    float scale = ds4_e8m0(s), inverse = ds4_e8m0_inverse(s);
    for (uint32_t i = from; i < from + n; i++) x[i] = ds4_e2m1(ds4_to_e2m1(x[i] * inverse)) * scale;
  }
}

void ds4_token_rope_tail(float *x, uint32_t heads, uint32_t width, uint32_t tail, const float *cs, float sign) {
  for (uint32_t h = 0; h < heads; h++, x += width) {
    float *p = x + width - tail;
    for (uint32_t i = 0; i < tail / 2; i++, p += 2) {
      float c = cs[2 * i], s = sign * cs[2 * i + 1], re = p[0] * c - p[1] * s, im = p[0] * s + p[1] * c;
      p[0] = re;
      p[1] = im;
    }
  }
}

/* ---- hyper-connections ---------------------------------------------------------------------------------------------------------------- */

/* Divides `n` numbers, `step` apart, by their sum + eps. */
static void normalise(float *x, uint32_t n, uint32_t step, float eps) {
  float sum = 0.0f;
  for (uint32_t i = 0; i < n; i++) sum += x[i * step];
  sum += eps;
  for (uint32_t i = 0; i < n; i++) x[i * step] /= sum;
}

/* Sinkhorn: a softmax over each row, then columns and rows in turn; the columns have the first and the last word. */
static void doubly_stochastic(float *x, uint32_t n, uint32_t iterations, float eps) {
  for (uint32_t r = 0; r < n; r++) {
    float *row = x + r * n, top = row[0];
    for (uint32_t i = 1; i < n; i++) top = row[i] > top ? row[i] : top;
    for (uint32_t i = 0; i < n; i++) row[i] = ds4_exp(row[i] - top);
    normalise(row, n, 1, 0.0f);
    for (uint32_t i = 0; i < n; i++) row[i] += eps;
  }
  for (uint32_t k = 0; k < iterations; k++) {
    for (uint32_t r = 0; k && r < n; r++) normalise(x + r * n, n, 1, eps);
    for (uint32_t c = 0; c < n; c++) normalise(x + c, n, n, eps);
  }
}

void ds4_token_mix_weights(float *m, const float *scale, const float *base, uint32_t k, uint32_t streams, uint32_t iterations, float eps) {
  for (uint32_t s = 0; s < streams; s++) m[s] = ds4_sigmoid(fmaf(m[s], scale[0], base[s])) + eps;
  if (k == streams) return;
  for (uint32_t s = streams; s < 2 * streams; s++) m[s] = 2.0f * ds4_sigmoid(fmaf(m[s], scale[1], base[s]));
  for (uint32_t s = 2 * streams; s < k; s++) m[s] = fmaf(m[s], scale[2], base[s]);
  doubly_stochastic(m + 2 * streams, streams, iterations, eps);
}

/* ---- exact top-k ------------------------------------------------------------------------------------------------------------------------ */

/* Bits that sort as the numbers do; -0 is 0, NaN is below all. */
static uint32_t sort_key(float x) {
  uint32_t u = ds4_bits(x + 0.0f);
  if (x != x) return 0;
  return u >> 31 ? ~u : u | 0x80000000u;
}

/* Radix select: byte after byte of the keep-th largest key is found by counting, then one pass over the rows takes what is above it and, of its
 * equals, the first. */
void ds4_top_rows(const float *score, uint32_t n, uint32_t keep, uint32_t *list) {
  uint32_t bound = 0, mask = 0, equal = keep; /* equal: how many of the rows with key `bound` belong to the list */
  for (int shift = 24; shift >= 0; shift -= 8) {
    uint32_t count[256] = {0}, byte = 255;
    for (uint32_t i = 0; i < n; i++) {
      uint32_t key = sort_key(score[i]);
      if ((key & mask) == bound) count[key >> shift & 255u]++;
    }
    for (; count[byte] < equal; byte--) equal -= count[byte];
    bound |= byte << shift;
    mask |= 255u << shift;
  }
  for (uint32_t i = 0, at = 0; at < keep; i++) {
    uint32_t key = sort_key(score[i]);
    if (key > bound || (key == bound && equal && equal--)) list[at++] = i;
  }
}
