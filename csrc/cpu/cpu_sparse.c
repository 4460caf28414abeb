/* Backend "cpu": attention over chosen and compressed rows, and hyper-connections. Kernels: sparse.inc.h. */
#include "cpu.h"

#include "token.h"

/* ---- token by token --------------------------------------------------------------------------------------------------------------------- */

typedef struct per_token {
  ds4_backend *b;
  void (*work)(const struct per_token *c, uint32_t token);
  uint32_t n, step; /* step: tokens of an item */
  float *x;
  const float *y, *m, *table;
  float *out;
  const uint32_t *row;
  uint32_t heads, width, tail, k, streams, iterations;
  float sign, eps;
} per_token;

static void token_item(void *ctx, uint32_t item, uint32_t thread) {
  const per_token *c = ctx;
  (void)thread;
  for (uint32_t t = item * c->step; t < c->n && t < (item + 1) * c->step; t++) c->work(c, t);
}

/* `cost`: numbers that one token takes. */
static int each_token(per_token *c, uint64_t cost) {
  c->step = cost > 16384 ? 1 : (uint32_t)(16384 / (cost ? cost : 1));
  return ds4_cpu_run(c->b, (c->n + c->step - 1) / c->step, token_item, c);
}

static void add_token(const per_token *c, uint32_t t) {
  float *x = c->x + (uint64_t)t * c->width;
  const float *y = c->table + (uint64_t)c->row[t] * c->width;
  for (uint32_t k = 0; k < c->width; k++) x[k] += y[k];
}

int ds4_cpu_add_rows(ds4_backend *b, float *x, const float *table, const uint32_t *row, uint32_t n, uint32_t width) {
  per_token c = {.b = b, .work = add_token, .n = n, .x = x, .table = table, .row = row, .width = width};
  return each_token(&c, width);
}

static void rope_token(const per_token *c, uint32_t t) {
  const float *cs = c->table + (uint64_t)c->row[t] * c->tail;
  ds4_token_rope_tail(c->x + (uint64_t)t * c->heads * c->width, c->heads, c->width, c->tail, cs, c->sign);
}

int ds4_cpu_rope_tail(ds4_backend *b, float *x, const uint32_t *pos, uint32_t n, uint32_t heads, uint32_t width, uint32_t tail,
                      const float *table, bool inverse) {
  per_token c = {.b = b, .work = rope_token, .n = n, .x = x, .table = table, .row = pos, .heads = heads, .width = width, .tail = tail};
  c.sign = inverse ? -1.0f : 1.0f;
  return each_token(&c, (uint64_t)heads * tail);
}

static void fp8_token(const per_token *c, uint32_t t) { ds4_token_round_fp8(c->x + (uint64_t)t * c->width, c->width, c->tail); }

int ds4_cpu_round_fp8(ds4_backend *b, float *x, uint32_t n, uint32_t width, uint32_t tail) {
  per_token c = {.b = b, .work = fp8_token, .n = n, .x = x, .width = width, .tail = tail};
  return each_token(&c, 4ull * width);
}

static void fp4_token(const per_token *c, uint32_t t) { ds4_token_round_fp4(c->x + (uint64_t)t * c->width, c->width); }

int ds4_cpu_round_fp4(ds4_backend *b, float *x, uint32_t n, uint32_t width) {
  per_token c = {.b = b, .work = fp4_token, .n = n, .x = x, .width = width};
  return each_token(&c, 8ull * width);
}

static void weights_token(const per_token *c, uint32_t t) {
  ds4_token_mix_weights(c->x + (uint64_t)t * c->k, c->m, c->table, c->k, c->streams, c->iterations, c->eps);
}

int ds4_cpu_mix_weights(ds4_backend *b, float *m, const float *scale, const float *base, uint32_t n, uint32_t k, uint32_t streams,
                        uint32_t iterations, float eps) {
  per_token c = {.b = b, .work = weights_token, .n = n, .x = m, .m = scale, .table = base, .k = k, .streams = streams};
  c.iterations = iterations, c.eps = eps;
  return each_token(&c, 64ull * k);
}

static void in_token(const per_token *c, uint32_t t) {
  c->b->k->mix_in(c->y + (uint64_t)t * c->streams * c->width, c->m + (uint64_t)t * c->k, c->streams, c->width,
                  c->out + (uint64_t)t * c->width);
}

int ds4_cpu_mix_in(ds4_backend *b, const float *h, const float *m, uint32_t n, uint32_t k, uint32_t streams, uint32_t width, float *out) {
  per_token c = {.b = b, .work = in_token, .n = n, .y = h, .m = m, .k = k, .streams = streams, .width = width, .out = out};
  return each_token(&c, (uint64_t)streams * width);
}

static void out_token(const per_token *c, uint32_t t) {
  c->b->k->mix_out(c->x + (uint64_t)t * c->streams * c->width, c->y + (uint64_t)t * c->width, c->m + (uint64_t)t * c->k, c->streams,
                   c->width);
}

int ds4_cpu_mix_out(ds4_backend *b, float *h, const float *y, const float *m, uint32_t n, uint32_t streams, uint32_t width) {
  per_token c = {.b = b, .work = out_token, .n = n, .x = h, .y = y, .m = m, .streams = streams, .width = width};
  c.k = (2 + streams) * streams;
  return each_token(&c, (uint64_t)streams * width);
}

/* ---- compressor --------------------------------------------------------------------------------------------------------------------------- */

typedef struct compressing {
  ds4_backend *b;
  const ds4_compress *c;
} compressing;

static void compress_item(void *ctx, uint32_t item, uint32_t thread) {
  const compressing *w = ctx;
  (void)thread;
  w->b->k->compress(w->c, item);
}

int ds4_cpu_compress(ds4_backend *b, const ds4_compress *c) {
  compressing w = {b, c};
  return ds4_cpu_run(b, c->n, compress_item, &w);
}

/* ---- indexer -------------------------------------------------------------------------------------------------------------------------------- */

#define PICK_TOKENS 8u         /* tokens that share one conversion of keys */
#define PICK_ROWS 512u         /* rows of an item */
#define PICK_SCORES (8u << 20) /* floats of scores in memory at once */

typedef struct picking {
  ds4_backend *b;
  const ds4_pick *p;
  uint32_t first, n, tiles, pieces, most; /* tokens of this pass; groups of tokens; pieces of rows; rows of a token's scores */
} picking;

static void score_item(void *ctx, uint32_t item, uint32_t thread) {
  const picking *w = ctx;
  uint32_t from = w->first + item / w->pieces * PICK_TOKENS, end = ds4_min_u32(from + PICK_TOKENS, w->first + w->n);
  uint32_t row = item % w->pieces * PICK_ROWS;
  while (from < end) { /* tokens of one segment */
    uint32_t to = from + 1, segment = w->p->batch->segment[from];
    while (to < end && w->p->batch->segment[to] == segment) to++;
    w->b->k->score(w->p, from, to, row, row + PICK_ROWS, w->b->partial + (uint64_t)(from - w->first) * w->most, w->most,
                   w->b->scratch[thread]);
    from = to;
  }
}

static void top_item(void *ctx, uint32_t item, uint32_t thread) {
  const picking *w = ctx;
  const ds4_pick *p = w->p;
  uint32_t t = w->first + item, *list = p->list + (uint64_t)t * p->list_width;
  (void)thread;
  p->count[t] = ds4_min_u32(p->rows[t], p->keep);
  if (p->rows[t] > p->keep)
    ds4_top_rows(w->b->partial + (uint64_t)item * w->most, p->rows[t], p->keep, list);
  else
    for (uint32_t r = 0; r < p->count[t]; r++) list[r] = r;
}

int ds4_cpu_pick(ds4_backend *b, const ds4_pick *p) {
  picking w = {.b = b, .p = p};
  uint32_t most = 0, n = p->batch->n;
  for (uint32_t t = 0; t < n; t++) most = ds4_max_u32(most, p->rows[t]);
  w.most = (most + DS4_KEY_BLOCK - 1) / DS4_KEY_BLOCK * DS4_KEY_BLOCK;
  bool scored = most > p->keep;
  uint32_t step = scored ? ds4_max_u32(PICK_TOKENS, PICK_SCORES / w.most) : n;
  if (scored && !ds4_cpu_memory(b, ds4_score_scratch(p), (uint64_t)ds4_min_u32(step, n) * w.most)) return DS4_ENOMEM;
  int status = DS4_OK;
  for (; !status && w.first < n; w.first += step) {
    w.n = ds4_min_u32(step, n - w.first);
    w.tiles = (w.n + PICK_TOKENS - 1) / PICK_TOKENS;
    w.pieces = (w.most + PICK_ROWS - 1) / PICK_ROWS;
    if (scored) status = ds4_cpu_run(b, w.tiles * w.pieces, score_item, &w);
    if (!status) status = ds4_cpu_run(b, w.n, top_item, &w);
  }
  return status;
}

/* ---- attention ---------------------------------------------------------------------------------------------------------------------------- */

typedef struct attending {
  ds4_backend *b;
  const ds4_attend_sparse *a;
  uint32_t groups; /* of 16 heads */
} attending;

static void attend_item(void *ctx, uint32_t item, uint32_t thread) {
  const attending *w = ctx;
  w->b->k->attend_sparse(w->a, item / w->groups, item % w->groups * DS4_LANES, w->b->scratch[thread]);
}

int ds4_cpu_attend_sparse(ds4_backend *b, const ds4_attend_sparse *a) {
  attending w = {.b = b, .a = a, .groups = (a->n_heads + DS4_LANES - 1) / DS4_LANES};
  if (!ds4_cpu_memory(b, ds4_sparse_scratch(a), 0)) return DS4_ENOMEM;
  return ds4_cpu_run(b, a->batch->n * w.groups, attend_item, &w);
}
