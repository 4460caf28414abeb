/* What the files that move a timeline share: pool.c, kv.c, mark.c, check.c. All of it is called with the engine's lock held. */
#ifndef DS4_KV_H
#define DS4_KV_H

#include "internal.h"

/* pool.c */
uint64_t ds4_pool_free_bytes(const ds4_engine *e);
uint32_t ds4_pool_take(ds4_engine *e, ds4_stream *st);
void ds4_pool_give(ds4_engine *e, ds4_stream *st, uint32_t id);
void ds4_page_enter(ds4_engine *e, ds4_stream *st, uint32_t id);
void ds4_page_share(ds4_engine *e, ds4_stream *st, uint32_t id);
bool ds4_page_drop(ds4_engine *e, ds4_stream *st, uint32_t id);
void ds4_pool_destroy(ds4_engine *e);

/* kv.c */
static inline uint32_t ds4_entry(const ds4_timeline *l, uint32_t page) {
  uint32_t t = page / DS4_TABLE_PAGES;
  return t < l->n_tables && l->table[t] ? l->table[t]->page[page % DS4_TABLE_PAGES] : 0;
}
/* First page that a windowed stream needs so that position pos is exact, or (slack 0, one row less) so that it can go on from there. */
static inline uint32_t ds4_window_page(const ds4_stream *st, uint64_t pos, uint64_t rows) {
  return (uint32_t)((pos > rows ? pos - rows : 0) / st->layout.page_rows);
}
int ds4_kv_hold_reserve(ds4_session *s, ds4_error *err);
void ds4_entry_release(ds4_session *s, uint32_t stream, uint32_t page);

/* mark.c */
bool ds4_mark_covers(const ds4_session *s, uint32_t stream, uint32_t page);
void ds4_mark_kill(ds4_mark *m); /* takes it off its session's timeline; an automatic mark is freed */
bool ds4_mark_drop_automatic(ds4_engine *e, const ds4_session *own, bool only_own);

#endif
