/* Many threads on one engine, for ThreadSanitizer: sessions evaluate, fork, truncate and cancel at once, and every result has the bits of a quiet run. */
#include <pthread.h>

#include "tiny.h"

#define TOKENS 96
#define THREADS 4
#define ROUNDS 6

static float expected[THREADS][VOCAB];
static ds4_engine *engine;
static ds4_session *shared;

static void run(int which, float *logits, uint32_t chunk) {
  ds4_error err;
  ds4_session *s, *child;
  ds4_logits *l;
  ds4_synced done;
  int32_t tokens[TOKENS];
  for (int i = 0; i < TOKENS; i++) tokens[i] = (i * 31 + which * 7) % VOCAB;
  if (ds4_session_new(engine, 0, &s, &err)) die("session", &err);
  if (ds4_session_sync(s, tokens, TOKENS, chunk, NULL, NULL, &done, &err)) die("sync", &err);
  if (ds4_session_fork(s, TOKENS / 2, &child, &err)) die("fork", &err);
  if (ds4_session_truncate(s, 10, &err)) die("truncate", &err);
  ds4_segment rest = {.session = child, .tokens = tokens + TOKENS / 2, .n = TOKENS / 2, .want = DS4_WANT_LAST};
  if (ds4_eval(engine, &rest, 1, chunk, NULL, NULL, &err)) die("eval", &err);
  if (ds4_session_logits(child, &l, &err)) die("logits", &err);
  memcpy(logits, ds4_logits_data(l), VOCAB * sizeof *logits);
  ds4_logits_free(l);
  ds4_session_free(s);
  ds4_session_free(child);
}

/* Everyone writes one session, and starts and stops the profile: some get BUSY, some are cancelled, nothing else goes wrong. */
static void quarrel(int round) {
  ds4_error err;
  ds4_synced done;
  int32_t tokens[64] = {1, 2, 3};
  int status = ds4_session_sync(shared, tokens, 64, 8, NULL, NULL, &done, &err);
  if (status && status != DS4_EBUSY && status != DS4_ECANCELLED) die("shared sync", &err);
  ds4_session_cancel(shared);
  ds4_profile_entry entries[64];
  uint32_t n;
  status = ds4_engine_profile(engine, round % 2 ? DS4_PROFILE_START : DS4_PROFILE_STOP, entries, 64, &n, &err);
  if (status && status != DS4_EBUSY) die("profile", &err);
  ds4_engine_info info;
  ds4_engine_get_info(engine, &info);
  status = ds4_session_clear(shared, &err);
  if (status && status != DS4_EBUSY) die("shared clear", &err);
}

static void *work(void *arg) {
  int which = (int)(intptr_t)arg;
  float logits[VOCAB];
  for (int i = 0; i < ROUNDS; i++) {
    run(which, logits, 5 + (uint32_t)i);
    if (memcmp(logits, expected[which], sizeof logits)) {
      fprintf(stderr, "thread %d got other bits\n", which);
      exit(1);
    }
    quarrel(i);
  }
  return NULL;
}

int main(void) {
  pthread_t thread[THREADS];
  ds4_error err;
  engine = tiny_engine(2);
  for (int i = 0; i < THREADS; i++) run(i, expected[i], 0);
  if (ds4_session_new(engine, 0, &shared, &err)) die("session", &err);
  ds4_profile_entry entries[64];
  uint32_t n;
  if (ds4_engine_profile(engine, DS4_PROFILE_START, NULL, 0, &n, &err)) die("profile", &err); /* the bits are those without one */
  for (int i = 0; i < THREADS; i++) pthread_create(&thread[i], NULL, work, (void *)(intptr_t)i);
  for (int i = 0; i < THREADS; i++) pthread_join(thread[i], NULL);
  if (ds4_session_check(shared, &err)) die("check", &err);
  if (ds4_engine_profile(engine, DS4_PROFILE_STOP, entries, 64, &n, &err)) die("profile", &err);
  ds4_session_free(shared);
  ds4_ledger l;
  if (ds4_engine_ledger(engine, &l, &err)) die("ledger", &err);
  printf("%d threads, %llu pages left in use\n", THREADS, (unsigned long long)l.pages_used);
  ds4_engine_free(engine);
  return l.pages_used ? 1 : 0;
}
