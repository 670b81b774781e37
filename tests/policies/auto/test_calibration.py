"""Calibration: what drafts say of themselves becomes how often they are accepted."""

from __future__ import annotations

from random import Random

import pytest

from draftree.policies.gain import Calibration


def test_it_starts_at_the_drafts_own_probabilities_and_ends_at_the_truth() -> None:
    calibration, rng = Calibration(), Random(1)
    assert [calibration.acceptance(p) for p in (0.55, 0.05, 0.0, 1.0)] == pytest.approx([0.55, 0.05, 0.0, 1.0])
    for _ in range(3000):
        calibration.learn(0.55, rng.random() < 0.2)
    assert calibration.acceptance(0.55) == pytest.approx(0.2, abs=0.05)
    assert 0.005 < calibration.acceptance(0.05) < 0.03  # never met: the odds of all


def test_a_drafter_that_is_surer_than_it_says_is_found_out_soon() -> None:
    calibration = Calibration()
    for p in (0.15, 0.35, 0.55, 0.75) * 8:
        calibration.learn(p, True)
    assert calibration.acceptance(0.25) > 0.7


@pytest.mark.parametrize("right", [True, False])
def test_no_child_is_likelier_than_its_parent(right: bool) -> None:
    """By a rounding error a child was worth more than its parent, and was kept without it: a traceback, rarely."""
    for seed in range(60):
        rng, calibration = Random(seed), Calibration()
        for _ in range(seed * 5):
            calibration.learn(rng.random(), right)
        assert all(0.0 <= calibration.acceptance(p) <= 1.0 for p in (0.0, 1e-9, rng.random(), 1 - 1e-9, 1.0))
