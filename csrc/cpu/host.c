/* Plain memory: large pieces straight from the system, so that freed ones go back to it and not to the allocator's own store. */
#define _DEFAULT_SOURCE
#include "host.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define LARGE (64u << 10)

void *ds4_host_alloc(ds4_backend *b, uint64_t bytes) {
  (void)b;
  if (!bytes || bytes > (uint64_t)INT64_MAX) return NULL;
  if (bytes < LARGE) return aligned_alloc(64, (bytes + 63) / 64 * 64);
  void *mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return mem == MAP_FAILED ? NULL : mem;
}

void ds4_host_free(ds4_backend *b, void *mem, uint64_t bytes) {
  (void)b;
  if (!mem) return;
  if (bytes < LARGE)
    free(mem);
  else
    munmap(mem, bytes);
}

int ds4_host_copy(ds4_backend *b, void *to, const void *from, uint64_t bytes) {
  (void)b;
  memcpy(to, from, bytes);
  return DS4_OK;
}

int ds4_host_wait(ds4_backend *b) {
  (void)b;
  return DS4_OK;
}
