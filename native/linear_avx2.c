/* Linear layers with AVX2: 8 rows (half a tile) a register, up to 8 columns at a time. Compiled twice: with AVX_VNNI
 * defined, dot products of quads are one instruction. */
#define WIDTH 8
#include "lanes.h"
#include "layout.h"

enum { STRIP_ROWS = 8, MOST_COLUMNS = 8, MOST_FLOAT_COLUMNS = 6, MOST_CHAINS = 1 };

#define FOR_QUANTIZED_COLUMNS(X, FORMAT)                                                                               \
    X(FORMAT, 1) X(FORMAT, 2) X(FORMAT, 3) X(FORMAT, 4) X(FORMAT, 5) X(FORMAT, 6) X(FORMAT, 7) X(FORMAT, 8)
#define FOR_FLOAT_COLUMNS(X, FORMAT) X(FORMAT, 1) X(FORMAT, 2) X(FORMAT, 3) X(FORMAT, 4) X(FORMAT, 5) X(FORMAT, 6)

typedef IntLanes Codes;

ALWAYS_INLINE float reduce_max(__m256 values) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

ALWAYS_INLINE int reduce_add_ints(__m256i values) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

static void quantize_group(const float *values, ActivationGroup *group) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 parts[4], most = _mm256_setzero_ps();
    __m256i rounded[4];
    UNROLL for (int i = 0; i < 4; i++) {
        parts[i] = _mm256_loadu_ps(values + 8 * i);
        most = _mm256_max_ps(_mm256_and_ps(parts[i], magnitude), most);
    } /* the second operand where the first is no number, here and below */
    float largest = reduce_max(most);
    const __m256 inverse = _mm256_set1_ps(largest >= 1e-30f ? 127 / largest : 0);
    UNROLL for (int i = 0; i < 4; i++)
        rounded[i] = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_mul_ps(parts[i], inverse), _mm256_set1_ps(-127)));
    int low_sum = reduce_add_ints(_mm256_add_epi32(rounded[0], rounded[1]));
    int high_sum = reduce_add_ints(_mm256_add_epi32(rounded[2], rounded[3]));
    __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(rounded[0], rounded[1]), _mm256_packs_epi32(rounded[2], rounded[3]));
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)group->values, bytes);
    describe_group(group, largest, low_sum, high_sum);
}

ALWAYS_INLINE Codes load_line(const uint8_t *line) { return (Codes)_mm256_loadu_si256((const __m256i *)line); }

/* Bits of other bytes come in from the side, and are masked. */
ALWAYS_INLINE Codes take_bits(Codes bytes, int from, int to, int count) {
    __m256i moved = (__m256i)bytes;
    if (from > to)
        moved = _mm256_srli_epi16(moved, from - to);
    if (from < to)
        moved = _mm256_slli_epi16(moved, to - from);
    return (Codes)_mm256_and_si256(moved, _mm256_set1_epi8((char)(((1 << count) - 1) << to)));
}

ALWAYS_INLINE Codes flipped(Codes codes) {
    return (Codes)_mm256_xor_si256((__m256i)codes, _mm256_set1_epi8((char)128));
}

ALWAYS_INLINE Codes signed_values(Codes codes) {
    const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)IQ4_VALUES));
    return (Codes)_mm256_shuffle_epi8(values, (__m256i)codes);
}

ALWAYS_INLINE IntLanes splat_int(int32_t whole) { return (IntLanes)_mm256_set1_epi32(whole); }

/* By a shift: compilers make a product one of scalars, which takes another way to all lanes. */
ALWAYS_INLINE IntLanes zero_product(int32_t minus_sum, int zero) {
    if (!zero)
        return splat_int(0);
    return (IntLanes)_mm256_slli_epi32(_mm256_set1_epi32(minus_sum), __builtin_ctz((unsigned)zero));
}

/* Four bytes or two int16 of a column, for all rows. */
ALWAYS_INLINE __m256i broadcast_word(const void *source) {
    int32_t word;
    memcpy(&word, source, 4);
    return _mm256_set1_epi32(word);
}

/* Pairs of int16 from two registers of integers. */
ALWAYS_INLINE __m256i pairs_of(IntLanes low, IntLanes high) {
    return _mm256_blend_epi16((__m256i)low, _mm256_slli_epi32((__m256i)high, 16), 0xaa);
}

ALWAYS_INLINE IntLanes minima_product(const IntLanes minima[2], const ActivationGroup *x) {
    return (IntLanes)_mm256_madd_epi16(pairs_of(minima[0], minima[1]), broadcast_word(x->minus_pair));
}

#ifdef AVX_VNNI

enum { SIGNED_CODES = 0 };

ALWAYS_INLINE Codes wide_codes(Codes codes) { return codes; }

ALWAYS_INLINE Codes table_values(Codes codes) { return flipped(signed_values(codes)); }

ALWAYS_INLINE void add_quad(IntLanes *sum, Codes codes, const int8_t *values, const int quad) {
    *sum = (IntLanes)_mm256_dpbusd_avx_epi32((__m256i)*sum, (__m256i)codes, broadcast_word(values + 4 * quad));
}

#else

#define OWN_PRODUCTS
enum { SIGNED_CODES = 1 };

ALWAYS_INLINE Codes wide_codes(Codes codes) { return flipped(codes); }

ALWAYS_INLINE Codes table_values(Codes codes) { return signed_values(codes); }

/* How many quads add up in 16 bits: 2 * 127 * the largest code for each. At least half of those that product_of adds.
 */
ALWAYS_INLINE int quads_in_16_bits(const Layout layout) {
    return 32767 / (254 * ((1 << (layout.low_bits + layout.high_bits)) - 1));
}

/* Keeps compilers from regrouping a sum, which would take more registers than there are. */
ALWAYS_INLINE __m256i in_order(__m256i sum) {
    __asm__("" : "+x"(sum));
    return sum;
}

/* The sum of weight * activation over all quads; codes are the signed weights. Unsigned times signed is |weight| times
 * the activation with the weight's sign. */
ALWAYS_INLINE __m256i product_of_signed(const Codes codes[GROUP_QUADS], const ActivationGroup *x) {
    __m256i product = _mm256_setzero_si256();
    UNROLL for (int q = 0; q < GROUP_QUADS; q++) {
        __m256i values = _mm256_sign_epi8(broadcast_word(x->values + 4 * q), (__m256i)codes[q]);
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)codes[q]), values);
        product = _mm256_add_epi32(product, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return product;
}

/* The sum of code * activation over quads first..last, times factors (pairs of int16). */
ALWAYS_INLINE __m256i product_of(const Layout layout, const Codes codes[GROUP_QUADS], const ActivationGroup *x,
                                 const int first, const int last, __m256i factors) {
    __m256i even = _mm256_maddubs_epi16((__m256i)codes[first], broadcast_word(x->values + 4 * first));
    __m256i odd = _mm256_maddubs_epi16((__m256i)codes[first + 1], broadcast_word(x->values + 4 * (first + 1)));
    UNROLL for (int q = first + 2; q < last; q += 2) {
        __m256i next_even = _mm256_maddubs_epi16((__m256i)codes[q], broadcast_word(x->values + 4 * q));
        __m256i next_odd = _mm256_maddubs_epi16((__m256i)codes[q + 1], broadcast_word(x->values + 4 * (q + 1)));
        even = in_order(_mm256_add_epi16(even, next_even));
        odd = in_order(_mm256_add_epi16(odd, next_odd));
    }
    if (last - first <= quads_in_16_bits(layout))
        return _mm256_madd_epi16(_mm256_add_epi16(even, odd), factors);
    return _mm256_add_epi32(_mm256_madd_epi16(even, factors), _mm256_madd_epi16(odd, factors));
}

/* With SCALES_OF_HALVES factors are multiplied in pairs of products, before these are added. */
ALWAYS_INLINE void group_products(const Layout layout, const int most, const int columns,
                                  const Codes codes[GROUP_QUADS], const IntLanes factors[2], const ActivationGroup *x,
                                  IntLanes *products) {
    (void)most, (void)columns; /* one */
    if (layout.zero == 128) {
        *products = (IntLanes)product_of_signed(codes, x);
        return;
    }
    if (layout.scales != SCALES_OF_HALVES) {
        const __m256i product = product_of(layout, codes, x, 0, GROUP_QUADS, _mm256_set1_epi16(1));
        *products = (IntLanes)product + zero_product(x->minus_sum, layout.zero);
        return;
    }
    const __m256i low = pairs_of(factors[0], factors[0]), high = pairs_of(factors[1], factors[1]);
    const __m256i zeros =
        _mm256_slli_epi16(_mm256_blend_epi16(low, high, 0xaa), __builtin_ctz((unsigned)layout.zero | 256));
    __m256i product =
        _mm256_add_epi32(product_of(layout, codes, x, 0, 4, low), product_of(layout, codes, x, 4, 8, high));
    if (layout.zero)
        product = _mm256_add_epi32(product, _mm256_madd_epi16(zeros, broadcast_word(x->minus_pair)));
    *products = (IntLanes)product;
}

#endif

#include "linear_kernels.h"

#ifdef AVX_VNNI
const LinearKernels linear_avx_vnni = {quantize, multiply};
#else
const LinearKernels linear_avx2 = {quantize, multiply};
#endif
