/* The page pool: one byte budget that all streams and sessions of an engine share.
 *
 *   free list (per stream) --take--> stash (per session) --enter--> table entry, refs 1 --share--> refs n
 *        ^                             |    ^                            |
 *        +---------- give back --------+    +------- refs falls to 0 ----+
 *
 * A page on the free list may keep its memory; when another stream needs the bytes, that memory goes back to the system first. So as long as
 * used + reserved + new <= budget holds, memory on free lists can never be in the way. */
#include "kv.h"

#include <stdlib.h>
#include <string.h>

static bool page_grow(ds4_engine *e, ds4_stream *st) {
  if (st->n_pages < st->cap_pages) return true;
  uint32_t cap = st->cap_pages ? st->cap_pages * 2 : 64;
  ds4_page *pages = ds4_alloc(e, (uint64_t)cap * sizeof *pages);
  if (!pages) return false;
  for (uint32_t i = 0; i < st->n_pages; i++) pages[i] = st->pages[i];
  free(st->pages);
  st->pages = pages;
  st->cap_pages = cap;
  return true;
}

/* Returns memory of free pages to the system until `bytes` more fit under the budget. */
static void pool_squeeze(ds4_engine *e, uint64_t bytes) {
  for (uint32_t i = 0; i < e->n_streams; i++) {
    ds4_stream *st = &e->stream[i];
    for (uint32_t id = st->free_list; id && e->pool.system + bytes > e->pool.budget; id = st->pages[id].next) {
      ds4_page *p = &st->pages[id];
      if (!p->mem) continue;
      e->ops->mem_free(e->backend, p->mem, st->layout.page_bytes);
      p->mem = NULL;
      e->pool.system -= st->layout.page_bytes;
    }
  }
}

uint64_t ds4_pool_free_bytes(const ds4_engine *e) {
  uint64_t taken = e->pool.used + e->pool.reserved;
  return e->pool.budget > taken ? e->pool.budget - taken : 0;
}

/* A free page with memory, counted as reserved; 0 when there is none. */
uint32_t ds4_pool_take(ds4_engine *e, ds4_stream *st) {
  uint64_t bytes = st->layout.page_bytes;
  if (ds4_pool_free_bytes(e) < bytes) return 0;
  uint32_t id = st->free_list;
  if (!id) {
    if (!page_grow(e, st)) return 0;
    id = st->n_pages ? st->n_pages : 1; /* id 0 means none */
  }
  uint8_t *mem = st->free_list ? st->pages[id].mem : NULL;
  if (!mem) {
    if (e->pool.system + bytes > e->pool.budget) pool_squeeze(e, bytes);
    if (ds4_fault_hit(&e->faults, DS4_FAULT_ALLOC)) return 0;
    mem = e->ops->mem_alloc(e->backend, bytes);
    if (!mem) return 0;
    e->pool.system += bytes;
  }
  if (st->free_list)
    st->free_list = st->pages[id].next;
  else
    st->n_pages = id + 1;
  st->pages[id] = (ds4_page){.mem = mem};
  e->pool.reserved += bytes;
  return id;
}

/* A reserved page goes back to its free list. */
void ds4_pool_give(ds4_engine *e, ds4_stream *st, uint32_t id) {
  st->pages[id].next = st->free_list;
  st->free_list = id;
  e->pool.reserved -= st->layout.page_bytes;
}

/* A reserved page gets its first reference. */
void ds4_page_enter(ds4_engine *e, ds4_stream *st, uint32_t id) {
  st->pages[id].refs = 1;
  st->n_used++;
  e->pool.refs++;
  e->pool.reserved -= st->layout.page_bytes;
  e->pool.used += st->layout.page_bytes;
}

void ds4_page_share(ds4_engine *e, ds4_stream *st, uint32_t id) {
  st->pages[id].refs++;
  e->pool.refs++;
}

/* Takes one reference away; true when it was the last one: the page is then reserved and the caller's to place. */
bool ds4_page_drop(ds4_engine *e, ds4_stream *st, uint32_t id) {
  e->pool.refs--;
  if (--st->pages[id].refs) return false;
  st->n_used--;
  e->pool.used -= st->layout.page_bytes;
  e->pool.reserved += st->layout.page_bytes;
  return true;
}

void ds4_pool_destroy(ds4_engine *e) {
  for (uint32_t i = 0; i < e->n_streams; i++) {
    ds4_stream *st = &e->stream[i];
    for (uint32_t id = 1; id < st->n_pages; id++)
      if (st->pages[id].mem) e->ops->mem_free(e->backend, st->pages[id].mem, st->layout.page_bytes);
    free(st->pages);
  }
}

int ds4_engine_ledger(ds4_engine *e, ds4_ledger *out, ds4_error *err) {
  memset(out, 0, sizeof *out);
  int status = ds4_enter(e, err);
  if (status) return status;
  *out = (ds4_ledger){.page_refs = e->pool.refs,
                      .bytes_used = e->pool.used,
                      .bytes_reserved = e->pool.reserved,
                      .bytes_budget = e->pool.budget,
                      .bytes_system = e->pool.system,
                      .auto_mark_bytes = e->pool.auto_bytes,
                      .sessions = e->pool.sessions,
                      .marks = e->pool.marks,
                      .logits = atomic_load(&e->live_logits)};
  for (uint32_t i = 0; i < e->n_streams; i++) out->pages_used += e->stream[i].n_used;
  ds4_leave(e);
  return DS4_OK;
}
