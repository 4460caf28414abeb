/* Packed weights against their definition: every code of a block put where the drawing in kernels.h has it, one bit field at a time. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/kernels.h"
#include "formats.h"

static uint64_t state = 88172645463325252u;
static uint8_t next(void) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (uint8_t)(state >> 24);
}

static void put_plane(uint8_t *plane, uint32_t r, const uint8_t *code, uint32_t bits, uint32_t at) {
  for (uint32_t i = 0; i < 32; i++) {
    uint32_t step = i / 4, value = code[i] >> at & ((1u << bits) - 1);
    plane[64 * (step % bits) + 4 * r + i % 4] |= (uint8_t)(value << step / bits * bits);
  }
}

static void put_scales(const ds4_shape *f, const ds4_pack *p, const ds4_block *b, uint32_t r, uint8_t *to) {
  if (!f->int8) {
    to[r] = (uint8_t)b->d;
    return;
  }
  memcpy(to + 2 * r, &b->d, 2);
  if (f->minimum) memcpy(to + 32 + 2 * r, &b->m, 2);
  for (uint32_t s = 0; s < (f->sub ? 256 / f->sub : 0); s++) {
    uint8_t *scale = to + p->scales + (f->sub == 32 ? 32 : 16) * s + r;
    scale[0] = (uint8_t)b->sc[s];
    if (f->sub == 32) scale[16] = b->mn[s];
    if (f->sub == 16 && f->minimum) scale[0] |= (uint8_t)(b->mn[s] << 4);
  }
}

static void simple_group(const ds4_packed *w, uint32_t group, const ds4_matrix *from) {
  const ds4_format_info *info = ds4_format_find(from->format);
  const ds4_shape f = ds4_shape_of(w->format);
  const ds4_pack p = ds4_pack_of(f);
  const uint64_t row_bytes = from->nbytes / from->rows, tiles = (w->cols + DS4_FP8_TILE - 1) / DS4_FP8_TILE;
  memset(w->data, 0, w->group_bytes);
  for (uint64_t i = 0; from->format == DS4_FP8 && i < tiles; i++) w->data[i] = from->scales[group * DS4_LANES / DS4_FP8_TILE * tiles + i];
  for (uint32_t r = 0; r < DS4_LANES && group * DS4_LANES + r < w->rows; r++) {
    const uint64_t row = (uint64_t)group * DS4_LANES + r;
    const uint8_t *at = from->data + row * row_bytes;
    uint8_t *to = w->data + (from->format == DS4_FP8 ? ds4_fp8_head(w->cols) : 0);
    if (info->floats) {
      for (uint64_t k = 0; k < w->cols; k++) memcpy(to + (k * DS4_LANES + r) * info->bytes, at + k * info->bytes, info->bytes);
      continue;
    }
    ds4_block b = {0};
    for (uint64_t k = 0; k < w->cols; k += info->block, at += info->bytes) {
      info->take_apart(at, &b);
      if (from->format == DS4_FP4) b.d = from->scales[row * (w->cols / DS4_FP4_BLOCK) + k / DS4_FP4_BLOCK];
      if (f.low == 8)
        for (uint32_t i = 0; i < 32; i++) b.code[i] ^= 128;
      put_scales(&f, &p, &b, r, to);
      to += p.head;
      for (uint32_t i = 0; i < info->block; i += 32, to += p.body) {
        put_plane(to, r, b.code + i, f.low, 0);
        if (f.high) put_plane(to + 64 * f.low, r, b.code + i, f.high, f.low);
      }
    }
  }
}

/* Three groups at most; memory that packing has to fill holds something else before. */
static int test(const ds4_format_info *info, uint32_t rows, uint32_t cols) {
  ds4_matrix m = {.format = info->format, .rows = rows, .cols = cols, .nbytes = (uint64_t)rows * (cols / info->block) * info->bytes};
  const uint64_t scales = ds4_scale_bytes(info->format, rows, cols);
  uint8_t *file = malloc(m.nbytes), *beside = malloc(scales + 1);
  ds4_packed w = {.format = info->format == DS4_FP4 ? DS4_MXFP4 : info->format, .rows = rows, .cols = cols};
  w.groups = (rows + DS4_LANES - 1) / DS4_LANES;
  w.group_bytes = ds4_packed_group_bytes(w.format, cols);
  uint8_t *got = malloc(w.group_bytes + 64), *want = malloc(w.group_bytes);
  int wrong = 0;
  for (uint64_t i = 0; i < m.nbytes; i++) file[i] = next();
  for (uint64_t i = 0; i < scales; i++) beside[i] = next();
  m.data = file, m.scales = beside;
  for (uint32_t group = 0; group < w.groups; group++) {
    w.first = group;
    w.data = want;
    simple_group(&w, group, &m);
    memset(got, 0xa5, w.group_bytes + 64);
    w.data = got;
    ds4_pack_group(&w, group, &m);
    uint64_t i = 0;
    while (i < w.group_bytes && got[i] == want[i]) i++;
    uint64_t end = w.group_bytes;
    while (end < w.group_bytes + 64 && got[end] == 0xa5) end++;
    if (i == w.group_bytes && end == w.group_bytes + 64) continue;
    fprintf(stderr, "%s, %u x %u, group %u: byte %llu of %llu is wrong\n", info->name, rows, cols, group, (unsigned long long)i,
            (unsigned long long)w.group_bytes);
    wrong = 1;
  }
  free(file), free(beside), free(got), free(want);
  return wrong;
}

int main(void) {
  static const uint32_t rows[] = {1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 48};
  int failed = 0, formats = 0;
  for (int32_t format = 0; format < 1000; format++) {
    const ds4_format_info *info = ds4_format_find(format);
    if (!info) continue;
    formats++;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
      failed += test(info, rows[i], 768);
      if (info->block <= 32) failed += test(info, rows[i], 96);
      if (info->block == 1) failed += test(info, rows[i], 13) + test(info, rows[i], 1);
    }
  }
  if (formats < 18) fprintf(stderr, "%d formats were found, at least 18 are known\n", formats);
  return failed || formats < 18;
}
