/* Kernels of compressed attention, hyper-connections and FP8 weights. Included by kernels.inc.h, behind attention; the file of an instruction set
 * defines before, on top of what kernels.inc.h asks for:
 *
 *   v_e4m3(p)                        16 E4M3 bytes as floats; none of them is NaN */

/* ---- FP8 weights: float activations --------------------------------------------------------------------------------------------------------- */

/* `g` groups x `t` tokens: g * t independent chains over k. A group lies in one row of scales. */
INLINE void fp8_tile(const ds4_packed *w, uint32_t group, const int g, const float *x, uint64_t token, const int t, float *out) {
  const uint8_t *p = w->data + (group - w->first) * w->group_bytes;
  const uint32_t head = ds4_fp8_head(w->cols);
  _Static_assert(FLOAT_TILE <= 8 && 4 * 2 <= 8, "acc has room for every g * t that fp8_groups asks for");
  v16 acc[8], scale[4];
  for (int i = 0; i < g * t; i++) acc[i] = v_zero();
  for (uint32_t block = 0; block * DS4_FP8_TILE < w->cols; block++) {
    uint32_t end = ds4_min_u32(w->cols, (block + 1) * DS4_FP8_TILE);
    for (int i = 0; i < g; i++) scale[i] = v_set1(ds4_e8m0(p[i * w->group_bytes + block]));
    for (uint32_t k = block * DS4_FP8_TILE; k < end; k++)
      for (int i = 0; i < g; i++) {
        v16 weight = v_mul(v_e4m3(p + i * w->group_bytes + head + (uint64_t)k * DS4_LANES), scale[i]);
        for (int j = 0; j < t; j++) acc[i * t + j] = v_fma(weight, v_set1(x[(token + j) * w->cols + k]), acc[i * t + j]);
      }
  }
  for (int i = 0; i < g; i++)
    for (int j = 0; j < t; j++) store_rows(w, group + i, token + j, out, acc[i * t + j]);
}

static void fp8_groups(const ds4_packed *w, uint32_t group, uint32_t groups, const float *x, uint32_t n, float *out) {
  uint32_t end = group + groups, token = 0;
  for (; token + FLOAT_TILE <= n; token += FLOAT_TILE)
    for (uint32_t g = group; g < end; g++) fp8_tile(w, g, 1, x, token, FLOAT_TILE, out);
  for (; token + 2 <= n; token += 2) { /* a weight is turned into a float for both */
    uint32_t g = group;
    for (; g + 4 <= end; g += 4) fp8_tile(w, g, 4, x, token, 2, out);
    for (; g < end; g++) fp8_tile(w, g, 1, x, token, 2, out);
  }
  for (; token < n; token++) {
    uint32_t g = group;
    for (; g + 4 <= end; g += 4) fp8_tile(w, g, 4, x, token, 1, out);
    for (; g < end; g++) fp8_tile(w, g, 1, x, token, 1, out);
  }
}

/* ---- hyper-connections ------------------------------------------------------------------------------------------------------------------------ */

static void k_mix_in(const float *h, const float *m, uint32_t streams, uint32_t width, float *out) {
  uint32_t i = 0;
  for (; i + 16 <= width; i += 16) {
    v16 sum = v_mul(v_set1(m[0]), v_load(h + i));
    for (uint32_t s = 1; s < streams; s++) sum = v_fma(v_set1(m[s]), v_load(h + (uint64_t)s * width + i), sum);
    v_store(out + i, sum);
  }
  for (; i < width; i++) {
    float sum = m[0] * h[i];
    for (uint32_t s = 1; s < streams; s++) sum = fmaf(m[s], h[(uint64_t)s * width + i], sum);
    out[i] = sum;
  }
}

static void k_mix_out(float *h, const float *y, const float *m, uint32_t streams, uint32_t width) {
  const float *post = m + streams, *mix = post + streams;
  float old[16][16]; /* [streams][16] */
  for (uint32_t i = 0; i < width; i += 16) {
    uint32_t n = ds4_min_u32(16, width - i);
    for (uint32_t s = 0; s < streams; s++) memcpy(old[s], h + (uint64_t)s * width + i, n * sizeof(float));
    for (uint32_t j = 0; j < streams; j++) {
      float *to = h + (uint64_t)j * width + i;
      if (n == 16) {
        v16 sum = v_mul(v_set1(post[j]), v_load(y + i));
        for (uint32_t s = 0; s < streams; s++) sum = v_fma(v_set1(mix[s * streams + j]), v_load(old[s]), sum);
        v_store(to, sum);
        continue;
      }
      for (uint32_t k = 0; k < n; k++) {
        float sum = post[j] * y[i + k];
        for (uint32_t s = 0; s < streams; s++) sum = fmaf(mix[s * streams + j], old[s][k], sum);
        to[k] = sum;
      }
    }
  }
}

/* ---- compressor --------------------------------------------------------------------------------------------------------------------------------- */

/* Row `row` of a float32 part that is not turned. */
INLINE const float *input_row(const ds4_layout *l, uint32_t layer, uint32_t part, const ds4_view *view, uint32_t row) {
  const uint8_t *tile_at = ds4_page_tile(l, ds4_view_page(view, l, row), layer, part, 0);
  return (const float *)(const void *)tile_at + (uint64_t)(row % l->page_rows) * l->part[part].width;
}

static void k_compress(const ds4_compress *c, uint32_t window) {
  const ds4_view *view = &c->views[c->segment[window]];
  const uint32_t first = c->first[window], back = c->overlap && first ? c->ratio : 0, n = back + c->ratio;
  float *out = c->out + (uint64_t)window * c->width;
  for (uint32_t k = 0; k < c->width; k += 16) {
    uint32_t lanes = ds4_min_u32(16, c->width - k);
    v16 top = v_set1(-INFINITY), sum = v_zero(), weighed = v_zero();
    for (int pass = 0; pass < 2; pass++)
      for (uint32_t i = 0; i < n; i++) {
        uint32_t at = (c->overlap && i >= back ? c->width : 0) + k;
        const float *score = input_row(c->layout, c->layer, c->part + 1, view, first - back + i) + at;
        const float *value = input_row(c->layout, c->layer, c->part, view, first - back + i) + at;
        float part[2][16] = {{0}};
        if (lanes < 16) { /* the row may end here */
          memcpy(part[0], score, lanes * sizeof *score);
          memcpy(part[1], value, lanes * sizeof *value);
          score = part[0], value = part[1];
        }
        v16 s = v_load(score);
        if (!pass) {
          top = v_below(top, s, s, top);
          continue;
        }
        v16 e = v_exp(v_sub(s, top));
        sum = v_add(sum, e);
        weighed = v_fma(e, v_load(value), weighed);
      }
    float result[16];
    v_store(result, v_div(weighed, sum));
    memcpy(out + k, result, lanes * sizeof *out);
  }
}

/* ---- indexer -------------------------------------------------------------------------------------------------------------------------------------- */

/* An fp4 row as column `key` of [width][64]. */
INLINE void fp4_column(const ds4_part *p, const uint8_t *row, float *key) {
  static const float value[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  for (uint32_t d = 0; d < p->width; d += 2, key += 2 * DS4_KEY_BLOCK) {
    float scale = ds4_e8m0(row[p->width / 2 + d / DS4_FP4_BLOCK]);
    key[0] = value[row[d / 2] & 15] * scale;
    key[DS4_KEY_BLOCK] = value[row[d / 2] >> 4] * scale;
  }
}

/* Rows from `block` to `to`, at most 64, as columns: [width][64]. */
static void index_keys(const ds4_pick *p, const ds4_view *view, uint32_t block, uint32_t to, float *key) {
  const ds4_layout *l = p->layout;
  const ds4_part *part = &l->part[p->part];
  if (part->type != DS4_KV_FP4) {
    load_keys(l, p->layer, p->part, 0, view, block, block, to, key);
    return;
  }
  for (uint32_t r = block; r < to; r++) {
    const uint8_t *tile_at = ds4_page_tile(l, ds4_view_page(view, l, r), p->layer, p->part, 0);
    fp4_column(part, tile_at + r % l->page_rows * (part->tile_bytes / l->page_rows), key + (r - block));
  }
}

/* Scores of tokens [from, to) of one segment with rows [row, end); score [to - from][stride]. */
static void k_score(const ds4_pick *p, uint32_t from, uint32_t to, uint32_t row, uint32_t end, float *score, uint32_t stride,
                    float *scratch) {
  const uint32_t width = p->layout->part[p->part].width;
  const ds4_view *view = &p->views[p->batch->segment[from]];
  tile t = {.rows = p->heads, .width = width, .key = scratch, .p = scratch + width * DS4_KEY_BLOCK};
  uint32_t last = 0;
  for (uint32_t i = from; i < to; i++)
    if (p->rows[i] > p->keep) last = ds4_max_u32(last, p->rows[i]);
  for (uint32_t block = row; block < ds4_min_u32(end, last); block += DS4_KEY_BLOCK) {
    index_keys(p, view, block, ds4_min_u32(last, block + DS4_KEY_BLOCK), t.key);
    for (uint32_t i = from; i < to; i++) {
      if (p->rows[i] <= p->keep || p->rows[i] <= block) continue;
      const source keys = {.type = DS4_KV_F32, .data = t.key};
      const float *q = p->q + (uint64_t)i * p->heads * width;
      uint32_t h = 0;
      for (; h + ROW_TILE <= p->heads; h += ROW_TILE)
        score_rows(DS4_KV_F32, &keys, q + (uint64_t)h * width, width, ROW_TILE, t.p + h * DS4_KEY_BLOCK);
      for (; h < p->heads; h++) score_rows(DS4_KV_F32, &keys, q + (uint64_t)h * width, width, 1, t.p + h * DS4_KEY_BLOCK);
      for (uint32_t k = 0; k < DS4_KEY_BLOCK; k += 16) {
        v16 sum = v_zero();
        for (h = 0; h < p->heads; h++) {
          v16 dot = v_load(t.p + h * DS4_KEY_BLOCK + k);
          sum = v_fma(v_set1(p->weight[(uint64_t)i * p->heads + h]), v_below(v_zero(), dot, dot, v_zero()), sum);
        }
        v_store(score + (uint64_t)(i - from) * stride + block + k, sum);
      }
    }
  }
}

/* ---- attention -------------------------------------------------------------------------------------------------------------------------------------- */

/* One token and up to 16 query heads: lanes of the scores are heads, lanes of the values are dimensions. */
typedef struct sparse {
  tile t;      /* key, val as in attention; val is [64][padded] */
  float *turn; /* [width][16] the scaled queries */
  float *dots; /* [64][16] */
} sparse;

/* An fp8 row as floats; see fp8_read in host.c. A scale that is NaN makes its numbers NaN, whatever their codes are. */
INLINE void fp8_row(const ds4_part *p, const uint8_t *row, float *out) {
  uint32_t n = p->width - p->tail;
  const uint8_t *scale = row + n, *tail = scale + (n + DS4_FP8_BLOCK - 1) / DS4_FP8_BLOCK;
  for (uint32_t from = 0; from < n; from += DS4_FP8_BLOCK, scale++) {
    uint32_t i = from, end = ds4_min_u32(n, from + DS4_FP8_BLOCK);
    for (; i + 16 <= end; i += 16) v_store(out + i, v_mul(v_e4m3(row + i), v_set1(ds4_e8m0(*scale))));
    for (; i < end; i++) out[i] = ds4_e4m3(row[i]) * ds4_e8m0(*scale);
  }
  for (uint32_t i = 0; i < p->tail; i++) out[n + i] = ds4_bf16(ds4_load_u16(tail + 2ull * i));
}

/* Row `row` as floats, with zeros up to `padded`. */
INLINE void sparse_row(const ds4_layout *l, uint32_t layer, const ds4_view *view, uint32_t row, uint32_t padded, float *out) {
  const ds4_part *p = &l->part[0];
  const uint8_t *tile_at = ds4_page_tile(l, ds4_view_page(view, l, row), layer, 0, 0);
  tile_at += row % l->page_rows * (p->tile_bytes / l->page_rows);
  const uint16_t *half = (const uint16_t *)(const void *)tile_at;
  uint32_t i = 0;
  if (p->type == DS4_KV_FP8) fp8_row(p, tile_at, out);
  if (p->type == DS4_KV_F32) memcpy(out, tile_at, p->width * sizeof *out);
  if (p->type == DS4_KV_F16) {
    for (; i + 16 <= p->width; i += 16) v_store(out + i, v_f16(half + i));
    for (; i < p->width; i++) out[i] = ds4_f16(half[i]);
  }
  for (i = p->width; i < padded; i++) out[i] = 0.0f;
}

/* Scores of `n` keys, from `key` on, with all heads. */
INLINE void sparse_dots(const sparse *s, uint32_t key, const int n) {
  v16 acc[4];
  for (int i = 0; i < n; i++) acc[i] = v_zero();
  const float *val = s->t.val + (uint64_t)key * s->t.padded;
  for (uint32_t d = 0; d < s->t.width; d++) {
    v16 q = v_load(s->turn + d * 16);
    for (int i = 0; i < n; i++) acc[i] = v_fma(q, v_set1(val[(uint64_t)i * s->t.padded + d]), acc[i]);
  }
  for (int i = 0; i < n; i++) v_store(s->dots + (key + i) * 16, acc[i]);
}

/* Keys [from, to) of the block that lies in val. */
static void sparse_block(const sparse *s, uint32_t from, uint32_t to) {
  const tile *t = &s->t;
  uint32_t k = from;
  for (; k + 4 <= to; k += 4) sparse_dots(s, k, 4);
  for (; k < to; k++) sparse_dots(s, k, 1);
  for (uint32_t r = 0; r < t->rows; r++)
    for (k = from; k < to; k++) t->p[r * DS4_KEY_BLOCK + k] = s->dots[k * 16 + r];
  const source values = {.type = DS4_KV_F32, .data = t->val, .stride = t->padded};
  for (uint32_t r = 0; r < t->rows; r += ROW_TILE) {
    uint32_t n = ds4_min_u32(ROW_TILE, t->rows - r);
    range all[ROW_TILE];
    float shrink[16];
    for (uint32_t i = 0; i < n; i++) all[i] = (range){from, to};
    soften(t, r, (int)n, all, shrink);
    if (n == ROW_TILE)
      weigh_all(DS4_KV_F32, t, &values, r, ROW_TILE, all[0], shrink);
    else
      for (uint32_t i = 0; i < n; i++) weigh_all(DS4_KV_F32, t, &values, r + i, 1, all[0], shrink + i);
  }
}

/* Places [from, to) of one stream's rows: list[place], or the place itself. */
static void sparse_source(const sparse *s, const ds4_layout *l, uint32_t layer, const ds4_view *view, const uint32_t *list, uint32_t from,
                          uint32_t to) {
  const tile *t = &s->t;
  while (from < to) {
    uint32_t end = ds4_min_u32(to, (from / DS4_KEY_SPLIT + 1) * DS4_KEY_SPLIT);
    clear_splits(t);
    while (from < end) {
      uint32_t block = from / DS4_KEY_BLOCK * DS4_KEY_BLOCK, next = ds4_min_u32(end, block + DS4_KEY_BLOCK);
      for (uint32_t k = from; k < next; k++)
        sparse_row(l, layer, view, list ? list[k] : k, t->padded, t->val + (uint64_t)(k - block) * t->padded);
      sparse_block(s, from - block, next - block);
      from = next;
    }
    merge_split(t);
  }
}

static void k_attend_sparse(const ds4_attend_sparse *a, uint32_t token, uint32_t head, float *scratch) {
  const uint32_t width = a->layout->part[0].width, segment = a->batch->segment[token];
  sparse s = {.t = {.rows = ds4_min_u32(16, a->n_heads - head), .width = width, .value = width, .padded = ds4_lanes_up(width)}};
  tile *t = &s.t;
  s.turn = scratch;
  s.dots = s.turn + width * 16;
  t->val = s.dots + 16 * DS4_KEY_BLOCK;
  t->p = t->val + t->padded * DS4_KEY_BLOCK;
  t->out = t->p + ds4_max_u32(16 * DS4_KEY_BLOCK, 2 + t->padded);
  t->all = t->out + 16 * t->padded;
  t->max = t->all + 16 * (2 + t->padded);
  t->sum = t->max + 16;
  const float *q = a->q + ((uint64_t)token * a->n_heads + head) * width;
  for (uint32_t d = 0; d < width; d++)
    for (uint32_t r = 0; r < 16; r++) s.turn[d * 16 + r] = r < t->rows ? q[r * width + d] * a->scale : 0.0f;
  clear_all(t);
  sparse_source(&s, a->layout, a->layer, &a->views[segment], NULL, a->lo[token], a->hi[token]);
  if (a->far_layout) {
    const uint32_t *list = a->list ? a->list + (uint64_t)token * a->list_width : NULL;
    sparse_source(&s, a->far_layout, a->far_layer, &a->far_views[segment], list, 0, a->far_n[token]);
  }
  for (uint32_t r = 0; r < t->rows; r++) {
    const float *all = t->all + (uint64_t)r * (2 + t->padded);
    float *out = a->out + ((uint64_t)token * a->n_heads + head + r) * width, sink = a->sink[head + r];
    float top = all[0] > sink ? all[0] : sink, shrink = ds4_exp(all[0] - top);
    float factor = shrink / fmaf(all[1], shrink, ds4_exp(sink - top));
    for (uint32_t i = 0; i < width; i++) out[i] = all[2 + i] * factor;
  }
}
