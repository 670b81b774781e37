"""What drafters gain and cost, and which of them draft."""

from __future__ import annotations

import numpy as np
import pytest

from draftree.models.cost_profile import Point, Profile
from draftree.policies.auto.benefit import Benefit, Selection
from draftree.policies.auto.cost_model import ARPass
from draftree.policies.auto.settings import DEFAULTS
from draftree.request import Outcome, StepCost
from draftree.tree import DraftTree

from ...drafters.test_ensemble import Says
from .test_policy import ME, Fake

FLAT = np.ones(9)


def step(selection: Selection, accepted: int, seconds: float, drafted: int = 4) -> bool:
    """One step in which the first drafter took so many AR passes, if it was enabled."""
    price = selection.begin([Fake()], FLAT, ARPass(64, 1), 8)
    on = any(price.enabled)
    tree, path = (DraftTree.chain([1] * drafted), list(range(accepted))) if on else (DraftTree.empty(), [])
    tokens = [1] * (len(path) + 1)
    cost = StepCost(1, seconds if on else 0.0, 1.0, 0.0, 0)
    outcome = Outcome(Fake(), tree, path, tokens, len(tokens), cost)
    selection.learn(price, drafted, drafted, [outcome])
    return on


@pytest.mark.parametrize("seconds", [0.05, 0.3, 1.0])
def test_one_that_is_never_right_loses_little_and_is_tried_ever_more_seldom(seconds: float) -> None:
    selection, lost = Selection([Benefit()]), []
    for _ in range(2000):
        lost.append(step(selection, 0, seconds) * seconds)
    most = DEFAULTS.first_balance + 32 * DEFAULTS.learning_share
    assert sum(lost[:32]) <= most + seconds
    assert 0 < sum(lost[1000:]) <= 0.01 * 1000


def test_one_that_gains_is_enabled_at_once_and_stays() -> None:
    selection = Selection([Benefit()])
    assert all([step(selection, 2, 1.0) for _ in range(50)])
    assert selection.drafters[0].balance == DEFAULTS.max_balance
    assert selection.pace == pytest.approx(1.5, abs=0.1)


def test_one_that_gains_no_more_is_disabled() -> None:
    selection = Selection([Benefit()])
    for _ in range(50):
        step(selection, 2, 1.0)
    assert not [step(selection, 0, 1.0) for _ in range(20)][-1]


def test_a_models_layers_are_dearer_in_batches_whatever_was_measured_in_one() -> None:
    profile = Profile(ME, tuple(Point(b, 64, (1, 9), (0.01 * b, 0.05 * b)) for b in (1, 8)))
    drafter = Benefit(Says("model", {1: 0.5}), profile=profile)

    def layer(batch: int) -> float:
        return drafter.layer(ARPass(64, batch))

    before = {batch: layer(batch) for batch in (1, 8)}
    for _ in range(200):  # twice as slow as the profile says, in batches of eight
        drafter.measure(2 * before[8], 1, layer(8))
    for batch in (1, 8):
        assert layer(batch) == pytest.approx(2 * before[batch], rel=0.1)


def test_a_stall_of_the_machine_is_no_cost_of_a_drafter() -> None:
    selection = Selection([Benefit()])
    for _ in range(20):
        step(selection, 2, 0.2)
    before = selection.drafters[0].balance
    step(selection, 2, 100.0)
    assert selection.drafters[0].balance > before - 4 * 0.2
