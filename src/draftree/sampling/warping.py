"""Logits to a distribution, and one token drawn from it by noise that is keyed by (seed, position).

Pure functions of rows of NumPy arrays and of whole numbers, the same in NumPy, in torch and in C. The stream of a key
is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): with G its increment,

    key(seed, position) = mix(mix(seed + G) + position * G)
    uniform(key, t) = ((mix(key + t * G) >> 12) + 1/2) * 2^-52          in (0, 1), float64
    noise(key, t) = -log(-log(1 - uniform(key, t)))                     standard Gumbel, float64

The draw at absolute position t under seed s is argmax(warped logits + Gumbel noise(s, t)): a fixed function of the
distribution and of (s, t). That is what makes speculative output equal AR output token for token: whichever tree was
drafted, whichever batch the request is in, position t sees the same noise.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX1, MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

DRAFT_NOISE = 2
"""Label of the streams that drafted children are drawn with."""


Bits = TypeVar("Bits", int, NDArray[np.uint64])


def mix(x: Any) -> Any:
    """The finaliser of SplitMix64, of a number or of [n] uint64."""
    x = x & MASK64
    x = ((x ^ (x >> 30)) * MIX1) & MASK64
    x = ((x ^ (x >> 27)) * MIX2) & MASK64
    return x ^ (x >> 31)


def stream_key(seed: Bits, position: Bits) -> Bits:
    """Where the stream of (seed, position) starts: 64 bits; of arrays, those of each pair."""
    key: Bits = mix(mix(seed + GOLDEN) + position * GOLDEN)
    return key


def derive_seed(seed: int, *labels: int) -> int:
    """A seed whose streams are independent of those of ``seed`` and of those of other labels."""
    for label in labels:
        seed = mix(mix(seed + MIX1) + label * MIX2)
    return seed


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1), both ends excluded: a pure function of (seed, position)."""
    return float((mix(stream_key(seed, position)) >> 12) + 0.5) * 2.0**-52


@lru_cache(maxsize=4)
def _counters(vocab: int) -> NDArray[np.uint64]:
    return np.arange(vocab, dtype=np.uint64) * np.uint64(GOLDEN)


@lru_cache(maxsize=8)
def uniforms(key: int, vocab: int) -> NDArray[np.float64]:
    """[vocab] the stream of a key: one number in (0, 1) for each token; nodes of one depth share it, read only."""
    found = _streamed(_counters(vocab), key)
    found.flags.writeable = False
    return found


def _streamed(counters: NDArray[np.uint64], key: int) -> NDArray[np.float64]:
    """The numbers of a key's stream at some tokens, of which [n] token * G are given."""
    x = counters + np.uint64(key)
    x ^= x >> np.uint64(30)
    x *= np.uint64(MIX1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(MIX2)
    x ^= x >> np.uint64(31)
    x >>= np.uint64(12)
    found = x.astype(np.float64)
    found += 0.5
    found *= 2.0**-52
    return found


def gumbel(uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard Gumbel noise of uniform numbers: the smaller the number, the larger the noise."""
    return -np.log(-np.log1p(-uniforms))


def gumbel_noise(key: int, vocab: int) -> NDArray[np.float64]:
    """[vocab] the noise of a key: one number for each token."""
    return gumbel(uniforms(key, vocab))


def noise_of(key: int, tokens: NDArray[np.integer]) -> NDArray[np.float64]:
    """[n] the noise of a key at some tokens."""
    return gumbel(_streamed(tokens.astype(np.uint64) * np.uint64(GOLDEN), key))


F = TypeVar("F", np.float32, np.float64)

_NUCLEUS = 1024
"""Tokens that are sorted at first to find a top-p set; the whole vocabulary when they hold too little mass."""


class Warping(NamedTuple):
    """What shapes a distribution: temperature (0: the argmax), top_k (0: all), top_p, min_p, in this order."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def warp(row: NDArray[F], warping: Warping) -> NDArray[F]:
    """[V] warped logits, not normalised, in new memory; dropped tokens become -inf. ``temperature`` is positive."""
    x: NDArray[F] = row / row.dtype.type(warping.temperature)
    if 0 < warping.top_k < len(x):
        x[x < np.partition(x, -warping.top_k)[-warping.top_k]] = -np.inf
    if warping.top_p < 1:
        x[x < _nucleus_edge(x, warping.top_p)] = -np.inf
    if warping.min_p > 0:
        # p >= min_p * p_max  <=>  x >= x_max + ln(min_p)
        x[x < x.max() + np.log(np.float32(warping.min_p))] = -np.inf
    return x


def _nucleus_edge(x: NDArray[F], top_p: float) -> F:
    """The smallest logit of the smallest set whose probability reaches ``top_p``; sums are in float64."""
    wide = x.astype(np.float64)
    total = log_sum_exp(wide)
    width = min(_NUCLEUS, len(x))
    while True:
        top = np.sort(np.partition(wide, -width)[-width:])[::-1]
        mass = np.exp(top - total).cumsum()
        if width == len(x) or mass[-1] >= top_p:
            break
        width = len(x)
    # A token stays iff the mass of the tokens before it is below top_p; the first always stays.
    return x.dtype.type(top[int((mass[:-1] < top_p).sum())])


def log_sum_exp(x: NDArray[F]) -> float:
    """log(sum(exp(x))) of [V], summed in float64."""
    largest = x.max()
    return float(largest) + math.log(float(np.exp(x - largest).sum(dtype=np.float64)))


def softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """[...] float64 softmax over the last axis."""
    x = logits.astype(np.float64)
    x = np.exp(x - x.max(-1, keepdims=True))
    found: NDArray[np.float64] = x / x.sum(-1, keepdims=True)
    return found


def draw(logits: NDArray[np.floating], key: int) -> int:
    """argmax(logits + noise of the key) of [V] logits, in float64; ties go to the lower token.

    Only few tokens can win, and noise is computed for these alone. With L the sum of one of them: t can win iff
    noise(t) >= L - x(t), iff uniform(t) <= 1 - exp(-exp(x(t) - L)), which is at most exp(x(t) - L).
    """
    u = uniforms(key, len(logits))
    some = np.array([logits.argmax(), u.argmin()])
    least = (logits[some].astype(np.float64) + gumbel(u[some])).max()
    bound = np.exp(np.minimum(logits - least, 1.0).astype(np.float32))
    may_win = np.flatnonzero(u <= bound * np.float32(1.001))  # the margin covers what float32 rounds
    sums = logits[may_win].astype(np.float64) + gumbel(u[may_win])
    return int(may_win[sums.argmax()])


def largest(values: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """[min(count, V)] where the largest of [V] values are, the largest first; of equal ones the lower index first."""
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    edge = np.partition(values, -count)[-count]
    found = np.flatnonzero(values >= edge)
    found = found[np.argsort(-values[found], kind="stable")]
    return found[:count]
