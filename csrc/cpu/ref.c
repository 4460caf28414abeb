/* Backend "ref": plain scalar C, one thread, weights read where the file has them. It defines what every op computes, down to the order of
 * operations; the other backends are tested against it bit for bit. Written to be read, not to be fast. */
#include "ref.h"

#include <stdlib.h>
#include <string.h>

#include "../formats.h"
#include "../smallfloat.h"

struct ds4_backend {
  ds4_poll poll;
  void *user;
};

struct ds4_weight {
  const ds4_format_info *format;
  uint64_t rows, cols, row_bytes;
  const uint8_t *data, *scales;
};

static int ref_open(int32_t threads, ds4_backend **out, ds4_error *err) {
  (void)threads;
  *out = calloc(1, sizeof **out);
  return *out ? DS4_OK : ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for the backend");
}

static void ref_close(ds4_backend *b) { free(b); }
static const char *ref_isa(const ds4_backend *b) { return (void)b, "scalar"; }
static uint32_t ref_threads(const ds4_backend *b) { return (void)b, 1; }

static void ref_begin(ds4_backend *b, ds4_poll poll, void *user) {
  b->poll = poll;
  b->user = user;
}

static void ref_end(ds4_backend *b) { b->poll = NULL; }

bool ds4_ref_stop(ds4_backend *b) { return b->poll && b->poll(b->user); }

/* ---- weights --------------------------------------------------------------------------------------------------------------------- */

static int ref_weight_new(ds4_backend *b, const ds4_matrix *m, ds4_weight **out, ds4_error *err) {
  (void)b;
  ds4_weight *w = calloc(1, sizeof *w);
  if (!w) return ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for a weight");
  *w = (ds4_weight){.format = ds4_format_find(m->format), .rows = m->rows, .cols = m->cols, .row_bytes = m->nbytes / m->rows};
  w->data = m->data;
  w->scales = m->scales;
  *out = w;
  return DS4_OK;
}

static void ref_weight_free(ds4_backend *b, ds4_weight *w) { (void)b, free(w); }
static uint64_t ref_weight_bytes(const ds4_weight *w) { return (void)w, 0; }

static void row_floats(const ds4_weight *w, uint64_t row, float *out) {
  ds4_format_floats(w->format, w->data + row * w->row_bytes, w->cols, out);
  if (!w->scales) return;
  if (w->format->format == DS4_FP8) {
    const uint8_t *scale = w->scales + row / DS4_FP8_TILE * ((w->cols + DS4_FP8_TILE - 1) / DS4_FP8_TILE);
    for (uint64_t k = 0; k < w->cols; k++) out[k] *= ds4_e8m0(scale[k / DS4_FP8_TILE]);
    return;
  }
  const uint8_t *scale = w->scales + row * (w->cols / DS4_FP4_BLOCK); /* doubled numbers times halved scales, as MXFP4 */
  for (uint64_t k = 0; k < w->cols; k++) out[k] = 2.0f * out[k] * ds4_e8m0_half(scale[k / DS4_FP4_BLOCK]);
}

static int ref_embed(ds4_backend *b, const ds4_weight *w, const int32_t *ids, uint32_t n, float *out) {
  (void)b;
  for (uint32_t i = 0; i < n; i++) row_floats(w, (uint64_t)ids[i], out + i * w->cols);
  return DS4_OK;
}

/* Float weights: one chain of fused multiply-adds over ascending k. */
static float dot_float(const float *w, const float *x, uint64_t cols) {
  float sum = 0.0f;
  for (uint64_t k = 0; k < cols; k++) sum = fmaf(w[k], x[k], sum);
  return sum;
}

/* Activations of one token as int8 blocks. */
typedef struct quant {
  int8_t *q;     /* [cols] */
  float *d, *dq; /* [cols / 32] scale; scale * sum of q */
} quant;

/* A row of integer weights taken apart. */
typedef struct quant_row {
  ds4_shape shape;
  uint32_t block;
  ds4_block *blocks; /* [cols / block] */
  int8_t *value;     /* [cols] */
} quant_row;

static void take_row(const ds4_weight *w, uint64_t row, quant_row *out) {
  const uint8_t *p = w->data + row * w->row_bytes;
  for (uint64_t k = 0; k < w->cols; k += out->block, p += w->format->bytes) {
    ds4_block *b = &out->blocks[k / out->block];
    w->format->take_apart(p, b);
    for (uint32_t i = 0; i < out->block; i++) out->value[k + i] = (int8_t)ds4_code_value(&out->shape, b->code[i]);
  }
}

static int32_t dot_16(const int8_t *a, const int8_t *b) {
  int32_t sum = 0;
  for (int i = 0; i < 16; i++) sum += a[i] * b[i];
  return sum;
}

static int32_t sum_16(const int8_t *a) {
  int32_t sum = 0;
  for (int i = 0; i < 16; i++) sum += a[i];
  return sum;
}

/* Integer weights: in every block of 32 an exact integer sum, then one chain over the blocks. dx is the scale of the activations, dq = dx * their sum.
 *
 *   sum = fma(d * dx, isum, sum)            then with a minimum    sum = fma(m, dq, sum)          (IQ2_XXS: d is an eighth of the scale)
 *
 * Sub-blocks of 32 bring an integer scale and minimum, d * sc and -m * mn are exact and stand for d and m. Of two sub-blocks of 16 the integer
 * sums are combined before: isum = sc0 * isum0 + sc1 * isum1, below 2^24 and so exact as a float, msum = mn0 * sum0 + mn1 * sum1, and
 * sum = fma(-m * dx, msum, sum). */
static float dot_quant(const quant_row *w, uint64_t cols, const quant *x) {
  float sum = 0.0f;
  for (uint64_t k = 0; k < cols; k += 32) {
    const ds4_block *b = &w->blocks[k / w->block];
    const int8_t *v = w->value + k, *q = x->q + k;
    float d = w->shape.eighth ? ds4_f16(b->d) * 0.125f : ds4_f16(b->d), m = ds4_f16(b->m), dx = x->d[k / 32], dq = x->dq[k / 32];
    uint64_t s = w->shape.sub ? k % w->block / w->shape.sub : 0;
    if (w->shape.sub == 16) {
      sum = fmaf(d * dx, (float)(b->sc[s] * dot_16(v, q) + b->sc[s + 1] * dot_16(v + 16, q + 16)), sum);
      if (w->shape.minimum) sum = fmaf(-m * dx, (float)(b->mn[s] * sum_16(q) + b->mn[s + 1] * sum_16(q + 16)), sum);
      continue;
    }
    if (w->shape.sub) d *= (float)b->sc[s], m = -m * (float)b->mn[s];
    sum = fmaf(d * dx, (float)(dot_16(v, q) + dot_16(v + 16, q + 16)), sum);
    if (w->shape.minimum) sum = fmaf(m, dq, sum);
  }
  return sum;
}

static int matmul_float(ds4_backend *b, const ds4_weight *w, float *out, const float *x, uint32_t n) {
  float *row = malloc(w->cols * sizeof *row);
  int status = row ? DS4_OK : DS4_ENOMEM;
  for (uint64_t r = 0; !status && r < w->rows; r++) {
    row_floats(w, r, row);
    for (uint32_t t = 0; t < n; t++) out[t * w->rows + r] = dot_float(row, x + t * w->cols, w->cols);
    if (ds4_ref_stop(b)) status = DS4_ECANCELLED;
  }
  free(row);
  return status;
}

static int matmul_quant(ds4_backend *b, const ds4_weight *w, float *out, const float *x, uint32_t n) {
  uint64_t blocks = w->cols / 32;
  quant_row row = {.shape = ds4_shape_of(w->format->format), .block = w->format->block};
  row.blocks = calloc(w->cols / row.block, sizeof *row.blocks);
  row.value = malloc(w->cols);
  int8_t *q = malloc(n * w->cols);
  float *d = malloc(n * blocks * 2 * sizeof *d);
  int status = row.blocks && row.value && q && d ? DS4_OK : DS4_ENOMEM;
  for (uint64_t i = 0; !status && i < n * blocks; i++) ds4_quant_block(x + i * 32, 32, q + i * 32, &d[i], &d[n * blocks + i]);
  for (uint64_t r = 0; !status && r < w->rows; r++) {
    take_row(w, r, &row);
    for (uint32_t t = 0; t < n; t++) {
      quant one = {q + t * w->cols, d + t * blocks, d + (n + t) * blocks};
      out[t * w->rows + r] = dot_quant(&row, w->cols, &one);
    }
    if (ds4_ref_stop(b)) status = DS4_ECANCELLED;
  }
  free(row.blocks);
  free(row.value);
  free(q);
  free(d);
  return status;
}

static int ref_matmul(ds4_backend *b, const ds4_weight *const *w, float *const *out, uint32_t n_w, const float *x, uint32_t n) {
  int status = DS4_OK;
  for (uint32_t i = 0; !status && i < n_w; i++)
    status = ds4_shape_of(w[i]->format->format).int8 ? matmul_quant(b, w[i], out[i], x, n) : matmul_float(b, w[i], out[i], x, n);
  return status;
}

/* ---- vectors ---------------------------------------------------------------------------------------------------------------------- */

/* x / sqrt(mean(x^2) + eps) * weight; the sum over 16 lanes and the fixed tree. */
static int ref_rms_norm(ds4_backend *b, const float *x, const float *weight, uint32_t n, uint32_t width, float eps, float *out) {
  (void)b;
  for (uint32_t t = 0; t < n; t++, x += width, out += width) {
    float lane[16] = {0};
    for (uint32_t i = 0; i < width; i++) lane[i % 16] = fmaf(x[i], x[i], lane[i % 16]);
    float scale = 1.0f / sqrtf(ds4_lane_sum(lane) / (float)width + eps);
    for (uint32_t i = 0; i < width; i++) out[i] = weight ? x[i] * scale * weight[i] : x[i] * scale;
  }
  return DS4_OK;
}

/* Rotates pairs of numbers by the angle of their position: (i, i + width/2), or (2i, 2i + 1) when interleaved. */
static int ref_rope(ds4_backend *b, float *x, const uint32_t *pos, uint32_t n, uint32_t heads, uint32_t width, const float *table,
                    uint32_t interleaved) {
  (void)b;
  uint32_t half = width / 2;
  for (uint32_t t = 0; t < n; t++)
    for (uint32_t h = 0; h < heads; h++, x += width)
      for (uint32_t i = 0; i < half; i++) {
        const float *cs = table + ((uint64_t)pos[t] * half + i) * 2;
        float *a = interleaved ? x + 2 * i : x + i, *c = interleaved ? a + 1 : a + half;
        float re = *a * cs[0] - *c * cs[1], im = *a * cs[1] + *c * cs[0];
        *a = re;
        *c = im;
      }
  return DS4_OK;
}

static int ref_glu(ds4_backend *b, int kind, float limit, const float *gate, const float *up, uint64_t n, float *out) {
  (void)b;
  for (uint64_t i = 0; i < n; i++) out[i] = ds4_glu(kind, limit, gate[i], up[i]);
  return DS4_OK;
}

static int ref_add(ds4_backend *b, float *x, const float *y, uint64_t n) {
  (void)b;
  for (uint64_t i = 0; i < n; i++) x[i] += y[i];
  return DS4_OK;
}

/* ---- rows ----------------------------------------------------------------------------------------------------------------------- */

static void to_f16(const float *x, uint32_t n, uint16_t *out) {
  for (uint32_t i = 0; i < n; i++) out[i] = ds4_to_f16(x[i]);
}

static int ref_rows_write(ds4_backend *b, const ds4_layout *l, uint32_t layer, uint32_t part, const ds4_view *views, const ds4_batch *batch,
                          const uint32_t *row, const float *x) {
  (void)b;
  for (uint32_t t = 0; t < batch->n; t++, x += l->part[part].heads * l->part[part].width)
    ds4_row_write(l, layer, part, &views[batch->segment[t]], row[t], x, to_f16);
  return DS4_OK;
}

/* ---- attention -------------------------------------------------------------------------------------------------------------------- */

static void read_place(const ds4_ref_rows *s, uint32_t part, uint32_t place, float *out) {
  const ds4_layout *l = s->layout;
  uint32_t row = s->list ? s->list[place] : place;
  const void *tile = ds4_page_tile(l, ds4_view_page(s->view, l, row), s->layer, part, s->kv);
  ds4_vector_read(&l->part[part], l->page_rows, tile, row % l->page_rows, out);
}

/* One block of at most 64 places [from, to). */
static void attend_block(const ds4_ref_rows *s, uint32_t from, uint32_t to, const float *q, ds4_partial *acc, float *row) {
  uint32_t key_width = s->layout->part[0].width, value_width = s->layout->part[s->value_part].width;
  float p[DS4_KEY_BLOCK], lane[16] = {0}, top = acc->max;
  for (uint32_t r = from; r < to; r++) {
    read_place(s, 0, r, row);
    float dot = 0.0f; /* the query is scaled before the product */
    for (uint32_t i = 0; i < key_width; i++) dot = fmaf(q[i], row[i], dot);
    p[r - from] = dot;
    top = dot > top ? dot : top;
  }
  float shrink = ds4_exp(acc->max - top);
  for (uint32_t r = from; r < to; r++) {
    p[r - from] = ds4_exp(p[r - from] - top);
    lane[r % 16] += p[r - from];
  }
  acc->sum = fmaf(acc->sum, shrink, ds4_lane_sum(lane));
  for (uint32_t i = 0; i < value_width; i++) acc->out[i] *= shrink;
  for (uint32_t r = from; r < to; r++) {
    read_place(s, s->value_part, r, row);
    for (uint32_t i = 0; i < value_width; i++) acc->out[i] = fmaf(p[r - from], row[i], acc->out[i]);
  }
  acc->max = top;
}

/* Adds the partial result of a later split to that of the earlier ones. */
static void merge(ds4_partial *into, const ds4_partial *next, uint32_t width) {
  float top = next->max > into->max ? next->max : into->max, a = ds4_exp(into->max - top), b = ds4_exp(next->max - top);
  into->max = top;
  into->sum = fmaf(into->sum, a, next->sum * b);
  for (uint32_t i = 0; i < width; i++) into->out[i] = fmaf(into->out[i], a, next->out[i] * b);
}

void ds4_ref_attend_rows(const ds4_ref_rows *s, uint32_t lo, uint32_t hi, const float *q, ds4_partial *all, bool *first, float *scratch) {
  uint32_t width = s->layout->part[s->value_part].width;
  for (uint32_t from = lo; from < hi;) {
    uint32_t end = ds4_min_u32(hi, (from / DS4_KEY_SPLIT + 1) * DS4_KEY_SPLIT);
    ds4_partial split = {.max = -INFINITY, .out = scratch};
    memset(scratch, 0, width * sizeof *scratch);
    while (from < end) {
      uint32_t to = ds4_min_u32(end, (from / DS4_KEY_BLOCK + 1) * DS4_KEY_BLOCK);
      attend_block(s, from, to, q, &split, scratch + width);
      from = to;
    }
    if (*first) {
      all->max = split.max;
      all->sum = split.sum;
      memcpy(all->out, split.out, width * sizeof *split.out);
    } else {
      merge(all, &split, width);
    }
    *first = false;
  }
}

static void attend_head(const ds4_ref_rows *s, uint32_t lo, uint32_t hi, const float *q, float *out, float *scratch) {
  uint32_t width = s->layout->part[s->value_part].width;
  ds4_partial all = {.out = out};
  bool first = true;
  memset(out, 0, width * sizeof *out);
  ds4_ref_attend_rows(s, lo, hi, q, &all, &first, scratch);
  float inverse = 1.0f / all.sum;
  for (uint32_t i = 0; lo < hi && i < width; i++) out[i] *= inverse;
}

static int ref_attend(ds4_backend *b, const ds4_attend *a) {
  const ds4_part *key = &a->layout->part[0], *value = &a->layout->part[a->value_part];
  uint32_t group = a->n_heads / key->heads;
  float *scratch = malloc((2ull * key->width + 2ull * value->width) * sizeof *scratch); /* query, split, one row */
  int status = scratch ? DS4_OK : DS4_ENOMEM;
  for (uint32_t t = 0; !status && t < a->batch->n; t++) {
    for (uint32_t i = 0; i < a->n_heads; i++) {
      const float *q = a->q + ((uint64_t)t * a->n_heads + i) * key->width;
      for (uint32_t k = 0; k < key->width; k++) scratch[k] = q[k] * a->scale;
      ds4_ref_rows s = {.layout = a->layout, .view = &a->views[a->batch->segment[t]], .layer = a->layer, .kv = i / group};
      s.value_part = a->value_part;
      float *out = a->out + ((uint64_t)t * a->n_heads + i) * value->width;
      attend_head(&s, a->lo[t], a->hi[t], scratch, out, scratch + key->width);
    }
    if (ds4_ref_stop(b)) status = DS4_ECANCELLED;
  }
  free(scratch);
  return status;
}

const ds4_ops ds4_ref_ops = {
    .name = "ref",
    .open = ref_open,
    .close = ref_close,
    .isa = ref_isa,
    .threads = ref_threads,
    .mem_alloc = ds4_host_alloc,
    .mem_free = ds4_host_free,
    .copy_in = ds4_host_copy,
    .copy_out = ds4_host_copy,
    .copy = ds4_host_copy,
    .wait = ds4_host_wait,
    .begin = ref_begin,
    .end = ref_end,
    .weight_new = ref_weight_new,
    .weight_free = ref_weight_free,
    .weight_bytes = ref_weight_bytes,
    .embed = ref_embed,
    .rms_norm = ref_rms_norm,
    .matmul = ref_matmul,
    .rope = ref_rope,
    .rows_write = ref_rows_write,
    .rows_read = ds4_rows_read,
    .attend = ref_attend,
    .glu = ref_glu,
    .add = ref_add,
    .scale = ds4_host_scale,
    .clear = ds4_host_clear,
    .gather = ds4_host_gather,
    .scatter_add = ds4_host_scatter_add,
    .add_rows = ds4_host_add_rows,
    .rope_tail = ds4_ref_rope_tail,
    .compress = ds4_ref_compress,
    .pick = ds4_ref_pick,
    .attend_sparse = ds4_ref_attend_sparse,
    .round_fp8 = ds4_ref_round_fp8,
    .round_fp4 = ds4_ref_round_fp4,
    .mix_weights = ds4_ref_mix_weights,
    .mix_in = ds4_ref_mix_in,
    .mix_out = ds4_ref_mix_out,
};
