/* Timelines: the token log and the block tables of one session, and the only functions that move them.
 *
 * Invariants (ds4_session_check recomputes them; the numbers are those it reports)
 *  1  pos <= ctx, and the log holds exactly the tokens [0, pos).
 *  2  A stream holds floor(pos / stride) rows: a page is in the table for every row that may still be read, and none lies behind the last row.
 *  3  Unlimited stream: every page up to the last row is there. Windowed stream: every page from `floor` on is there, `floor` lies at or below the
 *     window of pos, and a page below `floor` is there only because a mark covers it.
 *  4  refs of a page = tables that hold it; refs of a table = sessions that hold it. A page or table with refs > 1 is never written.
 *  5  used + reserved + free pages = all pages, in every stream and in bytes; reserved = the stashes of all sessions.
 *  6  Marks lie at or below pos in ascending order; logits are there only when pos > 0.
 *
 * A block table (stride 1, pages of 64 rows, tables of 64 pages). Forks share whole tables, so that fork and truncate touch one pointer for
 * 4096 positions; the table that is written next is copied first, and so is the page:
 *
 *   session A  table[0] ----> [p1 p2 ... p64]  refs 2      page p9  refs 1   rows 512..575
 *              table[1] --.                                page p65 refs 2   rows 4096..4159, the cut is somewhere inside:
 *   session B  table[0] --|-> (the same)                                     rows behind it are garbage that nothing reads
 *              table[1] -.'-> [p65 0 ... 0]    refs 1
 *                        '--> [p65 0 ... 0]    refs 1
 *
 * A windowed stream holds few pages: its tables are never shared, fork copies the entries that the child needs.
 *
 * States of a session, and who moves them
 *
 *              ds4_kv_commit              ds4_kv_begin / ds4_kv_end
 *     EMPTY ------------------> LIVE <----------------------------> BUSY      BUSY: eval, sync, refresh, score; every other writer is refused,
 *       ^  ^---ds4_kv_cut(0)-----'                                    |            readers see the last committed chunk
 *       |                                     round_abandon (session.c) |
 *       '------- clear, sync ------- POISONED <-----------------------'       POISONED: only clear, sync and free are legal
 */
#include "kv.h"

#include <stdlib.h>
#include <string.h>

/* ---- tables ------------------------------------------------------------------------------------------------------------------------- */

static bool array_grow(ds4_engine *e, void **array, uint32_t *cap, uint32_t need, size_t item) {
  if (need <= *cap) return true;
  uint32_t grown = ds4_max_u32(need, *cap ? *cap * 2 : 8);
  void *fresh = ds4_alloc(e, (uint64_t)grown * item);
  if (!fresh) return false;
  if (*cap) memcpy(fresh, *array, *cap * item);
  free(*array);
  *array = fresh;
  *cap = grown;
  return true;
}

/* A page without references goes to the session's stash; ds4_kv_give_back decides what stays there. */
static void stash_push(ds4_timeline *l, ds4_stream *st, uint32_t id) {
  st->pages[id].next = l->stash;
  l->stash = id;
  l->n_stash++;
}

static uint32_t stash_pop(ds4_timeline *l, ds4_stream *st) {
  uint32_t id = l->stash;
  if (!id) return 0;
  l->stash = st->pages[id].next;
  l->n_stash--;
  return id;
}

static void page_release(ds4_session *s, uint32_t stream, uint32_t id) {
  ds4_stream *st = &s->engine->stream[stream];
  if (ds4_page_drop(s->engine, st, id)) stash_push(&s->line[stream], st, id);
}

static void table_release(ds4_session *s, uint32_t stream, ds4_table *t) {
  if (!t || --t->refs) return;
  for (uint32_t i = 0; i < DS4_TABLE_PAGES; i++)
    if (t->page[i]) page_release(s, stream, t->page[i]);
  free(t);
}

/* A table of the caller's own with the first `keep` entries of `t`; NULL: no memory. `t` keeps its references. */
static ds4_table *table_copy(ds4_session *s, uint32_t stream, const ds4_table *t, uint32_t keep) {
  ds4_engine *e = s->engine;
  ds4_table *own = ds4_alloc(e, sizeof *own);
  if (!own) return NULL;
  own->refs = 1;
  for (uint32_t i = 0; t && i < keep; i++) {
    if (!t->page[i]) continue;
    own->page[i] = t->page[i];
    own->used++;
    ds4_page_share(e, &e->stream[stream], t->page[i]);
  }
  return own;
}

static void entry_put(ds4_timeline *l, uint32_t page, uint32_t id) {
  ds4_table *t = l->table[page / DS4_TABLE_PAGES];
  if (!t->page[page % DS4_TABLE_PAGES]) t->used++;
  t->page[page % DS4_TABLE_PAGES] = id;
}

/* Lets go of one page of a windowed stream, whose tables are never shared. */
void ds4_entry_release(ds4_session *s, uint32_t stream, uint32_t page) {
  ds4_timeline *l = &s->line[stream];
  ds4_table *t = page / DS4_TABLE_PAGES < l->n_tables ? l->table[page / DS4_TABLE_PAGES] : NULL;
  if (!t || !t->page[page % DS4_TABLE_PAGES]) return;
  page_release(s, stream, t->page[page % DS4_TABLE_PAGES]);
  t->page[page % DS4_TABLE_PAGES] = 0;
  if (--t->used) return;
  free(t);
  l->table[page / DS4_TABLE_PAGES] = NULL;
}

static bool page_is_shared(const ds4_session *s, uint32_t stream, uint32_t page) {
  const ds4_timeline *l = &s->line[stream];
  uint32_t id = ds4_entry(l, page);
  return id && (l->table[page / DS4_TABLE_PAGES]->refs > 1 || s->engine->stream[stream].pages[id].refs > 1);
}

/* ---- pages for a call -------------------------------------------------------------------------------------------------------------- */

/* Pages of a windowed stream that will fall out of the window and then come back: not shared, and no mark keeps them. */
static uint32_t returning(const ds4_session *s, uint32_t i) {
  uint32_t n = 0;
  for (uint32_t page = s->line[i].floor; page < ds4_pages_of(&s->engine->stream[i], s->pos); page++)
    n += ds4_entry(&s->line[i], page) && !page_is_shared(s, i, page) && !ds4_mark_covers(s, i, page);
  return n;
}

/* Most pages that a rolling window holds at once when it moves on in chunks of `chunk` tokens. */
static uint32_t window_pages(const ds4_session *s, const ds4_stream *st, uint32_t chunk) {
  return ds4_pages_of(st, (uint64_t)st->reach + s->engine->reach_slack + chunk) + 2;
}

/* Pages of one stream that writing positions [from, upto) takes at most, in chunks of `chunk` tokens, when everything from the row of
 * `from` on is cut. */
static uint32_t stream_need(const ds4_session *s, uint32_t i, uint64_t from, uint64_t upto, uint32_t chunk) {
  const ds4_stream *st = &s->engine->stream[i];
  uint32_t row = ds4_rows_at(st, from), end = ds4_rows_at(st, upto);
  if (end <= row) return 0;
  uint32_t first = row / st->layout.page_rows, last = ds4_pages_of(st, end);
  bool held = row % st->layout.page_rows != 0;
  uint32_t need = last - first - held;
  if (st->reach) {
    uint32_t most = window_pages(s, st, chunk), back = from == s->pos ? returning(s, i) : 0;
    need = ds4_min_u32(need, most - ds4_min_u32(most, back));
  }
  return need + (held && page_is_shared(s, i, first));
}

/* A window of the reserve must also be there when the session comes back to where the reserve was made and goes on from there. */
static uint32_t reserve_need(const ds4_session *s, uint32_t i) {
  const ds4_stream *st = &s->engine->stream[i];
  uint32_t first = ds4_pages_of(st, ds4_min_u32(s->reserved_from, s->pos)), comes_back = 0;
  if (!st->reach) return 0; /* what truncate drops there comes back page by page */
  for (uint32_t page = first; page < ds4_pages_of(st, s->pos); page++)
    comes_back += ds4_entry(&s->line[i], page) && !page_is_shared(s, i, page);
  uint32_t last = ds4_max_u32(first, ds4_pages_of(st, s->reserved_pos));
  uint32_t need = ds4_min_u32(last - first, window_pages(s, st, DS4_CHUNK_DEFAULT));
  return need - ds4_min_u32(need, comes_back);
}

/* What a call over [from, upto) needs, the reserve included. */
void ds4_kv_need(const ds4_session *s, uint64_t from, uint64_t upto, uint32_t chunk, ds4_need *out) {
  bool reserved = s->reserved_pos != 0;
  if (s->reserved_pos > upto) upto = s->reserved_pos;
  if (reserved) chunk = ds4_max_u32(chunk, DS4_CHUNK_DEFAULT);
  for (uint32_t i = 0; i < s->engine->n_streams; i++) {
    out->pages[i] = stream_need(s, i, from, upto, chunk);
    if (reserved) out->pages[i] = ds4_max_u32(out->pages[i], reserve_need(s, i));
  }
}

/* What writing the row of position pos - 1 again needs: a page for the copy of a shared one. The reserve counts that page too where it goes on. */
void ds4_kv_need_again(const ds4_session *s, uint32_t pos, ds4_need *out) {
  ds4_kv_need(s, pos, pos, DS4_CHUNK_DEFAULT, out);
  for (uint32_t i = 0; i < s->engine->n_streams; i++) {
    const ds4_stream *st = &s->engine->stream[i];
    uint32_t rows = ds4_rows_at(st, pos);
    if (rows == ds4_rows_at(st, pos - 1) || !page_is_shared(s, i, (rows - 1) / st->layout.page_rows)) continue;
    out->pages[i] = rows % st->layout.page_rows ? ds4_max_u32(out->pages[i], 1) : out->pages[i] + 1;
  }
}

static uint64_t need_bytes(const ds4_session *s, const ds4_need *need) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < s->engine->n_streams; i++)
    if (need->pages[i] > s->line[i].n_stash)
      bytes += (uint64_t)(need->pages[i] - s->line[i].n_stash) * s->engine->stream[i].layout.page_bytes;
  return bytes;
}

/* Fills the stashes up to `need`. Automatic marks, the oldest first, make room. On an error nothing has changed but for those. */
int ds4_kv_take(ds4_session *s, const ds4_need *need, ds4_error *err) {
  ds4_engine *e = s->engine;
  uint64_t bytes;
  while ((bytes = need_bytes(s, need)) > ds4_pool_free_bytes(e))
    if (!ds4_mark_drop_automatic(e, s, false))
      return ds4_fail(
          err, DS4_EPOOL, (int64_t)bytes, (int64_t)ds4_pool_free_bytes(e),
          "the page pool is full: %llu bytes needed, %llu free; close sessions or marks, truncate, or make the engine with a larger "
          "pool_tokens",
          (unsigned long long)bytes, (unsigned long long)ds4_pool_free_bytes(e));
  for (uint32_t i = 0; i < e->n_streams; i++)
    while (s->line[i].n_stash < need->pages[i]) {
      uint32_t id = ds4_pool_take(e, &e->stream[i]);
      if (!id) {
        ds4_kv_give_back(s);
        return ds4_fail(err, DS4_ENOMEM, (int64_t)e->stream[i].layout.page_bytes, 0,
                        "the system refused memory for a page of %llu bytes; make the engine with a smaller pool",
                        (unsigned long long)e->stream[i].layout.page_bytes);
      }
      stash_push(&s->line[i], &e->stream[i], id);
    }
  return DS4_OK;
}

/* Tops the stashes up to what the reserve promises. */
int ds4_kv_hold_reserve(ds4_session *s, ds4_error *err) {
  ds4_need need;
  if (!s->reserved_pos) return DS4_OK;
  ds4_kv_need(s, s->pos, s->pos, DS4_CHUNK_DEFAULT, &need);
  return ds4_kv_take(s, &need, err);
}

/* What the stashes hold above the reserve returns to the pool. A truncate into pages that a fork shares can leave the reserve short: then it is topped
 * up, and where the pool has nothing left it ends earlier (ds4_session_info.reserved_pos says where). */
void ds4_kv_give_back(ds4_session *s) {
  if (s->busy || s->settling) return;
  s->settling = true; /* dropping a mark comes back here */
  while (ds4_kv_hold_reserve(s, NULL)) s->reserved_pos = s->reserved_pos > s->pos + DS4_PAGE_ROWS ? s->reserved_pos - DS4_PAGE_ROWS : 0;
  s->settling = false;
  ds4_need keep;
  ds4_kv_need(s, s->pos, s->pos, DS4_CHUNK_DEFAULT, &keep);
  for (uint32_t i = 0; i < s->engine->n_streams; i++) {
    while (s->line[i].n_stash > keep.pages[i])
      ds4_pool_give(s->engine, &s->engine->stream[i], stash_pop(&s->line[i], &s->engine->stream[i]));
  }
}

/* Room in the log and in tables of the session's own for positions [from, upto). Changes nothing that can be seen. */
int ds4_kv_prepare(ds4_session *s, uint32_t from, uint32_t upto, ds4_error *err) {
  ds4_engine *e = s->engine;
  for (uint32_t i = 0; i < e->n_streams; i++) {
    const ds4_stream *st = &e->stream[i];
    ds4_timeline *l = &s->line[i];
    uint32_t first = ds4_rows_at(st, from) / st->layout.page_rows, last = ds4_pages_of(st, ds4_rows_at(st, upto));
    uint32_t tables = (last + DS4_TABLE_PAGES - 1) / DS4_TABLE_PAGES;
    if (!array_grow(e, (void **)&l->table, &l->cap_tables, tables, sizeof *l->table)) goto no_memory;
    if (!array_grow(e, (void **)&l->view, &l->cap_view, last, sizeof *l->view)) goto no_memory;
    for (uint32_t t = first / DS4_TABLE_PAGES; t < tables && first < last; t++) {
      ds4_table *old = t < l->n_tables ? l->table[t] : NULL;
      if (!old || old->refs > 1) {
        ds4_table *own = table_copy(s, i, old, DS4_TABLE_PAGES);
        if (!own) goto no_memory;
        table_release(s, i, old);
        l->table[t] = own;
      }
      l->n_tables = ds4_max_u32(l->n_tables, t + 1);
    }
  }
  uint32_t logs = (upto + DS4_LOG_TOKENS - 1) / DS4_LOG_TOKENS;
  if (!array_grow(e, (void **)&s->logs, &s->cap_logs, logs, sizeof *s->logs)) goto no_memory;
  for (uint32_t i = from / DS4_LOG_TOKENS; i < logs; i++) {
    ds4_log *old = i < s->n_logs ? s->logs[i] : NULL;
    if (old && old->refs == 1) continue;
    ds4_log *own = ds4_alloc(e, sizeof *own);
    if (!own) goto no_memory;
    if (old) memcpy(own, old, sizeof *own), old->refs--;
    own->refs = 1;
    s->logs[i] = own;
    s->n_logs = ds4_max_u32(s->n_logs, i + 1);
  }
  return DS4_OK;
no_memory:
  return ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for the block tables; free memory and try again");
}

/* A page of the stash; automatic marks that this call has set give theirs back when it is empty (ds4_kv_need has counted all others). */
static uint32_t stash_page(ds4_session *s, uint32_t stream) {
  uint32_t id;
  while (!(id = stash_pop(&s->line[stream], &s->engine->stream[stream]))) {
    if ((id = ds4_pool_take(s->engine, &s->engine->stream[stream]))) return id;
    if (!ds4_mark_drop_automatic(s->engine, s, true)) return 0;
  }
  return id;
}

#ifdef DS4_TEST
static void poison(ds4_engine *e, uint8_t *mem, uint64_t bytes) { (void)e, memset(mem, 0xff, bytes); } /* all ones is NaN in f32 and f16 */
#else
static void poison(ds4_engine *e, uint8_t *mem, uint64_t bytes) { (void)e, (void)mem, (void)bytes; }
#endif

/* Gives every row of positions [from, upto) a page of the session's own. A shared page is copied; on the device, so the caller waits. */
int ds4_kv_write_begin(ds4_session *s, uint32_t from, uint32_t upto, ds4_error *err) {
  ds4_engine *e = s->engine;
  for (uint32_t i = 0; i < e->n_streams; i++) {
    ds4_stream *st = &e->stream[i];
    ds4_timeline *l = &s->line[i];
    uint32_t row = ds4_rows_at(st, from), end = ds4_rows_at(st, upto);
    for (uint32_t page = row / st->layout.page_rows; page < ds4_pages_of(st, end) && end > row; page++) {
      uint32_t old = ds4_entry(l, page);
      if (old && !page_is_shared(s, i, page)) continue;
      uint32_t id = stash_page(s, i);
      if (!id)
        return ds4_fail(err, DS4_EPOOL, (int64_t)st->layout.page_bytes, 0, "no page left for stream %s: report this, it was counted before",
                        st->name);
      if (old) {
        int status = e->ops->copy(e->backend, st->pages[id].mem, st->pages[old].mem, st->layout.page_bytes);
        if (status) {
          stash_push(l, st, id);
          return ds4_fail(err, status, 0, 0, "copying a shared page of stream %s failed; the session stays where it was", st->name);
        }
      } else {
        poison(e, st->pages[id].mem, st->layout.page_bytes);
      }
      ds4_page_enter(e, st, id);
      if (old) page_release(s, i, old);
      entry_put(l, page, id);
    }
  }
  return DS4_OK;
}

/* The pages of a stream that a round over positions [from, upto) may touch, as kernels see them. */
void ds4_kv_view(const ds4_session *s, uint32_t stream, uint32_t from, uint32_t upto, ds4_view *out) {
  const ds4_stream *st = &s->engine->stream[stream];
  const ds4_timeline *l = &s->line[stream];
  uint32_t first = st->reach ? ds4_window_page(st, from, st->reach) : 0, last = ds4_pages_of(st, ds4_rows_at(st, upto));
  for (uint32_t page = first; page < last; page++) {
    uint32_t id = ds4_entry(l, page);
    l->view[page - first] = id ? st->pages[id].mem : NULL;
  }
  *out = (ds4_view){.pages = l->view, .first_page = first, .n_pages = last > first ? last - first : 0};
}

/* ---- the one commit point ------------------------------------------------------------------------------------------------------------ */

/* Windowed pages that are out of reach and slack, and that no mark covers, go back. */
static void retire(ds4_session *s) {
  for (uint32_t i = 0; i < s->engine->n_streams; i++) {
    const ds4_stream *st = &s->engine->stream[i];
    if (!st->reach) continue;
    uint32_t floor = ds4_window_page(st, s->pos, (uint64_t)st->reach + s->engine->reach_slack);
    for (; s->line[i].floor < floor; s->line[i].floor++)
      if (!ds4_mark_covers(s, i, s->line[i].floor)) ds4_entry_release(s, i, s->line[i].floor);
  }
}

/* Moves the session forward over `n` tokens whose rows have been written (K4). Cannot fail: ds4_kv_prepare made the room. */
void ds4_kv_commit(ds4_session *s, const int32_t *tokens, uint32_t n) {
  uint32_t from = s->pos;
  for (uint32_t i = 0; i < n; i++, s->pos++) s->logs[s->pos / DS4_LOG_TOKENS]->token[s->pos % DS4_LOG_TOKENS] = tokens[i];
  ds4_kv_set_logits(s, NULL);
  for (uint64_t at = (from / DS4_AUTO_MARK_STRIDE + 1ull) * DS4_AUTO_MARK_STRIDE; at <= s->pos; at += DS4_AUTO_MARK_STRIDE)
    ds4_mark_set_automatic(s, (uint32_t)at, false);
  retire(s);
}

void ds4_kv_set_logits(ds4_session *s, ds4_logits *l) {
  ds4_logits *old = s->logits;
  s->logits = l;
  ds4_logits_free(old);
}

/* ---- going back ------------------------------------------------------------------------------------------------------------------- */

static bool window_is_held(const ds4_session *s, uint32_t stream, uint32_t pos, uint32_t *missing) {
  const ds4_stream *st = &s->engine->stream[stream];
  for (uint32_t page = ds4_pages_of(st, pos), low = ds4_window_page(st, pos, st->reach); page-- > low;)
    if (!ds4_entry(&s->line[stream], page)) {
      *missing = page;
      return false;
    }
  return true;
}

uint32_t ds4_kv_nearest_exact(const ds4_session *s, uint32_t pos) {
  for (bool moved = true; moved && pos;) {
    moved = false;
    for (uint32_t i = 0; i < s->engine->n_streams; i++) {
      uint32_t missing;
      while (s->engine->stream[i].reach && pos && !window_is_held(s, i, pos, &missing)) {
        pos = missing * s->engine->stream[i].layout.page_rows; /* every window that needs that page ends above its first row */
        moved = true;
      }
    }
  }
  return pos;
}

#ifdef DS4_TEST
/* Rows behind the cut become NaN, so that a kernel that still read them would show it. */
static void poison_behind(ds4_session *s, uint32_t stream) {
  ds4_stream *st = &s->engine->stream[stream];
  uint32_t rows = ds4_rows_at(st, s->pos), page = rows / st->layout.page_rows, row = rows % st->layout.page_rows;
  uint32_t id = ds4_entry(&s->line[stream], page);
  if (!id || !row || page_is_shared(s, stream, page)) return;
  for (uint32_t layer = 0; layer < st->layout.n_layers; layer++)
    ds4_rows_fill(&st->layout, st->pages[id].mem, layer, row, st->layout.page_rows - row, 0xff);
}
#endif

/* Brings one stream's tables back to `pages` pages. `own` is a copy of the last table that stays when that one is shared, else NULL. */
static void line_cut(ds4_session *s, uint32_t stream, uint32_t pages, ds4_table *own) {
  ds4_timeline *l = &s->line[stream];
  uint32_t tables = (pages + DS4_TABLE_PAGES - 1) / DS4_TABLE_PAGES;
  for (; l->n_tables > tables; l->n_tables--) {
    table_release(s, stream, l->table[l->n_tables - 1]);
    l->table[l->n_tables - 1] = NULL;
  }
  ds4_table *t = tables && tables <= l->n_tables ? l->table[tables - 1] : NULL;
  if (own) {
    table_release(s, stream, t);
    l->table[tables - 1] = own;
    return;
  }
  for (uint32_t i = pages % DS4_TABLE_PAGES; t && i && i < DS4_TABLE_PAGES; i++)
    if (t->page[i]) {
      page_release(s, stream, t->page[i]);
      t->page[i] = 0;
      t->used--;
    }
}

/* A shared table that keeps only some of its pages has to be copied; all copies are made before anything changes. */
static bool tables_for_cut(ds4_session *s, uint32_t pos, ds4_table **own) {
  for (uint32_t i = 0; i < s->engine->n_streams; i++) {
    const ds4_stream *st = &s->engine->stream[i];
    const ds4_timeline *l = &s->line[i];
    uint32_t pages = ds4_pages_of(st, ds4_rows_at(st, pos)), t = pages / DS4_TABLE_PAGES;
    own[i] = NULL;
    if (pages % DS4_TABLE_PAGES == 0 || t >= l->n_tables || !l->table[t] || l->table[t]->refs == 1 || !ds4_entry(l, pages)) continue;
    if (!(own[i] = table_copy(s, i, l->table[t], pages % DS4_TABLE_PAGES))) {
      while (i--) table_release(s, i, own[i]);
      return false;
    }
  }
  return true;
}

/* Comes before marks are killed: what the window of pos needs must not go with a mark behind it. */
static void floor_cut(ds4_session *s, uint32_t stream, uint32_t pos) {
  const ds4_stream *st = &s->engine->stream[stream];
  uint32_t exact = ds4_window_page(st, pos, st->reach), next = ds4_window_page(st, pos, st->reach - 1);
  uint32_t floor = ds4_entry(&s->line[stream], exact) ? exact : next;
  s->line[stream].floor = ds4_min_u32(s->line[stream].floor, floor);
}

/* Truncate without the test whether pos is exact: log, streams, marks and logits, or nothing (no memory). */
int ds4_kv_cut(ds4_session *s, uint32_t pos, ds4_error *err) {
  ds4_table *own[DS4_MAX_STREAMS];
  if (!tables_for_cut(s, pos, own))
    return ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for a block table; the session is as it was");
  for (uint32_t i = 0; i < s->engine->n_streams; i++)
    if (s->engine->stream[i].reach) floor_cut(s, i, pos);
  while (s->newest && s->newest->pos > pos) ds4_mark_kill(s->newest);
  if (pos < s->pos) ds4_kv_set_logits(s, NULL);
  s->pos = pos;
  for (uint32_t i = 0; i < s->engine->n_streams; i++) {
    const ds4_stream *st = &s->engine->stream[i];
    line_cut(s, i, ds4_pages_of(st, ds4_rows_at(st, pos)), own[i]);
#ifdef DS4_TEST
    poison_behind(s, i);
#endif
  }
  for (uint32_t logs = (pos + DS4_LOG_TOKENS - 1) / DS4_LOG_TOKENS; s->n_logs > logs; s->n_logs--)
    if (!--s->logs[s->n_logs - 1]->refs) free(s->logs[s->n_logs - 1]);
  return DS4_OK;
}

/* Lets go of the pages that a round which is not committed has entered behind pos. They are in tables of the session's own. */
void ds4_kv_abandon(ds4_session *s) {
  for (uint32_t i = 0; i < s->engine->n_streams; i++) {
    line_cut(s, i, ds4_pages_of(&s->engine->stream[i], ds4_rows_at(&s->engine->stream[i], s->pos)), NULL);
#ifdef DS4_TEST
    poison_behind(s, i);
#endif
  }
}

/* The memory of the page that holds the last row of a stream, for a row that is written again; NULL when position pos - 1 completed no row. */
uint8_t *ds4_kv_last_page(const ds4_session *s, uint32_t stream) {
  const ds4_stream *st = &s->engine->stream[stream];
  uint32_t rows = ds4_rows_at(st, s->pos);
  return rows > ds4_rows_at(st, s->pos - 1) ? st->pages[ds4_entry(&s->line[stream], (rows - 1) / st->layout.page_rows)].mem : NULL;
}

/* ---- sessions ---------------------------------------------------------------------------------------------------------------------- */

ds4_session *ds4_kv_session(ds4_engine *e, uint32_t ctx) {
  ds4_session *s = ds4_alloc(e, sizeof *s);
  if (!s) return NULL;
  s->engine = e;
  s->ctx = ctx;
  s->next = e->sessions;
  if (s->next) s->next->prev = s;
  e->sessions = s;
  e->pool.sessions++;
  ds4_engine_hold(e);
  return s;
}

/* For a snapshot: gives one page of a stream memory from the stash, in a table of the session's own. NULL: no memory. */
uint8_t *ds4_kv_place(ds4_session *s, uint32_t stream, uint32_t page) {
  ds4_engine *e = s->engine;
  ds4_stream *st = &e->stream[stream];
  ds4_timeline *l = &s->line[stream];
  uint32_t t = page / DS4_TABLE_PAGES;
  if (!array_grow(e, (void **)&l->table, &l->cap_tables, t + 1, sizeof *l->table)) return NULL;
  if (!l->table[t] && !(l->table[t] = table_copy(s, stream, NULL, 0))) return NULL;
  l->n_tables = ds4_max_u32(l->n_tables, t + 1);
  uint32_t id = stash_pop(l, st);
  if (!id) return NULL;
  ds4_page_enter(e, st, id);
  entry_put(l, page, id);
  return st->pages[id].mem;
}

/* Frees the session and all it holds; the caller lets go of the engine afterwards, without the lock. */
void ds4_kv_session_drop(ds4_session *s) {
  ds4_engine *e = s->engine;
  s->busy = false;
  s->reserved_pos = 0;
  while (s->newest) ds4_mark_kill(s->newest);
  ds4_kv_set_logits(s, NULL);
  for (uint32_t i = 0; i < e->n_streams; i++) {
    for (uint32_t t = 0; t < s->line[i].n_tables; t++) table_release(s, i, s->line[i].table[t]);
    free(s->line[i].table);
    free(s->line[i].view);
    s->line[i].n_tables = 0;
  }
  s->pos = 0;
  ds4_kv_give_back(s);
  for (uint32_t i = 0; i < s->n_logs; i++)
    if (!--s->logs[i]->refs) free(s->logs[i]);
  free(s->logs);
  *(s->prev ? &s->prev->next : &e->sessions) = s->next;
  if (s->next) s->next->prev = s->prev;
  e->pool.sessions--;
  free(s);
}

/* The child's share of one stream at `pos`. Unlimited: the tables themselves. Windowed: only the pages that the child will need. */
static bool line_fork(ds4_session *child, const ds4_session *s, uint32_t stream, uint32_t pos) {
  ds4_engine *e = s->engine;
  const ds4_stream *st = &e->stream[stream];
  const ds4_timeline *from = &s->line[stream];
  ds4_timeline *to = &child->line[stream];
  uint32_t pages = ds4_pages_of(st, ds4_rows_at(st, pos)), tables = (pages + DS4_TABLE_PAGES - 1) / DS4_TABLE_PAGES;
  if (!array_grow(e, (void **)&to->table, &to->cap_tables, tables, sizeof *to->table)) return false;
  if (st->reach) {
    uint32_t slack = ds4_window_page(st, pos, (uint64_t)st->reach + e->reach_slack);
    uint32_t exact = ds4_window_page(st, pos, st->reach);
    if (!ds4_entry(from, exact)) exact = ds4_window_page(st, pos, st->reach - 1);
    to->floor = ds4_min_u32(exact, ds4_max_u32(from->floor, slack));
  }
  for (uint32_t t = 0; t < tables; t++) {
    ds4_table *old = from->table[t];
    uint32_t keep = ds4_min_u32(DS4_TABLE_PAGES, pages - t * DS4_TABLE_PAGES);
    bool whole = keep == DS4_TABLE_PAGES || !ds4_entry(from, pages);
    to->n_tables = t + 1;
    if (!old) continue;
    if (!st->reach && whole) {
      old->refs++;
      to->table[t] = old;
      continue;
    }
    if (!(to->table[t] = table_copy(child, stream, old, keep))) return false;
    for (uint32_t i = 0; st->reach && i < keep; i++) {
      uint32_t page = t * DS4_TABLE_PAGES + i;
      if (page < to->floor && !ds4_mark_covers(child, stream, page)) ds4_entry_release(child, stream, page);
      if (!to->table[t]) break;
    }
  }
  return true;
}

/* A new session that holds the first `pos` positions of s, which must be able to go on from there. NULL: no memory, nothing changed. */
static ds4_session *kv_fork(ds4_session *s, uint32_t pos) {
  ds4_engine *e = s->engine;
  ds4_session *child = ds4_kv_session(e, s->ctx);
  if (!child) return NULL;
  uint32_t logs = (pos + DS4_LOG_TOKENS - 1) / DS4_LOG_TOKENS;
  bool ok = array_grow(e, (void **)&child->logs, &child->cap_logs, logs, sizeof *child->logs);
  for (; ok && child->n_logs < logs; child->n_logs++) {
    child->logs[child->n_logs] = s->logs[child->n_logs];
    child->logs[child->n_logs]->refs++;
  }
  child->pos = pos;
  if (ok) ds4_mark_copy_automatic(child, s);
  for (uint32_t i = 0; ok && i < e->n_streams; i++) ok = line_fork(child, s, i, pos);
  if (!ok) {
    ds4_kv_session_drop(child);
    ds4_engine_release(e);
    return NULL;
  }
  if (pos == s->pos && s->logits) {
    atomic_fetch_add(&s->logits->refs, 1);
    child->logits = s->logits;
  }
  ds4_kv_give_back(child);
  return child;
}

int ds4_session_fork(ds4_session *s, int64_t pos, ds4_session **out, ds4_error *err) {
  ds4_engine *e = s->engine;
  *out = NULL;
  int status = ds4_enter(e, err);
  if (status) return status;
  status = ds4_kv_legal(s, err);
  if (!status && pos != DS4_HERE) status = ds4_kv_position(s, pos, pos != s->pos, err);
  if (!status && !(*out = kv_fork(s, pos == DS4_HERE ? s->pos : (uint32_t)pos)))
    status = ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for a fork; nothing has changed");
  if (!status && (status = ds4_kv_hold_reserve(s, err))) { /* the parent must now copy its last page before it writes */
    ds4_kv_session_drop(*out);
    *out = NULL;
    ds4_engine_release(e);
  }
  ds4_kv_give_back(s);
  ds4_leave(e);
  return status;
}

/* Tests a position that truncate and fork were given. */
int ds4_kv_position(const ds4_session *s, int64_t pos, bool exact, ds4_error *err) {
  if (pos < 0 || pos > s->pos)
    return ds4_fail(err, DS4_EPOSITION, pos, s->pos, "position %lld is outside 0..%u, which is what the session holds", (long long)pos,
                    s->pos);
  uint32_t nearest = exact ? ds4_kv_nearest_exact(s, (uint32_t)pos) : (uint32_t)pos;
  if (nearest == pos) return DS4_OK;
  return ds4_fail(
      err, DS4_EINEXACT, pos, nearest,
      "position %lld is out of reach: the nearest exact position below it is %u; truncate there and evaluate again, or use sync",
      (long long)pos, nearest);
}

int ds4_session_nearest_exact(ds4_session *s, int64_t pos, uint32_t *out, ds4_error *err) {
  int status = ds4_enter(s->engine, err);
  if (status) return status;
  status = ds4_kv_position(s, pos, false, err);
  if (!status) *out = pos == s->pos ? s->pos : ds4_kv_nearest_exact(s, (uint32_t)pos);
  ds4_leave(s->engine);
  return status;
}

int ds4_session_truncate(ds4_session *s, int64_t pos, ds4_error *err) {
  int status = ds4_enter(s->engine, err);
  if (status) return status;
  status = ds4_kv_legal(s, err);
  if (!status) status = ds4_kv_position(s, pos, pos != s->pos, err);
  if (!status && pos != s->pos) status = ds4_kv_cut(s, (uint32_t)pos, err);
  ds4_kv_give_back(s);
  ds4_leave(s->engine);
  return status;
}

/* Empties the session whatever its state is, but for BUSY: cutting to 0 keeps no table and so needs no memory. */
void ds4_kv_clear(ds4_session *s) {
  ds4_kv_cut(s, 0, NULL);
  ds4_kv_set_logits(s, NULL);
  s->poisoned = false;
}

int ds4_session_clear(ds4_session *s, ds4_error *err) {
  int status = ds4_enter(s->engine, err);
  if (status) return status;
  status = ds4_kv_legal(s, err);
  if (!status || status == DS4_EPOISONED) {
    ds4_kv_clear(s);
    status = DS4_OK;
  }
  ds4_kv_give_back(s);
  ds4_leave(s->engine);
  return status;
}

int ds4_session_reserve(ds4_session *s, uint32_t tokens, ds4_error *err) {
  int status = ds4_enter(s->engine, err);
  if (status) return status;
  status = ds4_kv_legal(s, err);
  if (!status && tokens > s->ctx - s->pos)
    status = ds4_fail(err, DS4_ECTX, (int64_t)s->pos + tokens, s->ctx, "reserving up to position %llu, but the session's ctx is %u",
                      (unsigned long long)s->pos + tokens, s->ctx);
  if (!status) {
    uint64_t before = s->reserved_pos;
    uint32_t from = s->reserved_from;
    s->reserved_pos = tokens ? (uint64_t)s->pos + tokens : 0;
    s->reserved_from = s->pos;
    if ((status = ds4_kv_hold_reserve(s, err))) {
      s->reserved_pos = before;
      s->reserved_from = from;
    }
  }
  ds4_kv_give_back(s);
  ds4_leave(s->engine);
  return status;
}
