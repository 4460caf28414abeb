/* Attention over pages, for a tile of query rows. Included by kernels.inc.h; the file of an instruction set defines before:
 *
 *   ROW_TILE       query rows that are taken together, at most 8
 *   SCORE_PIECES   1, 2 or 4: parts of a block of 64 keys that are scored one after the other
 *   WIDE           vectors of a value that are summed together
 *
 * How many rows are taken together, and whether keys and values are read from the page or from a converted copy, decides nothing but speed: every score is one
 * chain over the head dimension, every result one chain over ascending keys. */

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

/* 64 keys [width][64], or 64 values [64][stride]: float32 in scratch, or a page's own tile. */
typedef struct source {
  int type;
  uint32_t stride, group; /* of values; numbers that share a scale of q8_0 */
  const void *data;
  const uint16_t *scale;
  const uint8_t *ahead; /* what is read next, asked for while this is read: pages lie apart, and the processor does not foresee them */
  uint32_t ahead_step;  /* bytes of it per number of a key, or per value */
} source;

/* Keys that a query row reads of a block. */
typedef struct range {
  uint32_t from, to;
} range;

/* ---- converted copies ---------------------------------------------------------------------------------------------------------------- */

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

/* ---- a few query rows and one block -------------------------------------------------------------------------------------------------- */

INLINE v16 source_lanes(const int type, const source *s, uint64_t at) {
  if (type == DS4_KV_F32) return v_load((const float *)s->data + at);
  return type == DS4_KV_F16 ? v_f16((const uint16_t *)s->data + at) : v_i8((const int8_t *)s->data + at);
}

/* Numbers or values between two looks ahead: the loops in between keep all sums in registers. */
#define AHEAD 8u
INLINE void look_ahead(const source *s, uint32_t i, uint32_t end) {
  for (uint32_t k = i * s->ahead_step; k < end * s->ahead_step; k += 64) __builtin_prefetch(s->ahead + k);
}

#define KEY_VECTORS (4 / SCORE_PIECES)

/* Scores of `n` query rows with all 64 keys of the block: a chain over the head dimension for every key. */
INLINE void score_rows(const int type, const source *keys, const float *q, uint32_t width, const int n, float *p) {
  const bool scaled = type == DS4_KV_Q8_0;
  const uint32_t span = scaled ? keys->group : width;
  for (uint32_t piece = 0; piece < DS4_KEY_BLOCK; piece += 16 * KEY_VECTORS) {
    v16 acc[ROW_TILE * KEY_VECTORS], scale[KEY_VECTORS], key[KEY_VECTORS];
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int k = 0; k < KEY_VECTORS; k++) acc[i * KEY_VECTORS + k] = v_zero();
    for (uint32_t first = 0; first < width; first += span) {
      if (scaled)
        UNROLL for (int k = 0; k < KEY_VECTORS; k++) scale[k] =
            v_f16(keys->scale + (uint64_t)(first / span) * DS4_KEY_BLOCK + piece + 16 * k);
      for (uint32_t d = first, end; d < first + span;) {
        end = ds4_min_u32(d + AHEAD, first + span);
        if (!piece) look_ahead(keys, d, end);
        for (; d < end; d++) {
          UNROLL for (int k = 0; k < KEY_VECTORS; k++) {
            key[k] = source_lanes(type, keys, (uint64_t)d * DS4_KEY_BLOCK + piece + 16 * k);
            if (scaled) key[k] = v_mul(key[k], scale[k]);
          }
          UNROLL for (int i = 0; i < n; i++) {
            v16 one = v_set1(q[(uint64_t)i * width + d]);
            UNROLL for (int k = 0; k < KEY_VECTORS; k++) acc[i * KEY_VECTORS + k] = v_fma(one, key[k], acc[i * KEY_VECTORS + k]);
          }
        }
      }
    }
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int k = 0; k < KEY_VECTORS; k++)
        v_store(p + (uint64_t)i * DS4_KEY_BLOCK + piece + 16 * k, acc[i * KEY_VECTORS + k]);
  }
}

/* Online softmax of `n` rows, each over its keys of the block; the probabilities of all other lanes become 0. shrink: factors for what was summed before. */
INLINE void soften(const tile *t, uint32_t row, const int n, const range *r, float *shrink) {
  static const float index[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  float fall[16] = {0};
  const v16 none = v_set1(-INFINITY);
  for (int i = 0; i < n; i++) {
    float *p = t->p + ((uint64_t)row + i) * DS4_KEY_BLOCK;
    v16 s[4];
    UNROLL for (int k = 0; k < 4; k++) s[k] = v_load(p + 16 * k);
    if (r[i].to - r[i].from < DS4_KEY_BLOCK) {
      v16 first = v_set1((float)r[i].from), last = v_set1((float)r[i].to);
      UNROLL for (int k = 0; k < 4; k++) {
        v16 at = v_add(v_load(index), v_set1(16.0f * (float)k));
        s[k] = v_below(at, first, none, v_below(at, last, s[k], none));
        v_store(p + 16 * k, s[k]);
      }
    }
    float old = t->max[row + i], top = v_largest(v_max(v_max(s[0], s[1]), v_max(s[2], s[3])));
    t->max[row + i] = top > old ? top : old;
    fall[i] = old - t->max[row + i];
  }
  v_store(shrink, v_exp(v_load(fall)));
  for (int i = 0; i < n; i++) {
    float *p = t->p + ((uint64_t)row + i) * DS4_KEY_BLOCK;
    v16 sum = v_zero(), max = v_set1(t->max[row + i]);
    UNROLL for (int k = 0; k < 4; k++) {
      v16 e = v_exp(v_sub(v_load(p + 16 * k), max));
      sum = v_add(sum, e);
      v_store(p + 16 * k, e);
    }
    t->sum[row + i] = fmaf(t->sum[row + i], shrink[i], v_sum(sum));
  }
}

/* out = out * shrink + probability * value of keys [from, to), for `n` rows and `wide` vectors from `at` on. */
INLINE void weigh(const int type, const tile *t, const source *values, uint32_t row, const int n, uint32_t at, const int wide, range r,
                  const float *shrink) {
  const bool scaled = type == DS4_KV_Q8_0;
  v16 acc[ROW_TILE * WIDE];
  UNROLL for (int i = 0; i < n; i++) UNROLL for (int w = 0; w < wide; w++) acc[i * wide + w] =
      v_mul(v_load(t->out + ((uint64_t)row + i) * t->padded + at + 16 * w), v_set1(shrink[i]));
  const float *p = t->p + (uint64_t)row * DS4_KEY_BLOCK;
  for (uint32_t k = r.from, end; k < r.to;) {
    v16 v[WIDE];
    end = ds4_min_u32(k + AHEAD, r.to);
    if (!at) look_ahead(values, k, end);
    for (; k < end; k++) {
      UNROLL for (int w = 0; w < wide; w++) {
        v[w] = source_lanes(type, values, (uint64_t)k * values->stride + at + 16 * w);
        if (scaled) v[w] = v_mul(v[w], v_set1_f16(values->scale[(k * values->stride + at + 16 * w) / values->group]));
      }
      UNROLL for (int i = 0; i < n; i++) {
        v16 one = v_set1(p[(uint64_t)i * DS4_KEY_BLOCK + k]);
        UNROLL for (int w = 0; w < wide; w++) acc[i * wide + w] = v_fma(one, v[w], acc[i * wide + w]);
      }
    }
  }
  UNROLL for (int i = 0; i < n; i++) UNROLL for (int w = 0; w < wide; w++)
      v_store(t->out + ((uint64_t)row + i) * t->padded + at + 16 * w, acc[i * wide + w]);
}

INLINE void weigh_all(const int type, const tile *t, const source *values, uint32_t row, const int n, range r, const float *shrink) {
  uint32_t at = 0;
  for (; at + 16 * WIDE <= t->padded; at += 16 * WIDE) weigh(type, t, values, row, n, at, WIDE, r, shrink);
  for (; at < t->padded; at += 16) weigh(type, t, values, row, n, at, 1, r, shrink);
}

/* The keys that all `n` rows read are taken together; what a row reads before and behind them, alone. */
INLINE void weigh_rows(const int type, const tile *t, const source *values, uint32_t row, const int n, const range *r, float *shrink) {
  range all = r[0];
  for (int i = 1; i < n; i++) {
    all.from = ds4_max_u32(all.from, r[i].from);
    all.to = ds4_min_u32(all.to, r[i].to);
  }
  if (all.from >= all.to) all = (range){DS4_KEY_BLOCK, DS4_KEY_BLOCK};
  for (int i = 0; i < n; i++) {
    range own = {r[i].from, ds4_min_u32(r[i].to, all.from)};
    if (own.from >= own.to) continue;
    weigh_all(type, t, values, row + i, 1, own, shrink + i);
    shrink[i] = 1.0f;
  }
  if (all.from < all.to) weigh_all(type, t, values, row, n, all, shrink);
  const float one = 1.0f;
  for (int i = 0; i < n; i++) {
    range own = {ds4_max_u32(r[i].from, all.to), r[i].to};
    if (own.from < own.to) weigh_all(type, t, values, row + i, 1, own, &one);
  }
}

INLINE void attend_rows(const int type, const tile *t, const source *keys, const source *values, uint32_t row, const int n,
                        const range *r) {
  float shrink[16];
  score_rows(type, keys, t->q + (uint64_t)row * t->width, t->width, n, t->p + (uint64_t)row * DS4_KEY_BLOCK);
  soften(t, row, n, r, shrink);
  weigh_rows(type, t, values, row, n, r, shrink);
}

/* `n` rows, up to ROW_TILE. */
INLINE void attend_some(const int type, const tile *t, const source *keys, const source *values, uint32_t row, uint32_t n, const range *r) {
  switch (n) {
#define CASE(k)                                                                                                                            \
  case k: attend_rows(type, t, keys, values, row, k <= ROW_TILE ? k : 1, r); break
    CASE(1);
    CASE(2);
    CASE(3);
    CASE(4);
    CASE(5);
    CASE(6);
    CASE(7);
    CASE(8);
#undef CASE
  }
}
static void attend_f32(const tile *t, const source *keys, const source *values, uint32_t row, uint32_t n, const range *r) {
  attend_some(DS4_KV_F32, t, keys, values, row, n, r);
}
static void attend_f16(const tile *t, const source *keys, const source *values, uint32_t row, uint32_t n, const range *r) {
  attend_some(DS4_KV_F16, t, keys, values, row, n, r);
}
static void attend_q8(const tile *t, const source *keys, const source *values, uint32_t row, uint32_t n, const range *r) {
  attend_some(DS4_KV_Q8_0, t, keys, values, row, n, r);
}

/* ---- blocks and splits ----------------------------------------------------------------------------------------------------------------- */

/* Keys of the block that a query row reads; from >= to: none. */
INLINE range row_range(const ds4_attend_item *it, uint32_t token, uint32_t block) {
  uint32_t lo = it->a->lo[it->token + token], hi = it->a->hi[it->token + token];
  return (range){lo > block ? lo - block : 0, hi > block ? ds4_min_u32(hi - block, DS4_KEY_BLOCK) : 0};
}

/* A page's own tile, where vectors can be read from it. */
static void page_source(const ds4_layout *l, uint32_t layer, uint32_t part, uint32_t head, const ds4_view *view, uint32_t block,
                        source *s) {
  const ds4_part *p = &l->part[part];
  s->type = (int)p->type;
  s->stride = p->width;
  s->group = p->group;
  s->data = ds4_page_tile(l, ds4_view_page(view, l, block), layer, part, head);
  s->scale = (const uint16_t *)(const void *)((const uint8_t *)s->data + (uint64_t)p->width * DS4_KEY_BLOCK);
}

/* Can vectors be read from the pages, and are they worth no copy? */
static bool reads_pages(const ds4_attend_item *it, const tile *t) {
  const ds4_layout *l = it->a->layout;
  const ds4_part *key = &l->part[0], *value = &l->part[it->a->value_part];
  return (t->rows <= 2 * ROW_TILE || key->type == DS4_KV_F32) && l->page_rows == DS4_KEY_BLOCK && !value->across &&
         value->width % 16 == 0 && key->type == value->type && value->group % 16 == 0;
}

/* Few rows read the page itself; more are worth a copy that is converted once, unless there is nothing to convert. */
static void block_sources(const ds4_attend_item *it, const tile *t, const ds4_view *view, uint32_t block, range r, source *keys,
                          source *values) {
  const ds4_layout *l = it->a->layout;
  if (reads_pages(it, t)) {
    source next;
    page_source(l, it->a->layer, 0, it->kv, view, block, keys);
    page_source(l, it->a->layer, it->a->value_part, it->kv, view, block, values);
    keys->ahead = values->data, keys->ahead_step = (uint32_t)(l->part[it->a->value_part].tile_bytes / l->part[0].width);
    page_source(l, it->a->layer, 0, it->kv, view, block + DS4_KEY_BLOCK < it->a->hi[it->token] ? block + DS4_KEY_BLOCK : block, &next);
    values->ahead = next.data, values->ahead_step = (uint32_t)(l->part[0].tile_bytes / DS4_KEY_BLOCK);
    return;
  }
  load_keys(l, it->a->layer, 0, it->kv, view, block, block + r.from, block + r.to, t->key);
  load_values(it, view, block, block + r.from, block + r.to, t->padded, t->val);
  *keys = (source){.type = DS4_KV_F32, .data = t->key};
  *values = (source){.type = DS4_KV_F32, .data = t->val, .stride = t->padded};
}

static void attend_block(const ds4_attend_item *it, const tile *t, const ds4_view *view, uint32_t group, uint32_t block) {
  uint32_t first = UINT32_MAX, end = 0; /* the first row that reads something, and behind the last */
  range all = {DS4_KEY_BLOCK, 0};
  for (uint32_t token = 0; token < it->n_tokens; token++) {
    range r = row_range(it, token, block);
    if (r.from >= r.to) continue;
    all.from = ds4_min_u32(all.from, r.from);
    all.to = ds4_max_u32(all.to, r.to);
    first = ds4_min_u32(first, token * group);
    end = (token + 1) * group;
  }
  if (first >= end) return;
  source keys, values;
  block_sources(it, t, view, block, all, &keys, &values);
  const uint32_t tiles = (end - first + ROW_TILE - 1) / ROW_TILE, most = (end - first + tiles - 1) / tiles; /* of about the same size */
  for (uint32_t row = first, n; row < end; row += n ? n : 1) {
    range r[ROW_TILE];
    for (n = 0; n < most && row + n < end; n++) {
      r[n] = row_range(it, (row + n) / group, block);
      if (r[n].from >= r[n].to) break;
    }
    if (keys.type == DS4_KV_F32) attend_f32(t, &keys, &values, row, n, r);
    if (keys.type == DS4_KV_F16) attend_f16(t, &keys, &values, row, n, r);
    if (keys.type == DS4_KV_Q8_0) attend_q8(t, &keys, &values, row, n, r);
  }
}

/* Adds a later split (maximum, sum, [width] values, a multiple of 16) to `into`, [2 + width]; an empty one (sum 0, maximum -inf) changes nothing. */
static void k_attend_merge(float *into, float max, float sum, const float *values, uint32_t width) {
  if (max == -INFINITY && sum == 0.0f) return;
  if (into[0] == -INFINITY && into[1] == 0.0f) {
    into[0] = max, into[1] = sum;
    memcpy(into + 2, values, width * sizeof *into);
    return;
  }
  float top = max > into[0] ? max : into[0], a = ds4_exp(into[0] - top), b = ds4_exp(max - top);
  into[0] = top;
  into[1] = fmaf(into[1], a, sum * b);
  for (uint32_t i = 0; i < width; i += 16)
    v_store(into + 2 + i, v_fma(v_load(into + 2 + i), v_set1(a), v_mul(v_load(values + i), v_set1(b))));
}

/* Empty results for the rows of a tile. */
static void clear_splits(const tile *t) {
  for (uint32_t r = 0; r < t->rows; r++) t->max[r] = -INFINITY, t->sum[r] = 0.0f;
  memset(t->out, 0, (uint64_t)t->rows * t->padded * sizeof *t->out);
}
static void clear_all(const tile *t) {
  memset(t->all, 0, (uint64_t)t->rows * (2 + t->padded) * sizeof *t->all);
  for (uint32_t r = 0; r < t->rows; r++) t->all[(uint64_t)r * (2 + t->padded)] = -INFINITY;
}
static void merge_split(const tile *t) {
  for (uint32_t r = 0; r < t->rows; r++)
    k_attend_merge(t->all + (uint64_t)r * (2 + t->padded), t->max[r], t->sum[r], t->out + (uint64_t)r * t->padded, t->padded);
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
  t.all = it->partial ? it->partial : t.q + t.rows * t.width;
  t.max = t.q + t.rows * (t.width + 2 + t.padded);
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
  }
  clear_all(&t);
  for (uint32_t split = it->split; split < it->split_end; split++) {
    clear_splits(&t);
    for (uint32_t block = split * DS4_KEY_SPLIT; block < (split + 1) * DS4_KEY_SPLIT; block += DS4_KEY_BLOCK)
      attend_block(it, &t, view, group, block);
    merge_split(&t);
  }
  for (uint32_t r = 0; !it->partial && r < t.rows; r++)
    ds4_attend_result(t.all + (uint64_t)r * (2 + t.padded), t.value,
                      a->out + ((uint64_t)(it->token + r / group) * a->n_heads + it->kv * group + r % group) * t.value);
}
