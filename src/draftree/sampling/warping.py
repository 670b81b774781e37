"""Logits to a distribution, and one token drawn from it. Pure functions on rows of NumPy arrays.

The draw at absolute position t under seed s is argmax(warped logits + Gumbel noise(s, t)): a fixed function of the
distribution and of (s, t). That is what makes speculative output equal AR output token for token: whichever tree was
drafted, whichever batch the request is in, position t sees the same noise.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from .noise import gumbel, uniforms

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
