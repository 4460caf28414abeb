/* Backend "ref": attention over chosen and compressed rows, and hyper-connections. */
#include "ref.h"

#include <stdlib.h>
#include <string.h>

#include "token.h"

#include "../numeric.h"

int ds4_ref_rope_tail(ds4_backend *b, float *x, const uint32_t *pos, uint32_t n, uint32_t heads, uint32_t width, uint32_t tail,
                      const float *table, bool inverse) {
  (void)b;
  for (uint32_t t = 0; t < n; t++, x += (uint64_t)heads * width)
    ds4_token_rope_tail(x, heads, width, tail, table + (uint64_t)pos[t] * tail, inverse ? -1.0f : 1.0f);
  return DS4_OK;
}

int ds4_ref_round_fp8(ds4_backend *b, float *x, uint32_t n, uint32_t width, uint32_t tail) {
  (void)b;
  for (uint32_t t = 0; t < n; t++) ds4_token_round_fp8(x + (uint64_t)t * width, width, tail);
  return DS4_OK;
}

int ds4_ref_round_fp4(ds4_backend *b, float *x, uint32_t n, uint32_t width) {
  (void)b;
  for (uint32_t t = 0; t < n; t++) ds4_token_round_fp4(x + (uint64_t)t * width, width);
  return DS4_OK;
}

/* ---- hyper-connections ---------------------------------------------------------------------------------------------------------------- */

int ds4_ref_mix_weights(ds4_backend *b, float *m, const float *scale, const float *base, uint32_t n, uint32_t k, uint32_t streams,
                        uint32_t iterations, float eps) {
  (void)b;
  for (uint32_t t = 0; t < n; t++, m += k) ds4_token_mix_weights(m, scale, base, k, streams, iterations, eps);
  return DS4_OK;
}

/* out = sum of m[s] h[s], a chain over ascending s */
int ds4_ref_mix_in(ds4_backend *b, const float *h, const float *m, uint32_t n, uint32_t k, uint32_t streams, uint32_t width, float *out) {
  (void)b;
  for (uint32_t t = 0; t < n; t++, m += k, h += (uint64_t)streams * width, out += width)
    for (uint32_t i = 0; i < width; i++) {
      float sum = m[0] * h[i];
      for (uint32_t s = 1; s < streams; s++) sum = fmaf(m[s], h[(uint64_t)s * width + i], sum);
      out[i] = sum;
    }
  return DS4_OK;
}

/* h[j] = post[j] y + sum over s of B[s][j] h[s], a chain over ascending s */
int ds4_ref_mix_out(ds4_backend *b, float *h, const float *y, const float *m, uint32_t n, uint32_t streams, uint32_t width) {
  (void)b;
  float *old = malloc(streams * sizeof *old);
  if (!old) return DS4_ENOMEM;
  for (uint32_t t = 0; t < n; t++, m += (2 + streams) * streams, h += (uint64_t)streams * width, y += width)
    for (uint32_t i = 0; i < width; i++) {
      const float *post = m + streams, *mix = post + streams;
      for (uint32_t s = 0; s < streams; s++) old[s] = h[(uint64_t)s * width + i];
      for (uint32_t j = 0; j < streams; j++) {
        float sum = post[j] * y[i];
        for (uint32_t s = 0; s < streams; s++) sum = fmaf(mix[s * streams + j], old[s], sum);
        h[(uint64_t)j * width + i] = sum;
      }
    }
  free(old);
  return DS4_OK;
}

/* ---- compressor --------------------------------------------------------------------------------------------------------------------- */

/* The one vector that a row has in a part. */
static void row_read(const ds4_layout *l, uint32_t layer, uint32_t part, const ds4_view *view, uint32_t row, float *out) {
  ds4_vector_read(&l->part[part], l->page_rows, ds4_page_tile(l, ds4_view_page(view, l, row), layer, part, 0), row % l->page_rows, out);
}

static void compress_window(const ds4_compress *c, const ds4_view *view, uint32_t first, float *value, float *score, float *out) {
  uint32_t row = c->layout->part[c->part].width, back = c->overlap && first ? c->ratio : 0, n = back + c->ratio;
  for (uint32_t i = 0; i < n; i++) {
    row_read(c->layout, c->layer, c->part, view, first - back + i, value + (uint64_t)i * row);
    row_read(c->layout, c->layer, c->part + 1, view, first - back + i, score + (uint64_t)i * row);
  }
  for (uint32_t k = 0; k < c->width; k++) {
    float top = -INFINITY, sum = 0.0f, weighed = 0.0f;
    for (int pass = 0; pass < 2; pass++)
      for (uint32_t i = 0; i < n; i++) {
        uint64_t at = (uint64_t)i * row + (c->overlap && i >= back ? c->width : 0) + k;
        if (!pass) {
          top = score[at] > top ? score[at] : top;
          continue;
        }
        float e = ds4_exp(score[at] - top);
        sum += e;
        weighed = fmaf(e, value[at], weighed);
      }
    out[k] = weighed / sum;
  }
}

int ds4_ref_compress(ds4_backend *b, const ds4_compress *c) {
  uint64_t floats = 2ull * c->ratio * c->layout->part[c->part].width;
  float *scratch = malloc(2 * floats * sizeof *scratch);
  int status = scratch ? DS4_OK : DS4_ENOMEM;
  for (uint32_t i = 0; !status && i < c->n; i++) {
    compress_window(c, &c->views[c->segment[i]], c->first[i], scratch, scratch + floats, c->out + (uint64_t)i * c->width);
    if (ds4_ref_stop(b)) status = DS4_ECANCELLED;
  }
  free(scratch);
  return status;
}

/* ---- indexer --------------------------------------------------------------------------------------------------------------------------- */

int ds4_ref_pick(ds4_backend *b, const ds4_pick *p) {
  uint32_t width = p->layout->part[p->part].width, most = 0;
  for (uint32_t t = 0; t < p->batch->n; t++) most = ds4_max_u32(most, p->rows[t]);
  float *score = malloc((width + (uint64_t)most) * sizeof *score), *key = score + most;
  int status = score ? DS4_OK : DS4_ENOMEM;
  for (uint32_t t = 0; !status && t < p->batch->n; t++) {
    uint32_t *list = p->list + (uint64_t)t * p->list_width;
    const float *q = p->q + (uint64_t)t * p->heads * width, *weight = p->weight + (uint64_t)t * p->heads;
    p->count[t] = ds4_min_u32(p->rows[t], p->keep);
    for (uint32_t r = 0; r < p->count[t]; r++) list[r] = r;
    for (uint32_t r = 0; p->rows[t] > p->keep && r < p->rows[t]; r++) {
      row_read(p->layout, p->layer, p->part, &p->views[p->batch->segment[t]], r, key);
      score[r] = 0.0f;
      for (uint32_t h = 0; h < p->heads; h++) {
        float dot = 0.0f;
        for (uint32_t i = 0; i < width; i++) dot = fmaf(q[h * width + i], key[i], dot);
        score[r] = fmaf(weight[h], dot > 0.0f ? dot : 0.0f, score[r]);
      }
    }
    if (p->rows[t] > p->keep) ds4_top_rows(score, p->rows[t], p->keep, list);
    if (ds4_ref_stop(b)) status = DS4_ECANCELLED;
  }
  free(score);
  return status;
}

/* ---- attention -------------------------------------------------------------------------------------------------------------------------- */

static void attend_head(const ds4_attend_sparse *a, uint32_t t, uint32_t head, float *scratch) {
  uint32_t width = a->layout->part[0].width, segment = a->batch->segment[t];
  uint64_t at = ((uint64_t)t * a->n_heads + head) * width;
  float *q = scratch, *out = a->out + at;
  for (uint32_t i = 0; i < width; i++) q[i] = a->q[at + i] * a->scale;
  ds4_partial all = {.max = -INFINITY, .out = out};
  bool first = true;
  memset(out, 0, width * sizeof *out);
  ds4_ref_rows near = {.layout = a->layout, .view = &a->views[segment], .layer = a->layer};
  ds4_ref_attend_rows(&near, a->lo[t], a->hi[t], q, &all, &first, scratch + width);
  if (a->far_layout) {
    const uint32_t *list = a->list ? a->list + (uint64_t)t * a->list_width : NULL;
    ds4_ref_rows far = {.layout = a->far_layout, .view = &a->far_views[segment], .layer = a->far_layer, .list = list};
    ds4_ref_attend_rows(&far, 0, a->far_n[t], q, &all, &first, scratch + width);
  }
  float top = all.max > a->sink[head] ? all.max : a->sink[head], shrink = ds4_exp(all.max - top);
  float factor = shrink / fmaf(all.sum, shrink, ds4_exp(a->sink[head] - top));
  for (uint32_t i = 0; i < width; i++) out[i] *= factor;
}

int ds4_ref_attend_sparse(ds4_backend *b, const ds4_attend_sparse *a) {
  float *scratch = malloc(3ull * a->layout->part[0].width * sizeof *scratch); /* query, split, one row */
  int status = scratch ? DS4_OK : DS4_ENOMEM;
  for (uint32_t t = 0; !status && t < a->batch->n; t++) {
    for (uint32_t h = 0; h < a->n_heads; h++) attend_head(a, t, h, scratch);
    if (ds4_ref_stop(b)) status = DS4_ECANCELLED;
  }
  free(scratch);
  return status;
}
