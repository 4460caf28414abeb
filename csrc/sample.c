/* Sampling: logits and options in, one token id out. No state: the same arguments give the same token on every machine,
 * because exp is our own polynomial and every sum has a fixed order. libm computes one logarithm, for the reported
 * log-probability only.
 *
 * The steps, in this order: allowed ids, bias, penalties | greedy | temperature, top-k, top-p, min-p, draw.
 *
 * Nothing is sorted. Of the order "descending by logit, equal ones by ascending id" top-k, top-p and the draw ask one
 * question only: at which candidate do the ones so far reach this count, or this mass? A radix descent over the bits of
 * the logits answers it in a few passes, whatever the logits are. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* Below this one step between float32 logits of about 10 is a factor of e: the limit, greedy, is what is meant. */
#define GREEDY_BELOW 1e-6f
/* Lighter candidates, e^-46 of the best, are left out: even 2^31 of them have together less than 2^-24 of the mass, the
 * step of the random number, and they stand at the end of the order. They could never be drawn. */
#define LIGHTEST (-46.0)
#define LIGHTEST_WEIGHT 1.1e-20 /* a little more than e^-46 */
#define LANES 8
#define BLOCK 256

typedef struct candidate {
  double weight;  /* e^((logit - max) / temperature): 1 for the best */
  uint64_t order; /* larger comes first. High half: the logit's key, unsigned order = float order; low half: ~id */
} candidate;

typedef struct peak {
  float max;
  uint32_t at; /* lowest index that holds max */
} peak;

/* ---- random numbers ---------------------------------------------------------------------------------------------- */

/* Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
 * Key: seed; counter: position. */
float ds4_random(uint64_t seed, uint64_t position) {
  uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
  uint32_t c0 = (uint32_t)position, c1 = (uint32_t)(position >> 32), c2 = 0, c3 = 0;
  for (int round = 0; round < 10; round++) {
    uint64_t a = 0xD2511F53ull * c0, b = 0xCD9E8D57ull * c2;
    c0 = (uint32_t)(b >> 32) ^ c1 ^ key0;
    c1 = (uint32_t)b;
    c2 = (uint32_t)(a >> 32) ^ c3 ^ key1;
    c3 = (uint32_t)a;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return (float)(c0 >> 8) * 0x1p-24f;
}

/* ---- options ----------------------------------------------------------------------------------------------------- */

static int check_ids(const char *name, const int32_t *ids, int32_t n, uint32_t vocab, ds4_error *err) {
  if (n < 0) return ds4_fail(err, DS4_EINVAL, n, 0, "%s has a count of %d; give 0 or more", name, n);
  if (n > 0 && !ids) return ds4_fail(err, DS4_EINVAL, n, 0, "%s is NULL; give its %d token ids", name, n);
  for (int32_t i = 0; i < n; i++)
    if ((uint32_t)ids[i] >= vocab)
      return ds4_fail(err, DS4_EINVAL, ids[i], vocab, "%s[%d] is token %d; the model has tokens 0 to %u", name, i, ids[i], vocab - 1);
  return DS4_OK;
}

static int check_numbers(const ds4_sampling *o, ds4_error *err) {
  if (!(o->temperature >= 0 && o->temperature <= FLT_MAX))
    return ds4_fail(err, DS4_EINVAL, 0, 0, "temperature is %g; give 0 (greedy) or a positive finite number", (double)o->temperature);
  if (o->top_k < 0) return ds4_fail(err, DS4_EINVAL, o->top_k, 0, "top_k is %d; give 0 (all) or a count", o->top_k);
  if (!(o->top_p > 0 && o->top_p <= 1))
    return ds4_fail(err, DS4_EINVAL, 0, 0, "top_p is %g; give a number above 0 and up to 1 (all)", (double)o->top_p);
  if (!(o->min_p >= 0 && o->min_p < 1))
    return ds4_fail(err, DS4_EINVAL, 0, 0, "min_p is %g; give a number from 0 (all) to below 1", (double)o->min_p);
  if (!(o->repetition > 0 && o->repetition <= FLT_MAX))
    return ds4_fail(err, DS4_EINVAL, 0, 0, "repetition is %g; give 1 (off) or another positive finite number", (double)o->repetition);
  if (!isfinite(o->presence))
    return ds4_fail(err, DS4_EINVAL, 0, 0, "presence is %g; give 0 (off) or a finite number", (double)o->presence);
  if (!isfinite(o->frequency))
    return ds4_fail(err, DS4_EINVAL, 0, 0, "frequency is %g; give 0 (off) or a finite number", (double)o->frequency);
  return DS4_OK;
}

static int check_options(const float *logits, uint32_t vocab, const ds4_sampling *o, ds4_error *err) {
  if (!logits || !o) return ds4_fail(err, DS4_EINVAL, 0, 0, "logits and options must not be NULL");
  if (vocab == 0 || vocab > INT32_MAX)
    return ds4_fail(err, DS4_EINVAL, vocab, 0, "vocab is %u; give the number of logits, 1 to 2147483647", vocab);
  int status = check_numbers(o, err);
  if (!status) status = check_ids("history", o->history, o->n_history, vocab, err);
  if (!status) status = check_ids("bias_ids", o->bias_ids, o->n_bias, vocab, err);
  if (!status && o->n_bias > 0 && !o->bias)
    status = ds4_fail(err, DS4_EINVAL, o->n_bias, 0, "bias is NULL; give its %d numbers", o->n_bias);
  for (int32_t i = 0; !status && i < o->n_bias; i++)
    if (!(o->bias[i] <= FLT_MAX)) /* -inf is welcome: it bans a token */
      status = ds4_fail(err, DS4_EINVAL, o->bias_ids[i], 0, "the bias of token %d is %g; give a finite number, or -inf to ban it",
                        o->bias_ids[i], (double)o->bias[i]);
  if (!status && (o->n_allowed == 0 || o->n_allowed < -1))
    status = ds4_fail(err, DS4_EINVAL, o->n_allowed, 0, "n_allowed is %d: no token is allowed; allow one or more, or give -1 for all",
                      o->n_allowed);
  if (!status && o->n_allowed > 0) status = check_ids("allowed", o->allowed, o->n_allowed, vocab, err);
  return status;
}

static bool penalised(const ds4_sampling *o) { return o->n_history > 0 && (o->repetition != 1 || o->presence != 0 || o->frequency != 0); }

/* ---- arithmetic -------------------------------------------------------------------------------------------------- */

/* The largest value and where it first stands. False: NaN or +inf at out->at, or nothing finite (out->max is -inf). */
static bool find_peak(const float *x, uint32_t n, peak *out) {
  float max[LANES];
  uint32_t bad[LANES] = {0}, any = 0, i = 0;
  for (int l = 0; l < LANES; l++) max[l] = -INFINITY;
  for (; n - i >= LANES; i += LANES)
    for (int l = 0; l < LANES; l++) {
      bad[l] |= !(x[i + l] <= FLT_MAX);
      max[l] = x[i + l] > max[l] ? x[i + l] : max[l];
    }
  for (; i < n; i++) {
    bad[0] |= !(x[i] <= FLT_MAX);
    max[0] = x[i] > max[0] ? x[i] : max[0];
  }
  for (int l = 0; l < LANES; l++) {
    any |= bad[l];
    max[0] = max[l] > max[0] ? max[l] : max[0];
  }
  out->max = max[0];
  for (out->at = 0; any ? x[out->at] <= FLT_MAX : x[out->at] != max[0];) out->at++;
  return !any && max[0] >= -FLT_MAX;
}

/* e^x for LIGHTEST <= x <= 0. Relative error below 1e-12. */
static inline __attribute__((always_inline)) double exp_negative(double x) {
  const double round = 0x1.8p52; /* adding it leaves the nearest integer in the low bits */
  double shifted = x * 1.4426950408889634 + round, k = shifted - round;
  double r = x - k * 0x1.62e42fefap-1 - k * 0x1.cf79abc9e3b3ap-40; /* ln 2 in two parts: |r| <= ln 2 / 2 */
  double p = 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1;
  p = p * r + 1;
  uint64_t bits, exponent;
  memcpy(&bits, &p, sizeof bits);
  memcpy(&exponent, &shifted, sizeof exponent);
  bits += exponent << 52; /* times 2^k */
  memcpy(&p, &bits, sizeof p);
  return p;
}

/* out[i] = e^((x[i] - max) * scale), but at least e^LIGHTEST: no sum feels the difference. Two loops without branches,
 * so that compilers make vectors of them: wider ones where the processor has them, with the same bits. */
static inline __attribute__((always_inline)) void weigh_block(const float *x, uint32_t n, double max, double scale, double *out) {
  for (uint32_t i = 0; i < n; i++) {
    double v = ((double)x[i] - max) * scale;
    out[i] = v > LIGHTEST ? v : LIGHTEST;
  }
  for (uint32_t i = 0; i < n; i++) out[i] = exp_negative(out[i]);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void weigh_avx2(const float *x, uint32_t n, double max, double scale, double *out) {
  weigh_block(x, n, max, scale, out);
}
#endif

static void weigh(const float *x, uint32_t n, double max, double scale, double *out) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) {
    weigh_avx2(x, n, max, scale, out);
    return;
  }
#endif
  weigh_block(x, n, max, scale, out);
}

/* log of the sum of e^(x[i] - max). */
static double log_sum(const float *x, uint32_t n, double max) {
  double sum[LANES] = {0}, weight[BLOCK];
  for (uint32_t i = 0, m; i < n; i += m) {
    m = ds4_min_u32(BLOCK, n - i);
    weigh(x + i, m, max, 1, weight);
    uint32_t j = 0;
    for (; m - j >= LANES; j += LANES)
      for (int l = 0; l < LANES; l++) sum[l] += weight[j + l];
    for (; j < m; j++) sum[0] += weight[j];
  }
  for (int l = 1; l < LANES; l++) sum[0] += sum[l];
  return log(sum[0]);
}

/* ---- the steps --------------------------------------------------------------------------------------------------- */

/* Back to float; what is too large stays finite, -inf (banned) stays -inf. */
static float narrow(double x) {
  if (x > FLT_MAX) return FLT_MAX;
  if (x < -FLT_MAX) return isinf(x) ? -INFINITY : -FLT_MAX;
  return (float)x;
}

/* x[vocab] = the logits after allowed, bias and penalties; count[vocab] is scratch.
 * Repetition: Keskar et al. 2019, "CTRL", section 4.1; presence and frequency: subtracted, once and per occurrence. */
static void adjust(const float *logits, uint32_t vocab, const ds4_sampling *o, float *x, int32_t *count) {
  if (o->n_allowed < 0)
    memcpy(x, logits, vocab * sizeof *x);
  else {
    for (uint32_t i = 0; i < vocab; i++) x[i] = -INFINITY;
    for (int32_t i = 0; i < o->n_allowed; i++) x[o->allowed[i]] = logits[o->allowed[i]];
  }
  for (int32_t i = 0; i < o->n_bias; i++) x[o->bias_ids[i]] = narrow((double)x[o->bias_ids[i]] + o->bias[i]);
  if (!penalised(o)) return;
  memset(count, 0, vocab * sizeof *count);
  for (int32_t i = 0; i < o->n_history; i++) count[o->history[i]]++;
  for (int32_t i = 0; i < o->n_history; i++) {
    int32_t id = o->history[i];
    if (count[id] == 0) continue; /* done at an earlier occurrence */
    double v = x[id];
    v = v > 0 ? v / o->repetition : v * o->repetition;
    x[id] = narrow(v - o->presence - (double)o->frequency * count[id]);
    count[id] = 0;
  }
}

/* Fills c[] in ascending order of id; returns how many. */
static uint32_t gather(const float *x, uint32_t vocab, double max, double scale, candidate *c) {
  uint32_t n = 0;
  double weight[BLOCK];
  for (uint32_t i = 0, m; i < vocab; i += m) {
    m = ds4_min_u32(BLOCK, vocab - i);
    weigh(x + i, m, max, scale, weight);
    for (uint32_t j = 0; j < m; j++) {
      float value = x[i + j] + 0.0f; /* -0 becomes +0: they are a tie */
      uint32_t bits;
      memcpy(&bits, &value, sizeof bits);
      c[n].weight = weight[j];
      uint32_t key = bits ^ (-(bits >> 31) | 0x80000000u); /* without a branch: signs are hard to predict */
      c[n].order = (uint64_t)key << 32 | (uint32_t)~(i + j);
      n += weight[j] > LIGHTEST_WEIGHT;
    }
  }
  return n;
}

static double mass_of(const candidate *c, uint32_t n) {
  double sum[LANES] = {0};
  uint32_t i = 0;
  for (; n - i >= LANES; i += LANES)
    for (int l = 0; l < LANES; l++) sum[l] += c[i + l].weight;
  for (; i < n; i++) sum[0] += c[i].weight;
  for (int l = 1; l < LANES; l++) sum[0] += sum[l];
  return sum[0];
}

/* In descending order of logit, equal ones by ascending id: the index of the first candidate at which `count` of them,
 * or `mass`, are reached; the last one when rounding keeps the mass out of reach. Three levels of the key's bits, then
 * the candidates of one key. n >= 1. */
static uint32_t reach(const candidate *c, uint32_t n, uint32_t count, double mass) {
  static const uint8_t shifts[3] = {53, 42, 32}, widths[3] = {11, 11, 10};
  uint32_t key = 0, seen = 0, last = 0;
  double sum = 0;
  for (int level = 0; level < 3; level++) {
    uint32_t counts[2048] = {0}, mask = (1u << widths[level]) - 1, bin = 0, seen_before = 0;
    double masses[2048] = {0}, sum_before = 0;
    for (uint32_t i = 0; i < n; i++) {
      uint64_t k = c[i].order >> shifts[level];
      if (k >> widths[level] != key) continue;
      counts[k & mask]++;
      masses[k & mask] += c[i].weight;
    }
    for (uint32_t b = mask + 1; b-- > 0;) {
      if (counts[b] == 0) continue;
      bin = b, seen_before = seen, sum_before = sum;
      seen += counts[b], sum += masses[b];
      if (seen >= count || sum >= mass) break;
    }
    key = key << widths[level] | bin, seen = seen_before, sum = sum_before;
  }
  for (uint32_t i = 0; i < n; i++) {
    if (c[i].order >> 32 != key) continue;
    last = i, sum += c[i].weight;
    if (++seen >= count || sum >= mass) break;
  }
  return last;
}

/* Drops what stands behind c[last] in the order of reach(); returns how many are left. */
static uint32_t keep_until(candidate *c, uint32_t n, uint32_t last) {
  uint32_t m = 0;
  const uint64_t order = c[last].order;
  for (uint32_t i = 0; i < n; i++)
    if (c[i].order >= order) c[m++] = c[i];
  return m;
}

/* Filters and draws; n >= 1. The best candidate has weight 1, so min_p compares with weights. */
static int32_t draw(candidate *c, uint32_t n, const ds4_sampling *o) {
  if (o->top_k > 0 && (uint32_t)o->top_k < n) n = keep_until(c, n, reach(c, n, (uint32_t)o->top_k, INFINITY));
  if (o->top_p < 1) n = keep_until(c, n, reach(c, n, n, o->top_p * mass_of(c, n)));
  if (o->min_p > 0) {
    uint32_t m = 0;
    for (uint32_t i = 0; i < n; i++)
      if (c[i].weight >= o->min_p) c[m++] = c[i];
    n = m;
  }
  double target = ds4_random(o->seed, o->position) * mass_of(c, n);
  uint32_t chosen = reach(c, n, n, nextafter(target, INFINITY)); /* the first one above the target */
  return (int32_t)~(uint32_t)c[chosen].order;
}

static int fail_logits(const float *logits, uint32_t vocab, uint32_t at, ds4_error *err) {
  const char *what = isnan(logits[at]) ? "is NaN" : logits[at] > 0 ? "is infinite" : "and all others are -inf";
  return ds4_fail(err, DS4_ENONFINITE, at, vocab, "logit %u of %u %s; the weights or their evaluation are broken", at, vocab, what);
}

static int sample(const float *logits, uint32_t vocab, const ds4_sampling *o, ds4_sampled *out, ds4_error *err) {
  peak raw;
  if (!find_peak(logits, vocab, &raw)) return fail_logits(logits, vocab, raw.at, err);
  bool greedy = o->temperature < GREEDY_BELOW || o->top_k == 1;
  bool plain = o->n_allowed < 0 && o->n_bias == 0 && !penalised(o);
  peak best = raw;
  const float *x = logits;
  void *scratch = NULL; /* counts, later candidates; behind them the adjusted logits */
  if (!greedy || !plain) {
    uint64_t first = vocab * (uint64_t)(greedy ? sizeof(int32_t) : sizeof(candidate));
    uint64_t bytes = first + (plain ? 0 : vocab * (uint64_t)sizeof(float));
    if (bytes > SIZE_MAX || !(scratch = o->scratch && o->scratch_bytes >= bytes ? o->scratch : malloc((size_t)bytes)))
      return ds4_fail(err, DS4_ENOMEM, (int64_t)bytes, 0, "no memory for sampling, %llu bytes; free some and try again",
                      (unsigned long long)bytes);
    if (!plain) {
      float *adjusted = (float *)((char *)scratch + first);
      adjust(logits, vocab, o, adjusted, scratch);
      x = adjusted;
    }
  }
  int status = DS4_OK;
  if (plain || find_peak(x, vocab, &best)) {
    out->id = (int32_t)best.at;
    if (!greedy) out->id = draw(scratch, gather(x, vocab, best.max, 1.0 / o->temperature, scratch), o);
    out->logprob = narrow((double)logits[out->id] - raw.max - log_sum(logits, vocab, raw.max));
  } else {
    status = ds4_fail(err, DS4_ENONFINITE, best.at, vocab,
                      "every token that allowed and bias leave has the logit -inf; allow others, or ban fewer");
  }
  if (scratch != o->scratch) free(scratch);
  return status;
}

int ds4_sample(const float *logits, uint32_t vocab, const ds4_sampling *options, ds4_sampled *out, ds4_error *err) {
  int status = check_options(logits, vocab, options, err);
  if (status) return status;
  if (!out) return ds4_fail(err, DS4_EINVAL, 0, 0, "out must not be NULL");
  uint32_t mode = ds4_float_mode_set();
  status = sample(logits, vocab, options, out, err);
  ds4_float_mode_restore(mode);
  return status;
}
