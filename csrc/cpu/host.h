/* Plain memory, as both CPU backends use it. */
#ifndef DS4_HOST_H
#define DS4_HOST_H

#include "../internal.h"

void *ds4_host_alloc(ds4_backend *b, uint64_t bytes);
void ds4_host_free(ds4_backend *b, void *mem, uint64_t bytes);
int ds4_host_copy(ds4_backend *b, void *to, const void *from, uint64_t bytes);
int ds4_host_wait(ds4_backend *b);

int ds4_host_scale(ds4_backend *b, float *x, float factor, uint64_t n);
int ds4_host_clear(ds4_backend *b, float *x, uint64_t n);
int ds4_host_add_rows(ds4_backend *b, float *x, const float *table, const uint32_t *row, uint32_t n, uint32_t width);
int ds4_host_gather(ds4_backend *b, const float *x, const uint32_t *row, uint32_t n, uint32_t width, float *out);
int ds4_host_scatter_add(ds4_backend *b, const float *x, const uint32_t *row, const float *weight, uint32_t n, uint32_t width, float *out);

/* Rows in pages, as both write and read them. to_f16 rounds n numbers to binary16. */
typedef void (*ds4_to_halves)(const float *x, uint32_t n, uint16_t *out);
void ds4_row_write(const ds4_layout *l, uint32_t layer, uint32_t part, const ds4_view *view, uint32_t row, const float *x,
                   ds4_to_halves to_f16);
int ds4_rows_read(ds4_backend *b, const ds4_layout *l, uint32_t layer, uint32_t part, const ds4_view *view, uint32_t row, uint32_t n,
                  float *out);
void ds4_vector_read(const ds4_part *p, uint32_t rows, const uint8_t *tile, uint32_t row, float *out);

/* The page of a row in a view. */
static inline uint8_t *ds4_view_page(const ds4_view *v, const ds4_layout *l, uint32_t row) {
  return v->pages[row / l->page_rows - v->first_page];
}

#endif
