/* Ops on the vectors of one token that are cheap enough to be plain C in every CPU backend. */
#ifndef DS4_TOKEN_H
#define DS4_TOKEN_H

#include "../internal.h"

/* All but the tail of x as an fp8 row gives it back: E4M3 in blocks. */
void ds4_token_round_fp8(float *x, uint32_t width, uint32_t tail);
/* Hadamard transform / sqrt(width), then as an fp4 row gives it back; width is a power of two. */
void ds4_token_round_fp4(float *x, uint32_t width);
/* Rotates the last `tail` numbers of x in interleaved pairs; cs is the position's row of the table; sign -1: by the negative angle. */
void ds4_token_rope_tail(float *x, uint32_t heads, uint32_t width, uint32_t tail, const float *cs, float sign);
/* The products of hyper-connections into weights, see ds4_ops.mix_weights. */
void ds4_token_mix_weights(float *m, const float *scale, const float *base, uint32_t k, uint32_t streams, uint32_t iterations, float eps);
/* The `keep` largest of n scores, ties to the lowest index, as ascending indices; n > keep. A NaN counts as the smallest. */
void ds4_top_rows(const float *score, uint32_t n, uint32_t keep, uint32_t *list);

#endif
