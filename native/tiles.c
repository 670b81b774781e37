/* Tiles: rows of a file packed into them (layout.h draws them), and read from them again. */
#include "blocks.h"
#include "formats.h"

enum { FP16_EXPONENT = 0x7c00 };

/* ---- packing */

size_t packed_tile_bytes(int format, int64_t columns) {
    Layout layout = layout_of(format);
    if (!layout.record_groups)
        return ((size_t)columns * TILE_ROWS * (size_t)block_bytes(format) + 63) / 64 * 64;
    size_t groups = (size_t)columns / GROUP_SIZE, per_record = (size_t)layout.record_groups;
    return (groups + per_record - 1) / per_record * (size_t)header_bytes(layout) + groups * (size_t)code_bytes(layout);
}

ALWAYS_INLINE void write_quad(uint8_t *lines, int line, int row, uint32_t quad) {
    memcpy(lines + LINE_BYTES * line + 4 * row, &quad, 4);
}

/* Two lines with two bits of each code, from bit `position` on. */
ALWAYS_INLINE void write_pairs(const uint32_t *quads, int position, int row, uint8_t *lines) {
    for (int h = 0; h < 2; h++) {
        uint32_t word = 0;
        for (int j = 0; j < 4; j++)
            word |= (quads[4 * h + j] >> position & 0x03030303u) << (2 * j);
        write_quad(lines, h, row, word);
    }
}

ALWAYS_INLINE void write_codes(Layout layout, const uint8_t *codes, int row, uint8_t *lines) {
    uint32_t quads[GROUP_QUADS];
    memcpy(quads, codes, sizeof quads);
    if (layout.low_bits == 8) {
        for (int q = 0; q < 8; q++)
            write_quad(lines, q, row, quads[q]);
    } else if (layout.low_bits == 4) {
        for (int q = 0; q < 4; q++)
            write_quad(lines, q, row, (quads[q] & 0x0f0f0f0fu) | (quads[q + 4] & 0x0f0f0f0fu) << 4);
    } else {
        write_pairs(quads, 0, row, lines);
    }
    lines += LINE_BYTES * layout.low_bits;
    if (layout.high_bits == 2)
        write_pairs(quads, layout.low_bits, row, lines);
    if (layout.high_bits == 1) {
        uint32_t word = 0;
        for (int q = 0; q < 8; q++)
            word |= (quads[q] >> layout.low_bits & 0x01010101u) << q;
        write_quad(lines, 0, row, word);
    }
}

/* Scales of a row's block whose first group is number `slot` of the record. */
ALWAYS_INLINE void write_scales(Layout layout, const Block *block, int slot, int row, uint8_t *header) {
    if (layout.scales == SCALES_OF_GROUPS) {
        memcpy(header + 2 * (TILE_ROWS * slot + row), &block->scale, 2);
        if (layout.minima)
            memcpy(header + 2 * (TILE_ROWS * (layout.record_groups + slot) + row), &block->minimum, 2);
        return;
    }
    memcpy(header + 2 * row, &block->scale, 2);
    if (layout.minima)
        memcpy(header + 2 * (TILE_ROWS + row), &block->minimum, 2);
    uint8_t *scales = header + super_scale_offset(layout) + row, *minima = scales + super_scale_bytes(layout);
    for (int j = 0; j < super_scale_bytes(layout) / TILE_ROWS; j++) {
        uint8_t scale = (uint8_t)block->scales[j];
        if (layout.minima && layout.scales == SCALES_OF_HALVES)
            scale |= (uint8_t)(block->minima[j] << 4);
        scales[TILE_ROWS * j] = scale;
        if (layout.minima && layout.scales == SCALES_OF_BLOCKS)
            minima[TILE_ROWS * j] = block->minima[j];
    }
}

ALWAYS_INLINE size_t record_bytes(Layout layout) {
    return (size_t)(header_bytes(layout) + layout.record_groups * code_bytes(layout));
}

/* All bits of the exponent are set: NaN or infinite. */
ALWAYS_INLINE int is_special(uint32_t bits, uint32_t exponent) { return (bits & exponent) == exponent; }

/* Records in order, all rows of each: what is written to stays in the first cache. */
ALWAYS_INLINE int pack_quantized(int format, int64_t columns, const uint8_t *source, size_t row_bytes, int rows,
                                 uint8_t *tile) {
    const Layout layout = layout_of(format);
    const int record_groups = layout.record_groups, block_groups = block_inputs(format) / GROUP_SIZE;
    int special = 0;
    for (int64_t group = 0; group < columns / GROUP_SIZE; group += block_groups) {
        uint8_t *header = tile + (size_t)(group / record_groups) * record_bytes(layout);
        int slot = (int)(group % record_groups);
        const uint8_t *bytes = source + (size_t)(group / block_groups) * (size_t)block_bytes(format);
        for (int row = 0; row < rows; row++) {
            Block block;
            read_block(format, bytes + (size_t)row * row_bytes, &block);
            special |= is_special(block.scale, FP16_EXPONENT);
            if (layout.minima)
                special |= is_special(block.minimum, FP16_EXPONENT);
            write_scales(layout, &block, slot, row, header);
            uint8_t *lines = header + header_bytes(layout) + slot * code_bytes(layout);
            for (int j = 0; j < block_groups; j++)
                write_codes(layout, block.codes + GROUP_SIZE * j, row, lines + j * code_bytes(layout));
        }
    }
    return !special;
}

ALWAYS_INLINE int pack_floats(size_t bytes, uint32_t exponent, int64_t columns, const uint8_t *source, size_t row_bytes,
                              int rows, uint8_t *tile) {
    int special = 0;
    for (int64_t i = 0; i < columns; i++)
        for (int row = 0; row < rows; row++) {
            const uint8_t *number = source + (size_t)row * row_bytes + bytes * (size_t)i;
            special |= is_special(bytes == 4 ? read32(number) : read16(number), exponent);
            memcpy(tile + bytes * (size_t)(TILE_ROWS * i + row), number, bytes);
        }
    return !special;
}

int pack_tile(int format, int64_t columns, const uint8_t *source, size_t row_bytes, int rows, uint8_t *tile) {
    memset(tile, 0, packed_tile_bytes(format, columns));
#define PACK(FORMAT)                                                                                                   \
    case FORMAT_##FORMAT: return pack_quantized(FORMAT_##FORMAT, columns, source, row_bytes, rows, tile);
    switch (format) {
        FOR_QUANTIZED_FORMATS(PACK)
    case FORMAT_F32: return pack_floats(4, 0x7f800000, columns, source, row_bytes, rows, tile);
    case FORMAT_BF16: return pack_floats(2, 0x7f80, columns, source, row_bytes, rows, tile);
    default: return pack_floats(2, FP16_EXPONENT, columns, source, row_bytes, rows, tile);
    }
#undef PACK
}

/* ---- rows of tiles */

/* A quad's codes in a plane of `bits` bits of each. */
static uint32_t read_plane(const uint8_t *lines, int bits, int quad, int row) {
    const uint32_t word = read32(lines + LINE_BYTES * plane_line(bits, quad) + 4 * row);
    return word >> plane_bit(bits, quad) & 0x01010101u * ((1u << bits) - 1);
}

static void read_codes(Layout layout, const uint8_t *lines, int row, uint8_t *codes) {
    for (int q = 0; q < GROUP_QUADS; q++) {
        uint32_t quad = read_plane(lines, layout.low_bits, q, row);
        if (layout.high_bits)
            quad |= read_plane(lines + LINE_BYTES * layout.low_bits, layout.high_bits, q, row) << layout.low_bits;
        memcpy(codes + 4 * q, &quad, 4);
    }
}

/* What write_scales has written. */
static void read_scales(Layout layout, const uint8_t *header, int slot, int row, Block *block) {
    if (layout.scales == SCALES_OF_GROUPS) {
        block->scale = read16(header + 2 * (TILE_ROWS * slot + row));
        if (layout.minima)
            block->minimum = read16(header + 2 * (TILE_ROWS * (layout.record_groups + slot) + row));
        return;
    }
    const uint8_t *scales = header + super_scale_offset(layout) + row, *minima = scales + super_scale_bytes(layout);
    const int both = layout.minima && layout.scales == SCALES_OF_HALVES; /* in one byte */
    block->scale = read16(header + 2 * row);
    if (layout.minima)
        block->minimum = read16(header + 2 * (TILE_ROWS + row));
    for (int j = 0; j < super_scale_bytes(layout) / TILE_ROWS; j++) {
        const uint8_t scale = scales[TILE_ROWS * j];
        block->scales[j] = (int8_t)(both ? scale & 15 : scale);
        if (layout.minima)
            block->minima[j] = both ? scale >> 4 : minima[TILE_ROWS * j];
    }
}

void packed_decode_row(const PackedMatrix *matrix, int64_t row, float *values) {
    const Layout layout = layout_of(matrix->format);
    const uint8_t *tile = matrix->tiles + (size_t)(row / TILE_ROWS) * matrix->tile_bytes;
    const int lane = (int)(row % TILE_ROWS), inputs = block_inputs(matrix->format), bytes = block_bytes(matrix->format);
    for (int64_t i = 0; i < matrix->columns; i += inputs) {
        if (inputs == 1) {
            values[i] = format_decode_number(matrix->format, tile + bytes * (TILE_ROWS * i + lane));
            continue;
        }
        const int64_t group = i / GROUP_SIZE;
        const int slot = (int)(group % layout.record_groups);
        const uint8_t *header = tile + (size_t)(group / layout.record_groups) * record_bytes(layout);
        const uint8_t *lines = header + header_bytes(layout) + slot * code_bytes(layout);
        Block block;
        read_scales(layout, header, slot, lane, &block);
        for (int j = 0; j < inputs / GROUP_SIZE; j++)
            read_codes(layout, lines + j * code_bytes(layout), lane, block.codes + GROUP_SIZE * j);
        decode_block(matrix->format, &block, values + i);
    }
}

/* One row's entries of an array that has `size` bytes for each of 16 rows again and again. */
static void copy_lane(size_t size, size_t bytes, const uint8_t *source, int from, uint8_t *target, int to) {
    for (size_t at = 0; at < bytes; at += TILE_ROWS * size)
        memcpy(target + at + size * (size_t)to, source + at + size * (size_t)from, size);
}

void packed_copy_row(const PackedMatrix *matrix, int64_t from, int row, uint8_t *tile) {
    const Layout layout = layout_of(matrix->format);
    const uint8_t *source = matrix->tiles + (size_t)(from / TILE_ROWS) * matrix->tile_bytes;
    const int lane = (int)(from % TILE_ROWS);
    if (!layout.record_groups) {
        const size_t size = (size_t)block_bytes(matrix->format);
        copy_lane(size, size * TILE_ROWS * (size_t)matrix->columns, source, lane, tile, row);
        return;
    }
    const size_t header = (size_t)header_bytes(layout);
    const size_t halves = layout.scales == SCALES_OF_GROUPS ? header : (size_t)super_scale_offset(layout);
    for (size_t record = 0; record < matrix->tile_bytes; record += record_bytes(layout)) {
        const size_t left = matrix->tile_bytes - record, all = record_bytes(layout), end = left < all ? left : all;
        copy_lane(2, halves, source + record, lane, tile + record, row);
        copy_lane(1, header - halves, source + record + halves, lane, tile + record + halves, row);
        copy_lane(4, end - header, source + record + header, lane, tile + record + header, row);
    }
}
