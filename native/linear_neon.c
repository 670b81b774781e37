/* Linear layers with NEON's dot product (ARMv8.2): 8 rows (half a tile) in two registers, up to 4 columns at a time. */
#include <arm_neon.h>

#include "kernels.h"

enum { MOST_COLUMNS = 4, HALF_ROWS = 8, PARTS = 2 /* registers that 8 rows take */ };

static void quantize_group(const float *values, ActivationGroup *group) {
    float32x4_t parts[8], most = vdupq_n_f32(0);
    UNROLL for (int i = 0; i < 8; i++) {
        parts[i] = vld1q_f32(values + 4 * i);
        most = vmaxq_f32(most, vabsq_f32(parts[i]));
    }
    const float largest = vmaxvq_f32(most), inverse = largest >= 1e-30f ? 127 / largest : 0;
    int sums[2] = {0, 0};
    UNROLL for (int i = 0; i < 4; i++) {
        int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(parts[2 * i], inverse));
        int32x4_t high = vcvtnq_s32_f32(vmulq_n_f32(parts[2 * i + 1], inverse));
        vst1_s8(group->values + 8 * i, vqmovn_s16(vcombine_s16(vqmovn_s32(low), vqmovn_s32(high))));
        sums[i / 2] += vaddvq_s32(vaddq_s32(low, high));
    }
    describe_group(group, largest, sums[0], sums[1]);
}

static void quantize(const float *values, int64_t stride, int64_t inputs, int count, int64_t first_group,
                     int64_t last_group, uint8_t *groups) {
    quantize_blocks(quantize_group, values, stride, inputs, count, first_group, last_group, groups);
}

ALWAYS_INLINE float32x4_t load_halves(const uint8_t *source) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(source)));
}

/* Bytes of 8 rows as integers, four rows a register. */
ALWAYS_INLINE void load_signed_bytes(const uint8_t *source, int32x4_t values[PARTS]) {
    int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(vld1_u8(source)));
    values[0] = vmovl_s16(vget_low_s16(wide));
    values[1] = vmovl_s16(vget_high_s16(wide));
}

ALWAYS_INLINE void load_unsigned_bytes(const uint8_t *source, int32x4_t values[PARTS]) {
    uint16x8_t wide = vmovl_u8(vld1_u8(source));
    values[0] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide)));
    values[1] = vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(wide)));
}

/* Bits `from`.. of each byte, moved to `to`. */
ALWAYS_INLINE uint8x16_t take_bits(uint8x16_t bytes, int from, int to, int count) {
    bytes = vshlq_u8(bytes, vdupq_n_s8((int8_t)(to - from)));
    return vandq_u8(bytes, vdupq_n_u8((uint8_t)(((1 << count) - 1) << to)));
}

/* Weights (code - zero) of four rows, a register for each quad of the group; `lines` begins at these rows. */
ALWAYS_INLINE void load_weights(const Layout layout, const uint8_t *lines, int8x16_t weights[GROUP_QUADS]) {
    const int low = layout.low_bits, high = layout.high_bits;
    UNROLL for (int q = 0; q < GROUP_QUADS; q++) {
        uint8x16_t codes = vld1q_u8(lines + LINE_BYTES * plane_line(low, q));
        if (low < 8)
            codes = take_bits(codes, plane_bit(low, q), 0, low);
        if (high) {
            uint8x16_t line = vld1q_u8(lines + LINE_BYTES * (low + plane_line(high, q)));
            codes = vorrq_u8(codes, take_bits(line, plane_bit(high, q), low, high));
        }
        weights[q] = layout.table ? vqtbl1q_s8(vld1q_s8(IQ4_VALUES), codes)
                                  : vreinterpretq_s8_u8(vsubq_u8(codes, vdupq_n_u8((uint8_t)layout.zero)));
    }
}

/* Scales of 8 rows in a group; factors and minima are those of the halves of the group's inputs. */
typedef struct {
    float32x4_t scale[PARTS], minimum[PARTS];
    int32x4_t factors[2][PARTS], minima[2][PARTS];
} TileScales;

ALWAYS_INLINE void load_scales(const Layout layout, const uint8_t *header, int group, int first_row,
                               TileScales *scales) {
    const uint8_t *bytes = header + super_scale_offset(layout) + first_row;
    const int slot = layout.scales == SCALES_OF_GROUPS ? group : 0;
    const int minimum_slot = layout.scales == SCALES_OF_GROUPS ? layout.record_groups + group : 1;
    UNROLL for (int part = 0; part < PARTS; part++) {
        scales->scale[part] = load_halves(header + 2 * (TILE_ROWS * slot + first_row + 4 * part));
        if (layout.minima)
            scales->minimum[part] = load_halves(header + 2 * (TILE_ROWS * minimum_slot + first_row + 4 * part));
    }
    if (layout.scales == SCALES_OF_BLOCKS) {
        int32x4_t factors[PARTS], minima[PARTS];
        load_signed_bytes(bytes + TILE_ROWS * group, factors);
        if (layout.minima)
            load_unsigned_bytes(bytes + super_scale_bytes(layout) + TILE_ROWS * group, minima);
        UNROLL for (int part = 0; part < PARTS; part++) {
            scales->scale[part] = vmulq_f32(scales->scale[part], vcvtq_f32_s32(factors[part]));
            if (layout.minima)
                scales->minimum[part] = vmulq_f32(vnegq_f32(scales->minimum[part]), vcvtq_f32_s32(minima[part]));
        }
    }
    if (layout.scales != SCALES_OF_HALVES)
        return;
    UNROLL for (int half = 0; half < 2; half++) {
        const uint8_t *source = bytes + TILE_ROWS * (2 * group + half);
        if (!layout.minima) {
            load_signed_bytes(source, scales->factors[half]);
            continue;
        }
        load_unsigned_bytes(source, scales->minima[half]);
        UNROLL for (int part = 0; part < PARTS; part++) {
            scales->factors[half][part] = vandq_s32(scales->minima[half][part], vdupq_n_s32(15));
            scales->minima[half][part] = vshrq_n_s32(scales->minima[half][part], 4);
        }
    }
}

/* product + four quads of a column times the weights of four rows. */
ALWAYS_INLINE int32x4_t add_quads(int32x4_t product, const int8x16_t *weights, int8x16_t quads) {
    product = vdotq_laneq_s32(product, weights[0], quads, 0);
    product = vdotq_laneq_s32(product, weights[1], quads, 1);
    product = vdotq_laneq_s32(product, weights[2], quads, 2);
    return vdotq_laneq_s32(product, weights[3], quads, 3);
}

/* sums + a column's part of a group, four rows. */
ALWAYS_INLINE float32x4_t add_group(const Layout layout, const int8x16_t weights[GROUP_QUADS], const TileScales *scales,
                                    const int part, const ActivationGroup *x, float32x4_t sums) {
    const int8x16_t low_quads = vld1q_s8(x->values), high_quads = vld1q_s8(x->values + 16);
    int32x4_t product = add_quads(vdupq_n_s32(0), weights, low_quads);
    if (layout.scales == SCALES_OF_HALVES) {
        int32x4_t high = add_quads(vdupq_n_s32(0), weights + 4, high_quads);
        product = vmulq_s32(product, scales->factors[0][part]);
        product = vmlaq_s32(product, high, scales->factors[1][part]);
    } else {
        product = add_quads(product, weights + 4, high_quads);
    }
    sums = vfmaq_f32(sums, vmulq_n_f32(scales->scale[part], x->scale), vcvtq_f32_s32(product));
    if (layout.minima && layout.scales == SCALES_OF_HALVES) {
        int32x4_t minus = vmulq_n_s32(scales->minima[0][part], x->minus_halves[0]);
        minus = vmlaq_n_s32(minus, scales->minima[1][part], x->minus_halves[1]);
        return vfmaq_f32(sums, vmulq_n_f32(scales->minimum[part], x->scale), vcvtq_f32_s32(minus));
    }
    return layout.minima ? vfmaq_n_f32(sums, scales->minimum[part], x->scaled_sum) : sums;
}

ALWAYS_INLINE void prefetch(const uint8_t *source, int bytes) {
    UNROLL for (int offset = 0; offset < bytes; offset += 64)
        __builtin_prefetch(source + PREFETCH_BYTES + offset);
}

/* Eight rows of a tile. The first half fetches ahead for both. */
ALWAYS_INLINE void multiply_half(const Layout layout, const int columns, const int first_row, const TileWork *work) {
    const ActivationGroup *x = work->groups;
    const uint8_t *lines = work->tile, *header = lines;
    float32x4_t sums[MOST_COLUMNS][PARTS];
    UNROLL for (int c = 0; c < columns; c++)
        sums[c][0] = sums[c][1] = vdupq_n_f32(0);
    for (int64_t g = 0; g < work->inputs / GROUP_SIZE; g++) {
        const int slot = (int)(g % layout.record_groups);
        if (slot == 0) { /* a record begins */
            header = lines;
            if (first_row == 0)
                prefetch(header, header_bytes(layout));
            lines += header_bytes(layout);
        }
        int8x16_t weights[PARTS][GROUP_QUADS];
        TileScales scales;
        if (first_row == 0)
            prefetch(lines, code_bytes(layout));
        load_scales(layout, header, slot, first_row, &scales);
        UNROLL for (int part = 0; part < PARTS; part++)
            load_weights(layout, lines + 4 * (first_row + 4 * part), weights[part]);
        UNROLL for (int c = 0; c < columns; c++) {
            UNROLL for (int part = 0; part < PARTS; part++)
                sums[c][part] = add_group(layout, weights[part], &scales, part, x + c, sums[c][part]);
        }
        lines += code_bytes(layout);
        x += work->group_stride;
    }
    UNROLL for (int c = 0; c < columns; c++)
        if (c < work->stored) {
            vst1q_f32(work->y + c * work->y_stride + first_row, sums[c][0]);
            vst1q_f32(work->y + c * work->y_stride + first_row + 4, sums[c][1]);
        }
}

ALWAYS_INLINE void multiply_tile(const Layout layout, const int columns, const TileWork *work) {
    multiply_half(layout, columns, 0, work);
    multiply_half(layout, columns, HALF_ROWS, work);
}

ALWAYS_INLINE float32x4_t load_floats(const int format, const uint8_t *tile, int64_t index) {
    if (format == FORMAT_F32)
        return vreinterpretq_f32_u8(vld1q_u8(tile + 4 * index));
    if (format == FORMAT_F16)
        return load_halves(tile + 2 * index);
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(tile + 2 * index)), 16));
}

ALWAYS_INLINE void multiply_floats(const int format, const int columns, const TileWork *work) {
    enum { REGISTERS = TILE_ROWS / 4 };
    float32x4_t sums[MOST_COLUMNS][REGISTERS];
    UNROLL for (int c = 0; c < columns; c++) {
        UNROLL for (int r = 0; r < REGISTERS; r++)
            sums[c][r] = vdupq_n_f32(0);
    }
    for (int64_t i = 0; i < work->inputs; i++) {
        float32x4_t weights[REGISTERS];
        UNROLL for (int r = 0; r < REGISTERS; r++)
            weights[r] = load_floats(format, work->tile, TILE_ROWS * i + 4 * r);
        UNROLL for (int c = 0; c < columns; c++) {
            UNROLL for (int r = 0; r < REGISTERS; r++)
                sums[c][r] = vfmaq_n_f32(sums[c][r], weights[r], work->values[c * work->stride + i]);
        }
    }
    UNROLL for (int c = 0; c < columns; c++) {
        UNROLL for (int r = 0; r < REGISTERS; r++)
            vst1q_f32(work->y + c * work->y_stride + 4 * r, sums[c][r]);
    }
}

#define FOR_QUANTIZED_COLUMNS(X, FORMAT) X(FORMAT, 1) X(FORMAT, 2) X(FORMAT, 3) X(FORMAT, 4)
#define FOR_FLOAT_COLUMNS FOR_QUANTIZED_COLUMNS

KERNEL_TABLE(KERNELS)

static void multiply(const PackedMatrix *matrix, int64_t first_tile, int64_t last_tile, const Activations *x, float *y,
                     int64_t y_stride) {
    multiply_tiles(KERNELS[matrix->format], MOST_COLUMNS, matrix, first_tile, last_tile, x, y, y_stride);
}

const LinearKernels linear_neon = {"neon", quantize, multiply};
