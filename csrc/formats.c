/* Weight formats: sizes and dequantisation. Written from the descriptions of the formats in ggml, which defined them. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats.h"
#include "internal.h"

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

static void dequant_f32(const uint8_t *p, uint32_t n, float *out) { memcpy(out, p, n * sizeof *out); }

static void dequant_f16(const uint8_t *p, uint32_t n, float *out) {
  for (uint32_t i = 0; i < n; i++) out[i] = ds4_f16(ds4_load_u16(p + 2 * i));
}

static void dequant_bf16(const uint8_t *p, uint32_t n, float *out) {
  for (uint32_t i = 0; i < n; i++) out[i] = ds4_bf16(ds4_load_u16(p + 2 * i));
}

static void dequant_q8_0(const uint8_t *p, uint32_t n, float *out) {
  float d = ds4_f16(ds4_load_u16(p));
  for (uint32_t i = 0; i < n; i++) out[i] = d * (float)(int8_t)p[2 + i];
}

static void dequant_q4_1(const uint8_t *p, uint32_t n, float *out) {
  float d = ds4_f16(ds4_load_u16(p)), m = ds4_f16(ds4_load_u16(p + 2));
  for (uint32_t i = 0; i < n / 2; i++) {
    out[i] = d * (float)(p[4 + i] & 15) + m;
    out[i + n / 2] = d * (float)(p[4 + i] >> 4) + m;
  }
}

static const ds4_format_info formats[] = {
    {DS4_F32, "F32", 1, 4, dequant_f32},      {DS4_F16, "F16", 1, 2, dequant_f16},      {DS4_BF16, "BF16", 1, 2, dequant_bf16},
    {DS4_Q4_1, "Q4_1", 32, 20, dequant_q4_1}, {DS4_Q8_0, "Q8_0", 32, 34, dequant_q8_0},
};

const ds4_format_info *ds4_format_find(int32_t format) {
  for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
    if (formats[i].format == format) return &formats[i];
  return NULL;
}

int ds4_format_bytes(int32_t format, uint64_t rows, uint64_t cols, uint64_t *bytes, ds4_error *err) {
  const ds4_format_info *f = ds4_format_find(format);
  if (!f)
    return ds4_fail(err, DS4_EUNSUPPORTED, format, 0, "tensor format number %d is not known; F32, F16, BF16, Q4_1 and Q8_0 are", format);
  if (cols % f->block)
    return ds4_fail(err, DS4_EINVAL, (int64_t)cols, f->block, "%llu columns do not divide into %s blocks of %u", (unsigned long long)cols,
                    f->name, f->block);
  if (!ds4_mul_u64(rows, cols / f->block, bytes) || !ds4_mul_u64(*bytes, f->bytes, bytes) || *bytes > INT64_MAX)
    return ds4_fail(err, DS4_EINVAL, (int64_t)rows, (int64_t)cols, "a tensor of %llu x %llu is larger than memory can be",
                    (unsigned long long)rows, (unsigned long long)cols);
  return DS4_OK;
}

int ds4_format_dequant(int32_t format, const void *data, uint64_t nbytes, uint64_t rows, uint64_t cols, float *out, ds4_error *err) {
  uint64_t bytes;
  int status = ds4_format_bytes(format, rows, cols, &bytes, err);
  if (status) return status;
  if (bytes != nbytes)
    return ds4_fail(err, DS4_EINVAL, (int64_t)nbytes, (int64_t)bytes, "%llu bytes were given, %llu are needed", (unsigned long long)nbytes,
                    (unsigned long long)bytes);
  const ds4_format_info *f = ds4_format_find(format);
  const uint8_t *p = data;
  for (uint64_t i = 0; i < rows * cols; i += f->block, p += f->bytes) f->dequant(p, f->block, out + i);
  return DS4_OK;
}
