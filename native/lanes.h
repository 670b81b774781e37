/* Vectors of WIDTH lanes, of float32 and of int32: 16 with AVX-512, 8 with AVX2, 4 with NEON, 1 in portable C.
 *
 * Included by files alone that are compiled for one instruction set, and define WIDTH. Compilers know the operators of
 * C between such vectors, lane by lane.
 */
#ifndef DRAFTREE_LANES_H
#define DRAFTREE_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "formats.h"

#if WIDTH == 1

typedef float Lanes;
typedef int32_t IntLanes;
static inline Lanes load(const float *p) { return *p; }
static inline void store(float *p, Lanes a) { *p = a; }
static inline Lanes splat(float a) { return a; }
static inline Lanes max_lanes(Lanes a, Lanes b) { return a > b ? a : b; }
static inline Lanes min_lanes(Lanes a, Lanes b) { return a < b ? a : b; }
static inline Lanes fma_lanes(Lanes a, Lanes b, Lanes c) { return fmaf(a, b, c); }
static inline Lanes round_lanes(Lanes a) { return nearbyintf(a); }
static inline Lanes lanes_from_ints(IntLanes a) { return (float)a; }
static inline Lanes power_of_two(Lanes n) {
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}
static inline Lanes load_fp16(const uint16_t *p) { return fp16_to_fp32(*p); }
static inline void store_fp16(uint16_t *p, Lanes a) { *p = fp32_to_fp16(a); }
static inline Lanes load_bf16(const uint16_t *p) {
    return format_decode_number(FORMAT_BF16, (const uint8_t *)(const void *)p);
}
static inline IntLanes load_int8(const uint8_t *p) { return (int8_t)*p; }
static inline IntLanes load_uint8(const uint8_t *p) { return *p; }

#elif WIDTH == 16

#include <immintrin.h>
typedef __m512 Lanes;
typedef int32_t IntLanes __attribute__((vector_size(64)));
static inline Lanes load(const float *p) { return _mm512_loadu_ps(p); }
static inline void store(float *p, Lanes a) { _mm512_storeu_ps(p, a); }
static inline Lanes splat(float a) { return _mm512_set1_ps(a); }
static inline Lanes max_lanes(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
static inline Lanes min_lanes(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }
static inline Lanes fma_lanes(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
static inline Lanes round_lanes(Lanes a) { return _mm512_roundscale_ps(a, 8); }
static inline Lanes lanes_from_ints(IntLanes a) { return _mm512_cvtepi32_ps((__m512i)a); }
static inline Lanes power_of_two(Lanes n) {
    __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}
static inline Lanes load_fp16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline void store_fp16(uint16_t *p, Lanes a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline Lanes load_bf16(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline IntLanes load_int8(const uint8_t *p) {
    return (IntLanes)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
}
static inline IntLanes load_uint8(const uint8_t *p) {
    return (IntLanes)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}

#elif WIDTH == 8

#include <immintrin.h>
typedef __m256 Lanes;
typedef int32_t IntLanes __attribute__((vector_size(32)));
static inline Lanes load(const float *p) { return _mm256_loadu_ps(p); }
static inline void store(float *p, Lanes a) { _mm256_storeu_ps(p, a); }
static inline Lanes splat(float a) { return _mm256_set1_ps(a); }
static inline Lanes max_lanes(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }
static inline Lanes min_lanes(Lanes a, Lanes b) { return _mm256_min_ps(a, b); }
static inline Lanes fma_lanes(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
static inline Lanes round_lanes(Lanes a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline Lanes lanes_from_ints(IntLanes a) { return _mm256_cvtepi32_ps((__m256i)a); }
static inline Lanes power_of_two(Lanes n) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
static inline Lanes load_fp16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
static inline void store_fp16(uint16_t *p, Lanes a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline Lanes load_bf16(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline IntLanes load_int8(const uint8_t *p) {
    return (IntLanes)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
static inline IntLanes load_uint8(const uint8_t *p) {
    return (IntLanes)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}

#else

#include <arm_neon.h>
typedef float32x4_t Lanes;
typedef int32x4_t IntLanes;
static inline Lanes load(const float *p) { return vld1q_f32(p); }
static inline void store(float *p, Lanes a) { vst1q_f32(p, a); }
static inline Lanes splat(float a) { return vdupq_n_f32(a); }
/* Like x86: b where the two are equal. */
static inline Lanes max_lanes(Lanes a, Lanes b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline Lanes min_lanes(Lanes a, Lanes b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline Lanes fma_lanes(Lanes a, Lanes b, Lanes c) { return vfmaq_f32(c, a, b); }
static inline Lanes round_lanes(Lanes a) { return vrndnq_f32(a); }
static inline Lanes lanes_from_ints(IntLanes a) { return vcvtq_f32_s32(a); }
static inline Lanes power_of_two(Lanes n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
static inline Lanes load_fp16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
static inline void store_fp16(uint16_t *p, Lanes a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
static inline Lanes load_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
static inline uint32x2_t load_four(const uint8_t *p) {
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vdup_n_u32(four);
}
static inline IntLanes load_int8(const uint8_t *p) {
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(load_four(p)))));
}
static inline IntLanes load_uint8(const uint8_t *p) {
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(load_four(p))))));
}

#endif

enum {
    PARTS = 16 / WIDTH /* vectors that hold 16 lanes */
};

/* exp(x) for x in [-87, 88], within 2 units in the last place: 2^n times a polynomial of degree 6 (Cephes, expf). */
static inline Lanes exponential(Lanes x) {
    x = max_lanes(min_lanes(x, splat(88.0f)), splat(-87.0f));
    Lanes n = round_lanes(x * splat(1.44269504f));
    x = fma_lanes(n, splat(-0.693359375f), x);
    x = fma_lanes(n, splat(2.12194440e-4f), x);
    Lanes p = splat(1.9875691500e-4f);
    p = fma_lanes(p, x, splat(1.3981999507e-3f));
    p = fma_lanes(p, x, splat(8.3334519073e-3f));
    p = fma_lanes(p, x, splat(4.1665795894e-2f));
    p = fma_lanes(p, x, splat(1.6666665459e-1f));
    p = fma_lanes(p, x, splat(5.0000001201e-1f));
    p = fma_lanes(x * x, p, x + splat(1.0f));
    return p * power_of_two(n);
}

#endif
