"""Calibration: draft probabilities become acceptance, by counts, and each sequence has luck of its own."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from draftree.draft.calibration import Calibration, Record, first_or_not, with_odds


def test_calibration_starts_at_the_drafts_own_probabilities_and_ends_at_the_truth() -> None:
    calibration, record, rng = Calibration(), Record(), Random(1)
    p = np.array([0.55, 0.05])
    assert calibration.acceptance(p, 1).tolist() == pytest.approx([0.55, 0.05])
    for _ in range(3000):
        calibration.fade(record)
        calibration.learn(1, [0.55], [0] if rng.random() < 0.2 else [], record)
    assert float(calibration.acceptance(p, 1)[0]) == pytest.approx(0.2, abs=0.05)
    assert 0.005 < float(calibration.acceptance(p, 1)[1]) < 0.03  # another bin: the odds of its kind
    assert float(calibration.acceptance(p, 2)[0]) == pytest.approx(0.2, abs=0.05)  # another depth: as all together


def test_kinds_are_counted_apart() -> None:
    calibration, rng = Calibration(2), Random(1)
    for _ in range(300):
        calibration.fade()
        calibration.learn(1, [0.4, 0.3], [0] if rng.random() < 0.95 else [], kinds=first_or_not(2))
    first, other = calibration.acceptance(np.array([0.4, 0.3]), 1, first_or_not(2)).tolist()
    assert first == pytest.approx(0.95, abs=0.04)
    assert other < 0.03


def test_a_depth_that_differs_is_told_apart() -> None:
    calibration, rng = Calibration(), Random(2)
    for _ in range(400):
        calibration.learn(1, [0.5], [0] if rng.random() < 0.9 else [])
        calibration.learn(2, [0.5], [0] if rng.random() < 0.3 else [])
    p = np.array([0.5])
    assert calibration.acceptance(p, 1)[0] == pytest.approx(0.9, abs=0.05)
    assert calibration.acceptance(p, 2)[0] == pytest.approx(0.3, abs=0.08)


def test_a_drafter_that_is_surer_than_it_says_is_found_out_soon() -> None:
    calibration = Calibration()
    for p in (0.15, 0.35, 0.55, 0.75) * 8:
        calibration.learn(1, [p], [0])
    assert calibration.acceptance(0.25, 1) > 0.7  # a probability that was never met


def test_a_sequence_with_bad_luck_has_worse_odds() -> None:
    calibration, lucky, unlucky = Calibration(), Record(), Record()
    for _ in range(40):
        calibration.learn(1, [0.5], [0], lucky)
        calibration.learn(1, [0.5], [], unlucky)
    assert unlucky.odds < 0.7 < 1.3 < lucky.odds


def test_odds_multiply_odds() -> None:
    p = np.array([0.0, 0.2, 0.5, 1.0])
    odds = with_odds(p, np.array(3.0))
    assert odds.tolist() == pytest.approx([0.0, 3 / 7, 0.75, 1.0])


def test_where_all_was_right_nothing_is_likelier_than_certain() -> None:
    """By a rounding error a child was worth more than its parent, and was kept without it: a traceback, rarely."""
    for seed in range(60):
        rng, calibration = Random(seed), Calibration(2)
        for _ in range(60):
            calibration.fade()
            says = rng.choice([0.5, 0.75, 0.99, 1.0])
            calibration.learn(rng.randint(1, 5), [says], [0], kinds=[rng.randint(0, 1)])
        for depth in range(1, 6):
            assert calibration.acceptance([0.5, 0.75, 0.99, 1.0], depth).max() <= 1.0
