/* Backend "cpu": kernels chosen for this processor, a pool of threads, weights packed at load. Bit for bit equal to "ref". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"

struct ds4_weight {
  ds4_packed p;
  ds4_matrix from; /* as the file has it; looked at again when it is mapped */
};

/* ---- opening ------------------------------------------------------------------------------------------------------------------------ */

static bool runs_here(const ds4_kernels *k) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (k == &ds4_kernels_avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (k == &ds4_kernels_avx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__)
  if (k == &ds4_kernels_neon) return true;
  if (k == &ds4_kernels_neon_dot) return ds4_neon_has_dot();
#endif
  return k == &ds4_kernels_scalar;
}

/* Does DS4_ISA ask for these? A family's name, neon, asks for its best. */
static bool is_wanted(const char *wanted, const char *isa) {
  size_t n = wanted ? strlen(wanted) : 0;
  return !n || (!strncmp(isa, wanted, n) && (!isa[n] || isa[n] == '-'));
}

/* The best kernels that run here, or those that DS4_ISA names. */
static const ds4_kernels *choose_kernels(ds4_error *err) {
  static const ds4_kernels *const all[] = {
#if defined(__x86_64__)
      &ds4_kernels_avx512, &ds4_kernels_avx2,
#elif defined(__aarch64__)
      &ds4_kernels_neon_dot, &ds4_kernels_neon,
#endif
      &ds4_kernels_scalar};
  const char *wanted = getenv("DS4_ISA");
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (runs_here(all[i]) && is_wanted(wanted, all[i]->isa)) return all[i];
  ds4_fail(err, DS4_EUNSUPPORTED, 0, 0,
           "DS4_ISA is '%.20s', which this build or this processor does not have; unset it, or use ref, scalar, avx2, avx512 or neon",
           wanted);
  return NULL;
}

static void cpu_close(ds4_backend *b) {
  if (!b) return;
  for (uint32_t i = 0; b->scratch && i < ds4_threads_count(b->threads); i++) free(b->scratch[i]);
  ds4_threads_free(b->threads);
  free(b->quants.q);
  free(b->quants.d);
  free(b->scratch);
  free(b->partial);
  free(b->tile);
  free(b);
}

static int cpu_open(int32_t threads, ds4_backend **out, ds4_error *err) {
  const ds4_kernels *k = choose_kernels(err);
  if (!k) return DS4_EUNSUPPORTED;
  ds4_backend *b = calloc(1, sizeof *b);
  if (b) b->k = k;
  if (!b || ds4_threads_new(threads ? (uint32_t)threads : ds4_usable_cpus(), &b->threads)) {
    free(b);
    return ds4_fail(err, DS4_ENOMEM, threads, 0, "the system refused memory or a thread for backend cpu; use fewer threads");
  }
  b->scratch = calloc(ds4_threads_count(b->threads), sizeof *b->scratch);
  if (!b->scratch) {
    cpu_close(b);
    return ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for backend cpu");
  }
  *out = b;
  return DS4_OK;
}

static const char *cpu_isa(const ds4_backend *b) { return b->k->isa; }
static uint32_t cpu_threads(const ds4_backend *b) { return ds4_threads_count(b->threads); }

static void cpu_begin(ds4_backend *b, ds4_poll poll, void *user) { ds4_threads_poll(b->threads, poll, user); }
static void cpu_end(ds4_backend *b) { ds4_threads_poll(b->threads, NULL, NULL); }

int ds4_cpu_run(ds4_backend *b, uint32_t items, ds4_work work, void *ctx) {
  ds4_threads_run(b->threads, items, work, ctx);
  return ds4_threads_stopped(b->threads) ? DS4_ECANCELLED : DS4_OK;
}

/* ---- weights ------------------------------------------------------------------------------------------------------------------------- */

static void pack_item(void *ctx, uint32_t group, uint32_t thread) {
  const ds4_weight *w = ctx;
  (void)thread;
  ds4_pack_group(&w->p, group, &w->from);
}

static int cpu_weight_new(ds4_backend *b, const ds4_matrix *m, ds4_weight **out, ds4_error *err) {
  ds4_weight *w = calloc(1, sizeof *w);
  if (m->rows > UINT32_MAX - DS4_LANES || m->cols > UINT32_MAX - DS4_FP8_TILE || !w) {
    free(w);
    return ds4_fail(err, DS4_ENOMEM, (int64_t)m->rows, (int64_t)m->cols, "the system refused memory for a weight");
  }
  w->from = *m;
  w->p = (ds4_packed){.format = m->format == DS4_FP4 ? DS4_MXFP4 : m->format, .rows = (uint32_t)m->rows, .cols = (uint32_t)m->cols};
  w->p.groups = (w->p.rows + DS4_LANES - 1) / DS4_LANES;
  w->p.group_bytes = ds4_packed_group_bytes(w->p.format, m->cols);
  *out = w;
  if (m->mapped) return DS4_OK;
  w->p.bytes = w->p.group_bytes * w->p.groups;
  w->p.data = ds4_host_alloc(b, w->p.bytes);
  if (!w->p.data) {
    free(w);
    *out = NULL;
    return ds4_fail(err, DS4_ENOMEM, (int64_t)m->nbytes, 0,
                    "the system refused %llu bytes for a weight; the model does not fit this machine's memory",
                    (unsigned long long)m->nbytes);
  }
  ds4_threads_run(b->threads, w->p.groups, pack_item, w);
  return DS4_OK;
}

static void cpu_weight_free(ds4_backend *b, ds4_weight *w) {
  ds4_host_free(b, w->p.data, w->p.bytes);
  free(w);
}

static uint64_t cpu_weight_bytes(const ds4_weight *w) { return w->p.bytes; }

/* ---- embedding and products ----------------------------------------------------------------------------------------------------------- */

static int cpu_embed(ds4_backend *b, const ds4_weight *w, const int32_t *ids, uint32_t n, float *out) {
  (void)b;
  for (uint32_t i = 0; i < n; i++) ds4_unpack_row(&w->p, (uint32_t)ids[i], out + (uint64_t)i * w->p.cols);
  return DS4_OK;
}

typedef struct product {
  ds4_backend *b;
  const ds4_weight *const *w;
  float *const *out;
  const float *x;
  uint32_t n_w, n, step; /* step: groups of an item */
} product;

static bool is_quant(const ds4_packed *p) { return ds4_shape_of(p->format).int8; }

static void quantize_item(void *ctx, uint32_t item, uint32_t thread) {
  product *c = ctx;
  (void)thread;
  for (uint32_t t = item * 8; t < c->n && t < item * 8 + 8; t++) c->b->k->quantize(c->x, t, &c->b->quants);
}

static int quantize(product *c, uint32_t cols) {
  ds4_quants *q = &c->b->quants;
  uint64_t blocks = (uint64_t)c->n * ds4_quants_stride(cols / 32);
  if (blocks > c->b->cap_quants) {
    free(q->q);
    free(q->d);
    q->q = malloc(blocks * 32);
    q->d = malloc(blocks * 12);
    c->b->cap_quants = q->q && q->d ? blocks : 0;
    if (!c->b->cap_quants) return DS4_ENOMEM;
  }
  q->blocks = cols / 32;
  q->stride = ds4_quants_stride(q->blocks);
  q->dq = q->d + blocks;
  q->sum = (int16_t *)(void *)(q->dq + blocks);
  return ds4_cpu_run(c->b, (c->n + 7) / 8, quantize_item, c);
}

static void product_of(const product *c, const ds4_packed *p, uint32_t group, uint32_t groups, float *out) {
  if (is_quant(p))
    c->b->k->matmul_quant(p, group, groups, &c->b->quants, c->n, out);
  else
    c->b->k->matmul_float(p, group, groups, c->x, c->n, out);
}

#define FEW_TOKENS 8u           /* up to here reading the weights takes the time, above it the arithmetic */
#define ITEM_BYTES (256u << 10) /* few tokens: weights that an item reads in one piece */
#define MANY_ITEMS 8u           /* many tokens: items for each thread, so that all end at about the same time */
#define MANY_GROUPS 4u          /* many tokens: groups of an item at most */
#define MAPPED_GROUPS 4u        /* packed before they are multiplied: as many as a kernel takes at once */

static void product_item(void *ctx, uint32_t item, uint32_t thread) {
  const product *c = ctx;
  uint32_t i = 0, first = item * c->step; /* items count through the groups of all matrices; each has whole items */
  for (; first >= (c->w[i]->p.groups + c->step - 1) / c->step * c->step; i++)
    first -= (c->w[i]->p.groups + c->step - 1) / c->step * c->step;
  const ds4_packed *p = &c->w[i]->p;
  uint32_t groups = ds4_min_u32(c->step, p->groups - first);
  if (!c->w[i]->from.mapped) {
    product_of(c, p, first, groups, c->out[i]);
    return;
  }
  ds4_packed one = *p;
  one.data = (uint8_t *)c->b->scratch[thread];
  for (one.first = first; one.first < first + groups; one.first += MAPPED_GROUPS) {
    uint32_t some = ds4_min_u32(MAPPED_GROUPS, first + groups - one.first);
    for (uint32_t g = one.first; g < one.first + some; g++) ds4_pack_group(&one, g, &c->w[i]->from);
    product_of(c, &one, one.first, some, c->out[i]);
  }
}

/* Groups of an item. Few tokens read long pieces of the weights; many work as long on a little. */
static uint32_t item_groups(const ds4_backend *b, uint32_t groups, uint64_t bytes, uint32_t n) {
  uint32_t threads = ds4_threads_count(b->threads);
  uint64_t items = n > FEW_TOKENS ? threads * MANY_ITEMS : bytes / ITEM_BYTES;
  items = items < threads ? threads : items;
  uint32_t step = (uint32_t)((groups + items - 1) / items);
  return n > FEW_TOKENS ? ds4_min_u32(step, MANY_GROUPS) : step;
}

static int cpu_matmul(ds4_backend *b, const ds4_weight *const *w, float *const *out, uint32_t n_w, const float *x, uint32_t n) {
  product c = {.b = b, .w = w, .out = out, .x = x, .n_w = n_w, .n = n};
  uint32_t groups = 0, items = 0;
  uint64_t bytes = 0, mapped = 0; /* mapped: bytes of the largest group; a thread packs MAPPED_GROUPS of them */
  bool quant = false;
  for (uint32_t i = 0; i < n_w; i++) {
    groups += w[i]->p.groups;
    bytes += w[i]->p.group_bytes * w[i]->p.groups;
    quant |= is_quant(&w[i]->p);
    if (w[i]->from.mapped) mapped = w[i]->p.group_bytes > mapped ? w[i]->p.group_bytes : mapped;
  }
  if (mapped && !ds4_cpu_memory(b, MAPPED_GROUPS * ((mapped + 3) / 4), 0)) return DS4_ENOMEM;
  int status = quant ? quantize(&c, w[0]->p.cols) : DS4_OK;
  if (status) return status;
  c.step = item_groups(b, groups, bytes, n);
  for (uint32_t i = 0; i < n_w; i++) items += (w[i]->p.groups + c.step - 1) / c.step;
  return ds4_cpu_run(b, items, product_item, &c);
}

/* ---- token by token --------------------------------------------------------------------------------------------------------------------- */

typedef struct per_token {
  ds4_backend *b;
  void (*work)(const struct per_token *c, uint32_t token);
  uint32_t n;
  const float *x, *weight;
  float *out;
  uint32_t width, heads, interleaved, layer, part;
  float eps;
  const uint32_t *pos;
  const ds4_layout *layout;
  const ds4_view *views;
  const ds4_batch *batch;
} per_token;

#define TOKENS_PER_ITEM 16u

static void token_item(void *ctx, uint32_t item, uint32_t thread) {
  const per_token *c = ctx;
  (void)thread;
  for (uint32_t t = item * TOKENS_PER_ITEM; t < c->n && t < (item + 1) * TOKENS_PER_ITEM; t++) c->work(c, t);
}

static int each_token(per_token *c) { return ds4_cpu_run(c->b, (c->n + TOKENS_PER_ITEM - 1) / TOKENS_PER_ITEM, token_item, c); }

static void norm_token(const per_token *c, uint32_t t) {
  c->b->k->rms_norm(c->x + (uint64_t)t * c->width, c->weight, c->width, c->eps, c->out + (uint64_t)t * c->width);
}

static int cpu_rms_norm(ds4_backend *b, const float *x, const float *weight, uint32_t n, uint32_t width, float eps, float *out) {
  per_token c = {.b = b, .work = norm_token, .n = n, .x = x, .weight = weight, .width = width, .eps = eps, .out = out};
  return each_token(&c);
}

static void rope_token(const per_token *c, uint32_t t) {
  uint32_t half = c->width / 2, apart = c->interleaved ? 1 : half, step = c->interleaved ? 2 : 1;
  const float *table = c->weight + (uint64_t)c->pos[t] * half * 2;
  for (uint32_t h = 0; h < c->heads; h++) {
    float *x = c->out + ((uint64_t)t * c->heads + h) * c->width;
    for (uint32_t i = 0; i < half; i++) {
      float *p = x + i * step, re = p[0] * table[2 * i] - p[apart] * table[2 * i + 1],
            im = p[0] * table[2 * i + 1] + p[apart] * table[2 * i];
      p[0] = re;
      p[apart] = im;
    }
  }
}

static int cpu_rope(ds4_backend *b, float *x, const uint32_t *pos, uint32_t n, uint32_t heads, uint32_t width, const float *table,
                    uint32_t interleaved) {
  per_token c = {.b = b,
                 .work = rope_token,
                 .n = n,
                 .out = x,
                 .pos = pos,
                 .heads = heads,
                 .width = width,
                 .weight = table,
                 .interleaved = interleaved};
  return each_token(&c);
}

typedef struct elements {
  ds4_backend *b;
  const float *x, *y;
  float *out;
  uint64_t n;
  int kind;
  float limit;
} elements;

#define ELEMENTS_PER_ITEM 16384u

static uint64_t elements_of(const elements *c, uint32_t item) {
  uint64_t from = (uint64_t)item * ELEMENTS_PER_ITEM;
  return c->n - from < ELEMENTS_PER_ITEM ? c->n - from : ELEMENTS_PER_ITEM;
}

static void glu_item(void *ctx, uint32_t item, uint32_t thread) {
  const elements *c = ctx;
  uint64_t from = (uint64_t)item * ELEMENTS_PER_ITEM;
  (void)thread;
  c->b->k->glu(c->kind, c->limit, c->x + from, c->y + from, elements_of(c, item), c->out + from);
}

static void add_item(void *ctx, uint32_t item, uint32_t thread) {
  const elements *c = ctx;
  (void)thread;
  float *x = c->out + (uint64_t)item * ELEMENTS_PER_ITEM;
  const float *y = c->y + (uint64_t)item * ELEMENTS_PER_ITEM;
  for (uint64_t i = 0; i < elements_of(c, item); i++) x[i] += y[i];
}

static int each_element(elements *c, ds4_work work) {
  return ds4_cpu_run(c->b, (uint32_t)((c->n + ELEMENTS_PER_ITEM - 1) / ELEMENTS_PER_ITEM), work, c);
}

static int cpu_glu(ds4_backend *b, int kind, float limit, const float *gate, const float *up, uint64_t n, float *out) {
  elements c = {.b = b, .x = gate, .y = up, .out = out, .n = n, .kind = kind, .limit = limit};
  return each_element(&c, glu_item);
}

static int cpu_add(ds4_backend *b, float *x, const float *y, uint64_t n) {
  elements c = {.b = b, .y = y, .out = x, .n = n};
  return each_element(&c, add_item);
}

/* ---- rows -------------------------------------------------------------------------------------------------------------------------------- */

static void rows_token(const per_token *c, uint32_t t) {
  ds4_row_write(c->layout, c->layer, c->part, &c->views[c->batch->segment[t]], c->pos[t], c->x + (uint64_t)t * c->width, c->b->k->to_f16);
}

static int cpu_rows_write(ds4_backend *b, const ds4_layout *l, uint32_t layer, uint32_t part, const ds4_view *views, const ds4_batch *batch,
                          const uint32_t *row, const float *x) {
  per_token c = {.b = b,
                 .work = rows_token,
                 .n = batch->n,
                 .layout = l,
                 .layer = layer,
                 .part = part,
                 .views = views,
                 .batch = batch,
                 .pos = row,
                 .x = x};
  c.width = l->part[part].heads * l->part[part].width;
  return each_token(&c);
}

/* ---- attention ---------------------------------------------------------------------------------------------------------------------------- */

#define TILE_ROWS 96u /* query rows that share one conversion of keys and values */

uint64_t ds4_attend_scratch(const ds4_attend *a, uint32_t n_tokens) {
  uint64_t rows = (uint64_t)n_tokens * (a->n_heads / a->layout->part[0].heads), width = a->layout->part[0].width;
  uint64_t padded = ds4_lanes_up(a->layout->part[a->value_part].width);
  return DS4_KEY_BLOCK * (width + padded) + rows * (DS4_KEY_BLOCK + 2 * padded + width + 4);
}

typedef struct attention {
  ds4_backend *b;
  const ds4_attend *a;
  uint32_t tile_tokens, n_tiles, splits; /* splits 1: an item does all of its own */
  uint32_t *tile;                        /* [n_tiles] first token; the next one's begin, or the end of the batch, ends it */
  uint64_t partial_floats;               /* of one item */
} attention;

static uint32_t tile_end(const attention *c, uint32_t tile) { return tile + 1 < c->n_tiles ? c->tile[tile + 1] : c->a->batch->n; }

static void split_range(const attention *c, uint32_t tile, uint32_t *from, uint32_t *to) {
  *from = UINT32_MAX, *to = 0;
  for (uint32_t t = c->tile[tile]; t < tile_end(c, tile); t++) {
    if (c->a->lo[t] >= c->a->hi[t]) continue;
    *from = ds4_min_u32(*from, c->a->lo[t] / DS4_KEY_SPLIT);
    *to = ds4_max_u32(*to, (c->a->hi[t] - 1) / DS4_KEY_SPLIT + 1);
  }
  if (*from > *to) *from = *to;
}

static void attend_item(void *ctx, uint32_t item, uint32_t thread) {
  const attention *c = ctx;
  uint32_t heads = c->a->layout->part[0].heads, split = item % c->splits, tile = item / c->splits / heads;
  ds4_attend_item it = {.a = c->a, .token = c->tile[tile], .n_tokens = tile_end(c, tile) - c->tile[tile], .kv = item / c->splits % heads};
  split_range(c, tile, &it.split, &it.split_end);
  if (c->splits > 1) {
    it.partial = c->b->partial + item * c->partial_floats;
    it.split = ds4_min_u32(it.split + split, it.split_end);
    it.split_end = ds4_min_u32(it.split + 1, it.split_end);
  }
  c->b->k->attend(&it, c->b->scratch[thread]);
}

/* Merges the splits of one tile and head in ascending order and writes the result; the same steps as inside one item. */
static void merge_item(void *ctx, uint32_t i, uint32_t thread) {
  const attention *c = ctx;
  const ds4_attend *a = c->a;
  uint32_t heads = a->layout->part[0].heads, group = a->n_heads / heads, width = a->layout->part[a->value_part].width;
  uint32_t tile = i / heads, kv = i % heads, rows = (tile_end(c, tile) - c->tile[tile]) * group, padded = ds4_lanes_up(width);
  (void)thread;
  for (uint32_t r = 0; r < rows; r++) {
    float *all = c->b->partial + (uint64_t)i * c->splits * c->partial_floats + (uint64_t)r * (2 + padded);
    for (uint32_t s = 1; s < c->splits; s++) {
      const float *next = all + s * c->partial_floats;
      c->b->k->attend_merge(all, next[0], next[1], next + 2, padded);
    }
    ds4_attend_result(all, width, a->out + ((uint64_t)(c->tile[tile] + r / group) * a->n_heads + kv * group + r % group) * width);
  }
}

static float *floats_new(uint64_t n) { return aligned_alloc(64, (n * sizeof(float) + 63) / 64 * 64); }

bool ds4_cpu_memory(ds4_backend *b, uint64_t scratch, uint64_t partial) {
  for (uint32_t i = 0; scratch > b->cap_scratch && i < ds4_threads_count(b->threads); i++) {
    free(b->scratch[i]);
    if (!(b->scratch[i] = floats_new(scratch))) {
      b->cap_scratch = 0;
      return false;
    }
  }
  if (scratch > b->cap_scratch) b->cap_scratch = scratch;
  if (partial <= b->cap_partial) return true;
  free(b->partial);
  b->partial = floats_new(partial);
  b->cap_partial = b->partial ? partial : 0;
  return b->partial;
}

/* Tiles of tokens of one segment each. */
static bool cut_tiles(attention *c) {
  const ds4_batch *batch = c->a->batch;
  if (batch->n > c->b->cap_tile) {
    free(c->b->tile);
    c->b->tile = malloc(batch->n * sizeof *c->b->tile);
    c->b->cap_tile = c->b->tile ? batch->n : 0;
  }
  c->tile = c->b->tile;
  for (uint32_t t = 0; c->tile && t < batch->n; t++)
    if (!t || batch->segment[t] != batch->segment[t - 1] || t - c->tile[c->n_tiles - 1] == c->tile_tokens) c->tile[c->n_tiles++] = t;
  return c->tile;
}

static int cpu_attend(ds4_backend *b, const ds4_attend *a) {
  uint32_t heads = a->layout->part[0].heads, group = a->n_heads / heads;
  attention c = {.b = b, .a = a, .tile_tokens = group >= TILE_ROWS ? 1 : TILE_ROWS / group, .splits = 1};
  if (!cut_tiles(&c)) return DS4_ENOMEM;
  uint32_t most = 1, from, to;
  for (uint32_t i = 0; i < c.n_tiles; i++) {
    split_range(&c, i, &from, &to);
    most = ds4_max_u32(most, to - from);
  }
  if (c.n_tiles * heads < ds4_threads_count(b->threads) * 4) c.splits = most;
  uint32_t tile_tokens = ds4_min_u32(c.tile_tokens, a->batch->n);
  c.partial_floats = (uint64_t)tile_tokens * group * (2 + ds4_lanes_up(a->layout->part[a->value_part].width));
  if (!ds4_cpu_memory(b, ds4_attend_scratch(a, tile_tokens), c.splits > 1 ? c.partial_floats * c.n_tiles * heads * c.splits : 0))
    return DS4_ENOMEM;
  int status = ds4_cpu_run(b, c.n_tiles * heads * c.splits, attend_item, &c);
  return status || c.splits == 1 ? status : ds4_cpu_run(b, c.n_tiles * heads, merge_item, &c);
}

const ds4_ops ds4_cpu_ops = {
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .isa = cpu_isa,
    .threads = cpu_threads,
    .mem_alloc = ds4_host_alloc,
    .mem_free = ds4_host_free,
    .copy_in = ds4_host_copy,
    .copy_out = ds4_host_copy,
    .copy = ds4_host_copy,
    .wait = ds4_host_wait,
    .begin = cpu_begin,
    .end = cpu_end,
    .weight_new = cpu_weight_new,
    .weight_free = cpu_weight_free,
    .weight_bytes = cpu_weight_bytes,
    .embed = cpu_embed,
    .rms_norm = cpu_rms_norm,
    .matmul = cpu_matmul,
    .rope = cpu_rope,
    .rows_write = cpu_rows_write,
    .rows_read = ds4_rows_read,
    .attend = cpu_attend,
    .glu = cpu_glu,
    .add = cpu_add,
    .scale = ds4_host_scale,
    .clear = ds4_host_clear,
    .gather = ds4_host_gather,
    .scatter_add = ds4_host_scatter_add,
    .add_rows = ds4_cpu_add_rows,
    .rope_tail = ds4_cpu_rope_tail,
    .compress = ds4_cpu_compress,
    .pick = ds4_cpu_pick,
    .attend_sparse = ds4_cpu_attend_sparse,
    .round_fp8 = ds4_cpu_round_fp8,
    .round_fp4 = ds4_cpu_round_fp4,
    .mix_weights = ds4_cpu_mix_weights,
    .mix_in = ds4_cpu_mix_in,
    .mix_out = ds4_cpu_mix_out,
};
