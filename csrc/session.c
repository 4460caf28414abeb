/* Calls that compute: eval, sync and refresh, in rounds of whole chunks.
 *
 *   check everything --> set BUSY, take pages --> round: queue, write_begin, forward, commit --> ... --> give pages back, end BUSY
 *          |                                        |
 *          '-- nothing has changed                  '-- cancelled or failed: the round is not committed, earlier ones stay (K6) */
#include "internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "numeric.h"

/* ---- lock, queue, states -------------------------------------------------------------------------------------------------------------- */

int ds4_enter(ds4_engine *e, ds4_error *err) {
  if (getpid() != e->pid)
    return ds4_fail(err, DS4_EFORKED, 0, 0,
                    "this engine belongs to the parent process and its threads are not here: create the engine after the fork");
  pthread_mutex_lock(&e->lock);
  return DS4_OK;
}

void ds4_leave(ds4_engine *e) { pthread_mutex_unlock(&e->lock); }

int ds4_kv_legal(const ds4_session *s, ds4_error *err) {
  if (s->busy)
    return ds4_fail(err, DS4_EBUSY, 0, 0,
                    "another call is working on this session; wait for it, cancel it, or fork the session before the call starts");
  if (s->poisoned)
    return ds4_fail(err, DS4_EPOISONED, 0, 0,
                    "a device failed under this session: clear it, sync it (which starts from nothing) or close it");
  return DS4_OK;
}

typedef struct ds4_waiter {
  struct ds4_waiter *next;
} ds4_waiter;

/* A call in progress, for as long as it takes: a progress callback of it must not compute on the same engine. */
typedef struct ds4_caller {
  struct ds4_caller *next;
  pthread_t thread;
} ds4_caller;

/* The clock of the last tick where there is one: it is asked before every op and after every item of one, and is right within 10 ms. */
static uint64_t now_ms(void) {
  struct timespec t;
#if defined(CLOCK_MONOTONIC_COARSE)
  clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
#else
  clock_gettime(CLOCK_MONOTONIC, &t);
#endif
  return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* ---- one call --------------------------------------------------------------------------------------------------------------------- */

typedef struct job {
  ds4_session *s;
  const int32_t *tokens;
  uint32_t n, done, from; /* from: position of tokens[0] */
  int32_t want;
  bool again; /* evaluates the last token once more, for its logits */
  float *out;
  ds4_logits *logits;              /* of the last token, until the commit */
  uint8_t *saved[DS4_MAX_STREAMS]; /* again: the pages of the row that is written, as they were */
} job;

typedef struct part { /* what one round takes of one job */
  uint32_t job, n;
} part;

typedef struct call {
  ds4_engine *e;
  job *jobs;
  uint32_t n_jobs, n_parts, chunk;
  part *parts;
  ds4_view *views;
  ds4_progress progress;
  void *user;
  uint64_t done, total, round_tokens, last_ms;
  ds4_run run;
  part one_part; /* parts and views of a call with one job */
  ds4_view one_views[DS4_MAX_STREAMS];
} call;

/* What a call with several jobs works in: jobs, then parts, then views. */
typedef struct ds4_room {
  uint32_t n;
  job jobs[];
} ds4_room;

/* The engine keeps the largest room for the next call, so that a decode step of a batch takes no memory from the system. Lock held. */
static ds4_room *room_take(ds4_engine *e, uint32_t n) {
  ds4_room *r = e->spare_room;
  e->spare_room = NULL;
  if (r && r->n >= n) return r;
  free(r);
  r = ds4_alloc(e, sizeof *r + n * (sizeof(job) + sizeof(part) + e->n_streams * (uint64_t)sizeof(ds4_view)));
  if (r) r->n = n;
  return r;
}

static void room_give(ds4_engine *e, ds4_room *r) {
  ds4_room *other = e->spare_room;
  if (!r || (other && other->n >= r->n)) {
    free(r);
    return;
  }
  free(other);
  e->spare_room = r;
}

#define PROGRESS_MS 36u /* with a tick of the clock and an item of work, 50 at most */

/* Served between ops and inside long ones. The position inside a round is told by the layers that are done. */
static int call_poll(void *user) {
  call *c = user;
  for (uint32_t i = 0; i < c->n_jobs; i++)
    if (atomic_load_explicit(&c->jobs[i].s->cancel, memory_order_relaxed)) return 1;
  uint64_t now;
  if (!c->progress || (now = now_ms()) - c->last_ms < PROGRESS_MS) return 0;
  c->last_ms = now;
  uint64_t inside = c->e->n_layers ? c->round_tokens * c->run.layer / c->e->n_layers : 0;
  return c->progress(c->user, c->done + inside, c->total);
}

int ds4_op(ds4_run *r) {
  ds4_faults *f = &r->engine->faults;
  if (ds4_fault_hit(f, DS4_FAULT_DEVICE)) return DS4_EDEVICE;
  if (ds4_fault_hit(f, DS4_FAULT_KERNEL)) return DS4_EFAILED;
  return r->poll(r->user) ? DS4_ECANCELLED : DS4_OK;
}

static int call_failed(int status, ds4_error *err) {
  if (status == DS4_ECANCELLED) return ds4_fail(err, status, 0, 0, "cancelled; the session stands at the last whole chunk");
  if (status == DS4_EDEVICE)
    return ds4_fail(err, status, 0, 0,
                    "the device failed and the rows of this call can no longer be trusted: clear, sync or close the session");
  if (status == DS4_EFAILED) return ds4_fail(err, status, 0, 0, "a kernel failed; the session stands at the last whole chunk, try again");
  return status;
}

/* Waits for this call's turn. Cancel and progress are served meanwhile; a cancelled call leaves the queue. Lock held on entry and exit. */
static int turn_begin(call *c, ds4_waiter *me) {
  ds4_engine *e = c->e;
  ds4_waiter **at = &e->queue;
  while (*at) at = &(*at)->next;
  *at = me;
  me->next = NULL;
  while (e->queue != me) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += PROGRESS_MS * 1000000;
    if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_cond_timedwait(&e->turn, &e->lock, &until);
    if (e->queue == me) break;
    ds4_leave(e);
    int stop = call_poll(c);
    pthread_mutex_lock(&e->lock);
    if (!stop) continue;
    for (at = &e->queue; *at != me; at = &(*at)->next) {
    }
    *at = me->next;
    pthread_cond_broadcast(&e->turn);
    return DS4_ECANCELLED;
  }
  return DS4_OK;
}

static void turn_end(ds4_engine *e) {
  e->queue = e->queue->next;
  if (e->queue) pthread_cond_broadcast(&e->turn);
}

/* ---- one round --------------------------------------------------------------------------------------------------------------------- */

static uint32_t wanted_rows(const call *c, const part *p) {
  const job *j = &c->jobs[p->job];
  if (j->want >= DS4_WANT_ALL) return p->n;
  return j->want == DS4_WANT_LAST && j->done + p->n == j->n ? 1 : 0;
}

/* A row that is written again is live: a failed kernel must not spoil it. */
static int page_save(ds4_engine *e, job *j) {
  for (uint32_t i = 0; i < e->n_streams; i++) {
    const uint8_t *page = ds4_kv_last_page(j->s, i);
    uint64_t bytes = e->stream[i].layout.page_bytes;
    if (!page) continue;
    if (!(j->saved[i] = ds4_alloc(e, bytes))) return DS4_ENOMEM;
    int status = e->ops->copy_out(e->backend, j->saved[i], page, bytes);
    if (!status) status = e->ops->wait(e->backend);
    if (!status) continue;
    free(j->saved[i]);
    j->saved[i] = NULL;
    return status;
  }
  return DS4_OK;
}

static void page_restore(ds4_engine *e, job *j, bool failed) {
  for (uint32_t i = 0; i < e->n_streams; i++) {
    if (failed && j->saved[i]) e->ops->copy_in(e->backend, ds4_kv_last_page(j->s, i), j->saved[i], e->stream[i].layout.page_bytes);
    free(j->saved[i]);
    j->saved[i] = NULL;
  }
}

/* Fills the batch with the next tokens of every job, up to a chunk. Lock held: pages are entered and views built. */
static int round_begin(call *c, ds4_error *err) {
  ds4_engine *e = c->e;
  uint32_t n = 0, rows = 0;
  c->n_parts = 0;
  for (uint32_t i = 0; i < c->n_jobs && n < c->chunk; i++) {
    job *j = &c->jobs[i];
    uint32_t take = ds4_min_u32(j->n - j->done, c->chunk - n);
    if (!take) continue;
    c->parts[c->n_parts] = (part){.job = i, .n = take};
    n += take;
    rows += wanted_rows(c, &c->parts[c->n_parts++]);
  }
  int status = ds4_buffers_grow(e, n, ds4_min_u32(rows, DS4_HEAD_TILE), err);
  if (status) return status;
  for (uint32_t k = 0, at = 0; k < c->n_parts; k++) {
    job *j = &c->jobs[c->parts[k].job];
    uint32_t from = j->from + j->done, upto = from + c->parts[k].n;
    if ((status = ds4_rope_grow(e, upto, err)) || (status = ds4_kv_write_begin(j->s, from, upto, err))) return status;
    if (j->again && (status = page_save(e, j))) return status;
    for (uint32_t i = 0; i < e->n_streams; i++) ds4_kv_view(j->s, i, from, upto, &c->views[i * c->n_parts + k]);
    for (uint32_t t = 0; t < c->parts[k].n; t++, at++) {
      e->ids[at] = j->tokens[j->done + t];
      e->pos[at] = from + t;
      e->segment[at] = k;
    }
  }
  c->round_tokens = n;
  c->run = (ds4_run){.engine = e, .views = c->views, .poll = call_poll, .user = c};
  c->run.batch = (ds4_batch){.n = n, .n_segments = c->n_parts, .ids = e->ids, .pos = e->pos, .segment = e->segment};
  return DS4_OK;
}

/* log-softmax of one row at `token`: maximum, then a sum in double over 16 lanes and the fixed tree. */
static float log_probability(const float *logits, uint32_t vocab, int32_t token) {
  float top = logits[0];
  for (uint32_t i = 1; i < vocab; i++) top = logits[i] > top ? logits[i] : top;
  double lane[16] = {0};
  for (uint32_t i = 0; i < vocab; i++) lane[i % 16] += (double)ds4_exp(logits[i] - top);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] += lane[i + half];
  return (float)((double)logits[token] - (double)top - log(lane[0]));
}

/* Where the logits of one wanted row go: to the caller, to a log-probability, to the session. `i` is its index in the job. */
static int row_deliver(call *c, job *j, uint32_t i, const float *logits) {
  uint32_t vocab = c->e->vocab;
  if (j->want == DS4_WANT_DRAFT) { /* nothing lies before position 0 that the MTP block could start from */
    float *out = j->out + (uint64_t)i * vocab;
    memcpy(out, logits, vocab * sizeof *logits);
    if (j->from + i == 0) memset(out, 0, vocab * sizeof *out);
    return DS4_OK;
  }
  if (j->want == DS4_WANT_ALL) memcpy(j->out + (uint64_t)i * vocab, logits, vocab * sizeof *logits);
  if (j->want == DS4_WANT_SCORE && i + 1 < j->n) {
    j->out[i + 1] = log_probability(logits, vocab, j->tokens[i + 1]);
    if (!isfinite(j->out[i + 1])) return DS4_ENONFINITE;
  }
  if (i + 1 < j->n) return DS4_OK;
  if (!j->logits && !(j->logits = ds4_logits_new(c->e))) return DS4_ENOMEM;
  memcpy(j->logits->data, logits, vocab * sizeof *logits);
  return DS4_OK;
}

typedef struct tile {
  uint32_t n;
  bool draft; /* rows of the MTP block */
  job *job[DS4_HEAD_TILE];
  uint32_t index[DS4_HEAD_TILE]; /* of the row's token in its job */
} tile;

static int tile_flush(call *c, tile *t) {
  ds4_engine *e = c->e;
  if (!t->n) return DS4_OK;
  int status = ds4_op(&c->run);
  if (!status) status = (t->draft ? e->arch->draft_head : e->arch->head)(e, e->head_x, t->n, e->head_scratch, e->head_logits);
  if (!status) status = e->ops->wait(e->backend);
  for (uint32_t i = 0; !status && i < t->n; i++) status = row_deliver(c, t->job[i], t->index[i], e->head_logits + (uint64_t)i * e->vocab);
  t->n = 0;
  return status;
}

/* The output head over the wanted rows, in tiles: [n][vocab] never lies in memory. */
static int round_head(call *c) {
  ds4_engine *e = c->e;
  tile t = {.n = 0};
  uint32_t at = 0;
  for (uint32_t k = 0; k < c->n_parts; at += c->parts[k++].n) {
    job *j = &c->jobs[c->parts[k].job];
    bool draft = j->want == DS4_WANT_DRAFT;
    int flushed = draft != t.draft ? tile_flush(c, &t) : DS4_OK;
    if (flushed) return flushed;
    t.draft = draft;
    for (uint32_t r = c->parts[k].n - wanted_rows(c, &c->parts[k]); r < c->parts[k].n; r++) {
      const float *row = e->buffer[draft ? e->draft : 0] + (uint64_t)(at + r) * e->width;
      int status = e->ops->copy(e->backend, e->head_x + (uint64_t)t.n * e->width, row, e->width * sizeof *row);
      t.job[t.n] = j;
      t.index[t.n++] = j->done + r;
      if (!status && t.n == e->head_rows) status = tile_flush(c, &t);
      if (status) return status;
    }
  }
  return tile_flush(c, &t);
}

static void round_commit(call *c) {
  for (uint32_t k = 0; k < c->n_parts; k++) {
    job *j = &c->jobs[c->parts[k].job];
    if (!j->again) ds4_kv_commit(j->s, j->tokens + j->done, c->parts[k].n);
    j->done += c->parts[k].n;
    c->done += c->parts[k].n;
    page_restore(c->e, j, false);
    if (j->done < j->n) continue;
    if (j->n >= DS4_AUTO_MARK_MIN) ds4_mark_set_automatic(j->s, j->s->pos, false);
    if (j->logits) ds4_kv_set_logits(j->s, j->logits);
    j->logits = NULL;
  }
}

/* A failed round leaves its sessions as they were; a device's rows are all lost. */
static void round_abandon(call *c, int status) {
  for (uint32_t k = 0; k < c->n_parts; k++) {
    job *j = &c->jobs[c->parts[k].job];
    if (status == DS4_EDEVICE) j->s->poisoned = true;
    page_restore(c->e, j, true);
    ds4_kv_abandon(j->s);
  }
}

static int round_run(call *c, ds4_error *err) {
  ds4_engine *e = c->e;
  ds4_waiter me;
  int status = turn_begin(c, &me);
  if (status) return call_failed(status, err);
  uint32_t mode = ds4_float_mode_set();
  status = round_begin(c, err);
  if (status == DS4_ENOMEM && c->n_parts && c->jobs[c->parts[0].job].again)
    ds4_fail(err, status, 0, 0, "the system refused memory to keep the last page; nothing has changed");
  if (status) {
    round_abandon(c, status);
  } else {
    ds4_leave(e);
    if (e->profile) ds4_profile_round(e->profile, c->round_tokens);
    e->ops->begin(e->backend, call_poll, c);
    status = e->arch->forward(&c->run);
    if (!status) status = round_head(c);
    int waited = e->ops->wait(e->backend);
    if (!status) status = waited;
    e->ops->end(e->backend);
    if (e->profile) ds4_profile_round_end(e->profile);
    pthread_mutex_lock(&e->lock);
    if (status == DS4_ENONFINITE)
      ds4_fail(err, status, 0, 0, "a logit is not a finite number: the weights are damaged or do not fit this architecture");
    if (status == DS4_ENOMEM)
      ds4_fail(err, status, 0, 0, "the system refused memory for this round; the session stands at the last whole chunk");
    if (!status)
      round_commit(c);
    else
      round_abandon(c, status);
  }
  c->round_tokens = 0; /* what is done of a round is in c->done now, or lost */
  ds4_float_mode_restore(mode);
  turn_end(e);
  return call_failed(status, err);
}

/* ---- the frame of a call ------------------------------------------------------------------------------------------------------------- */

static void call_init(call *c, ds4_engine *e, job *jobs, uint32_t n, uint32_t chunk, ds4_progress progress, void *user) {
  *c = (call){.e = e, .jobs = jobs, .n_jobs = n, .progress = progress, .user = user, .last_ms = now_ms()};
  c->parts = &c->one_part;
  c->views = c->one_views;
  c->chunk = ds4_min_u32(chunk ? chunk : DS4_CHUNK_DEFAULT, DS4_CHUNK_MAX);
}

/* A reserve counts the pages of windowed streams for chunks of the default size. */
static uint32_t session_chunk(const ds4_session *s, uint32_t chunk) {
  return s->reserved_pos ? ds4_min_u32(chunk, DS4_CHUNK_DEFAULT) : chunk;
}

/* The lock, for a call that computes. From a progress callback of a call on the same engine it is refused before anything is touched. */
static __attribute__((noinline)) int call_enter(ds4_engine *e, ds4_caller *me, ds4_error *err) {
  int status = ds4_enter(e, err);
  if (status) return status;
  *me = (ds4_caller){.next = e->callers, .thread = pthread_self()};
  for (const ds4_caller *other = e->callers; other; other = other->next)
    if (pthread_equal(other->thread, me->thread)) {
      ds4_leave(e);
      return ds4_fail(err, DS4_EBUSY, 0, 0,
                      "a progress callback cannot compute on the engine that calls it; do that when the call has returned");
    }
  e->callers = me;
  if (e->profile && !me->next) ds4_profile_call(e->profile);
  return DS4_OK;
}

static void call_leave(ds4_engine *e, ds4_caller *me) {
  ds4_caller **at = &e->callers;
  while (*at != me) at = &(*at)->next;
  *at = me->next;
  if (e->profile && !e->callers) ds4_profile_call_end(e->profile);
  ds4_leave(e);
}

/* All rounds of the jobs. Lock held on entry and exit, sessions BUSY with their pages taken. */
static int call_run(call *c, ds4_error *err) {
  ds4_engine *e = c->e;
  for (uint32_t i = 0; i < c->n_jobs; i++) c->total += c->jobs[i].n;
  int status = DS4_OK;
  for (uint32_t i = 0; !status && i < c->n_jobs; i++) {
    job *j = &c->jobs[i];
    status = ds4_kv_prepare(j->s, j->from, j->from + j->n, err);
  }
  while (!status && c->done < c->total) {
    status = round_run(c, err);
    if (status || !c->progress) continue;
    ds4_leave(e);
    c->last_ms = now_ms();
    if (c->progress(c->user, c->done, c->total) && c->done < c->total) status = call_failed(DS4_ECANCELLED, err);
    pthread_mutex_lock(&e->lock);
  }
  for (uint32_t i = 0; i < c->n_jobs; i++) {
    ds4_logits_free(c->jobs[i].logits);
    c->jobs[i].logits = NULL;
  }
  return status;
}

void ds4_kv_begin(ds4_session *s) {
  s->busy = true;
  atomic_store(&s->cancel, 0);
}

/* Pages above the reserve go back; a session that was freed meanwhile goes now. */
bool ds4_kv_end(ds4_session *s) {
  s->busy = false;
  if (s->free_when_idle) {
    ds4_kv_session_drop(s);
    return true;
  }
  ds4_kv_give_back(s);
  return false;
}

static int tokens_check(const ds4_engine *e, const int32_t *tokens, uint32_t n, ds4_error *err) {
  for (uint32_t i = 0; i < n; i++)
    if (tokens[i] < 0 || (uint32_t)tokens[i] >= e->vocab)
      return ds4_fail(err, DS4_EINVAL, tokens[i], e->vocab, "token %d at index %u is outside the vocabulary of %u", tokens[i], i, e->vocab);
  return DS4_OK;
}

static int ctx_check(const ds4_session *s, uint64_t upto, ds4_error *err) {
  if (upto <= s->ctx) return DS4_OK;
  return ds4_fail(err, DS4_ECTX, (int64_t)upto, s->ctx,
                  "%llu positions are wanted, but the session's ctx is %u; truncate, compact, or open one with a larger ctx",
                  (unsigned long long)upto, s->ctx);
}

static int take(ds4_session *s, uint64_t upto, uint32_t chunk, ds4_error *err) {
  ds4_need need;
  ds4_kv_need(s, s->pos, upto, chunk, &need);
  return ds4_kv_take(s, &need, err);
}

/* The last token again, when its logits are not there. Lock held, session BUSY. */
static int evaluate_again(ds4_session *s, ds4_progress progress, void *user, ds4_error *err) {
  if (!s->pos) return ds4_fail(err, DS4_ELOGITS, 0, 0, "an empty session has no logits; evaluate at least one token first");
  int32_t token = ds4_log_token(s, s->pos - 1);
  job j = {.s = s, .tokens = &token, .n = 1, .from = s->pos - 1, .want = DS4_WANT_LAST, .again = true};
  ds4_need need;
  ds4_kv_need_again(s, s->pos, &need);
  int status = ds4_kv_take(s, &need, err);
  if (status) return status;
  call c;
  call_init(&c, s->engine, &j, 1, 1, progress, user);
  return call_run(&c, err);
}

/* ---- eval ------------------------------------------------------------------------------------------------------------------------ */

#define ALL_LOGITS_MAX (1ull << 30)

static int segment_check(const ds4_engine *e, const ds4_segment *g, uint32_t i, const ds4_segment *all, ds4_error *err) {
  if (!g->session || g->session->engine != e) return ds4_fail(err, DS4_EINVAL, i, 0, "segment %u has no session of this engine", i);
  if (g->want < DS4_WANT_NONE || g->want > DS4_WANT_DRAFT || (g->n && !g->tokens) || (g->n && g->want >= DS4_WANT_ALL && !g->out))
    return ds4_fail(err, DS4_EINVAL, i, 0, "segment %u lacks tokens or an output, or wants something unknown (%d)", i, g->want);
  for (uint32_t k = 0; k < i; k++)
    if (all[k].session == g->session)
      return ds4_fail(err, DS4_EINVAL, i, k, "segments %u and %u are of one session; join their tokens", k, i);
  uint64_t bytes = (uint64_t)g->n * e->vocab * sizeof(float);
  if (g->want == DS4_WANT_DRAFT && !e->draft)
    return ds4_fail(err, DS4_EUNSUPPORTED, i, 0, "this engine has no MTP block loaded; make it with the setting mtp");
  if ((g->want == DS4_WANT_ALL || g->want == DS4_WANT_DRAFT) && bytes > ALL_LOGITS_MAX)
    return ds4_fail(err, DS4_EINVAL, (int64_t)bytes, (int64_t)ALL_LOGITS_MAX,
                    "the logits of %u tokens would take %llu bytes, above 1 GB; use score, or shorter pieces", g->n,
                    (unsigned long long)bytes);
  int status = tokens_check(e, g->tokens, g->n, err);
  if (!status) status = ds4_kv_legal(g->session, err);
  if (!status) status = ctx_check(g->session, (uint64_t)g->session->pos + g->n, err);
  return status;
}

/* Logits that a score starts from: those of the token before the first. */
static int score_first(ds4_segment *g, ds4_progress progress, void *user, ds4_error *err) {
  ds4_session *s = g->session;
  if (g->want != DS4_WANT_SCORE || !g->n) return DS4_OK;
  if (!s->pos) {
    g->out[0] = 0.0f;
    return DS4_OK;
  }
  int status = s->logits ? DS4_OK : evaluate_again(s, progress, user, err);
  if (status) return status;
  uint32_t mode = ds4_float_mode_set();
  g->out[0] = log_probability(s->logits->data, s->engine->vocab, g->tokens[0]);
  ds4_float_mode_restore(mode);
  if (isfinite(g->out[0])) return DS4_OK;
  return ds4_fail(err, DS4_ENONFINITE, 0, 0, "a logit is not a finite number: the weights are damaged or do not fit this architecture");
}

static void segments_position(const ds4_engine *e, ds4_segment *g, uint32_t n) {
  for (uint32_t i = 0; i < n; i++)
    if (g[i].session && g[i].session->engine == e) g[i].pos = g[i].session->pos;
}

/* For segments that were checked. Counts what must be released once the lock is gone. */
static int eval_locked(ds4_engine *e, ds4_segment *g, uint32_t n, ds4_room *room, uint32_t chunk, ds4_progress progress, void *user,
                       uint32_t *freed, ds4_error *err) {
  int status = DS4_OK;
  uint32_t taken = 0;
  job one, *jobs = room ? room->jobs : &one; /* no room: n <= 1 */
  call c;
  call_init(&c, e, jobs, 0, chunk, progress, user);
  if (room) {
    c.parts = (part *)(void *)(room->jobs + room->n);
    c.views = (ds4_view *)(void *)(c.parts + room->n);
  }
  for (uint32_t i = 0; !status && i < n; i++) c.chunk = session_chunk(g[i].session, c.chunk);
  for (; !status && taken < n; taken++) {
    ds4_session *s = g[taken].session;
    if ((status = take(s, (uint64_t)s->pos + g[taken].n, c.chunk, err))) break;
    ds4_kv_begin(s);
  }
  for (uint32_t i = 0; !status && i < n; i++) status = score_first(&g[i], progress, user, err);
  for (uint32_t i = 0; !status && i < n; i++) /* a score may have used a page to get its first logits */
    status = take(g[i].session, (uint64_t)g[i].session->pos + g[i].n, c.chunk, err);
  for (uint32_t i = 0; !status && i < n; i++)
    if (g[i].n)
      jobs[c.n_jobs++] =
          (job){.s = g[i].session, .tokens = g[i].tokens, .n = g[i].n, .from = g[i].session->pos, .want = g[i].want, .out = g[i].out};
  if (!status && c.n_jobs) status = call_run(&c, err);
  segments_position(e, g, n);
  while (taken--) *freed += ds4_kv_end(g[taken].session);
  return status;
}

int ds4_eval(ds4_engine *e, ds4_segment *segments, uint32_t n, uint32_t chunk, ds4_progress progress, void *user, ds4_error *err) {
  uint32_t freed = 0;
  ds4_caller me;
  int status = call_enter(e, &me, err);
  if (status == DS4_EBUSY && !ds4_enter(e, NULL)) { /* refused: still say where the sessions stand */
    segments_position(e, segments, n);
    ds4_leave(e);
  }
  if (status) return status;
  segments_position(e, segments, n);
  for (uint32_t i = 0; !status && i < n; i++) status = segment_check(e, &segments[i], i, segments, err);
  /* the engine keeps the room: a call that is refused must not decide how large it is */
  ds4_room *room = !status && n > 1 ? room_take(e, n) : NULL;
  if (!status && n > 1 && !room) status = ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for the call; nothing has changed");
  if (!status) status = eval_locked(e, segments, n, room, chunk, progress, user, &freed, err);
  room_give(e, room);
  call_leave(e, &me);
  while (freed--) ds4_engine_release(e);
  return status;
}

/* ---- sync and refresh ------------------------------------------------------------------------------------------------------------- */

static uint32_t common_prefix(const ds4_session *s, const int32_t *tokens, uint32_t n) {
  uint32_t k = 0, end = ds4_min_u32(n, s->pos);
  while (k < end && ds4_log_token(s, k) == tokens[k]) k++;
  return k;
}

/* Pages that cutting to `pos` brings into the stash of a BUSY session. */
static uint32_t cut_gain(const ds4_session *s, uint32_t stream, uint32_t pos) {
  const ds4_stream *st = &s->engine->stream[stream];
  const ds4_timeline *l = &s->line[stream];
  uint32_t gain = 0;
  for (uint32_t page = ds4_pages_of(st, ds4_rows_at(st, pos)); page < l->n_tables * DS4_TABLE_PAGES; page++) {
    const ds4_table *t = l->table[page / DS4_TABLE_PAGES];
    uint32_t id = t ? t->page[page % DS4_TABLE_PAGES] : 0;
    gain += id && t->refs == 1 && st->pages[id].refs == 1;
  }
  return gain;
}

/* Takes the pages for [pos, n) that the cut to `pos` does not bring by itself: so PoolFull comes before anything is cut. */
static int sync_take(ds4_session *s, uint32_t pos, uint32_t n, uint32_t chunk, ds4_error *err) {
  ds4_need need;
  if (pos == n && n)
    ds4_kv_need_again(s, pos, &need);
  else
    ds4_kv_need(s, pos, n, chunk, &need);
  for (uint32_t i = 0; i < s->engine->n_streams; i++) need.pages[i] -= ds4_min_u32(cut_gain(s, i, pos), need.pages[i]);
  return ds4_kv_take(s, &need, err);
}

static int sync_locked(ds4_session *s, const int32_t *tokens, uint32_t n, uint32_t chunk, ds4_progress progress, void *user,
                       ds4_synced *out, ds4_error *err) {
  uint32_t prefix = s->poisoned ? 0 : common_prefix(s, tokens, n);
  if (prefix == n && n == s->pos && (s->logits || !n) && !s->poisoned) {
    *out = (ds4_synced){.reused = n};
    return DS4_OK;
  }
  uint32_t keep = prefix == s->pos ? prefix : ds4_kv_nearest_exact(s, prefix);
  call c;
  job j = {.s = s, .tokens = tokens + keep, .n = n - keep, .from = keep, .want = DS4_WANT_LAST};
  call_init(&c, s->engine, &j, 1, chunk, progress, user);
  c.chunk = session_chunk(s, c.chunk);
  int status = n ? sync_take(s, keep, n, c.chunk, err) : DS4_OK;
  if (status) return status;
  if (s->poisoned)
    ds4_kv_clear(s);
  else if (keep < s->pos)
    status = ds4_kv_cut(s, keep, err);
  if (status || !n) return status;
  *out = keep < n ? (ds4_synced){.reused = keep, .evaluated = n - keep} : (ds4_synced){.reused = n - 1, .evaluated = 1};
  return keep < n ? call_run(&c, err) : evaluate_again(s, progress, user, err);
}

int ds4_session_sync(ds4_session *s, const int32_t *tokens, uint32_t n, uint32_t chunk, ds4_progress progress, void *user, ds4_synced *out,
                     ds4_error *err) {
  ds4_engine *e = s->engine;
  bool freed = false;
  ds4_caller me;
  *out = (ds4_synced){0};
  int status = call_enter(e, &me, err);
  if (status) return status;
  status = ds4_kv_legal(s, err);
  if (status == DS4_EPOISONED) status = DS4_OK;
  if (!status) status = tokens_check(e, tokens, n, err);
  if (!status) status = ctx_check(s, n, err);
  if (!status) {
    ds4_kv_begin(s);
    status = sync_locked(s, tokens, n, chunk, progress, user, out, err);
    freed = ds4_kv_end(s);
  }
  call_leave(e, &me);
  if (freed) ds4_engine_release(e);
  return status;
}

int ds4_session_refresh(ds4_session *s, ds4_progress progress, void *user, ds4_error *err) {
  ds4_engine *e = s->engine;
  bool freed = false;
  ds4_caller me;
  int status = call_enter(e, &me, err);
  if (status) return status;
  status = ds4_kv_legal(s, err);
  if (!status && !s->logits) {
    ds4_kv_begin(s);
    status = evaluate_again(s, progress, user, err);
    freed = ds4_kv_end(s);
  }
  call_leave(e, &me);
  if (freed) ds4_engine_release(e);
  return status;
}

void ds4_session_cancel(ds4_session *s) {
  if (ds4_enter(s->engine, NULL)) return;
  if (s->busy) atomic_store(&s->cancel, 1);
  ds4_leave(s->engine);
}

/* ---- making, reading, freeing --------------------------------------------------------------------------------------------------------- */

int ds4_session_new(ds4_engine *e, uint32_t ctx, ds4_session **out, ds4_error *err) {
  *out = NULL;
  int status = ds4_enter(e, err);
  if (status) return status;
  if (e->phase != DS4_READY)
    status = ds4_fail(err, DS4_EINVAL, 0, 0, "the engine is not ready: call ds4_engine_ready after the tensors");
  else if (ctx > e->ctx)
    status = ds4_fail(err, DS4_ECTX, ctx, e->ctx, "ctx %u is more than the %u positions of the model", ctx, e->ctx);
  else if (!(*out = ds4_kv_session(e, ctx ? ctx : e->ctx)))
    status = ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for a session");
  ds4_leave(e);
  return status;
}

void ds4_session_free(ds4_session *s) {
  if (!s) return;
  ds4_engine *e = s->engine;
  if (ds4_enter(e, NULL)) return;
  bool busy = s->busy;
  if (busy) {
    s->free_when_idle = true;
    atomic_store(&s->cancel, 1);
  } else {
    ds4_kv_session_drop(s);
  }
  ds4_leave(e);
  if (!busy) ds4_engine_release(e);
}

int ds4_session_get_info(ds4_session *s, ds4_session_info *out, ds4_error *err) {
  memset(out, 0, sizeof *out);
  int status = ds4_enter(s->engine, err);
  if (status) return status;
  *out = (ds4_session_info){.pos = s->pos,
                            .ctx = s->ctx,
                            .state = s->busy       ? DS4_BUSY
                                     : s->poisoned ? DS4_POISONED
                                     : s->pos      ? DS4_LIVE
                                                   : DS4_EMPTY,
                            .logits_valid = s->logits && !s->busy && !s->poisoned,
                            .auto_marks = s->n_auto,
                            .marks = s->n_marks,
                            .reserved_pos = s->reserved_pos};
  for (uint32_t i = 0; i < s->engine->n_streams; i++)
    for (uint32_t t = 0; t < s->line[i].n_tables; t++)
      if (s->line[i].table[t]) out->bytes_held += s->line[i].table[t]->used * s->engine->stream[i].layout.page_bytes;
  ds4_leave(s->engine);
  return DS4_OK;
}

int ds4_session_tokens(ds4_session *s, uint32_t first, uint32_t n, int32_t *out, ds4_error *err) {
  int status = ds4_enter(s->engine, err);
  if (status) return status;
  if ((uint64_t)first + n > s->pos)
    status = ds4_fail(err, DS4_EPOSITION, (int64_t)first + n, s->pos, "tokens up to %llu are wanted, the session holds %u",
                      (unsigned long long)first + n, s->pos);
  for (uint32_t i = 0; !status && i < n; i++) out[i] = ds4_log_token(s, first + i);
  ds4_leave(s->engine);
  return status;
}

int ds4_session_rows(ds4_session *s, uint32_t stream, uint32_t first, uint32_t n, void *out, uint64_t nbytes, ds4_error *err) {
  ds4_engine *e = s->engine;
  if (stream >= e->n_streams) return ds4_fail(err, DS4_EINVAL, stream, e->n_streams, "stream %u of %u", stream, e->n_streams);
  const ds4_stream *st = &e->stream[stream];
  if (nbytes != (uint64_t)n * st->layout.row_bytes * st->layout.n_layers)
    return ds4_fail(err, DS4_EINVAL, (int64_t)nbytes, (int64_t)(n * st->layout.row_bytes * st->layout.n_layers),
                    "the buffer does not fit %u rows", n);
  int status = ds4_enter(e, err);
  if (status) return status;
  uint8_t *to = out;
  status = ds4_kv_legal(s, err);
  if (!status && (uint64_t)first + n > ds4_rows_at(st, s->pos))
    status = ds4_fail(err, DS4_EPOSITION, (int64_t)first + n, ds4_rows_at(st, s->pos), "the stream holds %u rows", ds4_rows_at(st, s->pos));
  for (uint32_t layer = 0; !status && layer < st->layout.n_layers; layer++)
    for (uint32_t r = first; !status && r < first + n; r++, to += st->layout.row_bytes) {
      uint32_t page = r / st->layout.page_rows, t = page / DS4_TABLE_PAGES;
      uint32_t id = t < s->line[stream].n_tables && s->line[stream].table[t] ? s->line[stream].table[t]->page[page % DS4_TABLE_PAGES] : 0;
      if (!id)
        status = ds4_fail(err, DS4_EINEXACT, r, 0, "row %u of stream %s is out of reach and gone", r, st->name);
      else
        ds4_rows_pack(&st->layout, st->pages[id].mem, layer, r % st->layout.page_rows, 1, to);
    }
  ds4_leave(e);
  return status;
}
