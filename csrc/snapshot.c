/* Snapshots: a session written to one file, and read back bit for bit (K9). The byte layout is drawn in docs/snapshot.md.
 *
 *   lock: BUSY, list pages, own marks -> no lock: sections, header, fsync, rename -> lock: end BUSY
 *
 * The session is BUSY meanwhile and holds a reference to everything that is written: shared pages and logs are never written in place,
 * and marks of the save's own keep windowed pages when a handle is freed in between. Other sessions compute on. */
#include "snapshot.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crc32c.h"
#include "kv.h"

int ds4_snapshot_memory(ds4_error *err) {
  return ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for a snapshot; nothing has changed");
}

int ds4_image_buffer(image *m, ds4_error *err) {
  m->cap = BUFFER_BYTES;
  for (uint32_t i = 0; i < m->e->n_streams; i++)
    if (m->e->stream[i].layout.layer_bytes > m->cap) m->cap = m->e->stream[i].layout.layer_bytes;
  m->buffer = ds4_alloc(m->e, m->cap);
  return m->buffer ? DS4_OK : ds4_snapshot_memory(err);
}

void ds4_image_free(image *m) {
  ds4_file_close(&m->file);
  for (uint32_t i = 0; i < DS4_MAX_STREAMS; i++) free(m->line[i].refs);
  free(m->marks);
  free(m->buffer);
}

/* Rows are memory of the host as it is: a host of the other byte order would have to turn every number. */
int ds4_snapshot_host(ds4_error *err) {
  const uint16_t one = 1;
  if (*(const uint8_t *)&one) return DS4_OK;
  return ds4_fail(err, DS4_EUNSUPPORTED, 0, 0, "snapshots need a little-endian machine; keep the tokens and evaluate them again");
}

static bool section_bytes(const ds4_engine *e, section *s) {
  uint64_t item = s->kind == ROWS ? e->stream[s->stream].layout.page_bytes : s->kind == MARKS ? 8 : 4;
  return ds4_mul_u64(s->count, item, &s->bytes) && !__builtin_add_overflow(s->bytes, s->kind == PAGES ? LINE_BYTES : 0, &s->bytes);
}

/* Sections follow each other without gaps, in a fixed order. Fills in places and sizes from the counts; false: a size overflows. */
bool ds4_image_lay_out(image *m) {
  ds4_engine *e = m->e;
  m->n_sections = 3 + 2 * e->n_streams;
  m->head_bytes = HEAD_BYTES + m->n_sections * ENTRY_BYTES;
  m->file_bytes = m->head_bytes;
  for (uint32_t i = 0; i < m->n_sections; i++) {
    section *s = &m->section[i];
    s->kind = i < 3 ? TOKENS + i : i < 3 + e->n_streams ? PAGES : ROWS;
    s->stream = i < 3 ? 0 : (i - 3) % e->n_streams;
    s->at = m->file_bytes;
    if (!section_bytes(e, s) || __builtin_add_overflow(s->at, s->bytes, &m->file_bytes)) return false;
  }
  return m->file_bytes <= INT64_MAX;
}

void ds4_image_line(const image *m, uint32_t i, uint8_t *p) {
  const ds4_stream *st = &m->e->stream[i];
  const uint32_t numbers[] = {st->layout.n_layers, st->stride, st->reach, st->layout.page_rows};
  for (int k = 0; k < 4; k++) put32(p + 4 * k, numbers[k]);
  put64(p + 16, st->layout.page_bytes);
  put32(p + 24, m->line[i].floor);
  put32(p + 28, 0);
}

static void header_encode(const image *m, uint8_t *p) {
  const ds4_engine *e = m->e;
  memset(p, 0, m->head_bytes);
  memcpy(p, MAGIC, 8);
  put32(p + 8, ORDER_MARK);
  put32(p + 12, DS4_LAYOUT_VERSION);
  put32(p + 16, m->head_bytes);
  put64(p + 24, m->file_bytes);
  memcpy(p + 32, e->identity, 32);
  snprintf((char *)p + 64, 32, "%s", e->arch->name);
  snprintf((char *)p + 96, 8, "%s", ds4_kv_name(e->kv_type));
  put64(p + 104, e->settings_hash);
  put32(p + 112, DS4_NUMERICS);
  put32(p + 116, e->vocab);
  put32(p + 120, m->pos);
  put32(p + 124, m->ctx);
  put32(p + 128, m->n_sections);
  for (uint32_t i = 0; i < m->n_sections; i++) {
    const section *s = &m->section[i];
    uint8_t *q = p + HEAD_BYTES + i * ENTRY_BYTES;
    put32(q, s->kind);
    put32(q + 4, s->stream);
    put64(q + 8, s->at);
    put64(q + 16, s->bytes);
    put32(q + 24, s->count);
    put32(q + 28, s->crc);
  }
  put32(p + CRC_AT, ds4_crc32c(0, p, m->head_bytes));
}

/* Sets rows behind the last one, and what lies between layers, to `byte`: unwritten memory is in no file, and never read (K8). */
void ds4_layers_tidy(const ds4_layout *l, uint8_t *layers, uint32_t n, uint32_t rows, uint8_t byte) {
  uint64_t used = 0;
  for (uint32_t i = 0; i < l->n_parts; i++) used += l->part[i].heads * l->part[i].tile_bytes;
  for (uint32_t k = 0; k < n; k++) {
    memset(layers + k * l->layer_bytes + used, byte, l->layer_bytes - used);
    if (rows < l->page_rows) ds4_rows_fill(l, layers, k, rows, l->page_rows - rows, byte);
  }
}

uint32_t ds4_rows_in_page(const ds4_stream *st, uint32_t pos, uint32_t page) {
  return ds4_min_u32(st->layout.page_rows, ds4_rows_at(st, pos) - page * st->layout.page_rows);
}

/* ---- save ------------------------------------------------------------------------------------------------------------------------ */

typedef struct save {
  image m;
  ds4_session *s;
  ds4_mark **own; /* marks of the save's own, beside those that have a handle */
  uint32_t n_own;
  uint64_t at, fill; /* where the buffer goes, and how much is in it */
  int status;
  ds4_error *err;
} save;

/* Marks as they will be after the load: one for each position, all automatic. Position 0 and unlimited streams need none. */
static int collect_marks(save *v) {
  image *m = &v->m;
  uint32_t n = 0, all = v->s->n_auto + v->s->n_marks;
  m->marks = ds4_alloc(m->e, (all + 1ull) * sizeof *m->marks);
  v->own = ds4_alloc(m->e, (all + 1ull) * sizeof(ds4_mark *));
  if (!m->marks || !v->own) return ds4_snapshot_memory(v->err);
  const ds4_mark *at = m->e->windowed ? v->s->newest : NULL;
  while (at && at->older) at = at->older;
  for (; at; at = at->newer) {
    if (!at->pos) continue;
    if (!n || m->marks[n - 1].pos != at->pos) m->marks[n++] = (stored_mark){.pos = at->pos};
    m->marks[n - 1].pinned |= at->pinned;
    m->marks[n - 1].explicit |= !at->automatic;
  }
  ds4_section(m, MARKS, 0)->count = n;
  if (n > MARKS_MAX)
    return ds4_fail(v->err, DS4_EINVAL, n, MARKS_MAX, "the session has marks at %u positions, a snapshot holds %u; release some", n,
                    MARKS_MAX);
  for (uint32_t i = 0; i < n; i++)
    if (m->marks[i].explicit && !(v->own[v->n_own++] = ds4_mark_new(v->s, m->marks[i].pos, false, false))) {
      v->n_own--;
      return ds4_snapshot_memory(v->err);
    }
  return DS4_OK;
}

/* The pages of one stream, where they lie now. They stay there: this session holds them and does not move. */
static int collect_pages(save *v, uint32_t i) {
  image *m = &v->m;
  const ds4_stream *st = &m->e->stream[i];
  const ds4_timeline *l = &v->s->line[i];
  uint32_t n = 0, pages = ds4_pages_of(st, ds4_rows_at(st, m->pos));
  for (uint32_t t = 0; t < l->n_tables; t++) n += l->table[t] ? l->table[t]->used : 0;
  m->line[i].floor = st->reach ? l->floor : 0;
  m->line[i].refs = ds4_alloc(m->e, (n + 1ull) * sizeof *m->line[i].refs);
  if (!m->line[i].refs) return ds4_snapshot_memory(v->err);
  n = 0;
  for (uint32_t page = 0; page < pages; page++) {
    uint32_t id = ds4_entry(l, page);
    if (id) m->line[i].refs[n++] = (page_ref){.mem = st->pages[id].mem, .page = page};
  }
  ds4_section(m, PAGES, i)->count = ds4_section(m, ROWS, i)->count = n;
  return DS4_OK;
}

/* Lock held, session BUSY. */
static int collect(save *v) {
  image *m = &v->m;
  m->pos = v->s->pos;
  m->ctx = v->s->ctx;
  ds4_section(m, TOKENS, 0)->count = m->pos;
  ds4_section(m, LOGITS, 0)->count = v->s->logits ? m->e->vocab : 0;
  int status = collect_marks(v);
  for (uint32_t i = 0; !status && i < m->e->n_streams; i++) status = collect_pages(v, i);
  if (!status && !ds4_image_lay_out(m))
    status = ds4_fail(v->err, DS4_EINVAL, m->pos, 0, "%u positions do not fit one file; truncate first", m->pos);
  return status;
}

static void flush(save *v) {
  image *m = &v->m;
  if (!v->status && atomic_load_explicit(&v->s->cancel, memory_order_relaxed))
    v->status = ds4_fail(v->err, DS4_ECANCELLED, 0, 0, "the save was cancelled; the file is as it was");
  if (!v->status) v->status = ds4_file_write(&m->file, v->at, m->buffer, v->fill, v->err);
  m->crc = ds4_crc32c(m->crc, m->buffer, v->fill);
  v->at += v->fill;
  v->fill = 0;
}

/* Room for n bytes (at most the buffer) of the file. */
static uint8_t *room(save *v, uint64_t n) {
  if (v->fill + n > v->m.cap) flush(v);
  v->fill += n;
  return v->m.buffer + v->fill - n;
}

static void write_rows(save *v, uint32_t i) {
  image *m = &v->m;
  const ds4_layout *l = &m->e->stream[i].layout;
  for (uint32_t k = 0; k < ds4_section(m, ROWS, i)->count; k++) {
    const page_ref *ref = &m->line[i].refs[k];
    uint32_t rows = ds4_rows_in_page(&m->e->stream[i], m->pos, ref->page);
    for (uint32_t layer = 0; !v->status && layer < l->n_layers;) {
      uint32_t n = (uint32_t)((m->cap - v->fill) / l->layer_bytes);
      n = ds4_min_u32(n ? n : (uint32_t)(m->cap / l->layer_bytes), l->n_layers - layer);
      uint8_t *to = room(v, n * l->layer_bytes);
      int status = m->e->ops->copy_out(m->e->backend, to, ref->mem + layer * l->layer_bytes, n * l->layer_bytes);
      if (!status) status = m->e->ops->wait(m->e->backend);
      if (status && !v->status) v->status = ds4_fail(v->err, status, 0, 0, "reading rows from the device failed; the file is as it was");
      ds4_layers_tidy(l, to, n, rows, 0);
      layer += n;
    }
  }
}

static void write_section(save *v, section *c) {
  image *m = &v->m;
  if (c->kind == TOKENS)
    for (uint32_t p = 0; p < c->count; p++) put32(room(v, 4), (uint32_t)ds4_log_token(v->s, p));
  if (c->kind == MARKS)
    for (uint32_t k = 0; k < c->count; k++) put64(room(v, 8), m->marks[k].pos | (uint64_t)m->marks[k].pinned << 32);
  if (c->kind == LOGITS)
    for (uint32_t k = 0; k < c->count; k++) {
      uint32_t bits;
      memcpy(&bits, &v->s->logits->data[k], 4);
      put32(room(v, 4), bits);
    }
  if (c->kind == PAGES) {
    ds4_image_line(m, c->stream, room(v, LINE_BYTES));
    for (uint32_t k = 0; k < c->count; k++) put32(room(v, 4), m->line[c->stream].refs[k].page);
  }
  if (c->kind == ROWS) write_rows(v, c->stream);
  flush(v);
  c->crc = m->crc;
  m->crc = 0;
}

/* The session BUSY, without the lock. */
static int write_file(save *v, const char *path) {
  image *m = &v->m;
  v->status = ds4_image_buffer(m, v->err);
  if (!v->status) v->status = ds4_file_create(&m->file, m->e, path, v->err);
  v->at = m->head_bytes;
  for (uint32_t i = 0; !v->status && i < m->n_sections; i++) write_section(v, &m->section[i]);
  if (v->status) return v->status;
  header_encode(m, m->buffer);
  v->status = ds4_file_write(&m->file, 0, m->buffer, m->head_bytes, v->err);
  return v->status ? v->status : ds4_file_publish(&m->file, v->err);
}

int ds4_session_save(ds4_session *s, const char *path, ds4_error *err) {
  ds4_engine *e = s->engine;
  save v = {.m = {.e = e, .file = {.fd = -1, .dir = -1}}, .s = s, .err = err};
  int status = ds4_snapshot_host(err);
  if (!status) status = ds4_enter(e, err);
  if (status) return status;
  status = ds4_kv_legal(s, err);
  if (status) {
    ds4_leave(e);
    return status;
  }
  ds4_kv_begin(s);
  status = collect(&v);
  ds4_leave(e);
  if (!status) status = write_file(&v, path);
  ds4_image_free(&v.m);
  while (v.n_own) ds4_mark_free(v.own[--v.n_own]);
  free(v.own);
  ds4_enter(e, NULL);
  bool freed = ds4_kv_end(s);
  ds4_leave(e);
  if (freed) ds4_engine_release(e);
  return status;
}
