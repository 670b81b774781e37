/* A vector of WIDTH float32 lanes: 16 with AVX-512, 8 with AVX2, 4 with NEON, 1 in portable C.
 *
 * Included by vector_kernels.h alone, which is compiled once for each instruction set.
 */
#ifndef DRAFTREE_LANES_H
#define DRAFTREE_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)

#include <immintrin.h>
#define WIDTH 16
typedef __m512 Lanes;
static inline Lanes load(const float *p) { return _mm512_loadu_ps(p); }
static inline void store(float *p, Lanes a) { _mm512_storeu_ps(p, a); }
static inline Lanes all(float a) { return _mm512_set1_ps(a); }
static inline Lanes plus(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
static inline Lanes minus(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
static inline Lanes times(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
static inline Lanes over(Lanes a, Lanes b) { return _mm512_div_ps(a, b); }
static inline Lanes larger(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
static inline Lanes smaller(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }
static inline Lanes fused(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
static inline Lanes nearest(Lanes a) { return _mm512_roundscale_ps(a, 8); }
static inline Lanes power_of_two(Lanes whole) {
    __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(whole), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}
static inline Lanes load_halves(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline Lanes all_of_half(uint16_t half) { return all(_cvtsh_ss(half)); }
static inline Lanes load_bytes(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline void store_halves(uint16_t *p, Lanes a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__AVX2__)

#include <immintrin.h>
#define WIDTH 8
typedef __m256 Lanes;
static inline Lanes load(const float *p) { return _mm256_loadu_ps(p); }
static inline void store(float *p, Lanes a) { _mm256_storeu_ps(p, a); }
static inline Lanes all(float a) { return _mm256_set1_ps(a); }
static inline Lanes plus(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }
static inline Lanes minus(Lanes a, Lanes b) { return _mm256_sub_ps(a, b); }
static inline Lanes times(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
static inline Lanes over(Lanes a, Lanes b) { return _mm256_div_ps(a, b); }
static inline Lanes larger(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }
static inline Lanes smaller(Lanes a, Lanes b) { return _mm256_min_ps(a, b); }
static inline Lanes fused(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
static inline Lanes nearest(Lanes a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline Lanes power_of_two(Lanes whole) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
static inline Lanes load_halves(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
static inline Lanes all_of_half(uint16_t half) { return all(_cvtsh_ss(half)); }
static inline Lanes load_bytes(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline void store_halves(uint16_t *p, Lanes a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__aarch64__) && !defined(PORTABLE)

#include <arm_neon.h>
#define WIDTH 4
typedef float32x4_t Lanes;
static inline Lanes load(const float *p) { return vld1q_f32(p); }
static inline void store(float *p, Lanes a) { vst1q_f32(p, a); }
static inline Lanes all(float a) { return vdupq_n_f32(a); }
static inline Lanes plus(Lanes a, Lanes b) { return vaddq_f32(a, b); }
static inline Lanes minus(Lanes a, Lanes b) { return vsubq_f32(a, b); }
static inline Lanes times(Lanes a, Lanes b) { return vmulq_f32(a, b); }
static inline Lanes over(Lanes a, Lanes b) { return vdivq_f32(a, b); }
/* Like x86: b where the two are equal. */
static inline Lanes larger(Lanes a, Lanes b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline Lanes smaller(Lanes a, Lanes b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline Lanes fused(Lanes a, Lanes b, Lanes c) { return vfmaq_f32(c, a, b); }
static inline Lanes nearest(Lanes a) { return vrndnq_f32(a); }
static inline Lanes power_of_two(Lanes whole) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(whole), vdupq_n_s32(127)), 23));
}
static inline Lanes all_of_half(uint16_t half) { return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half))); }
static inline Lanes load_bytes(const int8_t *p) {
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four))))));
}
static inline Lanes load_halves(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
static inline void store_halves(uint16_t *p, Lanes a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }

#else

#include "formats.h"
#define WIDTH 1
typedef float Lanes;
static inline Lanes load(const float *p) { return *p; }
static inline void store(float *p, Lanes a) { *p = a; }
static inline Lanes all(float a) { return a; }
static inline Lanes plus(Lanes a, Lanes b) { return a + b; }
static inline Lanes minus(Lanes a, Lanes b) { return a - b; }
static inline Lanes times(Lanes a, Lanes b) { return a * b; }
static inline Lanes over(Lanes a, Lanes b) { return a / b; }
static inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }
static inline Lanes smaller(Lanes a, Lanes b) { return a < b ? a : b; }
static inline Lanes fused(Lanes a, Lanes b, Lanes c) { return fmaf(a, b, c); }
static inline Lanes nearest(Lanes a) { return nearbyintf(a); }
static inline Lanes power_of_two(Lanes whole) {
    uint32_t bits = (uint32_t)((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}
static inline Lanes all_of_half(uint16_t half) { return float_from_half(half); }
static inline Lanes load_bytes(const int8_t *p) { return *p; }
static inline Lanes load_halves(const uint16_t *p) { return float_from_half(*p); }
static inline void store_halves(uint16_t *p, Lanes a) { *p = half_from_float(a); }

#endif

enum {
    PARTS = 16 / WIDTH /* vectors that hold 16 lanes */
};

/* exp(x) for x in [-87, 88], within 2 units in the last place: 2^n times a polynomial of degree 6 (Cephes, expf). */
static inline Lanes exponential(Lanes x) {
    x = larger(smaller(x, all(88.0f)), all(-87.0f));
    Lanes n = nearest(times(x, all(1.44269504f)));
    x = fused(n, all(-0.693359375f), x);
    x = fused(n, all(2.12194440e-4f), x);
    Lanes p = all(1.9875691500e-4f);
    p = fused(p, x, all(1.3981999507e-3f));
    p = fused(p, x, all(8.3334519073e-3f));
    p = fused(p, x, all(4.1665795894e-2f));
    p = fused(p, x, all(1.6666665459e-1f));
    p = fused(p, x, all(5.0000001201e-1f));
    p = fused(times(x, x), p, plus(x, all(1.0f)));
    return times(p, power_of_two(n));
}

#endif
