/* The kernels of linear.h, written once; linear_<tier>.c includes this file, compiled for its instruction set.
 *
 * Before that it defines what lanes.h has not:
 *
 *     STRIP_ROWS          rows of a tile whose sums are in registers together
 *     MOST_COLUMNS        columns whose sums are; MOST_FLOAT_COLUMNS of float formats
 *     FOR_QUANTIZED_COLUMNS(X, FORMAT), FOR_FLOAT_COLUMNS(X, FORMAT): the numbers of columns that kernels are made for
 *     MOST_CHAINS         sums of products that grow side by side: each is a chain of dependent instructions
 *     SIGNED_CODES        1: products read codes whose zero is 128 as signed
 *     quantize_group      32 activations of one column
 *     Codes               four bytes of each of WIDTH rows
 *     load_line           codes of a quad from a line (layout.h)
 *     take_bits           bits `from`.. of each byte, moved to `to`; others are zero
 *     wide_codes          codes of 8 bits as products read them
 *     table_values        IQ4_VALUES of codes as products read codes of 8 bits
 *     splat_int           an integer in all lanes
 *     zero_product        minus a sum times a zero, a power of two or 0, in all lanes
 *     add_quad            add codes of a quad times activations to a sum
 *     minima_product      the minima of a group's halves times minus_halves
 *
 * A tier with OWN_PRODUCTS has group_products (below) in place of add_quad.
 */
#include "lanes.h"
#include "layout.h"
#include "linear.h"

enum {
    PREFETCH_BYTES = 4096,          /* so far ahead of the weights in use is fetched into the cache */
    REGISTERS = STRIP_ROWS / WIDTH, /* of a strip */
};

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

/* A register for each quad of the group: codes of WIDTH rows; `lines` begins at these rows. */
ALWAYS_INLINE void load_codes(const Layout layout, const uint8_t *lines, Codes codes[GROUP_QUADS]) {
    const int low = layout.low_bits, high = layout.high_bits;
    UNROLL for (int q = 0; q < GROUP_QUADS; q++) {
        codes[q] = load_line(lines + LINE_BYTES * plane_line(low, q));
        if (low < 8)
            codes[q] = take_bits(codes[q], plane_bit(low, q), 0, low);
        else
            codes[q] = wide_codes(codes[q]);
    }
    if (high) {
        UNROLL for (int q = 0; q < GROUP_QUADS; q++) {
            const Codes line = load_line(lines + LINE_BYTES * (low + plane_line(high, q)));
            codes[q] |= take_bits(line, plane_bit(high, q), low, high);
        }
    }
    if (layout.table) {
        UNROLL for (int q = 0; q < GROUP_QUADS; q++)
            codes[q] = table_values(codes[q]);
    }
}

/* Scales of WIDTH rows in a group: weight = scale * (code - zero) + minimum; with SCALES_OF_HALVES
 * weight = scale * factors[half] * (code - zero) - minimum * minima[half]. */
typedef struct {
    Lanes scale, minimum;
    IntLanes factors[2], minima[2];
} TileScales;

ALWAYS_INLINE void load_scales(const Layout layout, const uint8_t *header, int group, int row, TileScales *scales) {
    const uint16_t *halves = (const uint16_t *)(const void *)header + row;
    if (layout.scales == SCALES_OF_GROUPS) {
        scales->scale = load_fp16(halves + TILE_ROWS * group);
        if (layout.minima)
            scales->minimum = load_fp16(halves + TILE_ROWS * (layout.record_groups + group));
        return;
    }
    const uint8_t *bytes = header + super_scale_offset(layout) + row;
    scales->scale = load_fp16(halves);
    if (layout.minima)
        scales->minimum = load_fp16(halves + TILE_ROWS);
    if (layout.scales == SCALES_OF_BLOCKS) {
        scales->scale *= lanes_from_ints(load_int8(bytes + TILE_ROWS * group));
        if (layout.minima)
            scales->minimum =
                -scales->minimum * lanes_from_ints(load_uint8(bytes + super_scale_bytes(layout) + TILE_ROWS * group));
        return;
    }
    UNROLL for (int half = 0; half < 2; half++) {
        const uint8_t *own = bytes + TILE_ROWS * (2 * group + half);
        scales->factors[half] = layout.minima ? load_uint8(own) & splat_int(15) : load_int8(own);
        if (layout.minima)
            scales->minima[half] = load_uint8(own) >> splat_int(4);
    }
}

/* What is left to subtract from a code where products read it as load_codes gives it. */
ALWAYS_INLINE int zero_left(const Layout layout) { return SIGNED_CODES && layout.zero == 128 ? 0 : layout.zero; }

#ifndef OWN_PRODUCTS

/* The sums over a group of (code - zero) * activation, with SCALES_OF_HALVES times the factors of its halves, of the
 * first `columns` of up to `most` columns. */
ALWAYS_INLINE void group_products(const Layout layout, const int most, const int columns,
                                  const Codes codes[GROUP_QUADS], const IntLanes factors[2], const ActivationGroup *x,
                                  IntLanes *products) {
    const int halves = layout.scales == SCALES_OF_HALVES;
    IntLanes sums[MOST_CHAINS][2];
    UNROLL for (int c = 0; c < most; c++)
        if (c < columns) {
            sums[c][0] = zero_product(halves ? x[c].minus_halves[0] : x[c].minus_sum, zero_left(layout));
            sums[c][1] = zero_product(x[c].minus_halves[1], zero_left(layout));
        }
    UNROLL for (int q = 0; q < GROUP_QUADS; q++) {
        UNROLL for (int c = 0; c < most; c++)
            if (c < columns)
                add_quad(&sums[c][halves ? q / 4 : 0], codes[q], x[c].values, q);
    }
    UNROLL for (int c = 0; c < most; c++)
        if (c < columns)
            products[c] = halves ? sums[c][0] * factors[0] + sums[c][1] * factors[1] : sums[c][0];
}

#endif

/* sums + the group's part of a column. */
ALWAYS_INLINE Lanes add_product(const Layout layout, const TileScales *scales, const ActivationGroup *x,
                                IntLanes product, Lanes sums) {
    const Lanes scale = splat(x->scale);
    sums = fma_lanes(scales->scale * scale, lanes_from_ints(product), sums);
    if (!layout.minima)
        return sums;
    if (layout.scales != SCALES_OF_HALVES)
        return fma_lanes(scales->minimum, splat(x->scaled_sum), sums);
    return fma_lanes(scales->minimum * scale, lanes_from_ints(minima_product(scales->minima, x)), sums);
}

/* As many columns side by side as there may be chains. */
ALWAYS_INLINE int columns_together(const Layout layout, const int columns) {
    const int chains = layout.scales == SCALES_OF_HALVES ? 2 : 1; /* of a column */
    const int parts = (columns * chains + MOST_CHAINS - 1) / MOST_CHAINS;
    return (columns + parts - 1) / parts;
}

ALWAYS_INLINE void prefetch(const uint8_t *source, int bytes) {
    UNROLL for (int offset = 0; offset < bytes; offset += 64)
        __builtin_prefetch(source + PREFETCH_BYTES + offset);
}

/* Some rows of a tile. The first ones fetch ahead for all. */
ALWAYS_INLINE void multiply_strip(const Layout layout, const int columns, const int row, const TileWork *work) {
    const int most = columns_together(layout, columns);
    const ActivationGroup *x = work->groups;
    const uint8_t *lines = work->tile, *header = lines;
    Lanes sums[MOST_COLUMNS][REGISTERS];
    UNROLL for (int c = 0; c < columns; c++) {
        UNROLL for (int part = 0; part < REGISTERS; part++)
            sums[c][part] = splat(0);
    }
    for (int64_t g = 0; g < work->inputs / GROUP_SIZE; g++) {
        const int slot = (int)(g % layout.record_groups);
        if (slot == 0) { /* a record begins */
            header = lines;
            if (row == 0)
                prefetch(header, header_bytes(layout));
            lines += header_bytes(layout);
        }
        Codes codes[REGISTERS][GROUP_QUADS];
        TileScales scales[REGISTERS];
        if (row == 0)
            prefetch(lines, code_bytes(layout));
        UNROLL for (int part = 0; part < REGISTERS; part++) {
            load_codes(layout, lines + 4 * (row + part * WIDTH), codes[part]);
            load_scales(layout, header, slot, row + part * WIDTH, &scales[part]);
        }
        UNROLL for (int first = 0; first < columns; first += most) {
            UNROLL for (int part = 0; part < REGISTERS; part++) {
                IntLanes products[MOST_CHAINS];
                group_products(layout, most, columns - first, codes[part], scales[part].factors, x + first, products);
                UNROLL for (int c = 0; c < most; c++)
                    if (first + c < columns)
                        sums[first + c][part] =
                            add_product(layout, &scales[part], x + first + c, products[c], sums[first + c][part]);
            }
        }
        lines += code_bytes(layout);
        x += work->group_stride;
    }
    UNROLL for (int c = 0; c < columns; c++)
        if (c < work->stored) {
            UNROLL for (int part = 0; part < REGISTERS; part++)
                store(work->y + c * work->y_stride + row + part * WIDTH, sums[c][part]);
        }
}

ALWAYS_INLINE void multiply_tile(const Layout layout, const int columns, const TileWork *work) {
    UNROLL for (int row = 0; row < TILE_ROWS; row += STRIP_ROWS)
        multiply_strip(layout, columns, row, work);
}

ALWAYS_INLINE Lanes load_weights(const int format, const uint8_t *tile, int64_t index) {
    if (format == FORMAT_F32)
        return load((const float *)(const void *)tile + index);
    const uint16_t *halves = (const uint16_t *)(const void *)tile + index;
    return format == FORMAT_F16 ? load_fp16(halves) : load_bf16(halves);
}

ALWAYS_INLINE void multiply_floats(const int format, const int columns, const TileWork *work) {
    Lanes sums[MOST_FLOAT_COLUMNS][PARTS];
    UNROLL for (int c = 0; c < columns; c++) {
        UNROLL for (int part = 0; part < PARTS; part++)
            sums[c][part] = splat(0);
    }
    for (int64_t i = 0; i < work->inputs; i++) {
        Lanes weights[PARTS];
        UNROLL for (int part = 0; part < PARTS; part++)
            weights[part] = load_weights(format, work->tile, TILE_ROWS * i + part * WIDTH);
        UNROLL for (int c = 0; c < columns; c++) {
            const Lanes value = splat(work->values[c * work->stride + i]);
            UNROLL for (int part = 0; part < PARTS; part++)
                sums[c][part] = fma_lanes(weights[part], value, sums[c][part]);
        }
    }
    UNROLL for (int c = 0; c < columns; c++) {
        UNROLL for (int part = 0; part < PARTS; part++)
            store(work->y + c * work->y_stride + part * WIDTH, sums[c][part]);
    }
}

/* A kernel for each format and number of columns: KERNELS[format][columns]. */
#define FOR_FLOAT_FORMATS(X) X(F32) X(F16) X(BF16)
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

FOR_QUANTIZED_FORMATS(QUANTIZED_KERNELS)
FOR_FLOAT_FORMATS(FLOAT_KERNELS)
static TileKernel *const KERNELS[FORMAT_BF16 + 1][BLOCK_COLUMNS + 1] = {FOR_QUANTIZED_FORMATS(QUANTIZED_ROW)
                                                                            FOR_FLOAT_FORMATS(FLOAT_ROW)};

/* Columns of block `block` of `count`. */
ALWAYS_INLINE int block_columns(int count, int block) {
    int rest = count - BLOCK_COLUMNS * block;
    return rest < BLOCK_COLUMNS ? rest : BLOCK_COLUMNS;
}

/* Column by column; columns that fill up are zero. */
static void quantize(const float *values, int64_t stride, int64_t inputs, int count, int64_t first_group,
                     int64_t last_group, uint8_t *groups) {
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
ALWAYS_INLINE void multiply_block(int most_columns, int columns, int padded, TileWork work) {
    const int pieces = (padded + most_columns - 1) / most_columns;
    for (int piece = 0; piece < pieces; piece++) {
        int first = padded * piece / pieces, last = padded * (piece + 1) / pieces;
        TileWork part = work;
        part.groups += first;
        part.values += first * work.stride;
        part.y += first * work.y_stride;
        part.stored = (last < columns ? last : columns) - first;
        KERNELS[work.format][last - first](&part);
    }
}

static void multiply(const PackedMatrix *matrix, int64_t first_tile, int64_t last_tile, const Activations *x, float *y,
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
            multiply_block(quantized ? MOST_COLUMNS : MOST_FLOAT_COLUMNS, columns, padded, work);
        }
}
