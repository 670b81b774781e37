"""Means over prompts with their bootstrap intervals. Knows no files and no models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

DRAWS = 2000


class Interval(NamedTuple):
    """A mean and the ends of its 95% bootstrap interval."""

    mean: float
    low: float
    high: float

    def text(self, form: str = ".2f") -> str:
        """The mean with its interval in brackets."""
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"


def interval(values: Sequence[float], draws: int = DRAWS) -> Interval:
    """Arithmetic mean of ``values``, one for each prompt, and its percentile interval; the same for the same values.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values: an interval needs at least one")
    n = len(values)
    sample = torch.tensor(values, dtype=torch.float64)
    chosen = torch.randint(n, (draws, n), generator=torch.Generator().manual_seed(0))
    means = sample[chosen].mean(1).sort().values
    return Interval(sum(values) / n, float(means[draws // 40]), float(means[-draws // 40]))


def ratio(own: Sequence[float], base: Sequence[float], draws: int = DRAWS) -> Interval:
    """Geometric mean of the ratios own / base, paired by prompt, and its interval.

    Raises:
        ValueError: there are no values, or not as many of both.
    """
    logs = [math.log(a / b) for a, b in zip(own, base, strict=True)]
    return Interval(*(math.exp(x) for x in interval(logs, draws)))
