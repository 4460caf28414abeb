/* Many threads on one engine, for ThreadSanitizer: sessions evaluate, fork, truncate and cancel at once, and every result has the bits of a quiet run. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ds4.h"

#define VOCAB 64
#define TOKENS 96
#define THREADS 4
#define ROUNDS 6

static float weights[64 * 64], expected[THREADS][VOCAB];
static ds4_engine *engine;
static ds4_session *shared;

static void die(const char *what, const ds4_error *err) {
  fprintf(stderr, "%s: %s\n", what, err->text);
  exit(1);
}

static void load(void) {
  static const char *const names[] = {"embed", "norm", "layers.0.attn_norm", "layers.0.q", "layers.0.k", "layers.0.v",
                                      "layers.0.o", "layers.0.ffn_norm", "layers.0.gate", "layers.0.up", "layers.0.down"};
  static const uint64_t shapes[][2] = {{64, 32}, {1, 32}, {1, 32}, {32, 32}, {16, 32}, {16, 32}, {32, 32}, {1, 32}, {64, 32}, {64, 32}, {32, 64}};
  static const char *const keys[] = {"n_layers", "vocab", "ctx", "dim", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "norm_eps", "rope_base", "rope_interleaved"};
  static const double values[] = {1, VOCAB, 512, 32, 4, 2, 8, 64, 1e-5, 10000, 0};
  const uint8_t identity[32] = "threads.c";
  ds4_error err;
  for (int i = 0; i < 64 * 64; i++) weights[i] = (float)((i * 7919) % 199 - 99) / 500.0f;
  if (ds4_engine_new("llama", "cpu", 2, &engine, &err)) die("new", &err);
  for (size_t i = 0; i < sizeof values / sizeof *values; i++)
    if (ds4_engine_set(engine, keys[i], &values[i], 1, &err)) die(keys[i], &err);
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    if (ds4_engine_tensor(engine, names[i], DS4_F32, shapes[i][0], shapes[i][1], weights, shapes[i][0] * shapes[i][1] * 4, &err)) die(names[i], &err);
  if (ds4_engine_ready(engine, "f16", 16384, 0, identity, &err)) die("ready", &err);
}

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

/* Everyone writes one session: some get BUSY, some are cancelled, nothing else goes wrong. */
static void quarrel(void) {
  ds4_error err;
  ds4_synced done;
  int32_t tokens[64] = {1, 2, 3};
  int status = ds4_session_sync(shared, tokens, 64, 8, NULL, NULL, &done, &err);
  if (status && status != DS4_EBUSY && status != DS4_ECANCELLED) die("shared sync", &err);
  ds4_session_cancel(shared);
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
    quarrel();
  }
  return NULL;
}

int main(void) {
  pthread_t thread[THREADS];
  ds4_error err;
  load();
  for (int i = 0; i < THREADS; i++) run(i, expected[i], 0);
  if (ds4_session_new(engine, 0, &shared, &err)) die("session", &err);
  for (int i = 0; i < THREADS; i++) pthread_create(&thread[i], NULL, work, (void *)(intptr_t)i);
  for (int i = 0; i < THREADS; i++) pthread_join(thread[i], NULL);
  if (ds4_session_check(shared, &err)) die("check", &err);
  ds4_session_free(shared);
  ds4_ledger l;
  ds4_engine_ledger(engine, &l);
  printf("%d threads, %llu pages left in use\n", THREADS, (unsigned long long)l.pages_used);
  ds4_engine_free(engine);
  return l.pages_used ? 1 : 0;
}
