/* The Llama family: RMSNorm, grouped-query attention with RoPE, SwiGLU. One forward pass, as a list of ops.
 *
 * Test builds know three more settings, so that windows and strided streams are proven before a model needs them: with toy_window every odd layer
 * reads only so many rows; with toy_stride the keys of layer 0 are summed in groups of so many positions, and every layer 0 query attends over the
 * sums as well (keys = values), added to its attention output. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

typedef struct layer {
  const float *attn_norm, *ffn_norm; /* [dim] */
  const ds4_weight *q, *k, *v, *o, *gate, *up, *down;
  uint32_t stream, index; /* which stream serves it, as which of its layers */
} layer;

typedef struct llama {
  uint32_t dim, n_heads, n_kv, head_dim, ffn, interleaved, window, stride;
  float eps, scale;
  const ds4_weight *embed, *head;
  const float *norm; /* [dim] */
  layer layers[];
} llama;

enum { X, H, Q, K, V, ATTN, GATE, UP, SIDE, GROUP }; /* buffers, [n][width] */
enum { LO, HI, ROW };                                /* row numbers, [n] */

static int setup_streams(ds4_engine *e, llama *m, ds4_error *err) {
  ds4_part parts[2] = {{.heads = m->n_kv, .width = m->head_dim, .across = 1, .type = DS4_KV_ENGINE},
                       {.heads = m->n_kv, .width = m->head_dim, .across = 0, .type = DS4_KV_ENGINE}};
  uint32_t windowed = m->window ? e->n_layers / 2 : 0;
  for (uint32_t i = 0; i < e->n_layers; i++) {
    m->layers[i].stream = windowed ? i % 2 : 0;
    m->layers[i].index = windowed ? i / 2 : i;
  }
  int status = ds4_declare_stream(e, "kv", e->n_layers - windowed, 1, 0, 2, parts, err);
  if (!status && windowed) status = ds4_declare_stream(e, "window", windowed, 1, m->window, 2, parts, err);
  if (status || !m->stride) return status;
  ds4_part input = parts[0];
  input.type = DS4_KV_F32;
  status = ds4_declare_stream(e, "input", 1, 1, 2 * m->stride, 1, &input, err);
  return status ? status : ds4_declare_stream(e, "group", 1, m->stride, 0, 1, parts, err);
}

static int setup_tensors(ds4_engine *e, const llama *m, ds4_error *err) {
  const struct {
    const char *name;
    uint32_t rows, cols;
    bool vector;
  } of_layer[] = {
      {"attn_norm", 1, m->dim, true},
      {"q", m->n_heads * m->head_dim, m->dim, false},
      {"k", m->n_kv * m->head_dim, m->dim, false},
      {"v", m->n_kv * m->head_dim, m->dim, false},
      {"o", m->dim, m->n_heads * m->head_dim, false},
      {"ffn_norm", 1, m->dim, true},
      {"gate", m->ffn, m->dim, false},
      {"up", m->ffn, m->dim, false},
      {"down", m->dim, m->ffn, false},
  };
  int status = ds4_declare_tensor(e, "embed", e->vocab, m->dim, false, false, err);
  if (!status) status = ds4_declare_tensor(e, "head", e->vocab, m->dim, false, true, err); /* absent: tied to the embedding */
  if (!status) status = ds4_declare_tensor(e, "norm", 1, m->dim, true, false, err);
  for (uint32_t i = 0; i < e->n_layers; i++)
    for (uint32_t k = 0; !status && k < sizeof of_layer / sizeof *of_layer; k++) {
      char name[64];
      snprintf(name, sizeof name, "layers.%u.%s", i, of_layer[k].name);
      status = ds4_declare_tensor(e, name, of_layer[k].rows, of_layer[k].cols, of_layer[k].vector, false, err);
    }
  return status;
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
  double eps, n_layers = 0;
  int status = ds4_setting_u32(e, "n_layers", 1, 4096, &e->n_layers, err);
  if (status) return status;
  llama *m = e->model = calloc(1, sizeof *m + e->n_layers * sizeof *m->layers);
  if (!m) return ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for %g layers", n_layers);
  const struct {
    const char *key;
    uint32_t min, max, *out;
  } settings[] = {
      {"vocab", 1, 1u << 24, &e->vocab}, {"ctx", 1, 1u << 28, &e->ctx},
      {"dim", 1, 1u << 20, &m->dim},     {"n_heads", 1, 4096, &m->n_heads},
      {"n_kv_heads", 1, 4096, &m->n_kv}, {"head_dim", 2, 1024, &m->head_dim},
      {"ffn_dim", 1, 1u << 22, &m->ffn}, {"rope_interleaved", 0, 1, &m->interleaved},
  };
  for (size_t i = 0; !status && i < sizeof settings / sizeof *settings; i++)
    status = ds4_setting_u32(e, settings[i].key, settings[i].min, settings[i].max, settings[i].out, err);
  if (status) return status;
  if (m->n_heads % m->n_kv || m->head_dim % 2)
    return ds4_fail(err, DS4_EUNSUPPORTED, m->n_heads, m->n_kv,
                    "%u query heads do not divide into %u key heads, or the head size %u is odd", m->n_heads, m->n_kv, m->head_dim);
  if (!ds4_setting_number(e, "norm_eps", &eps) || eps <= 0 || eps > 1)
    return ds4_fail(err, DS4_EINVAL, 0, 0, "setting 'norm_eps' is missing or not between 0 and 1");
  m->eps = (float)eps;
  m->scale = (float)(1.0 / sqrt((double)m->head_dim));
  e->width = m->dim;
  status = ds4_setting_freqs(e, m->head_dim / 2, err);
  if (!status) status = setup_toys(e, m, err);
  if (!status) status = setup_streams(e, m, err);
  if (!status) status = setup_tensors(e, m, err);
  uint32_t heads = m->n_heads * m->head_dim, kv = m->n_kv * m->head_dim;
  const uint32_t widths[] = {m->dim, m->dim, heads, kv, kv, heads, m->ffn, m->ffn, heads, kv * m->stride};
  for (uint32_t i = 0; i < (m->stride ? GROUP + 1 : SIDE); i++) ds4_declare_buffer(e, widths[i]);
  return status;
}

/* Tensors by name, once, when all are there. */
static int bind(ds4_engine *e, ds4_error *err) {
  (void)err;
  llama *m = e->model;
  m->embed = ds4_find_tensor(e, "embed")->weight;
  m->head = ds4_find_tensor(e, "head")->weight;
  m->norm = ds4_find_tensor(e, "norm")->values;
  if (!m->head) m->head = m->embed;
  for (uint32_t i = 0; i < e->n_layers; i++) {
    layer *l = &m->layers[i];
    const ds4_tensor *t = ds4_find_tensor(e, "norm") + 1 + i * 9; /* in the order of setup_tensors */
    l->attn_norm = t[0].values;
    l->q = t[1].weight, l->k = t[2].weight, l->v = t[3].weight, l->o = t[4].weight;
    l->ffn_norm = t[5].values;
    l->gate = t[6].weight, l->up = t[7].weight, l->down = t[8].weight;
  }
  return DS4_OK;
}

#define OP(call)                                                                                                                           \
  do {                                                                                                                                     \
    int op_status = ds4_op(r);                                                                                                             \
    if (!op_status) op_status = (call);                                                                                                    \
    if (op_status) return op_status;                                                                                                       \
  } while (0)

/* Rows [lo, hi) that each token reads in a stream, and the row that it writes. */
static void rows_of(ds4_run *r, uint32_t reach, uint32_t stride) {
  ds4_engine *e = r->engine;
  for (uint32_t t = 0; t < r->batch.n; t++) {
    uint32_t next = r->batch.pos[t] + 1;
    e->row[ROW][t] = r->batch.pos[t];
    e->row[HI][t] = next / stride;
    e->row[LO][t] = reach && next > reach ? next - reach : 0;
  }
}

static int attend(ds4_run *r, uint32_t stream, uint32_t index, uint32_t value_part, float *out) {
  ds4_engine *e = r->engine;
  const llama *m = e->model;
  rows_of(r, e->stream[stream].reach, e->stream[stream].stride);
  ds4_attend a = {.layout = &e->stream[stream].layout, .views = r->views + stream * r->batch.n_segments, .batch = &r->batch};
  a.lo = e->row[LO], a.hi = e->row[HI];
  a.layer = index, a.n_heads = m->n_heads, a.value_part = value_part, a.scale = m->scale;
  a.q = e->buffer[Q], a.out = out;
  OP(e->ops->attend(e->backend, &a));
  return DS4_OK;
}

/* The toy compressor: when a token completes a group, the sum of the group's keys becomes one row of stream "group". */
static int toy_group(ds4_run *r) {
  ds4_engine *e = r->engine;
  const llama *m = e->model;
  uint32_t n_seg = r->batch.n_segments, input = e->n_streams - 2, group = e->n_streams - 1, width = m->n_kv * m->head_dim;
  const ds4_view *inputs = r->views + input * n_seg, *groups = r->views + group * n_seg;
  rows_of(r, 0, 1);
  OP(e->ops->rows_write(e->backend, &e->stream[input].layout, 0, 0, inputs, &r->batch, e->row[ROW], e->buffer[K]));
  for (uint32_t t = 0; t < r->batch.n; t++) {
    uint32_t next = r->batch.pos[t] + 1, seg = r->batch.segment[t], row = next / m->stride - 1, zero = 0;
    if (next % m->stride) continue;
    float *sum = e->buffer[GROUP];
    OP(e->ops->rows_read(e->backend, &e->stream[input].layout, 0, 0, &inputs[seg], next - m->stride, m->stride, sum));
    for (uint32_t i = 1; i < m->stride; i++) OP(e->ops->add(e->backend, sum, sum + i * width, width));
    ds4_batch one = {.n = 1, .n_segments = 1, .pos = &r->batch.pos[t], .segment = &zero};
    OP(e->ops->rows_write(e->backend, &e->stream[group].layout, 0, 0, &groups[seg], &one, &row, sum));
  }
  OP(attend(r, group, 0, 0, e->buffer[SIDE]));
  OP(e->ops->add(e->backend, e->buffer[ATTN], e->buffer[SIDE], (uint64_t)r->batch.n * m->n_heads * m->head_dim));
  return DS4_OK;
}

static int attention(ds4_run *r, const layer *l) {
  ds4_engine *e = r->engine;
  const llama *m = e->model;
  const ds4_ops *ops = e->ops;
  float **b = e->buffer;
  uint32_t n = r->batch.n;
  const ds4_layout *layout = &e->stream[l->stream].layout;
  const ds4_view *views = r->views + l->stream * r->batch.n_segments;

  /* norm, projections, rotation */
  OP(ops->rms_norm(e->backend, b[X], l->attn_norm, n, m->dim, m->eps, b[H]));
  OP(ops->matmul(e->backend, (const ds4_weight *[]){l->q, l->k, l->v}, (float *[]){b[Q], b[K], b[V]}, 3, b[H], n));
  OP(ops->rope(e->backend, b[Q], r->batch.pos, n, m->n_heads, m->head_dim, e->rope, m->interleaved));
  OP(ops->rope(e->backend, b[K], r->batch.pos, n, m->n_kv, m->head_dim, e->rope, m->interleaved));

  /* rows first, then every token reads them as they were rounded */
  rows_of(r, 0, 1);
  OP(ops->rows_write(e->backend, layout, l->index, 0, views, &r->batch, e->row[ROW], b[K]));
  OP(ops->rows_write(e->backend, layout, l->index, 1, views, &r->batch, e->row[ROW], b[V]));
  OP(attend(r, l->stream, l->index, 1, b[ATTN]));
  if (m->stride && l == m->layers) OP(toy_group(r));

  OP(ops->matmul(e->backend, &l->o, &b[H], 1, b[ATTN], n));
  OP(ops->add(e->backend, b[X], b[H], (uint64_t)n * m->dim));
  return DS4_OK;
}

static int feed_forward(ds4_run *r, const layer *l) {
  ds4_engine *e = r->engine;
  const llama *m = e->model;
  const ds4_ops *ops = e->ops;
  float **b = e->buffer;
  uint32_t n = r->batch.n;
  OP(ops->rms_norm(e->backend, b[X], l->ffn_norm, n, m->dim, m->eps, b[H]));
  OP(ops->matmul(e->backend, (const ds4_weight *[]){l->gate, l->up}, (float *[]){b[GATE], b[UP]}, 2, b[H], n));
  OP(ops->swiglu(e->backend, b[GATE], b[UP], (uint64_t)n * m->ffn, b[GATE]));
  OP(ops->matmul(e->backend, &l->down, &b[H], 1, b[GATE], n));
  OP(ops->add(e->backend, b[X], b[H], (uint64_t)n * m->dim));
  return DS4_OK;
}

static int forward(ds4_run *r) {
  ds4_engine *e = r->engine;
  const llama *m = e->model;
  OP(e->ops->embed(e->backend, m->embed, r->batch.ids, r->batch.n, e->buffer[X]));
  for (r->layer = 0; r->layer < e->n_layers; r->layer++) {
    OP(attention(r, &m->layers[r->layer]));
    OP(feed_forward(r, &m->layers[r->layer]));
  }
  return DS4_OK;
}

static int head(ds4_engine *e, const float *x, uint32_t n, float *scratch, float *logits) {
  const llama *m = e->model;
  int status = e->ops->rms_norm(e->backend, x, m->norm, n, m->dim, m->eps, scratch);
  return status ? status : e->ops->matmul(e->backend, &m->head, &logits, 1, scratch, n);
}

const ds4_arch ds4_llama = {.name = "llama", .setup = setup, .bind = bind, .forward = forward, .head = head};
