/* The parts of backend "ref": ref.c and, for compressed attention and hyper-connections, ref_sparse.c. */
#ifndef DS4_REF_H
#define DS4_REF_H

#include "host.h"

bool ds4_ref_stop(ds4_backend *b); /* asks the poll */

int ds4_ref_rope_tail(ds4_backend *b, float *x, const uint32_t *pos, uint32_t n, uint32_t heads, uint32_t width, uint32_t tail,
                      const float *table, bool inverse);
int ds4_ref_compress(ds4_backend *b, const ds4_compress *c);
int ds4_ref_pick(ds4_backend *b, const ds4_pick *p);
int ds4_ref_attend_sparse(ds4_backend *b, const ds4_attend_sparse *a);
int ds4_ref_round_fp8(ds4_backend *b, float *x, uint32_t n, uint32_t width, uint32_t tail);
int ds4_ref_round_fp4(ds4_backend *b, float *x, uint32_t n, uint32_t width);
int ds4_ref_mix_weights(ds4_backend *b, float *m, const float *scale, const float *base, uint32_t n, uint32_t k, uint32_t streams,
                        uint32_t iterations, float eps);
int ds4_ref_mix_in(ds4_backend *b, const float *h, const float *m, uint32_t n, uint32_t k, uint32_t streams, uint32_t width, float *out);
int ds4_ref_mix_out(ds4_backend *b, float *h, const float *y, const float *m, uint32_t n, uint32_t streams, uint32_t width);

/* Online softmax over some keys: maximum, sum of exponentials, weighted sum of values [width]. */
typedef struct ds4_partial {
  float max, sum, *out;
} ds4_partial;

/* The rows that one query reads of one stream, by place: row = list[place], or the place itself. Part 0 holds the keys. */
typedef struct ds4_ref_rows {
  const ds4_layout *layout;
  const ds4_view *view;
  const uint32_t *list;           /* NULL: all */
  uint32_t layer, value_part, kv; /* kv: head of the stream */
} ds4_ref_rows;
/* Adds places [lo, hi) to `all`; `first`: nothing was added yet. scratch: a split and one row. */
void ds4_ref_attend_rows(const ds4_ref_rows *s, uint32_t lo, uint32_t hi, const float *q, ds4_partial *all, bool *first, float *scratch);

#endif
