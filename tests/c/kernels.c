/* The kernels of every instruction set that this processor has, op by op, from one list of cases:
 *
 *   kernels                       bit for bit against backend ref, and ref against double precision
 *   kernels --time [filter]       the same cases at larger sizes: verified first, then G multiply-adds/s and GB/s (weights or rows read) per instruction set
 *           [--threads n]         1 by default
 *
 * Against double precision the error may be twice that of a plain float32 loop over the same numbers, and two bits of the largest number. A NaN or an infinity
 * that is not where it belongs is an error; NaNs may differ in their bits, as processors do. */
#include "kernel_ops.h"

/* ---- the list -------------------------------------------------------------------------------------------------------------------------------------- */

static op_case cases[1024];
static uint32_t n_cases;

static void add(op_case c) {
  if (n_cases == sizeof cases / sizeof *cases) stop("kernels", "there are more cases than room for them");
  cases[n_cases++] = c;
}

static uint32_t small_cols(const struct format *f, uint32_t i) {
  uint32_t block = ds4_format_find(f->format)->block;
  if (f->format == DS4_FP8) return i % 2 ? 128 : 200; /* whole tiles of scales, and not */
  if (f->format == DS4_FP4) return 96;
  return block == 1 ? (i % 2 ? 33 : 130) : block == 256 ? 256 * (1 + i % 2) : 32 * (1 + i % 4);
}

static void list_matmul(bool large) {
  static const uint32_t tokens[] = {1, 2, 3, 4, 5, 7, 8, 9, 17, 33}, rows[] = {37, 1, 16, 72, 15, 17, 33, 48, 50, 31};
  for (size_t f = 0; f < N_FORMATS; f++) {
    op_case c = {.op = &matmul_op, .type = formats[f].format};
    for (uint32_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
      c.n = tokens[i], c.rows = large ? 2048 : rows[i], c.cols = large ? 2048 : small_cols(&formats[f], i);
      add(c);
    }
    if (large) c.n = 128, add(c);
    c.n = 1, c.mapped = true;
    add(c);
    for (uint32_t n = 1; !large && n < 18; n += 8) {
      c = (op_case){.op = &matmul_op, .type = formats[f].format, .n = n, .rows = 40, .cols = small_cols(&formats[f], 1)};
      c.mapped = n == 9;
      c.inputs = EXTREME, add(c);
      c.inputs = ODD, add(c);
    }
    c = (op_case){.op = &embed_op, .type = formats[f].format, .rows = large ? 512 : 37, .cols = large ? 2048 : small_cols(&formats[f], 0)};
    add(c);
  }
}

static void list_vectors(bool large) {
  static const uint32_t widths[] = {1, 15, 16, 17, 64, 131, 576, 2048};
  for (int inputs = PLAIN; inputs <= (large ? PLAIN : ODD); inputs += ODD) {
    add((op_case){.op = &quantize_op, .n = large ? 64 : 7, .cols = large ? 1024 : 192, .inputs = inputs});
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
      add((op_case){.op = &norm_op, .n = large ? 512 : 3, .cols = widths[i], .type = i % 2, .inputs = inputs});
      for (int32_t kind = DS4_SILU; kind <= DS4_SILU_CLAMPED; kind++)
        add((op_case){.op = &glu_op, .cols = large ? widths[i] * 512 : widths[i], .type = kind, .inputs = inputs});
    }
    for (int32_t out = 0; out < 2; out++)
      for (size_t i = 0; i < 6; i++)
        add((op_case){.op = out ? &mix_out_op : &mix_in_op,
                      .type = out,
                      .n = large ? 64 : 3,
                      .streams = i % 2 ? 4 : 2,
                      .cols = widths[i],
                      .inputs = inputs});
  }
}

static void list_attention(bool large) {
  static const struct {
    uint32_t width, values, heads, group, n, segments, at, window, page_rows; /* values 0: one part is key and value */
  } shapes[] = {
      {64, 64, 3, 3, 1, 1, 0, 0, 64},    {64, 64, 3, 3, 1, 1, 1100, 0, 64},    {64, 64, 1, 9, 5, 2, 500, 0, 64},
      {128, 128, 2, 4, 3, 1, 63, 0, 64}, {256, 256, 1, 4, 2, 2, 640, 512, 64}, {72, 40, 2, 1, 17, 1, 3, 0, 64},
      {8, 8, 2, 2, 70, 1, 60, 33, 64},   {16, 20, 1, 7, 9, 3, 20, 5, 8},       {24, 0, 1, 5, 4, 1, 130, 0, 64},
      {40, 0, 2, 2, 9, 2, 12, 7, 8},
  };
  for (uint32_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int32_t type = DS4_KV_F32; type <= DS4_KV_Q8_0; type++)
      for (int inputs = PLAIN; inputs <= (large ? PLAIN : ODD); inputs += ODD) {
        op_case c = {.op = &attend_op,
                     .type = type,
                     .inputs = inputs,
                     .cols = shapes[i].width,
                     .rows = shapes[i].values,
                     .value_part = shapes[i].values != 0,
                     .heads = shapes[i].heads,
                     .group = shapes[i].group,
                     .n = shapes[i].n,
                     .segments = shapes[i].segments,
                     .at = shapes[i].at,
                     .window = shapes[i].window,
                     .page_rows = shapes[i].page_rows};
        if (large) c.n = c.n == 1 ? 1 : 64, c.at = c.at * 2 + 512;
        add(c);
      }
}

static void list_compressed(bool large) {
  static const uint8_t near[] = {DS4_KV_FP8, DS4_KV_F16, DS4_KV_F32, DS4_KV_FP8}, far[] = {DS4_KV_FP8, DS4_KV_F16, DS4_KV_F32, DS4_KV_F16};
  static const int32_t keys[] = {DS4_KV_FP4, DS4_KV_F32, DS4_KV_F16, DS4_KV_Q8_0};
  for (int inputs = PLAIN; inputs <= (large ? PLAIN : ODD); inputs += ODD)
    for (uint32_t i = 0; i < 4; i++) {
      op_case c = {.op = &sparse_op,
                   .inputs = inputs,
                   .type = near[i],
                   .far_type = far[i],
                   .segments = 1 + i % 2,
                   .n = 2 + i,
                   .at = 70 + 100 * i,
                   .window = 128};
      c.cols = large ? 512 : i % 2 ? 72 : 160, c.tail = large ? 64 : 8, c.heads = large ? 64 : i % 2 ? 5 : 18;
      c.far_n = i == 2 ? 0 : large ? 2048 : 530, c.keep = i % 2;
      add(c);
      c = (op_case){
          .op = &pick_op, .type = keys[i], .inputs = PLAIN, .segments = 1 + i % 2, .n = large ? 32 : 3 + 5 * i, .at = large ? 8192 : 600};
      c.cols = large ? 128 : 32 + 32 * i, c.heads = large ? 64 : 5 + i, c.keep = large ? 512 : 64;
      if (inputs == PLAIN) add(c);
      c = (op_case){.op = &compress_op, .inputs = inputs, .ratio = i < 2 ? 4 : 128, .overlap = i % 2, .segments = 2, .n = large ? 32 : 3};
      c.cols = large ? 512 : 17 + 15 * i;
      add(c);
    }
}

static void case_name(const op_case *c, char *to, size_t room) {
  static const char *const inputs[] = {"", " extreme", " not finite"}, *const kinds[] = {"silu", "gelu", "silu clamped"};
  size_t n = (size_t)snprintf(to, room, "%s", c->op->name);
  bool matrix = c->op == &matmul_op || c->op == &embed_op, rows = c->op == &attend_op || c->op == &sparse_op || c->op == &pick_op;
  if (matrix)
    n += (size_t)snprintf(to + n, room - n, " %s %ux%u%s", format_of(c->type)->name, c->rows, c->cols, c->mapped ? " mapped" : "");
  if (c->op == &glu_op) n += (size_t)snprintf(to + n, room - n, " %s", kinds[c->type]);
  if (rows) n += (size_t)snprintf(to + n, room - n, " %s", kv_names[c->type]);
  if (c->op == &sparse_op && c->far_n)
    n += (size_t)snprintf(to + n, room - n, " and %u %s%s", c->far_n, kv_names[c->far_type], c->keep ? " chosen" : "");
  if (!matrix) n += (size_t)snprintf(to + n, room - n, " width %u", c->cols);
  if (c->heads) n += (size_t)snprintf(to + n, room - n, " heads %u", c->heads * (c->group ? c->group : 1));
  if (c->group) n += (size_t)snprintf(to + n, room - n, "/%u", c->heads);
  if (c->ratio) n += (size_t)snprintf(to + n, room - n, " ratio %u%s", c->ratio, c->overlap ? " overlapping" : "");
  if (rows) n += (size_t)snprintf(to + n, room - n, " at %u", c->at);
  if (c->window) n += (size_t)snprintf(to + n, room - n, " window %u", c->window);
  if (c->n) n += (size_t)snprintf(to + n, room - n, " n %u", c->n);
  if (c->segments) n += (size_t)snprintf(to + n, room - n, "x%u", c->segments);
  snprintf(to + n, room - n, "%s", inputs[c->inputs]);
}

/* ---- running it ------------------------------------------------------------------------------------------------------------------------------------- */

static int failed;

static void run(op_case *c, const table *t, float *out) {
  memset(out, 0xff, c->n_out * sizeof *out); /* a number that is not written shows */
  if (c->op->prepare) c->op->prepare(c, t);
  int status = c->op->run(c, t, out);
  if (c->op->done) c->op->done(c, t);
  if (status) stop(t->isa, "an op has failed");
}

static bool same(float a, float b) { return ds4_bits(a) == ds4_bits(b) || (isnan(a) && isnan(b)); }
/* finite, +-infinity or NaN */
static bool same_kind(float a, double b) { return isnan(a) ? isnan(b) : isinf(a) ? isinf(b) && (a > 0) == (b > 0) : isfinite(b); }

static bool same_bits(const char *name, const op_case *c, const table *t, const float *want, const float *got) {
  for (uint64_t i = 0; i < c->n_out; i++)
    if (!same(want[i], got[i])) {
      fprintf(stderr, "%s: %s gives %.9g for number %llu of %llu, ref gives %.9g\n", name, t->isa, (double)got[i], (unsigned long long)i,
              (unsigned long long)c->n_out, (double)want[i]);
      return failed++, false;
    }
  return true;
}

/* `got` against double precision; the yardstick is a plain loop in float32. */
static void check_plain(const char *name, const op_case *c, const float *got) {
  double *exact = get(c->n_out * sizeof *exact), *single = get(c->n_out * sizeof *single), ours = 0, theirs = 0, most = 0;
  c->op->plain(c, false, exact);
  c->op->plain(c, true, single);
  for (uint64_t i = 0; i < c->n_out; i++) {
    if (!same_kind(got[i], exact[i]) && !same_kind(got[i], single[i])) {
      fprintf(stderr, "%s: number %llu is %g, in double precision %g\n", name, (unsigned long long)i, (double)got[i], exact[i]);
      failed++;
      break;
    }
    if (!isfinite(got[i]) || !isfinite(exact[i]) || !isfinite(single[i])) continue;
    ours = fmax(ours, fabs((double)got[i] - exact[i]));
    theirs = fmax(theirs, fabs(single[i] - exact[i]));
    most = fmax(most, fabs(exact[i]));
  }
  if (ours > 2 * theirs + 0x1p-22 * most) {
    fprintf(stderr, "%s: the error is %.3g, that of a plain loop in float32 %.3g, of numbers up to %.3g\n", name, ours, theirs, most);
    failed++;
  }
  free(exact);
  free(single);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* The best of the runs that fit into a fifth of a second. */
static void time_case(op_case *c, const table *t, float *out) {
  double best = INFINITY, end = now() + 0.2;
  if (c->op->prepare) c->op->prepare(c, t);
  do {
    double start = now();
    c->op->run(c, t, out);
    best = fmin(best, now() - start);
  } while (now() < end);
  if (c->op->done) c->op->done(c, t);
  printf("  %s", t->isa);
  if (c->macs > 0) printf(" %.1f G/s", c->macs / best * 1e-9);
  printf(" %.2f GB/s", c->bytes / best * 1e-9);
  fflush(stdout);
}

static void run_case(op_case *c, uint32_t index, bool timing) {
  char name[200];
  case_name(c, name, sizeof name);
  random_state = 88172645463325252u + index;
  c->op->make(c);
  float *want = get(c->n_out * sizeof *want), *got = get(c->n_out * sizeof *got);
  run(c, &tables[0], want);
  if (!timing && c->op->plain) check_plain(name, c, want);
  if (timing) printf("%-60s", name);
  for (int i = 1; i < n_tables; i++) {
    run(c, &tables[i], got);
    if (same_bits(name, c, &tables[i], want, got) && timing) time_case(c, &tables[i], got);
  }
  if (timing) printf("\n");
  void *const made[] = {c->x, c->y, c->z, c->data, c->scales, c->segment, c->pos, c->lo, c->hi, c->count, c->list, want, got};
  for (size_t i = 0; i < sizeof made / sizeof *made; i++) free(made[i]);
}

int main(int argc, char **argv) {
  bool timing = argc > 1 && !strcmp(argv[1], "--time");
  const char *filter = "";
  int32_t threads = timing ? 1 : 2;
  for (int i = 2; i < argc; i++) {
    if (!strcmp(argv[i], "--threads") && i + 1 < argc)
      threads = atoi(argv[++i]);
    else
      filter = argv[i];
  }
  if (argc > 1 && !timing) return fprintf(stderr, "usage: %s [--time [filter] [--threads n]]\n", argv[0]), 2;
  uint32_t mode = ds4_float_mode_set(), ran = 0;
  open_tables(threads);
  list_matmul(timing);
  list_vectors(timing);
  list_attention(timing);
  list_compressed(timing);
  for (uint32_t i = 0; i < n_cases; i++) {
    char name[200];
    case_name(&cases[i], name, sizeof name);
    if (!strstr(name, filter)) continue;
    run_case(&cases[i], i, timing);
    ran++;
  }
  for (int i = 0; i < n_tables; i++) tables[i].ops->close(tables[i].b);
  ds4_float_mode_restore(mode);
  if (!ran) return fprintf(stderr, "no case has '%s' in its name\n", filter), 2;
  if (failed) return fprintf(stderr, "%d of %u cases are wrong\n", failed, ran), 1;
  printf("%u cases: %s\n", ran,
         timing ? "timed where the bits are right" : "every kernel gives the bits of ref, within float32 of double precision");
  return 0;
}
