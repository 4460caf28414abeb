/* The pool of threads by itself: every item of every round is done once, by a thread of the pool, and a stop ends a round early. */
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

#define ITEMS 70u

typedef struct round {
  _Atomic uint32_t done[ITEMS];
  uint32_t n_threads, n;
  _Atomic uint32_t wrong;
  uint64_t sum; /* written by the caller between rounds, read by all: a round must see what was written before it */
} round;

static void item(void *ctx, uint32_t i, uint32_t thread) {
  round *r = ctx;
  if (i >= r->n || thread >= r->n_threads || r->sum != r->n + 7u) atomic_fetch_add(&r->wrong, 1);
  if (i < ITEMS) atomic_fetch_add(&r->done[i], 1);
}

static int rounds(uint32_t n_threads) {
  ds4_threads *t;
  round r = {.n_threads = n_threads};
  if (ds4_threads_new(n_threads, &t) || ds4_threads_count(t) != n_threads) return 1;
  for (uint32_t k = 0; k < 3000; k++) {
    uint32_t n = k * 7919 % ITEMS;
    r.n = n;
    r.sum = n + 7;
    for (uint32_t i = 0; i < ITEMS; i++) atomic_store(&r.done[i], 0);
    ds4_threads_run(t, n, item, &r);
    for (uint32_t i = 0; i < ITEMS; i++)
      if (atomic_load(&r.done[i]) != (i < n))
        return fprintf(stderr, "%u threads: item %u of %u was done %u times\n", n_threads, i, n, r.done[i]);
  }
  ds4_threads_free(t);
  return (int)atomic_load(&r.wrong);
}

static int stop_at_once(void *user) { return ++*(int *)user > 0; }

/* The caller's poll says stop after its first item: the round ends with no item done twice, and the next one is a whole one. */
static int stopping(uint32_t n_threads) {
  ds4_threads *t;
  round r = {.n_threads = n_threads, .n = ITEMS, .sum = ITEMS + 7};
  if (ds4_threads_new(n_threads, &t)) return 1;
  for (uint32_t k = 0; k < 200; k++) {
    int polls = 0;
    uint32_t n = k % 3 ? ITEMS : 1, done = 0;
    for (uint32_t i = 0; i < ITEMS; i++) atomic_store(&r.done[i], 0);
    ds4_threads_poll(t, stop_at_once, &polls);
    ds4_threads_run(t, n, item, &r);
    for (uint32_t i = 0; i < ITEMS; i++) {
      if (atomic_load(&r.done[i]) > 1) return fprintf(stderr, "item %u was done twice\n", i);
      done += atomic_load(&r.done[i]);
    }
    if (polls > 1 || ds4_threads_stopped(t) != (polls == 1)) return fprintf(stderr, "%d polls after a stop\n", polls);
    if (n_threads == 1 && (done != 1 || polls != 1)) return fprintf(stderr, "%u items done, %d polls\n", done, polls);
    ds4_threads_poll(t, NULL, NULL);
    ds4_threads_run(t, ITEMS, item, &r);
    if (ds4_threads_stopped(t)) return fprintf(stderr, "stopped without a poll\n");
  }
  ds4_threads_free(t);
  return (int)atomic_load(&r.wrong);
}

int main(void) {
  for (uint32_t n = 1; n <= 4; n++)
    if (rounds(n) || stopping(n)) return fprintf(stderr, "a pool of %u threads is wrong\n", n), 1;
  puts("every item once");
  return 0;
}
