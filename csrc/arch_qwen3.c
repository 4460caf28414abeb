/* Qwen3 and Qwen3-MoE: Llama with norms of the query and key heads; in the MoE models a router sends every token to some experts. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "decoder.h"
#include "numeric.h"

typedef struct layer {
  const float *attn_norm, *ffn_norm; /* [dim] */
  ds4_attention attn;
  ds4_ffn ffn;
  const ds4_weight *router; /* [n_experts, dim] */
  ds4_ffn *experts;
} layer;

typedef struct qwen3 {
  ds4_heads heads;
  uint32_t n_experts, n_used, expert_ffn, norm_topk; /* n_experts 0: dense */
  const ds4_weight *embed, *head;
  const float *norm; /* [dim] */
  layer layers[];    /* and behind them the experts of all layers */
} qwen3;

enum { ROUTER = DS4_OWN, GATHERED, RESULT, SUM }; /* buffers: [n][n_experts], [n][dim] three times */

static int setup_experts(ds4_engine *e, qwen3 *m, ds4_error *err) {
  int status = ds4_setting_u32(e, "n_experts_used", 1, m->n_experts, &m->n_used, err);
  if (!status) status = ds4_setting_u32(e, "expert_ffn_dim", 1, 1u << 22, &m->expert_ffn, err);
  if (!status) status = ds4_setting_u32(e, "norm_topk", 0, 1, &m->norm_topk, err);
  if (status) return status;
  m->heads.ffn = m->expert_ffn; /* gate and up hold one expert's tokens at a time */
  e->buffer_width[DS4_GATE] = e->buffer_width[DS4_UP] = m->expert_ffn;
  ds4_declare_buffer(e, m->n_experts);
  for (int i = 0; i < 3; i++) ds4_declare_buffer(e, m->heads.dim);
  e->scratch_width = 2 * m->n_used + 2; /* picks and their weights, and the tokens of one expert with theirs */
  return DS4_OK;
}

static int expert_tensors(ds4_engine *e, const qwen3 *m, ds4_error *err) {
  static const char *const names[] = {"gate", "up", "down"};
  int status = DS4_OK;
  for (uint32_t i = 0; i < e->n_layers; i++)
    for (uint32_t k = 0; k < m->n_experts; k++)
      for (int part = 0; !status && part < 3; part++) {
        uint32_t rows = part < 2 ? m->expert_ffn : m->heads.dim, cols = part < 2 ? m->heads.dim : m->expert_ffn;
        status = ds4_declare_expert(e, i, k, names[part], rows, cols, err);
      }
  return status;
}

static int setup(ds4_engine *e, ds4_error *err) {
  double experts = 0;
  int status = ds4_setting_u32(e, "n_layers", 1, 4096, &e->n_layers, err);
  uint32_t n_experts = 0;
  if (!status && ds4_setting_number(e, "n_experts", &experts)) status = ds4_setting_u32(e, "n_experts", 1, 4096, &n_experts, err);
  if (status) return status;
  qwen3 *m = e->model = calloc(1, sizeof *m + e->n_layers * (sizeof *m->layers + (uint64_t)n_experts * sizeof(ds4_ffn)));
  if (!m) return ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for %u layers", e->n_layers);
  m->n_experts = n_experts;
  ds4_ffn *room = (ds4_ffn *)(void *)(m->layers + e->n_layers);
  for (uint32_t i = 0; i < e->n_layers; i++) m->layers[i].experts = room + (uint64_t)i * n_experts;
  status = ds4_decoder_setup(e, &m->heads, err);
  if (!status && n_experts) status = setup_experts(e, m, err);
  if (!status) status = ds4_decoder_stream(e, "kv", &m->heads, e->n_layers, 0, err);
  if (status) return status;
  const ds4_heads *h = &m->heads;
  ds4_shape shapes[11] = {
      {"attn_norm", 1, h->dim, true}, {"ffn_norm", 1, h->dim, true}, {"q_norm", 1, h->head_dim, true}, {"k_norm", 1, h->head_dim, true}};
  ds4_decoder_shapes(h, shapes + 4, shapes + 8);
  if (n_experts) shapes[8] = (ds4_shape){"router", n_experts, h->dim, false};
  status = ds4_decoder_tensors(e, h, shapes, n_experts ? 9 : 11, err);
  return status ? status : expert_tensors(e, m, err);
}

static int bind(ds4_engine *e, ds4_error *err) {
  (void)err;
  qwen3 *m = e->model;
  m->embed = ds4_find_tensor(e, "embed")->weight;
  m->head = ds4_head_weight(e);
  m->norm = ds4_find_tensor(e, "norm")->values;
  for (uint32_t i = 0; i < e->n_layers; i++) {
    layer *l = &m->layers[i];
    l->attn_norm = ds4_layer_tensor(e, i, "attn_norm")->values;
    l->ffn_norm = ds4_layer_tensor(e, i, "ffn_norm")->values;
    l->attn.index = i;
    l->attn.q_norm = ds4_layer_tensor(e, i, "q_norm")->values;
    l->attn.k_norm = ds4_layer_tensor(e, i, "k_norm")->values;
    ds4_decoder_bind(e, i, &l->attn, m->n_experts ? NULL : &l->ffn);
    if (m->n_experts) l->router = ds4_layer_tensor(e, i, "router")->weight;
  }
  for (uint32_t i = 0; i < e->n_layers; i++)
    for (uint32_t k = 0; k < m->n_experts; k++) {
      ds4_ffn *f = &m->layers[i].experts[k];
      f->gate = ds4_find_expert(e, i, k, "gate")->weight;
      f->up = ds4_find_expert(e, i, k, "up")->weight;
      f->down = ds4_find_expert(e, i, k, "down")->weight;
    }
  return DS4_OK;
}

/* The n_used largest scores of one token, ties to the lowest index, in ascending index; and their softmax weights, over the picks
 * (norm_topk) or over all experts. A score that is no number makes the weights NaN. */
static void route(const qwen3 *m, const float *score, uint32_t *pick, float *weight) {
  uint32_t n = m->n_used;
  float top = score[0], lane[16] = {0};
  for (uint32_t i = 0; i < m->n_experts; i++) top = score[i] > top ? score[i] : top;
  ds4_decoder_pick(score, NULL, m->n_experts, n, pick);
  for (uint32_t i = 0; i < n; i++) weight[i] = ds4_exp(score[pick[i]] - top);
  for (uint32_t i = 0; i < (m->norm_topk ? n : m->n_experts); i++) lane[i % 16] += m->norm_topk ? weight[i] : ds4_exp(score[i] - top);
  float sum = ds4_lane_sum(lane);
  for (uint32_t i = 0; i < n; i++) weight[i] /= sum;
}

/* H -> H. */
static int experts(ds4_run *r, const qwen3 *m, const layer *l) {
  ds4_engine *e = r->engine;
  const ds4_ops *ops = e->ops;
  float **b = e->buffer;
  uint32_t n = r->batch.n, dim = m->heads.dim;
  uint32_t *pick = e->scratch, *token = pick + (uint64_t)n * m->n_used; /* [n][n_used]; tokens of one expert */
  float *weight = (float *)(void *)(token + n), *part = weight + (uint64_t)n * m->n_used;

  DS4_OP(ops->matmul(e->backend, &l->router, &b[ROUTER], 1, b[DS4_H], n));
  DS4_OP(ops->wait(e->backend)); /* the choice is made on the host */
  for (uint32_t t = 0; t < n; t++)
    route(m, b[ROUTER] + (uint64_t)t * m->n_experts, pick + (uint64_t)t * m->n_used, weight + (uint64_t)t * m->n_used);
  const ds4_experts x = {.ffn = l->experts,
                         .count = m->n_experts,
                         .used = m->n_used,
                         .width = m->expert_ffn,
                         .dim = dim,
                         .glu = DS4_SILU,
                         .pick = pick,
                         .weight = weight,
                         .token = token,
                         .part = part,
                         .gathered = b[GATHERED],
                         .result = b[RESULT]};
  DS4_OP(ds4_decoder_experts(r, &x, b[DS4_H], b[SUM]));
  DS4_OP(ops->copy(e->backend, b[DS4_H], b[SUM], (uint64_t)n * dim * sizeof(float)));
  return DS4_OK;
}

static int forward(ds4_run *r) {
  ds4_engine *e = r->engine;
  const qwen3 *m = e->model;
  const ds4_heads *h = &m->heads;
  const ds4_ops *ops = e->ops;
  float **b = e->buffer;
  uint32_t n = r->batch.n;
  uint64_t all = (uint64_t)n * h->dim;

  DS4_OP(ops->embed(e->backend, m->embed, r->batch.ids, n, b[DS4_X]));
  for (r->layer = 0; r->layer < e->n_layers; r->layer++) {
    const layer *l = &m->layers[r->layer];
    DS4_OP(ops->rms_norm(e->backend, b[DS4_X], l->attn_norm, n, h->dim, h->eps, b[DS4_H]));
    DS4_OP(ds4_decoder_attention(r, h, &l->attn));
    DS4_OP(ops->matmul(e->backend, &l->attn.o, &b[DS4_H], 1, b[DS4_ATTN], n));
    DS4_OP(ops->add(e->backend, b[DS4_X], b[DS4_H], all));
    DS4_OP(ops->rms_norm(e->backend, b[DS4_X], l->ffn_norm, n, h->dim, h->eps, b[DS4_H]));
    DS4_OP(m->n_experts ? experts(r, m, l) : ds4_decoder_ffn(r, &l->ffn, h->ffn, DS4_SILU, b[DS4_H], n, b[DS4_H]));
    DS4_OP(ops->add(e->backend, b[DS4_X], b[DS4_H], all));
  }
  return DS4_OK;
}

static int head(ds4_engine *e, const float *x, uint32_t n, float *scratch, float *logits) {
  const qwen3 *m = e->model;
  return ds4_decoder_head(e, &m->heads, m->head, m->norm, x, n, scratch, logits);
}

const ds4_arch ds4_qwen3 = {.name = "qwen3", .setup = setup, .bind = bind, .forward = forward, .head = head};
