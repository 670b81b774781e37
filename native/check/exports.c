/* What tests/models/native/test_linear.py calls by ctypes: one table, since the library hides everything else. */
#include "../cpu.h"

__attribute__((visibility("default"))) const struct {
    size_t (*format_row_bytes)(int format, int64_t columns);
    void (*format_decode_row)(int format, const uint8_t *source, int64_t columns, float *values);
    size_t (*packed_tile_bytes)(int format, int64_t columns);
    void (*pack_tile)(int format, int64_t columns, const uint8_t *source, size_t row_bytes, int rows, uint8_t *tile);
    float (*fp16_to_fp32)(uint16_t half);
    uint16_t (*fp32_to_fp16)(float value);
    size_t (*activation_bytes)(int count, int64_t inputs);
    const Tier *(*tier_at)(int index);
} exports = {format_row_bytes, format_decode_row, packed_tile_bytes, pack_tile,
             fp16_to_fp32,     fp32_to_fp16,      activation_bytes,  tier_at};
