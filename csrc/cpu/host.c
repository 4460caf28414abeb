/* Plain memory: large pieces straight from the system, so that freed ones go back to it and not to the allocator's own store. */
#define _DEFAULT_SOURCE
#include "host.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "../smallfloat.h"

#define LARGE (64u << 10)

void *ds4_host_alloc(ds4_backend *b, uint64_t bytes) {
  (void)b;
  if (!bytes || bytes > (uint64_t)INT64_MAX) return NULL;
  if (bytes < LARGE) return aligned_alloc(64, (bytes + 63) / 64 * 64);
  void *mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mem == MAP_FAILED) return NULL;
#if defined(MADV_HUGEPAGE)
  madvise(mem, bytes, MADV_HUGEPAGE); /* fewer misses of the address cache; refused, nothing is lost */
#endif
  return mem;
}

void ds4_host_free(ds4_backend *b, void *mem, uint64_t bytes) {
  (void)b;
  if (!mem) return;
  if (bytes < LARGE)
    free(mem);
  else
    munmap(mem, bytes);
}

int ds4_host_copy(ds4_backend *b, void *to, const void *from, uint64_t bytes) {
  (void)b;
  memcpy(to, from, bytes);
  return DS4_OK;
}

int ds4_host_wait(ds4_backend *b) {
  (void)b;
  return DS4_OK;
}

/* ---- small ops that are the same for both ------------------------------------------------------------------------------------------ */

int ds4_host_scale(ds4_backend *b, float *x, float factor, uint64_t n) {
  (void)b;
  for (uint64_t i = 0; i < n; i++) x[i] *= factor;
  return DS4_OK;
}

int ds4_host_clear(ds4_backend *b, float *x, uint64_t n) {
  (void)b;
  memset(x, 0, n * sizeof *x);
  return DS4_OK;
}

int ds4_host_gather(ds4_backend *b, const float *x, const uint32_t *row, uint32_t n, uint32_t width, float *out) {
  (void)b;
  for (uint32_t i = 0; i < n; i++) memcpy(out + (uint64_t)i * width, x + (uint64_t)row[i] * width, width * sizeof *x);
  return DS4_OK;
}

int ds4_host_scatter_add(ds4_backend *b, const float *x, const uint32_t *row, const float *weight, uint32_t n, uint32_t width, float *out) {
  (void)b;
  for (uint32_t i = 0; i < n; i++, x += width)
    for (uint32_t k = 0; k < width; k++) out[(uint64_t)row[i] * width + k] = fmaf(weight[i], x[k], out[(uint64_t)row[i] * width + k]);
  return DS4_OK;
}

int ds4_host_add_rows(ds4_backend *b, float *x, const float *table, const uint32_t *row, uint32_t n, uint32_t width) {
  (void)b;
  for (uint32_t i = 0; i < n; i++, x += width)
    for (uint32_t k = 0; k < width; k++) x[k] += table[(uint64_t)row[i] * width + k];
  return DS4_OK;
}

/* ---- rows ----------------------------------------------------------------------------------------------------------------------- */

/* Where number i (or scale i) of a row lies in a tile. */
static uint64_t at(const ds4_part *p, uint32_t rows, uint32_t row, uint32_t i, uint32_t count) {
  return p->across ? (uint64_t)i * rows + row : (uint64_t)row * count + i;
}

/* One fp8 row: E4M3 numbers with a scale per block, then the tail as bf16. */
static void fp8_write(const ds4_part *p, uint8_t *row, const float *x) {
  uint32_t n = p->width - p->tail, block = 0;
  uint8_t *scale = row + n, *tail = scale + (n + DS4_FP8_BLOCK - 1) / DS4_FP8_BLOCK;
  for (uint32_t from = 0; from < n; from += DS4_FP8_BLOCK, block++) {
    uint32_t count = ds4_min_u32(DS4_FP8_BLOCK, n - from);
    scale[block] = ds4_fp8_scale(x + from, count);
    float inverse = ds4_e8m0_inverse(scale[block]);
    for (uint32_t i = from; i < from + count; i++) row[i] = ds4_to_e4m3(x[i] * inverse);
  }
  for (uint32_t i = 0; i < p->tail; i++) {
    uint16_t half = ds4_to_bf16(x[n + i]);
    memcpy(tail + 2ull * i, &half, 2);
  }
}

static void fp8_read(const ds4_part *p, const uint8_t *row, float *out) {
  uint32_t n = p->width - p->tail;
  const uint8_t *scale = row + n, *tail = scale + (n + DS4_FP8_BLOCK - 1) / DS4_FP8_BLOCK;
  for (uint32_t i = 0; i < n; i++) out[i] = ds4_e4m3(row[i]) * ds4_e8m0(scale[i / DS4_FP8_BLOCK]);
  for (uint32_t i = 0; i < p->tail; i++) {
    uint16_t half;
    memcpy(&half, tail + 2ull * i, 2);
    out[n + i] = ds4_bf16(half);
  }
}

/* One fp4 row: two numbers a byte, then a scale per block. */
static void fp4_write(const ds4_part *p, uint8_t *row, const float *x) {
  uint8_t *scale = row + p->width / 2;
  memset(row, 0, p->width / 2);
  for (uint32_t from = 0; from < p->width; from += DS4_FP4_BLOCK) {
    uint32_t count = ds4_min_u32(DS4_FP4_BLOCK, p->width - from);
    uint8_t s = scale[from / DS4_FP4_BLOCK] = ds4_fp4_scale(x + from, count);
    float inverse = ds4_e8m0_inverse(s);
    for (uint32_t i = from; i < from + count; i++) row[i / 2] |= (uint8_t)(ds4_to_e2m1(x[i] * inverse) << 4 * (i % 2));
  }
}

static void fp4_read(const ds4_part *p, const uint8_t *row, float *out) {
  for (uint32_t i = 0; i < p->width; i++)
    out[i] = ds4_e2m1(row[i / 2] >> 4 * (i % 2) & 15u) * ds4_e8m0(row[p->width / 2 + i / DS4_FP4_BLOCK]);
}

static void f16_write(const ds4_part *p, uint32_t rows, uint16_t *tile, uint32_t row, const float *x, ds4_to_halves to_f16) {
  uint16_t half[64];
  for (uint32_t from = 0; from < p->width; from += 64) {
    uint32_t n = ds4_min_u32(64, p->width - from);
    to_f16(x + from, n, half);
    for (uint32_t i = 0; i < n; i++) tile[at(p, rows, row, from + i, p->width)] = half[i];
  }
}

static void vector_write(const ds4_part *p, uint32_t rows, uint8_t *tile, uint32_t row, const float *x, ds4_to_halves to_f16) {
  int8_t *byte = (int8_t *)tile;
  uint16_t *scale = (uint16_t *)(void *)(tile + (uint64_t)p->width * rows);
  if (p->type == DS4_KV_FP8) fp8_write(p, tile + row * (p->tile_bytes / rows), x);
  if (p->type == DS4_KV_FP4) fp4_write(p, tile + row * (p->tile_bytes / rows), x);
  if (p->type == DS4_KV_F32)
    for (uint32_t i = 0; i < p->width; i++) ((float *)(void *)tile)[at(p, rows, row, i, p->width)] = x[i];
  if (p->type == DS4_KV_F16) f16_write(p, rows, (uint16_t *)(void *)tile, row, x, to_f16);
  if (p->type == DS4_KV_Q8_0)
    for (uint32_t g = 0; g < p->width / p->group; g++) {
      int8_t q[DS4_QUANT_BLOCK];
      uint16_t d = ds4_quant_kv(x + g * p->group, p->group, q);
      scale[at(p, rows, row, g, p->width / p->group)] = d;
      for (uint32_t i = 0; i < p->group; i++) byte[at(p, rows, row, g * p->group + i, p->width)] = q[i];
    }
}

void ds4_vector_read(const ds4_part *p, uint32_t rows, const uint8_t *tile, uint32_t row, float *out) {
  const uint16_t *half = (const uint16_t *)(const void *)tile;
  const int8_t *byte = (const int8_t *)tile;
  const uint16_t *scale = (const uint16_t *)(const void *)(tile + (uint64_t)p->width * rows);
  if (p->type == DS4_KV_FP8) fp8_read(p, tile + row * (p->tile_bytes / rows), out);
  if (p->type == DS4_KV_FP4) fp4_read(p, tile + row * (p->tile_bytes / rows), out);
  for (uint32_t i = 0; i < p->width && p->type <= DS4_KV_Q8_0; i++) {
    uint64_t k = at(p, rows, row, i, p->width);
    if (p->type == DS4_KV_F32) out[i] = ((const float *)(const void *)tile)[k];
    if (p->type == DS4_KV_F16) out[i] = ds4_f16(half[k]);
    if (p->type == DS4_KV_Q8_0) out[i] = (float)byte[k] * ds4_f16(scale[at(p, rows, row, i / p->group, p->width / p->group)]);
  }
}

void ds4_row_write(const ds4_layout *l, uint32_t layer, uint32_t part, const ds4_view *view, uint32_t row, const float *x,
                   ds4_to_halves to_f16) {
  const ds4_part *p = &l->part[part];
  uint8_t *page = ds4_view_page(view, l, row);
  for (uint32_t h = 0; h < p->heads; h++, x += p->width)
    vector_write(p, l->page_rows, ds4_page_tile(l, page, layer, part, h), row % l->page_rows, x, to_f16);
}

int ds4_rows_read(ds4_backend *b, const ds4_layout *l, uint32_t layer, uint32_t part, const ds4_view *view, uint32_t row, uint32_t n,
                  float *out) {
  (void)b;
  const ds4_part *p = &l->part[part];
  for (uint32_t r = row; r < row + n; r++)
    for (uint32_t h = 0; h < p->heads; h++, out += p->width)
      ds4_vector_read(p, l->page_rows, ds4_page_tile(l, ds4_view_page(view, l, r), layer, part, h), r % l->page_rows, out);
  return DS4_OK;
}
