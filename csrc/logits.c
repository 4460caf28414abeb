/* Rows of logits: counted, and read-only once they are handed out (K5). */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* Buffers are large, and every token needs a new one: the engine keeps some that nobody holds. Their floats are whatever they were. */
ds4_logits *ds4_logits_new(ds4_engine *e) {
  ds4_logits *l = NULL;
  for (uint32_t i = 0; !l && i < DS4_SPARE_LOGITS; i++) l = atomic_exchange(&e->spare_logits[i], NULL);
  if (!l) l = ds4_alloc(e, sizeof *l + (uint64_t)e->vocab * sizeof(float));
  if (!l) return NULL;
  l->engine = e;
  atomic_store(&l->refs, 1);
  atomic_fetch_add(&e->live_logits, 1);
  ds4_engine_hold(e);
  return l;
}

void ds4_logits_free(ds4_logits *l) {
  if (!l || atomic_fetch_sub(&l->refs, 1) > 1) return;
  ds4_engine *e = l->engine;
#ifdef DS4_TEST
  memset(l->data, 0xff, e->vocab * sizeof *l->data); /* whoever still reads them finds NaN */
#endif
  for (uint32_t i = 0; l && i < DS4_SPARE_LOGITS; i++) {
    ds4_logits *none = NULL;
    if (atomic_compare_exchange_strong(&e->spare_logits[i], &none, l)) l = NULL;
  }
  free(l);
  atomic_fetch_sub(&e->live_logits, 1);
  ds4_engine_release(e);
}

const float *ds4_logits_data(const ds4_logits *l) { return l->data; }

int ds4_session_logits(ds4_session *s, ds4_logits **out, ds4_error *err) {
  *out = NULL;
  int status = ds4_enter(s->engine, err);
  if (status) return status;
  status = ds4_kv_legal(s, err);
  if (!status && !s->logits)
    status = ds4_fail(err, DS4_ELOGITS, s->pos, 0, "the session holds no valid logits at position %u; evaluate a token, sync, or refresh",
                      s->pos);
  if (!status) {
    atomic_fetch_add(&s->logits->refs, 1);
    *out = s->logits;
  }
  ds4_leave(s->engine);
  return status;
}
