/* The kernels, over vectors of 16 floats. Included by one file per instruction set, which defines before:
 *
 *   v16                              a vector of 16 floats
 *   v_zero v_set1 v_load v_store v_add v_sub v_mul v_fma(a, b, c) = a * b + c   v_max
 *   v_f16(p) v_bf16(p) v_i8(p)       16 numbers of that type as floats
 *   v_below(a, b, x, y)              a < b ? x : y, lane by lane; false for NaN
 *   v_pow2(n)                        2^n for whole n in -126..127
 *   v_top(a, b)                      the largest bit pattern, sign bit off, of both vectors
 *   v_quant(a, b, scale, q, sum)     stores 32 rounded numbers * scale as int8, and the sums of both halves
 *   what decode.inc.h and quants.inc.h ask for
 *   FLOAT_TILE ROW_TILE WIDE         tokens of a float tile; query rows and value vectors of an attention tile */

INLINE v16 v_exp(v16 x) { /* ds4_exp of numeric.h */
  v16 low = v_set1(DS4_EXP_MIN), high = v_set1(DS4_EXP_MAX), big = v_set1(0x1.8p23f), one = v_set1(1.0f);
  v16 y = v_below(high, x, high, x);
  v16 n = v_sub(v_add(v_mul(y, v_set1(DS4_LOG2E)), big), big);
  n = v_below(x, low, v_zero(), n); /* lanes that end as 0 must not overflow on the way */
  v16 r = v_fma(n, v_set1(-DS4_LN2_LO), v_fma(n, v_set1(-DS4_LN2_HI), y));
  v16 p = v_fma(v_set1(DS4_EXP_C7), r, v_set1(DS4_EXP_C6));
  p = v_fma(p, r, v_set1(DS4_EXP_C5));
  p = v_fma(p, r, v_set1(DS4_EXP_C4));
  p = v_fma(p, r, v_set1(DS4_EXP_C3));
  p = v_fma(p, r, v_set1(0.5f));
  p = v_fma(p, r, one);
  p = v_fma(p, r, one);
  return v_below(x, low, v_zero(), v_mul(p, v_pow2(n)));
}

INLINE float v_sum(v16 a) {
  float lane[16];
  v_store(lane, a);
  return ds4_lane_sum(lane);
}

/* ---- matrix products ---------------------------------------------------------------------------------------------------------------- */

#include "quants.inc.h"

/* Stores the results of one token for the rows of a group; the last group may be short. */
INLINE void store_rows(const ds4_packed *w, uint32_t group, uint64_t token, float *out, v16 value) {
  uint32_t rows = w->rows - group * DS4_LANES;
  out += token * w->rows + group * DS4_LANES;
  if (rows >= DS4_LANES) {
    v_store(out, value);
    return;
  }
  float lane[16];
  v_store(lane, value);
  memcpy(out, lane, rows * sizeof *out);
}

INLINE v16 load_weight(int32_t format, const uint8_t *p) {
  if (format == DS4_F32) return v_load((const float *)(const void *)p);
  return format == DS4_F16 ? v_f16((const uint16_t *)(const void *)p) : v_bf16((const uint16_t *)(const void *)p);
}

/* `g` groups x `t` tokens: g * t independent chains over k. */
INLINE void float_tile(int32_t format, const ds4_packed *w, uint32_t group, const int g, const float *x, uint64_t token, const int t,
                       float *out) {
  uint32_t step = DS4_LANES * (format == DS4_F32 ? 4 : 2);
  const uint8_t *p = w->data + (group - w->first) * w->group_bytes;
  v16 acc[8];
  for (int i = 0; i < g * t; i++) acc[i] = v_zero();
  for (uint32_t k = 0; k < w->cols; k++, p += step)
    for (int i = 0; i < g; i++) {
      v16 weight = load_weight(format, p + i * w->group_bytes);
      for (int j = 0; j < t; j++) acc[i * t + j] = v_fma(weight, v_set1(x[(token + j) * w->cols + k]), acc[i * t + j]);
    }
  for (int i = 0; i < g; i++)
    for (int j = 0; j < t; j++) store_rows(w, group + i, token + j, out, acc[i * t + j]);
}

INLINE void float_groups(int32_t format, const ds4_packed *w, uint32_t group, uint32_t groups, const float *x, uint32_t n, float *out) {
  uint32_t end = group + groups, token = 0;
  for (; token + FLOAT_TILE <= n; token += FLOAT_TILE)
    for (uint32_t g = group; g < end; g++) float_tile(format, w, g, 1, x, token, FLOAT_TILE, out);
  for (; token < n; token++) {
    uint32_t g = group;
    for (; g + 4 <= end; g += 4) float_tile(format, w, g, 4, x, token, 1, out);
    for (; g < end; g++) float_tile(format, w, g, 1, x, token, 1, out);
  }
}

static void fp8_groups(const ds4_packed *w, uint32_t group, uint32_t groups, const float *x, uint32_t n, float *out); /* sparse.inc.h */

static void k_matmul_float(const ds4_packed *w, uint32_t group, uint32_t groups, const float *x, uint32_t n, float *out) {
  if (w->format == DS4_MXFP4)
    fp4_groups(w, group, groups, x, n, out);
  else if (w->format == DS4_FP8)
    fp8_groups(w, group, groups, x, n, out);
  else if (w->format == DS4_F32)
    float_groups(DS4_F32, w, group, groups, x, n, out);
  else if (w->format == DS4_F16)
    float_groups(DS4_F16, w, group, groups, x, n, out);
  else
    float_groups(DS4_BF16, w, group, groups, x, n, out);
}

/* ---- vectors ------------------------------------------------------------------------------------------------------------------------- */

static void k_rms_norm(const float *x, const float *weight, uint32_t width, float eps, float *out) {
  uint32_t whole = width / 16 * 16;
  v16 acc = v_zero();
  for (uint32_t i = 0; i < whole; i += 16) acc = v_fma(v_load(x + i), v_load(x + i), acc);
  float lane[16];
  v_store(lane, acc);
  for (uint32_t i = whole; i < width; i++) lane[i % 16] = fmaf(x[i], x[i], lane[i % 16]);
  float scale = 1.0f / sqrtf(ds4_lane_sum(lane) / (float)width + eps);
  for (uint32_t i = 0; i < whole; i += 16) {
    v16 y = v_mul(v_load(x + i), v_set1(scale));
    v_store(out + i, weight ? v_mul(y, v_load(weight + i)) : y);
  }
  for (uint32_t i = whole; i < width; i++) out[i] = weight ? x[i] * scale * weight[i] : x[i] * scale;
}

/* gate / (1 + exp(-y)) * up, where y is gate (SiLU) or its GELU polynomial */
INLINE v16 glu_lanes(int kind, v16 g, v16 up) {
  v16 y = kind == DS4_GELU ? v_mul(g, v_fma(v_mul(g, g), v_set1(DS4_GELU_C3), v_set1(DS4_GELU_C1))) : g;
  return v_mul(v_div(g, v_add(v_set1(1.0f), v_exp(v_sub(v_set1(-0.0f), y)))), up);
}

static void k_glu(int kind, float limit, const float *gate, const float *up, uint64_t n, float *out) {
  uint64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    v16 g = v_load(gate + i), u = v_load(up + i), most = v_set1(limit), least = v_set1(-limit);
    if (kind == DS4_SILU_CLAMPED) {
      g = v_below(most, g, most, g);
      u = v_below(most, u, most, u);
      u = v_below(u, least, least, u);
    }
    v_store(out + i, glu_lanes(kind, g, u));
  }
  for (; i < n; i++) out[i] = ds4_glu(kind, limit, gate[i], up[i]);
}

/* ---- attention ----------------------------------------------------------------------------------------------------------------------- */

/* Scratch of one item, all float32. Rows are (token, query head of the group); value vectors are padded to whole lanes with zeros. */
typedef struct tile {
  uint32_t rows, width, value, padded;
  float *q;         /* [rows][width], scaled */
  float *max, *sum; /* [rows], of the split */
  float *out;       /* [rows][padded] */
  float *all;       /* [rows][2 + padded]: maximum, sum, values of the splits before */
  float *key;       /* [width][64]: lanes are keys */
  float *val;       /* [64][padded] */
  float *p;         /* [rows][64] scores, then probabilities */
} tile;

/* 64 keys from row `block` on. Rows that were never written may be read here; their lanes are blended away. */
static void load_keys(const ds4_layout *l, uint32_t layer, uint32_t part, uint32_t head, const ds4_view *view, uint32_t block,
                      uint32_t from, uint32_t to, float *key) {
  const ds4_part *p = &l->part[part];
  uint32_t rows = l->page_rows;
  for (uint32_t r = from / rows * rows; r < to; r += rows) {
    const uint8_t *tile_at = ds4_page_tile(l, ds4_view_page(view, l, r), layer, part, head);
    const uint16_t *scale = (const uint16_t *)(const void *)(tile_at + (uint64_t)p->width * rows);
    float *to_key = key + (r - block);
    for (uint32_t d = 0; d < p->width; d++)
      for (uint32_t i = 0; i < rows; i += 16) {
        uint64_t at = (uint64_t)d * rows + i;
        float *dst = to_key + d * DS4_KEY_BLOCK + i;
        if (rows < 16) { /* a small page */
          const float *f32 = (const float *)(const void *)tile_at;
          const uint16_t *f16 = (const uint16_t *)(const void *)tile_at;
          for (uint32_t k = 0; k < rows; k++)
            dst[k] = p->type == DS4_KV_F32   ? f32[at + k]
                     : p->type == DS4_KV_F16 ? ds4_f16(f16[at + k])
                                             : (float)((const int8_t *)tile_at)[at + k] * ds4_f16(scale[d / p->group * rows + k]);
        } else if (p->type == DS4_KV_F32) {
          v_store(dst, v_load((const float *)(const void *)tile_at + at));
        } else if (p->type == DS4_KV_F16) {
          v_store(dst, v_f16((const uint16_t *)(const void *)tile_at + at));
        } else {
          v_store(dst, v_mul(v_i8((const int8_t *)tile_at + at), v_f16(scale + (uint64_t)(d / p->group) * rows + i)));
        }
      }
  }
}

/* Values of the rows [from, to) of one block; only those are read. */
static void load_values(const ds4_attend_item *it, const ds4_view *view, uint32_t block, uint32_t from, uint32_t to, uint32_t padded,
                        float *val) {
  const ds4_layout *l = it->a->layout;
  const ds4_part *p = &l->part[it->a->value_part];
  uint32_t rows = l->page_rows, whole = p->across ? 0 : p->width / 16 * 16;
  for (uint32_t r = from; r < to; r++) {
    const uint8_t *tile_at = ds4_page_tile(l, ds4_view_page(view, l, r), it->a->layer, it->a->value_part, it->kv);
    const uint16_t *scale = (const uint16_t *)(const void *)(tile_at + (uint64_t)p->width * rows);
    const float *f32 = (const float *)(const void *)tile_at;
    const uint16_t *f16 = (const uint16_t *)(const void *)tile_at;
    const int8_t *i8 = (const int8_t *)tile_at;
    float *dst = val + (r - block) * padded;
    uint32_t row = r % rows, groups = p->group ? p->width / p->group : 0, i = 0;
    uint64_t at = (uint64_t)row * p->width;
    for (; i < whole; i += 16) {
      if (p->type == DS4_KV_F32) v_store(dst + i, v_load(f32 + at + i));
      if (p->type == DS4_KV_F16) v_store(dst + i, v_f16(f16 + at + i));
      if (p->type == DS4_KV_Q8_0 && p->group >= 16)
        v_store(dst + i, v_mul(v_i8(i8 + at + i), v_set1(ds4_f16(scale[row * groups + i / p->group]))));
      if (p->type == DS4_KV_Q8_0 && p->group < 16)
        for (uint32_t k = i; k < i + 16; k++) dst[k] = (float)i8[at + k] * ds4_f16(scale[row * groups + k / p->group]);
    }
    for (; i < p->width; i++) {
      uint64_t k = p->across ? (uint64_t)i * rows + row : at + i;
      uint64_t s = p->group ? (p->across ? (uint64_t)(i / p->group) * rows + row : (uint64_t)row * groups + i / p->group) : 0;
      dst[i] = p->type == DS4_KV_F32 ? f32[k] : p->type == DS4_KV_F16 ? ds4_f16(f16[k]) : (float)i8[k] * ds4_f16(scale[s]);
    }
    for (; i < padded; i++) dst[i] = 0.0f;
  }
}

/* Scores of `n` query rows with all 64 keys of the block: a chain over the head dimension for every key. */
INLINE void score_rows(const tile *t, uint32_t row, const int n) {
  for (int half = 0; half < 64; half += 64 / SCORE_PIECES) {
    v16 acc[ROW_TILE * 4 / SCORE_PIECES];
    for (int i = 0; i < n * 4 / SCORE_PIECES; i++) acc[i] = v_zero();
    const float *key = t->key + half, *q = t->q + (uint64_t)row * t->width;
    for (uint32_t d = 0; d < t->width; d++, key += DS4_KEY_BLOCK)
      for (int i = 0; i < n; i++)
        for (int k = 0; k < 4 / SCORE_PIECES; k++)
          acc[i * (4 / SCORE_PIECES) + k] =
              v_fma(v_set1(q[(uint64_t)i * t->width + d]), v_load(key + 16 * k), acc[i * (4 / SCORE_PIECES) + k]);
    for (int i = 0; i < n; i++)
      for (int k = 0; k < 4 / SCORE_PIECES; k++)
        v_store(t->p + ((uint64_t)row + i) * DS4_KEY_BLOCK + half + 16 * k, acc[i * (4 / SCORE_PIECES) + k]);
  }
}

/* Online softmax of one row over keys [from, to) of the block; the probabilities of all other lanes become 0. */
INLINE void soften(const tile *t, uint32_t row, uint32_t from, uint32_t to) {
  static const float index[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  float *p = t->p + (uint64_t)row * DS4_KEY_BLOCK, lane[16];
  v16 none = v_set1(-INFINITY), first = v_set1((float)from), last = v_set1((float)to), s[4], top = none, sum = v_zero();
  for (int i = 0; i < 4; i++) {
    s[i] = v_load(p + 16 * i);
    if (to - from < DS4_KEY_BLOCK) {
      v16 k = v_add(v_load(index), v_set1(16.0f * (float)i));
      s[i] = v_below(k, first, none, v_below(k, last, s[i], none));
    }
    top = v_max(top, s[i]);
  }
  v_store(lane, top);
  float max = t->max[row];
  for (int i = 0; i < 16; i++) max = lane[i] > max ? lane[i] : max;
  for (int i = 0; i < 4; i++) {
    v16 e = v_exp(v_sub(s[i], v_set1(max)));
    sum = v_add(sum, e);
    v_store(p + 16 * i, e);
  }
  float shrink = ds4_exp(t->max[row] - max);
  t->max[row] = max;
  t->sum[row] = fmaf(t->sum[row], shrink, v_sum(sum));
  float *out = t->out + (uint64_t)row * t->padded;
  for (uint32_t i = 0; i < t->padded; i += 16) v_store(out + i, v_mul(v_load(out + i), v_set1(shrink)));
}

/* Adds probability * value of keys [from, to) to `n` rows, `wide` vectors at a time: a chain over ascending keys for every number. */
INLINE void weigh(const tile *t, uint32_t row, const int n, uint32_t at, const int wide, uint32_t from, uint32_t to) {
  v16 acc[ROW_TILE * WIDE];
  for (int i = 0; i < n; i++)
    for (int w = 0; w < wide; w++) acc[i * wide + w] = v_load(t->out + ((uint64_t)row + i) * t->padded + at + 16 * w);
  for (uint32_t k = from; k < to; k++)
    for (int w = 0; w < wide; w++) {
      v16 v = v_load(t->val + (uint64_t)k * t->padded + at + 16 * w);
      for (int i = 0; i < n; i++) acc[i * wide + w] = v_fma(v_set1(t->p[((uint64_t)row + i) * DS4_KEY_BLOCK + k]), v, acc[i * wide + w]);
    }
  for (int i = 0; i < n; i++)
    for (int w = 0; w < wide; w++) v_store(t->out + ((uint64_t)row + i) * t->padded + at + 16 * w, acc[i * wide + w]);
}

INLINE void attend_rows(const tile *t, uint32_t row, const int n, uint32_t from, uint32_t to) {
  score_rows(t, row, n);
  for (int i = 0; i < n; i++) soften(t, row + i, from, to);
  uint32_t at = 0;
  for (; at + 16 * WIDE <= t->padded; at += 16 * WIDE) weigh(t, row, n, at, WIDE, from, to);
  for (; at < t->padded; at += 16) weigh(t, row, n, at, 1, from, to);
}

/* Keys [from, to) of the block that a query row reads; false: none. */
INLINE bool row_range(const ds4_attend_item *it, uint32_t row, uint32_t group, uint32_t block, uint32_t *from, uint32_t *to) {
  uint32_t lo = it->a->lo[it->token + row / group], hi = it->a->hi[it->token + row / group];
  *from = lo > block ? lo - block : 0;
  *to = hi > block ? ds4_min_u32(hi - block, DS4_KEY_BLOCK) : 0;
  return *from < *to;
}

static void attend_block(const ds4_attend_item *it, const tile *t, const ds4_view *view, uint32_t group, uint32_t block) {
  uint32_t first = DS4_KEY_BLOCK, last = 0, from, to;
  for (uint32_t r = 0; r < t->rows; r += group)
    if (row_range(it, r, group, block, &from, &to)) {
      first = ds4_min_u32(first, from);
      last = ds4_max_u32(last, to);
    }
  if (first >= last) return;
  load_keys(it->a->layout, it->a->layer, 0, it->kv, view, block, block + first, block + last, t->key);
  load_values(it, view, block, block + first, block + last, t->padded, t->val);
  for (uint32_t r = 0; r < t->rows;) {
    uint32_t end_from, end_to;
    bool some = row_range(it, r, group, block, &from, &to);
    if (some && r + ROW_TILE <= t->rows && row_range(it, r + ROW_TILE - 1, group, block, &end_from, &end_to) && from == end_from &&
        to == end_to) {
      attend_rows(t, r, ROW_TILE, from, to); /* ranges only move forward, so the rows between have the same */
      r += ROW_TILE;
      continue;
    }
    if (some) attend_rows(t, r, 1, from, to);
    r++;
  }
}

static tile tile_in(const ds4_attend_item *it, float *scratch) {
  const ds4_attend *a = it->a;
  tile t = {.width = a->layout->part[0].width, .value = a->layout->part[a->value_part].width};
  t.rows = it->n_tokens * (a->n_heads / a->layout->part[0].heads);
  t.padded = ds4_lanes_up(t.value);
  t.key = scratch;
  t.val = t.key + t.width * DS4_KEY_BLOCK;
  t.p = t.val + t.padded * DS4_KEY_BLOCK;
  t.out = t.p + t.rows * DS4_KEY_BLOCK;
  t.q = t.out + t.rows * t.padded;
  t.all = t.q + t.rows * t.width;
  t.max = t.all + t.rows * (2 + t.padded);
  t.sum = t.max + t.rows;
  return t;
}

static void k_attend(const ds4_attend_item *it, float *scratch) {
  const ds4_attend *a = it->a;
  uint32_t group = a->n_heads / a->layout->part[0].heads;
  tile t = tile_in(it, scratch);
  const ds4_view *view = &a->views[a->batch->segment[it->token]];
  for (uint32_t r = 0; r < t.rows; r++) {
    const float *q = a->q + ((uint64_t)(it->token + r / group) * a->n_heads + it->kv * group + r % group) * t.width;
    for (uint32_t d = 0; d < t.width; d++) t.q[(uint64_t)r * t.width + d] = q[d] * a->scale;
    float *all = t.all + (uint64_t)r * (2 + t.padded);
    all[0] = -INFINITY;
    for (uint32_t i = 1; i < 2 + t.padded; i++) all[i] = 0.0f;
  }
  for (uint32_t split = it->split; split < it->split_end; split++) {
    for (uint32_t r = 0; r < t.rows; r++) t.max[r] = -INFINITY, t.sum[r] = 0.0f;
    memset(t.out, 0, (uint64_t)t.rows * t.padded * sizeof *t.out);
    for (uint32_t block = split * DS4_KEY_SPLIT; block < (split + 1) * DS4_KEY_SPLIT; block += DS4_KEY_BLOCK)
      attend_block(it, &t, view, group, block);
    for (uint32_t r = 0; r < t.rows; r++) {
      float *next = t.p; /* [2 + padded], the probabilities are done with */
      next[0] = t.max[r], next[1] = t.sum[r];
      memcpy(next + 2, t.out + (uint64_t)r * t.padded, t.padded * sizeof *next);
      ds4_attend_merge(t.all + (uint64_t)r * (2 + t.padded), next, t.padded);
    }
  }
  for (uint32_t r = 0; r < t.rows; r++) {
    const float *all = t.all + (uint64_t)r * (2 + t.padded);
    if (it->partial) {
      memcpy(it->partial + (uint64_t)r * (2 + t.value), all, (2 + t.value) * sizeof *all);
      continue;
    }
    float *out = a->out + ((uint64_t)(it->token + r / group) * a->n_heads + it->kv * group + r % group) * t.value;
    float inverse = 1.0f / all[1];
    for (uint32_t i = 0; i < t.value; i++) out[i] = all[0] == -INFINITY && all[1] == 0.0f ? 0.0f : all[2 + i] * inverse;
  }
}

#include "sparse.inc.h"
