"""What a source costs and is worth."""

from __future__ import annotations

import numpy as np
import pytest

from draftree.models.cost_profile import Point, Profile
from draftree.outcome import Outcome, StepCost
from draftree.policies.auto.cost_model import Curve
from draftree.policies.auto.drafter_selection import Spending, Stake
from draftree.tree import DraftTree

from ...drafters.test_ensemble import Says
from .test_policy import ME, Fake


def test_a_models_layers_are_dearer_in_batches_whatever_was_measured_in_one() -> None:
    profile = Profile(ME, tuple(Point(b, 64, (1, 9), (0.01 * b, 0.05 * b)) for b in (1, 8)))
    stake = Stake(Says("model", {1: 0.5}), profile=profile)
    before = [stake.layer(64, batch) for batch in (1, 8)]
    for _ in range(200):  # four times as slow as the profile says, in batches of eight
        assert stake.source is not None
        stake.source.spent, stake._spent = stake._spent + 2 * before[1], stake.source.spent
        tree = DraftTree.empty()
        outcome = Outcome(Fake(), tree, [], [1], 1, StepCost(8, 0.1, 1.0, 0.0, 1))
        stake.judge([outcome], stake.layer(64, 8), Spending(1.0, 1.0, 1, 0.0, 1.1, 1.0), 1)
        stake._spent = stake.source.spent
    assert stake.layer(64, 8) == pytest.approx(2 * before[1], rel=0.1)
    assert stake.layer(64, 1) == pytest.approx(2 * before[0], rel=0.1)


def test_seconds_that_only_a_source_was_booked_with_do_not_make_decoding_without_it_impossible() -> None:
    """Reading a prompt in a step that counts took longer than all that the step was booked with."""
    stake = Stake(Says("model", {1: 0.5}))
    assert stake.source is not None
    stake._spent, stake.source.spent = 0.0, 50.0
    outcome = Outcome(Fake(), DraftTree.empty(), [], [1], 1, StepCost(1, 50.0, 1.0, 0.0, 1))
    for _ in range(20):
        stake.judge([outcome], 0.5, Spending(1.0, 1.0, 1, 0.1, 1.6, 1.0), 1)
    assert 0 < stake._without.value <= 1.5
    assert stake.worth > 0.5


@pytest.mark.parametrize("near", [True, False])
def test_long_drafts_refused_early_say_little_of_what_is_nearly_the_target(near: bool) -> None:
    """Two of them, in an answer of a few tokens, made the next five answers plain decoding."""
    said = Says("model", {1: 0.5})
    said.near = near
    stake = Stake(said)
    outcome = Outcome(Fake(), DraftTree.chain([1] * 12), [0, 1], [1, 1, 2], 3, StepCost(1, 6.0, 1.5, 0.0, 12))
    for _ in range(2):
        stake.judge([outcome], 0.5, Spending(1.0, 1.5, 12, 0.0, 7.5, 1.0), 1)
    stake.begin(Curve.of(np.ones(3), np.ones(3)), 0.5, 12, fresh=1.0)
    assert stake.pays == near
