/* Noise keyed by (key, token): pure functions of whole numbers, the same as `sampling/warping.py`'s. */
#ifndef DRAFTREE_NOISE_H
#define DRAFTREE_NOISE_H

#include <math.h>
#include <stdint.h>

/* The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). */
static inline uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

/* The key of a position, of what its request's noise is: mixed(seed + GOLDEN). */
static inline uint64_t stream_key(uint64_t noise, int64_t position) {
    return mixed(noise + (uint64_t)position * GOLDEN);
}

/* A token's uniform number, in units of 2^-52 and half a unit above. */
static inline uint64_t uniform_bits(uint64_t key, int64_t token) { return mixed(key + (uint64_t)token * GOLDEN) >> 12; }

/* Standard Gumbel noise of a token. */
static inline double gumbel_noise(uint64_t key, int64_t token) {
    return -log(-log1p(-(((double)uniform_bits(key, token) + 0.5) * 0x1p-52)));
}

#endif
