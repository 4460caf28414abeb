/* An engine from its settings and tensors: declared by the architecture, checked here, handed to the backend. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats.h"
#include "kv.h"
#include "smallfloat.h"

static const ds4_arch *const architectures[] = {&ds4_llama, &ds4_qwen3, &ds4_gemma3, &ds4_deepseek_v4};
static const ds4_ops *const backends[] = {&ds4_ref_ops, &ds4_cpu_ops};
#define COUNT(a) (sizeof(a) / sizeof *(a))

#ifdef DS4_TEST
void ds4_trace(ds4_engine *e, const float *x, uint64_t n) {
  for (uint64_t i = 0; i < n && e->trace_n < e->trace_cap; i++) e->trace[e->trace_n++] = x[i];
}

void ds4_trace_ids(ds4_engine *e, const uint32_t *x, uint64_t n) {
  for (uint64_t i = 0; i < n && e->trace_n < e->trace_cap; i++) e->trace[e->trace_n++] = (float)x[i];
}

bool ds4_fault_hit(ds4_faults *f, int kind) {
  uint64_t seen = atomic_fetch_add(&f->seen[kind], 1) + 1, at = atomic_load(&f->at[kind]);
  return at && seen == at;
}
#endif

int ds4_test_build(void) {
#ifdef DS4_TEST
  return 1;
#else
  return 0;
#endif
}

uint64_t ds4_engine_trace(ds4_engine *e, float *out, uint64_t n) {
  uint64_t written = e->trace_n;
  e->trace = out;
  e->trace_cap = out ? n : 0;
  e->trace_n = 0;
  return written;
}

uint64_t ds4_engine_fault(ds4_engine *e, int32_t kind, uint64_t k) {
  if (kind < 0 || kind >= DS4_FAULTS) return 0;
  atomic_store(&e->faults.at[kind], 0);
  uint64_t seen = atomic_exchange(&e->faults.seen[kind], 0);
  atomic_store(&e->faults.at[kind], k);
  return seen;
}

/* ---- life of an engine ------------------------------------------------------------------------------------------------------------------ */

int ds4_engine_new(const char *arch, const char *backend, int32_t threads, ds4_engine **out, ds4_error *err) {
  *out = NULL;
  const ds4_arch *a = NULL;
  const ds4_ops *ops = NULL;
  for (size_t i = 0; i < COUNT(architectures); i++)
    if (!strcmp(architectures[i]->name, arch)) a = architectures[i];
  for (size_t i = 0; i < COUNT(backends); i++)
    if (!strcmp(backends[i]->name, backend)) ops = backends[i];
  const char *isa = getenv("DS4_ISA"); /* ref stands in for any kernels: they are tested against it */
  if (ops == &ds4_cpu_ops && isa && !strcmp(isa, "ref")) ops = &ds4_ref_ops;
  if (!a)
    return ds4_fail(err, DS4_EUNSUPPORTED, 0, 0, "architecture '%.60s' is not known; this version has llama, qwen3, gemma3 and deepseek_v4",
                    arch);
  if (!ops) return ds4_fail(err, DS4_EUNSUPPORTED, 0, 0, "backend '%.60s' is not known; this version has cpu and ref", backend);
  if (threads < 0 || threads > 256)
    return ds4_fail(err, DS4_EINVAL, threads, 256, "threads is %d; 0 (all CPUs this process may use) to 256 are possible", threads);
  ds4_engine *e = calloc(1, sizeof *e);
  if (!e) return ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for an engine");
  e->arch = a;
  e->ops = ops;
  e->pid = getpid();
  e->reach_slack = 256;
  e->kv_types = 1u << DS4_KV_F32 | 1u << DS4_KV_F16 | 1u << DS4_KV_Q8_0;
  atomic_store(&e->refs, 1);
  pthread_mutex_init(&e->lock, NULL);
  pthread_cond_init(&e->turn, NULL);
  int status = ops->open(threads, &e->backend, err);
  if (status) {
    ds4_engine_release(e);
    return status;
  }
  *out = e;
  return DS4_OK;
}

void ds4_engine_hold(ds4_engine *e) { atomic_fetch_add(&e->refs, 1); }

static void floats_free(ds4_engine *e, float *p, uint64_t n) {
  if (p) e->ops->mem_free(e->backend, p, n * sizeof *p);
}

static void buffers_free(ds4_engine *e) {
  for (uint32_t i = 0; i < e->n_buffers; i++) {
    floats_free(e, e->buffer[i], (uint64_t)e->buffer_width[i] * e->buffer_tokens);
    e->buffer[i] = NULL;
  }
  free(e->ids);
  free(e->scratch);
  e->ids = NULL;
  e->scratch = NULL;
  e->buffer_tokens = 0;
}

static void head_free(ds4_engine *e) {
  floats_free(e, e->head_x, (uint64_t)e->head_rows * e->width);
  floats_free(e, e->head_scratch, (uint64_t)e->head_rows * e->width);
  floats_free(e, e->head_logits, (uint64_t)e->head_rows * e->vocab);
  e->head_x = e->head_scratch = e->head_logits = NULL;
  e->head_rows = 0;
}

void ds4_engine_release(ds4_engine *e) {
  if (atomic_fetch_sub(&e->refs, 1) > 1 || e->pid != getpid()) return; /* a forked child has no threads to end */
  if (e->backend) {
    ds4_profile_free(e);
    ds4_pool_destroy(e);
    buffers_free(e);
    head_free(e);
    for (int i = 0; i < DS4_ROPES; i++) floats_free(e, e->rope[i].table, (uint64_t)e->rope[i].positions * e->rope[i].half * 2);
    for (uint32_t i = 0; i < e->n_tensors; i++) {
      if (e->tensors[i].weight) e->ops->weight_free(e->backend, e->tensors[i].weight);
      floats_free(e, e->tensors[i].values, e->tensors[i].cols);
    }
    e->ops->close(e->backend);
  }
  for (ds4_setting *s = e->settings, *next; s; s = next) {
    next = s->next;
    free(s->values);
    free(s);
  }
  for (uint32_t i = 0; i < DS4_SPARE_LOGITS; i++) free(atomic_load(&e->spare_logits[i]));
  free(e->spare_room);
  free(e->tensors);
  free(e->model);
  for (int i = 0; i < DS4_ROPES; i++) free(e->rope[i].freqs);
  pthread_cond_destroy(&e->turn);
  pthread_mutex_destroy(&e->lock);
  free(e);
}

void ds4_engine_free(ds4_engine *e) {
  if (e && e->pid == getpid()) ds4_engine_release(e);
}

/* ---- settings ---------------------------------------------------------------------------------------------------------------------- */

static ds4_setting *find_setting(ds4_engine *e, const char *key) {
  for (ds4_setting *s = e->settings; s; s = s->next)
    if (!strcmp(s->key, key)) return s;
  return NULL;
}

int ds4_engine_set(ds4_engine *e, const char *key, const double *values, uint64_t n, ds4_error *err) {
  if (e->phase != DS4_BUILDING) return ds4_fail(err, DS4_EINVAL, 0, 0, "setting '%.40s' comes too late: settings come before tensors", key);
  if (strlen(key) >= sizeof((ds4_setting *)0)->key) return ds4_fail(err, DS4_EUNSUPPORTED, 0, 0, "setting '%.60s' is not known", key);
  if (find_setting(e, key)) return ds4_fail(err, DS4_EINVAL, 0, 0, "setting '%s' is given twice", key);
  if (!n || n > 1u << 20) return ds4_fail(err, DS4_EINVAL, (int64_t)n, 0, "setting '%s' has %llu numbers", key, (unsigned long long)n);
  for (uint64_t i = 0; i < n; i++)
    if (!isfinite(values[i]))
      return ds4_fail(err, DS4_ENONFINITE, (int64_t)i, 0, "setting '%s' is not a finite number at index %llu", key, (unsigned long long)i);
  ds4_setting *s = calloc(1, sizeof *s);
  if (s) s->values = malloc(n * sizeof *s->values);
  if (!s || !s->values) {
    free(s);
    return ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for setting '%s'", key);
  }
  snprintf(s->key, sizeof s->key, "%s", key);
  memcpy(s->values, values, n * sizeof *values);
  s->n = n;
  s->next = e->settings;
  e->settings = s;
  return DS4_OK;
}

bool ds4_setting_number(ds4_engine *e, const char *key, double *out) {
  ds4_setting *s = find_setting(e, key);
  if (!s || s->n != 1) return false;
  s->read = true;
  *out = s->values[0];
  return true;
}

int ds4_setting_u32(ds4_engine *e, const char *key, uint32_t min, uint32_t max, uint32_t *out, ds4_error *err) {
  double v;
  if (!ds4_setting_number(e, key, &v)) return ds4_fail(err, DS4_EINVAL, 0, 0, "setting '%s' is missing, or not one number", key);
  if (v < min || v > max || v != floor(v))
    return ds4_fail(err, DS4_EINVAL, (int64_t)v, max, "setting '%s' is %g; a whole number from %u to %u is needed", key, v, min, max);
  *out = (uint32_t)v;
  return DS4_OK;
}

const double *ds4_setting_array(ds4_engine *e, const char *key, uint64_t *n) {
  ds4_setting *s = find_setting(e, key);
  if (!s) return NULL;
  s->read = true;
  *n = s->n;
  return s->values;
}

int ds4_setting_freqs(ds4_engine *e, uint32_t index, const char *name, uint32_t half, ds4_error *err) {
  char freqs[32], base_key[32], scale[32];
  snprintf(freqs, sizeof freqs, "%s_freqs", name);
  snprintf(base_key, sizeof base_key, "%s_base", name);
  snprintf(scale, sizeof scale, "%s_scale", name);
  ds4_rope *rope = &e->rope[index];
  uint64_t n = 0;
  double base = 0;
  *rope = (ds4_rope){.half = half, .scale = 1.0, .freqs = calloc(half, sizeof *rope->freqs)};
  if (!rope->freqs) return ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for the RoPE frequencies");
  const double *given = ds4_setting_array(e, freqs, &n);
  ds4_setting_number(e, scale, &rope->scale);
  if (!given && (!ds4_setting_number(e, base_key, &base) || base <= 0))
    return ds4_fail(err, DS4_EINVAL, 0, 0, "setting '%s' or '%s' is missing", base_key, freqs);
  if (given && n != half)
    return ds4_fail(err, DS4_EINVAL, (int64_t)n, half, "setting '%s' has %llu numbers, the head size needs %u", freqs,
                    (unsigned long long)n, half);
  for (uint32_t i = 0; i < half; i++) rope->freqs[i] = given ? given[i] : pow(base, -2.0 * i / (2.0 * half));
  return DS4_OK;
}

/* FNV-1a of one setting; the sum over all does not depend on their order. */
static uint64_t setting_hash(const ds4_setting *s) {
  uint64_t h = 0xcbf29ce484222325u;
  for (const char *c = s->key; *c; c++) h = (h ^ (uint8_t)*c) * 0x100000001b3u;
  const uint8_t *p = (const uint8_t *)s->values;
  for (uint64_t i = 0; i < s->n * sizeof *s->values; i++) h = (h ^ p[i]) * 0x100000001b3u;
  return h;
}

/* ---- what the architecture declares ------------------------------------------------------------------------------------------------- */

int ds4_declare_tensor(ds4_engine *e, const char *name, uint64_t rows, uint64_t cols, bool vector, bool optional, ds4_error *err) {
  if (e->n_tensors == e->cap_tensors) {
    uint32_t cap = e->cap_tensors ? e->cap_tensors * 2 : 64;
    ds4_tensor *t = realloc(e->tensors, cap * sizeof *t);
    if (!t) return ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for the tensor list");
    e->tensors = t;
    e->cap_tensors = cap;
  }
  ds4_tensor *t = &e->tensors[e->n_tensors++];
  *t = (ds4_tensor){.rows = rows, .cols = cols, .vector = vector, .optional = optional};
  snprintf(t->name, sizeof t->name, "%s", name);
  return DS4_OK;
}

/* Tensors mostly come in the order they were declared in: the search starts behind the last one found. */
ds4_tensor *ds4_find_tensor(ds4_engine *e, const char *name) {
  for (uint32_t i = 0; i < e->n_tensors; i++) {
    uint32_t k = (e->last_tensor + 1 + i) % e->n_tensors;
    if (strcmp(e->tensors[k].name, name)) continue;
    e->last_tensor = k;
    return &e->tensors[k];
  }
  return NULL;
}

static void expert_name(char *out, size_t size, uint32_t layer, uint32_t expert, const char *part) {
  snprintf(out, size, "layers.%u.experts.%u.%s", layer, expert, part);
}

int ds4_declare_expert(ds4_engine *e, uint32_t layer, uint32_t expert, const char *part, uint64_t rows, uint64_t cols, ds4_error *err) {
  char name[sizeof((ds4_tensor *)0)->name];
  expert_name(name, sizeof name, layer, expert, part);
  return ds4_declare_tensor(e, name, rows, cols, false, false, err);
}

ds4_tensor *ds4_find_expert(ds4_engine *e, uint32_t layer, uint32_t expert, const char *part) {
  char name[sizeof((ds4_tensor *)0)->name];
  expert_name(name, sizeof name, layer, expert, part);
  return ds4_find_tensor(e, name);
}

int ds4_declare_stream(ds4_engine *e, const char *name, uint32_t n_layers, uint32_t stride, uint32_t reach, uint32_t n_parts,
                       const ds4_part *parts, ds4_error *err) {
  if (e->n_streams == DS4_MAX_STREAMS || n_parts > DS4_STREAM_PARTS || !n_layers || (reach && stride != 1))
    return ds4_fail(err, DS4_EUNSUPPORTED, n_layers, reach, "stream %s is not possible: %u layers, stride %u, reach %u", name, n_layers,
                    stride, reach);
  ds4_stream *st = &e->stream[e->n_streams++];
  *st = (ds4_stream){.stride = stride, .reach = reach};
  snprintf(st->name, sizeof st->name, "%s", name);
  st->layout = (ds4_layout){
      .n_layers = n_layers, .page_rows = reach && reach < DS4_PAGE_ROWS ? DS4_PAGE_ROWS_SMALL : DS4_PAGE_ROWS, .n_parts = n_parts};
  memcpy(st->layout.part, parts, n_parts * sizeof *parts);
  e->windowed |= reach != 0;
  return DS4_OK;
}

uint32_t ds4_declare_buffer(ds4_engine *e, uint32_t width) {
  e->buffer_width[e->n_buffers] = width;
  return e->n_buffers++;
}

static int declare(ds4_engine *e, ds4_error *err) {
  if (e->phase != DS4_BUILDING) return DS4_OK;
  int status = e->arch->setup(e, err);
  double slack;
  if (!status && ds4_setting_number(e, "reach_slack", &slack))
    status = ds4_setting_u32(e, "reach_slack", 0, 1u << 20, &e->reach_slack, err);
  for (ds4_setting *s = e->settings; !status && s; s = s->next) {
    if (!s->read)
      status =
          ds4_fail(err, DS4_EUNSUPPORTED, 0, 0,
                   "setting '%s' is not known to architecture %s in this build; it is refused rather than ignored", s->key, e->arch->name);
    if (strcmp(s->key, "reach_slack")) e->settings_hash += setting_hash(s); /* it changes what is exact, never a bit */
  }
  e->phase = status ? DS4_BROKEN : DS4_DECLARED;
  return status;
}

/* ---- tensors -------------------------------------------------------------------------------------------------------------------------- */

static int set_vector(ds4_engine *e, ds4_tensor *t, int32_t format, const void *data, uint64_t nbytes, ds4_error *err) {
  float *host = malloc(t->cols * sizeof *host);
  t->values = e->ops->mem_alloc(e->backend, t->cols * sizeof *host);
  int status = host && t->values ? DS4_OK : ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for tensor %s", t->name);
  if (!status) status = ds4_format_dequant(format, data, nbytes, 1, t->cols, host, err);
  if (!status) status = e->ops->copy_in(e->backend, t->values, host, t->cols * sizeof *host);
  if (!status) status = e->ops->wait(e->backend);
  free(host);
  return status;
}

/* The codes for NaN have no place in weights; found here, kernels need not look for them. The scales of FP4 may lie in many gigabytes: they are not read. */
static int check_fp8(const ds4_tensor *t, const ds4_matrix *m, uint64_t scale_bytes, ds4_error *err) {
  uint64_t bad = 0;
  for (uint64_t i = 0; i < m->nbytes; i++) bad += (m->data[i] & 0x7fu) == DS4_FP8_NAN;
  for (uint64_t i = 0; i < scale_bytes; i++) bad += m->scales[i] == 255;
  if (!bad) return DS4_OK;
  return ds4_fail(err, DS4_ENONFINITE, (int64_t)bad, 0,
                  "tensor %s holds %llu FP8 codes that are no number; the file is damaged: get it again", t->name, (unsigned long long)bad);
}

static int check_sizes(const ds4_tensor *t, const ds4_matrix *m, uint64_t scale_bytes, ds4_error *err) {
  uint64_t bytes;
  if (m->rows != t->rows || m->cols != t->cols)
    return ds4_fail(err, DS4_EINVAL, (int64_t)m->rows, (int64_t)m->cols, "tensor %s is %llu x %llu, but the settings ask for %llu x %llu",
                    t->name, (unsigned long long)m->rows, (unsigned long long)m->cols, (unsigned long long)t->rows,
                    (unsigned long long)t->cols);
  int status = ds4_format_bytes(m->format, m->rows, m->cols, &bytes, err);
  if (status) return status;
  if (bytes != m->nbytes || !m->data)
    return ds4_fail(err, DS4_EINVAL, (int64_t)m->nbytes, (int64_t)bytes, "tensor %s has %llu bytes, its shape and format need %llu",
                    t->name, (unsigned long long)m->nbytes, (unsigned long long)bytes);
  uint64_t scales = ds4_scale_bytes(m->format, m->rows, m->cols);
  if (scales != scale_bytes || (scales && !m->scales))
    return ds4_fail(err, DS4_EINVAL, (int64_t)scale_bytes, (int64_t)scales,
                    "tensor %s has %llu bytes of scales, its shape and format need %llu", t->name, (unsigned long long)scale_bytes,
                    (unsigned long long)scales);
  return m->format == DS4_FP8 ? check_fp8(t, m, scale_bytes, err) : DS4_OK;
}

int ds4_engine_tensor_scaled(ds4_engine *e, const char *name, int32_t format, uint64_t rows, uint64_t cols, const void *data,
                             uint64_t nbytes, const void *scales, uint64_t scale_bytes, ds4_error *err) {
  int status = declare(e, err);
  if (status) return status;
  if (e->phase != DS4_DECLARED)
    return ds4_fail(err, DS4_EINVAL, 0, 0, "tensor '%.60s' comes too late: the engine is ready, or its set-up failed", name);
  ds4_tensor *t = ds4_find_tensor(e, name);
  if (!t)
    return ds4_fail(err, DS4_EUNSUPPORTED, 0, 0, "tensor '%.60s' is not part of architecture %s with these settings", name, e->arch->name);
  if (t->weight || t->values) return ds4_fail(err, DS4_EINVAL, 0, 0, "tensor %s is given twice", t->name);
  ds4_matrix m = {.format = format, .mapped = t->mapped, .rows = rows, .cols = cols, .nbytes = nbytes, .data = data, .scales = scales};
  if ((status = check_sizes(t, &m, scale_bytes, err))) return status;
  if (t->vector && scale_bytes)
    return ds4_fail(err, DS4_EUNSUPPORTED, format, 0, "tensor %s is a vector and cannot be stored with scales", t->name);
  if (t->vector) {
    uint32_t mode = ds4_float_mode_set();
    status = set_vector(e, t, format, data, nbytes, err);
    ds4_float_mode_restore(mode);
    return status;
  }
  if ((status = e->ops->weight_new(e->backend, &m, &t->weight, err))) return status;
  t->format = format;
  e->weight_bytes += e->ops->weight_bytes(t->weight);
  return DS4_OK;
}

int ds4_engine_tensor(ds4_engine *e, const char *name, int32_t format, uint64_t rows, uint64_t cols, const void *data, uint64_t nbytes,
                      ds4_error *err) {
  return ds4_engine_tensor_scaled(e, name, format, rows, cols, data, nbytes, NULL, 0, err);
}

/* ---- ready -------------------------------------------------------------------------------------------------------------------------------- */

static const char *const kv_names[] = {"f32", "f16", "q8_0", "fp8"};

const char *ds4_kv_name(uint32_t type) { return kv_names[type < COUNT(kv_names) ? type : DS4_KV_F16]; }

static int kv_type_find(ds4_engine *e, const char *kv_dtype, ds4_error *err) {
  char taken[64] = "";
  size_t at = 0;
  e->kv_type = COUNT(kv_names);
  for (uint32_t i = 0; i < COUNT(kv_names); i++) {
    if (!(e->kv_types >> i & 1u)) continue;
    if (!strcmp(kv_dtype, kv_names[i])) e->kv_type = i;
    at += (size_t)snprintf(taken + at, sizeof taken - at, "%s%s", at ? ", " : "", kv_names[i]);
  }
  if (e->kv_type < COUNT(kv_names)) return DS4_OK;
  return ds4_fail(err, DS4_EUNSUPPORTED, 0, 0, "kv_dtype '%.20s' is not possible for architecture %s with these options; use one of %s",
                  kv_dtype, e->arch->name, taken);
}

static int layouts_init(ds4_engine *e, const char *kv_dtype, ds4_error *err) {
  int status = kv_type_find(e, kv_dtype, err);
  for (uint32_t i = 0; !status && i < e->n_streams; i++) {
    ds4_stream *st = &e->stream[i];
    for (uint32_t p = 0; p < st->layout.n_parts; p++) {
      uint32_t *type = &st->layout.part[p].type;
      if (*type == DS4_KV_INDEX) *type = e->kv_type == DS4_KV_FP8 ? DS4_KV_FP4 : e->kv_type;
      if (*type == DS4_KV_ENGINE) *type = e->kv_type;
    }
    status = ds4_layout_init(&st->layout, err);
    if (!status && st->reach) e->mark_bytes += (ds4_pages_of(st, st->reach) + 1) * st->layout.page_bytes;
  }
  return status;
}

/* Bytes of `tokens` in all unlimited streams, and of one window with slack and a chunk to work in per 4096 of them. */
static uint64_t pool_bytes_for(const ds4_engine *e, uint64_t tokens) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < e->n_streams; i++) {
    const ds4_stream *st = &e->stream[i];
    uint64_t window = ds4_pages_of(st, (uint64_t)st->reach + e->reach_slack + DS4_CHUNK_DEFAULT) + 2;
    uint64_t pages =
        st->reach ? (tokens + 4095) / 4096 * window : (tokens / st->stride + st->layout.page_rows - 1) / st->layout.page_rows + 1;
    bytes += pages * st->layout.page_bytes;
  }
  return bytes;
}

int ds4_engine_ready(ds4_engine *e, const char *kv_dtype, uint64_t pool_tokens, uint64_t pool_bytes, const uint8_t identity[32],
                     ds4_error *err) {
  int status = declare(e, err);
  if (status) return status;
  if (e->phase != DS4_DECLARED) return ds4_fail(err, DS4_EINVAL, 0, 0, "the engine is ready already, or its set-up failed");
  uint32_t missing = 0;
  const char *first = NULL;
  for (uint32_t i = e->n_tensors; i--;)
    if (!e->tensors[i].optional && !e->tensors[i].weight && !e->tensors[i].values) missing++, first = e->tensors[i].name;
  if (missing) return ds4_fail(err, DS4_EINVAL, missing, 0, "%u tensors are missing, the first is %s", missing, first);
  e->phase = DS4_BROKEN;
  if ((status = layouts_init(e, kv_dtype, err))) return status;
  if (pool_tokens > 1ull << 32 || pool_bytes > 1ull << 50)
    return ds4_fail(err, DS4_EINVAL, (int64_t)pool_tokens, (int64_t)pool_bytes, "the pool is larger than memory can be");
  e->pool.budget = pool_bytes ? pool_bytes : pool_tokens ? pool_bytes_for(e, pool_tokens) : ds4_usable_memory() / 2;
  if ((status = e->arch->bind(e, err))) return status;
  memcpy(e->identity, identity, sizeof e->identity);
  e->phase = DS4_READY;
  ds4_profile_ready(e);
  return DS4_OK;
}

/* Makes room in the activation buffers for a round of `tokens`, of which head_rows want logits, and in the RoPE table for `positions`. */
int ds4_buffers_grow(ds4_engine *e, uint32_t tokens, uint32_t head_rows, ds4_error *err) {
  if (tokens > e->buffer_tokens) {
    buffers_free(e);
    e->ids = ds4_alloc(e, (uint64_t)tokens * 6 * sizeof *e->ids);
    e->scratch = ds4_alloc(e, (uint64_t)tokens * e->scratch_width * sizeof *e->scratch);
    bool ok = e->ids && e->scratch;
    e->buffer_tokens = tokens;
    for (uint32_t i = 0; ok && i < e->n_buffers; i++)
      ok = !ds4_fault_hit(&e->faults, DS4_FAULT_ALLOC) &&
           (e->buffer[i] = e->ops->mem_alloc(e->backend, (uint64_t)e->buffer_width[i] * tokens * sizeof(float)));
    if (!ok) {
      buffers_free(e);
      return ds4_fail(err, DS4_ENOMEM, tokens, 0, "the system refused memory for a chunk of %u tokens; use a smaller chunk", tokens);
    }
    e->pos = (uint32_t *)e->ids + tokens;
    e->segment = e->pos + tokens;
    for (int i = 0; i < 3; i++) e->row[i] = e->segment + (i + 1) * tokens;
  }
  if (head_rows > e->head_rows) {
    head_free(e);
    e->head_rows = head_rows;
    e->head_x = e->ops->mem_alloc(e->backend, (uint64_t)head_rows * e->width * sizeof(float));
    e->head_scratch = e->ops->mem_alloc(e->backend, (uint64_t)head_rows * e->width * sizeof(float));
    e->head_logits = e->ops->mem_alloc(e->backend, (uint64_t)head_rows * e->vocab * sizeof(float));
    if (ds4_fault_hit(&e->faults, DS4_FAULT_ALLOC) || !e->head_x || !e->head_scratch || !e->head_logits) {
      head_free(e);
      return ds4_fail(err, DS4_ENOMEM, head_rows, 0, "the system refused memory for %u rows of logits", head_rows);
    }
  }
  return DS4_OK;
}

/* In float64 and rounded once; with `single` the angle is rounded before. */
static int rope_grow(ds4_engine *e, ds4_rope *rope, uint32_t positions, ds4_error *err) {
  uint32_t grown = ds4_min_u32(e->ctx, ds4_max_u32(1024, ds4_max_u32(positions, rope->positions * 2)));
  uint64_t half = rope->half, old = (uint64_t)rope->positions * half * 2, all = (uint64_t)grown * half * 2;
  float *host = malloc((all - old) * sizeof *host);
  float *table = ds4_fault_hit(&e->faults, DS4_FAULT_ALLOC) ? NULL : e->ops->mem_alloc(e->backend, all * sizeof *table);
  int status =
      host && table ? DS4_OK : ds4_fail(err, DS4_ENOMEM, grown, 0, "the system refused memory for the RoPE table of %u positions", grown);
  for (uint64_t p = rope->positions; !status && p < grown; p++)
    for (uint64_t i = 0; i < half; i++) {
      float *cs = host + ((p - rope->positions) * half + i) * 2;
      double angle = rope->single ? (double)((float)p * (float)rope->freqs[i]) : (double)p * rope->freqs[i];
      cs[0] = (float)(cos(angle) * rope->scale);
      cs[1] = (float)(sin(angle) * rope->scale);
    }
  if (!status && old) status = e->ops->copy(e->backend, table, rope->table, old * sizeof *table);
  if (!status) status = e->ops->copy_in(e->backend, table + old, host, (all - old) * sizeof *table);
  if (!status) status = e->ops->wait(e->backend);
  free(host);
  if (status) {
    floats_free(e, table, all);
    return status;
  }
  floats_free(e, rope->table, old);
  rope->table = table;
  rope->positions = grown;
  return DS4_OK;
}

/* The tables grow with the positions that are really used. */
int ds4_rope_grow(ds4_engine *e, uint32_t positions, ds4_error *err) {
  int status = DS4_OK;
  for (int i = 0; !status && i < DS4_ROPES; i++)
    if (e->rope[i].half && positions > e->rope[i].positions) status = rope_grow(e, &e->rope[i], positions, err);
  return status;
}

/* ---- what an engine says of itself ---------------------------------------------------------------------------------------------------- */

void ds4_engine_get_info(const ds4_engine *e, ds4_engine_info *out) {
  *out = (ds4_engine_info){.vocab = e->vocab,
                           .ctx = e->ctx,
                           .page_rows = DS4_PAGE_ROWS,
                           .n_streams = e->n_streams,
                           .n_layers = e->n_layers,
                           .threads = e->ops->threads(e->backend),
                           .numerics = DS4_NUMERICS,
                           .reach_slack = e->reach_slack,
                           .pool_bytes = e->pool.budget,
                           .weight_bytes = e->weight_bytes,
                           .mark_bytes = e->mark_bytes};
  for (uint32_t i = 0; i < e->n_streams; i++)
    if (!e->stream[i].reach) out->token_bytes += e->stream[i].layout.row_bytes * e->stream[i].layout.n_layers / e->stream[i].stride;
  snprintf(out->arch, sizeof out->arch, "%s", e->arch->name);
  snprintf(out->backend, sizeof out->backend, "%s", e->ops->name);
  snprintf(out->isa, sizeof out->isa, "%s", e->ops->isa(e->backend));
  snprintf(out->kv_dtype, sizeof out->kv_dtype, "%s", ds4_kv_name(e->kv_type));
}

int ds4_engine_stream(const ds4_engine *e, uint32_t index, ds4_stream_info *out, ds4_error *err) {
  if (index >= e->n_streams) return ds4_fail(err, DS4_EINVAL, index, e->n_streams, "stream %u of %u", index, e->n_streams);
  const ds4_stream *st = &e->stream[index];
  *out = (ds4_stream_info){.n_layers = st->layout.n_layers,
                           .stride = st->stride,
                           .reach = st->reach,
                           .page_rows = st->layout.page_rows,
                           .row_bytes = st->layout.row_bytes * st->layout.n_layers,
                           .page_bytes = st->layout.page_bytes};
  snprintf(out->name, sizeof out->name, "%s", st->name);
  return DS4_OK;
}
