"""How passes drift from their profile."""

from __future__ import annotations

import pytest

from draftree.models.cost_profile import Point, Profile
from draftree.policies.gain import ARPass, CostModel, convex_below

from .test_policy import ME

AR = ARPass(64, 1)


def model(*seconds: float) -> CostModel:
    return CostModel(Profile(ME, (Point(1, 64, tuple(range(1, len(seconds) + 1)), seconds),)))


def dearer(costs: CostModel) -> float:
    """How much a pass over a drafted node takes beside an AR pass."""
    ar, one = costs.curve(1, AR).seconds
    return one / ar


def test_the_convex_curve_below_touches_the_corners_alone() -> None:
    assert convex_below([1.0, 2.0, 3.0, 9.0, 5.0]) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert convex_below([1.0, 3.0, 3.0, 3.0]) == pytest.approx([1.0, 5 / 3, 7 / 3, 3.0])
    assert convex_below([1.0, 1.5, 2.5, 4.5]) == [1.0, 1.5, 2.5, 4.5]
    assert convex_below([2.0]) == [2.0]


def test_drafts_that_have_become_dearer_are_found_out() -> None:
    costs = model(1.0, 2.0)
    assert dearer(costs) == 2.0
    for _ in range(100):
        costs.learn(0, AR, 1.0)
        costs.learn(1, AR, 6.0)
    assert 4.0 < dearer(costs) <= 6.0


def test_another_load_on_the_machine_changes_nothing() -> None:
    costs = model(1.0, 2.0)
    for _ in range(100):
        costs.learn(0, AR, 3.0)
        costs.learn(1, AR, 6.0)
    assert abs(dearer(costs) - 2.0) < 1e-9


def test_drafts_that_are_dearer_are_found_out_where_the_level_of_a_table_is_far_off() -> None:
    """Passes that all took more than four times their profile counted as four times it, whatever was drafted."""
    costs = model(1e-3, 1e-3)
    for _ in range(100):
        costs.learn(0, AR, 1.0)
        costs.learn(1, AR, 3.0)
    assert 2.0 < dearer(costs) <= 3.0


def test_passes_that_mostly_read_prompts_tell_nothing_about_drafts() -> None:
    """A prompt's tokens are dearer than the profile says: AR decoding looked dear beside drafts, and stayed so."""
    costs = model(1.0, 2.0)
    for _ in range(20):
        costs.learn(0, ARPass(64, 1, other_tokens=100), 500.0)
        costs.learn(1, AR, 2.0)
    assert dearer(costs) == pytest.approx(2.0)


def test_one_wild_pass_teaches_little() -> None:
    costs = model(1.0, 1.0)
    for _ in range(20):
        costs.learn(0, AR, 1.0)
        costs.learn(1, AR, 1.0)
    costs.learn(1, AR, 1000.0)
    assert dearer(costs) < 1.16


def test_one_slow_pass_over_drafts_is_no_drift_and_is_forgotten_over_ar_passes() -> None:
    """It made every draft look three times as dear, and while nothing was drafted nothing could correct it."""
    costs = model(1.0, 1.0)
    for _ in range(5):
        costs.learn(0, AR, 1.0)
    costs.learn(1, AR, 4.0)
    assert dearer(costs) < 2.1
    for _ in range(100):
        costs.learn(0, AR, 1.0)
    assert dearer(costs) < 1.05
