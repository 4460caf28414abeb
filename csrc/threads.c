/* A pool of threads for one engine, and the floating-point mode.
 *
 * Work is a number of items that are taken one by one; which thread takes which decides nothing but speed. The calling thread works too and
 * serves the poll between its items. It waits for items, never for threads: one that gets no processor in time costs nothing. Idle threads
 * spin for a moment, then sleep.
 *
 * `state` holds the round in its upper half and the next free item in its lower one. An item is claimed by raising it with a compare and
 * exchange that fails when the round is another one; `work`, `ctx` and `items` are written while no item is free, so what was read before a
 * claim that succeeded belongs to the claimed item's round. */
#include "internal.h"

#include <sched.h>
#include <stdlib.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

/* ---- floating-point mode ------------------------------------------------------------------------------------------------------------- */

uint32_t ds4_float_mode_set(void) {
#if defined(__x86_64__)
  uint32_t mode = _mm_getcsr();
  _mm_setcsr(0x1f80); /* to nearest, denormals on, exceptions masked */
  return mode;
#elif defined(__aarch64__)
  uint64_t mode, plain = 0;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  __asm__ volatile("msr fpcr, %0" : : "r"(plain));
  return (uint32_t)mode;
#else
  return 0;
#endif
}

void ds4_float_mode_restore(uint32_t mode) {
#if defined(__x86_64__)
  _mm_setcsr(mode);
#elif defined(__aarch64__)
  uint64_t wide = mode;
  __asm__ volatile("msr fpcr, %0" : : "r"(wide));
#else
  (void)mode;
#endif
}

/* ---- pool ---------------------------------------------------------------------------------------------------------------------------- */

#define SPINS 4000u

struct ds4_threads {
  uint32_t n; /* with the caller */
  pthread_t *thread;
  pthread_mutex_t lock;
  pthread_cond_t wake;
  uint32_t sleeping; /* under the lock */
  _Atomic uint64_t state;
  _Atomic uint32_t items, done;
  _Atomic bool quit, stopped;
  _Atomic(ds4_work) work;
  _Atomic(void *) ctx;
  ds4_poll poll;
  void *user;
};

typedef struct start {
  ds4_threads *t;
  uint32_t index;
} start;

static void relax(void) {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* Works until no item is free; those that are left after a stop are claimed and dropped. */
static void take_items(ds4_threads *t, uint32_t index) {
  for (uint64_t state = atomic_load(&t->state);;) {
    ds4_work work = atomic_load_explicit(&t->work, memory_order_relaxed);
    void *ctx = atomic_load_explicit(&t->ctx, memory_order_relaxed);
    if ((uint32_t)state >= atomic_load_explicit(&t->items, memory_order_relaxed)) return;
    if (!atomic_compare_exchange_strong(&t->state, &state, state + 1)) continue; /* state is what it is now */
    if (!atomic_load_explicit(&t->stopped, memory_order_relaxed)) {
      work(ctx, (uint32_t)state, index);
      if (index == 0 && t->poll && t->poll(t->user)) atomic_store(&t->stopped, true);
    }
    atomic_fetch_add(&t->done, 1);
    state = atomic_load(&t->state);
  }
}

static bool has_work(ds4_threads *t) {
  return (uint32_t)atomic_load(&t->state) < atomic_load_explicit(&t->items, memory_order_relaxed) || atomic_load(&t->quit);
}

static void *thread_main(void *arg) {
  start s = *(start *)arg;
  free(arg);
  ds4_threads *t = s.t;
  ds4_float_mode_set();
  while (!atomic_load(&t->quit)) {
    for (uint32_t i = 0; i < SPINS && !has_work(t); i++) relax();
    if (!has_work(t)) {
      pthread_mutex_lock(&t->lock);
      t->sleeping++;
      while (!has_work(t)) pthread_cond_wait(&t->wake, &t->lock);
      t->sleeping--;
      pthread_mutex_unlock(&t->lock);
    }
    take_items(t, s.index);
  }
  return NULL;
}

/* What has no item for a second thread touches nothing that others look at. */
static void run_alone(ds4_threads *t, uint32_t n, ds4_work work, void *ctx) {
  for (uint32_t i = 0; i < n && !atomic_load_explicit(&t->stopped, memory_order_relaxed); i++) {
    work(ctx, i, 0);
    if (t->poll && t->poll(t->user)) atomic_store(&t->stopped, true);
  }
}

void ds4_threads_run(ds4_threads *t, uint32_t n, ds4_work work, void *ctx) {
  if (t->n == 1 || n <= 1) {
    run_alone(t, n, work, ctx);
    return;
  }
  uint64_t round = (atomic_load(&t->state) >> 32) + 1;
  atomic_store(&t->items, 0); /* nothing is free while the rest is written */
  atomic_store_explicit(&t->work, work, memory_order_relaxed);
  atomic_store_explicit(&t->ctx, ctx, memory_order_relaxed);
  atomic_store(&t->done, 0);
  atomic_store(&t->state, round << 32);
  pthread_mutex_lock(&t->lock); /* a thread on its way to sleep sees the items or is woken */
  atomic_store(&t->items, n);
  if (t->sleeping) pthread_cond_broadcast(&t->wake);
  pthread_mutex_unlock(&t->lock);
  take_items(t, 0);
  for (uint32_t i = 0; atomic_load(&t->done) < n; i++) {
    relax();
    if (i > SPINS) sched_yield(); /* the thread that has an item has no processor */
  }
}

void ds4_threads_poll(ds4_threads *t, ds4_poll poll, void *user) {
  t->poll = poll;
  t->user = user;
  atomic_store(&t->stopped, false);
}

bool ds4_threads_stopped(ds4_threads *t) { return atomic_load(&t->stopped); }
uint32_t ds4_threads_count(const ds4_threads *t) { return t->n; }

int ds4_threads_new(uint32_t n, ds4_threads **out) {
  ds4_threads *t = calloc(1, sizeof *t);
  *out = NULL;
  if (!t) return DS4_ENOMEM;
  t->n = 1;
  pthread_mutex_init(&t->lock, NULL);
  pthread_cond_init(&t->wake, NULL);
  t->thread = calloc(n, sizeof *t->thread);
  for (; t->thread && t->n < n; t->n++) {
    start *s = malloc(sizeof *s);
    if (s) *s = (start){t, t->n};
    if (s && !pthread_create(&t->thread[t->n], NULL, thread_main, s)) continue;
    free(s);
    ds4_threads_free(t);
    return DS4_ENOMEM;
  }
  *out = t;
  return t->thread ? DS4_OK : (ds4_threads_free(t), *out = NULL, DS4_ENOMEM);
}

void ds4_threads_free(ds4_threads *t) {
  if (!t) return;
  pthread_mutex_lock(&t->lock);
  atomic_store(&t->quit, true);
  pthread_cond_broadcast(&t->wake);
  pthread_mutex_unlock(&t->lock);
  for (uint32_t i = 1; i < t->n; i++) pthread_join(t->thread[i], NULL);
  pthread_cond_destroy(&t->wake);
  pthread_mutex_destroy(&t->lock);
  free(t->thread);
  free(t);
}
