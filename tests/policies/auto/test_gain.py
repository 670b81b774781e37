"""What drafters gain and cost, and which of them draft."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import cast

import pytest

from draftree.models.cost_profile import Point, Profile
from draftree.policies.accounts import AutoSettings
from draftree.policies.base import SourceInfo
from draftree.policies.gain import Record, Selection, may_pay
from draftree.policies.live_costs import ARPass, Curve
from draftree.request import Outcome, StepCost
from draftree.tree import DraftTree

from ...toy import chain_tree
from .test_policy import ME, Fake

FLAT = Curve([1.0] * 9, [1.0] * 9)


SETTINGS = AutoSettings()


def step(selection: Selection, accepted: int, seconds: float) -> bool:
    """One step, in which the first drafter took so many AR passes, if it drafted."""
    request = Fake()
    price = selection.choose([request], FLAT, ARPass(64, 1, 1))
    on = any(price.enabled)
    tree, path = (chain_tree([1] * 4), list(range(accepted))) if on else (DraftTree.empty(), [])
    tokens = [1] * (len(path) + 1)
    cost = StepCost(1, seconds if on else 0.0, 1.0, 0.0, 0)
    selection.learn(price, 1, len(tree), [Outcome(request, tree, path, tokens, len(tokens), cost)])
    return on


def profile(seconds: float) -> Profile:
    return Profile(ME, (Point(1, 64, (1, 9), (seconds, seconds)),))


def layer(seconds: float) -> Record:
    """A drafter whose model takes so many seconds a layer."""
    return Record(SETTINGS, profile=profile(seconds))


def selected(*records: Record) -> Selection:
    return Selection(SETTINGS, records)


def may_lose(steps: int, step: float) -> float:
    """AR passes: the credit, then what each trial may lose, and of each a step that began with credit left."""
    lost, pause = SETTINGS.credit + step, SETTINGS.pause
    while (steps := steps - pause) > 0:
        lost, pause = lost + SETTINGS.again + step, min(2 * pause, SETTINGS.longest)
    return lost


@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.4, 0.9])
@pytest.mark.parametrize("tokens", [60, 500, 3000])
def test_what_a_drafter_may_lose_is_a_number(seconds: float, tokens: int) -> None:
    """Here no token is right and nothing else is slow."""
    selection, spent = selected(layer(seconds)), 2 * seconds
    lost = spent * sum([step(selection, 0, spent) for _ in range(tokens)])
    assert lost <= may_lose(tokens, spent)
    assert lost >= min(tokens * spent, 0.5 * may_lose(tokens // 2, 0.0)), "it is tried again"


def test_in_the_long_run_a_drafter_that_is_never_right_loses_less_than_two_steps_in_a_hundred() -> None:
    assert may_lose(10_000, 0.5) - may_lose(5_000, 0.5) < 0.02 * 5_000


def test_one_that_cannot_pay_is_never_tried() -> None:
    assert not any([step(selected(layer(1.0)), 0, 1.0) for _ in range(200)])


def test_one_that_gains_drafts_at_once_and_stays() -> None:
    selection = selected(layer(0.5))
    assert all([step(selection, 2, 0.5) for _ in range(200)])
    assert selection.pace == pytest.approx(2.0, abs=0.2)


def test_one_that_gains_no_more_stops_and_drafts_again_where_it_gains() -> None:
    selection = selected(layer(0.3))
    for _ in range(50):
        step(selection, 2, 0.3)
    wrong = [step(selection, 0, 0.3) for _ in range(100)]
    assert sum(wrong[:30]) <= 18 and sum(wrong[30:]) <= 8
    assert all([step(selection, 2, 0.3) for _ in range(2 * SETTINGS.longest)][SETTINGS.longest :])


@pytest.mark.parametrize("seed", range(5))
def test_bad_luck_seldom_ends_a_drafter_that_gains(seed: int) -> None:
    rng, selection = Random(seed), selected(layer(0.2))
    assert sum([step(selection, 2 * (rng.random() < 0.4), 0.4) for _ in range(1000)]) > 900


def test_one_that_is_asked_and_leaves_the_draft_to_another_pays_for_its_pass() -> None:
    """A head that is never sure beside a model that drafts in its place."""
    unsure, drafting = layer(0.2), layer(0.2)
    selection, asked = selected(unsure, drafting), 0
    for _ in range(400):
        request = Fake()
        price = selection.choose([request], FLAT, ARPass(64, 1, 1))
        asked += price.enabled[0]
        seconds = 0.2 * price.enabled[0], 0.2
        cost = StepCost(1, sum(seconds), 1.0, 0.0, 0, seconds)
        tree = replace(chain_tree([1] * 4), part=1)
        selection.learn(price, 1, 4, [Outcome(request, tree, [0, 1], [1] * 3, 3, cost)])
    assert asked < 100 and drafting.on


class Reads:
    """A drafter whose model reads so many tokens before it drafts for a request, or what ``left`` says of it."""

    name = "reads"

    def __init__(self, tokens: int, most_read: int | None = None) -> None:
        self.model, self.models, self._tokens, self.left = self, (self,), tokens, dict[object, int]()
        self.most_read = most_read

    def unread(self, request: object) -> list[tuple[object, int]]:
        return [(self, self.left.get(request, self._tokens))]

    def record(self) -> Record:
        """Its model takes 0.1 s a layer, and 10 ms for each token of a text."""
        costs = Profile(ME, (Point(1, 64, (1, 2, 1001), (0.1, 0.1, 10.0)),))
        return Record(SETTINGS, cast(SourceInfo, self), {id(self): costs}, costs)


def reader(tokens: int) -> Record:
    return Reads(tokens).record()


@pytest.mark.parametrize(("left", "reads"), [(3, False), (300, True)])
def test_a_text_is_read_where_the_tokens_left_may_pay_for_it(left: int, reads: bool) -> None:
    record = reader(500)
    record.settle([Fake()], left, FLAT, ARPass(64, 1, 1))
    assert record.on is reads


def test_prompts_are_read_for_nothing_only_as_long_as_there_is_credit() -> None:
    record, read = reader(200), 0
    for _ in range(300):  # each before an answer of ten tokens
        record.settle([Fake()], 100, FLAT, ARPass(64, 1, 1))
        read += record.on
        if record.on:
            record.prompts.spend(2.1, 2.0)
            record.prompts.add(0.0)
        for _ in range(10):
            record.rest()
    assert 4 <= read <= (SETTINGS.credit + 3000 * SETTINGS.again / SETTINGS.longest) / 2.0 + 1


def test_a_prompt_that_is_read_in_portions_is_paid_for_once_and_read_to_its_end() -> None:
    """All that was left of it was charged with each portion, so that its reading was given up after the first one."""
    source, request, none = Reads(0), Fake(), DraftTree.empty()
    record = source.record()
    selection = selected(record)
    for portion in range(20):
        source.left[request] = 2000 - 100 * portion
        price = selection.choose([request], FLAT, ARPass(64, 1, 1))
        assert price.enabled == (True,) and not price.left_out
        source.left[request] -= 100
        selection.learn(price, 1, 0, [Outcome(request, none, [], [1], 1, StepCost(1, 0.0, 1.0, 0.0, 0))])
    before = record.prompts.balance(20.0)
    assert before == pytest.approx(-2 * SETTINGS.credit), "it owes what it may owe at most"
    other = Fake()
    source.left[other] = 2000
    assert selection.choose([other], FLAT, ARPass(64, 1, 1)).enabled == (False,), "there is no credit for another one"
    source.left[other] = 40
    assert selection.choose([other], FLAT, ARPass(64, 1, 1)).enabled == (True,)


def test_reading_costs_as_much_beside_the_prompts_of_others() -> None:
    """It was compared with a pass over these too, beside which a prompt that did not pay was soon read."""
    record = reader(900)
    for seconds in (1.0, 20.0):
        request, curve = Fake(), Curve([seconds] * 9, [seconds] * 9)
        request.limit = 20
        record.settle([request], 100, curve, ARPass(64, 1, 1 + int(seconds)), 1.0)
        assert not record.on and record.left_out == [request]


def test_prompts_that_come_while_others_are_read_wait_for_credit() -> None:
    """Each began as long as little of the ones before was read, and none needed credit after that."""
    source, requests = Reads(0), [Fake() for _ in range(3)]
    record, none = source.record(), DraftTree.empty()
    selection, begun = selected(record), 0
    for count in (1, 2, 3):
        source.left[requests[count - 1]] = 2000
        price = selection.choose(requests[:3], FLAT, ARPass(64, 3, 3))
        begun = 3 - len(price.left_out[0]) if price.left_out else 3
        for request in requests[:3]:
            source.left[request] = max(0, source.left.get(request, 0) - 10)
        cost = StepCost(3, 0.0, 1.0, 0.0, 0)
        selection.learn(price, 1, 0, [Outcome(request, none, [], [1], 1, cost) for request in requests])
    assert begun == 1


def test_a_prompt_that_is_not_worth_reading_keeps_no_others_from_being_drafted_for() -> None:
    source, long, short = Reads(0), Fake(), Fake()
    source.left = {long: 900, short: 0}
    long.limit, record = 20, source.record()
    selection = selected(record)
    price = selection.choose([long, short], FLAT, ARPass(64, 2, 2))
    assert price.enabled == (True,) and price.left_out == [[long]]
    cost = StepCost(2, 0.1, 1.0, 0.0, 1)
    outcomes = [
        Outcome(long, DraftTree.empty(), [], [1], 1, cost),
        Outcome(short, chain_tree([1] * 4), [0, 1, 2], [1] * 4, 4, cost),
    ]
    selection.learn(price, 1, 4, outcomes)
    credit = pytest.approx(SETTINGS.credit / 2**0.5)
    assert record.steps == 1 and record.prompts.balance(9.0) == credit != record.prompts.balance(1.0)
    source.left[short] = 900
    short.limit = 20
    assert selection.choose([long, short], FLAT, ARPass(64, 2, 2)).enabled == (False,), "nor is that of the other one"


def test_a_model_that_reads_the_end_of_a_text_costs_what_it_does_behind_that() -> None:
    """What passes behind a long text take was charged for ones that read a part of it, so that none were tried."""
    points = [Point(1, context, (1, 9), (0.1, 0.1 + context / 1e4)) for context in (64, 8192)]
    costs, layers = Profile(ME, tuple(points)), list[float]()
    for most_read in (None, 64):
        source = Reads(0, most_read)
        record = Record(SETTINGS, cast(SourceInfo, source), {id(source): costs}, costs)
        for context in (64, 8192):
            record.settle([Fake()], 100, Curve([9.0] * 9, [9.0] * 9), ARPass(context, 1, 1))
            layers.append(record.layer)
    assert layers[0] == layers[2] == layers[3] < layers[1]


def test_a_layer_takes_what_the_models_own_passes_took_whatever_another_drafted() -> None:
    """Where lookup drafted sixteen layers beside a model's one, the model's seemed to take a sixteenth."""
    text, model = Record(SETTINGS), layer(0.2)
    selection, request = selected(text, model), Fake()
    for _ in range(9):
        price = selection.choose([request], FLAT, ARPass(64, 1, 1))
        cost = StepCost(1, 0.4, 1.0, 0.0, 1, (1e-4, 0.4), (0, 1))
        outcome = Outcome(request, chain_tree([1] * 4), [0, 1], [1] * 3, 3, cost)
        selection.learn(price, 16, 4, [outcome])
    assert model.layer == pytest.approx(0.2, rel=0.05)


def test_beside_prompts_of_others_a_drafted_token_gains_less() -> None:
    """It was compared with the whole pass, of which it is one token in eight."""
    record = layer(0.3)
    for prompt, drafts in ((0, True), (7, False), (0, True)):
        record.settle([Fake()], 100, FLAT, ARPass(64, 1, 1 + prompt))
        assert record.on is drafts


def test_where_some_requests_gain_says_nothing_of_where_many_lose() -> None:
    """What a drafter gained beside one request was lost anew whenever eight came."""
    record, steps = layer(0.3), {1: 0, 8: 0}
    for _ in range(20):
        for batch, gains in ((1, 0.5), (8, -0.3)):
            for _ in range(50):
                record.settle([], 100, FLAT, ARPass(64, batch, batch))
                steps[batch] += record.on
                record.drafting.add(gains) if record.on else record.rest()
    most = SETTINGS.credit / 8**0.5 + 1000 / SETTINGS.longest + 5
    assert steps[1] == 1000 and 5 <= steps[8] * 0.3 <= most


def test_the_more_requests_decode_the_less_a_drafter_may_lose() -> None:
    def lost(batch: int) -> float:
        record, passes = layer(0.3), 0.0
        for _ in range(SETTINGS.pause):
            record.settle([], 100, FLAT, ARPass(64, batch, batch))
            passes += 0.1 * record.on
            if record.on:
                record.drafting.add(-0.1)
        return passes

    found = [lost(batch) for batch in (1, 2, 4, 8, 16)]
    assert found == sorted(found, reverse=True) and found[3] < SETTINGS.credit / 2


def test_a_models_layers_are_dearer_in_batches_whatever_was_measured_in_one() -> None:
    record = Record(SETTINGS, profile=Profile(ME, tuple(Point(b, 64, (1, 9), (0.01 * b, 0.05 * b)) for b in (1, 8))))

    def layer(batch: int) -> float:
        record.settle([], 100, Curve([9.0] * 9, [9.0] * 9), ARPass(64, batch, batch))
        return record.layer

    before = {batch: layer(batch) for batch in (1, 8)}
    for _ in range(200):  # twice as slow as the profile says, in batches of eight
        layer(8)
        record.measure(2 * 2 * before[8], 1)
    for batch in (1, 8):
        assert layer(batch) == pytest.approx(2 * before[batch], rel=0.1)


def test_a_stall_of_the_machine_is_no_cost_of_a_drafter() -> None:
    selection = selected(layer(0.2))
    for _ in range(50):
        step(selection, 2, 0.2)
    step(selection, 2, 100.0)
    assert step(selection, 2, 0.2)
    assert selection.records[0].layer < 0.25


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


def test_a_drafter_that_was_slow_for_a_while_drafts_again() -> None:
    """One stall as a text drafter was measured first, and it never drafted again."""
    selection = selected(Record(SETTINGS))
    assert step(selection, 2, 30.0)
    assert not any(step(selection, 2, 0.01) for _ in range(20))
    assert sum(step(selection, 2, 0.01) for _ in range(1000)) > 600


def test_one_that_is_too_slow_loses_what_any_other_may() -> None:
    selection = selected(Record(SETTINGS))
    lost = sum(3.0 for _ in range(2000) if step(selection, 0, 3.0))
    assert lost <= may_lose(2000, 3.0)
