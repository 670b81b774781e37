"""Nodes of a head that are drafted before they are asked for: what they give is what a pass over them would give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from draftree.config import SamplingParams
from draftree.drafters.draft_model import EagleSource
from draftree.drafters.grow import TreeDrafter
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.errors import CacheError
from draftree.models.base import Nodes
from draftree.models.heads.ahead import MOST_NODES, Demand, Drafted
from draftree.models.heads.eagle_model import HeadModel, HeadRow
from draftree.models.heads.head_folder import load_head
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.pass_inputs import BEFORE, SEEN, TOKEN, DeviceInputs
from draftree.models.huggingface.runner import GraphRunner
from draftree.policies.base import GrowthPolicy
from draftree.policies.best_paths import Eagle2Tree, OptTree
from draftree.policies.entropy import EntropyTree
from draftree.scores import Scores
from draftree.tree import ROOT, DraftTree

from ..heads import DRAFTED, random_network
from ..pairs import begun
from ..published import KINDS, saved
from ..tiny import tiny
from .test_graph_runner import Frozen

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26, 53, 58, 9]]


def pair_of(kind: str, folder: Path) -> tuple[HeadModel, HeadModel]:
    """A head by the eager runner, which drafts nothing ahead, and by the graph runner."""
    eager, graph = (HFModel(tiny(), runner=runner, self_test=False) for runner in ("eager", "graph"))
    if kind in KINDS:
        heads = [load_head(saved(KINDS[kind], folder), target) for target in (eager, graph)]
    else:
        network = random_network(eager)
        heads = [HeadModel(deepcopy(network), DRAFTED, eager, "eager"), HeadModel(network, DRAFTED, graph, "graph")]
    for head in heads:
        assert isinstance(head, HeadModel)
    return heads[0], heads[1]  # type: ignore[return-value]


class Counted(GraphRunner):
    """A graph runner that says which passes it has made."""

    def __init__(self, head: HeadModel, captured: bool = True) -> None:
        capture = Frozen(lambda: head._rows.cache)
        super().__init__(head._passes, (lambda: capture) if captured else None)
        self.ahead = self.asked = 0

    def forward(self, step: Any, cache: Any) -> Any:
        self.ahead += step.chosen is not None
        self.asked += step.chosen is None
        return super().forward(step, cache)


def trees_of(
    head: HeadModel, policy: GrowthPolicy, prompts: Sequence[list[int]], temperature: float = 0.0
) -> Iterator[list[DraftTree]]:
    """The trees of each step."""
    drafter = TreeDrafter(policy, EagleSource(head, head.capabilities.vocab_size))
    engine = Engine(head._target, Speculation(drafter, 12))
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=5, ignore_eos=True)
    running = [begun(engine.stepper, engine.request(prompt, params)) for prompt in prompts]
    while running := [one for one in running if one.finish_reason is None]:
        yield [outcome.tree for outcome in engine.stepper.step(running)]
    for one in running:
        engine.stepper.close(one)


POLICIES = [OptTree(delta=0.2), Eagle2Tree(), EntropyTree()]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize(("count", "kind"), [(1, "eagle3 of two layers"), (3, "draftree's")])
def test_trees_are_those_of_a_pass_a_layer(count: int, kind: str, policy: GrowthPolicy, tmp_path: Path) -> None:
    eager, graph = pair_of(kind, tmp_path)
    runner, plain = Counted(graph), Counted(eager)
    graph._runner, eager._runner = runner, plain
    for wanted, found in zip(
        trees_of(eager, policy, PROMPTS[:count]), trees_of(graph, deepcopy(policy), PROMPTS[:count]), strict=True
    ):
        for one, other in zip(wanted, found, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist() and one.parents.tolist() == other.parents.tolist()
            np.testing.assert_allclose(one.path_logprobs, other.path_logprobs, atol=1e-4)
    assert not plain.ahead
    assert runner.asked < 0.85 * plain.asked


def test_nothing_is_drafted_ahead_where_children_follow_noise(tmp_path: Path) -> None:
    """The most probable tokens are not those that the target will draw."""
    graph = pair_of("draftree's", tmp_path)[1]
    runner = graph._runner = Counted(graph)
    assert len([*trees_of(graph, OptTree(), PROMPTS[:1], temperature=1.0)]) > 3
    assert runner.asked > 3 and not runner.ahead


class Pair:
    """One text in both heads."""

    def __init__(self, folder: Path, rows: int = 1) -> None:
        self.heads = pair_of("draftree's", folder)
        self.rows = [[head.open() for _ in range(rows)] for head in self.heads]
        self.noise = torch.Generator().manual_seed(3)

    @property
    def graph(self) -> HeadModel:
        return self.heads[1]

    @property
    def row(self) -> HeadRow:
        return self.rows[1][0]

    def advance(self, text: list[int]) -> None:
        features = torch.randn((len(text), self.graph.network.sizes[1]), generator=self.noise)
        rows = zip(self.heads, self.rows, strict=True)
        self.same([head.advance(own, [text] * len(own), [features] * len(own)) for head, own in rows])

    def extend(self, tokens: list[int], parents: list[int]) -> None:
        new = Nodes.of(tokens, parents)
        rows = zip(self.heads, self.rows, strict=True)
        self.same([head.extend(own, [new] * len(own)) for head, own in rows])

    def same(self, scores: list[Scores]) -> None:
        slots = range(scores[0].starts[-1])
        one, other = (each.logits(slots) for each in scores)
        assert np.array_equal(np.isfinite(one), np.isfinite(other))
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4)
        for count in (3, 20):  # as many as a pass finds, and more
            top = [each.top(slots, count) for each in scores]
            assert np.array_equal(top[0].tokens[:, :3], top[1].tokens[:, :3])
            np.testing.assert_allclose(top[0].entropies, top[1].entropies, atol=1e-4)

    @property
    def there(self) -> Drafted:
        """What is drafted ahead."""
        assert self.row.ahead is not None
        return self.row.ahead.drafted

    def best(self) -> list[int]:
        """The most probable tokens after the root, by the nodes that are there."""
        drafted = self.there
        return [int(token) for token, parent in zip(drafted.tokens[0], drafted.parents[0], strict=True) if parent < 0]

    def proposal(self, width: int, layers: int) -> None:
        """A proposal of the most probable nodes, as a drafter would ask for it; the next one has them ahead."""
        head, rows = self.graph, self.rows[1]
        for each, own in zip(self.heads, self.rows, strict=True):
            scores: Scores = each.advance(own, [[4]] * len(own), [torch.zeros(1, head.network.sizes[1])] * len(own))
        parents = [ROOT]
        for layer in range(layers):
            found = scores.top([0], width).tokens[0].tolist()
            scores = head.extend(rows, [Nodes.of(found, [parents[0]] * width)] * len(rows))
            parents = [layer * width]


@pytest.fixture
def both(tmp_path: Path) -> Pair:
    """Of which the graph's head expects two layers of four nodes, and has them behind a text."""
    pair = Pair(tmp_path)
    pair.graph._runner = Counted(pair.graph)
    pair.proposal(4, 2)
    pair.advance([9, 2, 6])
    assert pair.row.ahead is not None
    return pair


def runner_of(pair: Pair) -> Counted:
    assert isinstance(pair.graph._runner, Counted)
    return pair.graph._runner


def test_a_node_that_is_there_takes_no_pass(both: Pair) -> None:
    passes, best = runner_of(both).asked, both.best()
    both.extend(best[:2], [ROOT, ROOT])
    assert runner_of(both).asked == passes


def test_a_node_that_is_not_there_takes_a_pass_with_those_before_it(both: Pair) -> None:
    passes, best = runner_of(both).asked, both.best()
    both.extend([best[1], best[0]], [ROOT, ROOT])
    other = next(token for token in range(0, 60, 2) if token not in best)
    both.extend([other, best[2]], [ROOT, ROOT])
    assert runner_of(both).asked == passes + 1 and both.row.ahead is None
    both.extend([5, 6, 7, 8], [0, 1, 2, 3])


def test_deeper_nodes_than_are_there_follow_their_parents(both: Pair) -> None:
    """Whatever layer the parents are in; the same nodes are numbered as they were asked for."""
    best, passes = both.best(), runner_of(both).asked
    both.extend([best[1], best[0]], [ROOT, ROOT])
    assert runner_of(both).asked == passes
    both.extend([11, 12], [0, 1])
    assert runner_of(both).asked == passes + 1
    both.extend([13, 14, 15], [0, 2, 3])


def test_nodes_are_committed_as_they_were_asked_for(both: Pair) -> None:
    best = both.best()
    both.extend([best[1], best[0]], [ROOT, ROOT])
    for head, (row,) in zip(both.heads, both.rows, strict=True):
        head.commit(row, [1])
    both.extend([7], [ROOT])


def test_a_fork_and_a_closed_row_leave_what_is_there(tmp_path: Path) -> None:
    both = Pair(tmp_path, rows=3)
    runner = both.graph._runner = Counted(both.graph)
    both.proposal(4, 2)
    both.advance([9, 2, 6])
    best = both.best()
    for head, rows in zip(both.heads, both.rows, strict=True):
        head.close(rows.pop(0))
        head.fork(rows[0])
    passes = runner.asked
    both.extend(best[:2], [ROOT, ROOT])
    assert runner.asked == passes
    both.extend([11, 12], [0, 1])


def test_a_parent_that_comes_with_its_node_is_refused(both: Pair) -> None:
    best = both.best()
    with pytest.raises(CacheError, match="its hidden state is not predicted yet"):
        both.graph.extend([both.row], [Nodes.of([best[0], 3], [ROOT, 0])])
    both.extend(best[:2], [ROOT, ROOT])


@pytest.mark.parametrize(("width", "layers"), [(1, 5), (16, 5), (8, 9), (3, 2)])
def test_layers_of_any_size_are_there(width: int, layers: int, tmp_path: Path) -> None:
    """As many as fit in the bits of a number, and in each a power of two."""
    both = Pair(tmp_path)
    both.proposal(width, layers)
    both.advance([9, 2])
    assert both.row.ahead is not None
    drafted, filled = both.row.ahead.drafted, 1 << (width - 1).bit_length()
    assert drafted.tokens.shape[1] == filled * min(layers, MOST_NODES // filled)
    tokens, parents = drafted.tokens[0].tolist(), drafted.parents[0].tolist()
    for at in range(0, len(tokens), filled):  # as they are there, so that parents are numbered so too
        both.extend(tokens[at : at + filled], parents[at : at + filled])
    assert both.row.ahead is not None, "all of them were there"


def tree_and_fault(folder: Path) -> tuple[list[int], list[int], bool]:
    """What is drafted ahead behind a text, and whether what follows its nodes is not what the eager head finds."""
    both = Pair(folder)
    both.proposal(8, 3)
    both.advance([9, 2, 6])
    drafted = both.there
    tokens, parents = drafted.tokens[0].tolist(), drafted.parents[0].tolist()
    try:
        for at in range(0, len(tokens), 8):
            both.extend(tokens[at : at + 8], parents[at : at + 8])
    except AssertionError:
        return tokens, parents, True
    return tokens, parents, False


@pytest.mark.parametrize("line", range(TOKEN, SEEN + 1))
def test_what_a_pass_chooses_is_seen_to_matter(line: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another token or path than was chosen gives other trees; another parent or other ancestors, other scores."""
    tokens, parents, fault = tree_and_fault(tmp_path / "right")
    assert not fault and len(set(parents)) > 6
    right = DeviceInputs.best_below

    def wrong(self: DeviceInputs, *given: Any) -> torch.Tensor:
        chosen = right(self, *given)
        chosen[line - TOKEN] = chosen[line - TOKEN].flip(0)
        return chosen

    monkeypatch.setattr(DeviceInputs, "best_below", wrong)
    other_tokens, _, other_fault = tree_and_fault(tmp_path / "wrong")
    assert other_fault == (line in (BEFORE, SEEN))
    assert other_fault or other_tokens != tokens


def asked(demand: Demand, *layers: tuple[int, bool]) -> tuple[int, int]:
    """A proposal asks for so many nodes a layer, which are there or not; what is drafted ahead of the next one."""
    for nodes, there in layers:
        demand.add([Nodes.of([1], [ROOT]), Nodes.of([1] * nodes, [ROOT] * nodes)], there)
    return demand.begin(16)


def test_a_proposal_is_expected_to_be_like_the_last() -> None:
    demand = Demand()
    assert not demand.begin(16)[0]
    assert asked(demand, (3, False), (1, False)) == (2, 4)
    assert asked(demand, (4, True), (4, True), (2, False)) == (3, 4), "it has gone deeper than was there"
    assert asked(demand, (1, True)) == (1, 1), "it has ended sooner"
    demand.drawn = True
    assert not asked(demand, (1, True))[0]
    assert not asked(demand, (17, False))[0], "as many as no pass chooses"
    demand.add([Nodes.of([1] * 9, [ROOT] * 9)], False)
    assert demand.begin(16, room=15) == (0, 16), "as many as the cache has no room for"


def test_layers_whose_nodes_were_missing_are_not_drafted_ahead_for_a_while() -> None:
    demand = Demand()
    assert asked(demand, (2, False), (2, False), (2, False)) == (3, 2)
    assert asked(demand, (2, True), (2, False), (2, False)) == (1, 2)
    layers = [asked(demand, (2, True), (2, False), (2, False))[0] for _ in range(20)]
    assert layers[0] == 1 and 3 in layers
    assert asked(demand, (2, False), (2, False))[0] == 0


def test_scores_of_nodes_that_are_there_end_with_the_next_pass(both: Pair) -> None:
    scores = both.graph.extend([both.row], [Nodes.of(both.best()[:1], [ROOT])])
    both.graph.extend([both.row], [Nodes.of([3], [0])])
    for method in (lambda: scores.top([0], 1), lambda: scores.logits([0])):
        with pytest.raises(CacheError):
            method()


def test_a_pass_for_a_commit_ends_the_scores_before_it(tmp_path: Path) -> None:
    both = Pair(tmp_path, rows=2)
    both.proposal(4, 2)
    both.advance([9, 2, 6])
    best, (one, other) = both.best(), both.rows[1]
    both.graph.extend([other], [Nodes.of(best[:1], [ROOT])])
    scores = both.graph.extend([one], [Nodes.of([3], [ROOT])])
    both.graph.commit(other, [0])
    with pytest.raises(CacheError):
        scores.logits([0])


def test_a_pass_that_fails_leaves_what_is_there(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    best = both.best()
    both.extend(best[:2], [ROOT, ROOT])
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(both.graph._runner, "forward", Mock(side_effect=MemoryError))
        both.graph.extend([both.row], [Nodes.of([59], [0])])
    assert both.there and len(both.row.parents) == 2
    both.extend([11, 12], [0, 1])


def test_layers_are_drafted_ahead_within_what_a_request_is_allotted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Storage that moves takes the graphs with it."""
    moves = []
    for ahead in (True, False):
        graph = pair_of("draftree's", tmp_path)[1]
        steps = len([*trees_of(graph, OptTree(delta=0.2), [[3] * 96])])
        moves.append(graph._rows.cache.moves)
        assert steps > 3
        if ahead:
            monkeypatch.setattr(Demand, "begin", lambda *given: (0, 1))
    assert moves[0] == moves[1]
