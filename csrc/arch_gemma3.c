/* Gemma 3 text models: local layers with a window and RoPE of their own between full ones, four norms a layer, norms of the query and key
 * heads, GELU, scaled embeddings. Norm weights come as factors (1 + w). */
#include <stdlib.h>

#include "decoder.h"

typedef struct layer {
  const float *attn_norm, *attn_post, *ffn_norm, *ffn_post; /* [dim] */
  ds4_attention attn;
  ds4_ffn ffn;
} layer;

typedef struct gemma3 {
  ds4_heads heads;
  uint32_t window;
  float embed_scale;
  const ds4_weight *embed, *head;
  const float *norm; /* [dim] */
  layer layers[];
} gemma3;

enum { GLOBAL, LOCAL }; /* RoPE tables */

/* Full layers share one stream, local ones another; a model may have only one kind. */
static int setup_streams(ds4_engine *e, gemma3 *m, ds4_error *err) {
  uint64_t n;
  const double *global = ds4_setting_array(e, "global_layers", &n);
  if (!global || n != e->n_layers)
    return ds4_fail(err, DS4_EINVAL, (int64_t)(global ? n : 0), e->n_layers,
                    "setting 'global_layers' must have one number for each of the %u layers", e->n_layers);
  uint32_t count[2] = {0, 0}, stream[2];
  for (uint32_t i = 0; i < e->n_layers; i++) {
    if (global[i] != 0 && global[i] != 1)
      return ds4_fail(err, DS4_EINVAL, i, 0, "setting 'global_layers' is %g for layer %u; 0 and 1 are possible", global[i], i);
    m->layers[i].attn.rope = global[i] == 1 ? GLOBAL : LOCAL;
    m->layers[i].attn.index = count[m->layers[i].attn.rope]++;
  }
  stream[GLOBAL] = 0;
  stream[LOCAL] = count[GLOBAL] ? 1 : 0;
  for (uint32_t i = 0; i < e->n_layers; i++) m->layers[i].attn.stream = stream[m->layers[i].attn.rope];
  int status = count[GLOBAL] ? ds4_decoder_stream(e, "kv", &m->heads, count[GLOBAL], 0, err) : DS4_OK;
  if (status || !count[LOCAL]) return status;
  return ds4_decoder_stream(e, "window", &m->heads, count[LOCAL], m->window, err);
}

static int setup(ds4_engine *e, ds4_error *err) {
  double attn_scale, embed_scale;
  int status = ds4_setting_u32(e, "n_layers", 1, 4096, &e->n_layers, err);
  if (status) return status;
  gemma3 *m = e->model = calloc(1, sizeof *m + e->n_layers * sizeof *m->layers);
  if (!m) return ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for %u layers", e->n_layers);
  status = ds4_decoder_setup(e, &m->heads, err);
  if (!status) status = ds4_setting_freqs(e, LOCAL, "local_rope", m->heads.head_dim / 2, err);
  if (!status) status = ds4_setting_u32(e, "window", 1, 1u << 28, &m->window, err);
  if (status) return status;
  if (!ds4_setting_number(e, "attn_scale", &attn_scale) || !ds4_setting_number(e, "embed_scale", &embed_scale))
    return ds4_fail(err, DS4_EINVAL, 0, 0, "setting 'attn_scale' or 'embed_scale' is missing");
  m->heads.scale = (float)attn_scale;
  m->embed_scale = (float)embed_scale;
  if ((status = setup_streams(e, m, err))) return status;
  const ds4_heads *h = &m->heads;
  ds4_shape shapes[13] = {{"attn_norm", 1, h->dim, true},     {"attn_post_norm", 1, h->dim, true}, {"ffn_norm", 1, h->dim, true},
                          {"ffn_post_norm", 1, h->dim, true}, {"q_norm", 1, h->head_dim, true},    {"k_norm", 1, h->head_dim, true}};
  ds4_decoder_shapes(h, shapes + 6, shapes + 10);
  return ds4_decoder_tensors(e, h, shapes, 13, err);
}

static int bind(ds4_engine *e, ds4_error *err) {
  (void)err;
  gemma3 *m = e->model;
  m->embed = ds4_find_tensor(e, "embed")->weight;
  m->head = ds4_head_weight(e);
  m->norm = ds4_find_tensor(e, "norm")->values;
  for (uint32_t i = 0; i < e->n_layers; i++) {
    layer *l = &m->layers[i];
    l->attn_norm = ds4_layer_tensor(e, i, "attn_norm")->values;
    l->attn_post = ds4_layer_tensor(e, i, "attn_post_norm")->values;
    l->ffn_norm = ds4_layer_tensor(e, i, "ffn_norm")->values;
    l->ffn_post = ds4_layer_tensor(e, i, "ffn_post_norm")->values;
    l->attn.q_norm = ds4_layer_tensor(e, i, "q_norm")->values;
    l->attn.k_norm = ds4_layer_tensor(e, i, "k_norm")->values;
    ds4_decoder_bind(e, i, &l->attn, &l->ffn);
  }
  return DS4_OK;
}

static int forward(ds4_run *r) {
  ds4_engine *e = r->engine;
  const gemma3 *m = e->model;
  const ds4_heads *h = &m->heads;
  const ds4_ops *ops = e->ops;
  float **b = e->buffer;
  uint32_t n = r->batch.n;
  uint64_t all = (uint64_t)n * h->dim;

  DS4_OP(ops->embed(e->backend, m->embed, r->batch.ids, n, b[DS4_X]));
  DS4_OP(ops->scale(e->backend, b[DS4_X], m->embed_scale, all));
  for (r->layer = 0; r->layer < e->n_layers; r->layer++) {
    const layer *l = &m->layers[r->layer];
    /* attention between two norms, then added */
    DS4_OP(ops->rms_norm(e->backend, b[DS4_X], l->attn_norm, n, h->dim, h->eps, b[DS4_H]));
    DS4_OP(ds4_decoder_attention(r, h, &l->attn));
    DS4_OP(ops->matmul(e->backend, &l->attn.o, &b[DS4_H], 1, b[DS4_ATTN], n));
    DS4_OP(ops->rms_norm(e->backend, b[DS4_H], l->attn_post, n, h->dim, h->eps, b[DS4_H]));
    DS4_OP(ops->add(e->backend, b[DS4_X], b[DS4_H], all));
    /* feed-forward, likewise */
    DS4_OP(ops->rms_norm(e->backend, b[DS4_X], l->ffn_norm, n, h->dim, h->eps, b[DS4_H]));
    DS4_OP(ds4_decoder_ffn(r, &l->ffn, h->ffn, DS4_GELU, b[DS4_H], n, b[DS4_H]));
    DS4_OP(ops->rms_norm(e->backend, b[DS4_H], l->ffn_post, n, h->dim, h->eps, b[DS4_H]));
    DS4_OP(ops->add(e->backend, b[DS4_X], b[DS4_H], all));
  }
  return DS4_OK;
}

static int head(ds4_engine *e, const float *x, uint32_t n, float *scratch, float *logits) {
  const gemma3 *m = e->model;
  return ds4_decoder_head(e, &m->heads, m->head, m->norm, x, n, scratch, logits);
}

const ds4_arch ds4_gemma3 = {.name = "gemma3", .setup = setup, .bind = bind, .forward = forward, .head = head};
