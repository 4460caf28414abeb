/* ds4: an embeddable model runtime whose context can be rolled back exactly.
 *
 * This is the one public header. C knows nothing of text or files: the caller brings tensors (pointer, bytes, format, shape) and token ids.
 *
 * Ownership. Every ds4_<noun>_new / _fork / _mark / _logits out-parameter is owned by the caller and ends with its _free. A session keeps
 * its engine alive, a mark does too, so the order of the _free calls is free. Tensor bytes are borrowed: backend "ref" reads them for as long
 * as the engine lives, backend "cpu" copies them into its own layout and has finished with them when ds4_engine_tensor returns; but the
 * experts of deepseek_v4 stay where they are (ds4_engine_info.weight_bytes does not grow) and are read for as long as the engine lives.
 *
 * Errors. Functions that can fail return DS4_OK (0) or a status below and fill *err, which may be NULL. Nothing exits or aborts.
 *
 * Threads. Any function may be called from any thread. A session has one writer at a time: a second one gets DS4_EBUSY. One engine
 * computes one call at a time; further calls wait in order of arrival and may enter between the chunks of a longer one.
 *
 * The contract (K1-K10) is written out in docs/contract.md; kv.c states the invariants that keep it. */
#ifndef DS4_PUBLIC_H
#define DS4_PUBLIC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status codes ---------------------------------------------------------------------------------------------------------------- */

enum ds4_status {
  DS4_OK = 0,
  DS4_EINVAL = 1,       /* an argument is out of range; nothing changed */
  DS4_ENOMEM = 2,       /* the system refused memory */
  DS4_EPOSITION = 3,    /* a position outside 0..pos; a = wanted, b = held */
  DS4_EINEXACT = 4,     /* the state at position a is gone; b = nearest exact position below it */
  DS4_ECTX = 5,         /* more positions than the session's ctx; a = wanted, b = ctx */
  DS4_EPOOL = 6,        /* too few pages; a = bytes needed, b = bytes free */
  DS4_EBUSY = 7,        /* another call is working on this session */
  DS4_EPOISONED = 8,    /* a device failed under this session: only clear, sync and free work on it */
  DS4_ECANCELLED = 9,   /* cancelled by ds4_session_cancel or by the progress callback */
  DS4_ELOGITS = 10,     /* the session holds no valid logits */
  DS4_EIO = 11,         /* the system refused a file operation; a = errno */
  DS4_ECORRUPT = 12,    /* a snapshot is damaged; a = byte offset of the section */
  DS4_EIDENTITY = 13,   /* a snapshot of another model, option, KV dtype or numerics number */
  DS4_EFORKED = 14,     /* the process was forked after the engine was made */
  DS4_EMARK = 15,       /* the mark's position is no longer on the session's timeline */
  DS4_EFAILED = 16,     /* a kernel failed; the chunk was not committed */
  DS4_EDEVICE = 17,     /* a device failed; the sessions of the round are poisoned */
  DS4_ENONFINITE = 18,  /* NaN, or no finite value, where a number is needed; a = index */
  DS4_EUNSUPPORTED = 19 /* an architecture, key, format or option this build does not know, named in the text */
};

typedef struct ds4_error {
  int32_t status;
  int64_t a, b;   /* the two numbers of the message, see above */
  char text[512]; /* one sentence that says what to do next */
} ds4_error;

/* ---- formats --------------------------------------------------------------------------------------------------------------------- */

/* Numbers are those of the GGUF format, so that a loader passes them through. Q*_0, Q*_1, IQ4_NL and MXFP4 have blocks of 32 weights with one scale,
 * Q*_K and IQ2_XXS blocks of 256 weights with an integer scale for every 16 or 32 of them. formats.c has the layouts. */
enum ds4_format {
  DS4_F32 = 0,
  DS4_F16 = 1,
  DS4_Q4_0 = 2,
  DS4_Q4_1 = 3,
  DS4_Q5_0 = 6,
  DS4_Q5_1 = 7,
  DS4_Q8_0 = 8,
  DS4_Q2_K = 10,
  DS4_Q3_K = 11,
  DS4_Q4_K = 12,
  DS4_Q5_K = 13,
  DS4_Q6_K = 14,
  DS4_IQ2_XXS = 16,
  DS4_IQ4_NL = 20,
  DS4_BF16 = 30,
  DS4_MXFP4 = 39,
  DS4_FP8 = 256, /* not in GGUF: E4M3 bytes, and beside them an E8M0 scale for every 128 x 128 weights */
  DS4_FP4 = 257  /* E2M1, the even column low, and an E8M0 scale for every 32 columns of a row */
};

/* Bytes of `rows` x `cols` weights in `format`; DS4_EINVAL when cols is no multiple of the block or the product overflows. */
int ds4_format_bytes(int32_t format, uint64_t rows, uint64_t cols, uint64_t *bytes, ds4_error *err);
/* Dequantise rows of `cols` weights: the definition that every kernel is tested against. */
int ds4_format_dequant(int32_t format, const void *data, uint64_t nbytes, uint64_t rows, uint64_t cols, float *out, ds4_error *err);

/* ---- engine ---------------------------------------------------------------------------------------------------------------------- */

typedef struct ds4_engine ds4_engine;
typedef struct ds4_session ds4_session;
typedef struct ds4_mark ds4_mark;
typedef struct ds4_logits ds4_logits;

/* Step 1: an engine of architecture `arch` ("llama") on backend "ref" or "cpu"; threads 0 = the CPUs this process may use. */
int ds4_engine_new(const char *arch, const char *backend, int32_t threads, ds4_engine **out, ds4_error *err);
/* Step 2: hyperparameters and options as numbers, see docs/embedding.md for the keys of each architecture. An unknown key is refused. */
int ds4_engine_set(ds4_engine *e, const char *key, const double *values, uint64_t n, ds4_error *err);
/* Step 3: one call per tensor; `rows` x `cols` row-major, a vector has rows = 1. Unknown names, wrong shapes and sizes are refused. */
int ds4_engine_tensor(ds4_engine *e, const char *name, int32_t format, uint64_t rows, uint64_t cols, const void *data, uint64_t nbytes,
                      ds4_error *err);
/* The same for FP8 and FP4, whose scales are a tensor of their own: [ceil(rows / 128)][ceil(cols / 128)] or [rows][cols / 32] bytes. */
int ds4_engine_tensor_scaled(ds4_engine *e, const char *name, int32_t format, uint64_t rows, uint64_t cols, const void *data,
                             uint64_t nbytes, const void *scales, uint64_t scale_bytes, ds4_error *err);
/* Step 4: checks that everything is there and makes the page pool. kv_dtype "f32", "f16", "q8_0" or "fp8", as the architecture has it. The pool holds pool_bytes, or
 * pool_tokens when pool_bytes is 0, or half of the memory this process may use when both are 0. identity: 32 bytes that name the weights. */
int ds4_engine_ready(ds4_engine *e, const char *kv_dtype, uint64_t pool_tokens, uint64_t pool_bytes, const uint8_t identity[32],
                     ds4_error *err);
void ds4_engine_free(ds4_engine *e);

typedef struct ds4_engine_info {
  uint32_t vocab, ctx, page_rows, n_streams, n_layers, threads, numerics, reach_slack;
  uint64_t pool_bytes, weight_bytes, token_bytes, mark_bytes; /* token_bytes: KV of one token; mark_bytes: pages one mark may hold */
  char arch[32], backend[16], isa[16], kv_dtype[8];
} ds4_engine_info;
void ds4_engine_get_info(const ds4_engine *e, ds4_engine_info *out);

typedef struct ds4_stream_info {
  char name[24];
  uint32_t n_layers, stride, reach, page_rows; /* reach 0 = unlimited */
  uint64_t row_bytes, page_bytes;              /* of all layers of the stream */
} ds4_stream_info;
int ds4_engine_stream(const ds4_engine *e, uint32_t index, ds4_stream_info *out, ds4_error *err);

/* K7: every number returns to its start value when all sessions, marks and logits are freed; bytes_system may keep free pages. */
typedef struct ds4_ledger {
  uint64_t pages_used, page_refs, bytes_used, bytes_reserved, bytes_budget, bytes_system, auto_mark_bytes, sessions, marks, logits;
} ds4_ledger;
int ds4_engine_ledger(ds4_engine *e, ds4_ledger *out, ds4_error *err);

/* ---- sessions -------------------------------------------------------------------------------------------------------------------- */

/* ctx bounds the positions and reserves nothing; 0 = the model's own. */
int ds4_session_new(ds4_engine *e, uint32_t ctx, ds4_session **out, ds4_error *err);
void ds4_session_free(ds4_session *s); /* cancels a call in progress; that call then frees it at its end */

/* The state diagram is drawn in kv.c. */
enum ds4_state { DS4_EMPTY = 0, DS4_LIVE = 1, DS4_BUSY = 2, DS4_POISONED = 3 };
typedef struct ds4_session_info {
  uint32_t pos, ctx, state, logits_valid, auto_marks, marks;
  uint64_t bytes_held, reserved_pos; /* reserved_pos: appending up to here cannot run out of pages; 0 = nothing reserved */
} ds4_session_info;
int ds4_session_get_info(ds4_session *s, ds4_session_info *out, ds4_error *err);
int ds4_session_tokens(ds4_session *s, uint32_t first, uint32_t n, int32_t *out, ds4_error *err);
/* The rows of one stream as bytes, `n` rows from row `first`, in the order layer, row, part, head: what K1 is about. */
int ds4_session_rows(ds4_session *s, uint32_t stream, uint32_t first, uint32_t n, void *out, uint64_t nbytes, ds4_error *err);
/* Recomputes everything that the session and the pool claim about themselves; DS4_EINVAL names the first invariant that does not hold. */
int ds4_session_check(ds4_session *s, ds4_error *err);

/* ---- evaluation ------------------------------------------------------------------------------------------------------------------ */

/* Called by the thread that made the call, between ops and inside long ones, at least every 50 ms. Non-zero cancels. It must not compute on the same
 * engine: such a call gets DS4_EBUSY. */
typedef int (*ds4_progress)(void *user, uint64_t done, uint64_t total);

enum ds4_want {
  DS4_WANT_NONE = 0,
  DS4_WANT_LAST = 1,  /* the session's logits */
  DS4_WANT_ALL = 2,   /* also out[n][vocab] */
  DS4_WANT_SCORE = 3, /* also out[n]: log-probability of each token, given all before it; 0 for the first of an empty session */
  DS4_WANT_DRAFT = 4  /* out[n][vocab]: what the MTP block (setting mtp) says of the next token, from the state one token before; zeros at
                         position 0. No session logits */
};
typedef struct ds4_segment {
  ds4_session *session;
  const int32_t *tokens;
  uint32_t n;
  int32_t want;
  float *out;
  uint32_t pos; /* out: the session's position when the call returned, also after an error */
} ds4_segment;

/* K6: appends whole chunks of at most `chunk` tokens (0 = 512) over all segments; the bits do not depend on it. Arguments, ctx, pages, BUSY and
 * POISONED are checked for all segments first. After an error the sessions stand at the last round that was completed. */
int ds4_eval(ds4_engine *e, ds4_segment *segments, uint32_t n, uint32_t chunk, ds4_progress progress, void *user, ds4_error *err);

typedef struct ds4_synced {
  uint32_t reused, evaluated;
} ds4_synced;
/* Makes the session hold exactly these tokens: keeps the longest exact prefix, evaluates the rest. Logits are valid afterwards (n > 0). */
int ds4_session_sync(ds4_session *s, const int32_t *tokens, uint32_t n, uint32_t chunk, ds4_progress progress, void *user, ds4_synced *out,
                     ds4_error *err);
/* Evaluates the last token again when the logits are not valid. DS4_ELOGITS on an empty session. */
int ds4_session_refresh(ds4_session *s, ds4_progress progress, void *user, ds4_error *err);
/* Ends the call in progress on this session; does nothing when there is none. */
void ds4_session_cancel(ds4_session *s);

/* Counted and read-only: the floats stay as they are until the last _free. An engine keeps up to 16 freed buffers for the logits to come. */
int ds4_session_logits(ds4_session *s, ds4_logits **out, ds4_error *err);
const float *ds4_logits_data(const ds4_logits *l);
void ds4_logits_free(ds4_logits *l);

/* ---- moving the context ---------------------------------------------------------------------------------------------------------- */

int ds4_session_truncate(ds4_session *s, int64_t pos, ds4_error *err);
/* The largest q <= pos that truncate and fork accept. */
int ds4_session_nearest_exact(ds4_session *s, int64_t pos, uint32_t *out, ds4_error *err);
#define DS4_HERE INT64_MIN /* fork: where the session stands, with its logits, also where no other position is exact */
int ds4_session_fork(ds4_session *s, int64_t pos, ds4_session **out, ds4_error *err);
int ds4_session_clear(ds4_session *s, ds4_error *err);
/* Sets pages aside so that `tokens` more positions cannot run out of them, also after truncate and rollback; 0 gives them back. */
int ds4_session_reserve(ds4_session *s, uint32_t tokens, ds4_error *err);

int ds4_session_mark(ds4_session *s, ds4_mark **out, ds4_error *err);
/* An automatic mark here, without a handle. `pinned`: goes last when room is short (the end of a system prompt). */
int ds4_session_mark_auto(ds4_session *s, int32_t pinned, ds4_error *err);
int ds4_session_rollback(ds4_session *s, ds4_mark *m, ds4_error *err);
int ds4_mark_pos(ds4_mark *m, uint32_t *pos, ds4_error *err); /* DS4_EMARK when it is dead */
void ds4_mark_free(ds4_mark *m);

/* ---- snapshots (byte layout: docs/snapshot.md) --------------------------------------------------------------------------------------- */

int ds4_session_save(ds4_session *s, const char *path, ds4_error *err);
int ds4_session_load(ds4_engine *e, const char *path, uint32_t ctx, ds4_session **out, ds4_error *err);

/* ---- sampling -------------------------------------------------------------------------------------------------------------------- */

typedef struct ds4_sampling {
  float temperature; /* 0 = greedy */
  float top_p, min_p, repetition, presence, frequency;
  int32_t top_k;                        /* 0 = all */
  int32_t n_history, n_bias, n_allowed; /* n_allowed -1 = every token */
  const int32_t *history;               /* the tokens that the penalties count */
  const int32_t *bias_ids;
  const float *bias;
  const int32_t *allowed;
  uint64_t seed, position; /* K10: the random number is a function of these two */
  void *scratch;           /* optional, as aligned as malloc's: with 20 bytes a token of the vocabulary no memory is taken */
  uint64_t scratch_bytes;
} ds4_sampling;
typedef struct ds4_sampled {
  int32_t id;
  float logprob; /* under the model's own distribution, before penalties and filters */
} ds4_sampled;
int ds4_sample(const float *logits, uint32_t vocab, const ds4_sampling *options, ds4_sampled *out, ds4_error *err);
/* Philox4x32-10, the first word, as a float in [0, 1). */
float ds4_random(uint64_t seed, uint64_t position);

/* ---- this process ------------------------------------------------------------------------------------------------------------------ */

/* What this process may use: the affinity mask bounded by the quotas of its control groups, rounded up; the least of the machine's memory,
 * the limits of its control groups and its own. At most 256 CPUs are counted: no engine has more threads. */
uint32_t ds4_usable_cpus(void);
uint64_t ds4_usable_memory(void);

/* ---- profile ----------------------------------------------------------------------------------------------------------------------- */

/* One kind of work: an op with the format of its weights or rows, or "between ops" (rounds; `rows` counts tokens), "session" (calls outside
 * their rounds), "between calls". */
typedef struct ds4_profile_entry {
  char op[16], format[32];
  uint32_t many;                         /* 0: rounds of one token, 1: rounds of several */
  uint64_t calls, ns, bytes, macs, rows; /* weights and rows read or written; multiply-adds; rows read or written, once per token */
} ds4_profile_entry;
enum ds4_profile_do { DS4_PROFILE_READ = 0, DS4_PROFILE_START = 1, DS4_PROFILE_STOP = 2 };
/* Fills out[0..cap) with what was counted and *n with how many entries there are, then starts (from zero) or stops. DS4_EBUSY during a call. With
 * DS4_PROFILE=1 in the environment it runs from ds4_engine_ready on and a table goes to stderr when the engine ends. It never changes a bit. */
int ds4_engine_profile(ds4_engine *e, int32_t what, ds4_profile_entry *out, uint32_t cap, uint32_t *n, ds4_error *err);

/* ---- test builds (-DDS4_TEST) ---------------------------------------------------------------------------------------------------- */

enum ds4_fault { DS4_FAULT_ALLOC = 0, DS4_FAULT_READ = 1, DS4_FAULT_WRITE = 2, DS4_FAULT_KERNEL = 3, DS4_FAULT_DEVICE = 4 };
/* The floats that the next rounds compute inside are appended to out[n], in the order that the architecture's source gives. Returns how many
 * floats were written since the last call. */
uint64_t ds4_engine_trace(ds4_engine *e, float *out, uint64_t n);
/* 1 when failure injection, NaN poisoning and the toy streams are compiled in. */
int ds4_test_build(void);
/* Makes the k-th operation of this kind from now on fail once (k from 1; 0 = off). Returns how many were seen since the last call. */
uint64_t ds4_engine_fault(ds4_engine *e, int32_t kind, uint64_t k);

#ifdef __cplusplus
}
#endif
#endif
