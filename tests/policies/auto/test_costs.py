"""How passes drift from their profile."""

from __future__ import annotations

import math
from random import Random

import pytest

from draftree.models.cost_profile import Point, Profile
from draftree.policies.live_costs import ARPass, CostModel, convex_below

from .test_policy import ME

AR = ARPass(64, 1, 1)


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
    assert 4.0 < dearer(costs) < 6.0 * 1.02


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
    assert 2.0 < dearer(costs) < 3.0 * 1.02


def test_passes_that_mostly_read_prompts_tell_nothing_about_drafts() -> None:
    """A prompt's tokens are dearer than the profile says: AR decoding looked dear beside drafts, and stayed so."""
    costs = model(1.0, 2.0)
    for _ in range(20):
        costs.learn(0, ARPass(64, 1, 101), 500.0)
        costs.learn(1, AR, 2.0)
    assert dearer(costs) == pytest.approx(2.0)


def test_where_each_pass_drafts_an_ar_pass_is_wanted_at_times() -> None:
    """Without one nobody knows what drafts cost: a profile that is too cheap was believed for ever."""
    costs, wanted = model(1.0, 1.0), list[int]()
    assert not costs.wants_ar
    for step in range(1000):
        if costs.wants_ar:
            wanted.append(step)
        costs.learn(0 if costs.wants_ar else 1, AR, 1.0 if costs.wants_ar else 1.5)
    assert wanted[0] == 1 and 5 <= len(wanted) <= 20
    assert 1.4 < dearer(costs) < 1.6


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


TRUE = [1.0, 1.03, 1.05, 1.08, 1.16, 1.24, 1.32, 1.40]
OVERPRICED = [1.0, 1.05, 1.19, 1.33, 1.44, 1.55, 1.66, 1.77]


def gained(sure: float, nodes: int) -> float:
    return sum(sure**k for k in range(nodes + 1))


def best(seconds: list[float], sure: float) -> int:
    """The number of nodes, a chain of which each is right as often, that yields most tokens a second."""
    return max(range(8), key=lambda n: gained(sure, n) / seconds[n])


def chosen(profile: list[float], sure: float, seed: int, stalled: bool) -> list[int]:
    """Nodes of 300 steps on a clock that is 10% uncertain and stalls at times; in each tenth nothing is found."""
    costs, noise, nodes = model(*profile), Random(seed), list[int]()
    for step in range(300):
        size = 0 if step % 10 == 0 else best(costs.curve(7, AR).below, sure)
        if step % 10:
            nodes.append(size)
        stall = 5.0 if noise.random() < 0.02 or (stalled and 1 <= step < 4) else 1.0
        costs.learn(size, AR, 0.004 * TRUE[size] * stall * math.exp(noise.gauss(0, 0.1)))
    return nodes


@pytest.mark.parametrize("profile", [OVERPRICED, TRUE])
@pytest.mark.parametrize("sure", [0.4, 0.6])
@pytest.mark.parametrize("stalled", [False, True])
def test_noisy_passes_overrule_a_profile_and_choices_settle_near_the_best(
    profile: list[float], sure: float, stalled: bool
) -> None:
    """The same answer took 34 or 83 passes: what was not drafted was not learned, and stayed dear."""

    def loss(nodes: int) -> float:
        most = best(TRUE, sure)
        return 1 - gained(sure, nodes) / TRUE[nodes] * TRUE[most] / gained(sure, most)

    assert (loss(best(profile, sure)) > 0.07) == (profile is OVERPRICED)  # what the profile alone loses
    for seed in range(8):
        late = chosen(profile, sure, seed, stalled)[100:]
        assert sum(map(loss, late)) / len(late) < 0.05


def test_a_profile_that_overprices_passes_is_corrected_within_few() -> None:
    costs = model(*OVERPRICED)
    for _ in range(6):
        costs.learn(0, AR, 1.0)
        costs.learn(3, AR, TRUE[3])
    assert costs.curve(7, AR).seconds[3] == pytest.approx(TRUE[3], rel=0.05)
