"""Noise keyed by (seed, position): pure functions of whole numbers, the same in NumPy, in torch and in C.

The stream of a key is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): with G its increment,

    key(seed, position) = mix(mix(seed + G) + position * G)
    uniform(key, t) = ((mix(key + t * G) >> 12) + 1/2) * 2^-52          in (0, 1), float64
    noise(key, t) = -log(-log(1 - uniform(key, t)))                     standard Gumbel, float64
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX1, MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

DRAFT_NOISE = 2
"""Label of the streams that drafted children are drawn with."""


def mix(x: int) -> int:
    x &= MASK64
    x = ((x ^ (x >> 30)) * MIX1) & MASK64
    x = ((x ^ (x >> 27)) * MIX2) & MASK64
    return x ^ (x >> 31)


def stream_key(seed: int, position: int) -> int:
    """Where the stream of (seed, position) starts: 64 bits."""
    return mix(mix(seed + GOLDEN) + position * GOLDEN)


def derive_seed(seed: int, *labels: int) -> int:
    """A seed whose streams are independent of those of ``seed`` and of those of other labels."""
    for label in labels:
        seed = mix(mix(seed + MIX1) + label * MIX2)
    return seed


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1), both ends excluded: a pure function of (seed, position)."""
    return ((mix(stream_key(seed, position)) >> 12) + 0.5) * 2.0**-52


@lru_cache(maxsize=4)
def _counters(vocab: int) -> NDArray[np.uint64]:
    return np.arange(vocab, dtype=np.uint64) * np.uint64(GOLDEN)


@lru_cache(maxsize=8)
def uniforms(key: int, vocab: int) -> NDArray[np.float64]:
    """[vocab] the stream of a key: one number in (0, 1) for each token; nodes of one depth share it, read only."""
    x = _counters(vocab) + np.uint64(key)
    x ^= x >> np.uint64(30)
    x *= np.uint64(MIX1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(MIX2)
    x ^= x >> np.uint64(31)
    x >>= np.uint64(12)
    found = x.astype(np.float64)
    found += 0.5
    found *= 2.0**-52
    found.flags.writeable = False
    return found


def gumbel(uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard Gumbel noise of uniform numbers: the smaller the number, the larger the noise."""
    return -np.log(-np.log1p(-uniforms))


def gumbel_noise(key: int, vocab: int) -> NDArray[np.float64]:
    """[vocab] the noise of a key: one number for each token."""
    return gumbel(uniforms(key, vocab))
