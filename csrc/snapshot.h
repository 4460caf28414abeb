/* What saving and loading share: the byte layout, which docs/snapshot.md draws, in host numbers. */
#ifndef DS4_SNAPSHOT_H
#define DS4_SNAPSHOT_H

#include "file.h"

enum kind { TOKENS = 1, MARKS, LOGITS, PAGES, ROWS };

#define MAGIC "\211DS4SNP\n" /* 8 bytes; a transfer as text or with 7 bits breaks them */
#define ORDER_MARK 0x01020304u
#define FRONT_BYTES 24u /* the part of the header that every layout version has */
#define HEAD_BYTES 136u
#define CRC_AT 20u
#define ENTRY_BYTES 32u
#define LINE_BYTES 32u
#define MARKS_MAX 4096u
#define SECTIONS_MAX (3 + 2 * DS4_MAX_STREAMS)
#define BUFFER_BYTES (256u << 10)

typedef struct section {
  uint32_t kind, stream, count, crc; /* count: of tokens, marks, numbers or pages */
  uint64_t at, bytes;
} section;

typedef struct page_ref {
  uint8_t *mem; /* where its rows come from or go to; NULL: they are not wanted */
  uint32_t page;
  bool wanted; /* load: some mark or the window needs it */
} page_ref;

typedef struct stored_mark {
  uint32_t pos;
  bool pinned, explicit;
} stored_mark;

/* What a file holds, apart from the tokens, logits and rows themselves. */
typedef struct image {
  ds4_engine *e;
  ds4_file file;
  uint32_t pos, ctx, n_sections, head_bytes;
  section section[SECTIONS_MAX];
  uint64_t file_bytes;
  stored_mark *marks; /* ascending */
  struct {
    uint32_t floor;
    page_ref *refs; /* ascending */
  } line[DS4_MAX_STREAMS];
  uint8_t *buffer;
  uint64_t cap;
  uint32_t crc; /* of the section at hand */
} image;

static inline section *ds4_section(image *m, enum kind kind, uint32_t stream) {
  return &m->section[kind < PAGES ? kind - TOKENS : 3 + (kind == ROWS ? m->e->n_streams : 0) + stream];
}

/* Little-endian, whatever the host is. */
static inline void put32(uint8_t *p, uint32_t v) {
  for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> 8 * i);
}
static inline void put64(uint8_t *p, uint64_t v) {
  put32(p, (uint32_t)v);
  put32(p + 4, (uint32_t)(v >> 32));
}
static inline uint32_t get32(const uint8_t *p) { return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24; }
static inline uint64_t get64(const uint8_t *p) { return get32(p) | (uint64_t)get32(p + 4) << 32; }

/* snapshot.c */
int ds4_snapshot_host(ds4_error *err);
int ds4_snapshot_memory(ds4_error *err);        /* fails with DS4_ENOMEM */
int ds4_image_buffer(image *m, ds4_error *err); /* the I/O buffer: at least one layer of a page */
void ds4_image_free(image *m);
bool ds4_image_lay_out(image *m);                            /* sections, places and sizes from the counts; false: a size overflows */
void ds4_image_line(const image *m, uint32_t i, uint8_t *p); /* LINE_BYTES: the shape of a stream, and its floor */
uint32_t ds4_rows_in_page(const ds4_stream *st, uint32_t pos, uint32_t page);
/* Sets rows behind the last one, and what lies between layers, to `byte`: unwritten memory is in no file, and never read (K8). */
void ds4_layers_tidy(const ds4_layout *l, uint8_t *layers, uint32_t n, uint32_t rows, uint8_t byte);

#endif
