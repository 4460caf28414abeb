/* The kernels for NEON with the dot product of ARMv8.2 (SDOT): four int8 products of a row are one instruction. */
#if defined(__aarch64__)

/* Everything below, inline functions included, is compiled for these instructions; cpu.c calls it only where they are there. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#define NEON_DOT 1
#include "neon.inc.h"

const ds4_kernels ds4_kernels_neon_dot = NEON_TABLE("neon-dot");

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int ds4_no_neon_dot;
#endif
