/* Linear layers in portable C: the meaning of every other tier. */
#define WIDTH 1
#include "lanes.h"
#include "layout.h"
#include "linear.h"

enum { STRIP_ROWS = 1, MOST_COLUMNS = 1, MOST_FLOAT_COLUMNS = 1, MOST_CHAINS = 1, SIGNED_CODES = 0 };

#define FOR_QUANTIZED_COLUMNS(X, FORMAT) X(FORMAT, 1)
#define FOR_FLOAT_COLUMNS FOR_QUANTIZED_COLUMNS

typedef uint32_t Codes;

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

ALWAYS_INLINE Codes load_line(const uint8_t *line) {
    Codes codes;
    memcpy(&codes, line, sizeof codes);
    return codes;
}

ALWAYS_INLINE Codes take_bits(Codes bytes, int from, int to, int count) {
    return (from > to ? bytes >> (from - to) : bytes << (to - from)) & 0x01010101u * (((1u << count) - 1) << to);
}

ALWAYS_INLINE Codes wide_codes(Codes codes) { return codes; }

ALWAYS_INLINE Codes table_values(Codes codes) {
    Codes values = 0;
    for (int i = 0; i < 32; i += 8)
        values |= (uint32_t)(IQ4_VALUES[codes >> i & 15] + 128) << i;
    return values;
}

ALWAYS_INLINE IntLanes splat_int(int32_t whole) { return whole; }

ALWAYS_INLINE IntLanes zero_product(int32_t minus_sum, int zero) { return minus_sum * zero; }

ALWAYS_INLINE void add_quad(IntLanes *sum, Codes codes, const int8_t *values, const int quad) {
    for (int i = 0; i < 4; i++)
        *sum += (int32_t)(codes >> (8 * i) & 255) * values[4 * quad + i];
}

ALWAYS_INLINE IntLanes minima_product(const IntLanes minima[2], const ActivationGroup *x) {
    return minima[0] * x->minus_halves[0] + minima[1] * x->minus_halves[1];
}

#include "linear_kernels.h"

const LinearKernels linear_base = {quantize, multiply};
