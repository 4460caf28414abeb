/* The parts of backend "cpu": cpu.c and, for compressed attention and hyper-connections, cpu_sparse.c. */
#ifndef DS4_CPU_H
#define DS4_CPU_H

#include "kernels.h"

struct ds4_backend {
  const ds4_kernels *k;
  ds4_threads *threads;
  ds4_quants quants;
  uint64_t cap_quants; /* blocks */
  float **scratch;     /* [threads] for attention and for groups of mapped weights */
  uint64_t cap_scratch;
  float *partial; /* results of splits, scores of the indexer */
  uint64_t cap_partial;
  uint32_t *tile, cap_tile; /* first tokens of the tiles of attention */
};

/* Runs items on all threads; DS4_ECANCELLED when the poll said stop. */
int ds4_cpu_run(ds4_backend *b, uint32_t items, ds4_work work, void *ctx);
/* Makes room for `scratch` floats a thread and `partial` floats for all; false: no memory. */
bool ds4_cpu_memory(ds4_backend *b, uint64_t scratch, uint64_t partial);

int ds4_cpu_add_rows(ds4_backend *b, float *x, const float *table, const uint32_t *row, uint32_t n, uint32_t width);
int ds4_cpu_rope_tail(ds4_backend *b, float *x, const uint32_t *pos, uint32_t n, uint32_t heads, uint32_t width, uint32_t tail,
                      const float *table, bool inverse);
int ds4_cpu_compress(ds4_backend *b, const ds4_compress *c);
int ds4_cpu_pick(ds4_backend *b, const ds4_pick *p);
int ds4_cpu_attend_sparse(ds4_backend *b, const ds4_attend_sparse *a);
int ds4_cpu_round_fp8(ds4_backend *b, float *x, uint32_t n, uint32_t width, uint32_t tail);
int ds4_cpu_round_fp4(ds4_backend *b, float *x, uint32_t n, uint32_t width);
int ds4_cpu_mix_weights(ds4_backend *b, float *m, const float *scale, const float *base, uint32_t n, uint32_t k, uint32_t streams,
                        uint32_t iterations, float eps);
int ds4_cpu_mix_in(ds4_backend *b, const float *h, const float *m, uint32_t n, uint32_t k, uint32_t streams, uint32_t width, float *out);
int ds4_cpu_mix_out(ds4_backend *b, float *h, const float *y, const float *m, uint32_t n, uint32_t streams, uint32_t width);

#endif
