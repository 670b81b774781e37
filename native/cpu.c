#include "cpu.h"

#include <string.h>

/* Bits that available_sets returns. */
enum { SET_AVX2 = 1, SET_AVX_VNNI = 2, SET_AVX512_VNNI = 4, SET_NEON_DOT = 8 };

#if defined(__x86_64__)
#include <cpuid.h>

/* State components that the operating system saves for threads (XCR0); 0: unknown. */
static unsigned saved_state(unsigned features) {
    unsigned low, high;
    if (!(features >> 27 & 1)) /* OSXSAVE */
        return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

/* Not __builtin_cpu_supports: under zig it always returns 0. */
static unsigned available_sets(void) {
    unsigned a, b, c, d, b7 = 0, c7 = 0, a71 = 0, sets = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d))
        return 0;
    unsigned features = c, state = saved_state(features);
    if (__get_cpuid_count(7, 0, &a, &b7, &c7, &d) && a >= 1)
        __get_cpuid_count(7, 1, &a71, &b, &c, &d);
    int fma = features >> 12 & 1, f16c = features >> 29 & 1;
    if ((state & 0x06) != 0x06 || !fma || !f16c || !(b7 >> 5 & 1)) /* XMM and YMM state; AVX2 */
        return 0;
    sets |= SET_AVX2;
    if (a71 >> 4 & 1)
        sets |= SET_AVX_VNNI;
    unsigned wanted = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* AVX-512 F, DQ, BW, VL */
    if ((state & 0xe6) == 0xe6 && (b7 & wanted) == wanted && (c7 >> 11 & 1))
        sets |= SET_AVX512_VNNI;
    return sets;
}

#elif defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

static unsigned available_sets(void) {
#if defined(__linux__)
    return getauxval(AT_HWCAP) >> 20 & 1 ? SET_NEON_DOT : 0; /* HWCAP_ASIMDDP */
#elif defined(__APPLE__)
    int present = 0;
    size_t bytes = sizeof present;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &present, &bytes, NULL, 0) == 0 && present ? SET_NEON_DOT : 0;
#else
    return SET_NEON_DOT; /* Windows on ARM64 runs on no CPU without it */
#endif
}

#else
static unsigned available_sets(void) { return 0; }
#endif

/* From the portable one up; a tier needs all bits of `sets`. */
static const struct {
    unsigned sets;
    Tier tier;
} TIERS[] = {
    {0, {"base", &linear_base, &vector_base}},
#if defined(__x86_64__)
    {SET_AVX2, {"avx2", &linear_avx2, &vector_avx2}},
    {SET_AVX_VNNI, {"avx-vnni", &linear_avx_vnni, &vector_avx2}},
    {SET_AVX512_VNNI, {"avx512-vnni", &linear_avx512, &vector_avx512}},
#elif defined(__aarch64__)
    {SET_NEON_DOT, {"neon", &linear_neon, &vector_neon}},
#endif
};

const Tier *tier_at(int index) {
    const unsigned sets = available_sets();
    for (size_t i = 0; i < sizeof TIERS / sizeof *TIERS; i++)
        if ((TIERS[i].sets & ~sets) == 0 && index-- == 0)
            return &TIERS[i].tier;
    return NULL;
}

const Tier *find_tier(const char *name) {
    const Tier *found = NULL, *tier;
    for (int i = 0; (tier = tier_at(i)) != NULL; i++)
        if (name == NULL || *name == '\0' || strcmp(name, tier->name) == 0)
            found = tier;
    return found;
}
