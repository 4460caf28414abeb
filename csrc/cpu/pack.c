/* Weights in the layout of the kernels (kernels.h draws it): packing at load, and one row back as numbers. */
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "../formats.h"
#include "kernels.h"

uint64_t ds4_packed_group_bytes(int32_t format, uint64_t cols) {
  ds4_shape f = ds4_shape_of(format);
  ds4_pack p = ds4_pack_of(f);
  if (format == DS4_FP8) return ds4_fp8_head((uint32_t)cols) + cols * DS4_LANES;
  if (!f.low) return cols * ds4_format_find(format)->bytes * DS4_LANES;
  return cols / (32 * p.per) * (p.head + (uint64_t)p.per * p.body);
}

/* ---- packing -------------------------------------------------------------------------------------------------------------------------
 *
 * A row's part of a body is a line: four bytes in each vector, so `b` times four bytes in a plane of b bits. Files have the bits of a line in another
 * order, but in whole words: lines are made of eight weights at a time, because a mapped matrix is packed anew for every product. The layouts of files are
 * in formats.c; tests/c/pack.c has all of this bit by bit. */

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define BYTES(x) (0x0101010101010101ull * (x))

INLINE uint64_t load_u64(const uint8_t *p) {
  uint64_t v;
  memcpy(&v, p, 8);
  return v;
}

INLINE uint32_t load_u32(const uint8_t *p) {
  uint32_t v;
  memcpy(&v, p, 4);
  return v;
}

/* Line `i` of those that lie in `words`, one behind the other, into a plane. */
INLINE void put_line(uint8_t *plane, uint32_t r, uint32_t bits, const uint64_t *words, uint32_t i) {
  UNROLL
  for (uint32_t v = 0; v < bits; v++) {
    uint32_t at = i * bits + v, four = (uint32_t)(words[at / 2] >> at % 2 * 32);
    memcpy(plane + 64 * v + 4 * r, &four, 4);
  }
}

/* 32 bytes: their low halves are the line of one body, the high halves that of another. */
INLINE void lines_of_halves(const uint8_t *p, uint64_t *low, uint64_t *high) {
  UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    uint64_t a = load_u64(p + 8 * i), b = load_u64(p + 16 + 8 * i);
    low[i] = (a & BYTES(15)) | (b & BYTES(15)) << 4;
    high[i] = (a >> 4 & BYTES(15)) | (b & BYTES(0xf0));
  }
}

/* The bits of `*a` under `mask` << `shift` change places with those of `*b` under `mask`. */
INLINE void swap_bits(uint64_t *a, uint64_t *b, uint32_t shift, uint64_t mask) {
  uint64_t t = (*a >> shift ^ *b) & mask;
  *a ^= t << shift;
  *b ^= t;
}

/* 32 bytes: each pair of their bits is a plane of one of four bodies. */
INLINE void lines_of_pairs(const uint8_t *p, uint64_t line[4]) {
  UNROLL
  for (uint32_t i = 0; i < 4; i++) line[i] = load_u64(p + 8 * i);
  UNROLL
  for (uint32_t i = 0; i < 2; i++) swap_bits(line + i, line + i + 2, 4, BYTES(15));
  UNROLL
  for (uint32_t i = 0; i < 4; i += 2) swap_bits(line + i, line + i + 1, 2, BYTES(0x33));
}

/* 32 bytes: each of their bits is a plane of one of eight bodies. */
INLINE void lines_of_bits(const uint8_t *p, uint64_t line[4]) {
  lines_of_pairs(p, line);
  UNROLL
  for (uint32_t i = 0; i < 4; i++) { /* what remains to be swapped lies in the halves of one word */
    uint64_t t = (line[i] >> 31 ^ line[i]) & 0xaaaaaaaau;
    line[i] ^= t ^ t << 31;
  }
}

/* Four bytes: bit 4 i + c becomes bit i of byte c. */
INLINE uint64_t line_of_fifths(const uint8_t *p) {
  uint32_t x = load_u32(p), line = 0;
  UNROLL
  for (uint32_t c = 0; c < 4; c++) {
    uint32_t y = x >> c & 0x11111111u;
    y = (y | y >> 3) & 0x03030303u;
    y = (y | y >> 6) & 0x000f000fu;
    line |= ((y | y >> 12) & 255u) << 8 * c;
  }
  return line;
}

INLINE void lines_of_iq2(const uint8_t *p, uint64_t line[2]) {
  uint32_t rest = load_u32(p + 4);
  UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    line[i] = ds4_iq2_grid[p[i]] | ds4_iq2_signs[rest >> 7 * i & 127];
    line[i] |= (ds4_iq2_grid[p[i + 2]] | ds4_iq2_signs[rest >> 7 * (i + 2) & 127]) << 4;
  }
}

/* One byte of row r into each of eight lines of `step` bytes. */
INLINE void put_scales(uint8_t *to, uint32_t step, uint64_t eight) {
  UNROLL
  for (uint32_t i = 0; i < 8; i++) to[i * step] = (uint8_t)(eight >> 8 * i);
}

/* Q4_K and Q5_K, see six_bit_scales. */
INLINE void put_six_bit_scales(uint8_t *to, const uint8_t *p) {
  const uint32_t a = load_u32(p), b = load_u32(p + 4), c = load_u32(p + 8), low = 0x0f0f0f0fu, high = 0x30303030u;
  put_scales(to, 32, (a & 0x3f3f3f3fu) | (uint64_t)((c & low) | (a >> 2 & high)) << 32);
  put_scales(to + 16, 32, (b & 0x3f3f3f3fu) | (uint64_t)((c >> 4 & low) | (b >> 2 & high)) << 32);
}

/* Q3_K, see apart_q3_k. */
INLINE void put_q3_scales(uint8_t *to, const uint8_t *p) {
  const uint64_t low = load_u64(p), high = load_u32(p + 8);
  UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    uint64_t two = (high >> 4 * i & 0x03030303u) | (high >> (4 * i + 2) & 0x03030303u) << 32;
    uint64_t six = (low >> 4 * i & BYTES(15)) | two << 4;
    put_scales(to + 128 * i, 16, ((six | BYTES(0x80)) - BYTES(32)) ^ BYTES(0x80)); /* minus 32; no byte borrows from the next */
  }
}

INLINE void put_iq2_scales(uint8_t *to, const uint8_t *p) {
  UNROLL
  for (uint32_t s = 0; s < 8; s++) {
    to[32 * s] = (uint8_t)(2 * (p[8 * s + 7] >> 4) + 1);
    to[32 * s + 16] = 0;
  }
}

/* One block of a file as a head and its bodies. */
INLINE void pack_block(int32_t format, const uint8_t *p, uint32_t r, uint8_t *to) {
  const ds4_shape f = ds4_shape_of(format);
  const ds4_pack pack = ds4_pack_of(f);
  const uint8_t *scale = p, *minimum = p + 2;
  uint8_t *scales = to + pack.scales + r;
  uint64_t low[16], high[8]; /* the lines of all bodies */
  switch (format) {
  case DS4_Q8_0: memcpy(low, p + 2, 32); break;
  case DS4_Q4_0:
  case DS4_IQ4_NL: memcpy(low, p + 2, 16); break;
  case DS4_Q4_1: memcpy(low, p + 4, 16); break;
  case DS4_Q5_0:
    memcpy(low, p + 6, 16);
    high[0] = line_of_fifths(p + 2);
    break;
  case DS4_Q5_1:
    memcpy(low, p + 8, 16);
    high[0] = line_of_fifths(p + 4);
    break;
  case DS4_MXFP4: memcpy(low, p + 1, 16); break;
  case DS4_Q2_K:
    scale = p + 80, minimum = p + 82;
    UNROLL
    for (uint32_t i = 0; i < 2; i++) {
      put_scales(scales + 128 * i, 16, load_u64(p + 8 * i));
      lines_of_pairs(p + 16 + 32 * i, low + 4 * i);
    }
    break;
  case DS4_Q3_K:
    scale = p + 108;
    put_q3_scales(scales, p + 96);
    UNROLL
    for (uint32_t i = 0; i < 2; i++) lines_of_pairs(p + 32 + 32 * i, low + 4 * i);
    lines_of_bits(p, high);
    break;
  case DS4_Q4_K:
    put_six_bit_scales(scales, p + 4);
    UNROLL
    for (uint32_t i = 0; i < 4; i++) lines_of_halves(p + 16 + 32 * i, low + 4 * i, low + 4 * i + 2);
    break;
  case DS4_Q5_K:
    put_six_bit_scales(scales, p + 4);
    UNROLL
    for (uint32_t i = 0; i < 4; i++) lines_of_halves(p + 48 + 32 * i, low + 4 * i, low + 4 * i + 2);
    lines_of_bits(p + 16, high);
    break;
  case DS4_Q6_K:
    scale = p + 208;
    UNROLL
    for (uint32_t i = 0; i < 2; i++) {
      put_scales(scales + 128 * i, 16, load_u64(p + 192 + 8 * i));
      UNROLL
      for (uint32_t j = 0; j < 4; j += 2) lines_of_halves(p + 64 * i + 16 * j, low + 8 * i + j, low + 8 * i + j + 4);
      lines_of_pairs(p + 128 + 32 * i, high + 4 * i);
    }
    break;
  case DS4_IQ2_XXS:
    put_iq2_scales(scales, p + 2);
    UNROLL
    for (uint32_t i = 0; i < 8; i++) lines_of_iq2(p + 2 + 8 * i, low + 2 * i);
    break;
  }
  memcpy(to + (f.int8 ? 2 * r : r), scale, f.int8 ? 2 : 1);
  if (f.minimum) memcpy(to + 32 + 2 * r, minimum, 2);
  to += pack.head;
  UNROLL
  for (uint32_t i = 0; i < pack.per; i++, to += pack.body) {
    put_line(to, r, f.low, low, i);
    if (f.high) put_line(to + 64 * f.low, r, f.high, high, i);
  }
}

/* Block after block, all rows of each: what is written stays in the nearest cache. */
INLINE void pack_blocks(int32_t format, const ds4_packed *w, const uint8_t *from, uint64_t row_bytes, uint32_t rows, uint8_t *to) {
  const ds4_pack pack = ds4_pack_of(ds4_shape_of(format));
  const uint8_t *end = to + w->group_bytes;
  const uint64_t block = row_bytes / (w->cols / (32 * pack.per));
  for (; to < end; to += pack.head + pack.per * pack.body, from += block)
    for (uint32_t r = 0; r < rows; r++) pack_block(format, from + r * row_bytes, r, to);
}

INLINE void pack_floats(uint32_t size, uint64_t cols, const uint8_t *from, uint64_t row_bytes, uint32_t rows, uint8_t *to) {
  for (uint64_t k = 0; k < cols; k++, from += size, to += DS4_LANES * size)
    for (uint32_t r = 0; r < rows; r++) memcpy(to + r * size, from + r * row_bytes, size);
}

/* 16 bytes of a row of FP4 as a line: two columns to a byte there, columns 16 apart here. */
static void fp4_line(const uint8_t *from, uint8_t *line) {
  UNROLL
  for (uint32_t i = 0; i < 8; i++) {
    line[2 * i] = (uint8_t)((from[i] & 15) | from[i + 8] << 4);
    line[2 * i + 1] = (uint8_t)(from[i] >> 4 | (from[i + 8] & 0xf0));
  }
}

static void pack_fp4(const ds4_packed *w, const uint8_t *from, const uint8_t *scale, uint32_t r, uint8_t *to) {
  for (uint64_t k = 0; k < w->cols; k += 32, from += 16, to += 256) {
    uint8_t line[16];
    fp4_line(from, line);
    to[r] = *scale++;
    to += DS4_LANES;
    UNROLL
    for (uint32_t v = 0; v < 4; v++) memcpy(to + 64 * v + 4 * r, line + 4 * v, 4);
  }
}

#if defined(__x86_64__)
static __m128i fp4_line_sse2(const uint8_t *from) {
  const __m128i mask = _mm_set1_epi8(15);
  __m128i a = _mm_loadl_epi64((const __m128i *)(const void *)from), b = _mm_loadl_epi64((const __m128i *)(const void *)(from + 8));
  __m128i even = _mm_or_si128(_mm_and_si128(a, mask), _mm_slli_epi16(_mm_and_si128(b, mask), 4));
  __m128i odd = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(a, 4), mask), _mm_andnot_si128(mask, b));
  return _mm_unpacklo_epi8(even, odd);
}

/* The same for rows r .. r + 3: experts are packed anew for every product, so this one is worth the instructions that every x86-64 has. */
static void pack_fp4_four(const ds4_packed *w, const uint8_t *from, uint64_t row_bytes, const uint8_t *scale, uint32_t r, uint8_t *to) {
  const uint64_t scales = w->cols / DS4_FP4_BLOCK;
  for (uint64_t k = 0; k < scales; k++, from += 16, to += DS4_LANES + 256) {
    __m128i row[4];
    UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      row[i] = fp4_line_sse2(from + i * row_bytes);
      to[r + i] = scale[i * scales + k];
    }
    __m128i low01 = _mm_unpacklo_epi32(row[0], row[1]), low23 = _mm_unpacklo_epi32(row[2], row[3]);
    __m128i high01 = _mm_unpackhi_epi32(row[0], row[1]), high23 = _mm_unpackhi_epi32(row[2], row[3]);
    __m128i step[4] = {_mm_unpacklo_epi64(low01, low23), _mm_unpackhi_epi64(low01, low23), _mm_unpacklo_epi64(high01, high23),
                       _mm_unpackhi_epi64(high01, high23)};
    UNROLL
    for (uint32_t v = 0; v < 4; v++) _mm_storeu_si128((__m128i *)(void *)(to + DS4_LANES + 64 * v + 4 * r), step[v]);
  }
}
#endif

static void pack_fp4_rows(const ds4_packed *w, const ds4_matrix *m, uint64_t row, uint64_t row_bytes, uint32_t rows, uint8_t *to) {
  const uint8_t *from = m->data + row * row_bytes, *scale = m->scales + row * (w->cols / DS4_FP4_BLOCK);
  uint32_t r = 0;
#if defined(__x86_64__)
  for (; r + 4 <= rows; r += 4) pack_fp4_four(w, from + r * row_bytes, row_bytes, scale + (uint64_t)r * (w->cols / DS4_FP4_BLOCK), r, to);
#endif
  for (; r < rows; r++) pack_fp4(w, from + r * row_bytes, scale + (uint64_t)r * (w->cols / DS4_FP4_BLOCK), r, to);
}

void ds4_pack_group(const ds4_packed *w, uint32_t group, const ds4_matrix *from) {
  const uint64_t row = (uint64_t)group * DS4_LANES, row_bytes = from->nbytes / from->rows;
  const uint8_t *at = from->data + row * row_bytes;
  const uint32_t rows = ds4_min_u32(DS4_LANES, w->rows - group * DS4_LANES), fp8_blocks = (w->cols + DS4_FP8_TILE - 1) / DS4_FP8_TILE;
  uint8_t *to = w->data + (group - w->first) * w->group_bytes;
  if (rows < DS4_LANES) memset(to, 0, w->group_bytes);
  switch (from->format) { /* a constant format makes the loops several times as fast */
#define CASE(format)                                                                                                                       \
  case format: pack_blocks(format, w, at, row_bytes, rows, to); break;
    DS4_INT8_FORMATS(CASE)
    CASE(DS4_MXFP4)
#undef CASE
  case DS4_FP4: pack_fp4_rows(w, from, row, row_bytes, rows, to); break;
  case DS4_FP8:
    memcpy(to, from->scales + row / DS4_FP8_TILE * fp8_blocks, fp8_blocks);
    memset(to + fp8_blocks, 0, ds4_fp8_head(w->cols) - fp8_blocks);
    pack_floats(1, w->cols, at, row_bytes, rows, to + ds4_fp8_head(w->cols));
    break;
  case DS4_F32: pack_floats(4, w->cols, at, row_bytes, rows, to); break;
  default: pack_floats(2, w->cols, at, row_bytes, rows, to); break; /* F16, BF16 */
  }
}

/* ---- one row back ---------------------------------------------------------------------------------------------------------------------- */

static void take_plane(const uint8_t *plane, uint32_t r, uint8_t *code, uint32_t bits, uint32_t at) {
  for (uint32_t step = 0; step < 8; step++)
    for (uint32_t c = 0; c < 4; c++)
      code[4 * step + c] |= (plane[64 * (step % bits) + 4 * r + c] >> step / bits * bits & ((1u << bits) - 1)) << at;
}

static void take_head(const ds4_shape *f, const ds4_pack *p, const uint8_t *from, uint32_t r, ds4_block *b) {
  if (!f->int8) {
    b->d = from[r];
    return;
  }
  b->d = ds4_load_u16(from + 2 * r);
  if (f->minimum) b->m = ds4_load_u16(from + 32 + 2 * r);
  const uint8_t *scale = from + p->scales + r;
  for (uint32_t s = 0; f->sub == 32 && s < 8; s++, scale += 32) {
    b->sc[s] = (int8_t)scale[0];
    b->mn[s] = scale[16];
  }
  for (uint32_t s = 0; f->sub == 16 && s < 16; s++, scale += 16) {
    b->sc[s] = (int8_t)(f->minimum ? scale[0] & 15 : scale[0]);
    b->mn[s] = scale[0] >> 4;
  }
}

static void unpack_quants(const ds4_packed *w, const uint8_t *from, uint32_t r, float *out) {
  ds4_shape f = ds4_shape_of(w->format);
  ds4_pack p = ds4_pack_of(f);
  for (uint64_t k = 0; k < w->cols; k += 32 * p.per) {
    ds4_block b = {0};
    take_head(&f, &p, from, r, &b);
    from += p.head;
    for (uint32_t i = 0; i < p.per; i++, from += p.body) {
      take_plane(from, r, b.code + 32 * i, f.low, 0);
      if (f.high) take_plane(from + 64 * f.low, r, b.code + 32 * i, f.high, f.low);
    }
    if (f.low == 8)
      for (uint32_t i = 0; i < 32; i++) b.code[i] ^= 128;
    ds4_block_floats(w->format, &b, 32 * p.per, out + k);
  }
}

void ds4_unpack_row(const ds4_packed *p, uint32_t row, float *out) {
  const uint8_t *at = p->data + row / DS4_LANES * p->group_bytes;
  uint32_t r = row % DS4_LANES;
  if (ds4_shape_of(p->format).low) {
    unpack_quants(p, at, r, out);
    return;
  }
  const uint8_t *fp8 = at + ds4_fp8_head(p->cols) + r;
  for (uint32_t k = 0; p->format == DS4_FP8 && k < p->cols; k++)
    out[k] = ds4_e4m3(fp8[(uint64_t)k * DS4_LANES]) * ds4_e8m0(at[k / DS4_FP8_TILE]);
  for (uint32_t k = 0; p->format == DS4_F32 && k < p->cols; k++) memcpy(out + k, at + (k * DS4_LANES + r) * 4ull, 4);
  for (uint32_t k = 0; p->format == DS4_F16 && k < p->cols; k++) out[k] = ds4_f16(ds4_load_u16(at + (k * DS4_LANES + r) * 2ull));
  for (uint32_t k = 0; p->format == DS4_BF16 && k < p->cols; k++) out[k] = ds4_bf16(ds4_load_u16(at + (k * DS4_LANES + r) * 2ull));
}
