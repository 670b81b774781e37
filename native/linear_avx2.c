/* Linear layers with AVX2: 8 rows (half a tile) a register, up to 8 columns at a time. Compiled twice: with AVX_VNNI
 * defined, dot products of quads are one instruction. */
#include <immintrin.h>
#include <string.h>

#include "kernels.h"

enum { MOST_COLUMNS = 8, MOST_FLOAT_COLUMNS = 6, HALF_ROWS = 8 };

ALWAYS_INLINE float largest_of(__m256 values) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

ALWAYS_INLINE int sum_of(__m256i values) {
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
        most = _mm256_max_ps(most, _mm256_and_ps(parts[i], magnitude));
    }
    float largest = largest_of(most);
    const __m256 inverse = _mm256_set1_ps(largest >= 1e-30f ? 127 / largest : 0);
    UNROLL for (int i = 0; i < 4; i++) /* the second operand where the first is no number */
        rounded[i] = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_mul_ps(parts[i], inverse), _mm256_set1_ps(-127)));
    int low_sum = sum_of(_mm256_add_epi32(rounded[0], rounded[1]));
    int high_sum = sum_of(_mm256_add_epi32(rounded[2], rounded[3]));
    __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(rounded[0], rounded[1]), _mm256_packs_epi32(rounded[2], rounded[3]));
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)group->values, bytes);
    describe_group(group, largest, low_sum, high_sum);
}

static void quantize(const float *values, int64_t stride, int64_t inputs, int count, int64_t first_group,
                     int64_t last_group, uint8_t *groups) {
    quantize_blocks(quantize_group, values, stride, inputs, count, first_group, last_group, groups);
}

ALWAYS_INLINE __m256 load_halves(const void *source) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)source));
}

ALWAYS_INLINE __m256i load_signed_bytes(const uint8_t *source) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)source));
}

ALWAYS_INLINE __m256i load_unsigned_bytes(const uint8_t *source) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)source));
}

ALWAYS_INLINE __m256i load_line(const uint8_t *source) { return _mm256_loadu_si256((const __m256i *)source); }

/* Four bytes or two int16 of a column, for all rows. */
ALWAYS_INLINE __m256i broadcast_word(const void *source) {
    int32_t word;
    memcpy(&word, source, 4);
    return _mm256_set1_epi32(word);
}

/* Bits `from`.. of each byte, moved to `to`; bits of other bytes come in from the side, and are masked. */
ALWAYS_INLINE __m256i take_bits(__m256i bytes, int from, int to, int count) {
    if (from > to)
        bytes = _mm256_srli_epi16(bytes, from - to);
    if (from < to)
        bytes = _mm256_slli_epi16(bytes, to - from);
    return _mm256_and_si256(bytes, _mm256_set1_epi8((char)(((1 << count) - 1) << to)));
}

/* A register for each quad of the group. `lines` begins at this half of the tile. Codes of 8 rows; wide codes: as
 * unsigned bytes with AVX-VNNI, else as the signed weights. */
ALWAYS_INLINE void load_codes(const Layout layout, const uint8_t *lines, __m256i codes[GROUP_QUADS]) {
    const int low = layout.low_bits, high = layout.high_bits;
    UNROLL for (int q = 0; q < GROUP_QUADS; q++) {
        codes[q] = load_line(lines + LINE_BYTES * plane_line(low, q));
        if (low < 8)
            codes[q] = take_bits(codes[q], plane_bit(low, q), 0, low);
    }
    if (high) {
        UNROLL for (int q = 0; q < GROUP_QUADS; q++) {
            __m256i line = load_line(lines + LINE_BYTES * (low + plane_line(high, q)));
            codes[q] = _mm256_or_si256(codes[q], take_bits(line, plane_bit(high, q), low, high));
        }
    }
    if (layout.table) {
        const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)IQ4_VALUES));
        UNROLL for (int q = 0; q < GROUP_QUADS; q++)
            codes[q] = _mm256_shuffle_epi8(values, codes[q]);
    }
#ifdef AVX_VNNI
    const int flip = layout.table;
#else
    const int flip = layout.low_bits == 8;
#endif
    if (flip) {
        UNROLL for (int q = 0; q < GROUP_QUADS; q++)
            codes[q] = _mm256_xor_si256(codes[q], _mm256_set1_epi8((char)128));
    }
}

/* What product_of multiplies by: integers, or pairs of the same int16. */
ALWAYS_INLINE __m256i factor_of(__m256i integers) {
#ifdef AVX_VNNI
    return integers;
#else
    return _mm256_blend_epi16(integers, _mm256_slli_epi32(integers, 16), 0xaa);
#endif
}

/* Pairs of int16 from two registers of integers. */
ALWAYS_INLINE __m256i pair_of(__m256i low, __m256i high) {
    return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa);
}

/* Scales of 8 rows in a group. */
typedef struct {
    __m256 scale, minimum;
    __m256i factors[2];    /* of the halves of the group's inputs */
    __m256i minus_factors; /* zero times factors, or minima; as pairs of int16 */
} TileScales;

ALWAYS_INLINE TileScales load_scales(const Layout layout, const uint8_t *header, int group, int first_row) {
    TileScales scales;
    if (layout.scales == SCALES_OF_GROUPS) {
        scales.scale = load_halves(header + 2 * (TILE_ROWS * group + first_row));
        if (layout.minima)
            scales.minimum = load_halves(header + 2 * (TILE_ROWS * (layout.record_groups + group) + first_row));
        return scales;
    }
    const uint8_t *bytes = header + super_scale_offset(layout) + first_row;
    scales.scale = load_halves(header + 2 * first_row);
    if (layout.minima)
        scales.minimum = load_halves(header + 2 * (TILE_ROWS + first_row));
    if (layout.scales == SCALES_OF_BLOCKS) {
        scales.scale = _mm256_mul_ps(scales.scale, _mm256_cvtepi32_ps(load_signed_bytes(bytes + TILE_ROWS * group)));
        if (layout.minima) {
            __m256i minima = load_unsigned_bytes(bytes + super_scale_bytes(layout) + TILE_ROWS * group);
            __m256 negative = _mm256_xor_ps(scales.minimum, _mm256_set1_ps(-0.0f));
            scales.minimum = _mm256_mul_ps(negative, _mm256_cvtepi32_ps(minima));
        }
        return scales;
    }
    const uint8_t *low = bytes + 2 * TILE_ROWS * group, *high = low + TILE_ROWS;
    if (layout.minima) { /* Q2_K */
        const __m256i mask = _mm256_set1_epi32(15), low_pair = load_unsigned_bytes(low),
                      high_pair = load_unsigned_bytes(high);
        scales.factors[0] = factor_of(_mm256_and_si256(low_pair, mask));
        scales.factors[1] = factor_of(_mm256_and_si256(high_pair, mask));
        scales.minus_factors = pair_of(_mm256_srli_epi32(low_pair, 4), _mm256_srli_epi32(high_pair, 4));
        return scales;
    }
    const __m256i halves[2] = {load_signed_bytes(low), load_signed_bytes(high)};
    scales.factors[0] = factor_of(halves[0]);
    scales.factors[1] = factor_of(halves[1]);
    scales.minus_factors = _mm256_slli_epi16(pair_of(halves[0], halves[1]), __builtin_ctz((unsigned)layout.zero | 256));
    return scales;
}

/* -zero * the sum of a column's values. */
ALWAYS_INLINE __m256i zero_product(const Layout layout, const ActivationGroup *x) {
    if (!layout.zero)
        return _mm256_setzero_si256();
    return _mm256_slli_epi32(_mm256_set1_epi32(x->minus_sum), __builtin_ctz((unsigned)layout.zero | 256));
}

#ifdef AVX_VNNI

/* The sum of (code - zero) * activation over all quads. */
ALWAYS_INLINE __m256i product_of_group(const Layout layout, const __m256i codes[GROUP_QUADS],
                                       const ActivationGroup *x) {
    __m256i product = zero_product(layout, x);
    UNROLL for (int q = 0; q < GROUP_QUADS; q++)
        product = _mm256_dpbusd_avx_epi32(product, codes[q], broadcast_word(x->values + 4 * q));
    return product;
}

/* A factor * the sum of code * activation over the quads of a half. */
ALWAYS_INLINE __m256i product_of_half(const Layout layout, const __m256i codes[GROUP_QUADS], const ActivationGroup *x,
                                      const int half, __m256i factor) {
    (void)layout;
    __m256i product = _mm256_setzero_si256();
    UNROLL for (int q = 4 * half; q < 4 * half + 4; q++)
        product = _mm256_dpbusd_avx_epi32(product, codes[q], broadcast_word(x->values + 4 * q));
    return _mm256_mullo_epi32(product, factor);
}

#else

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
ALWAYS_INLINE __m256i product_of_signed(const __m256i codes[GROUP_QUADS], const ActivationGroup *x) {
    __m256i product = _mm256_setzero_si256();
    UNROLL for (int q = 0; q < GROUP_QUADS; q++) {
        __m256i values = _mm256_sign_epi8(broadcast_word(x->values + 4 * q), codes[q]);
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes[q]), values);
        product = _mm256_add_epi32(product, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return product;
}

/* The sum of code * activation over quads first..last, times factors (pairs of int16). */
ALWAYS_INLINE __m256i product_of(const Layout layout, const __m256i codes[GROUP_QUADS], const ActivationGroup *x,
                                 const int first, const int last, __m256i factors) {
    __m256i even = _mm256_maddubs_epi16(codes[first], broadcast_word(x->values + 4 * first));
    __m256i odd = _mm256_maddubs_epi16(codes[first + 1], broadcast_word(x->values + 4 * (first + 1)));
    UNROLL for (int q = first + 2; q < last; q += 2) {
        __m256i next_even = _mm256_maddubs_epi16(codes[q], broadcast_word(x->values + 4 * q));
        __m256i next_odd = _mm256_maddubs_epi16(codes[q + 1], broadcast_word(x->values + 4 * (q + 1)));
        even = in_order(_mm256_add_epi16(even, next_even));
        odd = in_order(_mm256_add_epi16(odd, next_odd));
    }
    if (last - first <= quads_in_16_bits(layout))
        return _mm256_madd_epi16(_mm256_add_epi16(even, odd), factors);
    return _mm256_add_epi32(_mm256_madd_epi16(even, factors), _mm256_madd_epi16(odd, factors));
}

ALWAYS_INLINE __m256i product_of_group(const Layout layout, const __m256i codes[GROUP_QUADS],
                                       const ActivationGroup *x) {
    if (layout.zero == 128)
        return product_of_signed(codes, x);
    __m256i product = product_of(layout, codes, x, 0, GROUP_QUADS, _mm256_set1_epi16(1));
    return layout.zero ? _mm256_add_epi32(product, zero_product(layout, x)) : product;
}

ALWAYS_INLINE __m256i product_of_half(const Layout layout, const __m256i codes[GROUP_QUADS], const ActivationGroup *x,
                                      const int half, __m256i factor) {
    return product_of(layout, codes, x, 4 * half, 4 * half + 4, factor);
}

#endif

/* sums + the group's part of a column. */
ALWAYS_INLINE __m256 add_group(const Layout layout, const __m256i codes[GROUP_QUADS], const TileScales *scales,
                               const ActivationGroup *x, __m256 sums) {
    __m256i product = product_of_group(layout, codes, x);
    sums = _mm256_fmadd_ps(_mm256_mul_ps(scales->scale, _mm256_set1_ps(x->scale)), _mm256_cvtepi32_ps(product), sums);
    return layout.minima ? _mm256_fmadd_ps(scales->minimum, _mm256_set1_ps(x->scaled_sum), sums) : sums;
}

/* The same of SCALES_OF_HALVES. */
ALWAYS_INLINE __m256 add_halves(const Layout layout, const __m256i codes[GROUP_QUADS], const TileScales *scales,
                                const ActivationGroup *x, __m256 sums) {
    const __m256 scale = _mm256_set1_ps(x->scale);
    __m256i product = _mm256_add_epi32(product_of_half(layout, codes, x, 0, scales->factors[0]),
                                       product_of_half(layout, codes, x, 1, scales->factors[1]));
    __m256i minus = _mm256_madd_epi16(scales->minus_factors, broadcast_word(x->minus_pair));
    if (!layout.minima)
        product = _mm256_add_epi32(product, minus);
    sums = _mm256_fmadd_ps(_mm256_mul_ps(scales->scale, scale), _mm256_cvtepi32_ps(product), sums);
    if (!layout.minima)
        return sums;
    return _mm256_fmadd_ps(_mm256_mul_ps(scales->minimum, scale), _mm256_cvtepi32_ps(minus), sums);
}

ALWAYS_INLINE void prefetch(const uint8_t *source, int bytes) {
    UNROLL for (int offset = 0; offset < bytes; offset += 64)
        _mm_prefetch((const char *)source + PREFETCH_BYTES + offset, _MM_HINT_T0);
}

/* Eight rows of a tile. The first half fetches ahead for both. */
ALWAYS_INLINE void multiply_half(const Layout layout, const int columns, const int first_row, const TileWork *work) {
    const ActivationGroup *x = work->groups;
    const uint8_t *lines = work->tile, *header = lines;
    __m256 sums[MOST_COLUMNS];
    UNROLL for (int c = 0; c < columns; c++)
        sums[c] = _mm256_setzero_ps();
    for (int64_t g = 0; g < work->inputs / GROUP_SIZE; g++) {
        const int slot = (int)(g % layout.record_groups);
        if (slot == 0) { /* a record begins */
            header = lines;
            if (first_row == 0)
                prefetch(header, header_bytes(layout));
            lines += header_bytes(layout);
        }
        __m256i codes[GROUP_QUADS];
        if (first_row == 0)
            prefetch(lines, code_bytes(layout));
        load_codes(layout, lines + 4 * first_row, codes);
        const TileScales scales = load_scales(layout, header, slot, first_row);
        UNROLL for (int c = 0; c < columns; c++)
            sums[c] = layout.scales == SCALES_OF_HALVES ? add_halves(layout, codes, &scales, x + c, sums[c])
                                                        : add_group(layout, codes, &scales, x + c, sums[c]);
        lines += code_bytes(layout);
        x += work->group_stride;
    }
    UNROLL for (int c = 0; c < columns; c++)
        if (c < work->stored)
            _mm256_storeu_ps(work->y + c * work->y_stride + first_row, sums[c]);
}

ALWAYS_INLINE void multiply_tile(const Layout layout, const int columns, const TileWork *work) {
    multiply_half(layout, columns, 0, work);
    multiply_half(layout, columns, HALF_ROWS, work);
}

ALWAYS_INLINE __m256 load_weights(const int format, const uint8_t *tile, int64_t index) {
    if (format == FORMAT_F32)
        return _mm256_loadu_ps((const float *)(const void *)tile + index);
    if (format == FORMAT_F16)
        return load_halves(tile + 2 * index);
    __m128i bits = _mm_loadu_si128((const __m128i *)(tile + 2 * index));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

ALWAYS_INLINE void multiply_floats(const int format, const int columns, const TileWork *work) {
    __m256 low[MOST_FLOAT_COLUMNS], high[MOST_FLOAT_COLUMNS];
    UNROLL for (int c = 0; c < columns; c++)
        low[c] = high[c] = _mm256_setzero_ps();
    for (int64_t i = 0; i < work->inputs; i++) {
        const __m256 low_weights = load_weights(format, work->tile, TILE_ROWS * i);
        const __m256 high_weights = load_weights(format, work->tile, TILE_ROWS * i + HALF_ROWS);
        UNROLL for (int c = 0; c < columns; c++) {
            const __m256 value = _mm256_set1_ps(work->values[c * work->stride + i]);
            low[c] = _mm256_fmadd_ps(low_weights, value, low[c]);
            high[c] = _mm256_fmadd_ps(high_weights, value, high[c]);
        }
    }
    UNROLL for (int c = 0; c < columns; c++) {
        _mm256_storeu_ps(work->y + c * work->y_stride, low[c]);
        _mm256_storeu_ps(work->y + c * work->y_stride + HALF_ROWS, high[c]);
    }
}

#define FOR_QUANTIZED_COLUMNS(X, FORMAT)                                                                               \
    X(FORMAT, 1) X(FORMAT, 2) X(FORMAT, 3) X(FORMAT, 4) X(FORMAT, 5) X(FORMAT, 6) X(FORMAT, 7) X(FORMAT, 8)
#define FOR_FLOAT_COLUMNS(X, FORMAT) X(FORMAT, 1) X(FORMAT, 2) X(FORMAT, 3) X(FORMAT, 4) X(FORMAT, 5) X(FORMAT, 6)

KERNEL_TABLE(KERNELS)

static void multiply(const PackedMatrix *matrix, int64_t first_tile, int64_t last_tile, const Activations *x, float *y,
                     int64_t y_stride) {
    multiply_tiles(KERNELS[matrix->format], format_is_quantized(matrix->format) ? MOST_COLUMNS : MOST_FLOAT_COLUMNS,
                   matrix, first_tile, last_tile, x, y, y_stride);
}

#ifdef AVX_VNNI
const LinearKernels linear_avx_vnni = {"avx-vnni", quantize, multiply};
#else
const LinearKernels linear_avx2 = {"avx2", quantize, multiply};
#endif
