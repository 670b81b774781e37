"""Ensembles: who drafts, what each source is asked, and what each is worth to the method auto."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

from draftree.config import Budget, SamplingParams
from draftree.drafters.base import DraftSource, Grown, Scorer, UnscoredNode
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.drafters.registry import load_drafter
from draftree.drafters.spec import DrafterSpec
from draftree.engine.engine import Engine, load_engine
from draftree.engine.speculation import Speculation, SpeculationParams
from draftree.errors import ConfigError, UnknownNameError
from draftree.models.base import prefill
from draftree.policies.auto import AutoTree
from draftree.policies.base import GrowthPolicy, Plan
from draftree.policies.fixed import StaticTree
from draftree.policies.methods import METHODS
from draftree.request import Outcome, Request, StepCost
from draftree.text.detokenizer import NoText
from draftree.tree import ROOT, DraftTree

from ..pairs import begun, costs, drafter, mixed, source, target
from ..pairs import policy as policy_of
from ..tiny import VOCAB
from ..toy import Path as Nodes
from ..toy import ScriptedScorer

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26]]
TOKENS = 18
Distribution = dict[int, float]


class Says(DraftSource):
    """Says the same after every node that it is asked about.

    Attributes:
        asked: paths that it was asked about.
    """

    def __init__(self, name: str, distribution: Distribution, depth: int | None = None, seconds: float = 0.0) -> None:
        self.name = name
        self._distribution = sorted(distribution.items(), key=lambda item: -item[1])
        self._depth = depth
        self._seconds = seconds
        self.took = 0.0
        self.asked: list[Nodes] = []

    def fit(self, request: Request, budget: Budget) -> Budget:
        return budget if self._depth is None else Budget(budget.nodes, self._depth)

    def scorer(self, requests: Sequence[Request], coupled: bool) -> Scorer:
        return ScriptedScorer(self._script)

    def _script(self, row: int, path: Nodes) -> tuple[list[int], list[float], float]:
        self.asked.append(path)
        self.took += self._seconds
        return [t for t, _ in self._distribution], [math.log(p) for _, p in self._distribution], 1.0

    def close(self, request: Request) -> None: ...


def walked(tree: DraftTree, truth: Mapping[int, float], rng: Random) -> tuple[list[int], list[int]]:
    """The nodes that a target accepts whose tokens are drawn from ``truth``, and its tokens."""
    path, tokens = list[int](), list[int]()
    node: int | None = ROOT
    while node is not None:
        tokens.append(rng.choices(list(truth), list(truth.values()))[0])
        node = next((c for c in tree.children(node) if int(tree.tokens[c]) == tokens[-1]), None)
        path += [] if node is None else [node]
    return path, tokens


def request_of(*ids: int) -> Request:
    return Request(ids or (0,), SamplingParams(), 10**6, frozenset(), NoText())


def drafted(ensemble: EnsembleSource, nodes: int = 20, width: int = 4, depth: int = 1) -> DraftTree:
    return TreeDrafter(StaticTree(width, depth), ensemble).propose([request_of()], [Budget(nodes)])[0]


def distribution_of(tree: DraftTree) -> Distribution:
    return dict(zip(tree.tokens, np.exp(tree.path_logprobs).tolist(), strict=True))


# who drafts


@pytest.mark.parametrize(
    ("first", "second", "third", "drafts"),
    [
        ({1: 0.6}, {2: 0.9}, {3: 0.9}, 0),
        ({1: 0.5}, {2: 0.9}, {3: 0.9}, 0),
        ({1: 0.4}, {2: 0.6}, {3: 0.9}, 1),
        ({1: 0.4}, {2: 0.3}, {3: 0.1}, 2),
        ({1: 0.4}, {2: 0.3}, {}, 1),
        ({1: 0.4}, {}, {}, 0),
        ({}, {}, {3: 0.2}, 2),
    ],
)
def test_the_first_source_that_is_sure_drafts_or_else_the_last_that_knows_something(
    first: Distribution, second: Distribution, third: Distribution, drafts: int
) -> None:
    parts = (Says("a", first), Says("b", second), Says("c", third))
    tree = drafted(EnsembleSource(parts), depth=2)
    assert tree.part == drafts and tree.tokens == [drafts + 1] * 2
    (p,) = (first, second, third)[drafts].values()
    assert np.exp(tree.path_logprobs).tolist() == pytest.approx([p, p * p])
    assert parts[drafts].asked == [(), (drafts + 1,)]
    assert not any(part.asked for part in parts[drafts + 1 :]) or p < 0.5
    assert all(part.asked in ([], [()]) for part in parts if part is not parts[drafts])


def test_sources_with_a_model_are_tried_last() -> None:
    slow = Says("slow", {1: 0.9})
    slow.model = target()
    assert drafted(EnsembleSource((slow, Says("fast", {2: 0.6})))).part == 1


def test_nothing_is_drafted_where_no_source_knows_anything() -> None:
    assert len(drafted(EnsembleSource((Says("a", {}), Says("b", {}))))) == 0


def test_each_request_has_a_drafter_of_its_own() -> None:
    class Other(Says):
        def _script(self, row: int, path: Nodes) -> tuple[list[int], list[float], float]:
            self._distribution = [(row, 0.9 if row else 0.1)]
            return super()._script(row, path)

    ensemble = EnsembleSource((Other("a", {}), Says("b", {7: 0.4})))
    trees = TreeDrafter(StaticTree(1, 2), ensemble).propose([request_of(), request_of(1)], [Budget(5)] * 2)
    assert [(tree.part, tree.tokens) for tree in trees] == [(1, [7, 7]), (0, [1, 1])]


def test_a_source_is_asked_no_deeper_than_it_can_draft() -> None:
    one, two = Says("a", {1: 0.5}, depth=1), Says("b", {2: 0.4})
    ensemble = EnsembleSource((one, two))
    assert drafted(ensemble, depth=3).tokens == [1]
    assert one.asked == [()] and not two.asked
    one._depth = 0
    assert drafted(ensemble, depth=3).tokens == [2, 2, 2]


def test_a_disabled_source_is_not_asked() -> None:
    one, two = Says("a", {1: 0.3}), Says("b", {2: 0.4})
    ensemble = EnsembleSource((one, two))
    ensemble.enable([True, False])
    assert distribution_of(drafted(ensemble)) == pytest.approx({1: 0.3})
    assert not two.asked


def test_a_source_drafts_for_no_request_that_it_leaves_out() -> None:
    class LeavesOut(StaticTree):
        def plan(self, requests: Sequence[Request], budgets: Sequence[Budget], other_tokens: int = 0) -> Plan:
            return Plan(budgets, (True, True), ((), requests[:1]))

    ensemble, requests = EnsembleSource((Says("a", {1: 0.3}), Says("b", {2: 0.9}))), [request_of(), request_of(1)]
    trees = TreeDrafter(LeavesOut(1, 2), ensemble).propose(requests, [Budget(5)] * 2)
    assert [tree.part for tree in trees] == [0, 1] and all(map(len, trees))
    trees = TreeDrafter(StaticTree(1, 2), ensemble).propose(requests, [Budget(5)] * 2)
    assert [tree.part for tree in trees] == [1, 1]


def test_a_source_settles_the_trees_that_it_drafted_alone() -> None:
    """It has numbered the nodes of no other one."""
    settled: dict[str, list[int]] = {}

    class Settles(Says):
        def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
            settled[self.name] = [len(g.tree) for g in grown]

    drafted(EnsembleSource((Settles("a", {1: 0.3}), Settles("b", {2: 0.6}), Settles("c", {3: 0.9}))))
    assert settled == {"a": [0], "b": [1], "c": [0]}


# what a source is worth


def decode(
    ensemble: EnsembleSource, truth: Distribution, steps: int, policy: GrowthPolicy | None = None, seconds: float = 1e-4
) -> None:
    """Steps of a target whose tokens are drawn from ``truth``, whatever came before.

    Drafting takes ``seconds`` beside what the parts take.
    """
    made, request, rng = TreeDrafter(policy or StaticTree(4, 1), ensemble), request_of(), Random(3)
    for _ in range(steps):
        for part in ensemble.parts:
            part.took = 0.0  # type: ignore[attr-defined]
        tree = made.propose([request], [Budget(8)])[0]
        took = tuple([part.took for part in ensemble.parts])  # type: ignore[attr-defined]
        path, tokens = walked(tree, truth, rng)
        request.ids += tokens
        cost = StepCost(1, seconds + sum(took), 1.0, 0.0, 0, took)
        made.observe([Outcome(request, tree, path, tokens, len(tokens), cost)])
        request.stats.steps += 1


class TestAuto:
    def test_a_source_that_never_pays_is_dropped_and_tried_again(self) -> None:
        good, bad = Says("good", {1: 0.8}), Says("bad", {2: 0.5}, seconds=0.1)
        ensemble, chosen = EnsembleSource((bad, good)), AutoTree(depth=3, target=costs(1.0))
        chosen.prepare(target(), ensemble.parts)
        decode(ensemble, {1: 0.8, 3: 0.2}, 100, chosen)
        good.asked.clear()
        bad.asked.clear()
        decode(ensemble, {1: 0.8, 3: 0.2}, 400, chosen)
        assert 0 < bad.asked.count(()) <= 43  # a try costs a tenth of a step: 1.1% of the time
        assert 390 <= good.asked.count(()) + bad.asked.count(()) < 400  # and some AR passes, to compare with
        text = chosen.report.text()
        assert "drafter bad, now" in text
        assert "drafter good, now on" in text

    def test_of_two_sources_that_say_the_same_one_stays(self) -> None:
        """Neither offers anything that the other does not: both were left out."""
        one, two = Says("a", {1: 0.8}, seconds=0.002), Says("b", {1: 0.8}, seconds=0.05)
        ensemble, chosen = EnsembleSource((one, two)), AutoTree(depth=3, target=costs(1.0))
        chosen.prepare(target(), ensemble.parts)
        decode(ensemble, {1: 0.8, 3: 0.2}, 100, chosen)
        one.asked.clear()
        two.asked.clear()
        decode(ensemble, {1: 0.8, 3: 0.2}, 100, chosen)
        assert 95 <= one.asked.count(()) <= 100
        assert not two.asked


# whole decodings


@pytest.mark.parametrize("method", METHODS)
def test_the_text_is_that_of_ar_decoding(method: str) -> None:
    model, params = target(), mixed(len(PROMPTS), TOKENS)
    want = [g.token_ids for g in Engine(model).generate(PROMPTS, params)]
    engine = Engine(model, Speculation(drafter("lookup+relative", model, policy_of(method)), 9))
    assert [g.token_ids for g in engine.generate(PROMPTS, params)] == want
    assert engine.generate(PROMPTS[1:2], params[1])[0].token_ids == want[1]


def test_a_model_that_has_rested_catches_up() -> None:
    model, params = target(), SamplingParams(max_tokens=50)
    ensemble = EnsembleSource((Says("quiet", {}), source("self", model)))
    engine = Engine(model, Speculation(TreeDrafter(StaticTree(1, 3), ensemble), 3))
    request = begun(engine.stepper, engine.request(PROMPTS[0], params))
    accepted = []
    for step in range(9):
        ensemble.enable([True, not 2 <= step < 5])
        accepted.append(len(engine.stepper.step([request])[0].path))
    engine.stepper.close(request)
    assert accepted[:2] + accepted[5:] == [3] * 6
    assert request.output_ids == Engine(model).generate(PROMPTS[:1], params)[0].token_ids[: len(request.output_ids)]


def test_closing_frees_the_models_rows() -> None:
    model = target()
    ensemble = source("lookup+self", model)
    Engine(model, Speculation(TreeDrafter(StaticTree(), ensemble))).generate(PROMPTS, SamplingParams(max_tokens=5))
    assert ensemble.parts[1].model is not None
    assert prefill(ensemble.parts[1].model, PROMPTS[1]).number == prefill(model, PROMPTS[1]).number == 0


# names


def test_an_ensemble_is_made_by_name_in_any_order() -> None:
    for name, kinds in (("lookup+self", [NgramSource, ModelSource]), ("self + lookup", [ModelSource, NgramSource])):
        made = load_drafter(name, target(), StaticTree())
        assert isinstance(made, TreeDrafter)
        assert [type(part) for part in made.source.parts] == kinds


def test_a_folder_may_have_a_plus_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "a+b").mkdir()
    assert DrafterSpec.parse(str(tmp_path / "a+b")).sources == (str(tmp_path / "a+b"),)


BAD = {
    "lookup+": r"'lookup\+'",
    "+": r"'\+'",
    "lookup+lookup": "part twice",
    "lookup+none": "none joins",
    "lookup+auto": "auto joins",
}


@pytest.mark.parametrize("name", BAD)
def test_names_that_do_not_go_together_are_refused_before_a_model_is_loaded(name: str) -> None:
    with pytest.raises(ConfigError, match=BAD[name]):
        load_engine("./nowhere", SpeculationParams(drafter=name))


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(UnknownNameError, match="'nope': .*auto, lookup, head"):
        load_drafter("lookup+nope", target(), StaticTree())


def test_drawn_children_are_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="top1-residual .*match"):
        load_engine(
            "./nowhere", SpeculationParams(drafter="lookup+self", method="static", verification="top1-residual")
        )


def test_what_is_said_in_several_rounds_has_the_depth_of_its_node() -> None:
    """In a cascade an ensemble is asked in rounds; each round counted as one level deeper, until parts fell silent."""
    short = Says("short", {1: 0.6}, depth=2)
    ensemble = EnsembleSource((short, Says("other", {2: 0.3})))
    request = request_of()
    ensemble.fit(request, Budget(20))
    scorer = ensemble.scorer([request], False)
    scorer.score([UnscoredNode(0, ROOT, ROOT, 0)], 4)
    for number in range(4):  # four siblings, one after another: all of depth 1
        found = scorer.score([UnscoredNode(0, number, ROOT, number + 5)], 4)
        assert found[0].tokens[0] == 1
    found = scorer.score([UnscoredNode(0, 9, 3, 1)], 4)
    assert not found[0].tokens  # depth 2 is the last one that the part drafts


def test_a_part_that_rests_commits_nothing_that_a_failed_step_left_behind() -> None:
    """Its numbers were those of another tree."""
    model = target()
    part = ModelSource(model.twin(), VOCAB)
    ensemble = EnsembleSource((part, Says("sure", {5: 0.9})))
    request = request_of(3, 14, 15, 9)
    ensemble.enable([True, False])
    TreeDrafter(StaticTree(1, 3), ensemble).propose([request], [Budget(3)])  # and its verification fails
    ensemble.enable([False, True])
    drafter = TreeDrafter(StaticTree(1, 3), ensemble)
    tree = drafter.propose([request], [Budget(3)])[0]
    assert tree.tokens == [5, 5, 5]
    request.ids += [5, 5, 7]
    drafter.observe([Outcome(request, tree, [0, 1], [5, 5, 7], 3, StepCost(1, 1.0, 1.0, 0.0, 0))])
    assert part.unread(request)[0][1] == 2  # of 6 tokens but the last it has read the 4 of the failed step
