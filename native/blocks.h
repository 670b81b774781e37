/* Blocks of a file: every quantized format read into one form. */
#ifndef DRAFTREE_BLOCKS_H
#define DRAFTREE_BLOCKS_H

#include <string.h>

#include "layout.h"

enum { SUPER_SIZE = SUPER_GROUPS * GROUP_SIZE };

static inline uint16_t read16(const uint8_t *source) {
    uint16_t value;
    memcpy(&value, source, 2);
    return value;
}

static inline uint32_t read32(const uint8_t *source) {
    uint32_t value;
    memcpy(&value, source, 4);
    return value;
}

/* A block as every quantized format has it. Scales and minima of super-blocks: one for every 32 or 16 inputs. */
typedef struct {
    uint16_t scale, minimum; /* float16 */
    int8_t scales[SUPER_SIZE / 16];
    uint8_t minima[SUPER_SIZE / 16];
    uint8_t codes[SUPER_SIZE];
} Block;

/* Inputs of a block of a file, and its bytes; 0: unknown format. */
static inline int block_inputs(int format) {
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

static inline int block_bytes(int format) {
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
static inline void read_scales_6(const uint8_t *source, Block *block) {
    for (int j = 0; j < 4; j++) {
        block->scales[j] = source[j] & 63;
        block->minima[j] = source[j + 4] & 63;
        block->scales[j + 4] = (int8_t)((source[j + 8] & 15) | (source[j] >> 6) << 4);
        block->minima[j + 4] = (uint8_t)(source[j + 8] >> 4 | (source[j + 4] >> 6) << 4);
    }
}

static inline void read_q2_k(const uint8_t *source, Block *block) {
    for (int j = 0; j < 16; j++) {
        block->scales[j] = source[j] & 15;
        block->minima[j] = source[j] >> 4;
    }
    read_pairs(source + 16, block->codes);
    block->scale = read16(source + 80);
    block->minimum = read16(source + 82);
}

static inline void read_q3_k(const uint8_t *source, Block *block) {
    read_pairs(source + 32, block->codes);
    add_bits(source, 2, block->codes);
    const uint8_t *scales = source + 96;
    for (int j = 0; j < 16; j++) {
        int low = scales[j % 8] >> (4 * (j / 8)) & 15, high = scales[8 + j % 4] >> (2 * (j / 4)) & 3;
        block->scales[j] = (int8_t)((low | high << 4) - 32);
    }
    block->scale = read16(source + 108);
}

static inline void read_q4_k(const uint8_t *source, Block *block) {
    block->scale = read16(source);
    block->minimum = read16(source + 2);
    read_scales_6(source + 4, block);
    for (int j = 0; j < 4; j++)
        read_nibbles(source + 16 + 32 * j, 32, block->codes + 64 * j);
}

static inline void read_q5_k(const uint8_t *source, Block *block) {
    block->scale = read16(source);
    block->minimum = read16(source + 2);
    read_scales_6(source + 4, block);
    for (int j = 0; j < 4; j++)
        read_nibbles(source + 48 + 32 * j, 32, block->codes + 64 * j);
    add_bits(source + 16, 4, block->codes);
}

static inline void read_q6_k(const uint8_t *source, Block *block) {
    uint8_t high[SUPER_SIZE];
    for (int half = 0; half < 2; half++)
        read_nibbles(source + 64 * half, 64, block->codes + 128 * half);
    read_pairs(source + 128, high);
    for (int i = 0; i < SUPER_SIZE; i++)
        block->codes[i] |= (uint8_t)(high[i] << 4);
    memcpy(block->scales, source + 192, 16);
    block->scale = read16(source + 208);
}

static inline void read_iq4_xs(const uint8_t *source, Block *block) {
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

/* Write a block's weights (formats.c): weight = scale * (code - zero) + minimum, each step rounded. */
void decode_block(int format, const Block *block, float *values);

#endif
