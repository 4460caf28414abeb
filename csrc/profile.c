/* Where time goes: while a profile runs, a table of ops stands before the backend's own and adds up calls, nanoseconds, bytes and multiply-adds.
 *
 *   time from the first call to the end of the last one = ops + between ops + session + between calls
 *
 *   between ops      inside rounds: the architecture's own code, polls, logits handed out
 *   session          inside eval, sync and refresh, outside rounds: checks, pages, tables, the wait for a turn
 *   between calls    Python, sampling, whatever the program does
 *
 * Nothing here changes an argument or a result, so it never changes a bit. Ops run in the thread that computes the round: `current` is its
 * profile for as long as the round lasts. A backend that queues its ops is waited for after each one, or their time would not be theirs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "formats.h"
#include "internal.h"

/* clang-format off */
#define OPS(X)                                                                                                                             \
  X(embed) X(rms_norm) X(matmul) X(rope) X(rows_write) X(rows_read) X(attend) X(glu) X(add) X(scale) X(clear) X(gather) X(scatter_add)    \
  X(add_rows) X(rope_tail) X(compress) X(pick) X(attend_sparse) X(round_fp8) X(round_fp4) X(mix_weights) X(mix_in) X(mix_out)

/* clang-format on */
#define NUMBER(op) OP_##op,
enum { OPS(NUMBER) BETWEEN_OPS, SESSION, BETWEEN_CALLS, OTHERS };
#define NAME(op) #op,
static const char *const names[] = {OPS(NAME) "between ops", "session", "between calls", "others"};

#define MAX_COUNTERS 256u

/* What an op reads and computes. `kinds`: a bit for each weight format, or for each KV type. */
typedef struct cost {
  uint64_t kinds, bytes, macs, rows;
} cost;

typedef struct counter {
  uint32_t op, many;
  uint64_t calls, ns;
  cost sum;
} counter;

typedef struct known { /* a matrix of the engine */
  const ds4_weight *weight;
  int32_t format;
  uint64_t rows, cols, bytes;
} known;

struct ds4_profile {
  const ds4_ops *ops; /* the backend's */
  known *weights;     /* by address */
  uint32_t n_weights, n_counters, many;
  bool report; /* to stderr, when the engine ends */
  uint64_t in_ops, in_rounds, round_start, call_start, call_end;
  counter counters[MAX_COUNTERS];
};

static _Thread_local ds4_profile *current;

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static counter *find(ds4_profile *p, uint32_t op, uint64_t kinds) {
  for (uint32_t i = 0; i < p->n_counters; i++)
    if (p->counters[i].op == op && p->counters[i].many == p->many && p->counters[i].sum.kinds == kinds) return &p->counters[i];
  if (p->n_counters == MAX_COUNTERS) return &p->counters[MAX_COUNTERS - 1];
  counter *c = &p->counters[p->n_counters++];
  *c = (counter){.op = p->n_counters == MAX_COUNTERS ? OTHERS : op, .many = p->many, .sum.kinds = kinds};
  return c;
}

static void add(ds4_profile *p, uint32_t op, cost c, uint64_t ns) {
  counter *to = find(p, op, c.kinds);
  to->calls++;
  to->ns += ns;
  to->sum.bytes += c.bytes;
  to->sum.macs += c.macs;
  to->sum.rows += c.rows;
}

/* ---- ops ----------------------------------------------------------------------------------------------------------------------------- */

#define TIMED(op, what, ...)                                                                                                               \
  ds4_profile *p = current;                                                                                                                \
  uint64_t start = now_ns();                                                                                                               \
  int status = p->ops->__VA_ARGS__;                                                                                                        \
  if (!status) status = p->ops->wait(b);                                                                                                   \
  uint64_t ns = now_ns() - start;                                                                                                          \
  p->in_ops += ns;                                                                                                                         \
  add(p, OP_##op, what, ns);                                                                                                               \
  return status

#define NOTHING ((cost){.bytes = 0})

static uint64_t format_bit(int32_t format) { return 1ull << (format >= 256 ? format - 256 + 62 : format); }

static int by_address(const void *a, const void *b) {
  const known *x = a, *y = b;
  return x->weight < y->weight ? -1 : x->weight > y->weight;
}

static const known *find_weight(const ds4_profile *p, const ds4_weight *w) {
  known key = {.weight = w};
  return bsearch(&key, p->weights, p->n_weights, sizeof key, by_address);
}

/* `n` tokens by whole matrices, or `n` rows of one matrix. */
static cost weights_cost(const ds4_weight *const *w, uint32_t n_w, uint32_t n, bool whole) {
  cost c = {.bytes = 0};
  for (uint32_t i = 0; i < n_w; i++) {
    const known *k = find_weight(current, w[i]);
    if (!k) continue;
    c.kinds |= format_bit(k->format);
    c.bytes += whole ? k->bytes : k->bytes / k->rows * n;
    c.macs += whole ? k->rows * k->cols * n : 0;
  }
  return c;
}

/* Rows of some parts of a layer: `rows` are used, `from_memory` are different ones, each read once. */
static cost rows_cost(const ds4_layout *l, uint32_t part, uint32_t n_parts, uint64_t rows, uint64_t from_memory) {
  cost c = {.kinds = 1ull << l->part[part].type, .rows = rows};
  for (uint32_t i = part; i < part + n_parts; i++) c.bytes += from_memory * l->part[i].row_bytes;
  return c;
}

/* Rows that the tokens read, and how many different ones, segment by segment. */
static uint64_t spans(const ds4_batch *batch, const uint32_t *lo, const uint32_t *hi, uint64_t *different) {
  uint64_t rows = 0;
  *different = 0;
  for (uint32_t t = 0, end; t < batch->n; t = end) {
    uint32_t first = UINT32_MAX, last = 0;
    for (end = t; end < batch->n && batch->segment[end] == batch->segment[t]; end++) {
      if (hi[end] <= lo[end]) continue;
      rows += hi[end] - lo[end];
      first = ds4_min_u32(first, lo[end]);
      last = ds4_max_u32(last, hi[end]);
    }
    if (last > first) *different += last - first;
  }
  return rows;
}

static cost attend_cost(const ds4_attend *a) {
  uint64_t different, rows = spans(a->batch, a->lo, a->hi, &different);
  cost c = rows_cost(a->layout, 0, a->value_part + 1, rows, different);
  c.macs = rows * a->n_heads * (a->layout->part[0].width + a->layout->part[a->value_part].width);
  return c;
}

/* Far rows that come from a list count each time that they are read. */
static cost attend_sparse_cost(const ds4_attend_sparse *a) {
  uint64_t different, rows = spans(a->batch, a->lo, a->hi, &different), far = 0, far_different = 0;
  cost c = rows_cost(a->layout, 0, 1, rows, different);
  for (uint32_t t = 0; a->far_layout && t < a->batch->n; t++) {
    far += a->far_n[t];
    bool last = t + 1 == a->batch->n || a->batch->segment[t + 1] != a->batch->segment[t];
    far_different += a->list || last ? a->far_n[t] : 0;
  }
  if (far) c.bytes += rows_cost(a->far_layout, 0, 1, far, far_different).bytes;
  c.rows += far;
  c.macs = c.rows * a->n_heads * 2 * a->layout->part[0].width;
  return c;
}

static cost pick_cost(const ds4_pick *a) {
  uint64_t rows = 0, different = 0;
  for (uint32_t t = 0; t < a->batch->n; t++) {
    uint64_t read = a->rows[t] > a->keep ? a->rows[t] : 0;
    rows += read;
    if (t + 1 == a->batch->n || a->batch->segment[t + 1] != a->batch->segment[t]) different += read;
  }
  cost c = rows_cost(a->layout, a->part, 1, rows, different);
  c.macs = rows * a->heads * a->layout->part[a->part].width;
  return c;
}

static int op_embed(ds4_backend *b, const ds4_weight *w, const int32_t *ids, uint32_t n, float *out) {
  TIMED(embed, weights_cost(&w, 1, n, false), embed(b, w, ids, n, out));
}
static int op_rms_norm(ds4_backend *b, const float *x, const float *weight, uint32_t n, uint32_t width, float eps, float *out) {
  TIMED(rms_norm, NOTHING, rms_norm(b, x, weight, n, width, eps, out));
}
static int op_matmul(ds4_backend *b, const ds4_weight *const *w, float *const *out, uint32_t n_w, const float *x, uint32_t n) {
  TIMED(matmul, weights_cost(w, n_w, n, true), matmul(b, w, out, n_w, x, n));
}
static int op_rope(ds4_backend *b, float *x, const uint32_t *pos, uint32_t n, uint32_t heads, uint32_t width, const float *table,
                   uint32_t interleaved) {
  TIMED(rope, NOTHING, rope(b, x, pos, n, heads, width, table, interleaved));
}
static int op_rows_write(ds4_backend *b, const ds4_layout *l, uint32_t layer, uint32_t part, const ds4_view *views, const ds4_batch *batch,
                         const uint32_t *row, const float *x) {
  TIMED(rows_write, rows_cost(l, part, 1, batch->n, batch->n), rows_write(b, l, layer, part, views, batch, row, x));
}
static int op_rows_read(ds4_backend *b, const ds4_layout *l, uint32_t layer, uint32_t part, const ds4_view *view, uint32_t row, uint32_t n,
                        float *out) {
  TIMED(rows_read, rows_cost(l, part, 1, n, n), rows_read(b, l, layer, part, view, row, n, out));
}
static int op_attend(ds4_backend *b, const ds4_attend *a) { TIMED(attend, attend_cost(a), attend(b, a)); }
static int op_glu(ds4_backend *b, int kind, float limit, const float *gate, const float *up, uint64_t n, float *out) {
  TIMED(glu, NOTHING, glu(b, kind, limit, gate, up, n, out));
}
static int op_add(ds4_backend *b, float *x, const float *y, uint64_t n) { TIMED(add, NOTHING, add(b, x, y, n)); }
static int op_scale(ds4_backend *b, float *x, float factor, uint64_t n) { TIMED(scale, NOTHING, scale(b, x, factor, n)); }
static int op_clear(ds4_backend *b, float *x, uint64_t n) { TIMED(clear, NOTHING, clear(b, x, n)); }
static int op_gather(ds4_backend *b, const float *x, const uint32_t *row, uint32_t n, uint32_t width, float *out) {
  TIMED(gather, NOTHING, gather(b, x, row, n, width, out));
}
static int op_scatter_add(ds4_backend *b, const float *x, const uint32_t *row, const float *weight, uint32_t n, uint32_t width,
                          float *out) {
  TIMED(scatter_add, NOTHING, scatter_add(b, x, row, weight, n, width, out));
}
static int op_add_rows(ds4_backend *b, float *x, const float *table, const uint32_t *row, uint32_t n, uint32_t width) {
  TIMED(add_rows, NOTHING, add_rows(b, x, table, row, n, width));
}
static int op_rope_tail(ds4_backend *b, float *x, const uint32_t *pos, uint32_t n, uint32_t heads, uint32_t width, uint32_t tail,
                        const float *table, bool inverse) {
  TIMED(rope_tail, NOTHING, rope_tail(b, x, pos, n, heads, width, tail, table, inverse));
}
static int op_compress(ds4_backend *b, const ds4_compress *c) {
  uint64_t rows = (uint64_t)c->n * c->ratio * (1 + c->overlap);
  TIMED(compress, rows_cost(c->layout, c->part, 2, rows, rows), compress(b, c));
}
static int op_pick(ds4_backend *b, const ds4_pick *a) { TIMED(pick, pick_cost(a), pick(b, a)); }
static int op_attend_sparse(ds4_backend *b, const ds4_attend_sparse *a) {
  TIMED(attend_sparse, attend_sparse_cost(a), attend_sparse(b, a));
}
static int op_round_fp8(ds4_backend *b, float *x, uint32_t n, uint32_t width, uint32_t tail) {
  TIMED(round_fp8, NOTHING, round_fp8(b, x, n, width, tail));
}
static int op_round_fp4(ds4_backend *b, float *x, uint32_t n, uint32_t width) { TIMED(round_fp4, NOTHING, round_fp4(b, x, n, width)); }
static int op_mix_weights(ds4_backend *b, float *m, const float *scale, const float *base, uint32_t n, uint32_t k, uint32_t streams,
                          uint32_t iterations, float eps) {
  TIMED(mix_weights, NOTHING, mix_weights(b, m, scale, base, n, k, streams, iterations, eps));
}
static int op_mix_in(ds4_backend *b, const float *h, const float *m, uint32_t n, uint32_t k, uint32_t streams, uint32_t width, float *out) {
  TIMED(mix_in, NOTHING, mix_in(b, h, m, n, k, streams, width, out));
}
static int op_mix_out(ds4_backend *b, float *h, const float *y, const float *m, uint32_t n, uint32_t streams, uint32_t width) {
  TIMED(mix_out, NOTHING, mix_out(b, h, y, m, n, streams, width));
}

/* The backend's own table with the ops above in front. An op that is not among them runs as it is; its time is "between ops". It is the
 * engine's and made once: a save that copies pages may hold it while a profile stops. */
static void table_make(ds4_engine *e) {
  e->timed = *e->ops;
#define IN_FRONT(op) e->timed.op = op_##op;
  OPS(IN_FRONT)
}

/* ---- rounds and calls -------------------------------------------------------------------------------------------------------------------- */

void ds4_profile_round(ds4_profile *p, uint64_t tokens) {
  p->many = tokens > 1;
  p->in_ops = 0;
  p->round_start = now_ns();
  add(p, BETWEEN_OPS, (cost){.rows = tokens}, 0);
  current = p;
}

void ds4_profile_round_end(ds4_profile *p) {
  uint64_t ns = now_ns() - p->round_start;
  current = NULL;
  find(p, BETWEEN_OPS, 0)->ns += ns - p->in_ops;
  p->in_rounds += ns;
}

/* Calls that overlap count as one: the second one waits for its turn most of the time. */
void ds4_profile_call(ds4_profile *p) {
  p->call_start = now_ns();
  p->in_rounds = 0;
  if (p->call_end) add(p, BETWEEN_CALLS, NOTHING, p->call_start - p->call_end);
}

void ds4_profile_call_end(ds4_profile *p) {
  p->call_end = now_ns();
  add(p, SESSION, NOTHING, p->call_end - p->call_start - p->in_rounds);
}

/* ---- starting, reading, stopping ------------------------------------------------------------------------------------------------------------ */

static int start(ds4_engine *e, ds4_error *err) {
  ds4_profile *p = e->profile;
  if (!p) {
    p = ds4_alloc(e, sizeof *p);
    known *weights = p ? ds4_alloc(e, e->n_tensors * sizeof *weights) : NULL;
    if (!p || !weights) {
      free(p);
      free(weights);
      return ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for a profile; nothing has changed");
    }
    p->ops = e->ops;
    p->weights = weights;
    for (uint32_t i = 0; i < e->n_tensors; i++) {
      const ds4_tensor *t = &e->tensors[i];
      if (!t->weight) continue;
      uint64_t bytes = p->ops->weight_bytes(t->weight);
      if (!bytes && !ds4_format_bytes(t->format, t->rows, t->cols, &bytes, NULL)) bytes += ds4_scale_bytes(t->format, t->rows, t->cols);
      weights[p->n_weights++] = (known){.weight = t->weight, .format = t->format, .rows = t->rows, .cols = t->cols, .bytes = bytes};
    }
    qsort(weights, p->n_weights, sizeof *weights, by_address);
    e->profile = p;
    e->ops = &e->timed;
  }
  p->n_counters = 0;
  p->call_end = 0;
  return DS4_OK;
}

static void stop(ds4_engine *e) {
  if (!e->profile) return;
  e->ops = e->profile->ops;
  free(e->profile->weights);
  free(e->profile);
  e->profile = NULL;
}

/* "Q4_K+Q6_K": one product may be of several matrices. */
static void kinds_text(const counter *c, char *out, size_t size) {
  static const char *const types[] = {"f32", "f16", "q8_0", "fp8", "fp4"};
  bool weights = c->op == OP_embed || c->op == OP_matmul;
  size_t at = 0;
  *out = 0;
  for (int32_t i = 0; i < 64; i++) {
    if (!(c->sum.kinds >> i & 1u)) continue;
    const ds4_format_info *f = weights ? ds4_format_find(i >= 62 ? i - 62 + 256 : i) : NULL;
    const char *name = weights ? (f ? f->name : "?") : (size_t)i < sizeof types / sizeof *types ? types[i] : "?";
    at += (size_t)snprintf(out + at, at < size ? size - at : 0, "%s%s", at ? "+" : "", name);
  }
}

static ds4_profile_entry entry_of(const counter *c) {
  ds4_profile_entry out = {.many = c->many, .calls = c->calls, .ns = c->ns};
  snprintf(out.op, sizeof out.op, "%s", names[c->op]);
  kinds_text(c, out.format, sizeof out.format);
  out.bytes = c->sum.bytes, out.macs = c->sum.macs, out.rows = c->sum.rows;
  return out;
}

int ds4_engine_profile(ds4_engine *e, int32_t what, ds4_profile_entry *out, uint32_t cap, uint32_t *n, ds4_error *err) {
  *n = 0;
  int status = ds4_enter(e, err);
  if (status) return status;
  if (what < DS4_PROFILE_READ || what > DS4_PROFILE_STOP)
    status = ds4_fail(err, DS4_EINVAL, what, 0, "a profile is read, started or stopped, not %d", what);
  else if (e->phase != DS4_READY)
    status = ds4_fail(err, DS4_EINVAL, 0, 0, "the engine is not ready: call ds4_engine_ready before its profile");
  else if (e->callers)
    status = ds4_fail(err, DS4_EBUSY, 0, 0, "a call computes on this engine; ask for its profile when it has returned");
  if (!status && e->profile) {
    *n = e->profile->n_counters;
    for (uint32_t i = 0; i < *n && i < cap; i++) out[i] = entry_of(&e->profile->counters[i]);
  }
  if (!status && what == DS4_PROFILE_START) status = start(e, err);
  if (!status && what == DS4_PROFILE_STOP) stop(e);
  ds4_leave(e);
  return status;
}

/* ---- DS4_PROFILE=1 -------------------------------------------------------------------------------------------------------------------------- */

void ds4_profile_ready(ds4_engine *e) {
  table_make(e);
  const char *wanted = getenv("DS4_PROFILE");
  if (!wanted || !*wanted || !strcmp(wanted, "0")) return;
  if (start(e, NULL)) return; /* without memory for it the engine still runs */
  e->profile->report = true;
}

static int by_time(const void *a, const void *b) {
  const counter *x = a, *y = b;
  return x->ns < y->ns ? 1 : x->ns > y->ns ? -1 : 0;
}

/* A rate, or nothing where there is nothing to divide. */
static void print_rate(uint64_t amount, uint64_t ns) {
  if (amount && ns)
    fprintf(stderr, " %8.2f", (double)amount / (double)ns);
  else
    fprintf(stderr, " %8s", "");
}

/* One of the two tables: rounds of one token, or of several. */
static void report(const ds4_profile *p, uint32_t many) {
  uint64_t all = 0, tokens = 0;
  for (uint32_t i = 0; i < p->n_counters; i++) {
    if (p->counters[i].many != many) continue;
    all += p->counters[i].ns;
    if (p->counters[i].op == BETWEEN_OPS) tokens += p->counters[i].sum.rows;
  }
  if (!tokens) return;
  fprintf(stderr, "\nds4 profile: rounds of %s, %llu tokens, %.1f ms\n", many ? "several tokens" : "one token", (unsigned long long)tokens,
          (double)all / 1e6);
  fprintf(stderr, "%-14s %-12s %9s %10s %6s %10s %8s %8s\n", "op", "format", "calls", "ms", "%", "us/token", "GB/s", "GMAC/s");
  for (uint32_t i = 0; i < p->n_counters; i++) {
    if (p->counters[i].many != many) continue;
    ds4_profile_entry g = entry_of(&p->counters[i]);
    fprintf(stderr, "%-14s %-12s %9llu %10.2f %6.1f %10.2f", g.op, g.format, (unsigned long long)g.calls, (double)g.ns / 1e6,
            100.0 * (double)g.ns / (double)(all ? all : 1), (double)g.ns / 1e3 / (double)tokens);
    print_rate(g.bytes, g.ns);
    print_rate(g.macs, g.ns);
    fprintf(stderr, "\n");
  }
}

void ds4_profile_free(ds4_engine *e) {
  if (e->profile && e->profile->report) {
    qsort(e->profile->counters, e->profile->n_counters, sizeof *e->profile->counters, by_time);
    report(e->profile, 1);
    report(e->profile, 0);
  }
  stop(e);
}
