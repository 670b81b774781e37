"""Frequencies of rotary positions: plain ones, and those of YaRN for long contexts."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def frequencies(base: float, size: int) -> NDArray[np.float64]:
    """[size / 2] base^(-2i / size)."""
    powers: NDArray[np.float64] = base ** (-np.arange(0, size, 2) / size)
    return powers


def yarn(
    plain: NDArray[np.float64], base: float, trained: int, factor: float, fast: float = 32.0, slow: float = 1.0
) -> NDArray[np.float64]:
    """Frequencies of YaRN: of dimensions that turn ``fast`` times within ``trained`` tokens as they are, of those that
    turn ``slow`` times over ``factor``."""
    size = 2 * len(plain)
    # The dimension whose frequency turns b times within the trained context.
    first, last = (size * math.log(trained / (b * 2 * math.pi)) / (2 * math.log(base)) for b in (fast, slow))
    low, high = min(max(math.floor(first), 0), size), min(math.ceil(last), size - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / max(high - low, 0.001), 0, 1)
    return plain * (1 - ramp) + plain / factor * ramp


def yarn_magnitude(factor: float, share: float = 1.0) -> float:
    """What YaRN multiplies rotated vectors by; ``share``: of how much of it there is."""
    return 1 + 0.1 * share * math.log(factor)
