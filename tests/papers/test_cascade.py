"""Cascades: the text is the target's own, whoever proposes and verifies; each level learns from the one above."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest

from draftree.config import Budget, SamplingParams
from draftree.drafters.base import DraftSource, UnscoredNode
from draftree.drafters.draft_model import EagleSource, ModelSource
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.grow import TreeDrafter
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.engine.trace import Trace
from draftree.errors import ConfigError
from draftree.models.base import Nodes, Row
from draftree.models.huggingface.hf_model import HFModel
from draftree.papers.cascade import CascadeSource, LoopBack
from draftree.papers.entropy_trees import EntropyStop
from draftree.papers.hsddw import DynamicWindow
from draftree.policies.auto import AutoTree
from draftree.policies.base import GrowthPolicy
from draftree.policies.fixed import StaticTree
from draftree.policies.methods import METHODS
from draftree.request import Generation, Outcome, StepCost
from draftree.scores import Scores
from draftree.tree import ROOT
from draftree.verify.schemes import find_scheme

from ..drafters.test_ensemble import Says, request_of, walked
from ..heads import random_head
from ..pairs import costs, endless, mixed, source, target
from ..pairs import policy as policy_of
from ..tiny import MAX_LENGTH, VOCAB

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8]]
TOKENS = 12
ENDLESS, ONCE = LoopBack(tau=math.inf), LoopBack(pending=1)
PAIRS = (
    "lookup>relative",
    "stranger>relative",
    "relative>self",
    "self>stranger",
    "lookup+stranger>relative",
)


def cascade(name: str, model: HFModel, policy: GrowthPolicy | None = None, loop: LoopBack | None = None) -> DraftSource:
    """A cascade by names of ``pairs.source``."""
    lower, _, upper = name.partition(">")
    if not upper:
        return source(lower, model)
    shape = deepcopy(policy) or DynamicWindow()
    made = CascadeSource(source(lower, model), source(upper, model), shape, loop or LoopBack())
    return endless(made) if loop is ENDLESS else made


def decode(
    name: str,
    params: SamplingParams | list[SamplingParams],
    method: GrowthPolicy | None = None,
    policy: GrowthPolicy | None = None,
    loop: LoopBack | None = None,
    prompts: list[list[int]] = PROMPTS,
    nodes: int = 12,
) -> list[Generation]:
    model = target()
    drafter = TreeDrafter(method or StaticTree(1, 12), cascade(name, model, policy, loop))
    return Engine(model, Speculation(drafter, nodes)).generate(prompts, params)


def plain(params: SamplingParams | list[SamplingParams], prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [g.token_ids for g in Engine(target()).generate(prompts, params)]


# the text


@pytest.mark.parametrize("name", PAIRS)
def test_ids_are_those_of_ar_decoding(name: str) -> None:
    params = mixed(len(PROMPTS), TOKENS, 0.7)
    want = plain(params)
    assert [g.token_ids for g in decode(name, params)] == want
    assert decode(name, params[1], prompts=PROMPTS[1:2])[0].token_ids == want[1]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_draws_trees_from_a_cascade(method: str) -> None:
    params = mixed(len(PROMPTS), TOKENS)
    got = decode("stranger>relative", params, policy_of(method), StaticTree(2, 3))
    assert [g.token_ids for g in got] == plain(params)


@pytest.mark.parametrize("below", [StaticTree(2, 3), EntropyStop(), "opt-tree", "auto"])
@pytest.mark.parametrize("loop", [LoopBack(), LoopBack(rejected="on"), ONCE])
def test_every_shape_of_proposals_and_every_rule(below: GrowthPolicy | str, loop: LoopBack) -> None:
    policy = policy_of(below) if isinstance(below, str) else below
    params = SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=3)
    got = decode("lookup>relative", params, StaticTree(2, 5), policy, loop)
    assert [g.token_ids for g in got] == plain(params)


def test_any_thresholds_end_and_give_the_same_text() -> None:
    """Random thresholds, caps and pending runs: no loop is endless, and no token is another."""
    random = Random(5)
    for trial in range(12):
        params = SamplingParams(max_tokens=10, temperature=random.choice([0.0, 1.0]), seed=trial)
        low, high = (random.choice([None, 0.0, random.expovariate(1.0), 1e9]) for _ in range(2))
        window = partial(DynamicWindow, low, random.randint(1, 9))
        loop = LoopBack(high, random.randint(1, 20), random.choice(["end", "on"]))
        name = random.choice(["stranger>relative", "lookup>relative"])
        method = random.choice([StaticTree(1, 20), StaticTree(2, 4), window()])
        got = decode(name, params, method, window(), loop, PROMPTS[:2], nodes=random.randint(1, 20))
        assert [g.token_ids for g in got] == plain(params, PROMPTS[:2])


def test_a_lower_level_that_proposes_nothing_leaves_the_upper_one_to_draft_alone() -> None:
    params = SamplingParams(max_tokens=TOKENS)
    model = target()
    silent = endless(CascadeSource(Says("silent", {}), source("relative", model), DynamicWindow()))
    got = Engine(model, Speculation(TreeDrafter(StaticTree(1, 5), silent), 5)).generate(PROMPTS, params)
    alone = decode("relative", params, StaticTree(1, 5), nodes=5)
    assert [g.token_ids for g in got] == plain(params)
    assert [g.stats.accepted for g in got] == [g.stats.accepted for g in alone]
    assert [g.stats.steps for g in got] == [g.stats.steps for g in alone]


@pytest.mark.parametrize("name", ["lookup>relative", "stranger>relative"])
def test_the_trees_are_those_that_the_upper_level_would_draft_alone(name: str) -> None:
    """Whoever proposes: the upper level's word is what counts, and the lower one saves it passes."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.9, seed=2)
    for method in (StaticTree(1, 6), StaticTree(2, 3)):
        got, alone = (decode(n, params, method, None, ENDLESS) for n in (name, "relative"))
        assert [g.stats.drafted for g in got] == [g.stats.drafted for g in alone]
        assert [g.stats.accepted for g in got] == [g.stats.accepted for g in alone]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_levels_the_same_model_are_always_right(temperature: float) -> None:
    params = SamplingParams(max_tokens=31, temperature=temperature, seed=3)
    g = decode("self>self", params, StaticTree(1, 5), StaticTree(1, 3), ENDLESS, PROMPTS[:1])[0]
    assert g.stats.accepted == g.stats.drafted
    assert g.stats.mal == 6.0
    for level in g.stats.figures["stages"]:
        assert level.proposed == level.accepted > 0


# what each level did


@pytest.mark.parametrize("name", PAIRS)
def test_what_the_levels_emitted_and_the_targets_own_tokens_are_the_text(name: str) -> None:
    for g in decode(name, SamplingParams(max_tokens=TOKENS, temperature=0.7, seed=4)):
        levels = g.stats.figures["stages"]
        assert [level.name for level in levels][-1] == levels[-1].name
        assert len(levels) == 2
        assert sum(level.emitted for level in levels) == sum(chunk.drafted for chunk in g.chunks)
        assert sum(level.emitted for level in levels) + sum(not c.drafted for c in g.chunks) == g.stats.tokens
        assert levels[-1].proposed == sum(g.stats.drafted)
        assert levels[-1].accepted == sum(g.stats.accepted)
        assert all(0 <= level.accepted <= level.proposed for level in levels)
        assert all(level.rounds >= 0 and level.seconds >= 0 for level in levels)


def test_passes_of_the_levels_are_the_drafters() -> None:
    g = decode("stranger>relative", SamplingParams(max_tokens=TOKENS), prompts=PROMPTS[:1])[0]
    assert sum(level.passes for level in g.stats.figures["stages"]) == g.stats.draft_passes
    assert all(level.passes for level in g.stats.figures["stages"])


def test_without_looping_back_the_upper_level_passes_once_a_step() -> None:
    params = SamplingParams(max_tokens=TOKENS)
    one = decode("stranger>relative", params, loop=ONCE, prompts=PROMPTS[:1])[0].stats
    assert one.steps - 1 <= one.figures["stages"][1].passes <= one.steps  # a last token is not drafted
    more = decode("stranger>relative", params, loop=ENDLESS, prompts=PROMPTS[:1])[0].stats
    assert more.figures["stages"][1].passes > more.steps
    assert more.steps < one.steps


def test_a_level_that_is_right_saves_the_one_above_passes() -> None:
    params = SamplingParams(max_tokens=TOKENS)
    guided = decode("relative>relative", params, StaticTree(1, 8), StaticTree(1, 8), ENDLESS, PROMPTS[:1])[0].stats
    alone = decode("relative", params, StaticTree(1, 8), prompts=PROMPTS[:1])[0].stats
    assert guided.drafted == alone.drafted
    assert 2 * guided.figures["stages"][1].passes < alone.draft_passes


def test_nothing_is_fed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every level keeps its cache: a token is read again only where a guess about it was wrong."""
    fed: dict[str, int] = {}
    extend = HFModel.extend

    def counting(model: HFModel, rows: list[Row], nodes: list[Nodes]) -> Scores:
        name = model.capabilities.name
        fed[name] = fed.get(name, 0) + sum(len(n.tokens) for n in nodes)
        return extend(model, rows, nodes)

    monkeypatch.setattr(HFModel, "extend", counting)
    model = target()
    lower, upper = (source("self", model) for _ in range(2))
    for name, made in (("low", lower), ("high", upper)):
        assert isinstance(made.model, HFModel)
        made.model.capabilities = replace(made.model.capabilities, name=name)
    cascade = endless(CascadeSource(lower, upper, StaticTree(1, 3)))
    tokens = 37
    g = Engine(model, Speculation(TreeDrafter(StaticTree(1, 5), cascade), 5)).generate(
        PROMPTS[:1], SamplingParams(max_tokens=tokens)
    )[0]
    assert g.stats.accepted == g.stats.drafted
    assert fed["high"] <= len(PROMPTS[0]) + tokens
    assert fed["low"] <= len(PROMPTS[0]) + tokens


# bad input


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tau": -1.0}, "tau is -1.0"),
        ({"tau": math.nan}, "tau is nan"),
        ({"pending": 0}, "pending is 0"),
    ],
)
def test_nonsense_is_refused(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LoopBack(**settings)  # type: ignore[arg-type]


def test_what_is_no_model_verifies_nothing() -> None:
    model = target()
    made = CascadeSource(source("relative", model), source("lookup", model), StaticTree())
    with pytest.raises(ConfigError, match=r"lookup .*\+lookup"):
        Engine(model, Speculation(TreeDrafter(StaticTree(), made)))


@pytest.mark.parametrize("scheme", ["multi-round", "top1-residual"])
def test_schemes_that_draw_children_are_refused(scheme: str) -> None:
    model = target()
    with pytest.raises(ConfigError, match="verification match"):
        Engine(
            model,
            Speculation(TreeDrafter(StaticTree(1, 3), cascade("lookup>relative", model)), scheme=find_scheme(scheme)),
        )


def test_a_context_that_is_nearly_full_is_filled_to_the_last_token() -> None:
    prompt = (PROMPTS[2] * 9)[: MAX_LENGTH - 12]
    g = decode("stranger>relative", SamplingParams(), prompts=[prompt], loop=ENDLESS)[0]
    assert g.token_ids == plain(SamplingParams(), [prompt])[0]
    assert len(g.token_ids) == 12


def test_a_trace_has_the_levels_and_their_settings(tmp_path: Path) -> None:
    model, file = target(), tmp_path / "t.jsonl"
    drafter = TreeDrafter(StaticTree(1, 5), cascade("stranger>relative", model, StaticTree(2, 2), ONCE))
    with Trace(file) as trace:
        engine = Engine(model, Speculation(drafter, 9), observers=[trace])
        g = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=TOKENS))[0]
    run, *_, end = map(json.loads, file.read_text().splitlines())
    source = run["drafter"]["source"]
    assert source["settings"]["pending"] == 1
    assert source["policy"] == {"class": "StaticTree", "width": 2, "depth": 2}
    assert source["lower"]["class"] == "ModelSource"
    assert [(x["name"], x["passes"], x["emitted"]) for x in end["stats"]["figures"]["stages"]] == [
        (x.name, x.passes, x.emitted) for x in g.stats.figures["stages"]
    ]


# auto


class Clock:
    """Time that passes only where something is asked."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Slow(Says):
    """Takes its time for every node."""

    def __init__(self, distribution: dict[int, float], clock: Clock, seconds: float) -> None:
        super().__init__("upper", distribution)
        self._clock, self._each = clock, seconds

    def _script(self, row: int, path: tuple[int, ...]) -> tuple[list[int], list[float], float]:
        self._clock.now += self._each
        return super()._script(row, path)


@pytest.mark.parametrize(("seconds", "low", "high"), [(0.01, 140, 150), (0.9, 0, 20)])
def test_auto_leaves_a_cascade_out_where_it_loses_and_keeps_it_where_it_wins(
    seconds: float, low: int, high: int
) -> None:
    """The target takes a second, and the upper level some part of that for every token that it looks at."""
    clock, truth = Clock(), {1: 0.7, 2: 0.3}
    upper = Slow({1: 0.7, 2: 0.2}, clock, seconds)
    made = endless(CascadeSource(Says("lower", {1: 0.6}), upper, StaticTree(1, 3)))
    chosen, one, rng = AutoTree(depth=4, target=costs(1.0)), request_of(), Random(3)
    drafter = TreeDrafter(chosen, made)
    chosen.prepare(target(), (made,))
    drafter.open(one)
    for step in range(250):
        if step == 100:
            upper.asked.clear()
        began = clock.now
        tree = drafter.propose([one], [Budget(8)])[0]
        draft = clock.now - began
        path, tokens = walked(tree, truth, rng)
        one.ids += tokens
        one.stats.steps += 1
        drafter.observe([Outcome(one, tree, path, tokens, len(tokens), StepCost(1, draft, 1.0, 0.0, 0))])
    assert low <= upper.asked.count(()) <= high
    told = "now on" if seconds < 0.5 else "now off"
    assert told in chosen.report.text()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at", ["lower", "upper"])
def test_a_head_may_propose_or_verify(at: str, temperature: float) -> None:
    model = target()
    head, other = EagleSource(random_head(model), VOCAB), source("relative", model)
    lower, upper = (head, other) if at == "lower" else (other, head)
    made = endless(CascadeSource(lower, upper, StaticTree(2, 2)))
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=3)
    got = Engine(model, Speculation(TreeDrafter(StaticTree(1, 6), made), 8)).generate(PROMPTS, params)
    assert [g.token_ids for g in got] == plain(params)
    assert all(level.proposed for g in got for level in g.stats.figures["stages"])


def test_what_a_model_will_never_read_keeps_nobody_from_drafting() -> None:
    part = ModelSource(target().twin(), VOCAB)
    assert part.unread(request_of(*[1] * 5))[0][1] == 4
    assert part.unread(request_of(*[1] * MAX_LENGTH)) == []


def test_auto_below_weighs_reading_against_what_is_left_of_the_answer() -> None:
    """It weighed it against the proposal's few tokens, so that it never drafted behind a longer prompt."""
    model = target()
    policy = AutoTree(target=costs(1.0), drafter=costs(0.2))
    lower = source("self", model)
    policy.prepare(model, [lower])
    request = request_of(*[5] * 40)
    assert policy.plan([request], [Budget(8, 3)]).budgets[0].nodes == 8


def test_candidates_that_pass_through_a_cascade_keep_their_part() -> None:
    ensemble = EnsembleSource((Says("one", {1: 0.4, 2: 0.2}), Says("other", {3: 0.5})))
    ensemble.fit(request := request_of(), Budget(20))
    found = ensemble.scorer([request], False).score([UnscoredNode(0, ROOT, ROOT, 0)], 4)
    cascade = CascadeSource(Says("none", {9: 0.1}), ensemble, StaticTree(1, 1))
    cascade.open(request)
    cascade.fit(request, Budget(20))
    assert cascade.scorer([request], False).score([UnscoredNode(0, ROOT, ROOT, 0)], 4) == found
    assert found[0].part == 1
