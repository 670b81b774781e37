"""Recycling: what the table keeps, which trees it gives, and its file."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from draftree.config import Budget, SamplingParams
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import (
    ANY,
    Context,
    NgramSource,
    SuccessorTable,
    TokenRecyclingSource,
    candidates_of,
)
from draftree.engine.engine import Engine
from draftree.engine.speculation import Observer, Speculation
from draftree.errors import ConfigError
from draftree.policies.base import Candidates
from draftree.policies.fixed import StaticTree
from draftree.policies.methods import METHODS
from draftree.request import Outcome, Request, StepCost
from draftree.scores import NumpyScores, Top
from draftree.text.detokenizer import NoText
from draftree.tree import DraftTree
from draftree.verify.schemes import find_scheme

from ..pairs import mixed, policy, target
from ..tiny import causal_logits, tiny
from ..toy import ToyModel

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26]]
TOKENS = 20


def found(*distributions: list[tuple[int, float]]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Tokens and probabilities of some successors."""
    tokens = np.array([[t for t, _ in distribution] for distribution in distributions], np.int32)
    return tokens, np.array([[p for _, p in distribution] for distribution in distributions], np.float32)


def scores_of(*distributions: list[tuple[int, float]]) -> NumpyScores:
    """Scores with these most probable successors; what is left is shared by the other tokens."""
    rows = np.full((len(distributions), 10), 1e-6, np.float32)
    for row, (tokens, probabilities) in zip(rows, zip(*found(*distributions), strict=True), strict=True):
        row[:] = (1 - probabilities.sum()) / (10 - len(tokens))
        row[tokens] = probabilities
    return NumpyScores(np.log(rows), [len(rows)])


def after(table: SuccessorTable, context: Context, width: int) -> Candidates:
    return candidates_of(table.after(context), width)


class TestTable:
    def test_unseen_tokens_have_no_successors(self) -> None:
        assert after(SuccessorTable(2), (1, 3), 2) == Candidates([], [], 0.0)

    def test_the_last_ones_seen_stay(self) -> None:
        table = SuccessorTable(2)
        table.put({(ANY, 3): 0, (ANY, 4): 1}, *found([(1, 0.5), (2, 0.25)], [(5, 0.8), (6, 0.2)]))
        table.put({(ANY, 3): 0}, *found([(7, 0.6), (8, 0.4)]))
        for token, tokens, p in ((4, [5, 6], [0.28, 0.07]), (3, [7, 8], [0.21, 0.14])):
            said = after(table, (9, token), 2)
            assert said.tokens == tokens
            assert np.exp(said.logprobs).tolist() == pytest.approx(p)

    def test_two_tokens_say_more_than_one_and_both_are_blended(self) -> None:
        table = SuccessorTable(2)
        table.put({(ANY, 3): 0, (4, 3): 1}, *found([(1, 0.8), (2, 0.2)], [(2, 0.6), (7, 0.4)]))
        said = after(table, (4, 3), 4)
        own, common = 0.5, 0.5 * 0.35
        want = {2: own * 0.6 + common * 0.2, 7: own * 0.4, 1: common * 0.8}
        assert said.tokens == [2, 7, 1]
        assert np.exp(said.logprobs).tolist() == pytest.approx([*want.values()])

    def test_the_entropy_is_of_the_whole_distribution_whatever_the_width(self) -> None:
        table = SuccessorTable(2)
        table.put({(ANY, 3): 0}, *found([(1, 0.5), (2, 0.25)]))
        distribution = [0.175, 0.0875, 0.7375]
        for width in (1, 2):
            said = after(table, (0, 3), width)
            assert len(said.tokens) == width
            assert said.entropy == pytest.approx(-sum(p * math.log(p) for p in distribution))

    def test_a_full_table_forgets_what_was_seen_longest_ago(self) -> None:
        table = SuccessorTable(1, capacity=2)
        for token in (3, 4, 3, 5):
            table.put({(ANY, token): 0}, *found([(token + 1, 0.5)]))
        found_now = [np.exp(after(table, (0, token), 1).logprobs).tolist() for token in (3, 4, 5)]
        assert found_now == [pytest.approx([0.175]), [], pytest.approx([0.175])]


def request_of(*ids: int) -> Request:
    return Request(ids, SamplingParams(), 99, frozenset(), NoText())


def pair(one: int, two: int) -> DraftTree:
    """Two children of the root."""
    return DraftTree.of([one, two], [-1, -1], [1, 1], [0.0, 0.0], [0.0, 0.0])


def prepared(width: int = 2) -> TokenRecyclingSource:
    source = TokenRecyclingSource(width)
    source.prepare(ToyModel(10))
    return source


def taught(source: TokenRecyclingSource) -> Request:
    """After token 1 comes 2 or 3, after 2 comes 4, after 3 comes 1, as one verified tree has shown."""
    request = request_of(0, 1)
    source.open(request)
    tree = pair(2, 3)
    request.ids += [2, 4]
    distributions = scores_of([(2, 0.6), (3, 0.3)], [(4, 0.8), (5, 0.1)], [(1, 0.7), (5, 0.1)])
    source.observe([Outcome(request, tree, [0], [2, 4], 2, StepCost(1, 0.0, 0.0, 0.0, 0), distributions)])
    return request


def drafted(source: TokenRecyclingSource, request: Request, nodes: int = 20) -> DraftTree:
    return TreeDrafter(StaticTree(width=2, depth=3), source).propose([request], [Budget(nodes)])[0]


def test_nothing_is_learned_of_scores_while_it_is_disabled() -> None:
    class Never(NumpyScores):
        def top(self, *arguments: object) -> Top:
            raise AssertionError("nobody learns from it")

    ensemble = EnsembleSource((NgramSource(), prepared()))
    request = request_of(1, 2, 3)
    tree, cost = DraftTree.empty(), StepCost(1, 0.0, 0.0, 0.0, 0)
    outcome = Outcome(request, tree, [], [3], 1, cost, Never(np.zeros((1, 10), np.float32), [1]))
    ensemble.enable([True, False])
    ensemble.observe([outcome])
    ensemble.enable([True, True])
    with pytest.raises(AssertionError, match="nobody"):
        ensemble.observe([outcome])


def test_trees_follow_the_successors_of_each_token() -> None:
    source = prepared()
    taught(source)
    tree = drafted(source, request_of(9, 1))
    assert tree.tokens.tolist() == [2, 3, 4, 5, 1, 5, 2, 3]
    assert tree.parents.tolist() == [-1, -1, 0, 0, 1, 1, 4, 4]
    blend = 0.5 + 0.5 * 0.35  # tokens 1, 2 and 1, 3 have been seen, 9, 1 and 3, 1 have not
    steps = [0.21, 0.105, 0.8 * blend, 0.1 * blend, 0.7 * blend, 0.1 * blend, 0.21, 0.105]
    paths = [steps[0], steps[1], *(steps[0] * x for x in steps[2:4]), *(steps[1] * x for x in steps[4:6])]
    paths += [paths[4] * x for x in steps[6:]]
    assert np.exp(tree.path_logprobs).tolist() == pytest.approx(paths)


def test_nothing_is_drafted_after_a_token_that_was_never_verified() -> None:
    source = prepared()
    taught(source)
    assert len(drafted(source, request_of(1, 9))) == 0


def test_the_accepted_path_counts_more_than_a_rejected_node_with_the_same_token() -> None:
    source, request = prepared(), request_of(0, 1)
    tree = pair(1, 2)
    request.ids += [2, 4]
    distributions = scores_of([(2, 0.6), (3, 0.3)], [(8, 0.8), (9, 0.1)], [(4, 0.7), (5, 0.1)])
    source.observe([Outcome(request, tree, [1], [2, 4], 2, StepCost(1, 0.0, 0.0, 0.0, 0), distributions)])
    assert drafted(source, request_of(1), nodes=2).tokens.tolist() == [2, 3]


def test_sequences_share_what_was_seen() -> None:
    model = target()
    drafter = TreeDrafter(StaticTree(width=4, depth=2), TokenRecyclingSource())
    engine = Engine(model, Speculation(drafter, 20))
    first, again = (engine.generate(PROMPTS[:1], SamplingParams(max_tokens=TOKENS))[0] for _ in range(2))
    assert first.token_ids == again.token_ids
    assert sum(again.stats.accepted) > sum(first.stats.accepted)


@pytest.mark.parametrize("method", METHODS)
def test_the_text_is_that_of_ar_decoding(method: str) -> None:
    model, params = target(), mixed(len(PROMPTS), TOKENS)
    want = [g.token_ids for g in Engine(model).generate(PROMPTS, params)]
    engine = Engine(model, Speculation(TreeDrafter(policy(method), TokenRecyclingSource()), 9))
    assert [g.token_ids for g in engine.generate(PROMPTS, params)] == want
    assert engine.generate(PROMPTS[1:2], params[1])[0].token_ids == want[1]


class Distributions(Observer):
    """Compares what a drafter is told with what the target says of each node's own path."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.seen = 0

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            told = outcome.top(self.count)
            assert told is not None
            before, paths = outcome.request.ids[: -outcome.taken], [list[int]()]
            for parent, token in zip(outcome.tree.parents.tolist(), outcome.tree.tokens.tolist(), strict=True):
                paths.append([*paths[parent + 1], token])
            assert len(told.tokens) == len(paths)
            for path, tokens, logprobs in zip([*paths[1:], paths[0]], told.tokens, told.logprobs, strict=True):
                want = causal_logits(tiny(), [*before, *path])[-1].log_softmax(-1).topk(self.count)
                assert tokens.tolist() == want.indices.tolist()
                assert np.allclose(logprobs, want.values.numpy(), atol=1e-4)
                self.seen += 1


@pytest.mark.parametrize("verification", ["match", "relaxed"])
def test_a_drafter_is_told_what_the_target_says_after_every_node(verification: str) -> None:
    distributions = Distributions(3)
    params = [SamplingParams(max_tokens=8, temperature=t, seed=2) for t in (0.0, 1.0, 0.7)]
    made = TreeDrafter(StaticTree(width=2, depth=2), TokenRecyclingSource(3))
    for each in (params, params[:1] * 3):
        Engine(target(), Speculation(made, 6, find_scheme(verification)), observers=[distributions]).generate(
            PROMPTS, each
        )
    assert distributions.seen > 60


def test_drawn_children_are_refused() -> None:
    with pytest.raises(ConfigError, match="learn from all requests.*use verification match"):
        Engine(
            target(), Speculation(TreeDrafter(StaticTree(), TokenRecyclingSource()), scheme=find_scheme("multi-round"))
        )


def test_a_width_below_1_is_refused() -> None:
    with pytest.raises(ConfigError, match="keeps 0 successors"):
        TokenRecyclingSource(0)
