/* CRC-32C: published values, and the CPU's instruction against the tables on every length and alignment around its lanes. */
#include <stdio.h>
#include <string.h>

#include "crc32c.h"

#define BYTES 10000u

static int fail(const char *what, unsigned a, unsigned b) {
  fprintf(stderr, "%s: %u, %u\n", what, a, b);
  return 1;
}

/* The definition, bit by bit. */
static uint32_t by_bits(uint32_t crc, const uint8_t *p, size_t n) {
  crc = ~crc;
  for (; n; n--, p++) {
    crc ^= *p;
    for (int i = 0; i < 8; i++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
  }
  return ~crc;
}

static int published(void) {
  uint8_t up[32], down[32];
  for (unsigned i = 0; i < 32; i++) up[i] = (uint8_t)i, down[i] = (uint8_t)(31 - i);
  uint8_t zeros[32] = {0}, ones[32];
  memset(ones, 0xff, sizeof ones);
  const struct {
    const void *data;
    size_t n;
    uint32_t crc;
  } cases[] = {{"123456789", 9, 0xe3069283u}, {zeros, 32, 0x8a9136aau}, {ones, 32, 0x62a8ab43u},
               {up, 32, 0x46dd794eu},         {down, 32, 0x113fdb5cu},  {"", 0, 0}}; /* RFC 3720, B.4 */
  for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
    if (ds4_crc32c(0, cases[i].data, cases[i].n) != cases[i].crc) return fail("published value, instruction", i, cases[i].crc);
    if (ds4_crc32c_tables(0, cases[i].data, cases[i].n) != cases[i].crc) return fail("published value, tables", i, cases[i].crc);
  }
  return 0;
}

int main(void) {
  static uint8_t data[BYTES + 8];
  uint32_t x = 1;
  for (unsigned i = 0; i < sizeof data; i++) data[i] = (uint8_t)((x = x * 1664525u + 1013904223u) >> 24);
  if (published()) return 1;
  for (unsigned n = 0; n < BYTES; n += n < 100 || n % 3072 > 3000 || n % 3072 < 40 ? 1 : 37) {
    uint32_t truth = by_bits(n, data + n % 8, n);
    if (ds4_crc32c(n, data + n % 8, n) != truth) return fail("instruction", n, truth);
    if (ds4_crc32c_tables(n, data + n % 8, n) != truth) return fail("tables", n, truth);
    if (ds4_crc32c(ds4_crc32c(7, data, n), data + n, BYTES - n) != by_bits(7, data, BYTES)) return fail("two pieces", n, BYTES - n);
  }
  return 0;
}
