#include "internal.h"
int ds4_session_save(ds4_session *s, const char *path, ds4_error *err) { (void)s; (void)path; return ds4_fail(err, DS4_EUNSUPPORTED, 0,0,"x"); }
int ds4_session_load(ds4_engine *e, const char *path, uint32_t ctx, ds4_session **out, ds4_error *err){ (void)e; (void)path; (void)ctx;(void)out; return ds4_fail(err, DS4_EUNSUPPORTED, 0,0,"x"); }
