#include "decoder.h"

#include <math.h>
#include <stdio.h>

int ds4_decoder_setup(ds4_engine *e, ds4_heads *h, ds4_error *err) {
  double eps;
  const struct {
    const char *key;
    uint32_t min, max, *out;
  } settings[] = {
      {"vocab", 1, 1u << 24, &e->vocab}, {"ctx", 1, 1u << 28, &e->ctx},
      {"dim", 1, 1u << 20, &h->dim},     {"n_heads", 1, 4096, &h->n_heads},
      {"n_kv_heads", 1, 4096, &h->n_kv}, {"head_dim", 2, 1024, &h->head_dim},
      {"ffn_dim", 1, 1u << 22, &h->ffn}, {"rope_interleaved", 0, 1, &h->interleaved},
  };
  int status = DS4_OK;
  for (size_t i = 0; !status && i < sizeof settings / sizeof *settings; i++)
    status = ds4_setting_u32(e, settings[i].key, settings[i].min, settings[i].max, settings[i].out, err);
  if (status) return status;
  if (h->n_heads % h->n_kv || h->head_dim % 2)
    return ds4_fail(err, DS4_EUNSUPPORTED, h->n_heads, h->n_kv,
                    "%u query heads do not divide into %u key heads, or the head size %u is odd", h->n_heads, h->n_kv, h->head_dim);
  if (!ds4_setting_number(e, "norm_eps", &eps) || eps <= 0 || eps > 1)
    return ds4_fail(err, DS4_EINVAL, 0, 0, "setting 'norm_eps' is missing or not between 0 and 1");
  h->eps = (float)eps;
  h->scale = (float)(1.0 / sqrt((double)h->head_dim));
  e->width = h->dim;
  const uint32_t heads = h->n_heads * h->head_dim, kv = h->n_kv * h->head_dim;
  const uint32_t widths[DS4_OWN] = {h->dim, h->dim, heads, kv, kv, heads, h->ffn, h->ffn};
  for (uint32_t i = 0; i < DS4_OWN; i++) ds4_declare_buffer(e, widths[i]);
  return ds4_setting_freqs(e, 0, "rope", h->head_dim / 2, err);
}

void ds4_decoder_shapes(const ds4_heads *h, ds4_shape attention[4], ds4_shape ffn[3]) {
  uint32_t heads = h->n_heads * h->head_dim, kv = h->n_kv * h->head_dim;
  attention[0] = (ds4_shape){"q", heads, h->dim, false};
  attention[1] = (ds4_shape){"k", kv, h->dim, false};
  attention[2] = (ds4_shape){"v", kv, h->dim, false};
  attention[3] = (ds4_shape){"o", h->dim, heads, false};
  ffn[0] = (ds4_shape){"gate", h->ffn, h->dim, false};
  ffn[1] = (ds4_shape){"up", h->ffn, h->dim, false};
  ffn[2] = (ds4_shape){"down", h->dim, h->ffn, false};
}

int ds4_decoder_tensors(ds4_engine *e, const ds4_heads *h, const ds4_shape *shapes, size_t n, ds4_error *err) {
  int status = ds4_declare_tensor(e, "embed", e->vocab, h->dim, false, false, err);
  if (!status) status = ds4_declare_tensor(e, "head", e->vocab, h->dim, false, true, err);
  if (!status) status = ds4_declare_tensor(e, "norm", 1, h->dim, true, false, err);
  for (uint32_t i = 0; i < e->n_layers; i++)
    for (size_t k = 0; !status && k < n; k++) {
      char name[sizeof((ds4_tensor *)0)->name];
      snprintf(name, sizeof name, "layers.%u.%s", i, shapes[k].name);
      status = ds4_declare_tensor(e, name, shapes[k].rows, shapes[k].cols, shapes[k].vector, false, err);
    }
  return status;
}

int ds4_decoder_stream(ds4_engine *e, const char *name, const ds4_heads *h, uint32_t n_layers, uint32_t reach, ds4_error *err) {
  const ds4_part parts[2] = {{.heads = h->n_kv, .width = h->head_dim, .across = 1, .type = DS4_KV_ENGINE},
                             {.heads = h->n_kv, .width = h->head_dim, .across = 0, .type = DS4_KV_ENGINE}};
  return ds4_declare_stream(e, name, n_layers, 1, reach, 2, parts, err);
}

const ds4_tensor *ds4_layer_tensor(ds4_engine *e, uint32_t layer, const char *name) {
  char full[sizeof((ds4_tensor *)0)->name];
  snprintf(full, sizeof full, "layers.%u.%s", layer, name);
  return ds4_find_tensor(e, full); /* declared in setup, given before bind */
}

void ds4_decoder_bind(ds4_engine *e, uint32_t layer, ds4_attention *a, ds4_ffn *f) {
  a->q = ds4_layer_tensor(e, layer, "q")->weight;
  a->k = ds4_layer_tensor(e, layer, "k")->weight;
  a->v = ds4_layer_tensor(e, layer, "v")->weight;
  a->o = ds4_layer_tensor(e, layer, "o")->weight;
  if (!f) return;
  f->gate = ds4_layer_tensor(e, layer, "gate")->weight;
  f->up = ds4_layer_tensor(e, layer, "up")->weight;
  f->down = ds4_layer_tensor(e, layer, "down")->weight;
}

const ds4_weight *ds4_head_weight(ds4_engine *e) {
  const ds4_tensor *head = ds4_find_tensor(e, "head");
  return head->weight ? head->weight : ds4_find_tensor(e, "embed")->weight;
}

void ds4_decoder_rows(ds4_run *r, uint32_t reach, uint32_t stride) {
  ds4_engine *e = r->engine;
  for (uint32_t t = 0; t < r->batch.n; t++) {
    uint32_t next = r->batch.pos[t] + 1;
    e->row[DS4_ROW][t] = r->batch.pos[t];
    e->row[DS4_HI][t] = next / stride;
    e->row[DS4_LO][t] = reach && next > reach ? next - reach : 0;
  }
}

int ds4_decoder_attend(ds4_run *r, const ds4_heads *h, uint32_t stream, uint32_t index, uint32_t value_part, float *out) {
  ds4_engine *e = r->engine;
  ds4_decoder_rows(r, e->stream[stream].reach, e->stream[stream].stride);
  ds4_attend a = {.layout = &e->stream[stream].layout, .views = r->views + stream * r->batch.n_segments, .batch = &r->batch};
  a.lo = e->row[DS4_LO], a.hi = e->row[DS4_HI];
  a.layer = index, a.n_heads = h->n_heads, a.value_part = value_part, a.scale = h->scale;
  a.q = e->buffer[DS4_Q], a.out = out;
  DS4_OP(e->ops->attend(e->backend, &a));
  return DS4_OK;
}

int ds4_decoder_attention(ds4_run *r, const ds4_heads *h, const ds4_attention *a) {
  ds4_engine *e = r->engine;
  const ds4_ops *ops = e->ops;
  float **b = e->buffer;
  const float *rope = e->rope[a->rope].table;
  const ds4_layout *layout = &e->stream[a->stream].layout;
  const ds4_view *views = r->views + a->stream * r->batch.n_segments;
  uint32_t n = r->batch.n;

  /* projections, norms of the heads, rotation */
  DS4_OP(ops->matmul(e->backend, (const ds4_weight *[]){a->q, a->k, a->v}, (float *[]){b[DS4_Q], b[DS4_K], b[DS4_V]}, 3, b[DS4_H], n));
  if (a->q_norm) DS4_OP(ops->rms_norm(e->backend, b[DS4_Q], a->q_norm, n * h->n_heads, h->head_dim, h->eps, b[DS4_Q]));
  if (a->k_norm) DS4_OP(ops->rms_norm(e->backend, b[DS4_K], a->k_norm, n * h->n_kv, h->head_dim, h->eps, b[DS4_K]));
  DS4_OP(ops->rope(e->backend, b[DS4_Q], r->batch.pos, n, h->n_heads, h->head_dim, rope, h->interleaved));
  DS4_OP(ops->rope(e->backend, b[DS4_K], r->batch.pos, n, h->n_kv, h->head_dim, rope, h->interleaved));

  /* rows first, then every token reads them as they were rounded */
  ds4_decoder_rows(r, 0, 1);
  DS4_OP(ops->rows_write(e->backend, layout, a->index, 0, views, &r->batch, e->row[DS4_ROW], b[DS4_K]));
  DS4_OP(ops->rows_write(e->backend, layout, a->index, 1, views, &r->batch, e->row[DS4_ROW], b[DS4_V]));
  return ds4_decoder_attend(r, h, a->stream, a->index, 1, b[DS4_ATTN]);
}

int ds4_decoder_ffn(ds4_run *r, const ds4_ffn *f, uint32_t width, int glu, const float *x, uint32_t n, float *out) {
  ds4_engine *e = r->engine;
  float *gate = e->buffer[DS4_GATE], *up = e->buffer[DS4_UP];
  DS4_OP(e->ops->matmul(e->backend, (const ds4_weight *[]){f->gate, f->up}, (float *[]){gate, up}, 2, x, n));
  DS4_OP(e->ops->glu(e->backend, glu, f->limit, gate, up, (uint64_t)n * width, gate));
  DS4_OP(e->ops->matmul(e->backend, &f->down, &out, 1, gate, n));
  return DS4_OK;
}

static float biased(const float *score, const float *bias, uint32_t i) { return bias ? score[i] + bias[i] : score[i]; }

void ds4_decoder_pick(const float *score, const float *bias, uint32_t count, uint32_t used, uint32_t *pick) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < count; i++) {
    uint32_t at = n < used ? n++ : used; /* insertion by falling score */
    for (; at && biased(score, bias, i) > biased(score, bias, pick[at - 1]); at--)
      if (at < used) pick[at] = pick[at - 1];
    if (at < used) pick[at] = i;
  }
  ds4_sort_ascending(pick, n);
}

void ds4_sort_ascending(uint32_t *values, uint32_t n) {
  for (uint32_t i = 1; i < n; i++)
    for (uint32_t k = i; k && values[k - 1] > values[k]; k--) {
      uint32_t swap = values[k];
      values[k] = values[k - 1];
      values[k - 1] = swap;
    }
}

int ds4_decoder_experts(ds4_run *r, const ds4_experts *x, const float *in, float *sum) {
  ds4_engine *e = r->engine;
  uint32_t n = r->batch.n;
  DS4_OP(e->ops->clear(e->backend, sum, (uint64_t)n * x->dim));
  for (uint32_t k = 0; k < x->count; k++) {
    uint32_t chosen = 0;
    for (uint32_t i = 0; i < n * x->used; i++)
      if (x->pick[i] == k) {
        x->token[chosen] = i / x->used;
        x->part[chosen++] = x->weight[i];
      }
    if (!chosen) continue;
    DS4_OP(e->ops->gather(e->backend, in, x->token, chosen, x->dim, x->gathered));
    DS4_OP(ds4_decoder_ffn(r, &x->ffn[k], x->width, x->glu, x->gathered, chosen, x->result));
    DS4_OP(e->ops->scatter_add(e->backend, x->result, x->token, x->part, chosen, x->dim, sum));
  }
  return DS4_OK;
}

int ds4_decoder_head(ds4_engine *e, const ds4_heads *h, const ds4_weight *head, const float *norm, const float *x, uint32_t n,
                     float *scratch, float *logits) {
  int status = e->ops->rms_norm(e->backend, x, norm, n, h->dim, h->eps, scratch);
  return status ? status : e->ops->matmul(e->backend, &head, &logits, 1, scratch, n);
}
