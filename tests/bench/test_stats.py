"""Intervals against samples whose answers are known."""

from __future__ import annotations

import math
import random

import pytest

from draftree.bench.summary import interval, ratio


def test_equal_values_have_no_interval() -> None:
    assert interval([2.5] * 7) == (2.5, 2.5, 2.5)


def test_the_interval_is_that_of_the_normal_law() -> None:
    """For many values the bootstrap interval of a mean is mean +- 1.96 s / sqrt(n)."""
    dice = random.Random(5)
    values = [dice.gauss(10, 3) for _ in range(400)]
    found = interval(values)
    mean = sum(values) / len(values)
    half = 1.96 * math.sqrt(sum((x - mean) ** 2 for x in values) / len(values)) / math.sqrt(len(values))
    assert found.mean == pytest.approx(mean)
    assert found.high - found.mean == pytest.approx(half, rel=0.1)
    assert found.mean - found.low == pytest.approx(half, rel=0.1)


def test_the_interval_covers_as_often_as_it_says() -> None:
    dice = random.Random(1)
    hits = 0
    for _ in range(200):
        found = interval([dice.gauss(0, 1) for _ in range(40)], draws=400)
        hits += found.low <= 0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_ratios_are_paired_and_their_mean_is_geometric() -> None:
    assert ratio([2.0, 8.0, 40.0], [1.0, 2.0, 5.0]).mean == pytest.approx(4.0)
    assert ratio([3.0, 30.0], [1.0, 10.0]) == pytest.approx((3.0, 3.0, 3.0))
    with pytest.raises(ValueError):
        ratio([1.0, 2.0], [1.0])


def test_no_values_are_no_mean() -> None:
    with pytest.raises(ValueError, match="at least one"):
        interval([])
