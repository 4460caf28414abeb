/* The C header without Python: a program that brings its own tensors, moves the context back and forth and gets the same bits. */
#include <stdio.h>
#include <string.h>

#include "ds4.h"

#define CHECK(call)                                                                                                                        \
  if (call) return fprintf(stderr, "%s: %s\n", #call, err.text), 1

static ds4_error err;
static float weights[64 * 64]; /* any numbers will do: every tensor reads from here */

static int tensor(ds4_engine *e, const char *name, uint64_t rows, uint64_t cols) {
  return ds4_engine_tensor(e, name, DS4_F32, rows, cols, weights, rows * cols * sizeof(float), &err);
}

static int load(ds4_engine **out) {
  static const char *const keys[] = {"n_layers", "vocab",   "ctx",      "dim",       "n_heads",         "n_kv_heads",
                                     "head_dim", "ffn_dim", "norm_eps", "rope_base", "rope_interleaved"};
  static const double values[] = {1, 64, 256, 32, 4, 2, 8, 64, 1e-5, 10000, 0};
  const uint8_t identity[32] = "embed.c";
  for (int i = 0; i < 64 * 64; i++) weights[i] = (float)((i * 7919) % 199 - 99) / 500.0f;
  CHECK(ds4_engine_new("llama", "cpu", 0, out, &err));
  for (size_t i = 0; i < sizeof values / sizeof *values; i++) CHECK(ds4_engine_set(*out, keys[i], &values[i], 1, &err));
  CHECK(tensor(*out, "embed", 64, 32) || tensor(*out, "norm", 1, 32) || tensor(*out, "layers.0.attn_norm", 1, 32));
  CHECK(tensor(*out, "layers.0.q", 32, 32) || tensor(*out, "layers.0.k", 16, 32) || tensor(*out, "layers.0.v", 16, 32));
  CHECK(tensor(*out, "layers.0.o", 32, 32) || tensor(*out, "layers.0.ffn_norm", 1, 32) || tensor(*out, "layers.0.gate", 64, 32));
  CHECK(tensor(*out, "layers.0.up", 64, 32) || tensor(*out, "layers.0.down", 32, 64));
  CHECK(ds4_engine_ready(*out, "f16", 4096, 0, identity, &err));
  return 0;
}

int main(void) {
  ds4_engine *engine;
  ds4_session *live, *fork;
  ds4_logits *before, *after;
  int32_t tokens[100];
  for (int i = 0; i < 100; i++) tokens[i] = i * 31 % 64;
  if (load(&engine)) return 1;
  CHECK(ds4_session_new(engine, 0, &live, &err));

  ds4_segment prompt = {.session = live, .tokens = tokens, .n = 80, .want = DS4_WANT_LAST};
  CHECK(ds4_eval(engine, &prompt, 1, 0, NULL, NULL, &err)); /* 80 tokens, in one chunk */
  CHECK(ds4_session_logits(live, &before, &err));
  CHECK(ds4_session_fork(live, DS4_HERE, &fork, &err)); /* shares every page */

  ds4_segment more = {.session = live, .tokens = tokens + 80, .n = 20, .want = DS4_WANT_NONE};
  CHECK(ds4_eval(engine, &more, 1, 7, NULL, NULL, &err)); /* 20 more, 7 at a time */
  CHECK(ds4_session_truncate(live, 50, &err));            /* back, exactly */
  ds4_segment again = {.session = live, .tokens = tokens + 50, .n = 30, .want = DS4_WANT_LAST};
  CHECK(ds4_eval(engine, &again, 1, 0, NULL, NULL, &err));
  CHECK(ds4_session_logits(live, &after, &err));
  CHECK(ds4_session_check(live, &err) || ds4_session_check(fork, &err));
  int same = !memcmp(ds4_logits_data(before), ds4_logits_data(after), 64 * sizeof(float));
  printf("position %u, logits after truncate and eval: %s bits\n", again.pos, same ? "the same" : "OTHER");
  ds4_logits_free(before);
  ds4_logits_free(after);
  ds4_session_free(live);
  ds4_session_free(fork);
  ds4_engine_free(engine);
  return !same;
}
