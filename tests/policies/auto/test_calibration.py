"""Calibration: draft probabilities become acceptance, by counts, and each request has luck of its own."""

from __future__ import annotations

from random import Random

import pytest

from draftree.policies.auto.calibration import Calibration, Tried, first_or_not, with_odds


def accepted(calibration: Calibration, probability: float, kind: int = 0) -> float:
    (found,) = calibration.acceptance([probability], [kind])
    return found


def test_calibration_starts_at_the_drafts_own_probabilities_and_ends_at_the_truth() -> None:
    calibration, rng = Calibration(), Random(1)
    assert calibration.acceptance([0.55, 0.05], [0, 0]) == pytest.approx([0.55, 0.05])
    for _ in range(3000):
        calibration.learn([Tried(0.55, rng.random() < 0.2)])
    assert accepted(calibration, 0.55) == pytest.approx(0.2, abs=0.05)
    assert 0.005 < accepted(calibration, 0.05) < 0.03  # another bin: the odds of its kind


def test_kinds_are_counted_apart() -> None:
    calibration, rng = Calibration(2), Random(1)
    for _ in range(300):
        calibration.learn([Tried(0.4, rng.random() < 0.95, 0), Tried(0.3, False, 1)])
    first, other = calibration.acceptance([0.4, 0.3], first_or_not(2))
    assert first == pytest.approx(0.95, abs=0.04)
    assert other < 0.03


def test_a_path_is_learned_at_once_as_its_candidates_one_by_one() -> None:
    together, apart = Calibration(2), Calibration(2)
    tried = [Tried(0.6, True, 0), Tried(0.2, False, 1), Tried(0.9, True, 0), Tried(0.3, False, 1)]
    together.learn(tried)
    for one in tried:
        apart.learn([one])
    for p in (0.25, 0.65, 0.95):
        beside = (accepted(apart, p, kind) for kind in (0, 1))
        assert [accepted(together, p, kind) for kind in (0, 1)] == pytest.approx(list(beside), abs=0.03)


def test_a_drafter_that_is_surer_than_it_says_is_found_out_soon() -> None:
    calibration = Calibration()
    for p in (0.15, 0.35, 0.55, 0.75) * 8:
        calibration.learn([Tried(p, True)])
    assert accepted(calibration, 0.25) > 0.7  # a probability that was never met


def test_odds_multiply_odds() -> None:
    assert [with_odds(p, 3.0) for p in (0.0, 0.2, 0.5, 1.0)] == pytest.approx([0.0, 3 / 7, 0.75, 1.0])


def test_where_all_was_right_nothing_is_likelier_than_certain() -> None:
    """By a rounding error a child was worth more than its parent, and was kept without it: a traceback, rarely."""
    for seed in range(60):
        rng, calibration = Random(seed), Calibration(2)
        for _ in range(60):
            says = rng.choice([0.5, 0.75, 0.99, 1.0])
            calibration.learn([Tried(says, True, rng.randint(0, 1))])
        for kind in (0, 1):
            assert max(calibration.acceptance([0.5, 0.75, 0.99, 1.0], [kind] * 4)) <= 1.0
