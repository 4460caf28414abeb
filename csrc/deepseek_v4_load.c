/* DeepSeek V4: settings, streams, tensors. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deepseek_v4.h"

/* ---- settings ------------------------------------------------------------------------------------------------------------------------- */

static int read_counts(ds4_engine *e, v4 *m, ds4_error *err) {
  const struct {
    const char *key;
    uint32_t min, max, *out;
  } settings[] = {
      {"vocab", 1, 1u << 24, &e->vocab},
      {"ctx", 1, 1u << 28, &e->ctx},
      {"dim", 1, 1u << 20, &m->dim},
      {"n_heads", 1, 4096, &m->n_heads},
      {"head_dim", 2, 4096, &m->head_dim},
      {"rope_dim", 2, 4096, &m->rope_dim},
      {"q_rank", 1, 1u << 20, &m->q_rank},
      {"o_groups", 1, 4096, &m->o_groups},
      {"o_rank", 1, 1u << 20, &m->o_rank},
      {"window", 1, 1u << 20, &m->window},
      {"index_heads", 1, 4096, &m->index_heads},
      {"index_dim", 2, 4096, &m->index_dim},
      {"index_keep", 1, 1u << 16, &m->keep},
      {"n_experts", 1, 4096, &m->n_experts},
      {"expert_ffn_dim", 1, 1u << 22, &m->ffn},
      {"n_hash_layers", 0, 4096, &m->n_hash},
      {"streams", 2, 16, &m->streams},
      {"mix_iterations", 1, 1000, &m->iterations},
      {"rounding", 0, 1, &m->rounding},
      {"mtp", 0, 1, &m->mtp},
  };
  int status = DS4_OK;
  for (size_t i = 0; !status && i < sizeof settings / sizeof *settings; i++)
    status = ds4_setting_u32(e, settings[i].key, settings[i].min, settings[i].max, settings[i].out, err);
  return status ? status : ds4_setting_u32(e, "n_experts_used", 1, m->n_experts, &m->n_used, err);
}

static int read_numbers(ds4_engine *e, v4 *m, ds4_error *err) {
  const struct {
    const char *key;
    float *out;
  } settings[] = {{"norm_eps", &m->eps}, {"mix_eps", &m->mix_eps}, {"route_scale", &m->route_scale}, {"swiglu_limit", &m->limit}};
  for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
    double v;
    if (!ds4_setting_number(e, settings[i].key, &v) || v <= 0 || v > 1e6)
      return ds4_fail(err, DS4_EINVAL, 0, 0, "setting '%s' is missing or not above 0", settings[i].key);
    *settings[i].out = (float)v;
  }
  return DS4_OK;
}

static int check_sizes(const ds4_engine *e, const v4 *m, ds4_error *err) {
  if (m->rope_dim % 2 || m->rope_dim > m->head_dim || m->rope_dim > m->index_dim)
    return ds4_fail(err, DS4_EUNSUPPORTED, m->rope_dim, m->head_dim, "rope_dim %u is odd or larger than head_dim %u or index_dim %u",
                    m->rope_dim, m->head_dim, m->index_dim);
  if (m->index_dim & (m->index_dim - 1))
    return ds4_fail(err, DS4_EUNSUPPORTED, m->index_dim, 0, "index_dim %u is no power of two, which the Hadamard transform needs",
                    m->index_dim);
  if (m->n_heads % m->o_groups)
    return ds4_fail(err, DS4_EUNSUPPORTED, m->n_heads, m->o_groups, "%u heads do not divide into %u output groups", m->n_heads,
                    m->o_groups);
  if (e->vocab < m->streams)
    return ds4_fail(err, DS4_EUNSUPPORTED, e->vocab, m->streams, "a vocabulary of %u is smaller than the %u residual streams", e->vocab,
                    m->streams);
  return DS4_OK;
}

static int read_ratios(ds4_engine *e, v4 *m, ds4_error *err) {
  uint64_t n = 0;
  const double *ratios = ds4_setting_array(e, "ratios", &n);
  if (!ratios || n != e->n_layers)
    return ds4_fail(err, DS4_EINVAL, (int64_t)n, e->n_layers, "setting 'ratios' must have one number for each of the %u layers",
                    e->n_layers);
  for (uint32_t i = 0; i < e->n_layers; i++) {
    v4_layer *l = &m->layers[i];
    if (ratios[i] != 0 && ratios[i] != 4 && ratios[i] != 128)
      return ds4_fail(err, DS4_EUNSUPPORTED, (int64_t)ratios[i], i, "setting 'ratios' is %g for layer %u; 0, 4 and 128 are possible",
                      ratios[i], i);
    l->ratio = (uint32_t)ratios[i];
    if (l->ratio) l->far = l->ratio == V4_OVERLAP ? m->n4++ : m->n128++;
  }
  return DS4_OK;
}

/* ---- streams ---------------------------------------------------------------------------------------------------------------------------- */

uint32_t v4_stream(const v4 *m, uint32_t which) {
  const bool there[V4_STREAMS] = {true, m->n4, m->n128, m->n4, m->n128, m->mtp};
  uint32_t n = 0;
  for (uint32_t i = 0; i < which; i++) n += there[i];
  return n;
}

/* Rows that one token reads are its own and the window before: raw rows to attend to; compressor inputs until their window has closed; the residual
 * streams of the token before, which the MTP block starts from. */
static int declare_streams(ds4_engine *e, const v4 *m, ds4_error *err) {
  const ds4_part row = {.heads = 1, .width = m->head_dim, .tail = m->rope_dim, .type = DS4_KV_ENGINE};
  const ds4_part index = {.heads = 1, .width = m->index_dim, .across = 1, .type = DS4_KV_INDEX};
  const ds4_part wide = {.heads = 1, .width = 2 * m->head_dim, .type = DS4_KV_F32};
  const ds4_part plain = {.heads = 1, .width = m->head_dim, .type = DS4_KV_F32};
  const ds4_part index_wide = {.heads = 1, .width = 2 * m->index_dim, .type = DS4_KV_F32};
  const ds4_part hidden = {.heads = 1, .width = m->streams * m->dim, .type = DS4_KV_F32};
  int status = ds4_declare_stream(e, "raw", e->n_layers + m->mtp, 1, m->window, 1, &row, err);
  if (!status && m->n4)
    status = ds4_declare_stream(e, "input4", m->n4, 1, 2 * V4_OVERLAP, 4, (ds4_part[]){wide, wide, index_wide, index_wide}, err);
  if (!status && m->n128) status = ds4_declare_stream(e, "input128", m->n128, 1, 128, 2, (ds4_part[]){plain, plain}, err);
  if (!status && m->n4) status = ds4_declare_stream(e, "rows4", m->n4, V4_OVERLAP, 0, 2, (ds4_part[]){row, index}, err);
  if (!status && m->n128) status = ds4_declare_stream(e, "rows128", m->n128, 128, 0, 1, &row, err);
  if (!status && m->mtp) status = ds4_declare_stream(e, "hidden", 1, 1, 2, 1, &hidden, err);
  return status;
}

/* ---- tensors ------------------------------------------------------------------------------------------------------------------------------ */

static int declare_all(ds4_engine *e, uint32_t layer, const ds4_shape *shapes, size_t n, ds4_error *err) {
  int status = DS4_OK;
  for (size_t k = 0; !status && k < n; k++) {
    char name[sizeof((ds4_tensor *)0)->name];
    snprintf(name, sizeof name, "layers.%u.%s", layer, shapes[k].name);
    status = ds4_declare_tensor(e, name, shapes[k].rows, shapes[k].cols, shapes[k].vector, false, err);
  }
  return status;
}
#define DECLARE(layer, ...)                                                                                                                \
  do {                                                                                                                                     \
    const ds4_shape shapes[] = {__VA_ARGS__};                                                                                              \
    if (!status) status = declare_all(e, layer, shapes, sizeof shapes / sizeof *shapes, err);                                              \
  } while (0)

static int declare_compressor(ds4_engine *e, const v4 *m, uint32_t i, const char *prefix, uint32_t width, ds4_error *err) {
  uint32_t ratio = m->layers[i].ratio, wide = ratio == V4_OVERLAP ? 2 * width : width;
  char name[4][32];
  static const char *const leaf[4] = {"kv", "gate", "ape", "norm"};
  for (int k = 0; k < 4; k++) snprintf(name[k], sizeof name[k], "%s_%s", prefix, leaf[k]);
  int status = DS4_OK;
  DECLARE(i, {name[0], wide, m->dim, false}, {name[1], wide, m->dim, false}, {name[2], 1, (uint64_t)ratio * wide, true},
          {name[3], 1, width, true});
  return status;
}

static int declare_experts(ds4_engine *e, const v4 *m, uint32_t i, ds4_error *err) {
  static const char *const names[] = {"gate", "up", "down"};
  int status = DS4_OK;
  for (uint32_t k = 0; k < m->n_experts; k++)
    for (int part = 0; !status && part < 3; part++) {
      uint32_t rows = part < 2 ? m->ffn : m->dim, cols = part < 2 ? m->dim : m->ffn;
      status = ds4_declare_expert(e, i, k, names[part], rows, cols, err);
      if (!status) e->tensors[e->n_tensors - 1].mapped = true;
    }
  return status;
}

static int declare_layer(ds4_engine *e, const v4 *m, uint32_t i, ds4_error *err) {
  const v4_layer *l = &m->layers[i];
  uint32_t flat = m->streams * m->dim, heads = m->n_heads * m->head_dim;
  int status = DS4_OK;
  DECLARE(i, {"attn_mix_fn", m->mix_rows, flat, false}, {"attn_mix_scale", 1, 3, true}, {"attn_mix_base", 1, m->mix_rows, true},
          {"attn_norm", 1, m->dim, true}, {"q_a", m->q_rank, m->dim, false}, {"q_norm", 1, m->q_rank, true},
          {"q_b", heads, m->q_rank, false}, {"kv", m->head_dim, m->dim, false}, {"kv_norm", 1, m->head_dim, true},
          {"sink", 1, m->n_heads, true});
  for (uint32_t g = 0; g < m->o_groups; g++) {
    char name[32];
    snprintf(name, sizeof name, "o_a.%u", g);
    DECLARE(i, {name, m->o_rank, heads / m->o_groups, false});
  }
  DECLARE(i, {"o_b", m->dim, (uint64_t)m->o_groups * m->o_rank, false});
  if (!status && l->ratio) status = declare_compressor(e, m, i, "rows", m->head_dim, err);
  if (!status && l->ratio == V4_OVERLAP) status = declare_compressor(e, m, i, "index", m->index_dim, err);
  if (l->ratio == V4_OVERLAP)
    DECLARE(i, {"index_q", (uint64_t)m->index_heads * m->index_dim, m->q_rank, false}, {"index_weight", m->index_heads, m->dim, false});
  DECLARE(i, {"ffn_mix_fn", m->mix_rows, flat, false}, {"ffn_mix_scale", 1, 3, true}, {"ffn_mix_base", 1, m->mix_rows, true},
          {"ffn_norm", 1, m->dim, true}, {"router", m->n_experts, m->dim, false});
  if (l->by_token)
    DECLARE(i, {"router_ids", 1, (uint64_t)e->vocab * m->n_used, true});
  else
    DECLARE(i, {"router_bias", 1, m->n_experts, true});
  DECLARE(i, {"shared.gate", m->ffn, m->dim, false}, {"shared.up", m->ffn, m->dim, false}, {"shared.down", m->dim, m->ffn, false});
  return status ? status : declare_experts(e, m, i, err);
}

static int declare_tensors(ds4_engine *e, const v4 *m, ds4_error *err) {
  uint32_t flat = m->streams * m->dim;
  const ds4_shape shapes[] = {{"embed", e->vocab, m->dim, false}, {"head", e->vocab, m->dim, false},
                              {"norm", 1, m->dim, true},          {"head_mix_fn", m->streams, flat, false},
                              {"head_mix_scale", 1, 1, true},     {"head_mix_base", 1, m->streams, true}};
  int status = DS4_OK;
  for (size_t k = 0; !status && k < sizeof shapes / sizeof *shapes; k++)
    status = ds4_declare_tensor(e, shapes[k].name, shapes[k].rows, shapes[k].cols, shapes[k].vector, false, err);
  for (uint32_t i = 0; !status && i < e->n_layers + m->mtp; i++) status = declare_layer(e, m, i, err);
  const ds4_shape mtp[] = {{"mtp.e_proj", m->dim, m->dim, false}, {"mtp.h_proj", m->dim, m->dim, false},
                           {"mtp.e_norm", 1, m->dim, true},       {"mtp.h_norm", 1, m->dim, true},
                           {"mtp.norm", 1, m->dim, true},         {"mtp.mix_fn", m->streams, flat, false},
                           {"mtp.mix_scale", 1, 1, true},         {"mtp.mix_base", 1, m->streams, true}};
  for (size_t k = 0; m->mtp && !status && k < sizeof mtp / sizeof *mtp; k++)
    status = ds4_declare_tensor(e, mtp[k].name, mtp[k].rows, mtp[k].cols, mtp[k].vector, false, err);
  return status;
}

/* ---- one block of memory for all of it ------------------------------------------------------------------------------------------------------ */

/* The layers, their experts, output groups and expert tables lie behind the struct. NULL: no memory. */
static v4 *model_new(const v4 *sizes, uint32_t trunk, uint32_t vocab) {
  uint32_t n_hash = ds4_min_u32(sizes->n_hash, trunk), n_layers = trunk + sizes->mtp;
  uint64_t experts = (uint64_t)n_layers * sizes->n_experts, groups = (uint64_t)n_layers * sizes->o_groups;
  uint64_t by_token = (uint64_t)n_hash * vocab * sizes->n_used;
  v4 *m = calloc(1, sizeof *m + n_layers * sizeof *m->layers + experts * sizeof(ds4_ffn) + groups * sizeof(ds4_weight *) +
                        by_token * sizeof(uint16_t));
  if (!m) return NULL;
  *m = *sizes;
  m->layers = (v4_layer *)(void *)(m + 1);
  ds4_ffn *ffn = (ds4_ffn *)(void *)(m->layers + n_layers);
  const ds4_weight **group = (const ds4_weight **)(void *)(ffn + experts);
  uint16_t *ids = (uint16_t *)(void *)(group + groups);
  for (uint32_t i = 0; i < n_layers; i++) {
    v4_layer *l = &m->layers[i];
    l->experts = ffn + (uint64_t)i * m->n_experts;
    l->o_a = group + (uint64_t)i * m->o_groups;
    if (i < n_hash) l->by_token = ids + (uint64_t)i * vocab * m->n_used;
    l->raw = i;
    l->draft = i == trunk;
  }
  return m;
}

static void declare_buffers(ds4_engine *e, const v4 *m) {
  uint32_t flat = m->streams * m->dim, heads = m->n_heads * m->head_dim, row = ds4_max_u32(m->head_dim, m->index_dim);
  const uint32_t widths[V4_BUFFERS] = {[V4_H] = flat,
                                       [V4_FLAT] = flat,
                                       [V4_Q] = heads,
                                       [V4_KV] = m->head_dim,
                                       [V4_Y] = m->dim,
                                       [V4_O] = heads,
                                       [DS4_GATE] = m->ffn,
                                       [DS4_UP] = m->ffn,
                                       [V4_X] = m->dim,
                                       [V4_QR] = m->q_rank,
                                       [V4_GROUP] = heads / m->o_groups,
                                       [V4_GROUP_OUT] = m->o_rank,
                                       [V4_JOINED] = m->o_groups * m->o_rank,
                                       [V4_VALUES] = 2 * m->head_dim,
                                       [V4_SCORES] = 2 * m->head_dim,
                                       [V4_INDEX_VALUES] = 2 * m->index_dim,
                                       [V4_INDEX_SCORES] = 2 * m->index_dim,
                                       [V4_ROW] = row,
                                       [V4_INDEX_Q] = m->index_heads * m->index_dim,
                                       [V4_INDEX_WEIGHT] = m->index_heads,
                                       [V4_MIX] = m->mix_rows,
                                       [V4_ROUTER] = m->n_experts,
                                       [V4_GATHERED] = m->dim,
                                       [V4_RESULT] = m->dim,
                                       [V4_DRAFT] = m->mtp ? flat : 1};
  for (uint32_t i = 0; i < V4_BUFFERS; i++) ds4_declare_buffer(e, widths[i]);
  e->width = flat;
  e->draft = m->mtp ? V4_DRAFT : 0;
  /* far rows and their number; windows that close (3); picks and their weights, tokens of an expert with theirs; the streams' rows of the embedding */
  e->scratch_width = m->keep + 1 + 3 + 2 * m->n_used + 2 + m->streams;
}

int v4_setup(ds4_engine *e, ds4_error *err) {
  v4 sizes = {0};
  int status = ds4_setting_u32(e, "n_layers", 1, 4096, &e->n_layers, err);
  if (!status) status = read_counts(e, &sizes, err);
  if (!status) status = read_numbers(e, &sizes, err);
  if (!status) status = check_sizes(e, &sizes, err);
  if (status) return status;
  sizes.mix_rows = (2 + sizes.streams) * sizes.streams;
  sizes.scale = (float)(1.0 / sqrt((double)sizes.head_dim));
  sizes.index_scale = (float)(1.0 / sqrt((double)sizes.index_dim * sizes.index_heads));
  v4 *m = e->model = model_new(&sizes, e->n_layers, e->vocab);
  if (!m) return ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for %u layers", e->n_layers);
  status = read_ratios(e, m, err);
  if (!status) status = ds4_setting_freqs(e, V4_PLAIN, "rope", m->rope_dim / 2, err);
  if (!status && m->n4 + m->n128) status = ds4_setting_freqs(e, V4_COMPRESSED, "compress_rope", m->rope_dim / 2, err);
  if (status) return status;
  e->rope[V4_PLAIN].single = e->rope[V4_COMPRESSED].single = true; /* at far positions the indexer's choice depends on it */
  e->kv_types = 1u << DS4_KV_F32 | 1u << DS4_KV_F16 | (m->rounding ? 1u << DS4_KV_FP8 : 0);
  declare_buffers(e, m);
  status = declare_streams(e, m, err);
  return status ? status : declare_tensors(e, m, err);
}

/* ---- bind ---------------------------------------------------------------------------------------------------------------------------------- */

static const ds4_weight *weight_of(ds4_engine *e, uint32_t layer, const char *name) { return ds4_layer_tensor(e, layer, name)->weight; }
static const float *values_of(ds4_engine *e, uint32_t layer, const char *name) { return ds4_layer_tensor(e, layer, name)->values; }

static v4_compressor bind_compressor(ds4_engine *e, uint32_t i, bool index) {
  v4_compressor c = {.kv = weight_of(e, i, index ? "index_kv" : "rows_kv"), .gate = weight_of(e, i, index ? "index_gate" : "rows_gate")};
  c.ape = values_of(e, i, index ? "index_ape" : "rows_ape");
  c.norm = values_of(e, i, index ? "index_norm" : "rows_norm");
  return c;
}

/* The experts of every token, as the file has them: whole numbers, and no expert twice for one token. */
static int bind_ids(ds4_engine *e, const v4 *m, uint32_t layer, ds4_error *err) {
  uint64_t n = (uint64_t)e->vocab * m->n_used;
  float *ids = malloc(n * sizeof *ids);
  uint16_t *out = m->layers[layer].by_token;
  if (!ids) return ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for the expert table of layer %u", layer);
  int status = e->ops->copy_out(e->backend, ids, values_of(e, layer, "router_ids"), n * sizeof *ids);
  if (!status) status = e->ops->wait(e->backend);
  for (uint64_t i = 0; !status && i < n; i++) {
    if (!(ids[i] >= 0.0f && ids[i] < (float)m->n_experts) || ids[i] != floorf(ids[i]))
      status = ds4_fail(err, DS4_EINVAL, (int64_t)i, m->n_experts, "the expert table of layer %u names expert %g of %u for token %llu",
                        layer, (double)ids[i], m->n_experts, (unsigned long long)(i / m->n_used));
    else
      out[i] = (uint16_t)ids[i];
    for (uint64_t k = i / m->n_used * m->n_used; !status && k < i; k++)
      if (out[k] == out[i])
        status = ds4_fail(err, DS4_EINVAL, (int64_t)i, 0, "the expert table of layer %u names expert %u twice for token %llu", layer,
                          out[i], (unsigned long long)(i / m->n_used));
  }
  free(ids);
  return status;
}

static int bind_layer(ds4_engine *e, v4 *m, uint32_t i, ds4_error *err) {
  v4_layer *l = &m->layers[i];
  l->attn_mix = (v4_mix){weight_of(e, i, "attn_mix_fn"), values_of(e, i, "attn_mix_scale"), values_of(e, i, "attn_mix_base")};
  l->attn_norm = values_of(e, i, "attn_norm");
  l->q_a = weight_of(e, i, "q_a");
  l->q_norm = values_of(e, i, "q_norm");
  l->q_b = weight_of(e, i, "q_b");
  l->kv = weight_of(e, i, "kv");
  l->kv_norm = values_of(e, i, "kv_norm");
  l->sink = values_of(e, i, "sink");
  for (uint32_t g = 0; g < m->o_groups; g++) {
    char name[32];
    snprintf(name, sizeof name, "o_a.%u", g);
    l->o_a[g] = weight_of(e, i, name);
  }
  l->o_b = weight_of(e, i, "o_b");
  if (l->ratio) l->rows = bind_compressor(e, i, false);
  if (l->ratio == V4_OVERLAP) {
    l->index = bind_compressor(e, i, true);
    l->index_q = weight_of(e, i, "index_q");
    l->index_weight = weight_of(e, i, "index_weight");
  }
  l->ffn_mix = (v4_mix){weight_of(e, i, "ffn_mix_fn"), values_of(e, i, "ffn_mix_scale"), values_of(e, i, "ffn_mix_base")};
  l->ffn_norm = values_of(e, i, "ffn_norm");
  l->router = weight_of(e, i, "router");
  if (!l->by_token) l->bias = values_of(e, i, "router_bias");
  l->shared = (ds4_ffn){weight_of(e, i, "shared.gate"), weight_of(e, i, "shared.up"), weight_of(e, i, "shared.down"), m->limit};
  for (uint32_t k = 0; k < m->n_experts; k++)
    l->experts[k] = (ds4_ffn){ds4_find_expert(e, i, k, "gate")->weight, ds4_find_expert(e, i, k, "up")->weight,
                              ds4_find_expert(e, i, k, "down")->weight, m->limit};
  return l->by_token ? bind_ids(e, m, i, err) : DS4_OK;
}

int v4_bind(ds4_engine *e, ds4_error *err) {
  v4 *m = e->model;
  m->embed = ds4_find_tensor(e, "embed")->weight;
  m->head = ds4_find_tensor(e, "head")->weight;
  m->norm = ds4_find_tensor(e, "norm")->values;
  m->head_mix = (v4_mix){ds4_find_tensor(e, "head_mix_fn")->weight, ds4_find_tensor(e, "head_mix_scale")->values,
                         ds4_find_tensor(e, "head_mix_base")->values};
  int status = DS4_OK;
  for (uint32_t i = 0; !status && i < e->n_layers + m->mtp; i++) status = bind_layer(e, m, i, err);
  if (status || !m->mtp) return status;
  m->e_proj = ds4_find_tensor(e, "mtp.e_proj")->weight;
  m->h_proj = ds4_find_tensor(e, "mtp.h_proj")->weight;
  m->e_norm = ds4_find_tensor(e, "mtp.e_norm")->values;
  m->h_norm = ds4_find_tensor(e, "mtp.h_norm")->values;
  m->mtp_norm = ds4_find_tensor(e, "mtp.norm")->values;
  m->mtp_mix = (v4_mix){ds4_find_tensor(e, "mtp.mix_fn")->weight, ds4_find_tensor(e, "mtp.mix_scale")->values,
                        ds4_find_tensor(e, "mtp.mix_base")->values};
  return DS4_OK;
}
