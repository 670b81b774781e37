"""How passes drift from their profile."""

from __future__ import annotations

import numpy as np

from draftree.policies.auto.cost_model import CostDrift


def test_sizes_that_have_become_dearer_are_found_out() -> None:
    drift, expected = CostDrift(), np.array([1.0, 2.0, 3.0])
    assert np.array_equal(drift.correct(expected), expected)
    for _ in range(100):
        drift.learn(0, 1.0, 1.0)
        drift.learn(1, 6.0, 2.0)
    now = drift.correct(expected)
    assert 4.0 < float(now[1] / now[0]) <= 6.0  # 6 s against 1 s, where the profile says 2 against 1
    assert float(now[0]) < float(now[2]) / 3 * 1.01 <= float(now[1])  # one never seen drifts like all others together


def test_one_wild_pass_teaches_little() -> None:
    drift, expected = CostDrift(), np.array([1.0, 1.0])
    for _ in range(20):
        drift.learn(0, 1.0, 1.0)
        drift.learn(1, 1.0, 1.0)
    drift.learn(1, 1000.0, 1.0)
    now = drift.correct(expected)
    assert float(now[1] / now[0]) < 1.15


def test_one_slow_pass_over_drafts_is_no_drift_and_is_forgotten_over_plain_ones() -> None:
    """It made every draft look three times as dear, and while nothing was drafted nothing could correct it."""
    drift, expected = CostDrift(), np.array([1.0, 1.0])
    for _ in range(5):
        drift.learn(0, 1.0, 1.0)
    drift.learn(1, 4.0, 1.0)
    now = drift.correct(expected)
    assert float(now[1] / now[0]) < 2.1
    for _ in range(100):
        drift.learn(0, 1.0, 1.0)
    now = drift.correct(expected)
    assert float(now[1] / now[0]) < 1.05
