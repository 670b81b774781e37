/* What all instruction sets share around their kernels: the walk over tiles, columns and activations.
 *
 * A tier is a file with three kernels. The last two take compile-time constants and are inlined into one function for
 * each format and number of columns, which KERNEL_TABLE makes:
 *
 *     quantize_group    32 activations of one column
 *     multiply_tile     one tile times a few columns, quantized formats
 *     multiply_floats   one tile times a few columns, float formats
 *
 * A new CPU needs a copy of linear_avx512.c with its instructions, a row in cpu.c, and nothing else:
 * check/check_linear.c compares it with linear_base.c.
 */
#ifndef DRAFTREE_KERNELS_H
#define DRAFTREE_KERNELS_H

#include "layout.h"
#include "linear.h"

/* Bytes ahead of the weights in use that are fetched into the cache. */
enum { PREFETCH_BYTES = 4096 };

/* One tile, a few columns beside one another. */
typedef struct {
    int format;
    const uint8_t *tile;
    int64_t inputs;
    const ActivationGroup *groups; /* quantized formats: column c of group g at groups[g * group_stride + c] */
    int64_t group_stride;
    const float *values; /* float formats: column c at values + c * stride */
    int64_t stride;
    float *y; /* column c's 16 rows at y + c * y_stride */
    int64_t y_stride;
    int stored; /* columns that y has; the others only fill up */
} TileWork;

typedef void TileKernel(const TileWork *work);

/* The tables that cpu.c chooses from. */
extern const LinearKernels linear_base, linear_avx2, linear_avx_vnni, linear_avx512, linear_neon;

#define FOR_QUANTIZED_FORMATS(X)                                                                                       \
    X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL) X(IQ4_XS)
#define FOR_FLOAT_FORMATS(X) X(F32) X(F16) X(BF16)

/* KERNEL_TABLE(NAME) defines kernels and NAME[format][columns] for the columns that a tier lists in its macros
 * FOR_QUANTIZED_COLUMNS(X, FORMAT) and FOR_FLOAT_COLUMNS(X, FORMAT). */
#define KERNEL_NAME(FORMAT, COLUMNS) multiply_##FORMAT##_##COLUMNS
#define KERNEL_ENTRY(FORMAT, COLUMNS) [COLUMNS] = KERNEL_NAME(FORMAT, COLUMNS),
#define QUANTIZED_KERNEL(FORMAT, COLUMNS)                                                                              \
    static void KERNEL_NAME(FORMAT, COLUMNS)(const TileWork *work) {                                                   \
        multiply_tile(layout_of(FORMAT_##FORMAT), COLUMNS, work);                                                      \
    }
#define FLOAT_KERNEL(FORMAT, COLUMNS)                                                                                  \
    static void KERNEL_NAME(FORMAT, COLUMNS)(const TileWork *work) { multiply_floats(FORMAT_##FORMAT, COLUMNS, work); }
#define QUANTIZED_KERNELS(FORMAT) FOR_QUANTIZED_COLUMNS(QUANTIZED_KERNEL, FORMAT)
#define FLOAT_KERNELS(FORMAT) FOR_FLOAT_COLUMNS(FLOAT_KERNEL, FORMAT)
#define QUANTIZED_ROW(FORMAT) [FORMAT_##FORMAT] = {FOR_QUANTIZED_COLUMNS(KERNEL_ENTRY, FORMAT)},
#define FLOAT_ROW(FORMAT) [FORMAT_##FORMAT] = {FOR_FLOAT_COLUMNS(KERNEL_ENTRY, FORMAT)},
#define KERNEL_TABLE(NAME)                                                                                             \
    FOR_QUANTIZED_FORMATS(QUANTIZED_KERNELS)                                                                           \
    FOR_FLOAT_FORMATS(FLOAT_KERNELS)                                                                                   \
    static TileKernel *const NAME[FORMAT_BF16 + 1][BLOCK_COLUMNS + 1] = {FOR_QUANTIZED_FORMATS(QUANTIZED_ROW)          \
                                                                             FOR_FLOAT_FORMATS(FLOAT_ROW)};

/* All but the values of a group: its largest magnitude and the sums of its halves are known. */
ALWAYS_INLINE void describe_group(ActivationGroup *group, float largest, int low_sum, int high_sum) {
    group->scale = largest / 127;
    group->scaled_sum = group->scale * (float)(low_sum + high_sum);
    group->minus_sum = -(low_sum + high_sum);
    group->minus_halves[0] = -low_sum;
    group->minus_halves[1] = -high_sum;
    group->minus_pair[0] = (int16_t)-low_sum;
    group->minus_pair[1] = (int16_t)-high_sum;
}

/* Columns of block `block` of `count`. */
ALWAYS_INLINE int block_columns(int count, int block) {
    int rest = count - BLOCK_COLUMNS * block;
    return rest < BLOCK_COLUMNS ? rest : BLOCK_COLUMNS;
}

/* Quantize the groups that linear.h describes, column by column; columns that fill up are zero. */
ALWAYS_INLINE void quantize_blocks(void (*quantize_group)(const float *, ActivationGroup *), const float *values,
                                   int64_t stride, int64_t inputs, int count, int64_t first_group, int64_t last_group,
                                   uint8_t *groups) {
    ActivationGroup *block = (ActivationGroup *)(void *)groups;
    for (int b = 0; BLOCK_COLUMNS * b < count; b++, block += BLOCK_COLUMNS * (inputs / GROUP_SIZE)) {
        int columns = block_columns(count, b), padded = padded_columns(columns);
        for (int c = 0; c < padded; c++)
            for (int64_t g = first_group; g < last_group; g++)
                if (c < columns)
                    quantize_group(values + (BLOCK_COLUMNS * b + c) * stride + GROUP_SIZE * g, block + g * padded + c);
                else
                    block[g * padded + c] = (ActivationGroup){0};
    }
}

/* Multiply one tile by a block of columns, in pieces of nearly equal size for which there are kernels. */
ALWAYS_INLINE void multiply_block(TileKernel *const *kernels, int most_columns, int columns, int padded,
                                  TileWork work) {
    const int pieces = (padded + most_columns - 1) / most_columns;
    for (int piece = 0; piece < pieces; piece++) {
        int first = padded * piece / pieces, last = padded * (piece + 1) / pieces;
        TileWork part = work;
        part.groups += first;
        part.values += first * work.stride;
        part.y += first * work.y_stride;
        part.stored = (last < columns ? last : columns) - first;
        kernels[last - first](&part);
    }
}

/* Multiply tiles by all columns; kernels: the row of the matrix's format. */
ALWAYS_INLINE void multiply_tiles(TileKernel *const *kernels, int most_columns, const PackedMatrix *matrix,
                                  int64_t first_tile, int64_t last_tile, const Activations *x, float *y,
                                  int64_t y_stride) {
    const int quantized = format_is_quantized(matrix->format);
    const ActivationGroup *groups = (const ActivationGroup *)(const void *)x->groups;
    for (int64_t tile = first_tile; tile < last_tile; tile++)
        for (int b = 0; BLOCK_COLUMNS * b < x->count; b++) {
            int columns = block_columns(x->count, b), padded = quantized ? padded_columns(columns) : columns;
            TileWork work = {
                .format = matrix->format,
                .tile = matrix->tiles + (size_t)tile * matrix->tile_bytes,
                .inputs = matrix->columns,
                .groups = groups + BLOCK_COLUMNS * b * (matrix->columns / GROUP_SIZE),
                .group_stride = padded,
                .values = x->values + BLOCK_COLUMNS * b * x->stride,
                .stride = x->stride,
                .y = y + BLOCK_COLUMNS * b * y_stride + TILE_ROWS * tile,
                .y_stride = y_stride,
            };
            multiply_block(kernels, most_columns, columns, padded, work);
        }
}

#endif
