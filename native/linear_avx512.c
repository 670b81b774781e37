/* Linear layers with AVX-512 VNNI: 16 rows a register, up to 16 columns at a time. */
#include <immintrin.h>
#include <string.h>

#include "kernels.h"

enum { MOST_COLUMNS = 16, MOST_FLOAT_COLUMNS = 8, MOST_CHAINS = 8 };

static void quantize_group(const float *values, ActivationGroup *group) {
    __m512 low = _mm512_loadu_ps(values), high = _mm512_loadu_ps(values + 16);
    float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    __m512 inverse = _mm512_set1_ps(largest >= 1e-30f ? 127 / largest : 0);
    const __m512 least = _mm512_set1_ps(-127); /* also where an activation is no number */
    __m512i low_values = _mm512_cvtps_epi32(_mm512_max_ps(_mm512_mul_ps(low, inverse), least));
    __m512i high_values = _mm512_cvtps_epi32(_mm512_max_ps(_mm512_mul_ps(high, inverse), least));
    int low_sum = _mm512_reduce_add_epi32(low_values), high_sum = _mm512_reduce_add_epi32(high_values);
    _mm_storeu_si128((__m128i *)group->values, _mm512_cvtepi32_epi8(low_values));
    _mm_storeu_si128((__m128i *)(group->values + 16), _mm512_cvtepi32_epi8(high_values));
    describe_group(group, largest, low_sum, high_sum);
}

static void quantize(const float *values, int64_t stride, int64_t inputs, int count, int64_t first_group,
                     int64_t last_group, uint8_t *groups) {
    quantize_blocks(quantize_group, values, stride, inputs, count, first_group, last_group, groups);
}

ALWAYS_INLINE __m512 load_halves(const void *source) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)source));
}

ALWAYS_INLINE __m512i load_signed_bytes(const uint8_t *source) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)source));
}

ALWAYS_INLINE __m512i load_unsigned_bytes(const uint8_t *source) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)source));
}

/* Four bytes or two int16 of a column, for all rows. */
ALWAYS_INLINE __m512i broadcast_word(const void *source) {
    int32_t word;
    memcpy(&word, source, 4);
    return _mm512_set1_epi32(word);
}

/* Bits of each byte from `from` on, moved to `to`; bits of other bytes come in from the side. */
ALWAYS_INLINE __m512i move_bits(__m512i bytes, int from, int to) {
    return from > to   ? _mm512_srli_epi16(bytes, (unsigned)(from - to))
           : from < to ? _mm512_slli_epi16(bytes, (unsigned)(to - from))
                       : bytes;
}

ALWAYS_INLINE __m512i take_bits(__m512i bytes, int from, int to, int count) {
    return _mm512_and_si512(move_bits(bytes, from, to), _mm512_set1_epi8((char)(((1 << count) - 1) << to)));
}

/* A register for each quad of the group: codes of 16 rows, or 128 more than their table's values. */
ALWAYS_INLINE void load_codes(const Layout layout, const uint8_t *lines, __m512i codes[GROUP_QUADS]) {
    const int low = layout.low_bits, high = layout.high_bits;
    UNROLL for (int q = 0; q < GROUP_QUADS; q++) {
        codes[q] = _mm512_loadu_si512(lines + LINE_BYTES * plane_line(low, q));
        if (low < 8)
            codes[q] = take_bits(codes[q], plane_bit(low, q), 0, low);
    }
    if (high) {
        UNROLL for (int q = 0; q < GROUP_QUADS; q++) {
            __m512i line = _mm512_loadu_si512(lines + LINE_BYTES * (low + plane_line(high, q)));
            codes[q] = _mm512_or_si512(codes[q], take_bits(line, plane_bit(high, q), low, high));
        }
    }
    if (layout.table) {
        const __m128i values = _mm_xor_si128(_mm_loadu_si128((const __m128i *)IQ4_VALUES), _mm_set1_epi8((char)128));
        UNROLL for (int q = 0; q < GROUP_QUADS; q++)
            codes[q] = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), codes[q]);
    }
}

/* Scales of 16 rows in a group. */
typedef struct {
    __m512 scale, minimum;
    __m512i factors[2]; /* of the halves of the group's inputs */
    __m512i minima;     /* of the halves, as pairs of int16 */
} TileScales;

ALWAYS_INLINE TileScales load_scales(const Layout layout, const uint8_t *header, int group) {
    TileScales scales;
    if (layout.scales == SCALES_OF_GROUPS) {
        scales.scale = load_halves(header + 2 * TILE_ROWS * group);
        if (layout.minima)
            scales.minimum = load_halves(header + 2 * TILE_ROWS * (layout.record_groups + group));
        return scales;
    }
    const uint8_t *bytes = header + super_scale_offset(layout);
    scales.scale = load_halves(header);
    if (layout.minima)
        scales.minimum = load_halves(header + 2 * TILE_ROWS);
    if (layout.scales == SCALES_OF_BLOCKS) {
        scales.scale = _mm512_mul_ps(scales.scale, _mm512_cvtepi32_ps(load_signed_bytes(bytes + TILE_ROWS * group)));
        if (layout.minima) {
            __m512i minima = load_unsigned_bytes(bytes + super_scale_bytes(layout) + TILE_ROWS * group);
            __m512 negative = _mm512_xor_ps(scales.minimum, _mm512_set1_ps(-0.0f));
            scales.minimum = _mm512_mul_ps(negative, _mm512_cvtepi32_ps(minima));
        }
        return scales;
    }
    const uint8_t *low = bytes + 2 * TILE_ROWS * group, *high = low + TILE_ROWS;
    scales.factors[0] = load_signed_bytes(low);
    scales.factors[1] = load_signed_bytes(high);
    if (layout.minima) { /* Q2_K */
        const __m512i mask = _mm512_set1_epi32(15);
        const __m512i low_minima = _mm512_srli_epi32(load_unsigned_bytes(low), 4);
        const __m512i high_minima = _mm512_srli_epi32(load_unsigned_bytes(high), 4);
        scales.minima = _mm512_or_si512(low_minima, _mm512_slli_epi32(high_minima, 16));
        scales.factors[0] = _mm512_and_si512(scales.factors[0], mask);
        scales.factors[1] = _mm512_and_si512(scales.factors[1], mask);
    }
    return scales;
}

/* -zero * a sum, where `minus_sum` is minus that sum. */
ALWAYS_INLINE __m512i zero_product(const Layout layout, int32_t minus_sum) {
    if (!layout.zero)
        return _mm512_setzero_si512();
    return _mm512_slli_epi32(_mm512_set1_epi32(minus_sum), (unsigned)__builtin_ctz((unsigned)layout.zero | 256));
}

/* sums + the group's part of a column; product: of weights and values. */
ALWAYS_INLINE __m512 add_product(const Layout layout, const TileScales *scales, const ActivationGroup *x,
                                 __m512i product, __m512 sums) {
    sums = _mm512_fmadd_ps(_mm512_mul_ps(scales->scale, _mm512_set1_ps(x->scale)), _mm512_cvtepi32_ps(product), sums);
    return layout.minima ? _mm512_fmadd_ps(scales->minimum, _mm512_set1_ps(x->scaled_sum), sums) : sums;
}

/* The same of SCALES_OF_HALVES; products: of each half. */
ALWAYS_INLINE __m512 add_halves(const Layout layout, const TileScales *scales, const ActivationGroup *x,
                                const __m512i products[2], __m512 sums) {
    const __m512 scale = _mm512_set1_ps(x->scale);
    __m512i product = _mm512_add_epi32(_mm512_mullo_epi32(products[0], scales->factors[0]),
                                       _mm512_mullo_epi32(products[1], scales->factors[1]));
    sums = _mm512_fmadd_ps(_mm512_mul_ps(scales->scale, scale), _mm512_cvtepi32_ps(product), sums);
    if (!layout.minima)
        return sums;
    __m512i minus = _mm512_madd_epi16(scales->minima, broadcast_word(x->minus_pair));
    return _mm512_fmadd_ps(_mm512_mul_ps(scales->minimum, scale), _mm512_cvtepi32_ps(minus), sums);
}

/* Add a group to the sums of the first `columns` of up to `most` columns, quad by quad: their chains of dependent
 * products run side by side. */
ALWAYS_INLINE void add_group(const Layout layout, const int most, const int columns, const __m512i codes[GROUP_QUADS],
                             const TileScales *scales, const ActivationGroup *x, __m512 *sums) {
    const int halves = layout.scales == SCALES_OF_HALVES;
    __m512i products[MOST_CHAINS][2];
    UNROLL for (int c = 0; c < most; c++)
        if (c < columns) {
            products[c][0] = zero_product(layout, halves ? x[c].minus_halves[0] : x[c].minus_sum);
            products[c][1] = zero_product(layout, x[c].minus_halves[1]);
        }
    UNROLL for (int q = 0; q < GROUP_QUADS; q++) {
        const int half = halves ? q / 4 : 0;
        UNROLL for (int c = 0; c < most; c++)
            if (c < columns)
                products[c][half] =
                    _mm512_dpbusd_epi32(products[c][half], codes[q], broadcast_word(x[c].values + 4 * q));
    }
    UNROLL for (int c = 0; c < most; c++)
        if (c < columns)
            sums[c] = halves ? add_halves(layout, scales, x + c, products[c], sums[c])
                             : add_product(layout, scales, x + c, products[c][0], sums[c]);
}

ALWAYS_INLINE void prefetch(const uint8_t *source, int bytes) {
    UNROLL for (int offset = 0; offset < bytes; offset += 64)
        _mm_prefetch((const char *)source + PREFETCH_BYTES + offset, _MM_HINT_T0);
}

ALWAYS_INLINE void multiply_tile(const Layout layout, const int columns, const TileWork *work) {
    const int chains = layout.scales == SCALES_OF_HALVES ? 2 : 1; /* of a column */
    const int parts = (columns * chains + MOST_CHAINS - 1) / MOST_CHAINS, most = (columns + parts - 1) / parts;
    const ActivationGroup *x = work->groups;
    const uint8_t *lines = work->tile, *header = lines;
    __m512 sums[MOST_COLUMNS];
    UNROLL for (int c = 0; c < columns; c++)
        sums[c] = _mm512_setzero_ps();
    for (int64_t g = 0; g < work->inputs / GROUP_SIZE; g++) {
        const int slot = (int)(g % layout.record_groups);
        if (slot == 0) { /* a record begins */
            header = lines;
            prefetch(header, header_bytes(layout));
            lines += header_bytes(layout);
        }
        __m512i codes[GROUP_QUADS];
        prefetch(lines, code_bytes(layout));
        load_codes(layout, lines, codes);
        const TileScales scales = load_scales(layout, header, slot);
        UNROLL for (int first = 0; first < columns; first += most)
            add_group(layout, most, columns - first, codes, &scales, x + first, sums + first);
        lines += code_bytes(layout);
        x += work->group_stride;
    }
    UNROLL for (int c = 0; c < columns; c++)
        if (c < work->stored)
            _mm512_storeu_ps(work->y + c * work->y_stride, sums[c]);
}

ALWAYS_INLINE __m512 load_weights(const int format, const uint8_t *tile, int64_t input) {
    if (format == FORMAT_F32)
        return _mm512_loadu_ps(tile + 4 * TILE_ROWS * input);
    if (format == FORMAT_F16)
        return load_halves(tile + 2 * TILE_ROWS * input);
    __m256i bits = _mm256_loadu_si256((const __m256i *)(tile + 2 * TILE_ROWS * input));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

ALWAYS_INLINE void multiply_floats(const int format, const int columns, const TileWork *work) {
    __m512 sums[MOST_FLOAT_COLUMNS];
    UNROLL for (int c = 0; c < columns; c++)
        sums[c] = _mm512_setzero_ps();
    for (int64_t i = 0; i < work->inputs; i++) {
        __m512 weights = load_weights(format, work->tile, i);
        UNROLL for (int c = 0; c < columns; c++)
            sums[c] = _mm512_fmadd_ps(weights, _mm512_set1_ps(work->values[c * work->stride + i]), sums[c]);
    }
    UNROLL for (int c = 0; c < columns; c++)
        _mm512_storeu_ps(work->y + c * work->y_stride, sums[c]);
}

#define FOR_QUANTIZED_COLUMNS(X, FORMAT)                                                                               \
    X(FORMAT, 1)                                                                                                       \
    X(FORMAT, 2)                                                                                                       \
    X(FORMAT, 3)                                                                                                       \
    X(FORMAT, 4)                                                                                                       \
    X(FORMAT, 5) X(FORMAT, 6) X(FORMAT, 7) X(FORMAT, 8) X(FORMAT, 10) X(FORMAT, 12) X(FORMAT, 14) X(FORMAT, 16)
#define FOR_FLOAT_COLUMNS(X, FORMAT)                                                                                   \
    X(FORMAT, 1) X(FORMAT, 2) X(FORMAT, 3) X(FORMAT, 4) X(FORMAT, 5) X(FORMAT, 6) X(FORMAT, 7) X(FORMAT, 8)

KERNEL_TABLE(KERNELS)

static void multiply(const PackedMatrix *matrix, int64_t first_tile, int64_t last_tile, const Activations *x, float *y,
                     int64_t y_stride) {
    multiply_tiles(KERNELS[matrix->format], format_is_quantized(matrix->format) ? MOST_COLUMNS : MOST_FLOAT_COLUMNS,
                   matrix, first_tile, last_tile, x, y, y_stride);
}

const LinearKernels linear_avx512 = {"avx512-vnni", quantize, multiply};
