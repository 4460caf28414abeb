/* The scalar arithmetic of csrc/numeric.h against double precision. */
#include "numeric.h"

#include <stdio.h>
#include <stdlib.h>

static int failed;
static void expect(int ok, const char *what, double x, double got, double want) {
  if (ok || failed++ > 10) return;
  fprintf(stderr, "%s(%.9g) is %.9g, expected %.9g\n", what, x, got, want);
}

static uint64_t state = 88172645463325252u;
static uint32_t next(void) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (uint32_t)(state >> 16);
}

/* Relative error of exp over its whole range, and its ends. */
static void test_exp(void) {
  double worst = 0;
  for (int i = 0; i < 2000000; i++) {
    float x = (float)((double)next() / 4294967296.0 * 175.0 - 87.0);
    double want = exp((double)x), error = fabs((double)ds4_exp(x) - want) / want;
    worst = error > worst ? error : worst;
  }
  expect(worst < 1.5e-7, "worst relative error of exp", 0, worst, 1.5e-7);
  expect(ds4_exp(0.0f) == 1.0f, "exp", 0, ds4_exp(0.0f), 1);
  expect(ds4_exp(-INFINITY) == 0.0f, "exp", -INFINITY, ds4_exp(-INFINITY), 0);
  expect(ds4_exp(1e30f) == ds4_exp(88.0f) && isfinite(ds4_exp(1e30f)), "exp", 1e30, ds4_exp(1e30f), ds4_exp(88.0f));
  expect(isnan(ds4_exp(NAN)), "exp", NAN, ds4_exp(NAN), NAN);
  expect(isnan(ds4_silu(NAN)), "silu", NAN, ds4_silu(NAN), NAN);
  printf("exp: worst relative error %.3g\n", worst);
}

/* Every half, and the nearest half of random floats (ties to even), by brute comparison with the two neighbours. */
static void test_f16(void) {
  for (uint32_t h = 0; h < 65536; h++) {
    float x = ds4_f16((uint16_t)h);
    if (isnan(x))
      expect(isnan(ds4_f16(ds4_to_f16(x))), "f16 of NaN", h, 0, 0);
    else
      expect(ds4_to_f16(x) == h, "to_f16", x, ds4_to_f16(x), h);
  }
  for (int i = 0; i < 2000000; i++) {
    float x = ds4_float(next());
    if (!isfinite(x) || fabsf(x) >= 65504.0f) continue;
    uint16_t h = ds4_to_f16(x);
    double d = fabs((double)x - ds4_f16(h));
    for (int step = -1; step <= 1; step += 2) {
      uint16_t other = (uint16_t)(h + step);
      if ((h & 0x7fff) == 0 && step < 0) continue;
      double e = fabs((double)x - ds4_f16(other));
      expect(d < e || (d == e && !(h & 1)) || isnan(e) || isinf(e), "to_f16 is not the nearest", x, ds4_f16(h), ds4_f16(other));
    }
  }
  expect(ds4_to_f16(65519.0f) == 0x7bff, "to_f16", 65519, ds4_to_f16(65519.0f), 0x7bff);
  expect(ds4_to_f16(65520.0f) == 0x7c00, "to_f16", 65520, ds4_to_f16(65520.0f), 0x7c00);
}

/* Quantised blocks: within half a step (x * (1 / d) is rounded twice), NaN and infinity show in the scale. */
static void test_quant(void) {
  float x[32], d, sum;
  int8_t q[32];
  for (int round = 0; round < 20000; round++) {
    float size = ds4_float((next() % 200 + 20) << 23);
    for (int i = 0; i < 32; i++) x[i] = size * ((float)next() / 4294967296.0f - 0.5f);
    ds4_quant_block(x, 32, q, &d, &sum);
    for (int i = 0; i < 32 && d > 1e-37f; i++)
      expect(fabs((double)x[i] - (double)d * q[i]) <= 0.50002 * d, "quant_block", x[i], (double)d * q[i], x[i]);
  }
  x[5] = INFINITY;
  ds4_quant_block(x, 32, q, &d, &sum);
  expect(isnan(d), "scale of a block with infinity", 0, d, NAN);
  x[5] = NAN;
  expect(isnan(ds4_f16(ds4_quant_kv(x, 32, q))), "scale of a KV group with NaN", 0, 0, NAN);
  memset(x, 0, sizeof x);
  ds4_quant_block(x, 32, q, &d, &sum);
  expect(d == 0 && sum == 0 && q[0] == 0, "scale of a block of zeros", 0, d, 0);
}

int main(void) {
  test_exp();
  test_f16();
  test_quant();
  for (float x = -1000.5f; x < 1000; x += 0.25f) expect(ds4_round(x) == (float)rint(x), "round", x, ds4_round(x), rint(x));
  return failed != 0;
}
