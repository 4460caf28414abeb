/* What the files of the core share. Arrows point one way: session -> kv -> model -> backend; snapshot -> kv. */
#ifndef DS4_INTERNAL_H
#define DS4_INTERNAL_H

#ifdef __FAST_MATH__
#error "ds4 must not be compiled with -ffast-math: the same tokens would no longer give the same bits"
#endif

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "backend.h"
#include "ds4.h"

#define DS4_LAYOUT_VERSION 1u
#define DS4_NUMERICS 1u /* raised by every commit that changes a bit; tests/test_golden.py says when */
#define DS4_MAX_STREAMS 8
#define DS4_AUTO_MARK_MIN 64u      /* an eval or sync of this many tokens ends in an automatic mark */
#define DS4_AUTO_MARK_STRIDE 2048u /* and so does every multiple of this position */
#define DS4_CHUNK_DEFAULT 512u
#define DS4_CHUNK_MAX 2048u

/* Fills *err (may be NULL) and returns status. */
int ds4_fail(ds4_error *err, int status, int64_t a, int64_t b, const char *fmt, ...) __attribute__((format(printf, 5, 6)));

static inline uint32_t ds4_min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
static inline uint32_t ds4_max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }
static inline bool ds4_mul_u64(uint64_t a, uint64_t b, uint64_t *out) { return !__builtin_mul_overflow(a, b, out); }

/* ---- failure injection ------------------------------------------------------------------------------------------------------------- */

#define DS4_FAULTS 5
typedef struct ds4_faults {
  _Atomic uint64_t seen[DS4_FAULTS], at[DS4_FAULTS];
} ds4_faults;
#ifdef DS4_TEST
bool ds4_fault_hit(ds4_faults *f, int kind); /* counts one operation; true: it has to fail */
#else
static inline bool ds4_fault_hit(ds4_faults *f, int kind) {
  (void)f, (void)kind;
  return false;
}
#endif
#ifdef DS4_TEST
void ds4_trace(ds4_engine *e, const float *x, uint64_t n); /* what a round computes inside, for the tests */
void ds4_trace_ids(ds4_engine *e, const uint32_t *x, uint64_t n);
#else
static inline void ds4_trace(ds4_engine *e, const float *x, uint64_t n) { (void)e, (void)x, (void)n; }
static inline void ds4_trace_ids(ds4_engine *e, const uint32_t *x, uint64_t n) { (void)e, (void)x, (void)n; }
#endif
void *ds4_alloc(ds4_engine *e, uint64_t bytes); /* zeroed; NULL when there is none, or by injection. Released with free() */

/* profile.c: only called while there is one. A round ends in the thread that began it; calls with the engine's lock held. */
typedef struct ds4_profile ds4_profile;
void ds4_profile_round(ds4_profile *p, uint64_t tokens);
void ds4_profile_round_end(ds4_profile *p);
void ds4_profile_call(ds4_profile *p); /* the first of the calls that compute now */
void ds4_profile_call_end(ds4_profile *p);
void ds4_profile_ready(ds4_engine *e); /* makes its table of ops; starts one when DS4_PROFILE asks for it */
void ds4_profile_free(ds4_engine *e);  /* and writes what it asked for */

/* ---- streams and pages --------------------------------------------------------------------------------------------------------------- */

#define DS4_TABLE_PAGES 64u

/* A piece of a block table. 0 = no page. */
typedef struct ds4_table {
  uint32_t refs, used; /* used: entries that are not 0 */
  uint32_t page[DS4_TABLE_PAGES];
} ds4_table;

typedef struct ds4_page {
  uint8_t *mem;
  uint32_t refs; /* tables that hold it; 0: free, or set aside in a stash */
  uint32_t next; /* free list or stash, 0 = end */
} ds4_page;

typedef struct ds4_stream {
  char name[24];
  uint32_t stride, reach; /* reach 0 = unlimited; a windowed stream has stride 1 */
  ds4_layout layout;
  ds4_page *pages; /* page ids count from 1 */
  uint32_t n_pages, cap_pages, free_list, n_used;
} ds4_stream;

typedef struct ds4_pool {
  uint64_t budget, used, reserved, system, auto_bytes; /* bytes */
  uint64_t refs, sessions, marks;
} ds4_pool;

/* Tokens are kept in pieces that forks share like pages. */
#define DS4_LOG_TOKENS 1024u
typedef struct ds4_log {
  uint32_t refs;
  int32_t token[DS4_LOG_TOKENS];
} ds4_log;

struct ds4_logits {
  ds4_engine *engine;
  _Atomic uint32_t refs;
  float data[];
};

struct ds4_mark {
  ds4_engine *engine;
  ds4_session *session; /* NULL: dead */
  ds4_logits *logits;   /* may be NULL */
  uint32_t pos;
  bool automatic, pinned;
  ds4_mark *older, *newer; /* by position, then by age */
};

/* One session's part of one stream. */
typedef struct ds4_timeline {
  ds4_table **table; /* [n_tables] NULL where a windowed stream has let go of all pages */
  uint32_t n_tables, cap_tables;
  uint32_t floor; /* windowed: pages from here on are all held; below it only those of marks */
  uint32_t stash; /* pages set aside, linked by ds4_page.next */
  uint32_t n_stash;
  uint8_t **view; /* scratch for ds4_view.pages */
  uint32_t cap_view;
} ds4_timeline;

struct ds4_session {
  ds4_engine *engine;
  uint32_t ctx, pos;
  bool busy, poisoned, free_when_idle, settling;
  _Atomic int cancel;
  uint32_t n_logs, cap_logs;
  ds4_log **logs;
  ds4_timeline line[DS4_MAX_STREAMS];
  ds4_logits *logits;
  ds4_mark *newest; /* marks, explicit and automatic */
  uint32_t n_auto, n_marks;
  uint64_t reserved_pos;
  uint32_t reserved_from; /* where the reserve was made */
  ds4_session *prev, *next;
};

/* ---- model ------------------------------------------------------------------------------------------------------------------------- */

typedef struct ds4_setting {
  char key[48];
  double *values;
  uint64_t n;
  bool read; /* by the architecture; one that was never read is refused */
  struct ds4_setting *next;
} ds4_setting;

typedef struct ds4_tensor {
  char name[64];
  uint64_t rows, cols;
  bool vector, optional, mapped; /* mapped: see ds4_matrix */
  ds4_weight *weight;            /* matrix */
  int32_t format;                /* of the matrix */
  float *values;                 /* vector, float32 in backend memory */
} ds4_tensor;

/* One round as an architecture sees it. */
typedef struct ds4_run {
  ds4_engine *engine;
  ds4_batch batch;
  const ds4_view *views; /* [n_streams][n_segments] */
  uint32_t layer;        /* how far the round is, for the progress */
  ds4_poll poll;
  void *user;
} ds4_run;
int ds4_op(ds4_run *r); /* before every op: cancel, progress, failure injection */

/* cos and sin of every position that was used so far, [positions][half][2]. */
typedef struct ds4_rope {
  float *table;
  double *freqs, scale; /* [half] radians per position */
  uint32_t half, positions;
  bool single; /* angles are float32 products, as in the code that the model was trained with */
} ds4_rope;
#define DS4_ROPES 2

typedef struct ds4_arch {
  const char *name;
  int (*setup)(ds4_engine *e, ds4_error *err); /* reads the settings, declares streams, tensors, buffers */
  int (*bind)(ds4_engine *e, ds4_error *err);  /* finds its tensors, when all are there */
  int (*forward)(ds4_run *r);                  /* leaves the residual stream of the last layer in buffer[0] */
  int (*head)(ds4_engine *e, const float *x, uint32_t n, float *scratch, float *logits);       /* [n][width] -> [n][vocab] */
  int (*draft_head)(ds4_engine *e, const float *x, uint32_t n, float *scratch, float *logits); /* of buffer[draft] */
} ds4_arch;
extern const ds4_arch ds4_llama, ds4_qwen3, ds4_gemma3, ds4_deepseek_v4;

enum ds4_phase { DS4_BUILDING, DS4_DECLARED, DS4_READY, DS4_BROKEN };
#define DS4_MAX_BUFFERS 32
#define DS4_SPARE_LOGITS 16

struct ds4_engine {
  pthread_mutex_t lock; /* guards the pool, all sessions and marks; never held while computing */
  pthread_cond_t turn;
  struct ds4_waiter *queue; /* calls that compute, first come, first served; the head has its turn */
  struct ds4_caller *callers;
  struct ds4_room *spare_room; /* memory that calls work in, when none does */
  _Atomic uint32_t refs;       /* the caller's, one per session, mark and logits */
  _Atomic uint64_t live_logits;
  _Atomic(ds4_logits *) spare_logits[DS4_SPARE_LOGITS];
  pid_t pid;
  int phase;
  const ds4_arch *arch;
  const ds4_ops *_Atomic ops; /* save, load and get_info read it without the lock */
  ds4_ops timed;              /* the backend's with a profile in front: `ops` while one runs */
  ds4_backend *backend;
  ds4_profile *profile; /* NULL: none runs */
  ds4_faults faults;
  float *trace; /* test builds: where ds4_trace appends */
  uint64_t trace_cap, trace_n;

  ds4_setting *settings;
  ds4_tensor *tensors;
  uint32_t n_tensors, cap_tensors, last_tensor;
  void *model; /* the architecture's own struct, one block */
  uint32_t vocab, ctx, width, n_layers, reach_slack;
  uint32_t kv_type, kv_types; /* what rows are stored as; a bit for each ds4_kv_type that the architecture takes */
  ds4_rope rope[DS4_ROPES];

  uint32_t buffer_width[DS4_MAX_BUFFERS], n_buffers, buffer_tokens;
  float *buffer[DS4_MAX_BUFFERS];
  uint32_t draft;                             /* buffer with the MTP block's residual streams; 0: there is none */
  uint32_t scratch_width, *scratch;           /* memory of the host for the architecture, [buffer_tokens][scratch_width] */
  float *head_x, *head_scratch, *head_logits; /* [head_rows][width] twice, [head_rows][vocab] */
  uint32_t head_rows;
  int32_t *ids;                     /* the batch of the round, [buffer_tokens] each */
  uint32_t *pos, *segment, *row[3]; /* row: for the architecture */

  ds4_stream stream[DS4_MAX_STREAMS];
  uint32_t n_streams;
  bool windowed; /* some stream has a window */
  ds4_pool pool;
  ds4_session *sessions;
  uint8_t identity[32];
  uint64_t settings_hash, weight_bytes, mark_bytes;
};
#define DS4_HEAD_TILE 16u

/* model.c */
void ds4_engine_hold(ds4_engine *e);
void ds4_engine_release(ds4_engine *e); /* the last one frees it; not with the lock held */
bool ds4_setting_number(ds4_engine *e, const char *key, double *out);
int ds4_setting_u32(ds4_engine *e, const char *key, uint32_t min, uint32_t max, uint32_t *out, ds4_error *err);
/* RoPE table `index` from the settings NAME_freqs, or NAME_base; and NAME_scale. */
int ds4_setting_freqs(ds4_engine *e, uint32_t index, const char *name, uint32_t half, ds4_error *err);
const double *ds4_setting_array(ds4_engine *e, const char *key, uint64_t *n); /* NULL: not given */
uint32_t ds4_declare_buffer(ds4_engine *e, uint32_t width);
int ds4_declare_tensor(ds4_engine *e, const char *name, uint64_t rows, uint64_t cols, bool vector, bool optional, ds4_error *err);
ds4_tensor *ds4_find_tensor(ds4_engine *e, const char *name);
/* `layers.L.experts.X.part` */
int ds4_declare_expert(ds4_engine *e, uint32_t layer, uint32_t expert, const char *part, uint64_t rows, uint64_t cols, ds4_error *err);
ds4_tensor *ds4_find_expert(ds4_engine *e, uint32_t layer, uint32_t expert, const char *part);
int ds4_declare_stream(ds4_engine *e, const char *name, uint32_t n_layers, uint32_t stride, uint32_t reach, uint32_t n_parts,
                       const ds4_part *parts, ds4_error *err);
const char *ds4_kv_name(uint32_t type);
int ds4_rope_grow(ds4_engine *e, uint32_t positions, ds4_error *err);
int ds4_buffers_grow(ds4_engine *e, uint32_t tokens, uint32_t head_rows, ds4_error *err);

/* kv.c: called with the engine's lock held */
typedef struct ds4_need { /* pages to take, per stream */
  uint32_t pages[DS4_MAX_STREAMS];
} ds4_need;
void ds4_kv_need(const ds4_session *s, uint64_t from, uint64_t upto, uint32_t chunk, ds4_need *out);
void ds4_kv_need_again(const ds4_session *s, uint32_t pos, ds4_need *out); /* pos > 0 */
int ds4_kv_take(ds4_session *s, const ds4_need *need, ds4_error *err);
void ds4_kv_give_back(ds4_session *s);
int ds4_kv_prepare(ds4_session *s, uint32_t from, uint32_t upto, ds4_error *err);
int ds4_kv_write_begin(ds4_session *s, uint32_t from, uint32_t upto, ds4_error *err);
void ds4_kv_view(const ds4_session *s, uint32_t stream, uint32_t from, uint32_t upto, ds4_view *out);
void ds4_kv_commit(ds4_session *s, const int32_t *tokens, uint32_t n);
void ds4_kv_set_logits(ds4_session *s, ds4_logits *l); /* takes over the reference */
int ds4_kv_cut(ds4_session *s, uint32_t pos, ds4_error *err);
void ds4_kv_clear(ds4_session *s);
void ds4_kv_abandon(ds4_session *s);
uint8_t *ds4_kv_last_page(const ds4_session *s, uint32_t stream);
uint32_t ds4_kv_nearest_exact(const ds4_session *s, uint32_t pos);
int ds4_kv_position(const ds4_session *s, int64_t pos, bool exact, ds4_error *err);
ds4_session *ds4_kv_session(ds4_engine *e, uint32_t ctx); /* NULL: no memory */
uint8_t *ds4_kv_place(ds4_session *s, uint32_t stream, uint32_t page);
void ds4_kv_session_drop(ds4_session *s);

/* mark.c: likewise */
ds4_mark *ds4_mark_new(ds4_session *s, uint32_t pos, bool automatic, bool pinned);
void ds4_mark_set_automatic(ds4_session *s, uint32_t pos, bool pinned);
void ds4_mark_copy_automatic(ds4_session *child, const ds4_session *s);

/* session.c */
int ds4_enter(ds4_engine *e, ds4_error *err); /* takes the lock; DS4_EFORKED, without it, in a child of the process that made the engine */
void ds4_leave(ds4_engine *e);
int ds4_kv_legal(const ds4_session *s, ds4_error *err); /* DS4_EBUSY, DS4_EPOISONED or DS4_OK */
void ds4_kv_begin(ds4_session *s);
bool ds4_kv_end(ds4_session *s); /* true: it was freed meanwhile, the caller lets go of the engine without the lock */
static inline int32_t ds4_log_token(const ds4_session *s, uint32_t pos) {
  return s->logs[pos / DS4_LOG_TOKENS]->token[pos % DS4_LOG_TOKENS];
}
static inline uint32_t ds4_rows_at(const ds4_stream *st, uint64_t pos) { return (uint32_t)(pos / st->stride); }
static inline uint32_t ds4_pages_of(const ds4_stream *st, uint64_t rows) {
  return (uint32_t)((rows + st->layout.page_rows - 1) / st->layout.page_rows);
}

/* logits.c */
ds4_logits *ds4_logits_new(ds4_engine *e); /* its floats are to be written by the caller; NULL: no memory */

/* layout.c */
int ds4_layout_init(ds4_layout *l, ds4_error *err); /* fills in sizes and offsets from heads, width, across, type */
static inline uint8_t *ds4_page_tile(const ds4_layout *l, uint8_t *page, uint32_t layer, uint32_t part, uint32_t head) {
  return page + layer * l->layer_bytes + l->part[part].offset + head * l->part[part].tile_bytes;
}
/* Rows of one layer between a page and their canonical order (row, part, head, numbers, scales), for snapshots and ds4_session_rows. */
void ds4_rows_pack(const ds4_layout *l, const uint8_t *page, uint32_t layer, uint32_t row, uint32_t n, uint8_t *out);
void ds4_rows_unpack(const ds4_layout *l, uint8_t *page, uint32_t layer, uint32_t row, uint32_t n, const uint8_t *in);
void ds4_rows_fill(const ds4_layout *l, uint8_t *page, uint32_t layer, uint32_t row, uint32_t n, uint8_t byte);

/* threads.c */
typedef struct ds4_threads ds4_threads;
typedef void (*ds4_work)(void *ctx, uint32_t item, uint32_t thread);
int ds4_threads_new(uint32_t n, ds4_threads **out);
void ds4_threads_free(ds4_threads *t);
uint32_t ds4_threads_count(const ds4_threads *t);
void ds4_threads_poll(ds4_threads *t, ds4_poll poll, void *user);
bool ds4_threads_stopped(ds4_threads *t); /* the poll said stop in this round */
/* Runs work(ctx, i, thread) for every i < n; which thread takes which item is free. */
void ds4_threads_run(ds4_threads *t, uint32_t n, ds4_work work, void *ctx);
uint32_t ds4_float_mode_set(void); /* nearest, denormals on; returns what was set before */
void ds4_float_mode_restore(uint32_t mode);

/* limits.c: what ds4_usable_cpus and ds4_usable_memory say, with `root` before the names of the system's files */
uint32_t ds4_cpus_under(const char *root);
uint64_t ds4_memory_under(const char *root);

#endif
