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

/* Eight weights of IQ2_XXS, a byte each: 256 of the 3^8 combinations of 8, 25 and 43. Two bits a weight, the first one lowest, are the format. */
#define W(x, i) ((uint64_t)((x) >> 2 * (i) & 3) << 8 * (i))
#define G(x) W(x, 0) | W(x, 1) | W(x, 2) | W(x, 3) | W(x, 4) | W(x, 5) | W(x, 6) | W(x, 7)
const uint64_t ds4_iq2_grid[256] = {
    G(0x0000), G(0x0002), G(0x0005), G(0x0008), G(0x000a), G(0x0011), G(0x0014), G(0x0020), G(0x0022), G(0x0028), G(0x002a), G(0x0041),
    G(0x0044), G(0x0050), G(0x0058), G(0x0061), G(0x0064), G(0x0080), G(0x0082), G(0x008a), G(0x00a2), G(0x0101), G(0x0104), G(0x0110),
    G(0x0115), G(0x0140), G(0x0184), G(0x0198), G(0x0200), G(0x0202), G(0x0222), G(0x0282), G(0x0401), G(0x0404), G(0x0410), G(0x0421),
    G(0x0424), G(0x0440), G(0x0442), G(0x0448), G(0x0460), G(0x0481), G(0x0484), G(0x0490), G(0x04a4), G(0x0500), G(0x0502), G(0x0508),
    G(0x0520), G(0x0546), G(0x0569), G(0x0580), G(0x0591), G(0x0609), G(0x0610), G(0x0640), G(0x0684), G(0x06a4), G(0x0800), G(0x0805),
    G(0x0808), G(0x0814), G(0x0828), G(0x0841), G(0x0844), G(0x0850), G(0x0852), G(0x0888), G(0x0904), G(0x0940), G(0x0a02), G(0x0a14),
    G(0x1001), G(0x1004), G(0x1010), G(0x1021), G(0x1040), G(0x1060), G(0x1084), G(0x1090), G(0x1095), G(0x1100), G(0x1108), G(0x1120),
    G(0x1150), G(0x115a), G(0x1180), G(0x1224), G(0x1245), G(0x1400), G(0x1408), G(0x1420), G(0x1425), G(0x1449), G(0x1480), G(0x1518),
    G(0x1562), G(0x1600), G(0x1616), G(0x1801), G(0x1804), G(0x1810), G(0x1840), G(0x1881), G(0x1900), G(0x1905), G(0x19a0), G(0x1a51),
    G(0x2000), G(0x2002), G(0x200a), G(0x2044), G(0x2061), G(0x2080), G(0x2082), G(0x2129), G(0x2148), G(0x2200), G(0x2202), G(0x2401),
    G(0x2404), G(0x2410), G(0x2440), G(0x2456), G(0x2500), G(0x2541), G(0x2564), G(0x2690), G(0x2808), G(0x2820), G(0x2894), G(0x2a44),
    G(0x4001), G(0x4004), G(0x4010), G(0x4018), G(0x4021), G(0x4024), G(0x4040), G(0x4048), G(0x4056), G(0x4060), G(0x4081), G(0x4084),
    G(0x4090), G(0x4100), G(0x4120), G(0x4161), G(0x4180), G(0x4185), G(0x4201), G(0x4210), G(0x4248), G(0x4256), G(0x4268), G(0x4400),
    G(0x4408), G(0x4420), G(0x4480), G(0x4499), G(0x4512), G(0x4524), G(0x4600), G(0x4801), G(0x4804), G(0x4810), G(0x4840), G(0x4845),
    G(0x4900), G(0x4958), G(0x4961), G(0x4982), G(0x4a45), G(0x4a90), G(0x5000), G(0x5008), G(0x5011), G(0x5019), G(0x5020), G(0x5080),
    G(0x5088), G(0x5104), G(0x5142), G(0x51a4), G(0x5291), G(0x5490), G(0x5492), G(0x550a), G(0x5601), G(0x5654), G(0x5800), G(0x5811),
    G(0x5819), G(0x5864), G(0x5940), G(0x5a08), G(0x6004), G(0x6010), G(0x6040), G(0x6068), G(0x6100), G(0x6155), G(0x6218), G(0x6260),
    G(0x6400), G(0x6405), G(0x6510), G(0x6512), G(0x6584), G(0x6842), G(0x8000), G(0x8002), G(0x800a), G(0x8041), G(0x8082), G(0x8104),
    G(0x8118), G(0x8140), G(0x8211), G(0x8401), G(0x8404), G(0x8410), G(0x8415), G(0x8440), G(0x8460), G(0x8500), G(0x8546), G(0x8594),
    G(0x8609), G(0x8640), G(0x8660), G(0x8802), G(0x8904), G(0x8a11), G(0x9004), G(0x9010), G(0x9024), G(0x9040), G(0x90a1), G(0x9116),
    G(0x9180), G(0x9245), G(0x9400), G(0x9422), G(0x9444), G(0x9551), G(0x9881), G(0x9920), G(0xa002), G(0xa050), G(0xa085), G(0xa109),
    G(0xa200), G(0xa418), G(0xa850), G(0xa904),
};
#undef W
#undef G

/* Their signs, in bit 3: seven are given, and the eighth makes their number even. */
#define EVEN(x) (((x) ^ (x) >> 1 ^ (x) >> 2 ^ (x) >> 3 ^ (x) >> 4 ^ (x) >> 5 ^ (x) >> 6) & 1)
#define W(x, i) ((uint64_t)((x) >> (i) & 1) << (8 * (i) + 3))
#define S(x) W(x, 0) | W(x, 1) | W(x, 2) | W(x, 3) | W(x, 4) | W(x, 5) | W(x, 6) | (uint64_t)EVEN(x) << 59
#define S4(x) S(x), S(x + 1), S(x + 2), S(x + 3)
#define S16(x) S4(x), S4(x + 4), S4(x + 8), S4(x + 12)
const uint64_t ds4_iq2_signs[128] = {S16(0), S16(16), S16(32), S16(48), S16(64), S16(80), S16(96), S16(112)};
#undef EVEN
#undef W
#undef S
#undef S4
#undef S16

/* f16 scale | for every 32 weights: four bytes, a place in the grid for eight weights each; 32 bits, seven signs for each eight and a scale of
 * four bits, which stands for (2 s + 1) / 8 */
static void apart_iq2_xxs(const uint8_t *p, ds4_block *b) {
  b->d = ds4_load_u16(p);
  for (uint32_t s = 0; s < 8; s++) {
    const uint8_t *at = p + 2 + 8 * s;
    uint32_t rest = ds4_load_u16(at + 4) | (uint32_t)ds4_load_u16(at + 6) << 16;
    b->sc[s] = (int8_t)(2 * (rest >> 28) + 1);
    for (uint32_t g = 0; g < 4; g++) {
      uint64_t eight = ds4_iq2_grid[at[g]] | ds4_iq2_signs[rest >> 7 * g & 127u];
      for (uint32_t i = 0; i < 8; i++) b->code[32 * s + 8 * g + i] = (uint8_t)(eight >> 8 * i);
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
