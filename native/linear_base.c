/* Linear layers in portable C: the meaning of every other tier. */
#include <math.h>
#include <string.h>

#include "kernels.h"

size_t activation_bytes(int count, int64_t inputs) {
    int rest = count % BLOCK_COLUMNS;
    return (size_t)(count - rest + padded_columns(rest)) * (size_t)(inputs / GROUP_SIZE) * sizeof(ActivationGroup);
}

/* Scale so that the largest is 127, round to the nearest, ties to even. Below 1e-30 a group is zero. What is no number
 * becomes -127: a damaged model computes nonsense, but nothing undefined. */
static void quantize_group(const float *values, ActivationGroup *group) {
    float largest = 0;
    for (int i = 0; i < GROUP_SIZE; i++)
        largest = fabsf(values[i]) > largest ? fabsf(values[i]) : largest;
    float inverse = largest >= 1e-30f ? 127 / largest : 0;
    int sums[2] = {0, 0};
    for (int i = 0; i < GROUP_SIZE; i++) {
        const float scaled = values[i] * inverse;
        group->values[i] = (int8_t)lrintf(scaled > -127 ? scaled : -127);
        sums[i / 16] += group->values[i];
    }
    describe_group(group, largest, sums[0], sums[1]);
}

static void quantize(const float *values, int64_t stride, int64_t inputs, int count, int64_t first_group,
                     int64_t last_group, uint8_t *groups) {
    quantize_blocks(quantize_group, values, stride, inputs, count, first_group, last_group, groups);
}

static float half_at(const uint8_t *halves, int index) { return format_decode_number(FORMAT_F16, halves + 2 * index); }

/* The scales of a row in a group: weight = scale * (code - zero) + minimum; with SCALES_OF_HALVES
 * weight = scale * factors[half] * (code - zero) - minimum * minima[half]. */
typedef struct {
    float scale, minimum;
    int factors[2], minima[2];
} RowScales;

static RowScales row_scales(Layout layout, const uint8_t *header, int group, int row) {
    RowScales scales = {0};
    if (layout.scales == SCALES_OF_GROUPS) {
        scales.scale = half_at(header, TILE_ROWS * group + row);
        if (layout.minima)
            scales.minimum = half_at(header, TILE_ROWS * (layout.record_groups + group) + row);
        return scales;
    }
    const uint8_t *bytes = header + super_scale_offset(layout) + row;
    scales.scale = half_at(header, row);
    if (layout.minima)
        scales.minimum = half_at(header, TILE_ROWS + row);
    if (layout.scales == SCALES_OF_BLOCKS) {
        scales.scale *= (float)(int8_t)bytes[TILE_ROWS * group];
        if (layout.minima)
            scales.minimum = -scales.minimum * (float)bytes[super_scale_bytes(layout) + TILE_ROWS * group];
        return scales;
    }
    for (int half = 0; half < 2; half++) {
        uint8_t byte = bytes[TILE_ROWS * (2 * group + half)];
        scales.factors[half] = layout.minima ? byte & 15 : (int8_t)byte;
        scales.minima[half] = byte >> 4;
    }
    return scales;
}

/* Bits of a code in the plane that begins at `lines`. */
static int code_at(int bits, const uint8_t *lines, int row, int input) {
    const uint8_t *line = lines + LINE_BYTES * plane_line(bits, input / 4);
    return line[4 * row + input % 4] >> plane_bit(bits, input / 4) & ((1 << bits) - 1);
}

/* What a code stands for: code - zero. */
static int weight_at(Layout layout, const uint8_t *lines, int row, int input) {
    int code = code_at(layout.low_bits, lines, row, input);
    if (layout.high_bits)
        code |= code_at(layout.high_bits, lines + LINE_BYTES * layout.low_bits, row, input) << layout.low_bits;
    return layout.table ? IQ4_VALUES[code] : code - layout.zero;
}

/* Add a group's part of one row to the sums of all columns: integers inside the group, then fused multiply-adds. */
static void add_group(Layout layout, RowScales scales, const int weights[GROUP_SIZE], const ActivationGroup *x,
                      int columns, float *sums) {
    for (int c = 0; c < columns; c++) {
        int products[2] = {0, 0};
        for (int i = 0; i < GROUP_SIZE; i++)
            products[i / 16] += weights[i] * x[c].values[i];
        int product = products[0] + products[1];
        if (layout.scales == SCALES_OF_HALVES)
            product = scales.factors[0] * products[0] + scales.factors[1] * products[1];
        sums[c] = fmaf(scales.scale * x[c].scale, (float)product, sums[c]);
        if (!layout.minima)
            continue;
        if (layout.scales == SCALES_OF_HALVES) {
            int minus = scales.minima[0] * x[c].minus_halves[0] + scales.minima[1] * x[c].minus_halves[1];
            sums[c] = fmaf(scales.minimum * x[c].scale, (float)minus, sums[c]);
        } else {
            sums[c] = fmaf(scales.minimum, x[c].scaled_sum, sums[c]);
        }
    }
}

static void multiply_quantized(const TileWork *work) {
    const Layout layout = layout_of(work->format);
    const int64_t groups = work->inputs / GROUP_SIZE;
    for (int row = 0; row < TILE_ROWS; row++) {
        const uint8_t *record = work->tile;
        float sums[BLOCK_COLUMNS] = {0};
        for (int64_t first = 0; first < groups; first += layout.record_groups) {
            const uint8_t *lines = record + header_bytes(layout);
            for (int g = 0; g < layout.record_groups && first + g < groups; g++, lines += code_bytes(layout)) {
                int weights[GROUP_SIZE];
                for (int i = 0; i < GROUP_SIZE; i++)
                    weights[i] = weight_at(layout, lines, row, i);
                add_group(layout, row_scales(layout, record, g, row), weights,
                          work->groups + (first + g) * work->group_stride, work->stored, sums);
            }
            record = lines;
        }
        for (int c = 0; c < work->stored; c++)
            work->y[c * work->y_stride + row] = sums[c];
    }
}

static void multiply_floats(const TileWork *work) {
    const int size = work->format == FORMAT_F32 ? 4 : 2;
    for (int row = 0; row < TILE_ROWS; row++) {
        float sums[BLOCK_COLUMNS] = {0};
        for (int64_t i = 0; i < work->inputs; i++) {
            float weight = format_decode_number(work->format, work->tile + size * (TILE_ROWS * i + row));
            for (int c = 0; c < work->stored; c++)
                sums[c] = fmaf(weight, work->values[c * work->stride + i], sums[c]);
        }
        for (int c = 0; c < work->stored; c++)
            work->y[c * work->y_stride + row] = sums[c];
    }
}

static void multiply(const PackedMatrix *matrix, int64_t first_tile, int64_t last_tile, const Activations *x, float *y,
                     int64_t y_stride) {
    static TileKernel *const QUANTIZED[] = {[1 ... BLOCK_COLUMNS] = multiply_quantized};
    static TileKernel *const FLOATS[] = {[1 ... BLOCK_COLUMNS] = multiply_floats};
    multiply_tiles(format_is_quantized(matrix->format) ? QUANTIZED : FLOATS, BLOCK_COLUMNS, matrix, first_tile,
                   last_tile, x, y, y_stride);
}

const LinearKernels linear_base = {"base", quantize, multiply};
