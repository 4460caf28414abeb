/* Weight formats, as formats.c and the kernels share them. */
#ifndef DS4_FORMATS_H
#define DS4_FORMATS_H

#include "ds4.h"
#include "numeric.h"

typedef struct ds4_format_info {
  int32_t format;
  const char *name;
  uint32_t block, bytes; /* weights and bytes of a block */
  void (*dequant)(const uint8_t *p, uint32_t n, float *out);
} ds4_format_info;
const ds4_format_info *ds4_format_find(int32_t format); /* NULL: not known */

static inline uint16_t ds4_load_u16(const uint8_t *p) {
  uint16_t v;
  memcpy(&v, p, 2);
  return v;
}

#endif
