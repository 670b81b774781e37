/* Linear layers: y = W x for up to any number of columns x, W packed (formats.h).
 *
 * The bits of an output depend on its row of W and its column alone: not on how many columns there are, nor on who
 * computes it, nor on the instruction set. Quantized formats: activations are int8 in groups of 32 with a float scale;
 * products inside a group are integers; groups are added in order by fused multiply-adds. Float formats: one chain of
 * fused multiply-adds over the inputs in order.
 */
#ifndef DRAFTREE_LINEAR_H
#define DRAFTREE_LINEAR_H

#include "formats.h"

/* Columns as layers read them. `values` serves float formats, `groups` (made by quantize) all others. */
typedef struct {
    int count;           /* columns */
    const float *values; /* column c at values + c * stride */
    int64_t stride;
    const uint8_t *groups;
} Activations;

typedef struct {
    /* Quantize groups [first_group, last_group) of `count` columns of `inputs` numbers (a multiple of 32) into
     * `groups`, a buffer of activation_bytes(count, inputs). Ranges may be quantized by different threads. */
    void (*quantize)(const float *values, int64_t stride, int64_t inputs, int count, int64_t first_group,
                     int64_t last_group, uint8_t *groups);

    /* Outputs of tiles [first_tile, last_tile): column c's row r goes to y[c * y_stride + r]. y has room for whole
     * tiles. */
    void (*multiply)(const PackedMatrix *matrix, int64_t first_tile, int64_t last_tile, const Activations *x, float *y,
                     int64_t y_stride);
} LinearKernels;

extern const LinearKernels linear_base, linear_avx2, linear_avx_vnni, linear_avx512, linear_neon;

/* Bytes of quantized activations, the same for every instruction set. */
size_t activation_bytes(int count, int64_t inputs);

/* Whether a layer of this format reads quantized activations. */
int format_is_quantized(int format);

#endif
