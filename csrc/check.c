/* ds4_session_check: recomputes what the session and the pool claim about themselves. The numbers are those of kv.c's invariants. */
#include "kv.h"

#include <stdlib.h>
#include <string.h>

#define BROKEN(n, ...) return ds4_fail(err, DS4_EINVAL, n, 0, "invariant " #n " does not hold: " __VA_ARGS__)

static int check_line(const ds4_session *s, uint32_t i, ds4_error *err) {
  const ds4_stream *st = &s->engine->stream[i];
  const ds4_timeline *l = &s->line[i];
  uint32_t pages = ds4_pages_of(st, ds4_rows_at(st, s->pos));
  uint32_t floor = st->reach ? l->floor : 0;
  if (floor > ds4_window_page(st, s->pos, st->reach ? st->reach - 1 : s->pos))
    BROKEN(3, "stream %s: floor page %u lies inside the window of position %u", st->name, floor, s->pos);
  for (uint32_t page = 0; page < l->n_tables * DS4_TABLE_PAGES; page++) {
    bool held = ds4_entry(l, page) != 0;
    if (page >= pages && held && !s->busy)
      BROKEN(2, "stream %s: page %u is held behind the last row of position %u", st->name, page, s->pos);
    if (page >= floor && page < pages && !held) BROKEN(2, "stream %s: page %u is missing at position %u", st->name, page, s->pos);
    if (page < floor && held && !ds4_mark_covers(s, i, page)) BROKEN(3, "stream %s: page %u is held for no mark", st->name, page);
  }
  if (pages > l->n_tables * DS4_TABLE_PAGES && pages > floor) BROKEN(2, "stream %s: %u tables for %u pages", st->name, l->n_tables, pages);
  for (uint32_t t = 0; t < l->n_tables; t++) {
    uint32_t used = 0;
    for (uint32_t k = 0; l->table[t] && k < DS4_TABLE_PAGES; k++) used += l->table[t]->page[k] != 0;
    if (l->table[t] && used != l->table[t]->used)
      BROKEN(4, "stream %s: table %u counts %u pages, holds %u", st->name, t, l->table[t]->used, used);
  }
  for (const ds4_mark *m = s->newest; m && st->reach; m = m->older)
    for (uint32_t page = ds4_window_page(st, m->pos, st->reach); m->pos && page < ds4_pages_of(st, m->pos); page++)
      if (!ds4_entry(l, page)) BROKEN(3, "stream %s: the mark at %u lacks page %u", st->name, m->pos, page);
  return DS4_OK;
}

static int check_session(const ds4_session *s, ds4_error *err) {
  if (s->pos > s->ctx) BROKEN(1, "position %u is above ctx %u", s->pos, s->ctx);
  if ((uint64_t)s->n_logs * DS4_LOG_TOKENS < s->pos) BROKEN(1, "%u pieces of log for position %u", s->n_logs, s->pos);
  for (uint32_t p = 0; p < s->pos; p++)
    if (ds4_log_token(s, p) < 0 || (uint32_t)ds4_log_token(s, p) >= s->engine->vocab) BROKEN(1, "token %d at %u", ds4_log_token(s, p), p);
  uint32_t n_auto = 0, n_marks = 0;
  for (const ds4_mark *m = s->newest; m; m = m->older) {
    if (m->pos > s->pos || (m->older && m->older->pos > m->pos)) BROKEN(6, "a mark at %u, position %u", m->pos, s->pos);
    if (m->session != s) BROKEN(6, "the mark at %u belongs to another session", m->pos);
    *(m->automatic ? &n_auto : &n_marks) += 1;
  }
  if (n_auto != s->n_auto || n_marks != s->n_marks) BROKEN(6, "%u automatic and %u other marks counted", n_auto, n_marks);
  if (s->logits && !s->pos) BROKEN(6, "logits at position 0");
  for (uint32_t i = 0; i < s->engine->n_streams; i++) {
    int status = check_line(s, i, err);
    if (status) return status;
  }
  return DS4_OK;
}

static int by_address(const void *a, const void *b) {
  const ds4_table *const *x = a, *const *y = b;
  return *x < *y ? -1 : *x > *y;
}

/* Counts all references to pages of one stream: `tables` is scratch for every table of every session, `refs` for every page. */
static int check_stream(const ds4_engine *e, uint32_t i, const ds4_table **tables, uint32_t *refs, uint64_t *total, ds4_error *err) {
  const ds4_stream *st = &e->stream[i];
  uint32_t n = 0, stashed = 0, unused = 0, used = 0;
  for (const ds4_session *s = e->sessions; s; s = s->next) {
    for (uint32_t t = 0; t < s->line[i].n_tables; t++)
      if (s->line[i].table[t]) tables[n++] = s->line[i].table[t];
    uint32_t stash = 0;
    for (uint32_t id = s->line[i].stash; id; id = st->pages[id].next) stash++;
    if (stash != s->line[i].n_stash) BROKEN(5, "stream %s: a stash of %u pages counts %u", st->name, stash, s->line[i].n_stash);
    stashed += stash;
  }
  qsort(tables, n, sizeof *tables, by_address);
  for (uint32_t t = 0, same; t < n; t += same) {
    for (same = 1; t + same < n && tables[t + same] == tables[t];) same++;
    if (tables[t]->refs != same) BROKEN(4, "stream %s: a table with %u references is held %u times", st->name, tables[t]->refs, same);
    for (uint32_t k = 0; k < DS4_TABLE_PAGES; k++)
      if (tables[t]->page[k]) refs[tables[t]->page[k]]++;
  }
  for (uint32_t id = 1; id < st->n_pages; id++) {
    if (st->pages[id].refs != refs[id])
      BROKEN(4, "stream %s: page %u counts %u references, has %u", st->name, id, st->pages[id].refs, refs[id]);
    used += refs[id] != 0;
    *total += refs[id];
  }
  for (uint32_t id = st->free_list; id; id = st->pages[id].next) unused++;
  if (used != st->n_used || used + stashed + unused != (st->n_pages ? st->n_pages - 1 : 0))
    BROKEN(5, "stream %s: %u used, %u reserved and %u free pages of %u", st->name, used, stashed, unused, st->n_pages);
  return DS4_OK;
}

static int check_pool(ds4_engine *e, ds4_error *err) {
  uint64_t n_tables = 0, n_pages = 0, total = 0, used = 0, marks = 0, sessions = 0;
  for (const ds4_session *s = e->sessions; s; s = s->next, sessions++) {
    marks += s->n_auto * e->mark_bytes;
    for (uint32_t i = 0; i < e->n_streams; i++) n_tables += s->line[i].n_tables;
  }
  for (uint32_t i = 0; i < e->n_streams; i++) {
    n_pages += e->stream[i].n_pages;
    used += e->stream[i].n_used * e->stream[i].layout.page_bytes;
  }
  const ds4_table **tables = calloc(n_tables + 1, sizeof *tables);
  uint32_t *refs = calloc(n_pages + 1, sizeof *refs);
  int status = tables && refs ? DS4_OK : ds4_fail(err, DS4_ENOMEM, 0, 0, "no memory for the check");
  for (uint32_t i = 0; !status && i < e->n_streams; i++) {
    memset(refs, 0, (n_pages + 1) * sizeof *refs);
    status = check_stream(e, i, tables, refs, &total, err);
  }
  free(tables);
  free(refs);
  if (status) return status;
  if (total != e->pool.refs)
    BROKEN(4, "%llu references counted, %llu in the ledger", (unsigned long long)total, (unsigned long long)e->pool.refs);
  if (used != e->pool.used || e->pool.used + e->pool.reserved > e->pool.budget || e->pool.system > e->pool.budget)
    BROKEN(5, "%llu bytes used by count, %llu by ledger, budget %llu", (unsigned long long)used, (unsigned long long)e->pool.used,
           (unsigned long long)e->pool.budget);
  if (marks != e->pool.auto_bytes || sessions != e->pool.sessions) BROKEN(5, "sessions or automatic marks are miscounted");
  return DS4_OK;
}

int ds4_session_check(ds4_session *s, ds4_error *err) {
  int status = ds4_enter(s->engine, err);
  if (status) return status;
  status = check_session(s, err);
  if (!status) status = check_pool(s->engine, err);
  ds4_leave(s->engine);
  return status;
}
