/* Marks: remembered positions to which exact return is guaranteed.
 *
 * A mark holds no pages itself: as long as it is on its session's timeline, retire() in kv.c leaves the pages alone that hold the last `reach` rows
 * before it. Explicit marks have a handle that the caller owns; automatic ones are the engine's and go when room is short. */
#include "kv.h"

#include <stdlib.h>

static bool covers(const ds4_mark *m, const ds4_stream *st, uint32_t page) {
  return m->pos && page >= ds4_window_page(st, m->pos, st->reach) && page < ds4_pages_of(st, m->pos);
}

bool ds4_mark_covers(const ds4_session *s, uint32_t stream, uint32_t page) {
  for (const ds4_mark *m = s->newest; m; m = m->older)
    if (covers(m, &s->engine->stream[stream], page)) return true;
  return false;
}

/* A mark at `pos`, whose rows are there. NULL: no memory. */
ds4_mark *ds4_mark_new(ds4_session *s, uint32_t pos, bool automatic, bool pinned) {
  ds4_mark *m = ds4_alloc(s->engine, sizeof *m), *newer = NULL, *older = s->newest;
  if (!m) return NULL;
  for (; older && older->pos > pos; older = older->older) newer = older;
  *m = (ds4_mark){.engine = s->engine, .session = s, .pos = pos, .automatic = automatic, .pinned = pinned, .older = older, .newer = newer};
  if (older) older->newer = m;
  *(newer ? &newer->older : &s->newest) = m;
  if (automatic) {
    s->n_auto++;
    s->engine->pool.auto_bytes += s->engine->mark_bytes;
  } else {
    s->n_marks++;
    s->engine->pool.marks++;
    ds4_engine_hold(s->engine);
  }
  return m;
}

void ds4_mark_kill(ds4_mark *m) {
  ds4_session *s = m->session;
  *(m->newer ? &m->newer->older : &s->newest) = m->older;
  if (m->older) m->older->newer = m->newer;
  m->session = NULL;
  for (uint32_t i = 0; i < s->engine->n_streams; i++) {
    const ds4_stream *st = &s->engine->stream[i];
    if (!st->reach) continue;
    for (uint32_t page = ds4_window_page(st, m->pos, st->reach); page < ds4_pages_of(st, m->pos) && page < s->line[i].floor; page++)
      if (!ds4_mark_covers(s, i, page)) ds4_entry_release(s, i, page);
  }
  ds4_logits_free(m->logits);
  m->logits = NULL;
  if (!m->automatic) {
    s->n_marks--;
    return; /* the handle stays the caller's */
  }
  s->n_auto--;
  s->engine->pool.auto_bytes -= s->engine->mark_bytes;
  free(m);
}

/* ---- automatic marks --------------------------------------------------------------------------------------------------------------- */

static ds4_mark *older_automatic(ds4_mark *m) {
  do m = m->older;
  while (m && !m->automatic);
  return m;
}

static ds4_mark *newest_automatic(const ds4_session *s) {
  return !s->newest || s->newest->automatic ? s->newest : older_automatic(s->newest);
}

/* Older marks lie farther apart: one goes when the gap it leaves is at most half of its newer neighbour's age. So there are about log(pos). */
static void thin(ds4_session *s) {
  for (ds4_mark *newer = newest_automatic(s), *m = newer ? older_automatic(newer) : NULL; m;) {
    ds4_mark *older = older_automatic(m);
    if (!m->pinned && newer->pos - (older ? older->pos : 0) <= (s->pos - newer->pos) / 2)
      ds4_mark_kill(m);
    else
      newer = m;
    m = older;
  }
}

static bool goes_before(const ds4_mark *a, const ds4_mark *b) {
  if (!b) return true;
  return a->pinned != b->pinned ? !a->pinned : a->pos < b->pos;
}

/* Frees one automatic mark: the oldest of `own`, else of any session that no call works on; those at the end of a system prompt last. */
bool ds4_mark_drop_automatic(ds4_engine *e, const ds4_session *own, bool only_own) {
  ds4_mark *first = NULL;
  for (const ds4_session *s = e->sessions; s; s = s->next) {
    if (s != own && (s->busy || only_own)) continue;
    for (ds4_mark *m = newest_automatic(s); m; m = older_automatic(m))
      if (goes_before(m, first)) first = m;
  }
  if (!first) return false;
  ds4_session *s = first->session;
  ds4_mark_kill(first);
  ds4_kv_give_back(s);
  return true;
}

/* Sets an automatic mark at `pos`, which no mark lies behind. Where every stream is unlimited every position is exact and none is needed. */
void ds4_mark_set_automatic(ds4_session *s, uint32_t pos, bool pinned) {
  ds4_engine *e = s->engine;
  if (!e->windowed || !pos) return;
  ds4_mark *there = newest_automatic(s);
  if (there && there->pos == pos) {
    there->pinned |= pinned;
    return;
  }
  if (e->mark_bytes > e->pool.budget / 8 || !ds4_mark_new(s, pos, true, pinned)) return;
  thin(s);
  while (e->pool.auto_bytes > e->pool.budget / 8 && ds4_mark_drop_automatic(e, s, false)) {
  }
}

void ds4_mark_copy_automatic(ds4_session *child, const ds4_session *s) {
  const ds4_mark *m = s->newest;
  while (m && m->older) m = m->older;
  for (; m && m->pos <= child->pos; m = m->newer)
    if (m->automatic && child->engine->pool.auto_bytes + child->engine->mark_bytes <= child->engine->pool.budget / 8)
      ds4_mark_new(child, m->pos, true, m->pinned);
}

int ds4_session_mark_auto(ds4_session *s, int32_t pinned, ds4_error *err) {
  int status = ds4_enter(s->engine, err);
  if (status) return status;
  status = ds4_kv_legal(s, err);
  if (!status) ds4_mark_set_automatic(s, s->pos, pinned != 0);
  ds4_leave(s->engine);
  return status;
}

/* ---- handles ------------------------------------------------------------------------------------------------------------------------ */

int ds4_session_mark(ds4_session *s, ds4_mark **out, ds4_error *err) {
  *out = NULL;
  int status = ds4_enter(s->engine, err);
  if (status) return status;
  status = ds4_kv_legal(s, err);
  if (!status && !(*out = ds4_mark_new(s, s->pos, false, false)))
    status = ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for a mark; nothing has changed");
  if (!status && (status = ds4_kv_hold_reserve(s, err))) { /* the pages that the mark keeps do not come back to the reserve */
    ds4_mark_kill(*out);
    s->engine->pool.marks--;
    free(*out);
    *out = NULL;
    ds4_engine_release(s->engine);
  }
  if (!status && s->logits) {
    atomic_fetch_add(&s->logits->refs, 1);
    (*out)->logits = s->logits;
  }
  ds4_kv_give_back(s);
  ds4_leave(s->engine);
  return status;
}

static int mark_alive(const ds4_mark *m, ds4_error *err) {
  if (m->session) return DS4_OK;
  return ds4_fail(
      err, DS4_EMARK, m->pos, 0,
      "the mark at position %u is gone: the session was truncated, synced or cleared below it, or closed; sync the tokens instead", m->pos);
}

int ds4_session_rollback(ds4_session *s, ds4_mark *m, ds4_error *err) {
  int status = ds4_enter(s->engine, err);
  if (status) return status;
  status = ds4_kv_legal(s, err);
  if (!status && m->engine != s->engine)
    status = ds4_fail(err, DS4_EMARK, m->pos, 0, "the mark belongs to a session of another engine; roll back with a mark of this session");
  if (!status) status = mark_alive(m, err);
  if (!status && m->session != s)
    status = ds4_fail(err, DS4_EMARK, m->pos, 0, "the mark belongs to another session; a fork does not inherit the handles of its parent");
  if (!status) status = ds4_kv_cut(s, m->pos, err);
  if (!status && s->logits != m->logits) {
    if (m->logits) atomic_fetch_add(&m->logits->refs, 1);
    ds4_kv_set_logits(s, m->logits);
  }
  ds4_kv_give_back(s);
  ds4_leave(s->engine);
  return status;
}

int ds4_mark_pos(ds4_mark *m, uint32_t *pos, ds4_error *err) {
  int status = ds4_enter(m->engine, err);
  if (status) return status;
  status = mark_alive(m, err);
  *pos = m->pos;
  ds4_leave(m->engine);
  return status;
}

void ds4_mark_free(ds4_mark *m) {
  if (!m) return;
  ds4_engine *e = m->engine;
  if (ds4_enter(e, NULL)) return; /* a forked child owns nothing of this */
  ds4_session *s = m->session;
  if (s) {
    ds4_mark_kill(m);
    ds4_kv_give_back(s);
  }
  e->pool.marks--;
  ds4_leave(e);
  free(m);
  ds4_engine_release(e);
}
