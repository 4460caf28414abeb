/* The sampler's weights are the same bits with wider vectors. */
#define ds4_sample ds4_sample_here
#define ds4_random ds4_random_here
#include "../../csrc/sample.c"

#include <stdio.h>

int main(void) {
  static float x[3 * BLOCK];
  static double plain[3 * BLOCK], wide[3 * BLOCK];
  for (uint32_t i = 0; i < 3 * BLOCK; i++) x[i] = 40.0f * ds4_random(7, i) - 60.0f * ds4_random(8, i);
  x[5] = -INFINITY, x[6] = -FLT_MAX, x[7] = 0.0f, x[8] = -0.0f, x[9] = 40.0f, x[10] = 1e-40f;
  for (uint32_t n = 1; n <= 3 * BLOCK; n += 1 + n / 9)
    for (int k = 1; k < 8; k++) {
      weigh_block(x, n, 40.0, 0.3 * k, plain);
      weigh(x, n, 40.0, 0.3 * k, wide);
      if (memcmp(plain, wide, n * sizeof *plain)) return fprintf(stderr, "%u weights at scale %g have other bits\n", n, 0.3 * k), 1;
    }
  puts("the same weights");
  return 0;
}
