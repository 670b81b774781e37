/* Linear layers with AVX-512 VNNI: 16 rows a register, up to 16 columns at a time. */
#define WIDTH 16
#include "lanes.h"
#include "layout.h"

enum { STRIP_ROWS = 16, MOST_COLUMNS = 16, MOST_FLOAT_COLUMNS = 8, MOST_CHAINS = 8, SIGNED_CODES = 0 };

#define FOR_QUANTIZED_COLUMNS(X, FORMAT)                                                                               \
    X(FORMAT, 1)                                                                                                       \
    X(FORMAT, 2)                                                                                                       \
    X(FORMAT, 3)                                                                                                       \
    X(FORMAT, 4)                                                                                                       \
    X(FORMAT, 5) X(FORMAT, 6) X(FORMAT, 7) X(FORMAT, 8) X(FORMAT, 10) X(FORMAT, 12) X(FORMAT, 14) X(FORMAT, 16)
#define FOR_FLOAT_COLUMNS(X, FORMAT)                                                                                   \
    X(FORMAT, 1) X(FORMAT, 2) X(FORMAT, 3) X(FORMAT, 4) X(FORMAT, 5) X(FORMAT, 6) X(FORMAT, 7) X(FORMAT, 8)

typedef IntLanes Codes;

static void quantize_group(const float *values, ActivationGroup *group) {
    __m512 low = _mm512_loadu_ps(values), high = _mm512_loadu_ps(values + 16);
    /* max gives the second operand where the first is no number */
    const __m512 low_magnitude = _mm512_max_ps(_mm512_abs_ps(low), _mm512_setzero_ps());
    float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(high), low_magnitude));
    __m512 inverse = _mm512_set1_ps(largest >= 1e-30f ? 127 / largest : 0);
    const __m512 least = _mm512_set1_ps(-127); /* also where an activation is no number */
    __m512i low_values = _mm512_cvtps_epi32(_mm512_max_ps(_mm512_mul_ps(low, inverse), least));
    __m512i high_values = _mm512_cvtps_epi32(_mm512_max_ps(_mm512_mul_ps(high, inverse), least));
    int low_sum = _mm512_reduce_add_epi32(low_values), high_sum = _mm512_reduce_add_epi32(high_values);
    _mm_storeu_si128((__m128i *)group->values, _mm512_cvtepi32_epi8(low_values));
    _mm_storeu_si128((__m128i *)(group->values + 16), _mm512_cvtepi32_epi8(high_values));
    describe_group(group, largest, low_sum, high_sum);
}

ALWAYS_INLINE Codes load_line(const uint8_t *line) { return (Codes)_mm512_loadu_si512(line); }

/* Bits of other bytes come in from the side, and are masked. */
ALWAYS_INLINE Codes take_bits(Codes bytes, int from, int to, int count) {
    __m512i moved = (__m512i)bytes;
    if (from > to)
        moved = _mm512_srli_epi16(moved, (unsigned)(from - to));
    if (from < to)
        moved = _mm512_slli_epi16(moved, (unsigned)(to - from));
    return (Codes)_mm512_and_si512(moved, _mm512_set1_epi8((char)(((1 << count) - 1) << to)));
}

ALWAYS_INLINE Codes wide_codes(Codes codes) { return codes; }

ALWAYS_INLINE Codes table_values(Codes codes) {
    const __m128i values = _mm_xor_si128(_mm_loadu_si128((const __m128i *)IQ4_VALUES), _mm_set1_epi8((char)128));
    return (Codes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)codes);
}

ALWAYS_INLINE IntLanes splat_int(int32_t whole) { return (IntLanes)_mm512_set1_epi32(whole); }

/* By a shift: compilers make a product one of scalars, which takes another way to all lanes. */
ALWAYS_INLINE IntLanes zero_product(int32_t minus_sum, int zero) {
    if (!zero)
        return splat_int(0);
    return (IntLanes)_mm512_slli_epi32(_mm512_set1_epi32(minus_sum), (unsigned)__builtin_ctz((unsigned)zero));
}

/* Four bytes or two int16 of a column, for all rows. */
ALWAYS_INLINE __m512i broadcast_word(const void *source) {
    int32_t word;
    memcpy(&word, source, 4);
    return _mm512_set1_epi32(word);
}

ALWAYS_INLINE void add_quad(IntLanes *sum, Codes codes, const int8_t *values, const int quad) {
    *sum = (IntLanes)_mm512_dpbusd_epi32((__m512i)*sum, (__m512i)codes, broadcast_word(values + 4 * quad));
}

ALWAYS_INLINE IntLanes minima_product(const IntLanes minima[2], const ActivationGroup *x) {
    const IntLanes pairs = minima[0] | minima[1] << splat_int(16);
    return (IntLanes)_mm512_madd_epi16((__m512i)pairs, broadcast_word(x->minus_pair));
}

#include "linear_kernels.h"

const LinearKernels linear_avx512 = {quantize, multiply};
