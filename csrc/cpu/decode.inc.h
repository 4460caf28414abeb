/* Codes of packed weights, in GNU vectors of VB_ROWS output rows. Included by one file per instruction set, which defines before:
 *
 *   VB_ROWS              rows of a vector: 4, 8 or 16; a lane holds four bytes, or an int32, or a float
 *   VI_BYTES(p)          VB_ROWS signed bytes as int32 lanes
 *   VB_TABLE(p)          16 bytes as a table for VB_LOOKUP(table, vb), which looks up every byte (all below 16) */

#define INLINE static inline __attribute__((always_inline))
#if defined(UNROLL) /* the file has its own mind */
#elif defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

#define VB_BYTES (4 * VB_ROWS)
#define PIECES (DS4_LANES / VB_ROWS) /* vectors of a group */
typedef uint8_t vb __attribute__((vector_size(VB_BYTES)));
typedef uint16_t vh __attribute__((vector_size(VB_BYTES)));
typedef int32_t vi __attribute__((vector_size(VB_BYTES)));
typedef float vq __attribute__((vector_size(VB_BYTES)));

INLINE vb vb_load(const uint8_t *p) {
  vb v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE vi vi_bytes(const uint8_t *p) { return VI_BYTES(p); }

/* Step `j` of a plane of `bits` bits, moved to bit `at` of each byte; shifts are by 16 bits, the mask takes away what crosses over. */
INLINE vb plane_step(const uint8_t *plane, const int bits, const int j, const int at) {
  vh v = (vh)vb_load(plane + 64 * (j % bits));
  int shift = at - j / bits * bits;
  v = shift > 0 ? v << shift : v >> -shift;
  return (vb)v & (uint8_t)(((1 << bits) - 1) << at);
}

/* Is a code, or the value of a table, a number that needs all eight bits? */
INLINE bool is_wide(ds4_shape f) { return f.table || f.low == 8; }

/* Weights 4 j .. 4 j + 3 of a body: codes; of a wide format the values, as signed bytes ^ `bias`. */
INLINE vb quant_step(int32_t format, const uint8_t *body, const int j, const uint8_t bias) {
  const ds4_shape f = ds4_shape_of(format);
  if (f.low == 8) return vb_load(body + 64 * j) ^ bias;
  vb v = plane_step(body, (int)f.low, j, 0);
  if (f.high) v |= plane_step(body + 64 * f.low, (int)f.high, j, (int)f.low);
  return f.table ? VB_LOOKUP(VB_TABLE(f.table) ^ bias, v) : v;
}
