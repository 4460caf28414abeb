/* Loading a snapshot: a session built aside, that nobody sees before all of it is there and checked.
 *
 *   no lock: header, identity, tokens, marks, logits, page lists, all checked -> lock: take pages -> no lock: rows -> lock: commit
 *
 * Only free pages are taken. When automatic marks of other sessions would have to go first, the rows are verified before that. Every
 * number of the file is hostile: counts are bounded by the engine's own geometry and by the size of the file before memory is asked for. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crc32c.h"
#include "kv.h"
#include "snapshot.h"

typedef struct load {
  image m;
  ds4_session *s; /* being built */
  ds4_logits *logits;
  uint64_t at, have, next, end; /* buffer[at .. at + have) is read and not used; the section goes on at `next` of the file */
  ds4_error *err;
} load;

static int damaged(const load *v, uint64_t at, const char *what) {
  return ds4_fail(v->err, DS4_ECORRUPT, (int64_t)at, 0, "%s: the snapshot is damaged at byte %llu: %s; evaluate the tokens again",
                  ds4_file_shown(v->m.file.path), (unsigned long long)at, what);
}

#define FOREIGN(v, a, b, text, ...)                                                                                                        \
  ds4_fail((v)->err, DS4_EIDENTITY, a, b, "%s: the snapshot " text "; evaluate the tokens again",                                          \
           ds4_file_shown((v)->m.file.path), ##__VA_ARGS__)

static void section_begin(load *v, const section *c) {
  v->at = v->have = 0;
  v->next = c->at;
  v->end = c->at + c->bytes;
  v->m.crc = 0;
}

/* The next n bytes (at most the buffer, and no more than the section has). */
static int take(load *v, uint64_t n, uint8_t **out) {
  image *m = &v->m;
  if (v->have < n) {
    memmove(m->buffer, m->buffer + v->at, v->have);
    uint64_t more = m->cap - v->have < v->end - v->next ? m->cap - v->have : v->end - v->next;
    v->at = 0;
    int status = ds4_file_read(&m->file, v->next, m->buffer + v->have, more, v->err);
    if (status) return status;
    m->crc = ds4_crc32c(m->crc, m->buffer + v->have, more);
    v->next += more;
    v->have += more;
  }
  *out = m->buffer + v->at;
  v->at += n;
  v->have -= n;
  return DS4_OK;
}

/* Reads what is left of a section and compares the checksum. */
static int section_end(load *v, const section *c) {
  uint8_t *skipped;
  int status = DS4_OK;
  while (!status && v->have + (v->end - v->next))
    status = take(v, v->have ? v->have : v->end - v->next < v->m.cap ? v->end - v->next : v->m.cap, &skipped);
  if (!status && v->m.crc != c->crc) status = damaged(v, c->at, "the checksum of a section differs");
  return status;
}

/* Text of a file, fit to print. */
static const char *printable(const uint8_t *p, uint32_t n, char *out) {
  for (uint32_t i = 0; i < n; i++) out[i] = p[i] >= 33 && p[i] < 127 ? (char)p[i] : p[i] ? '?' : 0;
  out[n] = 0;
  return out;
}

static int check_identity(const load *v, const uint8_t *p) {
  const ds4_engine *e = v->m.e;
  char theirs[40];
  uint8_t mine[40] = {0};
  snprintf((char *)mine, 32, "%s", e->arch->name);
  snprintf((char *)mine + 32, 8, "%s", ds4_kv_name(e->kv_type));
  if (memcmp(p + 64, mine, 32))
    return FOREIGN(v, 0, 0, "is of architecture %s, the engine's is %s", printable(p + 64, 32, theirs), e->arch->name);
  if (memcmp(p + 32, e->identity, 32) || get32(p + 116) != e->vocab)
    return FOREIGN(v, 0, 0, "is of another model: its weights are not those of this engine");
  if (memcmp(p + 96, mine + 32, 8))
    return FOREIGN(v, 0, 0, "has rows of kv_dtype %s, the engine's is %s", printable(p + 96, 8, theirs), ds4_kv_name(e->kv_type));
  if (get64(p + 104) != e->settings_hash) return FOREIGN(v, 0, 0, "was made with other options of the engine");
  if (get32(p + 112) != DS4_NUMERICS)
    return FOREIGN(v, get32(p + 112), DS4_NUMERICS, "was computed with numerics number %u, this build has %u", get32(p + 112),
                   DS4_NUMERICS);
  return DS4_OK;
}

/* Counts first, so that sizes cannot overflow; then every place and size has to be the one that the counts give. */
static int check_table(load *v, const uint8_t *p, uint64_t size) {
  image *m = &v->m;
  ds4_engine *e = m->e;
  m->pos = get32(p + 120);
  m->ctx = get32(p + 124);
  if (m->pos > m->ctx || !m->ctx || m->ctx > e->ctx || get32(p + 132))
    return damaged(v, 120, "the position, its bound or a reserved field is impossible");
  if (get32(p + 128) != 3 + 2 * e->n_streams || get32(p + 16) != HEAD_BYTES + get32(p + 128) * ENTRY_BYTES)
    return damaged(v, 128, "the number of sections is not that of this model");
  for (uint32_t i = 0; i < 3 + 2 * e->n_streams; i++) {
    m->section[i].count = get32(p + HEAD_BYTES + i * ENTRY_BYTES + 24);
    m->section[i].crc = get32(p + HEAD_BYTES + i * ENTRY_BYTES + 28);
  }
  bool ok = ds4_section(m, TOKENS, 0)->count == m->pos && ds4_section(m, MARKS, 0)->count <= (e->windowed ? MARKS_MAX : 0);
  ok &= ds4_section(m, LOGITS, 0)->count == 0 || (ds4_section(m, LOGITS, 0)->count == e->vocab && m->pos);
  for (uint32_t i = 0; i < e->n_streams; i++) {
    uint32_t pages = ds4_pages_of(&e->stream[i], ds4_rows_at(&e->stream[i], m->pos)), n = ds4_section(m, PAGES, i)->count;
    ok &= ds4_section(m, ROWS, i)->count == n && (e->stream[i].reach ? n <= pages : n == pages);
  }
  if (!ok || !ds4_image_lay_out(m)) return damaged(v, HEAD_BYTES, "a count in the table of sections is impossible");
  for (uint32_t i = 0; i < m->n_sections; i++) {
    const uint8_t *q = p + HEAD_BYTES + i * ENTRY_BYTES;
    const section *c = &m->section[i];
    if (get32(q) != c->kind || get32(q + 4) != c->stream || get64(q + 8) != c->at || get64(q + 16) != c->bytes)
      return damaged(v, HEAD_BYTES + i * ENTRY_BYTES, "an entry of the table of sections does not fit its count");
  }
  if (m->file_bytes == size && get64(p + 24) == size) return DS4_OK;
  return ds4_fail(v->err, DS4_ECORRUPT, (int64_t)size, (int64_t)m->file_bytes,
                  "%s: the snapshot has %llu bytes, its header says %llu: it was cut or added to; evaluate the tokens again",
                  ds4_file_shown(m->file.path), (unsigned long long)size, (unsigned long long)m->file_bytes);
}

static int read_header(load *v, uint64_t size) {
  uint8_t *p = v->m.buffer;
  uint32_t most = HEAD_BYTES + SECTIONS_MAX * ENTRY_BYTES;
  if (size < FRONT_BYTES) return damaged(v, size, "it is too short for a header");
  int status = ds4_file_read(&v->m.file, 0, p, FRONT_BYTES, v->err);
  if (status) return status;
  if (memcmp(p, MAGIC, 8)) return damaged(v, 0, "it does not begin like a snapshot");
  if (get32(p + 8) != ORDER_MARK) return damaged(v, 8, "its byte order is unknown");
  uint32_t version = get32(p + 12), bytes = get32(p + 16), crc = get32(p + CRC_AT);
  if (bytes < FRONT_BYTES || bytes > most || bytes > size) return damaged(v, 16, "the size of the header is impossible");
  if ((status = ds4_file_read(&v->m.file, FRONT_BYTES, p + FRONT_BYTES, bytes - FRONT_BYTES, v->err))) return status;
  put32(p + CRC_AT, 0);
  if (ds4_crc32c(0, p, bytes) != crc) return damaged(v, CRC_AT, "the checksum of the header differs");
  if (version != DS4_LAYOUT_VERSION)
    return FOREIGN(v, version, DS4_LAYOUT_VERSION, "has layout version %u, this build reads %u", version, DS4_LAYOUT_VERSION);
  if (bytes < HEAD_BYTES) return damaged(v, 16, "the size of the header is impossible");
  status = check_identity(v, p);
  return status ? status : check_table(v, p, size);
}

static int read_tokens(load *v, const section *c) {
  ds4_session *s = v->s;
  uint32_t logs = (c->count + DS4_LOG_TOKENS - 1) / DS4_LOG_TOKENS;
  if (!(s->logs = ds4_alloc(v->m.e, (logs + 1ull) * sizeof *s->logs))) return ds4_snapshot_memory(v->err);
  s->cap_logs = logs + 1;
  for (; s->n_logs < logs; s->n_logs++) {
    uint32_t from = s->n_logs * DS4_LOG_TOKENS, n = ds4_min_u32(DS4_LOG_TOKENS, c->count - from);
    uint8_t *p;
    int status = take(v, n * 4, &p);
    if (status) return status;
    ds4_log *log = s->logs[s->n_logs] = ds4_alloc(v->m.e, sizeof *log);
    if (!log) return ds4_snapshot_memory(v->err);
    log->refs = 1;
    for (uint32_t i = 0; i < n; i++) {
      uint32_t token = get32(p + 4 * i);
      if (token >= v->m.e->vocab) {
        s->n_logs++;
        return damaged(v, c->at + 4ull * (from + i), "a token is outside the vocabulary");
      }
      log->token[i] = (int32_t)token;
    }
  }
  return DS4_OK;
}

static int read_marks(load *v, const section *c) {
  image *m = &v->m;
  uint8_t *p;
  if (!(m->marks = ds4_alloc(m->e, (c->count + 1ull) * sizeof *m->marks))) return ds4_snapshot_memory(v->err);
  int status = take(v, c->bytes, &p);
  for (uint32_t i = 0; !status && i < c->count; i++, p += 8) {
    uint32_t flags = get32(p + 4);
    m->marks[i] = (stored_mark){.pos = get32(p), .pinned = flags != 0};
    if (flags > 1 || m->marks[i].pos > m->pos || m->marks[i].pos <= (i ? m->marks[i - 1].pos : 0))
      status = damaged(v, c->at + 8ull * i, "a mark is impossible");
  }
  return status;
}

static int read_logits(load *v, const section *c) {
  if (!c->count) return DS4_OK;
  if (!(v->logits = ds4_logits_new(v->m.e))) return ds4_snapshot_memory(v->err);
  for (uint32_t i = 0; i < c->count; i++) {
    uint8_t *p;
    int status = take(v, 4, &p);
    if (status) return status;
    uint32_t bits = get32(p);
    memcpy(&v->logits->data[i], &bits, 4);
  }
  return DS4_OK;
}

/* True when the pages of every mark's window are there, and each page below the floor lies in some mark's window. */
static bool marks_fit(image *m, uint32_t i, uint32_t below) {
  const ds4_stream *st = &m->e->stream[i];
  const page_ref *refs = m->line[i].refs;
  uint32_t n = ds4_section(m, PAGES, i)->count, k = 0, covered = 0; /* covered: refs[0 .. covered) are accounted for */
  for (uint32_t j = 0; j < ds4_section(m, MARKS, 0)->count; j++) {
    uint32_t low = ds4_window_page(st, m->marks[j].pos, st->reach), high = ds4_pages_of(st, m->marks[j].pos);
    while (k < n && refs[k].page < low) k++;
    if (n - k < high - low || refs[k].page != low || refs[k + (high - low) - 1].page != high - 1) return false;
    if (k > covered && covered < below) return false;
    covered = ds4_max_u32(covered, k + (high - low));
  }
  return covered >= below;
}

/* The pages of a stream, ascending: those below the floor belong to marks, from there on all are there. */
static int read_pages(load *v, const section *c) {
  image *m = &v->m;
  uint32_t i = c->stream;
  const ds4_stream *st = &m->e->stream[i];
  uint32_t pages = ds4_pages_of(st, ds4_rows_at(st, m->pos));
  uint8_t mine[LINE_BYTES], *p;
  int status = take(v, LINE_BYTES, &p);
  if (status) return status;
  uint32_t floor = m->line[i].floor = get32(p + 24);
  ds4_image_line(m, i, mine);
  if (memcmp(p, mine, LINE_BYTES)) return damaged(v, c->at, "a stream does not have the shape that it has in this model");
  uint32_t inside = pages > floor ? pages - floor : 0;
  if (floor > (st->reach ? ds4_window_page(st, m->pos, st->reach - 1) : 0) || inside > c->count)
    return damaged(v, c->at + 24, "pages inside the window are missing");
  page_ref *refs = m->line[i].refs = ds4_alloc(m->e, (c->count + 1ull) * sizeof *refs);
  if (!refs) return ds4_snapshot_memory(v->err);
  uint32_t below = c->count - inside;
  for (uint32_t n = 0; n < c->count; n++) {
    if ((status = take(v, 4, &p))) return status;
    uint32_t page = refs[n].page = get32(p);
    if (n < below ? page >= floor || (n && page <= refs[n - 1].page) : page != floor + (n - below))
      return damaged(v, c->at + LINE_BYTES + 4ull * n, "a page is impossible here");
  }
  return !st->reach || marks_fit(m, i, below) ? DS4_OK : damaged(v, c->at, "the pages do not fit the marks");
}

/* Compares the checksums of all rows, or of everything else. */
static int verify(load *v, bool rows) {
  int status = DS4_OK;
  for (uint32_t i = 0; !status && i < v->m.n_sections; i++) {
    const section *c = &v->m.section[i];
    if ((c->kind == ROWS) != rows) continue;
    section_begin(v, c);
    status = section_end(v, c);
  }
  return status;
}

/* Everything but the rows. The lists are small: they are verified before a number of theirs is looked at, and again while they are. */
static int read_lists(load *v) {
  int status = verify(v, false);
  for (uint32_t i = 0; !status && i < v->m.n_sections; i++) {
    const section *c = &v->m.section[i];
    if (c->kind == ROWS) continue;
    section_begin(v, c);
    if (c->kind == TOKENS) status = read_tokens(v, c);
    if (c->kind == MARKS) status = read_marks(v, c);
    if (c->kind == LOGITS) status = read_logits(v, c);
    if (c->kind == PAGES) status = read_pages(v, c);
    if (!status) status = section_end(v, c);
  }
  return status;
}

static int read_page(load *v, const section *c, const page_ref *ref) {
  image *m = &v->m;
  const ds4_layout *l = &m->e->stream[c->stream].layout;
  for (uint32_t layer = 0, n; layer < l->n_layers; layer += n) {
    uint8_t *p;
    n = ds4_min_u32((uint32_t)(m->cap / l->layer_bytes), l->n_layers - layer);
    int status = take(v, n * l->layer_bytes, &p);
    if (status) return status;
    if (!ref->mem) continue;
#ifdef DS4_TEST /* rows that were never written are NaN again */
    ds4_layers_tidy(l, p, n, ds4_rows_in_page(&m->e->stream[c->stream], m->pos, ref->page), 0xff);
#endif
    status = m->e->ops->copy_in(m->e->backend, ref->mem + layer * l->layer_bytes, p, n * l->layer_bytes);
    if (!status) status = m->e->ops->wait(m->e->backend);
    if (status) return ds4_fail(v->err, status, 0, 0, "copying rows to the device failed; nothing has changed");
  }
  return DS4_OK;
}

/* All rows into the pages that were taken for them. Nobody sees them before their checksums are right. */
static int read_rows(load *v) {
  int status = DS4_OK;
  for (uint32_t i = 0; !status && i < v->m.n_sections; i++) {
    const section *c = &v->m.section[i];
    if (c->kind != ROWS) continue;
    section_begin(v, c);
    for (uint32_t k = 0; !status && k < c->count; k++) status = read_page(v, c, &v->m.line[c->stream].refs[k]);
    if (!status) status = section_end(v, c);
  }
  return status;
}

/* ---- the session ------------------------------------------------------------------------------------------------------------------ */

/* The new session is BUSY, so that nobody takes its marks away while the lock is not held. */
static int session_begin(load *v, uint32_t ctx) {
  ds4_engine *e = v->m.e;
  if (ctx < v->m.pos)
    return ds4_fail(v->err, DS4_ECTX, v->m.pos, ctx, "%s: the snapshot holds %u positions, more than the ctx %u; load it with a larger ctx",
                    ds4_file_shown(v->m.file.path), v->m.pos, ctx);
  int status = ds4_enter(e, v->err);
  if (status) return status;
  if ((v->s = ds4_kv_session(e, ctx))) ds4_kv_begin(v->s);
  ds4_leave(e);
  return v->s ? DS4_OK : ds4_snapshot_memory(v->err);
}

/* Says which pages are wanted: those from the floor on, and those of the marks that are still there; both lists run downwards.
 * Returns their bytes. Lock held. */
static uint64_t want_pages(load *v, ds4_need *need) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < v->m.e->n_streams; i++) {
    const ds4_stream *st = &v->m.e->stream[i];
    const ds4_mark *mark = v->s->newest;
    need->pages[i] = 0;
    for (uint32_t k = ds4_section(&v->m, PAGES, i)->count; k--;) {
      page_ref *ref = &v->m.line[i].refs[k];
      while (mark && ds4_window_page(st, mark->pos, st->reach) > ref->page) mark = mark->older;
      ref->wanted = ref->page >= v->m.line[i].floor || (mark && ref->page < ds4_pages_of(st, mark->pos));
      need->pages[i] += ref->wanted;
    }
    bytes += need->pages[i] * st->layout.page_bytes;
  }
  return bytes;
}

/* Takes pages for all rows and gives them their places. Automatic marks make room, those of this session too, but not for a file whose
 * rows are damaged: the lock is left to verify them first. */
static int take_pages(load *v) {
  ds4_engine *e = v->m.e;
  ds4_need need;
  bool verified = false;
  while (want_pages(v, &need) > ds4_pool_free_bytes(e)) {
    if (verified && !ds4_mark_drop_automatic(e, v->s, false)) break;
    if (verified) continue;
    ds4_leave(e);
    int status = verify(v, true);
    ds4_enter(e, NULL);
    if (status) return status;
    verified = true;
  }
  int status = ds4_kv_take(v->s, &need, v->err);
  for (uint32_t i = 0; !status && i < e->n_streams; i++) {
    v->s->line[i].floor = v->m.line[i].floor;
    for (uint32_t k = 0; !status && k < ds4_section(&v->m, PAGES, i)->count; k++) {
      page_ref *ref = &v->m.line[i].refs[k];
      if (ref->wanted && !(ref->mem = ds4_kv_place(v->s, i, ref->page))) status = ds4_snapshot_memory(v->err);
    }
  }
  return status;
}

static int session_pages(load *v) {
  int status = ds4_enter(v->m.e, v->err);
  if (status) return status;
  for (uint32_t k = 0; !status && k < ds4_section(&v->m, MARKS, 0)->count; k++)
    if (!ds4_mark_new(v->s, v->m.marks[k].pos, true, v->m.marks[k].pinned)) status = ds4_snapshot_memory(v->err);
  if (!status) status = take_pages(v);
  ds4_leave(v->m.e);
  return status;
}

/* All is there: the session becomes LIVE (or EMPTY). Marks that had a handle are automatic now: there may be more of those than may be. */
static void session_commit(load *v) {
  ds4_engine *e = v->m.e;
  ds4_enter(e, NULL);
  v->s->pos = v->m.pos;
  v->s->logits = v->logits;
  v->logits = NULL;
  while (e->pool.auto_bytes > e->pool.budget / 8 && ds4_mark_drop_automatic(e, v->s, false)) {
  }
  ds4_kv_end(v->s);
  ds4_leave(e);
}

static void session_abandon(load *v) {
  if (!v->s) return;
  ds4_enter(v->m.e, NULL);
  ds4_kv_session_drop(v->s);
  ds4_leave(v->m.e);
  ds4_engine_release(v->m.e);
}

int ds4_session_load(ds4_engine *e, const char *path, uint32_t ctx, ds4_session **out, ds4_error *err) {
  load v = {.m = {.e = e, .file = {.fd = -1, .dir = -1}}, .err = err};
  uint64_t size = 0;
  *out = NULL;
  int status = ds4_snapshot_host(err);
  if (!status) status = ds4_enter(e, err);
  if (status) return status;
  if (e->phase != DS4_READY)
    status = ds4_fail(err, DS4_EINVAL, 0, 0, "the engine is not ready: call ds4_engine_ready after the tensors");
  else if (ctx > e->ctx)
    status = ds4_fail(err, DS4_ECTX, ctx, e->ctx, "ctx %u is more than the %u positions of the model", ctx, e->ctx);
  ds4_leave(e);
  if (!status) status = ds4_image_buffer(&v.m, err);
  if (!status) status = ds4_file_open(&v.m.file, e, path, &size, err);
  if (!status) status = read_header(&v, size);
  if (!status) status = session_begin(&v, ctx ? ctx : v.m.ctx);
  if (!status) status = read_lists(&v);
  if (!status) status = session_pages(&v);
  if (!status) status = read_rows(&v);
  if (status) {
    session_abandon(&v);
  } else {
    session_commit(&v);
    *out = v.s;
  }
  ds4_logits_free(v.logits);
  ds4_image_free(&v.m);
  return status;
}
