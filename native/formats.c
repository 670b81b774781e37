/* Numbers and rows of a file as float32. */
#include "formats.h"

#include "blocks.h"

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

size_t format_row_bytes(int format, int64_t columns) {
    int inputs = block_inputs(format);
    if (inputs == 0 || columns <= 0 || columns % inputs != 0)
        return 0;
    return (size_t)(columns / inputs) * (size_t)block_bytes(format);
}

void decode_block(int format, const Block *block, float *values) {
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

int format_is_quantized(int format) { return layout_of(format).record_groups != 0; }
