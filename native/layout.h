/* How weights and activations lie in memory while a pass reads them: shared by tiles.c, which packs them, and the
 * kernels.
 *
 * Weights. A tile of a quantized format is a sequence of records. A record is a header with the scales of 16 rows for
 * `record_groups` groups, filled up to 64 bytes, and then the codes of each of these groups; the last record of a tile
 * may hold fewer groups. What a weight is:
 *
 *     weight = scale * (code - zero) + minimum
 *
 * Codes of a group are lines of 64 bytes. Byte 4 r + i of a line belongs to row r; quad q is inputs 4 q to 4 q + 3 of
 * the group, and i counts inside it. So a 32-bit lane is a quad of one row, and a line serves 16 rows.
 *
 *     low_bits 8   8 lines   line q: quad q
 *     low_bits 4   4 lines   line q: quad q in bits 0-3, quad q + 4 in bits 4-7
 *     low_bits 2   2 lines   line h: quad 4 h + j in bits 2 j and 2 j + 1
 *     high_bits 2  2 lines   the same for the bits of a code above low_bits
 *     high_bits 1  1 line    quad q in bit q
 *
 * Headers, as arrays over the 16 rows of a tile ("f16" is float16; minima only in formats that have them):
 *
 *     SCALES_OF_GROUPS  f16 scale[2][16]; f16 minimum[2][16]
 *     SCALES_OF_BLOCKS  f16 d[16]; f16 dmin[16]; int8 scale[8][16]; uint8 minimum[8][16]
 *                       a group's scale is d * scale, its minimum -dmin * minimum
 *     SCALES_OF_HALVES  f16 d[16]; f16 dmin[16]; int8 scale[8][2][16], the same for inputs 0-15 and 16-31 of a group
 *                       with minima (Q2_K): bits 0-3 are the scale, bits 4-7 the minimum
 *
 * A tile of a float format is [inputs][16 rows], filled up to 64 bytes.
 *
 * Activations. Blocks of 16 columns, the last one with what is left (padded_columns). A block is [groups][columns] of
 * ActivationGroup. Columns that fill up are zero.
 */
#ifndef DRAFTREE_LAYOUT_H
#define DRAFTREE_LAYOUT_H

#include "formats.h"

enum {
    LINE_BYTES = 64,
    GROUP_QUADS = 8,
    SUPER_GROUPS = 8, /* groups in a super-block of 256 inputs */
    BLOCK_COLUMNS = 16,
};

typedef enum { SCALES_OF_GROUPS, SCALES_OF_BLOCKS, SCALES_OF_HALVES } ScaleKind;

typedef struct {
    ScaleKind scales;
    int minima;
    int low_bits;
    int high_bits;
    int zero;          /* a power of two, or 0 */
    int table;         /* codes number the values of IQ4_VALUES; their zero is that of the values */
    int record_groups; /* 0: not a quantized format */
} Layout;

/* X(the name of each quantized format): what is compiled for each of them. */
#define FOR_QUANTIZED_FORMATS(X)                                                                                       \
    X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL) X(IQ4_XS)

/* With a constant format the result is a constant, and a kernel that takes it is specialized. */
ALWAYS_INLINE Layout layout_of(int format) {
    switch (format) {
    case FORMAT_Q4_0: return (Layout){SCALES_OF_GROUPS, 0, 4, 0, 8, 0, 2};
    case FORMAT_Q4_1: return (Layout){SCALES_OF_GROUPS, 1, 4, 0, 0, 0, 2};
    case FORMAT_Q5_0: return (Layout){SCALES_OF_GROUPS, 0, 4, 1, 16, 0, 2};
    case FORMAT_Q5_1: return (Layout){SCALES_OF_GROUPS, 1, 4, 1, 0, 0, 2};
    case FORMAT_Q8_0: return (Layout){SCALES_OF_GROUPS, 0, 8, 0, 128, 0, 2};
    case FORMAT_Q2_K: return (Layout){SCALES_OF_HALVES, 1, 2, 0, 0, 0, SUPER_GROUPS};
    case FORMAT_Q3_K: return (Layout){SCALES_OF_HALVES, 0, 2, 1, 4, 0, SUPER_GROUPS};
    case FORMAT_Q4_K: return (Layout){SCALES_OF_BLOCKS, 1, 4, 0, 0, 0, SUPER_GROUPS};
    case FORMAT_Q5_K: return (Layout){SCALES_OF_BLOCKS, 1, 4, 1, 0, 0, SUPER_GROUPS};
    case FORMAT_Q6_K: return (Layout){SCALES_OF_HALVES, 0, 4, 2, 32, 0, SUPER_GROUPS};
    case FORMAT_IQ4_NL: return (Layout){SCALES_OF_GROUPS, 0, 4, 0, 128, 1, 2};
    case FORMAT_IQ4_XS: return (Layout){SCALES_OF_BLOCKS, 0, 4, 0, 128, 1, SUPER_GROUPS};
    default: return (Layout){0};
    }
}

/* Values of the codes of IQ4_NL and IQ4_XS; 128 more as unsigned bytes. */
static const int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

/* Bytes before the scales of a super-block, and bytes of these. */
ALWAYS_INLINE int super_scale_offset(Layout layout) { return layout.minima ? 4 * TILE_ROWS : 2 * TILE_ROWS; }

ALWAYS_INLINE int super_scale_bytes(Layout layout) {
    return SUPER_GROUPS * TILE_ROWS * (layout.scales == SCALES_OF_HALVES ? 2 : 1);
}

ALWAYS_INLINE int header_bytes(Layout layout) {
    if (layout.scales == SCALES_OF_GROUPS)
        return layout.record_groups * TILE_ROWS * (layout.minima ? 4 : 2);
    int minima = layout.scales == SCALES_OF_BLOCKS && layout.minima ? SUPER_GROUPS * TILE_ROWS : 0;
    return (super_scale_offset(layout) + super_scale_bytes(layout) + minima + 63) / 64 * 64;
}

ALWAYS_INLINE int code_bytes(Layout layout) { return LINE_BYTES * (layout.low_bits + layout.high_bits); }

/* Where quad `quad` lies in a plane of 8, 4, 2 or 1 bits a code: its line, and its first bit in each byte of it. */
ALWAYS_INLINE int plane_line(int bits, int quad) { return bits == 4 ? quad % 4 : quad * bits / 8; }

ALWAYS_INLINE int plane_bit(int bits, int quad) { return bits == 4 ? quad / 4 * 4 : quad * bits % 8; }

/* A group of 32 activations of one column: activation = scale * values. */
typedef struct {
    int8_t values[GROUP_SIZE];
    float scale;
    float scaled_sum;        /* scale * the sum of the values */
    int32_t minus_sum;       /* minus the sum of the values */
    int32_t minus_halves[2]; /* the same of the first 16, of the last 16 */
    int16_t minus_pair[2];   /* the same, for multiply-adds of pairs */
} ActivationGroup;

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

/* Columns that a block of `columns` takes: those that kernels are compiled for. */
ALWAYS_INLINE int padded_columns(int columns) { return columns <= 8 ? columns : (columns + 1) / 2 * 2; }

#endif
