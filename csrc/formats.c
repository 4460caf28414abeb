/* Weight formats: sizes and dequantisation. Written from the descriptions of the formats in ggml, which defined them. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats.h"
#include "internal.h"
#include "smallfloat.h"

int ds4_fail(ds4_error *err, int status, int64_t a, int64_t b, const char *fmt, ...) {
  if (!err) return status;
  err->status = status;
  err->a = a;
  err->b = b;
  va_list args;
  va_start(args, fmt);
  vsnprintf(err->text, sizeof err->text, fmt, args);
  va_end(args);
  return status;
}

void *ds4_alloc(ds4_engine *e, uint64_t bytes) {
  if (ds4_fault_hit(&e->faults, DS4_FAULT_ALLOC) || bytes > SIZE_MAX) return NULL;
  return calloc(1, bytes ? bytes : 1);
}

/* ---- float formats ----------------------------------------------------------------------------------------------------------------- */

static void floats_f32(const uint8_t *p, uint64_t n, float *out) { memcpy(out, p, n * sizeof *out); }

static void floats_f16(const uint8_t *p, uint64_t n, float *out) {
  for (uint64_t i = 0; i < n; i++) out[i] = ds4_f16(ds4_load_u16(p + 2 * i));
}

static void floats_bf16(const uint8_t *p, uint64_t n, float *out) {
  for (uint64_t i = 0; i < n; i++) out[i] = ds4_bf16(ds4_load_u16(p + 2 * i));
}

static void floats_fp8(const uint8_t *p, uint64_t n, float *out) {
  for (uint64_t i = 0; i < n; i++) out[i] = ds4_e4m3(p[i]);
}

/* ---- blocks of 32 weights ------------------------------------------------------------------------------------------------------------ */

/* 16 bytes: weight i in the low half of byte i, weight i + 16 in the high half. */
static void nibbles(const uint8_t *p, uint8_t *code) {
  for (uint32_t i = 0; i < 16; i++) {
    code[i] = p[i] & 15;
    code[i + 16] = p[i] >> 4;
  }
}

/* 4 bytes: the fifth bit of weight i is bit i of the 32. */
static void fifth_bits(const uint8_t *p, uint8_t *code) {
  for (uint32_t i = 0; i < 32; i++) code[i] |= (p[i / 8] >> i % 8 & 1) << 4;
}

/* f16 scale | nibbles                                          Q4_0, IQ4_NL */
static void apart_q4_0(const uint8_t *p, ds4_block *b) {
  b->d = ds4_load_u16(p);
  nibbles(p + 2, b->code);
}

/* f16 scale | f16 minimum | nibbles */
static void apart_q4_1(const uint8_t *p, ds4_block *b) {
  b->d = ds4_load_u16(p);
  b->m = ds4_load_u16(p + 2);
  nibbles(p + 4, b->code);
}

/* f16 scale | fifth bits | nibbles */
static void apart_q5_0(const uint8_t *p, ds4_block *b) {
  b->d = ds4_load_u16(p);
  nibbles(p + 6, b->code);
  fifth_bits(p + 2, b->code);
}

/* f16 scale | f16 minimum | fifth bits | nibbles */
static void apart_q5_1(const uint8_t *p, ds4_block *b) {
  b->d = ds4_load_u16(p);
  b->m = ds4_load_u16(p + 2);
  nibbles(p + 8, b->code);
  fifth_bits(p + 4, b->code);
}

/* f16 scale | 32 int8 */
static void apart_q8_0(const uint8_t *p, ds4_block *b) {
  b->d = ds4_load_u16(p);
  for (uint32_t i = 0; i < 32; i++) b->code[i] = p[2 + i] ^ 128;
}

/* exponent | nibbles */
static void apart_mxfp4(const uint8_t *p, ds4_block *b) {
  b->d = p[0];
  nibbles(p + 1, b->code);
}

/* nibbles, the even weight low; the scale is not here: 1 */
static void apart_fp4(const uint8_t *p, ds4_block *b) {
  b->d = 127;
  for (uint32_t i = 0; i < 16; i++) {
    b->code[2 * i] = p[i] & 15;
    b->code[2 * i + 1] = p[i] >> 4;
  }
}

/* ---- K formats: blocks of 256 weights ------------------------------------------------------------------------------------------------ */

/* 64 bytes, two halves of 32: weight 128 h + 32 s + i has two bits at 2 s of byte 32 h + i. */
static void two_bits(const uint8_t *p, uint32_t at, uint8_t *code) {
  for (uint32_t k = 0; k < 256; k += 32)
    for (uint32_t i = 0; i < 32; i++) code[k + i] |= (p[k / 128 * 32 + i] >> k % 128 / 16 & 3) << at;
}

/* 32 bytes: weight 32 s + i has bit s of byte i. */
static void one_bit(const uint8_t *p, uint32_t at, uint8_t *code) {
  for (uint32_t k = 0; k < 256; k += 32)
    for (uint32_t i = 0; i < 32; i++) code[k + i] |= (p[i] >> k / 32 & 1) << at;
}

/* 12 bytes: eight scales and eight minimums of 6 bits. The first four of each lie in the low bits of bytes 0..3 and 4..7, whose two high bits belong to
 * the last four; the rest of those is in bytes 8..11, scales low, minimums high. */
static void six_bit_scales(const uint8_t *p, ds4_block *b) {
  for (uint32_t i = 0; i < 4; i++) {
    b->sc[i] = (int8_t)(p[i] & 63);
    b->mn[i] = p[4 + i] & 63;
    b->sc[4 + i] = (int8_t)((p[8 + i] & 15) | (p[i] >> 6) << 4);
    b->mn[4 + i] = (uint8_t)(p[8 + i] >> 4 | (p[4 + i] >> 6) << 4);
  }
}

/* 128 bytes, four times 32: the low halves are 32 weights, the high halves the next 32. */
static void nibbles_256(const uint8_t *p, uint8_t *code) {
  for (uint32_t k = 0; k < 256; k += 64)
    for (uint32_t i = 0; i < 32; i++) {
      code[k + i] = p[k / 2 + i] & 15;
      code[k + 32 + i] = p[k / 2 + i] >> 4;
    }
}

/* 16 bytes: scale low, minimum high | two bits | f16 scale | f16 minimum */
static void apart_q2_k(const uint8_t *p, ds4_block *b) {
  b->d = ds4_load_u16(p + 80);
  b->m = ds4_load_u16(p + 82);
  for (uint32_t i = 0; i < 16; i++) {
    b->sc[i] = p[i] & 15;
    b->mn[i] = p[i] >> 4;
  }
  memset(b->code, 0, 256);
  two_bits(p + 16, 0, b->code);
}

/* third bits | two bits | 16 scales of 6 bits | f16 scale. A scale has its low four bits in bytes 0..7, low halves first, and its high two in bytes 8..11. */
static void apart_q3_k(const uint8_t *p, ds4_block *b) {
  const uint8_t *s = p + 96;
  b->d = ds4_load_u16(p + 108);
  for (uint32_t i = 0; i < 16; i++) b->sc[i] = (int8_t)(((s[i % 8] >> i / 8 * 4 & 15) | (s[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32);
  memset(b->code, 0, 256);
  two_bits(p + 32, 0, b->code);
  one_bit(p, 2, b->code);
}

/* f16 scale | f16 minimum | scales and minimums of 6 bits | nibbles */
static void apart_q4_k(const uint8_t *p, ds4_block *b) {
  b->d = ds4_load_u16(p);
  b->m = ds4_load_u16(p + 2);
  six_bit_scales(p + 4, b);
  nibbles_256(p + 16, b->code);
}

/* the same with fifth bits before the nibbles */
static void apart_q5_k(const uint8_t *p, ds4_block *b) {
  b->d = ds4_load_u16(p);
  b->m = ds4_load_u16(p + 2);
  six_bit_scales(p + 4, b);
  nibbles_256(p + 48, b->code);
  one_bit(p + 16, 4, b->code);
}

/* low four bits | high two bits | 16 int8 scales | f16 scale. Of 64 bytes of low bits the low halves are 64 weights, the high halves the next 64. */
static void apart_q6_k(const uint8_t *p, ds4_block *b) {
  b->d = ds4_load_u16(p + 208);
  memcpy(b->sc, p + 192, 16);
  for (uint32_t k = 0; k < 256; k += 128)
    for (uint32_t i = 0; i < 64; i++) {
      b->code[k + i] = p[k / 2 + i] & 15;
      b->code[k + 64 + i] = p[k / 2 + i] >> 4;
    }
  two_bits(p + 128, 4, b->code);
}

/* Eight weights of IQ2_XXS: 256 of the 3^8 combinations of 8, 25 and 43, two bits a weight, the first one lowest. The table is the format. */
static const uint16_t iq2_grid[256] = {
    0x0000, 0x0002, 0x0005, 0x0008, 0x000a, 0x0011, 0x0014, 0x0020, 0x0022, 0x0028, 0x002a, 0x0041, 0x0044, 0x0050, 0x0058, 0x0061,
    0x0064, 0x0080, 0x0082, 0x008a, 0x00a2, 0x0101, 0x0104, 0x0110, 0x0115, 0x0140, 0x0184, 0x0198, 0x0200, 0x0202, 0x0222, 0x0282,
    0x0401, 0x0404, 0x0410, 0x0421, 0x0424, 0x0440, 0x0442, 0x0448, 0x0460, 0x0481, 0x0484, 0x0490, 0x04a4, 0x0500, 0x0502, 0x0508,
    0x0520, 0x0546, 0x0569, 0x0580, 0x0591, 0x0609, 0x0610, 0x0640, 0x0684, 0x06a4, 0x0800, 0x0805, 0x0808, 0x0814, 0x0828, 0x0841,
    0x0844, 0x0850, 0x0852, 0x0888, 0x0904, 0x0940, 0x0a02, 0x0a14, 0x1001, 0x1004, 0x1010, 0x1021, 0x1040, 0x1060, 0x1084, 0x1090,
    0x1095, 0x1100, 0x1108, 0x1120, 0x1150, 0x115a, 0x1180, 0x1224, 0x1245, 0x1400, 0x1408, 0x1420, 0x1425, 0x1449, 0x1480, 0x1518,
    0x1562, 0x1600, 0x1616, 0x1801, 0x1804, 0x1810, 0x1840, 0x1881, 0x1900, 0x1905, 0x19a0, 0x1a51, 0x2000, 0x2002, 0x200a, 0x2044,
    0x2061, 0x2080, 0x2082, 0x2129, 0x2148, 0x2200, 0x2202, 0x2401, 0x2404, 0x2410, 0x2440, 0x2456, 0x2500, 0x2541, 0x2564, 0x2690,
    0x2808, 0x2820, 0x2894, 0x2a44, 0x4001, 0x4004, 0x4010, 0x4018, 0x4021, 0x4024, 0x4040, 0x4048, 0x4056, 0x4060, 0x4081, 0x4084,
    0x4090, 0x4100, 0x4120, 0x4161, 0x4180, 0x4185, 0x4201, 0x4210, 0x4248, 0x4256, 0x4268, 0x4400, 0x4408, 0x4420, 0x4480, 0x4499,
    0x4512, 0x4524, 0x4600, 0x4801, 0x4804, 0x4810, 0x4840, 0x4845, 0x4900, 0x4958, 0x4961, 0x4982, 0x4a45, 0x4a90, 0x5000, 0x5008,
    0x5011, 0x5019, 0x5020, 0x5080, 0x5088, 0x5104, 0x5142, 0x51a4, 0x5291, 0x5490, 0x5492, 0x550a, 0x5601, 0x5654, 0x5800, 0x5811,
    0x5819, 0x5864, 0x5940, 0x5a08, 0x6004, 0x6010, 0x6040, 0x6068, 0x6100, 0x6155, 0x6218, 0x6260, 0x6400, 0x6405, 0x6510, 0x6512,
    0x6584, 0x6842, 0x8000, 0x8002, 0x800a, 0x8041, 0x8082, 0x8104, 0x8118, 0x8140, 0x8211, 0x8401, 0x8404, 0x8410, 0x8415, 0x8440,
    0x8460, 0x8500, 0x8546, 0x8594, 0x8609, 0x8640, 0x8660, 0x8802, 0x8904, 0x8a11, 0x9004, 0x9010, 0x9024, 0x9040, 0x90a1, 0x9116,
    0x9180, 0x9245, 0x9400, 0x9422, 0x9444, 0x9551, 0x9881, 0x9920, 0xa002, 0xa050, 0xa085, 0xa109, 0xa200, 0xa418, 0xa850, 0xa904,
};

/* f16 scale | for every 32 weights: four bytes, a place in the grid for eight weights each; 32 bits, seven signs for each eight (the eighth sign makes their
 * number even) and a scale of four bits, which stands for (2 s + 1) / 8 */
static void apart_iq2_xxs(const uint8_t *p, ds4_block *b) {
  b->d = ds4_load_u16(p);
  for (uint32_t s = 0; s < 8; s++) {
    const uint8_t *at = p + 2 + 8 * s;
    uint32_t rest = ds4_load_u16(at + 4) | (uint32_t)ds4_load_u16(at + 6) << 16;
    b->sc[s] = (int8_t)(2 * (rest >> 28) + 1);
    for (uint32_t g = 0; g < 4; g++) {
      uint32_t sign = rest >> 7 * g & 127u;
      sign |= (uint32_t)__builtin_parity(sign) << 7;
      for (uint32_t i = 0; i < 8; i++) b->code[32 * s + 8 * g + i] = (uint8_t)((iq2_grid[at[g]] >> 2 * i & 3u) | (sign >> i & 1u) << 3);
    }
  }
}

/* ---- all of them ----------------------------------------------------------------------------------------------------------------------- */

static const ds4_format_info formats[] = {
    {DS4_F32, "F32", 1, 4, floats_f32, NULL},        {DS4_F16, "F16", 1, 2, floats_f16, NULL},
    {DS4_BF16, "BF16", 1, 2, floats_bf16, NULL},     {DS4_Q8_0, "Q8_0", 32, 34, NULL, apart_q8_0},
    {DS4_Q4_0, "Q4_0", 32, 18, NULL, apart_q4_0},    {DS4_Q4_1, "Q4_1", 32, 20, NULL, apart_q4_1},
    {DS4_Q5_0, "Q5_0", 32, 22, NULL, apart_q5_0},    {DS4_Q5_1, "Q5_1", 32, 24, NULL, apart_q5_1},
    {DS4_Q2_K, "Q2_K", 256, 84, NULL, apart_q2_k},   {DS4_Q3_K, "Q3_K", 256, 110, NULL, apart_q3_k},
    {DS4_Q4_K, "Q4_K", 256, 144, NULL, apart_q4_k},  {DS4_Q5_K, "Q5_K", 256, 176, NULL, apart_q5_k},
    {DS4_Q6_K, "Q6_K", 256, 210, NULL, apart_q6_k},  {DS4_IQ4_NL, "IQ4_NL", 32, 18, NULL, apart_q4_0},
    {DS4_MXFP4, "MXFP4", 32, 17, NULL, apart_mxfp4}, {DS4_FP8, "FP8", 1, 1, floats_fp8, NULL},
    {DS4_FP4, "FP4", 32, 16, NULL, apart_fp4},       {DS4_IQ2_XXS, "IQ2_XXS", 256, 66, NULL, apart_iq2_xxs},
};
#define N_FORMATS (sizeof formats / sizeof *formats)

const ds4_format_info *ds4_format_find(int32_t format) {
  for (size_t i = 0; i < N_FORMATS; i++)
    if (formats[i].format == format) return &formats[i];
  return NULL;
}

void ds4_block_floats(int32_t format, const ds4_block *b, uint32_t n, float *out) {
  ds4_shape f = ds4_shape_of(format);
  float d = ds4_block_scale(format, b), m = ds4_f16(b->m);
  uint32_t sub = f.sub ? f.sub : n;
  for (uint32_t s = 0; s < n / sub; s++) {
    float scale = f.sub ? d * (float)b->sc[s] : d, minimum = f.sub ? -m * (float)b->mn[s] : m;
    for (uint32_t i = s * sub; i < (s + 1) * sub; i++) {
      out[i] = scale * (float)ds4_code_value(&f, b->code[i]);
      if (f.minimum) out[i] += minimum;
    }
  }
}

void ds4_format_floats(const ds4_format_info *f, const uint8_t *p, uint64_t n, float *out) {
  if (f->floats) {
    f->floats(p, n, out);
    return;
  }
  ds4_block b = {0};
  for (uint64_t i = 0; i < n; i += f->block, p += f->bytes) {
    f->take_apart(p, &b);
    ds4_block_floats(f->format, &b, f->block, out + i);
  }
}

static int unknown_format(int32_t format, ds4_error *err) {
  char names[256] = "";
  for (size_t i = 0, at = 0; i < N_FORMATS; i++)
    at += (size_t)snprintf(names + at, sizeof names - at, "%s%s", i ? ", " : "", formats[i].name);
  return ds4_fail(err, DS4_EUNSUPPORTED, format, 0, "tensor format number %d is not known; use one of %s", format, names);
}

int ds4_format_bytes(int32_t format, uint64_t rows, uint64_t cols, uint64_t *bytes, ds4_error *err) {
  const ds4_format_info *f = ds4_format_find(format);
  if (!f) return unknown_format(format, err);
  if (cols % f->block)
    return ds4_fail(err, DS4_EINVAL, (int64_t)cols, f->block, "%llu columns do not divide into %s blocks of %u", (unsigned long long)cols,
                    f->name, f->block);
  if (!ds4_mul_u64(rows, cols / f->block, bytes) || !ds4_mul_u64(*bytes, f->bytes, bytes) || *bytes > INT64_MAX)
    return ds4_fail(err, DS4_EINVAL, (int64_t)rows, (int64_t)cols, "a tensor of %llu x %llu is larger than memory can be",
                    (unsigned long long)rows, (unsigned long long)cols);
  return DS4_OK;
}

uint64_t ds4_scale_bytes(int32_t format, uint64_t rows, uint64_t cols) {
  if (format == DS4_FP8) return (rows + DS4_FP8_TILE - 1) / DS4_FP8_TILE * ((cols + DS4_FP8_TILE - 1) / DS4_FP8_TILE);
  return format == DS4_FP4 ? rows * (cols / DS4_FP4_BLOCK) : 0;
}

int ds4_format_dequant(int32_t format, const void *data, uint64_t nbytes, uint64_t rows, uint64_t cols, float *out, ds4_error *err) {
  uint64_t bytes;
  int status = ds4_format_bytes(format, rows, cols, &bytes, err);
  if (status) return status;
  if (bytes != nbytes)
    return ds4_fail(err, DS4_EINVAL, (int64_t)nbytes, (int64_t)bytes, "%llu bytes were given, %llu are needed", (unsigned long long)nbytes,
                    (unsigned long long)bytes);
  ds4_format_floats(ds4_format_find(format), data, rows * cols, out);
  return DS4_OK;
}
