"""The depth that beams are drafted to where nobody has said: by costs and by what became of drafts before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from draftree.beams.beam_engine import BeamEngine
from draftree.beams.drafting import DepthRule
from draftree.beams.forest import DEEPEST, BeamParams, BeamRequest, DraftRecord
from draftree.beams.speculative import DraftForest
from draftree.config import SamplingParams
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.ngram import NgramSource

from ..pairs import costs, target
from ..toy import ToyModel
from .parts import PROMPTS, source
from .test_sampling import Distribution, Scriptable, distance, distribution_after, distribution_of, toys

STEPS = 100


class Priced:
    """A profile: passes over drafts cost a share of a target pass, and each token of a prompt so much."""

    def __init__(self, price: float, prompt: float = 0.0) -> None:
        self.price, self.prompt = price, prompt

    def seconds(self, nodes: float, context: int) -> float:
        return self.price if nodes < 9 else self.prompt * nodes


class Flat:
    """A profile: passes cost one second and a hundredth for each node."""

    def seconds(self, nodes: float, context: int) -> float:
        return 1 + nodes / 100


def rule(price: float, prompt: float = 0.0) -> DepthRule:
    drafting = ModelSource(ToyModel(5, max_length=9999), 5) if prompt else NgramSource()
    return DepthRule(drafting, Flat(), Priced(price, prompt))  # type: ignore[arg-type]


def chosen(price: float, goes_on: bool) -> list[int]:
    """Depths of many steps whose drafts go on always or never."""
    request = BeamRequest([1], SamplingParams(temperature=1.0), BeamParams(width=2), 1000, frozenset())
    priced, depths = rule(price), list[int]()
    for _ in range(STEPS):
        depths.append(priced.depth(request))
        request.record.observe(depths[-1], 4 * depths[-1], depths[-1] if goes_on else 0)
    return depths


def test_what_always_goes_on_is_drafted_deep() -> None:
    assert set(chosen(0.2, True)[10:]) == {DEEPEST}


def test_what_never_goes_on_is_seldom_drafted_and_tried_again() -> None:
    depths = chosen(0.2, False)
    assert depths.count(0) > 0.8 * STEPS
    assert any(depths[20:]), "a text that changes is found out"


def test_what_costs_more_than_the_target_is_never_drafted() -> None:
    assert set(chosen(1.5, True)) == {0}


def test_a_gain_within_the_margin_is_none() -> None:
    """What always goes on at 0.93 of a target pass is hardly faster than no drafts; at 0.3 it is."""
    assert set(chosen(0.93, True)) == {0}
    assert 0 not in chosen(0.3, True)[10:]


@pytest.mark.parametrize(("prompt", "limit", "opens"), [(10, 100, True), (1000, 100, False), (1000, 1000, True)])
def test_a_prompt_is_read_where_the_answer_may_pay_for_it(prompt: int, limit: int, opens: bool) -> None:
    request = BeamRequest([1] * prompt, SamplingParams(temperature=1.0), BeamParams(width=2), limit, frozenset())
    assert rule(0.2, prompt=0.1).opens(request) is opens


def test_what_has_not_read_the_prompt_drafts_nothing() -> None:
    request = BeamRequest([1], SamplingParams(temperature=1.0), BeamParams(width=2), 100, frozenset())
    request.drafting = False
    assert rule(0.0).depth(request) == 0


def test_a_drafter_that_is_not_to_read_the_prompt_makes_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params, beams = target(), SamplingParams(max_tokens=8), BeamParams(width=2)
    want = BeamEngine(model).generate(PROMPTS, params, beams)
    monkeypatch.setattr(DepthRule, "opens", lambda self, request: False)
    engine = BeamEngine(model, source("self", model))
    found = engine.generate(PROMPTS, params, beams)
    assert engine.source is not None
    assert engine.source.passes == 0
    assert [g.hypotheses[0].token_ids for g in found] == [g.hypotheses[0].token_ids for g in want]


def test_room_bounds_the_depth() -> None:
    request = BeamRequest([1], SamplingParams(temperature=1.0), BeamParams(width=2), 3, frozenset())
    assert rule(0.0).depth(request) == 2


def test_layers_are_counted_where_something_was_drafted() -> None:
    """Layers in which lookup found nothing are none, and neither are those of a step that drafted nothing."""
    model, params = target(), SamplingParams(max_tokens=12)
    for name, beams in (("lookup", BeamParams(width=2, depth=2)), ("none", BeamParams(width=2))):
        stats = BeamEngine(model, source(name, model)).generate([[5, 6]], params, beams)[0].stats
        assert (stats.drafted_layers > 0) is (sum(stats.drafted) > 0)
        assert stats.drafted_layers <= sum(stats.drafted)


def test_the_memory_of_drafts_fades() -> None:
    record = DraftRecord()
    for _ in range(200):
        record.observe(1, 2, 1)
    for _ in range(60):
        record.observe(1, 2, 0)
    assert record.went_on / record.reached < 0.1


def test_searched_beams_are_the_same_at_any_depth() -> None:
    model, params, beams = target(), SamplingParams(max_tokens=40), BeamParams(width=3, returned=3)
    plain = BeamEngine(model).generate(PROMPTS, params, beams)
    engine = BeamEngine(model, source("relative", model))
    for _ in range(2):
        for one, other in zip(plain, engine.generate(PROMPTS, params, beams), strict=True):
            assert [h.token_ids for h in one.hypotheses] == [h.token_ids for h in other.hypotheses]


@pytest.mark.parametrize("drafter", ["relative", "stranger", "head"])
def test_a_seed_repeats_its_beams_alone_in_a_batch_and_later(drafter: str) -> None:
    """Depths follow the request's own steps and kept costs, not the clock.

    With measured costs depths were others in every run, and rounding in a batch moved a draw in one run of a hundred.
    """
    model, params = target(), SamplingParams(max_tokens=30, temperature=1.0, seed=4)
    drafts, beams = source(drafter, model), BeamParams(width=3, returned=3)
    assert drafts is not None
    engine = BeamEngine(model, drafts)
    engine._depths = DepthRule(drafts, costs(1.0), costs(0.1))
    batch = engine.generate(PROMPTS, params, beams)
    alone = [engine.generate([prompt], params, beams)[0] for prompt in PROMPTS]
    ids = [[[h.token_ids for h in one.hypotheses] for one in made] for made in (batch, alone)]
    assert ids[0] == ids[1]


class Learning(Scriptable):
    """Drafts two layers where the last drafts went on, else one and none in turn."""

    def _depth(self, request: BeamRequest) -> int:
        if request.record.reached == request.record.went_on:
            return 2
        return request.stats.steps % 2


class Peeking(Scriptable):
    """Leaves its drafts unused where it does not like the first of them."""

    def _advance(self, request: BeamRequest, forest: DraftForest, chance: object) -> None:
        disliked = forest.layers and forest.layers[0].drafts[0].token == 0
        super()._advance(request, DraftForest() if disliked else forest, chance)  # type: ignore[arg-type]

    def _depth(self, request: BeamRequest) -> int:
        return 1


def distributions(kind: type[Scriptable], width: int, limit: int) -> Sequence[Distribution]:
    """Of an engine's beams at the end, and of beam sampling's."""
    models, beams = toys(2), BeamParams(width=width, draft_width=width, depth=1)  # so that drafts are read
    found = distribution_after(limit, lambda: kind(models[0], ModelSource(models[1], 2)), beams, limit)
    return found, distribution_of(models[0], width, limit).final(((),))


@pytest.mark.parametrize(("width", "limit"), [(1, 5), (2, 3)])
def test_a_depth_that_follows_from_steps_before_leaves_the_distribution_as_it_is(width: int, limit: int) -> None:
    assert distance(*distributions(Learning, width, limit)) < 1e-12


def test_a_depth_that_follows_from_the_drafts_themselves_is_caught() -> None:
    assert distance(*distributions(Peeking, 1, 3)) > 1e-3
