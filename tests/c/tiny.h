/* A Llama of one layer with made-up weights, for the C tests. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ds4.h"

#define VOCAB 64

static float weights[64 * 64];

static void die(const char *what, const ds4_error *err) {
  fprintf(stderr, "%s: %s\n", what, err->text);
  exit(1);
}

static ds4_engine *tiny_engine(int32_t threads) {
  static const char *const names[] = {"embed",         "norm",        "layers.0.attn_norm", "layers.0.q",
                                      "layers.0.k",    "layers.0.v",  "layers.0.o",         "layers.0.ffn_norm",
                                      "layers.0.gate", "layers.0.up", "layers.0.down"};
  static const uint64_t shapes[][2] = {{64, 32}, {1, 32}, {1, 32},  {32, 32}, {16, 32}, {16, 32},
                                       {32, 32}, {1, 32}, {64, 32}, {64, 32}, {32, 64}};
  static const char *const keys[] = {"n_layers", "vocab",   "ctx",      "dim",       "n_heads",         "n_kv_heads",
                                     "head_dim", "ffn_dim", "norm_eps", "rope_base", "rope_interleaved"};
  static const double values[] = {1, VOCAB, 512, 32, 4, 2, 8, 64, 1e-5, 10000, 0};
  const uint8_t identity[32] = "tiny";
  ds4_engine *engine;
  ds4_error err;
  for (int i = 0; i < 64 * 64; i++) weights[i] = (float)((i * 7919) % 199 - 99) / 512.0f; /* exact in every rounding mode */
  if (ds4_engine_new("llama", "cpu", threads, &engine, &err)) die("new", &err);
  for (size_t i = 0; i < sizeof values / sizeof *values; i++)
    if (ds4_engine_set(engine, keys[i], &values[i], 1, &err)) die(keys[i], &err);
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    if (ds4_engine_tensor(engine, names[i], DS4_F32, shapes[i][0], shapes[i][1], weights, shapes[i][0] * shapes[i][1] * 4, &err))
      die(names[i], &err);
  if (ds4_engine_ready(engine, "f16", 16384, 0, identity, &err)) die("ready", &err);
  return engine;
}
