/* Products of quantised weights. Included by kernels.inc.h; the file of an instruction set defines before, on top of decode.inc.h:
 *
 *   q_fma(a, b, c) q_f16(p)          over the VB_ROWS floats of a vq
 *   DOT_TILE                         tokens of a tile
 *   dot_block(format, body, scales, x, sum, stride, t, isum)    the exact integer sums of a body for VB_ROWS rows and `t` tokens;
 *                                    with sub-blocks of 16 their combination by the integer scales
 *   dot_minimums(scales, sum)        Q2_K: the integer minimums of two sub-blocks times the sums of the activations
 *   FP4_PIECES                       pieces of an MXFP4 tile of FLOAT_TILE tokens; divides PIECES */

static void k_quantize(const float *x, uint32_t token, ds4_quants *out) {
  x += (uint64_t)token * out->blocks * 32;
  for (uint32_t i = 0; i < out->blocks; i++, x += 32) {
    uint64_t at = (uint64_t)token * out->stride + i;
    v16 a = v_load(x), b = v_load(x + 16);
    uint32_t top = v_top(a, b);
    float amax = top < 0x7f800000u ? ds4_float(top) : NAN;
    float d = amax / 127.0f, inverse = d > 0.0f ? 1.0f / d : 0.0f;
    if (inverse > 0x1p126f) inverse = 0.0f;
    int32_t sum[2] = {0, 0};
    if (inverse > 0.0f)
      v_quant(a, b, inverse, out->q + at * 32, sum);
    else
      memset(out->q + at * 32, 0, 32);
    out->sum[2 * at] = (int16_t)sum[0];
    out->sum[2 * at + 1] = (int16_t)sum[1];
    out->d[at] = d;
    out->dq[at] = d * (float)(sum[0] + sum[1]);
  }
}

/* Stores the results of one token for the VB_ROWS rows of a piece; the last group may be short. */
INLINE void store_piece(const ds4_packed *w, uint32_t piece, uint64_t token, float *out, vq value) {
  uint32_t row = piece * VB_ROWS, rows = row < w->rows ? w->rows - row : 0;
  out += token * w->rows + row;
  if (rows >= VB_ROWS)
    memcpy(out, &value, sizeof value);
  else
    memcpy(out, &value, rows * sizeof *out);
}

/* One token waits for memory; the planes of a K block are read in an order that the processor does not foresee. */
INLINE void look_ahead_in_weights(const uint8_t *p, uint32_t bytes) {
  for (uint32_t k = 0; k < bytes; k += 64) __builtin_prefetch(p + 4096 + k);
}

/* `g` pieces of one group, from `piece` on, x `t` tokens. The order of operations is that of dot_quant in ref.c. */
INLINE void quant_tile(int32_t format, const ds4_packed *w, uint32_t piece, const int g, const ds4_quants *x, uint64_t token, const int t,
                       float *out) {
  const ds4_shape f = ds4_shape_of(format);
  const ds4_pack pack = ds4_pack_of(f);
  const uint8_t *p = w->data + (piece / PIECES - w->first) * w->group_bytes;
  const uint32_t first = piece % PIECES * VB_ROWS;
  uint64_t at = token * x->stride, end = at + x->blocks;
  vq acc[PIECES * DOT_TILE] = {0};
  vi isum[DOT_TILE];
  while (at < end) {
    const uint8_t *head = p, *scales = p + pack.scales + first;
    p += pack.head;
    if (t == 1) look_ahead_in_weights(p, pack.head + pack.per * pack.body);
    for (uint32_t i = 0; i < pack.per; i++, at++, p += pack.body, scales += 32) UNROLL for (int q = 0; q < g; q++) {
        const uint8_t *sc = scales + q * VB_ROWS;
        vq scale = q_f16(head + 2 * (first + q * VB_ROWS)), minimum = {0};
        if (f.minimum) minimum = q_f16(head + 32 + 2 * (first + q * VB_ROWS));
        if (f.sub) minimum = -minimum;
        if (f.eighth) scale *= 0.125f;
        if (f.sub == 32) {
          scale *= __builtin_convertvector(vi_bytes(sc), vq);
          minimum *= __builtin_convertvector(vi_bytes(sc + 16), vq);
        }
        dot_block(format, p + 4 * (first + q * VB_ROWS), sc, x->q + at * 32, x->sum + 2 * at, x->stride, t, isum);
        UNROLL for (int j = 0; j < t; j++) {
          const uint64_t b = at + (uint64_t)j * x->stride;
          vq *to = &acc[q * t + j];
          *to = q_fma(scale * x->d[b], __builtin_convertvector(isum[j], vq), *to);
          if (f.minimum && f.sub == 16)
            *to = q_fma(minimum * x->d[b], __builtin_convertvector(dot_minimums(sc, x->sum + 2 * b), vq), *to);
          else if (f.minimum)
            *to = q_fma(minimum, (vq){0} + x->dq[b], *to);
        }
      }
  }
  UNROLL for (int i = 0; i < g * t; i++) store_piece(w, piece + i / t, token + i % t, out, acc[i]);
}

INLINE void quant_groups(int32_t format, const ds4_packed *w, uint32_t group, uint32_t groups, const ds4_quants *x, uint32_t n,
                         float *out) {
  for (uint32_t piece = group * PIECES; piece < (group + groups) * PIECES; piece += PIECES) {
    uint32_t token = 0;
    for (; token + DOT_TILE <= n; token += DOT_TILE)
      for (uint32_t q = 0; q < PIECES; q++) quant_tile(format, w, piece + q, 1, x, token, DOT_TILE, out);
    for (; token + DOT_TILE / 2 <= n; token += DOT_TILE / 2)
      for (uint32_t q = 0; q < PIECES; q++) quant_tile(format, w, piece + q, 1, x, token, DOT_TILE / 2, out);
    for (; token < n; token++) quant_tile(format, w, piece, PIECES, x, token, 1, out);
  }
}

static void k_matmul_quant(const ds4_packed *w, uint32_t group, uint32_t groups, const ds4_quants *x, uint32_t n, float *out) {
  switch (w->format) {
#define CASE(format)                                                                                                                       \
  case format: quant_groups(format, w, group, groups, x, n, out); break;
    DS4_INT8_FORMATS(CASE)
#undef CASE
  }
}

/* ---- MXFP4: float activations -------------------------------------------------------------------------------------------------------------- */

/* ds4_e8m0_half of VB_ROWS bytes. */
INLINE vq q_e8m0(const uint8_t *p) {
  vi e = vi_bytes(p) & 255, small = e < 2;
  return (vq)((((e - 1) << 23) & ~small) | ((((e & 1) << 21) + 0x00200000) & small));
}

/* `g` pieces x `t` tokens: g * t independent chains over k. */
INLINE void fp4_tile(const ds4_packed *w, uint32_t piece, const int g, const float *x, uint64_t token, const int t, float *out) {
  const ds4_pack pack = ds4_pack_of(ds4_shape_of(DS4_MXFP4));
  _Static_assert(FP4_PIECES * FLOAT_TILE <= 8 && 4 * 2 <= 8, "acc has room for every g * t that fp4_groups asks for");
  vq acc[8] = {0}, scale[4], weight[4];
  vi v[4];
  uint64_t at = 0;
  for (uint32_t k = 0; k < w->cols; k += 32, at += pack.head + pack.body) {
    const uint8_t *p[4];
    UNROLL for (int q = 0; q < g; q++) {
      const uint8_t *head = w->data + ((piece + q) / PIECES - w->first) * w->group_bytes + at;
      scale[q] = q_e8m0(head + (piece + q) % PIECES * VB_ROWS);
      p[q] = head + pack.head + (piece + q) % PIECES * VB_BYTES;
    }
    UNROLL for (int j = 0; j < 8; j++) {
      UNROLL for (int q = 0; q < g; q++) v[q] = (vi)quant_step(DS4_MXFP4, p[q], j, 0);
      UNROLL for (int c = 0; c < 4; c++) {
        UNROLL for (int q = 0; q < g; q++) weight[q] = scale[q] * __builtin_convertvector(v[q] << (24 - 8 * c) >> 24, vq);
        UNROLL for (int i = 0; i < t; i++) {
          vq one = x[(token + i) * w->cols + k + 4 * j + c] - (vq){0}; /* + would lose a -0 */
          UNROLL for (int q = 0; q < g; q++) acc[q * t + i] = q_fma(weight[q], one, acc[q * t + i]);
        }
      }
    }
  }
  UNROLL for (int i = 0; i < g * t; i++) store_piece(w, piece + i / t, token + i % t, out, acc[i]);
}

static void fp4_groups(const ds4_packed *w, uint32_t group, uint32_t groups, const float *x, uint32_t n, float *out) {
  uint32_t first = group * PIECES, end = (group + groups) * PIECES, token = 0;
  for (; token + FLOAT_TILE <= n; token += FLOAT_TILE)
    for (uint32_t p = first; p < end; p += FP4_PIECES) fp4_tile(w, p, FP4_PIECES, x, token, FLOAT_TILE, out);
  for (; token + 2 <= n; token += 2) { /* a weight is turned into a float for both */
    uint32_t p = first;
    for (; p + 4 <= end; p += 4) fp4_tile(w, p, 4, x, token, 2, out);
    for (; p < end; p++) fp4_tile(w, p, 1, x, token, 2, out);
  }
  for (; token < n; token++) {
    uint32_t p = first;
    for (; p + 4 <= end; p += 4) fp4_tile(w, p, 4, x, token, 1, out);
    for (; p < end; p++) fp4_tile(w, p, 1, x, token, 1, out);
  }
}
