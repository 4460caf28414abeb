/* Where the rows of a stream lie inside a page, and rows in their canonical order. The drawing is in backend.h. */
#include "internal.h"
#include "smallfloat.h"

#include <string.h>

static uint32_t number_bytes(uint32_t type) { return type == DS4_KV_F32 ? 4 : type == DS4_KV_F16 ? 2 : 1; }

/* A group of q8_0 lies along the head dimension inside one row: 32 numbers, or the largest power of two that divides a smaller head. */
static uint32_t quant_group(uint32_t width) {
  uint32_t group = DS4_QUANT_BLOCK;
  while (width % group) group /= 2;
  return group;
}

static bool whole_rows(const ds4_part *p) { return p->type == DS4_KV_FP8 || p->type == DS4_KV_FP4; }

/* Bytes of one vector, scales included. */
static uint64_t vector_bytes(const ds4_part *p) {
  uint32_t numbers = p->width - p->tail;
  if (p->type == DS4_KV_FP8) return numbers + (numbers + DS4_FP8_BLOCK - 1) / DS4_FP8_BLOCK + 2ull * p->tail;
  if (p->type == DS4_KV_FP4) return p->width / 2 + (p->width + DS4_FP4_BLOCK - 1) / DS4_FP4_BLOCK;
  return (uint64_t)p->width * number_bytes(p->type) + (p->group ? p->width / p->group * 2 : 0);
}

int ds4_layout_init(ds4_layout *l, ds4_error *err) {
  l->layer_bytes = l->row_bytes = 0;
  for (uint32_t i = 0; i < l->n_parts; i++) {
    ds4_part *p = &l->part[i];
    p->group = p->type == DS4_KV_Q8_0 ? quant_group(p->width) : 0;
    if (p->type == DS4_KV_Q8_0 && p->group < 4)
      return ds4_fail(err, DS4_EUNSUPPORTED, p->width, 0, "kv_dtype q8_0 needs a head size that 4 divides, not %u; use f16", p->width);
    if (whole_rows(p)) p->across = 0;
    uint64_t vector = vector_bytes(p);
    p->tile_bytes = vector * l->page_rows;
    p->row_bytes = vector * p->heads;
    p->offset = l->layer_bytes;
    l->layer_bytes += p->tile_bytes * p->heads;
    l->row_bytes += p->row_bytes;
  }
  l->layer_bytes = (l->layer_bytes + 63) / 64 * 64;
  l->page_bytes = l->layer_bytes * l->n_layers;
  return DS4_OK;
}

enum { PACK, UNPACK, FILL };

/* Moves `count` numbers of `size` bytes of one row, from / to contiguous memory. */
static void move(int way, uint8_t *tile, uint32_t across, uint32_t rows, uint32_t row, uint32_t count, uint32_t size, uint8_t *line,
                 uint8_t byte) {
  uint64_t step = across ? (uint64_t)rows * size : size;
  uint8_t *at = tile + (across ? (uint64_t)row * size : (uint64_t)row * count * size);
  for (uint32_t i = 0; i < count; i++, at += step) {
    if (way == PACK) memcpy(line + (uint64_t)i * size, at, size);
    if (way == UNPACK) memcpy(at, line + (uint64_t)i * size, size);
    if (way == FILL) memset(at, byte, size);
  }
}

static void rows_move(int way, const ds4_layout *l, uint8_t *page, uint32_t layer, uint32_t row, uint32_t n, uint8_t *line, uint8_t byte) {
  for (uint32_t r = row; r < row + n; r++)
    for (uint32_t part = 0; part < l->n_parts; part++) {
      const ds4_part *p = &l->part[part];
      uint32_t size = number_bytes(p->type), scales = p->group ? p->width / p->group : 0;
      uint32_t count = whole_rows(p) ? (uint32_t)vector_bytes(p) : p->width;
      for (uint32_t head = 0; head < p->heads; head++) {
        uint8_t *tile = ds4_page_tile(l, page, layer, part, head);
        move(way, tile, p->across, l->page_rows, r, count, size, line, byte);
        line += line ? (uint64_t)count * size : 0;
        move(way, tile + (uint64_t)p->width * size * l->page_rows, p->across, l->page_rows, r, scales, 2, line, byte);
        line += line ? scales * 2 : 0;
      }
    }
}

void ds4_rows_pack(const ds4_layout *l, const uint8_t *page, uint32_t layer, uint32_t row, uint32_t n, uint8_t *out) {
  rows_move(PACK, l, (uint8_t *)page, layer, row, n, out, 0);
}

void ds4_rows_unpack(const ds4_layout *l, uint8_t *page, uint32_t layer, uint32_t row, uint32_t n, const uint8_t *in) {
  rows_move(UNPACK, l, page, layer, row, n, (uint8_t *)in, 0);
}

void ds4_rows_fill(const ds4_layout *l, uint8_t *page, uint32_t layer, uint32_t row, uint32_t n, uint8_t byte) {
  rows_move(FILL, l, page, layer, row, n, NULL, byte);
}
