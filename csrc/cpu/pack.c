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

/* ---- packing ------------------------------------------------------------------------------------------------------------------------- */

static void pack_floats(const ds4_packed *p, uint32_t size, const uint8_t *from, uint32_t r, uint8_t *to) {
  for (uint64_t k = 0; k < p->cols; k++) memcpy(to + (k * DS4_LANES + r) * size, from + k * size, size);
}

/* `bits` bits, from bit `at` of the codes on, of 32 weights of row `r` into a plane of zeros. */
static inline __attribute__((always_inline)) void put_bits(uint8_t *plane, uint32_t r, const uint8_t *code, const uint32_t bits,
                                                           uint32_t at) {
  for (uint32_t step = 0; step < 8; step++)
    for (uint32_t c = 0; c < 4; c++)
      plane[64 * (step % bits) + 4 * r + c] |= (code[4 * step + c] >> at & ((1u << bits) - 1)) << step / bits * bits;
}

static void put_plane(uint8_t *plane, uint32_t r, const uint8_t *code, uint32_t bits, uint32_t at) {
  switch (bits) { /* a constant makes the inner loops several times as fast */
  case 8: put_bits(plane, r, code, 8, at); break;
  case 4: put_bits(plane, r, code, 4, at); break;
  case 2: put_bits(plane, r, code, 2, at); break;
  case 1: put_bits(plane, r, code, 1, at); break;
  }
}

/* The scales of one block of a file, which is `per` blocks of the packed layout. */
static void put_head(const ds4_shape *f, const ds4_pack *p, const ds4_block *b, uint32_t r, uint8_t *to) {
  if (!f->int8) {
    to[r] = (uint8_t)b->d;
    return;
  }
  memcpy(to + 2 * r, &b->d, 2);
  if (f->minimum) memcpy(to + 32 + 2 * r, &b->m, 2);
  uint8_t *scale = to + p->scales + r;
  for (uint32_t s = 0; f->sub == 32 && s < 8; s++, scale += 32) {
    scale[0] = (uint8_t)b->sc[s];
    scale[16] = b->mn[s];
  }
  for (uint32_t s = 0; f->sub == 16 && s < 16; s++, scale += 16) scale[0] = (uint8_t)(f->minimum ? b->sc[s] | b->mn[s] << 4 : b->sc[s]);
}

static void pack_row(const ds4_packed *w, const ds4_format_info *info, const uint8_t *from, uint32_t r, uint8_t *to) {
  ds4_shape f = ds4_shape_of(w->format);
  ds4_pack p = ds4_pack_of(f);
  ds4_block b = {0};
  for (uint64_t k = 0; k < w->cols; k += info->block, from += info->bytes) {
    info->take_apart(from, &b);
    if (f.low == 8) /* these are stored as the signed numbers they are */
      for (uint32_t i = 0; i < 32; i++) b.code[i] ^= 128;
    put_head(&f, &p, &b, r, to);
    to += p.head;
    for (uint32_t i = 0; i < p.per; i++, to += p.body) {
      put_plane(to, r, b.code + 32 * i, f.low, 0);
      if (f.high) put_plane(to + 64 * f.low, r, b.code + 32 * i, f.high, f.low);
    }
  }
}

/* 16 bytes of a row of FP4 as 16 bytes of a plane: two columns to a byte there, columns 16 apart here. */
static void fp4_line(const uint8_t *from, uint8_t *line) {
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
    for (uint32_t i = 0; i < 4; i++) {
      row[i] = fp4_line_sse2(from + i * row_bytes);
      to[r + i] = scale[i * scales + k];
    }
    __m128i low01 = _mm_unpacklo_epi32(row[0], row[1]), low23 = _mm_unpacklo_epi32(row[2], row[3]);
    __m128i high01 = _mm_unpackhi_epi32(row[0], row[1]), high23 = _mm_unpackhi_epi32(row[2], row[3]);
    __m128i step[4] = {_mm_unpacklo_epi64(low01, low23), _mm_unpackhi_epi64(low01, low23), _mm_unpacklo_epi64(high01, high23),
                       _mm_unpackhi_epi64(high01, high23)};
    for (uint32_t v = 0; v < 4; v++) _mm_storeu_si128((__m128i *)(void *)(to + DS4_LANES + 64 * v + 4 * r), step[v]);
  }
}
#endif

void ds4_pack_group(const ds4_packed *w, uint32_t group, const ds4_matrix *from) {
  const ds4_format_info *info = ds4_format_find(from->format);
  uint64_t row_bytes = from->nbytes / from->rows, blocks = (w->cols + DS4_FP8_TILE - 1) / DS4_FP8_TILE;
  uint32_t rows = ds4_min_u32(DS4_LANES, w->rows - group * DS4_LANES);
  uint8_t *to = w->data + (group - w->first) * w->group_bytes;
  if (rows < DS4_LANES || from->format != DS4_FP4) memset(to, 0, w->group_bytes); /* bits are or-ed in; whole groups of FP4 are stored */
  if (from->format == DS4_FP8) memcpy(to, from->scales + group * DS4_LANES / DS4_FP8_TILE * blocks, blocks);
  uint32_t r = 0;
#if defined(__x86_64__)
  for (; from->format == DS4_FP4 && r + 4 <= rows; r += 4) {
    uint64_t row = (uint64_t)group * DS4_LANES + r;
    pack_fp4_four(w, from->data + row * row_bytes, row_bytes, from->scales + row * (w->cols / DS4_FP4_BLOCK), r, to);
  }
#endif
  for (; r < rows; r++) {
    uint64_t row = (uint64_t)group * DS4_LANES + r;
    const uint8_t *at = from->data + row * row_bytes;
    if (from->format == DS4_FP4)
      pack_fp4(w, at, from->scales + row * (w->cols / DS4_FP4_BLOCK), r, to);
    else if (info->floats)
      pack_floats(w, info->bytes, at, r, to + (from->format == DS4_FP8 ? ds4_fp8_head(w->cols) : 0));
    else
      pack_row(w, info, at, r, to);
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
