/* Included before linear_avx2.c: its AVX-VNNI kernels for a CPU that has these dot products in AVX-512's encoding
 * alone, so that they are checked there. */
#include <immintrin.h>

#include "../linear.h"

#define AVX_VNNI
#define _mm256_dpbusd_avx_epi32 _mm256_dpbusd_epi32
#define linear_avx_vnni vnni_by_avx512

__attribute__((visibility("default"))) extern const LinearKernels vnni_by_avx512;
