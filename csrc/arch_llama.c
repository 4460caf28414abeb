/* The Llama family: RMSNorm, grouped-query attention with RoPE, SwiGLU. One forward pass, as a list of ops.
 *
 * Test builds know two more settings, so that windows and strided streams are proven on a small model: with toy_window every odd layer
 * reads only so many rows; with toy_stride the keys of layer 0 are summed in groups of so many positions, and every layer 0 query attends over
 * the sums as well (keys = values), added to its attention output. */
#include <stdlib.h>

#include "decoder.h"

typedef struct layer {
  const float *attn_norm, *ffn_norm; /* [dim] */
  ds4_attention attn;
  ds4_ffn ffn;
} layer;

typedef struct llama {
  ds4_heads heads;
  uint32_t window, stride;
  const ds4_weight *embed, *head;
  const float *norm; /* [dim] */
  layer layers[];
} llama;

enum { SIDE = DS4_OWN, GROUP }; /* buffers of the toy streams */

static int setup_streams(ds4_engine *e, llama *m, ds4_error *err) {
  uint32_t windowed = m->window ? e->n_layers / 2 : 0;
  for (uint32_t i = 0; i < e->n_layers; i++) {
    m->layers[i].attn.stream = windowed ? i % 2 : 0;
    m->layers[i].attn.index = windowed ? i / 2 : i;
  }
  int status = ds4_decoder_stream(e, "kv", &m->heads, e->n_layers - windowed, 0, err);
  if (!status && windowed) status = ds4_decoder_stream(e, "window", &m->heads, windowed, m->window, err);
  if (status || !m->stride) return status;
  ds4_part part = {.heads = m->heads.n_kv, .width = m->heads.head_dim, .across = 1, .type = DS4_KV_F32};
  status = ds4_declare_stream(e, "input", 1, 1, 2 * m->stride, 1, &part, err);
  part.type = DS4_KV_ENGINE;
  ds4_declare_buffer(e, m->heads.n_heads * m->heads.head_dim);
  ds4_declare_buffer(e, m->heads.n_kv * m->heads.head_dim * m->stride);
  return status ? status : ds4_declare_stream(e, "group", 1, m->stride, 0, 1, &part, err);
}

static int setup_toys(ds4_engine *e, llama *m, ds4_error *err) {
  int status = DS4_OK;
#ifdef DS4_TEST
  double v;
  if (ds4_setting_number(e, "toy_window", &v)) status = ds4_setting_u32(e, "toy_window", 1, 1u << 20, &m->window, err);
  if (!status && ds4_setting_number(e, "toy_stride", &v)) status = ds4_setting_u32(e, "toy_stride", 2, 256, &m->stride, err);
#else
  (void)e, (void)m, (void)err;
#endif
  return status;
}

static int setup(ds4_engine *e, ds4_error *err) {
  int status = ds4_setting_u32(e, "n_layers", 1, 4096, &e->n_layers, err);
  if (status) return status;
  llama *m = e->model = calloc(1, sizeof *m + e->n_layers * sizeof *m->layers);
  if (!m) return ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for %u layers", e->n_layers);
  status = ds4_decoder_setup(e, &m->heads, err);
  if (!status) status = setup_toys(e, m, err);
  if (!status) status = setup_streams(e, m, err);
  if (status) return status;
  ds4_shape shapes[9] = {{"attn_norm", 1, m->heads.dim, true}, {"ffn_norm", 1, m->heads.dim, true}};
  ds4_decoder_shapes(&m->heads, shapes + 2, shapes + 6);
  return ds4_decoder_tensors(e, &m->heads, shapes, 9, err);
}

static int bind(ds4_engine *e, ds4_error *err) {
  (void)err;
  llama *m = e->model;
  m->embed = ds4_find_tensor(e, "embed")->weight;
  m->head = ds4_head_weight(e);
  m->norm = ds4_find_tensor(e, "norm")->values;
  for (uint32_t i = 0; i < e->n_layers; i++) {
    layer *l = &m->layers[i];
    l->attn_norm = ds4_layer_tensor(e, i, "attn_norm")->values;
    l->ffn_norm = ds4_layer_tensor(e, i, "ffn_norm")->values;
    ds4_decoder_bind(e, i, &l->attn, &l->ffn);
  }
  return DS4_OK;
}

/* The toy compressor: when a token completes a group, the sum of the group's keys becomes one row of stream "group". */
static int toy_group(ds4_run *r) {
  ds4_engine *e = r->engine;
  const llama *m = e->model;
  const ds4_heads *h = &m->heads;
  uint32_t n_seg = r->batch.n_segments, input = e->n_streams - 2, group = e->n_streams - 1, width = h->n_kv * h->head_dim;
  const ds4_view *inputs = r->views + input * n_seg, *groups = r->views + group * n_seg;
  ds4_decoder_rows(r, 0, 1);
  DS4_OP(e->ops->rows_write(e->backend, &e->stream[input].layout, 0, 0, inputs, &r->batch, e->row[DS4_ROW], e->buffer[DS4_K]));
  for (uint32_t t = 0; t < r->batch.n; t++) {
    uint32_t next = r->batch.pos[t] + 1, seg = r->batch.segment[t], row = next / m->stride - 1, zero = 0;
    if (next % m->stride) continue;
    float *sum = e->buffer[GROUP];
    DS4_OP(e->ops->rows_read(e->backend, &e->stream[input].layout, 0, 0, &inputs[seg], next - m->stride, m->stride, sum));
    for (uint32_t i = 1; i < m->stride; i++) DS4_OP(e->ops->add(e->backend, sum, sum + i * width, width));
    ds4_batch one = {.n = 1, .n_segments = 1, .pos = &r->batch.pos[t], .segment = &zero};
    DS4_OP(e->ops->rows_write(e->backend, &e->stream[group].layout, 0, 0, &groups[seg], &one, &row, sum));
  }
  DS4_OP(ds4_decoder_attend(r, h, group, 0, 0, e->buffer[SIDE]));
  DS4_OP(e->ops->add(e->backend, e->buffer[DS4_ATTN], e->buffer[SIDE], (uint64_t)r->batch.n * h->n_heads * h->head_dim));
  return DS4_OK;
}

static int forward(ds4_run *r) {
  ds4_engine *e = r->engine;
  const llama *m = e->model;
  const ds4_heads *h = &m->heads;
  const ds4_ops *ops = e->ops;
  float **b = e->buffer;
  uint32_t n = r->batch.n;
  uint64_t all = (uint64_t)n * h->dim;

  DS4_OP(ops->embed(e->backend, m->embed, r->batch.ids, n, b[DS4_X]));
  for (r->layer = 0; r->layer < e->n_layers; r->layer++) {
    const layer *l = &m->layers[r->layer];
    /* attention, added to the residual stream */
    DS4_OP(ops->rms_norm(e->backend, b[DS4_X], l->attn_norm, n, h->dim, h->eps, b[DS4_H]));
    DS4_OP(ds4_decoder_attention(r, h, &l->attn));
    if (m->stride && r->layer == 0) DS4_OP(toy_group(r));
    DS4_OP(ops->matmul(e->backend, &l->attn.o, &b[DS4_H], 1, b[DS4_ATTN], n));
    DS4_OP(ops->add(e->backend, b[DS4_X], b[DS4_H], all));
    /* feed-forward, likewise */
    DS4_OP(ops->rms_norm(e->backend, b[DS4_X], l->ffn_norm, n, h->dim, h->eps, b[DS4_H]));
    DS4_OP(ds4_decoder_ffn(r, &l->ffn, h->ffn, DS4_SILU, b[DS4_H], n, b[DS4_H]));
    DS4_OP(ops->add(e->backend, b[DS4_X], b[DS4_H], all));
  }
  return DS4_OK;
}

static int head(ds4_engine *e, const float *x, uint32_t n, float *scratch, float *logits) {
  const llama *m = e->model;
  return ds4_decoder_head(e, &m->heads, m->head, m->norm, x, n, scratch, logits);
}

const ds4_arch ds4_llama = {.name = "llama", .setup = setup, .bind = bind, .forward = forward, .head = head};
