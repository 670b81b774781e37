#include "formats.h"

#include <string.h>

#include "layout.h"

enum { SUPER_SIZE = SUPER_GROUPS * GROUP_SIZE, FP16_EXPONENT = 0x7c00 };

float fp16_to_fp32(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 1023, bits;
    float value;
    if (exponent == 0) { /* zero or subnormal: fraction * 2^-24, exact */
        value = (float)fraction * 0x1p-24f;
        memcpy(&bits, &value, 4);
    } else if (exponent == 31) {
        bits = 0x7f800000 | fraction << 13;
    } else {
        bits = (exponent + 112) << 23 | fraction << 13;
    }
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

uint16_t fp32_to_fp16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) /* NaN: keep it one */
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) /* rounds beyond the largest float16 */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) { /* subnormal: adding 0.5 rounds to multiples of 2^-24 */
        float shifted;
        memcpy(&shifted, &magnitude, 4);
        shifted += 0.5f;
        memcpy(&magnitude, &shifted, 4);
        return (uint16_t)(sign | (magnitude - 0x3f000000));
    }
    magnitude += 0xfff + (magnitude >> 13 & 1) - (112u << 23);
    return (uint16_t)(sign | magnitude >> 13);
}

static uint16_t read16(const uint8_t *source) {
    uint16_t value;
    memcpy(&value, source, 2);
    return value;
}

static uint32_t read32(const uint8_t *source) {
    uint32_t value;
    memcpy(&value, source, 4);
    return value;
}

/* ---- Blocks of a file ---- */

/* A block as every quantized format has it. Scales and minima of super-blocks: one for every 32 or 16 inputs. */
typedef struct {
    uint16_t scale, minimum; /* float16 */
    int8_t scales[SUPER_SIZE / 16];
    uint8_t minima[SUPER_SIZE / 16];
    uint8_t codes[SUPER_SIZE];
} Block;

/* Inputs of a block of a file, and its bytes; 0: unknown format. */
static int block_inputs(int format) {
    switch (format) {
    case FORMAT_F32:
    case FORMAT_F16:
    case FORMAT_BF16: return 1;
    default:
        return layout_of(format).record_groups == SUPER_GROUPS ? SUPER_SIZE
               : layout_of(format).record_groups               ? GROUP_SIZE
                                                               : 0;
    }
}

static int block_bytes(int format) {
    switch (format) {
    case FORMAT_F32: return 4;
    case FORMAT_F16:
    case FORMAT_BF16: return 2;
    case FORMAT_Q4_0:
    case FORMAT_IQ4_NL: return 2 + 16;
    case FORMAT_Q4_1: return 2 + 2 + 16;
    case FORMAT_Q5_0: return 2 + 4 + 16;
    case FORMAT_Q5_1: return 2 + 2 + 4 + 16;
    case FORMAT_Q8_0: return 2 + 32;
    case FORMAT_Q2_K: return 16 + 64 + 2 + 2;
    case FORMAT_Q3_K: return 32 + 64 + 12 + 2;
    case FORMAT_Q4_K: return 2 + 2 + 12 + 128;
    case FORMAT_Q5_K: return 2 + 2 + 12 + 32 + 128;
    case FORMAT_Q6_K: return 128 + 64 + 16 + 2;
    case FORMAT_IQ4_XS: return 2 + 2 + 4 + 128;
    default: return 0;
    }
}

/* codes[i] and codes[i + count] from the low and the high half of byte i. */
ALWAYS_INLINE void read_nibbles(const uint8_t *source, int count, uint8_t *codes) {
    for (int i = 0; i < count; i++) {
        codes[i] = source[i] & 15;
        codes[i + count] = source[i] >> 4;
    }
}

/* Bit i of a 32-bit word is bit 4 of code i. */
ALWAYS_INLINE void add_bits_of_word(uint32_t word, uint8_t *codes) {
    for (int i = 0; i < GROUP_SIZE; i++)
        codes[i] |= (uint8_t)((word >> i & 1) << 4);
}

/* Two bits of each code: byte l of a half holds inputs l, l + 32, l + 64 and l + 96. */
ALWAYS_INLINE void read_pairs(const uint8_t *source, uint8_t *codes) {
    for (int half = 0; half < 2; half++)
        for (int j = 0; j < 4; j++)
            for (int l = 0; l < 32; l++)
                codes[128 * half + 32 * j + l] = source[32 * half + l] >> (2 * j) & 3;
}

/* One bit of each code: bit j of byte l belongs to input 32 j + l; it becomes bit `position`. */
ALWAYS_INLINE void add_bits(const uint8_t *source, int position, uint8_t *codes) {
    for (int j = 0; j < 8; j++)
        for (int l = 0; l < 32; l++)
            codes[32 * j + l] |= (uint8_t)((source[l] >> j & 1) << position);
}

/* Q4_K and Q5_K: eight scales and eight minima of 6 bits in 12 bytes. */
static void read_scales_6(const uint8_t *source, Block *block) {
    for (int j = 0; j < 4; j++) {
        block->scales[j] = source[j] & 63;
        block->minima[j] = source[j + 4] & 63;
        block->scales[j + 4] = (int8_t)((source[j + 8] & 15) | (source[j] >> 6) << 4);
        block->minima[j + 4] = (uint8_t)(source[j + 8] >> 4 | (source[j + 4] >> 6) << 4);
    }
}

static void read_q2_k(const uint8_t *source, Block *block) {
    for (int j = 0; j < 16; j++) {
        block->scales[j] = source[j] & 15;
        block->minima[j] = source[j] >> 4;
    }
    read_pairs(source + 16, block->codes);
    block->scale = read16(source + 80);
    block->minimum = read16(source + 82);
}

static void read_q3_k(const uint8_t *source, Block *block) {
    read_pairs(source + 32, block->codes);
    add_bits(source, 2, block->codes);
    const uint8_t *scales = source + 96;
    for (int j = 0; j < 16; j++) {
        int low = scales[j % 8] >> (4 * (j / 8)) & 15, high = scales[8 + j % 4] >> (2 * (j / 4)) & 3;
        block->scales[j] = (int8_t)((low | high << 4) - 32);
    }
    block->scale = read16(source + 108);
}

static void read_q4_k(const uint8_t *source, Block *block) {
    block->scale = read16(source);
    block->minimum = read16(source + 2);
    read_scales_6(source + 4, block);
    for (int j = 0; j < 4; j++)
        read_nibbles(source + 16 + 32 * j, 32, block->codes + 64 * j);
}

static void read_q5_k(const uint8_t *source, Block *block) {
    block->scale = read16(source);
    block->minimum = read16(source + 2);
    read_scales_6(source + 4, block);
    for (int j = 0; j < 4; j++)
        read_nibbles(source + 48 + 32 * j, 32, block->codes + 64 * j);
    add_bits(source + 16, 4, block->codes);
}

static void read_q6_k(const uint8_t *source, Block *block) {
    uint8_t high[SUPER_SIZE];
    for (int half = 0; half < 2; half++)
        read_nibbles(source + 64 * half, 64, block->codes + 128 * half);
    read_pairs(source + 128, high);
    for (int i = 0; i < SUPER_SIZE; i++)
        block->codes[i] |= (uint8_t)(high[i] << 4);
    memcpy(block->scales, source + 192, 16);
    block->scale = read16(source + 208);
}

static void read_iq4_xs(const uint8_t *source, Block *block) {
    block->scale = read16(source);
    uint32_t high = read16(source + 2);
    for (int j = 0; j < 8; j++) {
        uint32_t low = source[4 + j / 2] >> (4 * (j % 2)) & 15;
        block->scales[j] = (int8_t)((int)(low | (high >> (2 * j) & 3) << 4) - 32);
        read_nibbles(source + 8 + 16 * j, 16, block->codes + 32 * j);
    }
}

/* Formats with blocks of 32: the scale, the minimum, bits 4 of the codes, the codes. */
ALWAYS_INLINE void read_small_block(Layout layout, const uint8_t *source, Block *block) {
    block->scale = read16(source);
    source += 2;
    if (layout.minima) {
        block->minimum = read16(source);
        source += 2;
    }
    if (layout.low_bits == 8) {
        for (int i = 0; i < GROUP_SIZE; i++)
            block->codes[i] = source[i] ^ 0x80;
        return;
    }
    read_nibbles(layout.high_bits ? source + 4 : source, 16, block->codes);
    if (layout.high_bits)
        add_bits_of_word(read32(source), block->codes);
}

ALWAYS_INLINE void read_block(int format, const uint8_t *source, Block *block) {
    switch (format) {
    case FORMAT_Q2_K: read_q2_k(source, block); break;
    case FORMAT_Q3_K: read_q3_k(source, block); break;
    case FORMAT_Q4_K: read_q4_k(source, block); break;
    case FORMAT_Q5_K: read_q5_k(source, block); break;
    case FORMAT_Q6_K: read_q6_k(source, block); break;
    case FORMAT_IQ4_XS: read_iq4_xs(source, block); break;
    default: read_small_block(layout_of(format), source, block);
    }
}

/* ---- Rows as float32 ---- */

size_t format_row_bytes(int format, int64_t columns) {
    int inputs = block_inputs(format);
    if (inputs == 0 || columns <= 0 || columns % inputs != 0)
        return 0;
    return (size_t)(columns / inputs) * (size_t)block_bytes(format);
}

/* weight = scale * (code - zero) + minimum, each step rounded. */
static void decode_block(int format, const Block *block, float *values) {
    Layout layout = layout_of(format);
    float scale = fp16_to_fp32(block->scale), minimum = layout.minima ? fp16_to_fp32(block->minimum) : 0;
    int span = layout.scales == SCALES_OF_HALVES ? 16 : GROUP_SIZE;
    for (int i = 0; i < block_inputs(format); i++) {
        int code = layout.table ? IQ4_VALUES[block->codes[i]] : block->codes[i] - layout.zero;
        if (layout.scales == SCALES_OF_GROUPS) {
            values[i] = scale * (float)code;
            if (layout.minima)
                values[i] += minimum;
        } else {
            values[i] = scale * (float)block->scales[i / span] * (float)code;
            if (layout.minima)
                values[i] -= minimum * (float)block->minima[i / span];
        }
    }
}

float format_decode_number(int format, const uint8_t *source) {
    if (format == FORMAT_F16)
        return fp16_to_fp32(read16(source));
    uint32_t bits = format == FORMAT_BF16 ? (uint32_t)read16(source) << 16 : read32(source);
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

void format_decode_row(int format, const uint8_t *source, int64_t columns, float *values) {
    int inputs = block_inputs(format), bytes = block_bytes(format);
    for (int64_t i = 0; i < columns; i += inputs, source += bytes) {
        if (inputs == 1) {
            values[i] = format_decode_number(format, source);
            continue;
        }
        Block block;
        read_block(format, source, &block);
        decode_block(format, &block, values + i);
    }
}

/* ---- Tiles ---- */

int format_is_quantized(int format) { return layout_of(format).record_groups != 0; }

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
    case FORMAT: return pack_quantized(FORMAT, columns, source, row_bytes, rows, tile);
    switch (format) {
        PACK(FORMAT_Q4_0)
        PACK(FORMAT_Q4_1)
        PACK(FORMAT_Q5_0)
        PACK(FORMAT_Q5_1)
        PACK(FORMAT_Q8_0)
        PACK(FORMAT_Q2_K)
        PACK(FORMAT_Q3_K)
        PACK(FORMAT_Q4_K)
        PACK(FORMAT_Q5_K)
        PACK(FORMAT_Q6_K)
        PACK(FORMAT_IQ4_NL)
        PACK(FORMAT_IQ4_XS)
    case FORMAT_F32: return pack_floats(4, 0x7f800000, columns, source, row_bytes, rows, tile);
    case FORMAT_BF16: return pack_floats(2, 0x7f80, columns, source, row_bytes, rows, tile);
    default: return pack_floats(2, FP16_EXPONENT, columns, source, row_bytes, rows, tile);
    }
#undef PACK
}

/* ---- Rows of tiles ---- */

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
