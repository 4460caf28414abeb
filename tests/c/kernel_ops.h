/* What tests/c/kernels.c runs: the tables of kernels, the ops with their inputs, and each op's definition in double precision. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "cpu/kernels.h"
#include "formats.h"
#include "internal.h"

static const char *const isas[] = {"scalar", "avx2", "avx512", "neon-plain", "neon-dot"};

typedef struct table {
  char isa[16];
  const ds4_ops *ops;
  ds4_backend *b;
} table;
static table tables[8]; /* the first is backend ref */
static int n_tables;

static void stop(const char *what, const char *why) {
  fprintf(stderr, "%s: %s\n", what, why);
  exit(1);
}

static void *get(uint64_t bytes) {
  void *p = calloc(1, bytes + 64);
  if (!p) stop("kernels", "no memory");
  return p;
}

static void open_tables(int32_t threads) {
  ds4_error err;
  tables[n_tables++] = (table){"ref", &ds4_ref_ops, NULL};
  for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
    table t = {.ops = &ds4_cpu_ops};
    setenv("DS4_ISA", isas[i], 1);
    if (t.ops->open(threads, &t.b, &err)) continue; /* not here */
    if (strcmp(t.ops->isa(t.b), isas[i])) stop(isas[i], "DS4_ISA has given other kernels");
    t.ops->close(t.b);
    snprintf(t.isa, sizeof t.isa, "%s", isas[i]);
    tables[n_tables++] = t;
  }
  if (n_tables < 2) stop("kernels", "not one instruction set runs here");
  printf("kernels that run here:");
  for (int i = 0; i < n_tables; i++) {
    setenv("DS4_ISA", tables[i].isa, 1);
    if (tables[i].ops->open(threads, &tables[i].b, &err)) stop(tables[i].isa, err.text);
    printf(" %s", tables[i].isa);
  }
  printf("\n");
}

/* ---- cases ----------------------------------------------------------------------------------------------------------------------------- */

/* What the inputs hold besides random numbers. EXTREME: largest codes against largest activations, where narrow sums would overflow. */
enum inputs { PLAIN, EXTREME, ODD };

typedef struct op_case op_case;
typedef struct op {
  const char *name;
  void (*make)(op_case *c);                                 /* the inputs, the same for every table */
  void (*prepare)(op_case *c, const table *t);              /* weights, rows: what is not timed */
  int (*run)(const op_case *c, const table *t, float *out); /* [n_out] */
  void (*done)(op_case *c, const table *t);
  void (*plain)(const op_case *c, bool single, double *out); /* the definition in double; `single`: each result rounded to float32 */
} op;

struct op_case {
  const op *op;
  enum inputs inputs;
  int32_t type; /* weight format, KV type, kind of GLU */
  bool mapped;
  uint32_t n, rows, cols;                                             /* tokens; a matrix, or `cols` a width */
  uint32_t heads, group, page_rows, segments, at, window, value_part; /* attention: tokens of each segment from position `at` on */
  uint32_t far_type, far_n, keep, ratio, overlap, streams, tail;
  uint64_t n_out;
  double macs, bytes; /* work of one run */
  /* made */
  float *x, *y, *z;
  uint8_t *data, *scales;
  ds4_weight *w[2];
  ds4_layout layout[2];
  ds4_view views[2][3];
  uint32_t *segment, *pos, *lo, *hi, *count, *list;
  ds4_batch batch;
};

static uint64_t random_state;
static uint32_t next(void) {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return (uint32_t)(random_state >> 16);
}
static float uniform(void) { return (float)((int32_t)next()) * 0x1p-31f; }

static float *floats(uint64_t n, float size) {
  float *x = get(n * sizeof *x);
  for (uint64_t i = 0; i < n; i++) x[i] = size * uniform();
  return x;
}

/* Scatters numbers that arithmetic treats in its own way. */
static void make_odd(float *x, uint64_t n) {
  static const float odd[] = {NAN, INFINITY, -INFINITY, -0.0f, 0x1p-140f, -0x1p-149f, 1e30f, 0x1p-126f};
  for (uint64_t i = 0; i < 8; i++) x[(i * 101 + 5) % n] = odd[i];
}

static double rounded(bool single, double x) { return single ? (double)(float)x : x; }
static double plain_exp(bool single, double x) {
  return rounded(single, x < -87.0 ? 0.0 : exp(x > 88.0 ? 88.0 : x));
} /* the ends of ds4_exp */

/* ---- matrix products --------------------------------------------------------------------------------------------------------------------- */

static const struct format {
  int32_t format;
  const char *name;
  uint32_t f16_at, f16_n; /* where a block has its f16 scale and minimum */
} formats[] = {
    {DS4_F32, "F32", 0, 0},     {DS4_F16, "F16", 0, 0},         {DS4_BF16, "BF16", 0, 0},     {DS4_Q8_0, "Q8_0", 0, 1},
    {DS4_Q4_0, "Q4_0", 0, 1},   {DS4_Q4_1, "Q4_1", 0, 2},       {DS4_Q5_0, "Q5_0", 0, 1},     {DS4_Q5_1, "Q5_1", 0, 2},
    {DS4_Q2_K, "Q2_K", 80, 2},  {DS4_Q3_K, "Q3_K", 108, 1},     {DS4_Q4_K, "Q4_K", 0, 2},     {DS4_Q5_K, "Q5_K", 0, 2},
    {DS4_Q6_K, "Q6_K", 208, 1}, {DS4_IQ2_XXS, "IQ2_XXS", 0, 1}, {DS4_IQ4_NL, "IQ4_NL", 0, 1}, {DS4_MXFP4, "MXFP4", 0, 0},
    {DS4_FP8, "FP8", 0, 0},     {DS4_FP4, "FP4", 0, 0},
};
#define N_FORMATS (sizeof formats / sizeof *formats)

static const struct format *format_of(int32_t format) {
  for (size_t i = 0; i < N_FORMATS; i++)
    if (formats[i].format == format) return &formats[i];
  return NULL;
}

static uint64_t row_bytes(const op_case *c) {
  const ds4_format_info *f = ds4_format_find(c->type);
  return c->cols / f->block * f->bytes;
}

/* Every bit pattern that a finite weight can have; EXTREME: whole rows of one byte. */
static void make_weights(op_case *c) {
  static const uint8_t fill[4] = {0xff, 0x00, 0x7f, 0x80};
  const struct format *f = format_of(c->type);
  const ds4_format_info *info = ds4_format_find(c->type);
  const uint64_t bytes = row_bytes(c);
  c->data = get(c->rows * bytes);
  for (uint64_t r = 0; r < c->rows; r++)
    for (uint64_t i = 0; i < bytes; i++) {
      uint8_t *p = c->data + r * bytes + i;
      *p = c->inputs == EXTREME && r % 5 < 4 ? fill[r % 5] : (uint8_t)next();
      if (c->type == DS4_FP8 && (*p & 127) == DS4_FP8_NAN) *p ^= 1;
      if (c->type == DS4_MXFP4 && i % info->bytes == 0) *p = (uint8_t)(115 + next() % 10);
    }
  for (uint64_t i = 0; i < c->rows * c->cols; i++) {
    float x = uniform();
    uint16_t f16 = i % 37 == 3 ? (uint16_t)(next() & 0x83ff) : ds4_to_f16(x), bf16 = ds4_to_bf16(x); /* some of them subnormal */
    if (c->type == DS4_F32) memcpy(c->data + 4 * i, &x, 4);
    if (c->type == DS4_F16) memcpy(c->data + 2 * i, &f16, 2);
    if (c->type == DS4_BF16) memcpy(c->data + 2 * i, &bf16, 2);
  }
  for (uint64_t at = 0; at < c->rows * bytes; at += info->bytes)
    for (uint32_t i = 0; i < f->f16_n; i++) {
      uint16_t half = ds4_to_f16(uniform() / 64);
      memcpy(c->data + at + f->f16_at + 2 * i, &half, 2);
    }
  uint64_t n_scales = ds4_scale_bytes(c->type, c->rows, c->cols);
  c->scales = n_scales ? get(n_scales) : NULL;
  for (uint64_t i = 0; i < n_scales; i++) c->scales[i] = (uint8_t)(118 + next() % 8);
}

static void matmul_make(op_case *c) {
  c->x = floats((uint64_t)c->n * c->cols, 1.0f);
  if (c->inputs == ODD) make_odd(c->x, (uint64_t)c->n * c->cols);
  for (uint64_t i = 0; c->inputs == EXTREME && i < (uint64_t)c->n * c->cols; i++) c->x[i] = i / c->cols % 2 ? -1.0f : 1.0f;
  make_weights(c);
  c->n_out = 2ull * c->n * c->rows;
  c->macs = (double)c->n * c->rows * c->cols * 2;
  c->bytes = (double)c->rows * (double)row_bytes(c) * 2;
}

/* The matrix twice, as gate and up: the items of a call count through both. */
static void matmul_prepare(op_case *c, const table *t) {
  ds4_error err;
  ds4_matrix m = {.format = c->type, .mapped = c->mapped, .rows = c->rows, .cols = c->cols, .nbytes = c->rows * row_bytes(c)};
  m.data = c->data, m.scales = c->scales;
  for (int i = 0; i < 2; i++)
    if (t->ops->weight_new(t->b, &m, &c->w[i], &err)) stop("weight", err.text);
}

static int matmul_run(const op_case *c, const table *t, float *out) {
  float *const to[2] = {out, out + (uint64_t)c->n * c->rows};
  return t->ops->matmul(t->b, (const ds4_weight *const *)c->w, to, 2, c->x, c->n);
}

static void matmul_done(op_case *c, const table *t) {
  for (int i = 0; i < 2; i++) t->ops->weight_free(t->b, c->w[i]);
}

/* The weights as numbers, and activations as the format takes them. */
static void matmul_plain(const op_case *c, bool single, double *out) {
  op_case own = *c;
  float *row = get(c->cols * sizeof *row);
  double *x = get((uint64_t)c->n * c->cols * sizeof *x);
  matmul_prepare(&own, &tables[0]);
  for (uint64_t i = 0; i < (uint64_t)c->n * c->cols; i++) x[i] = (double)c->x[i];
  for (uint64_t i = 0; ds4_shape_of(c->type).int8 && i < (uint64_t)c->n * c->cols; i += 32) {
    int8_t q[32];
    float d, sum;
    ds4_quant_block(c->x + i, 32, q, &d, &sum);
    for (int k = 0; k < 32; k++) x[i + k] = (double)d * q[k];
  }
  for (int32_t r = 0; r < (int32_t)c->rows; r++) {
    tables[0].ops->embed(tables[0].b, own.w[0], &r, 1, row);
    for (uint32_t t = 0; t < c->n; t++) {
      double sum = 0;
      for (uint32_t k = 0; k < c->cols; k++)
        sum = rounded(single, sum + rounded(single, rounded(single, x[(uint64_t)t * c->cols + k]) * (double)row[k]));
      out[(uint64_t)t * c->rows + r] = out[((uint64_t)c->n + t) * c->rows + r] = sum;
    }
  }
  matmul_done(&own, &tables[0]);
  free(row);
  free(x);
}

static void embed_make(op_case *c) {
  make_weights(c);
  c->n_out = (uint64_t)c->rows * c->cols;
  c->bytes = (double)c->rows * (double)row_bytes(c);
}
static int embed_run(const op_case *c, const table *t, float *out) {
  int status = DS4_OK;
  for (int32_t r = 0; !status && r < (int32_t)c->rows; r++) status = t->ops->embed(t->b, c->w[0], &r, 1, out + (uint64_t)r * c->cols);
  return status;
}

/* Quantised activations, seen through the identity: row k gives d * q[k]. */
static void quantize_make(op_case *c) {
  static const float size[] = {1.0f, 1e-30f, 0x1p-126f, 0x1p-133f, 1e30f, 0.0f};
  c->type = DS4_Q8_0;
  c->rows = c->cols;
  c->x = get((uint64_t)c->n * c->cols * sizeof *c->x);
  for (uint64_t i = 0; i < (uint64_t)c->n * c->cols; i++)
    c->x[i] = size[i / 32 % 6] * (i % 3 ? (float)(next() % 255) / 127.0f - 1.0f : uniform());
  if (c->inputs == ODD) make_odd(c->x, (uint64_t)c->n * c->cols);
  c->data = get(c->rows * row_bytes(c));
  for (uint64_t r = 0; r < c->rows; r++)
    for (uint64_t b = 0; b < c->cols / 32; b++) {
      uint8_t *p = c->data + r * row_bytes(c) + b * 34;
      const uint16_t one = 0x3c00;
      memcpy(p, &one, 2);
      if (r / 32 == b) p[2 + r % 32] = 1;
    }
  c->n_out = 2ull * c->n * c->rows;
  c->bytes = 4.0 * c->n * c->cols;
}

static const op matmul_op = {"matmul", matmul_make, matmul_prepare, matmul_run, matmul_done, matmul_plain};
static const op embed_op = {"embed", embed_make, matmul_prepare, embed_run, matmul_done, NULL};
static const op quantize_op = {"quantize", quantize_make, matmul_prepare, matmul_run, matmul_done, NULL};

/* ---- vectors ------------------------------------------------------------------------------------------------------------------------------ */

#define EPS 1e-5f

static void norm_make(op_case *c) {
  c->n_out = (uint64_t)c->n * c->cols;
  c->x = floats(c->n_out, 3.0f);
  c->y = c->type ? floats(c->cols, 2.0f) : NULL;
  if (c->inputs == ODD) make_odd(c->x, c->n_out);
  c->bytes = 4.0 * (double)c->n_out;
}
static int norm_run(const op_case *c, const table *t, float *out) { return t->ops->rms_norm(t->b, c->x, c->y, c->n, c->cols, EPS, out); }
static void norm_plain(const op_case *c, bool single, double *out) {
  for (uint32_t t = 0; t < c->n; t++) {
    const float *x = c->x + (uint64_t)t * c->cols;
    double sum = 0;
    for (uint32_t i = 0; i < c->cols; i++) sum = rounded(single, sum + rounded(single, (double)x[i] * (double)x[i]));
    double scale = rounded(single, 1.0 / rounded(single, sqrt(rounded(single, sum / c->cols + (double)EPS))));
    for (uint32_t i = 0; i < c->cols; i++)
      out[(uint64_t)t * c->cols + i] = rounded(single, rounded(single, (double)x[i] * scale) * (c->y ? (double)c->y[i] : 1.0));
  }
}

#define LIMIT 1.5f

static void glu_make(op_case *c) {
  c->n_out = c->cols;
  c->x = floats(c->cols, 4.0f);
  c->y = floats(c->cols, 4.0f);
  for (uint32_t i = 0; i < c->cols; i += 7) c->x[i] *= 30.0f; /* into both ends of exp */
  if (c->inputs == ODD) make_odd(c->x, c->cols), make_odd(c->y, (c->cols + 1) / 2);
  c->bytes = 8.0 * c->cols;
}
static int glu_run(const op_case *c, const table *t, float *out) { return t->ops->glu(t->b, c->type, LIMIT, c->x, c->y, c->n_out, out); }
static void glu_plain(const op_case *c, bool single, double *out) {
  for (uint32_t i = 0; i < c->cols; i++) {
    double g = (double)c->x[i], u = (double)c->y[i], most = (double)LIMIT;
    if (c->type == DS4_SILU_CLAMPED) g = g > most ? most : g, u = u > most ? most : u < -most ? -most : u;
    double y = c->type == DS4_GELU ? 1.5957691216057308 * (g + rounded(single, 0.044715 * rounded(single, g * g) * g)) : g;
    double e = plain_exp(single, rounded(single, -y));
    out[i] = rounded(single, rounded(single, g / rounded(single, 1.0 + e)) * u);
  }
}

static const op norm_op = {"rms_norm", norm_make, NULL, norm_run, NULL, norm_plain};
static const op glu_op = {"glu", glu_make, NULL, glu_run, NULL, glu_plain};

/* ---- rows ----------------------------------------------------------------------------------------------------------------------------------- */

static const char *const kv_names[] = {"f32", "f16", "q8_0", "fp8", "fp4"};

/* Pages for rows [from, to) of a stream and segment, all bytes NaN until rows are written. */
static void make_pages(op_case *c, int which, uint32_t segment, uint32_t from, uint32_t to) {
  const ds4_layout *l = &c->layout[which];
  ds4_view *v = &c->views[which][segment];
  v->first_page = from / l->page_rows;
  v->n_pages = (to + l->page_rows - 1) / l->page_rows - v->first_page;
  uint8_t **pages = get(v->n_pages * sizeof *pages);
  for (uint32_t i = 0; i < v->n_pages; i++) {
    pages[i] = get(l->page_bytes);
    memset(pages[i], 0xff, l->page_bytes);
  }
  v->pages = pages;
}

static void free_pages(op_case *c, const table *t) {
  (void)t;
  for (int which = 0; which < 2; which++)
    for (int s = 0; s < 3; s++) {
      ds4_view *v = &c->views[which][s];
      for (uint32_t i = 0; i < v->n_pages; i++) free(v->pages[i]);
      free((void *)v->pages);
      *v = (ds4_view){0};
    }
}

/* Writes rows [from, to) of one segment and layer 1 with numbers that are the same for every table. */
static void write_rows(op_case *c, const table *t, int which, uint32_t segment, uint32_t from, uint32_t to) {
  const ds4_layout *l = &c->layout[which];
  make_pages(c, which, segment, from, to);
  random_state = 77 + segment * 1000 + (uint64_t)which;
  for (uint32_t part = 0; part < l->n_parts; part++) {
    uint32_t width = l->part[part].heads * l->part[part].width;
    float *x = floats((uint64_t)(to - from) * width, part ? 2.0f : 1.0f);
    uint32_t *row = get((to - from) * sizeof *row), *seg = get((to - from) * sizeof *seg);
    for (uint32_t i = 0; i < to - from; i++) row[i] = from + i, seg[i] = segment;
    /* one key that is no number, one infinite value: only the tokens that read the row may see them */
    if (c->inputs == ODD && to - from > 1) x[(uint64_t)(to - from - 1 - part) * width + width / 2] = part ? INFINITY : NAN;
    ds4_batch batch = {.n = to - from, .n_segments = segment + 1, .segment = seg};
    if (t->ops->rows_write(t->b, l, 1, part, c->views[which], &batch, row, x)) stop("rows_write", "failed");
    free(x);
    free(row);
    free(seg);
  }
}

/* One head of rows [from, to) as numbers, [rows][width]. */
static float *read_rows(const op_case *c, int which, uint32_t part, uint32_t segment, uint32_t head, uint32_t from, uint32_t to) {
  const ds4_part *p = &c->layout[which].part[part];
  float *all = get((uint64_t)(to - from) * p->heads * p->width * sizeof *all), *out = get((uint64_t)(to - from) * p->width * sizeof *out);
  ds4_rows_read(NULL, &c->layout[which], 1, part, &c->views[which][segment], from, to - from, all);
  for (uint32_t r = 0; r < to - from; r++)
    memcpy(out + (uint64_t)r * p->width, all + ((uint64_t)r * p->heads + head) * p->width, p->width * sizeof *out);
  free(all);
  return out;
}

/* c->n tokens in each segment, from position `at` on, each seeing itself and what is before, or a window of that. */
static void make_batch(op_case *c) {
  uint32_t n = c->n * c->segments;
  c->segment = get(n * sizeof *c->segment);
  c->pos = get(n * sizeof *c->pos);
  c->lo = get(n * sizeof *c->lo);
  c->hi = get(n * sizeof *c->hi);
  for (uint32_t i = 0; i < n; i++) {
    c->segment[i] = i / c->n;
    c->pos[i] = c->at + i % c->n;
    c->hi[i] = c->pos[i] + 1;
    c->lo[i] = c->window && c->hi[i] > c->window ? c->hi[i] - c->window : 0;
  }
  c->batch = (ds4_batch){.n = n, .n_segments = c->segments, .pos = c->pos, .segment = c->segment};
}

static void make_layout(op_case *c, int which, uint32_t n_parts, const ds4_part *parts) {
  ds4_error err;
  c->layout[which] = (ds4_layout){.n_layers = 2, .page_rows = c->page_rows, .n_parts = n_parts};
  memcpy(c->layout[which].part, parts, n_parts * sizeof *parts);
  if (ds4_layout_init(&c->layout[which], &err)) stop("layout", err.text);
}

/* ---- attention --------------------------------------------------------------------------------------------------------------------------------- */

static void attend_make(op_case *c) {
  uint32_t values = c->value_part ? c->rows : c->cols, n = c->n * c->segments;
  const ds4_part parts[2] = {{.heads = c->heads, .width = c->cols, .across = 1, .type = (uint32_t)c->type},
                             {.heads = c->heads, .width = values, .type = (uint32_t)c->type}};
  make_layout(c, 0, 1 + c->value_part, parts);
  make_batch(c);
  if (c->n > 1) c->hi[0] = c->lo[0]; /* a token that reads nothing */
  c->x = floats((uint64_t)n * c->heads * c->group * c->cols, 8.0f);
  c->n_out = (uint64_t)n * c->heads * c->group * values;
  double rows = 0;
  for (uint32_t i = 0; i < n; i++) rows += c->hi[i] - c->lo[i];
  c->macs = rows * c->heads * c->group * (c->cols + values);
  c->bytes = (double)c->segments * (c->hi[c->n - 1] - c->lo[0]) * (double)c->layout[0].row_bytes;
}

static void attend_prepare(op_case *c, const table *t) {
  for (uint32_t s = 0; s < c->segments; s++) write_rows(c, t, 0, s, c->lo[0], c->at + c->n);
}

static ds4_attend attend_args(const op_case *c, float *out) {
  return (ds4_attend){.layout = &c->layout[0],
                      .views = c->views[0],
                      .batch = &c->batch,
                      .lo = c->lo,
                      .hi = c->hi,
                      .layer = 1,
                      .n_heads = c->heads * c->group,
                      .value_part = c->value_part,
                      .scale = 1.0f / sqrtf((float)c->cols),
                      .q = c->x,
                      .out = out};
}
static int attend_run(const op_case *c, const table *t, float *out) {
  ds4_attend a = attend_args(c, out);
  return t->ops->attend(t->b, &a);
}

/* Softmax of q . key over `n` keys, and of one more logit without a value when `sink` is given; added to out by `width` values. */
static void plain_softmax(bool single, const float *q, float scale, const float *key, uint32_t width, const float *val, uint32_t values,
                          uint32_t n, const float *sink, double *out) {
  double *p = get((n + 1) * sizeof *p), top = sink ? (double)*sink : -INFINITY, sum = 0;
  for (uint32_t r = 0; r < n; r++) {
    for (uint32_t i = 0; i < width; i++)
      p[r] = rounded(single, p[r] + rounded(single, rounded(single, (double)q[i] * (double)scale) * (double)key[(uint64_t)r * width + i]));
    top = p[r] > top ? p[r] : top;
  }
  for (uint32_t r = 0; r < n; r++) sum = rounded(single, sum + (p[r] = plain_exp(single, rounded(single, p[r] - top))));
  if (sink) sum = rounded(single, sum + plain_exp(single, (double)*sink - top));
  for (uint32_t i = 0; i < values; i++) {
    out[i] = 0;
    for (uint32_t r = 0; r < n; r++) out[i] = rounded(single, out[i] + rounded(single, p[r] * (double)val[(uint64_t)r * values + i]));
    if (n) out[i] = rounded(single, out[i] / sum);
  }
  free(p);
}

static void attend_plain(const op_case *c, bool single, double *out) {
  op_case own = *c;
  attend_prepare(&own, &tables[0]);
  ds4_attend a = attend_args(&own, NULL);
  uint32_t values = c->layout[0].part[c->value_part].width;
  for (uint32_t t = 0; t < c->batch.n; t++)
    for (uint32_t h = 0; h < a.n_heads; h++) {
      uint64_t at = (uint64_t)t * a.n_heads + h;
      float *key = read_rows(&own, 0, 0, c->segment[t], h / c->group, c->lo[t], c->hi[t]);
      float *val = read_rows(&own, 0, c->value_part, c->segment[t], h / c->group, c->lo[t], c->hi[t]);
      plain_softmax(single, c->x + at * c->cols, a.scale, key, c->cols, val, values, c->hi[t] - c->lo[t], NULL, out + at * values);
      free(key);
      free(val);
    }
  free_pages(&own, &tables[0]);
}

static const op attend_op = {"attend", attend_make, attend_prepare, attend_run, free_pages, attend_plain};

/* ---- compressed attention ------------------------------------------------------------------------------------------------------------------------ */

/* Near rows in a window, far rows all (keep 0) or every other one of them by a list. */
static void sparse_make(op_case *c) {
  c->page_rows = 64;
  const ds4_part near = {.heads = 1, .width = c->cols, .type = (uint32_t)c->type, .tail = c->type == DS4_KV_FP8 ? c->tail : 0};
  const ds4_part far = {.heads = 1, .width = c->cols, .type = c->far_type, .tail = c->far_type == DS4_KV_FP8 ? c->tail : 0};
  make_layout(c, 0, 1, &near);
  make_layout(c, 1, 1, &far);
  make_batch(c);
  uint32_t n = c->batch.n;
  c->count = get(n * sizeof *c->count);
  c->list = c->keep ? get((uint64_t)n * c->far_n * sizeof *c->list) : NULL;
  for (uint32_t i = 0; i < n; i++) {
    c->count[i] = c->far_n ? c->keep ? (c->far_n - i % 3 + 1) / 2 : c->far_n - i % 3 : 0;
    for (uint32_t k = 0; c->list && k < c->count[i]; k++) c->list[(uint64_t)i * c->far_n + k] = 2 * k;
  }
  c->x = floats((uint64_t)n * c->heads * c->cols, 8.0f);
  c->y = floats(c->heads, 3.0f);
  c->n_out = (uint64_t)n * c->heads * c->cols;
  double rows = 0;
  for (uint32_t i = 0; i < n; i++) rows += c->hi[i] - c->lo[i] + c->count[i];
  c->macs = rows * c->heads * c->cols * 2;
  c->bytes = rows * (double)c->layout[0].row_bytes;
}

static void sparse_prepare(op_case *c, const table *t) {
  attend_prepare(c, t);
  for (uint32_t s = 0; c->far_n && s < c->segments; s++) write_rows(c, t, 1, s, 0, c->far_n);
}

static ds4_attend_sparse sparse_args(const op_case *c, float *out) {
  return (ds4_attend_sparse){.layout = &c->layout[0],
                             .far_layout = c->far_n ? &c->layout[1] : NULL,
                             .views = c->views[0],
                             .far_views = c->views[1],
                             .batch = &c->batch,
                             .lo = c->lo,
                             .hi = c->hi,
                             .far_n = c->count,
                             .list = c->list,
                             .list_width = c->far_n,
                             .layer = 1,
                             .far_layer = 1,
                             .n_heads = c->heads,
                             .scale = 1.0f / sqrtf((float)c->cols),
                             .sink = c->y,
                             .q = c->x,
                             .out = out};
}
static int sparse_run(const op_case *c, const table *t, float *out) {
  ds4_attend_sparse a = sparse_args(c, out);
  return t->ops->attend_sparse(t->b, &a);
}

static void sparse_plain(const op_case *c, bool single, double *out) {
  op_case own = *c;
  sparse_prepare(&own, &tables[0]);
  ds4_attend_sparse a = sparse_args(&own, NULL);
  for (uint32_t t = 0; t < c->batch.n; t++) {
    uint32_t near = c->hi[t] - c->lo[t], n = near + c->count[t];
    float *rows = get((uint64_t)n * c->cols * sizeof *rows), *part = read_rows(&own, 0, 0, c->segment[t], 0, c->lo[t], c->hi[t]);
    memcpy(rows, part, (uint64_t)near * c->cols * sizeof *rows);
    free(part);
    for (uint32_t k = 0; k < c->count[t]; k++) {
      uint32_t row = c->list ? c->list[(uint64_t)t * c->far_n + k] : k;
      part = read_rows(&own, 1, 0, c->segment[t], 0, row, row + 1);
      memcpy(rows + (uint64_t)(near + k) * c->cols, part, c->cols * sizeof *rows);
      free(part);
    }
    for (uint32_t h = 0; h < c->heads; h++) {
      uint64_t at = ((uint64_t)t * c->heads + h) * c->cols;
      plain_softmax(single, c->x + at, a.scale, rows, c->cols, rows, c->cols, n, &c->y[h], out + at);
    }
    free(rows);
  }
  free_pages(&own, &tables[0]);
}

/* The indexer; out is the list of each token as numbers. */
static void pick_make(op_case *c) {
  c->page_rows = 64;
  const ds4_part part = {.heads = 1, .width = c->cols, .across = 1, .type = (uint32_t)c->type};
  make_layout(c, 0, 1, &part);
  make_batch(c);
  c->x = floats((uint64_t)c->batch.n * c->heads * c->cols, 2.0f);
  c->y = floats((uint64_t)c->batch.n * c->heads, 1.0f);
  c->n_out = (uint64_t)c->batch.n * (c->keep + 1);
  c->macs = 0;
  for (uint32_t i = 0; i < c->batch.n; i++) c->macs += (double)c->hi[i] * c->heads * c->cols;
  c->bytes = (double)c->segments * c->hi[c->n - 1] * (double)c->layout[0].row_bytes;
}
static int pick_run(const op_case *c, const table *t, float *out) {
  uint32_t *list = get((uint64_t)c->batch.n * c->keep * sizeof *list), *count = get(c->batch.n * sizeof *count);
  ds4_pick p = {.layout = &c->layout[0],
                .views = c->views[0],
                .batch = &c->batch,
                .layer = 1,
                .heads = c->heads,
                .keep = c->keep,
                .rows = c->hi,
                .q = c->x,
                .weight = c->y,
                .list = list,
                .list_width = c->keep,
                .count = count};
  int status = t->ops->pick(t->b, &p);
  for (uint32_t i = 0; i < c->batch.n; i++, out += c->keep + 1) {
    out[0] = (float)count[i];
    for (uint32_t k = 0; k < c->keep; k++) out[1 + k] = k < count[i] ? (float)list[(uint64_t)i * c->keep + k] : 0.0f;
  }
  free(list);
  free(count);
  return status;
}

static void compress_make(op_case *c) {
  uint32_t row = c->overlap ? 2 * c->cols : c->cols;
  c->page_rows = c->ratio < 64 ? 8 : 64;
  const ds4_part parts[2] = {{.heads = 1, .width = row, .type = DS4_KV_F32}, {.heads = 1, .width = row, .type = DS4_KV_F32}};
  make_layout(c, 0, 2, parts);
  c->at = (c->n - 1) * c->ratio;
  c->segment = get(c->n * c->segments * sizeof *c->segment);
  c->pos = get(c->n * c->segments * sizeof *c->pos);
  for (uint32_t i = 0; i < c->n * c->segments; i++) c->segment[i] = i / c->n, c->pos[i] = i % c->n * c->ratio;
  c->n_out = (uint64_t)c->n * c->segments * c->cols;
  c->bytes = (double)c->n_out * c->ratio * (c->overlap ? 16 : 8);
}
static void compress_prepare(op_case *c, const table *t) {
  for (uint32_t s = 0; s < c->segments; s++) write_rows(c, t, 0, s, 0, c->n * c->ratio);
}
static int compress_run(const op_case *c, const table *t, float *out) {
  ds4_compress a = {.layout = &c->layout[0],
                    .views = c->views[0],
                    .layer = 1,
                    .ratio = c->ratio,
                    .overlap = c->overlap,
                    .width = c->cols,
                    .n = c->n * c->segments,
                    .segment = c->segment,
                    .first = c->pos,
                    .out = out};
  return t->ops->compress(t->b, &a);
}
static void compress_plain(const op_case *c, bool single, double *out) {
  op_case own = *c;
  compress_prepare(&own, &tables[0]);
  uint32_t row = c->layout[0].part[0].width;
  for (uint32_t w = 0; w < c->n * c->segments; w++) {
    uint32_t first = c->pos[w], back = c->overlap && first ? c->ratio : 0, n = back + c->ratio;
    float *val = read_rows(&own, 0, 0, c->segment[w], 0, first - back, first + c->ratio);
    float *score = read_rows(&own, 0, 1, c->segment[w], 0, first - back, first + c->ratio);
    for (uint32_t k = 0; k < c->cols; k++) {
      double top = -INFINITY, sum = 0, weighed = 0;
      for (int pass = 0; pass < 2; pass++)
        for (uint32_t i = 0; i < n; i++) {
          uint64_t at = (uint64_t)i * row + (c->overlap && i >= back ? c->cols : 0) + k;
          if (!pass && (double)score[at] > top) top = (double)score[at];
          if (!pass) continue;
          double e = plain_exp(single, rounded(single, (double)score[at] - top));
          sum = rounded(single, sum + e);
          weighed = rounded(single, weighed + rounded(single, e * (double)val[at]));
        }
      out[(uint64_t)w * c->cols + k] = rounded(single, weighed / sum);
    }
    free(val);
    free(score);
  }
  free_pages(&own, &tables[0]);
}

static const op sparse_op = {"attend_sparse", sparse_make, sparse_prepare, sparse_run, free_pages, sparse_plain};
static const op pick_op = {"score", pick_make, attend_prepare, pick_run, free_pages, NULL};
static const op compress_op = {"compress", compress_make, compress_prepare, compress_run, free_pages, compress_plain};

/* ---- hyper-connections ------------------------------------------------------------------------------------------------------------------------------ */

static void mix_make(op_case *c) {
  uint32_t k = (2 + c->streams) * c->streams;
  c->x = floats((uint64_t)c->n * c->streams * c->cols, 3.0f);
  c->y = floats((uint64_t)c->n * k, 1.0f);
  c->z = floats((uint64_t)c->n * c->cols, 3.0f);
  if (c->inputs == ODD) make_odd(c->x, (uint64_t)c->n * c->streams * c->cols);
  c->n_out = (uint64_t)c->n * c->cols * (c->type ? c->streams : 1);
  c->macs = (double)c->n_out * (c->streams + (c->type != 0));
  c->bytes = 4.0 * c->n * c->streams * c->cols;
}
static int mix_in_run(const op_case *c, const table *t, float *out) {
  return t->ops->mix_in(t->b, c->x, c->y, c->n, (2 + c->streams) * c->streams, c->streams, c->cols, out);
}
static void mix_in_plain(const op_case *c, bool single, double *out) {
  for (uint32_t t = 0; t < c->n; t++)
    for (uint32_t i = 0; i < c->cols; i++) {
      double sum = 0;
      for (uint32_t s = 0; s < c->streams; s++)
        sum = rounded(single, sum + rounded(single, (double)c->y[(uint64_t)t * (2 + c->streams) * c->streams + s] *
                                                        (double)c->x[((uint64_t)t * c->streams + s) * c->cols + i]));
      out[(uint64_t)t * c->cols + i] = sum;
    }
}
static int mix_out_run(const op_case *c, const table *t, float *out) {
  memcpy(out, c->x, c->n_out * sizeof *out);
  return t->ops->mix_out(t->b, out, c->z, c->y, c->n, c->streams, c->cols);
}
static void mix_out_plain(const op_case *c, bool single, double *out) {
  for (uint32_t t = 0; t < c->n; t++)
    for (uint32_t j = 0; j < c->streams; j++)
      for (uint32_t i = 0; i < c->cols; i++) {
        const float *post = c->y + (uint64_t)t * (2 + c->streams) * c->streams + c->streams, *mix = post + c->streams;
        double sum = rounded(single, (double)post[j] * (double)c->z[(uint64_t)t * c->cols + i]);
        for (uint32_t s = 0; s < c->streams; s++)
          sum = rounded(
              single, sum + rounded(single, (double)mix[s * c->streams + j] * (double)c->x[((uint64_t)t * c->streams + s) * c->cols + i]));
        out[((uint64_t)t * c->streams + j) * c->cols + i] = sum;
      }
}

static const op mix_in_op = {"mix_in", mix_make, NULL, mix_in_run, NULL, mix_in_plain};
static const op mix_out_op = {"mix_out", mix_make, NULL, mix_out_run, NULL, mix_out_plain};
