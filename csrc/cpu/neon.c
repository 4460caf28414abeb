/* The kernels for plain NEON, which every 64-bit ARM processor has: products of int8 widen to 16 bits. */
#if defined(__aarch64__)

#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#define NEON_DOT 0
#include "neon.inc.h"

const ds4_kernels ds4_kernels_neon = NEON_TABLE("neon-plain");

#if defined(__linux__)
bool ds4_neon_has_dot(void) { return (getauxval(AT_HWCAP) & 1ul << 20) != 0; } /* HWCAP_ASIMDDP */
#elif defined(__APPLE__)
bool ds4_neon_has_dot(void) {
  int found = 0;
  size_t size = sizeof found;
  return !sysctlbyname("hw.optional.arm.FEAT_DotProd", &found, &size, NULL, 0) && found;
}
#else
bool ds4_neon_has_dot(void) { return false; }
#endif

#else
typedef int ds4_no_neon;
#endif
