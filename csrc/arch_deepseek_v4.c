/* DeepSeek V4: the forward pass.
 *
 * Every token has n = `streams` residual streams h [n][dim]. A sublayer reads a mixture of them, and its result y is spread over them again:
 *
 *   m = fn . h / rms(h)                        pre = sigmoid(scale[0] m + base) + eps     post = 2 sigmoid(scale[1] m + base)
 *   x = norm(sum of pre[s] h[s])               B = rows and columns of softmax(scale[2] m + base) normalised in turn
 *   h[j] = post[j] y + sum of B[i][j] h[i]     the head has `pre` alone
 *
 * Attention has one key head that is the value too (K and V are one row), rotated in its last rope_dim numbers:
 *
 *   qr = norm(q_a x)     q = q_b qr, each head / its rms     kv = norm(kv x)
 *   windows of r = 4 or 128 tokens: per number, softmax over the window of (gate x + ape[place]) weighs kv' x; norm; rotated as their first token.
 *     r = 4: a window has two vectors a token and takes the first ones of the window before, too
 *   which rows of 4: the `keep` best by sum of w[head] max(0, iq[head] . ik), where w = index_weight x / sqrt(index_dim heads), ik: a compressor of its own
 *   o = softmax over (raw rows of the last `window` positions, those rows, the sink) . rows; rotated back by the query's position
 *   y = o_b (o_a[group] o[group])
 *
 *   experts: s = sqrt(softplus(router x)); chosen by s + bias, or by the token's table; weight s / sum * route_scale; silu(min(gate, limit)) * clip(up)
 *   MTP: x[s] = e_proj norm(embed[token]) + h_proj norm(h[s] of the token before), one more block without windows, a head of its own mixture
 *
 * All state is rows: what a half-filled window has so far is the last rows of an input stream. */
#include <math.h>

#include "deepseek_v4.h"
#include "numeric.h"

/* Memory of the host for one round, [n] each unless noted; the parts of engine.scratch. */
typedef struct lists {
  uint32_t *far, *far_n;           /* [n][keep] far rows of each token, ascending; how many */
  uint32_t *segment, *first, *row; /* windows that close in this round: segment, first position, row */
  uint32_t *pick, *token, *spread; /* [n][n_used] experts; tokens of one expert; [n][streams] rows of the embedding */
  float *weight, *part;            /* [n][n_used]; of the tokens of one expert */
} lists;

static lists lists_of(const ds4_run *r, const v4 *m) {
  uint64_t n = r->batch.n;
  lists s = {.far = r->engine->scratch};
  s.far_n = s.far + n * m->keep;
  s.segment = s.far_n + n;
  s.first = s.segment + n;
  s.row = s.first + n;
  s.pick = s.row + n;
  s.token = s.pick + n * m->n_used;
  s.spread = s.token + n;
  s.weight = (float *)(void *)(s.spread + n * m->streams);
  s.part = s.weight + n * m->n_used;
  return s;
}

static const ds4_view *views_of(const ds4_run *r, uint32_t stream) { return r->views + stream * r->batch.n_segments; }

/* ---- hyper-connections -------------------------------------------------------------------------------------------------------------------- */

/* H -> X: what a sublayer reads, normed; MIX keeps the weights for mix_back. */
static int mix_in(ds4_run *r, const v4 *m, const v4_mix *mix, const float *norm) {
  ds4_engine *e = r->engine;
  const ds4_ops *ops = e->ops;
  float **b = e->buffer;
  uint32_t n = r->batch.n;
  DS4_OP(ops->rms_norm(e->backend, b[V4_H], NULL, n, m->streams * m->dim, m->eps, b[V4_FLAT]));
  DS4_OP(ops->matmul(e->backend, &mix->fn, &b[V4_MIX], 1, b[V4_FLAT], n));
  DS4_OP(ops->mix_weights(e->backend, b[V4_MIX], mix->scale, mix->base, n, m->mix_rows, m->streams, m->iterations, m->mix_eps));
  DS4_OP(ops->mix_in(e->backend, b[V4_H], b[V4_MIX], n, m->mix_rows, m->streams, m->dim, b[V4_X]));
  DS4_OP(ops->rms_norm(e->backend, b[V4_X], norm, n, m->dim, m->eps, b[V4_X]));
  return DS4_OK;
}

/* Y, spread over the streams: H = post * Y + B^T H. */
static int mix_back(ds4_run *r, const v4 *m) {
  ds4_engine *e = r->engine;
  DS4_OP(e->ops->mix_out(e->backend, e->buffer[V4_H], e->buffer[V4_Y], e->buffer[V4_MIX], r->batch.n, m->streams, m->dim));
  return DS4_OK;
}

/* ---- attention ------------------------------------------------------------------------------------------------------------------------------ */

/* X -> QR, Q, KV: low-rank query, normed per head, and the one row that is key and value; rotated. */
static int project(ds4_run *r, const v4 *m, const v4_layer *l, const float *rope, const uint32_t *pos) {
  ds4_engine *e = r->engine;
  const ds4_ops *ops = e->ops;
  float **b = e->buffer;
  uint32_t n = r->batch.n;
  DS4_OP(ops->matmul(e->backend, (const ds4_weight *[]){l->q_a, l->kv}, (float *[]){b[V4_QR], b[V4_KV]}, 2, b[V4_X], n));
  DS4_OP(ops->rms_norm(e->backend, b[V4_QR], l->q_norm, n, m->q_rank, m->eps, b[V4_QR]));
  DS4_OP(ops->matmul(e->backend, &l->q_b, &b[V4_Q], 1, b[V4_QR], n));
  DS4_OP(ops->rms_norm(e->backend, b[V4_Q], NULL, n * m->n_heads, m->head_dim, m->eps, b[V4_Q]));
  DS4_OP(ops->rms_norm(e->backend, b[V4_KV], l->kv_norm, n, m->head_dim, m->eps, b[V4_KV]));
  DS4_OP(ops->rope_tail(e->backend, b[V4_Q], pos, n, m->n_heads, m->head_dim, m->rope_dim, rope, false));
  DS4_OP(ops->rope_tail(e->backend, b[V4_KV], pos, n, 1, m->head_dim, m->rope_dim, rope, false));
  if (m->rounding) DS4_OP(ops->round_fp8(e->backend, b[V4_KV], n, m->head_dim, m->rope_dim));
  return DS4_OK;
}

/* Windows of `ratio` tokens that close in this round. */
static uint32_t closing_windows(const ds4_run *r, uint32_t ratio, const lists *s) {
  uint32_t n = 0;
  for (uint32_t t = 0; t < r->batch.n; t++) {
    uint32_t next = r->batch.pos[t] + 1;
    if (next % ratio) continue;
    s->segment[n] = r->batch.segment[t];
    s->first[n] = next - ratio;
    s->row[n++] = next / ratio - 1;
  }
  return n;
}

/* Inputs in VALUES and SCORES (of the index, with `index`) -> the input stream, and a row for every window that closes. */
static int compress(ds4_run *r, const v4 *m, const v4_layer *l, bool index) {
  ds4_engine *e = r->engine;
  const ds4_ops *ops = e->ops;
  float **b = e->buffer;
  lists s = lists_of(r, m);
  bool overlap = l->ratio == V4_OVERLAP;
  const v4_compressor *c = index ? &l->index : &l->rows;
  float *values = b[index ? V4_INDEX_VALUES : V4_VALUES], *scores = b[index ? V4_INDEX_SCORES : V4_SCORES], *out = b[V4_ROW];
  uint32_t n = r->batch.n, width = index ? m->index_dim : m->head_dim, wide = overlap ? 2 * width : width;
  uint32_t from = v4_stream(m, overlap ? V4_INPUT_4 : V4_INPUT_128), to = v4_stream(m, overlap ? V4_ROWS_4 : V4_ROWS_128);
  uint32_t part = index ? V4_PART_INDEX_VALUES : V4_PART_VALUES;
  const ds4_layout *inputs = &e->stream[from].layout;

  /* what this round brings: scores by the place in the window */
  for (uint32_t t = 0; t < n; t++) e->row[DS4_LO][t] = r->batch.pos[t] % l->ratio;
  DS4_OP(ops->add_rows(e->backend, scores, c->ape, e->row[DS4_LO], n, wide));
  DS4_OP(ops->rows_write(e->backend, inputs, l->far, part, views_of(r, from), &r->batch, r->batch.pos, values));
  DS4_OP(ops->rows_write(e->backend, inputs, l->far, part + 1, views_of(r, from), &r->batch, r->batch.pos, scores));

  /* windows that are full */
  uint32_t closed = closing_windows(r, l->ratio, &s);
  if (!closed) return DS4_OK;
  const ds4_compress op = {.layout = inputs,
                           .views = views_of(r, from),
                           .layer = l->far,
                           .part = part,
                           .ratio = l->ratio,
                           .overlap = overlap,
                           .width = width,
                           .n = closed,
                           .segment = s.segment,
                           .first = s.first,
                           .out = out};
  const ds4_batch windows = {.n = closed, .n_segments = r->batch.n_segments, .pos = s.first, .segment = s.segment};
  DS4_OP(ops->compress(e->backend, &op));
  DS4_OP(ops->rms_norm(e->backend, out, c->norm, closed, width, m->eps, out));
  DS4_OP(ops->rope_tail(e->backend, out, s.first, closed, 1, width, m->rope_dim, e->rope[V4_COMPRESSED].table, false));
  if (m->rounding && index) DS4_OP(ops->round_fp4(e->backend, out, closed, width));
  if (m->rounding && !index) DS4_OP(ops->round_fp8(e->backend, out, closed, width, m->rope_dim));
  DS4_OP(ops->rows_write(e->backend, &e->stream[to].layout, l->far, index ? V4_PART_INDEX : V4_PART_ROWS, views_of(r, to), &windows, s.row,
                         out));
  return DS4_OK;
}

/* X -> the rows of both compressors. */
static int compress_all(ds4_run *r, const v4 *m, const v4_layer *l) {
  ds4_engine *e = r->engine;
  float **b = e->buffer;
  bool index = l->ratio == V4_OVERLAP;
  const ds4_weight *w[] = {l->rows.kv, l->rows.gate, l->index.kv, l->index.gate};
  float *out[] = {b[V4_VALUES], b[V4_SCORES], b[V4_INDEX_VALUES], b[V4_INDEX_SCORES]};
  DS4_OP(e->ops->matmul(e->backend, w, out, index ? 4 : 2, b[V4_X], r->batch.n));
  int status = compress(r, m, l, false);
  return status || !index ? status : compress(r, m, l, true);
}

/* The far rows that each token reads. Where all that are visible fit, none is scored. */
static int choose_rows(ds4_run *r, const v4 *m, const v4_layer *l) {
  ds4_engine *e = r->engine;
  const ds4_ops *ops = e->ops;
  float **b = e->buffer;
  lists s = lists_of(r, m);
  uint32_t n = r->batch.n, *visible = e->row[DS4_LO], most = 0, stream = v4_stream(m, V4_ROWS_4);
  for (uint32_t t = 0; t < n; t++) {
    visible[t] = (r->batch.pos[t] + 1) / l->ratio;
    most = ds4_max_u32(most, visible[t]);
  }
  if (most > m->keep) {
    DS4_OP(ops->matmul(e->backend, &l->index_q, &b[V4_INDEX_Q], 1, b[V4_QR], n));
    DS4_OP(ops->matmul(e->backend, &l->index_weight, &b[V4_INDEX_WEIGHT], 1, b[V4_X], n));
    DS4_OP(ops->rope_tail(e->backend, b[V4_INDEX_Q], r->batch.pos, n, m->index_heads, m->index_dim, m->rope_dim,
                          e->rope[V4_COMPRESSED].table, false));
    if (m->rounding) DS4_OP(ops->round_fp4(e->backend, b[V4_INDEX_Q], n * m->index_heads, m->index_dim));
    DS4_OP(ops->scale(e->backend, b[V4_INDEX_WEIGHT], m->index_scale, (uint64_t)n * m->index_heads));
  }
  const ds4_pick op = {.layout = &e->stream[stream].layout,
                       .views = views_of(r, stream),
                       .batch = &r->batch,
                       .layer = l->far,
                       .part = V4_PART_INDEX,
                       .heads = m->index_heads,
                       .keep = m->keep,
                       .rows = visible,
                       .q = b[V4_INDEX_Q],
                       .weight = b[V4_INDEX_WEIGHT],
                       .list = s.far,
                       .list_width = m->keep,
                       .count = s.far_n};
  DS4_OP(ops->pick(e->backend, &op));
  return DS4_OK;
}

/* O -> Y: each group of heads through its own low-rank matrix, the results joined through a second one. */
static int output(ds4_run *r, const v4 *m, const v4_layer *l) {
  ds4_engine *e = r->engine;
  const ds4_ops *ops = e->ops;
  float **b = e->buffer;
  lists s = lists_of(r, m);
  uint32_t n = r->batch.n, width = m->n_heads / m->o_groups * m->head_dim;
  DS4_OP(ops->clear(e->backend, b[V4_JOINED], (uint64_t)n * m->o_groups * m->o_rank));
  for (uint32_t g = 0; g < m->o_groups; g++) { /* O as [n * groups][width], JOINED as [n * groups][o_rank] */
    for (uint32_t t = 0; t < n; t++) s.token[t] = t * m->o_groups + g, s.part[t] = 1.0f;
    DS4_OP(ops->gather(e->backend, b[V4_O], s.token, n, width, b[V4_GROUP]));
    DS4_OP(ops->matmul(e->backend, &l->o_a[g], &b[V4_GROUP_OUT], 1, b[V4_GROUP], n));
    DS4_OP(ops->scatter_add(e->backend, b[V4_GROUP_OUT], s.token, s.part, n, m->o_rank, b[V4_JOINED]));
  }
  DS4_OP(ops->matmul(e->backend, &l->o_b, &b[V4_Y], 1, b[V4_JOINED], n));
  return DS4_OK;
}

/* X -> Y. The MTP block works one position behind the token that its row belongs to, and has no row 0. */
static int attention(ds4_run *r, const v4 *m, const v4_layer *l) {
  ds4_engine *e = r->engine;
  const ds4_ops *ops = e->ops;
  float **b = e->buffer;
  lists s = lists_of(r, m);
  uint32_t n = r->batch.n;
  const float *rope = e->rope[l->ratio ? V4_COMPRESSED : V4_PLAIN].table;
  const uint32_t *pos = r->batch.pos;
  for (uint32_t t = 0; l->draft && t < n; t++) s.first[t] = pos[t] ? pos[t] - 1 : 0;
  if (l->draft) pos = s.first;
  int status = project(r, m, l, rope, pos);
  if (!status && l->ratio) status = compress_all(r, m, l);
  if (!status && l->ratio == V4_OVERLAP) status = choose_rows(r, m, l);
  if (status) return status;
  for (uint32_t t = 0; l->ratio == 128 && t < n; t++) s.far_n[t] = (r->batch.pos[t] + 1) / l->ratio;

  ds4_attend_sparse a = {.layout = &e->stream[V4_RAW].layout, .views = views_of(r, V4_RAW), .batch = &r->batch, .layer = l->raw};
  DS4_OP(ops->rows_write(e->backend, a.layout, l->raw, 0, a.views, &r->batch, r->batch.pos, b[V4_KV]));
  ds4_decoder_rows(r, m->window, 1);
  for (uint32_t t = 0; l->draft && t < n; t++) e->row[DS4_LO][t] = ds4_max_u32(1, e->row[DS4_LO][t]);
  a.lo = e->row[DS4_LO], a.hi = e->row[DS4_HI];
  if (l->ratio) {
    uint32_t far = v4_stream(m, l->ratio == V4_OVERLAP ? V4_ROWS_4 : V4_ROWS_128);
    a.far_layout = &e->stream[far].layout, a.far_views = views_of(r, far), a.far_layer = l->far, a.far_n = s.far_n;
    if (l->ratio == V4_OVERLAP) a.list = s.far, a.list_width = m->keep;
  }
  a.n_heads = m->n_heads, a.scale = m->scale, a.sink = l->sink, a.q = b[V4_Q], a.out = b[V4_O];
  DS4_OP(ops->attend_sparse(e->backend, &a));
  /* values carry the rotation of their keys: the query's own takes it back to where the query stands */
  DS4_OP(ops->rope_tail(e->backend, b[V4_O], pos, n, m->n_heads, m->head_dim, m->rope_dim, rope, true));
  return output(r, m, l);
}

/* ---- experts --------------------------------------------------------------------------------------------------------------------------------- */

/* The experts of one token in ascending order and their weights. The bias chooses and does not weigh; ties go to the lowest index. */
static void route(const v4 *m, const v4_layer *l, int32_t id, float *score, uint32_t *pick, float *weight) {
  for (uint32_t i = 0; i < m->n_experts; i++) score[i] = sqrtf(ds4_softplus(score[i]));
  if (l->by_token) {
    for (uint32_t i = 0; i < m->n_used; i++) pick[i] = l->by_token[(uint64_t)id * m->n_used + i];
    ds4_sort_ascending(pick, m->n_used);
  } else {
    ds4_decoder_pick(score, l->bias, m->n_experts, m->n_used, pick);
  }
  float lane[16] = {0};
  for (uint32_t i = 0; i < m->n_used; i++) lane[i % 16] += score[pick[i]];
  float sum = ds4_lane_sum(lane) + 1e-20f;
  for (uint32_t i = 0; i < m->n_used; i++) weight[i] = score[pick[i]] / sum * m->route_scale;
}

/* X -> Y: the chosen experts, then the shared one. */
static int experts(ds4_run *r, const v4 *m, const v4_layer *l) {
  ds4_engine *e = r->engine;
  const ds4_ops *ops = e->ops;
  float **b = e->buffer;
  lists s = lists_of(r, m);
  uint32_t n = r->batch.n;
  DS4_OP(ops->matmul(e->backend, &l->router, &b[V4_ROUTER], 1, b[V4_X], n));
  DS4_OP(ops->wait(e->backend)); /* the choice is made on the host */
  for (uint32_t t = 0; t < n; t++)
    route(m, l, r->batch.ids[t], b[V4_ROUTER] + (uint64_t)t * m->n_experts, s.pick + t * m->n_used, s.weight + t * m->n_used);
  const ds4_experts x = {.ffn = l->experts,
                         .count = m->n_experts,
                         .used = m->n_used,
                         .width = m->ffn,
                         .dim = m->dim,
                         .glu = DS4_SILU_CLAMPED,
                         .pick = s.pick,
                         .weight = s.weight,
                         .token = s.token,
                         .part = s.part,
                         .gathered = b[V4_GATHERED],
                         .result = b[V4_RESULT]};
  DS4_OP(ds4_decoder_experts(r, &x, b[V4_X], b[V4_Y]));
  DS4_OP(ds4_decoder_ffn(r, &l->shared, m->ffn, DS4_SILU_CLAMPED, b[V4_X], n, b[V4_RESULT]));
  DS4_OP(ops->add(e->backend, b[V4_Y], b[V4_RESULT], (uint64_t)n * m->dim));
  return DS4_OK;
}

/* ---- all of it ---------------------------------------------------------------------------------------------------------------------------------- */

/* The trace of a layer: far rows [n][keep] and their number [n] (ratio 4), attention [n][dim], experts [n][n_used] and weights, their sum [n][dim],
 * streams [n][streams * dim]. */
static int block(ds4_run *r, const v4 *m, const v4_layer *l) {
  ds4_engine *e = r->engine;
  lists s = lists_of(r, m);
  uint64_t n = r->batch.n;
  DS4_OP(mix_in(r, m, &l->attn_mix, l->attn_norm));
  DS4_OP(attention(r, m, l));
  if (l->ratio == V4_OVERLAP) ds4_trace_ids(e, s.far, n * m->keep), ds4_trace_ids(e, s.far_n, n);
  ds4_trace(e, e->buffer[V4_Y], n * m->dim);
  DS4_OP(mix_back(r, m));
  DS4_OP(mix_in(r, m, &l->ffn_mix, l->ffn_norm));
  DS4_OP(experts(r, m, l));
  ds4_trace_ids(e, s.pick, n * m->n_used), ds4_trace(e, s.weight, n * m->n_used);
  ds4_trace(e, e->buffer[V4_Y], n * m->dim);
  DS4_OP(mix_back(r, m));
  ds4_trace(e, e->buffer[V4_H], n * m->streams * m->dim);
  return DS4_OK;
}

/* ---- MTP ------------------------------------------------------------------------------------------------------------------------------------- */

/* The residual streams of every token's predecessor -> DRAFT; nothing but zeros lies before position 0. */
static int predecessors(ds4_run *r, const v4 *m) {
  ds4_engine *e = r->engine;
  uint32_t stream = v4_stream(m, V4_HIDDEN), n = r->batch.n, flat = m->streams * m->dim;
  const ds4_layout *layout = &e->stream[stream].layout;
  float *out = e->buffer[V4_DRAFT];
  DS4_OP(e->ops->rows_write(e->backend, layout, 0, 0, views_of(r, stream), &r->batch, r->batch.pos, e->buffer[V4_H]));
  for (uint32_t t = 0, end; t < n; t = end) { /* segment by segment */
    uint32_t segment = r->batch.segment[t];
    for (end = t + 1; end < n && r->batch.segment[end] == segment;) end++;
    uint32_t none = r->batch.pos[t] == 0;
    float *to = out + (uint64_t)t * flat;
    if (none) DS4_OP(e->ops->clear(e->backend, to, flat));
    if (end - t == none) continue;
    DS4_OP(e->ops->rows_read(e->backend, layout, 0, 0, &views_of(r, stream)[segment], r->batch.pos[t] + none - 1, end - t - none,
                             to + (uint64_t)none * flat));
  }
  return DS4_OK;
}

/* DRAFT: the predecessor's streams and this token's embedding, joined, through one more block. */
static int draft(ds4_run *r, const v4 *m) {
  ds4_engine *e = r->engine;
  const ds4_ops *ops = e->ops;
  float **b = e->buffer;
  lists s = lists_of(r, m);
  uint32_t n = r->batch.n, rows = n * m->streams;
  int status = predecessors(r, m);
  if (status) return status;
  DS4_OP(ops->embed(e->backend, m->embed, r->batch.ids, n, b[V4_X]));
  DS4_OP(ops->rms_norm(e->backend, b[V4_X], m->e_norm, n, m->dim, m->eps, b[V4_X]));
  DS4_OP(ops->matmul(e->backend, &m->e_proj, &b[V4_Y], 1, b[V4_X], n));
  DS4_OP(ops->rms_norm(e->backend, b[V4_DRAFT], m->h_norm, rows, m->dim, m->eps, b[V4_FLAT]));
  DS4_OP(ops->matmul(e->backend, &m->h_proj, &b[V4_DRAFT], 1, b[V4_FLAT], rows));
  for (uint32_t i = 0; i < rows; i++) s.spread[i] = i / m->streams;
  DS4_OP(ops->gather(e->backend, b[V4_Y], s.spread, rows, m->dim, b[V4_FLAT]));
  DS4_OP(ops->add(e->backend, b[V4_DRAFT], b[V4_FLAT], (uint64_t)rows * m->dim));
  float *trunk = b[V4_H]; /* the block works on H; the trunk's streams wait for their head */
  b[V4_H] = b[V4_DRAFT];
  status = block(r, m, &m->layers[e->n_layers]);
  b[V4_DRAFT] = b[V4_H];
  b[V4_H] = trunk;
  return status;
}

static int forward(ds4_run *r) {
  ds4_engine *e = r->engine;
  const v4 *m = e->model;
  const ds4_ops *ops = e->ops;
  float **b = e->buffer;
  lists s = lists_of(r, m);
  uint32_t n = r->batch.n;
  DS4_OP(ops->embed(e->backend, m->embed, r->batch.ids, n, b[V4_X]));
  for (uint32_t i = 0; i < n * m->streams; i++) s.spread[i] = i / m->streams;
  DS4_OP(ops->gather(e->backend, b[V4_X], s.spread, n * m->streams, m->dim, b[V4_H]));
  for (r->layer = 0; r->layer < e->n_layers; r->layer++) {
    int status = block(r, m, &m->layers[r->layer]);
    if (status) return status;
  }
  return m->mtp ? draft(r, m) : DS4_OK;
}

/* x [n][streams * dim]: one more mixture, without the way back. Its weights lie where the logits will. */
static int mixed_head(ds4_engine *e, const v4_mix *mix, const float *norm, const float *x, uint32_t n, float *scratch, float *logits) {
  const v4 *m = e->model;
  const ds4_ops *ops = e->ops;
  int status = ops->rms_norm(e->backend, x, NULL, n, m->streams * m->dim, m->eps, scratch);
  if (!status) status = ops->matmul(e->backend, &mix->fn, &logits, 1, scratch, n);
  if (!status) status = ops->mix_weights(e->backend, logits, mix->scale, mix->base, n, m->streams, m->streams, m->iterations, m->mix_eps);
  if (!status) status = ops->mix_in(e->backend, x, logits, n, m->streams, m->streams, m->dim, scratch);
  if (!status) status = ops->rms_norm(e->backend, scratch, norm, n, m->dim, m->eps, scratch);
  return status ? status : ops->matmul(e->backend, &m->head, &logits, 1, scratch, n);
}

static int head(ds4_engine *e, const float *x, uint32_t n, float *scratch, float *logits) {
  const v4 *m = e->model;
  return mixed_head(e, &m->head_mix, m->norm, x, n, scratch, logits);
}

static int draft_head(ds4_engine *e, const float *x, uint32_t n, float *scratch, float *logits) {
  const v4 *m = e->model;
  return mixed_head(e, &m->mtp_mix, m->mtp_norm, x, n, scratch, logits);
}

const ds4_arch ds4_deepseek_v4 = {
    .name = "deepseek_v4", .setup = v4_setup, .bind = v4_bind, .forward = forward, .head = head, .draft_head = draft_head};
