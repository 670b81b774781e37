"""What drafters gain and cost, and which of them draft."""

from __future__ import annotations

from typing import cast
from unittest.mock import create_autospec

import pytest

from draftree.models.base import LanguageModel
from draftree.models.cost_profile import Point, Profile
from draftree.models.protocols import DraftHead
from draftree.policies.base import SourceInfo
from draftree.policies.gain import ARPass, Curve, Record, Selection, may_pay
from draftree.request import Outcome, StepCost
from draftree.tree import DraftTree

from ...toy import chain_tree
from .test_policy import ME, Fake

FLAT = Curve([1.0] * 9, [1.0] * 9)


def step(selection: Selection, accepted: int, seconds: float, steps: int = 1, layers: int = 1) -> bool:
    """One step, behind so many of its request, in which the first drafter took so many AR passes, if it drafted."""
    request = Fake()
    request.stats.steps = steps
    price = selection.choose([request], FLAT, ARPass(64, 1))
    on = any(price.enabled)
    tree, path = (chain_tree([1] * 4), list(range(accepted))) if on else (DraftTree.empty(), [])
    tokens = [1] * (len(path) + 1)
    cost = StepCost(1, seconds if on else 0.0, 1.0, 0.0, 0)
    outcome = Outcome(request, tree, path, tokens, len(tokens), cost)
    selection.learn(price, layers, len(tree), [outcome])
    return on


def profile(seconds: float) -> Profile:
    return Profile(ME, (Point(1, 64, (1, 9), (seconds, seconds)),))


def layer(seconds: float) -> Record:
    """A drafter whose model takes so many seconds a layer."""
    return Record(profile=profile(seconds))


@pytest.mark.parametrize(("seconds", "at_first", "later"), [(0.05, 24, 424), (0.3, 2, 40), (1.0, 0, 0)])
def test_one_that_is_never_right_loses_little_and_is_tried_again(seconds: float, at_first: int, later: int) -> None:
    """Tries cost 2.1, 1.2 and 0% of AR decoding in the end; what can never pay, by the guess, is never tried."""
    selection = Selection([layer(seconds)])
    tried = [step(selection, 0, seconds) for _ in range(2000)]
    assert sum(tried[:32]) <= at_first
    assert 0.9 * later <= sum(tried[1000:]) <= later


def test_one_that_gains_drafts_at_once_and_stays() -> None:
    selection = Selection([layer(0.5)])
    assert all([step(selection, 2, 0.5) for _ in range(200)])
    assert selection.pace == pytest.approx(2.0, abs=0.001)


def test_one_that_gains_no_more_stops_and_begins_anew_in_another_text() -> None:
    selection = Selection([layer(0.3)])
    for _ in range(50):
        step(selection, 2, 0.3)
    wrong = [step(selection, 0, 0.3) for _ in range(60)]
    assert sum(wrong[:35]) <= 31 and sum(wrong[35:]) <= 2
    assert all([step(selection, 2, 0.3) for _ in range(40)][20:])


def test_one_that_costs_next_to_nothing_always_drafts() -> None:
    selection = Selection([layer(0.01)])
    assert all([step(selection, 0, 0.01) for _ in range(100)])


def test_a_models_layers_are_dearer_in_batches_whatever_was_measured_in_one() -> None:
    record = Record(profile=Profile(ME, tuple(Point(b, 64, (1, 9), (0.01 * b, 0.05 * b)) for b in (1, 8))))
    before = {batch: record.layer(ARPass(64, batch)) for batch in (1, 8)}
    for _ in range(200):  # twice as slow as the profile says, in batches of eight
        record.measure(2 * 2 * before[8], 1, record.layer(ARPass(64, 8)))
    for batch in (1, 8):
        assert record.layer(ARPass(64, batch)) == pytest.approx(2 * before[batch], rel=0.1)


def test_a_stall_of_the_machine_is_no_cost_of_a_drafter() -> None:
    selection = Selection([layer(0.2)])
    for _ in range(50):
        step(selection, 2, 0.2)
    step(selection, 2, 100.0)
    assert selection.records[0].layer(ARPass(64, 1)) < 0.25
    assert step(selection, 2, 0.2)


class Named:
    """A drafter whose model is of some kind."""

    name = "named"

    def __init__(self, model: object) -> None:
        self.model, self.models = model, ()

    def unread(self, request: object) -> list[tuple[LanguageModel, int]]:
        return []


@pytest.mark.parametrize("head", [True, False])
def test_the_guess_of_a_head_outlasts_a_slow_start(head: bool) -> None:
    """The first answer of a process had one drafted step in thirty: its head's first passes had found nothing in the
    processor's caches, and two of three tokens were wrong."""
    model = create_autospec(DraftHead, instance=True) if head else None
    selection = Selection([Record(cast(SourceInfo, Named(model)), {}, profile(0.3))])
    for accepted in (0, 1, 0):
        step(selection, accepted, 0.6)
    assert step(selection, 1, 0.3) is head


@pytest.mark.parametrize(("seconds", "most"), [(0.05, 4), (0.1, 2), (0.25, 1)])
def test_a_model_that_is_never_right_is_tried_less_in_each_text(seconds: float, most: int) -> None:
    """It costs 1% of AR decoding; where it is right again it drafts from the first step on."""
    model = create_autospec(LanguageModel, instance=True)
    selection = Selection([Record(cast(SourceInfo, Named(model)), {}, profile(seconds))])
    tried = [sum(step(selection, 0, 3 * seconds, steps, 3) for steps in range(60)) for _ in range(20)]
    assert tried[0] <= 12 and max(tried[10:]) <= most
    assert all([step(selection, 2, 3 * seconds, steps, 3) for steps in range(60)])


@pytest.mark.parametrize(
    ("first", "further", "layer", "pays"),
    [
        (1.0, 0.0, 0.6, True),
        (1.0, 0.0, 0.7, False),
        (1.0, 0.5, 0.1, True),
        (1.0, 0.5, 0.2, False),
        (9.0, 0.5, 1.6, True),
    ],
)
def test_a_model_is_tried_where_three_layers_cost_less_than_two_tokens(
    first: float, further: float, layer: float, pays: bool
) -> None:
    """Whose target's pass takes ``first`` seconds over one token and ``further`` more for each other."""
    target = Profile(ME, (Point(1, 64, (1, 9), (first, first + 8 * further)),))
    assert may_pay(target, profile(layer)) is pays
