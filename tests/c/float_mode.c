/* A host program that flushes denormals and rounds upwards gets the same bits, and its own mode back. */
#include "tiny.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#define float_mode() _mm_getcsr()
#define set_float_mode(mode) _mm_setcsr(mode)
#define ODD_MODE (0x1f80u | 0x8040u | 0x4000u) /* flush to zero, denormals are zero, round up */
#elif defined(__aarch64__)
static unsigned float_mode(void) {
  uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return (unsigned)mode;
}
static void set_float_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#define ODD_MODE (1u << 24 | 1u << 22) /* flush to zero, round up */
#else
#define float_mode() 0u
#define set_float_mode(mode) (void)(mode)
#define ODD_MODE 0u
#endif

static void run(float *logits, float *score) {
  ds4_error err;
  ds4_session *s;
  ds4_logits *l;
  int32_t tokens[40];
  for (int i = 0; i < 40; i++) tokens[i] = i * 31 % VOCAB;
  ds4_engine *engine = tiny_engine(2);
  if (ds4_session_new(engine, 0, &s, &err)) die("session", &err);
  ds4_segment g = {.session = s, .tokens = tokens, .n = 20, .want = DS4_WANT_LAST};
  if (ds4_eval(engine, &g, 1, 0, NULL, NULL, &err)) die("eval", &err);
  g = (ds4_segment){.session = s, .tokens = tokens + 20, .n = 20, .want = DS4_WANT_SCORE, .out = score};
  if (ds4_eval(engine, &g, 1, 0, NULL, NULL, &err)) die("score", &err);
  if (ds4_session_logits(s, &l, &err)) die("logits", &err);
  memcpy(logits, ds4_logits_data(l), VOCAB * sizeof *logits);
  ds4_logits_free(l);
  ds4_session_free(s);
  ds4_engine_free(engine);
}

int main(void) {
  float plain[VOCAB], odd[VOCAB], plain_score[20], odd_score[20];
  run(plain, plain_score);
  unsigned before = float_mode();
  set_float_mode(ODD_MODE);
  run(odd, odd_score);
  unsigned after = float_mode() & ~0x3fu; /* the flags that say what happened do not count */
  set_float_mode(before);
  if (after != (ODD_MODE & ~0x3fu)) return fprintf(stderr, "the mode of the host is %x, it was %x\n", after, ODD_MODE), 1;
  if (memcmp(plain, odd, sizeof plain) || memcmp(plain_score, odd_score, sizeof odd_score)) return fprintf(stderr, "other bits\n"), 1;
  printf("the same bits, and the host's mode is as it was\n");
  return 0;
}
