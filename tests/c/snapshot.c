/* Snapshots while other threads fork, write, mark and load, for ThreadSanitizer: every file has the bits of the state that was saved. */
#include <pthread.h>
#include <unistd.h>

#include "tiny.h"

#define TOKENS 200
#define ROUNDS 12

static ds4_engine *engine;
static ds4_session *session;
static float expected[VOCAB];
static int32_t tokens[TOKENS];

/* A load gives the session back; its logits and a few tokens more are those of the saved one. */
static void compare(const char *path) {
  ds4_error err;
  ds4_session *s;
  ds4_logits *l;
  int32_t held[TOKENS];
  if (ds4_session_load(engine, path, 0, &s, &err)) die("load", &err);
  if (ds4_session_check(s, &err)) die("check", &err);
  if (ds4_session_tokens(s, 0, TOKENS, held, &err)) die("tokens", &err);
  if (ds4_session_truncate(s, TOKENS - 1, &err)) die("truncate", &err);
  ds4_segment last = {.session = s, .tokens = &tokens[TOKENS - 1], .n = 1, .want = DS4_WANT_LAST};
  if (ds4_eval(engine, &last, 1, 0, NULL, NULL, &err)) die("eval", &err);
  if (ds4_session_logits(s, &l, &err)) die("logits", &err);
  if (memcmp(held, tokens, sizeof held) || memcmp(ds4_logits_data(l), expected, sizeof expected)) {
    fprintf(stderr, "the loaded session differs\n");
    exit(1);
  }
  ds4_logits_free(l);
  ds4_session_free(s);
}

static void *save(void *path) {
  ds4_error err;
  for (int i = 0; i < ROUNDS; i++) {
    int status;
    while ((status = ds4_session_save(session, path, &err)) == DS4_EBUSY) usleep(100);
    if (status) die("save", &err);
    compare(path);
  }
  return NULL;
}

/* Writes into pages that it shares with the session, and lets a mark go while a save may hold another beside it. */
static void *disturb(void *which) {
  ds4_error err;
  for (int i = 0; i < ROUNDS * 4; i++) {
    ds4_session *child;
    ds4_mark *mark;
    if (!ds4_session_mark(session, &mark, &err)) {
      usleep((useconds_t)(i * 37 % 500));
      ds4_mark_free(mark);
    }
    if (ds4_session_fork(session, 90 + i, &child, &err)) continue;
    ds4_segment more = {.session = child, .tokens = tokens + (intptr_t)which, .n = 60, .want = DS4_WANT_NONE};
    if (ds4_eval(engine, &more, 1, 16, NULL, NULL, &err)) die("eval of a fork", &err);
    ds4_session_free(child);
  }
  return NULL;
}

int main(void) {
  ds4_error err;
  ds4_logits *l;
  ds4_ledger ledger;
  pthread_t thread[4];
  char paths[2][64];
  for (int i = 0; i < 2; i++) snprintf(paths[i], sizeof paths[i], "snapshot-%ld-%d", (long)getpid(), i);
  engine = tiny_engine(2);
  for (int i = 0; i < TOKENS; i++) tokens[i] = i * 31 % VOCAB;
  if (ds4_session_new(engine, 0, &session, &err)) die("session", &err);
  ds4_segment all = {.session = session, .tokens = tokens, .n = TOKENS, .want = DS4_WANT_LAST};
  if (ds4_eval(engine, &all, 1, 0, NULL, NULL, &err)) die("eval", &err);
  if (ds4_session_logits(session, &l, &err)) die("logits", &err);
  memcpy(expected, ds4_logits_data(l), sizeof expected);
  ds4_logits_free(l);
  for (intptr_t i = 0; i < 4; i++) pthread_create(&thread[i], NULL, i < 2 ? save : disturb, i < 2 ? (void *)paths[i] : (void *)i);
  for (int i = 0; i < 4; i++) pthread_join(thread[i], NULL);
  for (int i = 0; i < 2; i++) unlink(paths[i]);
  if (ds4_session_check(session, &err)) die("check", &err);
  ds4_session_free(session);
  ds4_engine_ledger(engine, &ledger, NULL);
  if (ledger.pages_used || ledger.sessions || ledger.marks || ledger.logits) {
    fprintf(stderr, "%llu pages, %llu sessions, %llu marks left\n", (unsigned long long)ledger.pages_used,
            (unsigned long long)ledger.sessions, (unsigned long long)ledger.marks);
    return 1;
  }
  ds4_engine_free(engine);
  return 0;
}
