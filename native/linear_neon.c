/* Linear layers with NEON's dot product (ARMv8.2): 8 rows (half a tile) in two registers, up to 4 columns at a time. */
#define WIDTH 4
#include "lanes.h"
#include "layout.h"

enum { STRIP_ROWS = 8, MOST_COLUMNS = 4, MOST_FLOAT_COLUMNS = 4, MOST_CHAINS = 1, SIGNED_CODES = 1 };

#define FOR_QUANTIZED_COLUMNS(X, FORMAT) X(FORMAT, 1) X(FORMAT, 2) X(FORMAT, 3) X(FORMAT, 4)
#define FOR_FLOAT_COLUMNS FOR_QUANTIZED_COLUMNS

typedef uint8x16_t Codes;

static void quantize_group(const float *values, ActivationGroup *group) {
    float32x4_t parts[8], most = vdupq_n_f32(0);
    UNROLL for (int i = 0; i < 8; i++) {
        parts[i] = vld1q_f32(values + 4 * i);
        most = vmaxnmq_f32(most, vabsq_f32(parts[i])); /* the other operand where one is no number */
    }
    const float largest = vmaxvq_f32(most), inverse = largest >= 1e-30f ? 127 / largest : 0;
    int sums[2] = {0, 0};
    UNROLL for (int i = 0; i < 4; i++) {
        int32x4_t low = vcvtnq_s32_f32(vmaxnmq_f32(vmulq_n_f32(parts[2 * i], inverse), vdupq_n_f32(-127)));
        int32x4_t high = vcvtnq_s32_f32(vmaxnmq_f32(vmulq_n_f32(parts[2 * i + 1], inverse), vdupq_n_f32(-127)));
        vst1_s8(group->values + 8 * i, vqmovn_s16(vcombine_s16(vqmovn_s32(low), vqmovn_s32(high))));
        sums[i / 2] += vaddvq_s32(vaddq_s32(low, high));
    }
    describe_group(group, largest, sums[0], sums[1]);
}

ALWAYS_INLINE Codes load_line(const uint8_t *line) { return vld1q_u8(line); }

ALWAYS_INLINE Codes take_bits(Codes bytes, int from, int to, int count) {
    bytes = vshlq_u8(bytes, vdupq_n_s8((int8_t)(to - from)));
    return vandq_u8(bytes, vdupq_n_u8((uint8_t)(((1 << count) - 1) << to)));
}

ALWAYS_INLINE Codes wide_codes(Codes codes) { return veorq_u8(codes, vdupq_n_u8(128)); }

ALWAYS_INLINE Codes table_values(Codes codes) { return vreinterpretq_u8_s8(vqtbl1q_s8(vld1q_s8(IQ4_VALUES), codes)); }

ALWAYS_INLINE IntLanes splat_int(int32_t whole) { return vdupq_n_s32(whole); }

ALWAYS_INLINE IntLanes zero_product(int32_t minus_sum, int zero) { return vdupq_n_s32(minus_sum * zero); }

ALWAYS_INLINE void add_quad(IntLanes *sum, Codes codes, const int8_t *values, const int quad) {
    const int8x16_t weights = vreinterpretq_s8_u8(codes), quads = vld1q_s8(values + quad / 4 * 16);
    switch (quad % 4) {
    case 0: *sum = vdotq_laneq_s32(*sum, weights, quads, 0); break;
    case 1: *sum = vdotq_laneq_s32(*sum, weights, quads, 1); break;
    case 2: *sum = vdotq_laneq_s32(*sum, weights, quads, 2); break;
    default: *sum = vdotq_laneq_s32(*sum, weights, quads, 3);
    }
}

ALWAYS_INLINE IntLanes minima_product(const IntLanes minima[2], const ActivationGroup *x) {
    return minima[0] * splat_int(x->minus_halves[0]) + minima[1] * splat_int(x->minus_halves[1]);
}

#include "linear_kernels.h"

const LinearKernels linear_neon = {quantize, multiply};
