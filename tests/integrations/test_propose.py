"""Drafts for other engines: the trees of lookup, chains, texts that go on or do not, and no torch."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.config import Budget, SamplingParams
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.errors import ConfigError
from draftree.integrations.other_engines import Proposer
from draftree.papers.opt_tree import OptTree
from draftree.request import Request
from draftree.text.detokenizer import NoText
from draftree.tree import ROOT, DraftTree

from ..lookups import Reference

Tree = tuple[list[int], list[int]]
texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)
examples = settings(max_examples=100, deadline=None, derandomize=True)


def drafted(ids: Sequence[int], prediction: Sequence[int], nodes: int) -> DraftTree:
    """OPT-Tree over drafter lookup, as the engine drafts it."""
    request = Request(ids, SamplingParams(), 100, frozenset(), NoText(), prediction=prediction)
    source = NgramSource()
    source.open(request)
    return TreeDrafter(OptTree(delta=1e-9), source).propose([request], [Budget(nodes)])[0]


def path_logprobs(ids: Sequence[int], prediction: Sequence[int], tree: Tree) -> list[float]:
    """Of each node of a tree; -inf where lookup does not know it."""
    reference = Reference([[*ids[-16:], *prediction], ids] if prediction else [ids])
    paths: dict[int, tuple[tuple[int, ...], float]] = {ROOT: ((), 0.0)}
    for node, (token, parent) in enumerate(zip(*tree, strict=True)):
        path, total = paths[parent]
        p = reference.predict(path).get(token, 0.0)
        paths[node] = ((*path, token), total + math.log(p) if p else -math.inf)
    return [total for _, total in list(paths.values())[1:]]


@given(ids=texts, prediction=st.lists(st.integers(0, 2), max_size=12), nodes=st.integers(1, 9))
@examples
def test_the_tree_is_as_good_as_that_of_opt_tree_over_lookup(ids: list[int], prediction: list[int], nodes: int) -> None:
    tree = Proposer(prediction).propose(ids, nodes)
    expected = drafted(ids, prediction, nodes)
    assert len(tree[0]) == len(expected)
    assert sorted(path_logprobs(ids, prediction, tree)) == pytest.approx(sorted(expected.path_logprobs), abs=1e-5)


@given(ids=texts, nodes=st.integers(0, 9), width=st.integers(1, 3))
@examples
def test_nodes_are_in_level_order_and_within_the_bounds(ids: list[int], nodes: int, width: int) -> None:
    tokens, parents = Proposer().propose(ids, nodes, width=width)
    depths = {ROOT: 0}
    for node, parent in enumerate(parents):
        depths[node] = depths[parent] + 1
    levels = list(depths.values())[1:]
    assert len(tokens) == len(parents) <= nodes and levels == sorted(levels)
    assert all(parents.count(node) <= width for node in depths)
    assert len(set(zip(tokens, parents, strict=True))) == len(tokens)


@given(ids=texts, more=texts, other=texts)
@examples
def test_a_text_is_read_on_where_it_goes_on_and_anew_where_it_is_another(
    ids: list[int], more: list[int], other: list[int]
) -> None:
    proposer = Proposer()
    assert proposer.propose(ids, 6) == Proposer().propose(ids, 6)
    by_token = Proposer()
    wanted = [by_token.propose([*ids, *more[:end]], 6) for end in range(len(more) + 1)][-1]
    assert proposer.propose(ids + more, 6) == wanted
    if [*ids, *more] != other[: len(ids + more)]:
        assert proposer.propose(other, 6) == Proposer().propose(other, 6)


@given(ids=texts, cost=st.floats(0, 2), width=st.sampled_from([None, 1]))
@examples
def test_a_tree_is_as_large_as_makes_most_tokens_a_second(ids: list[int], cost: float, width: int | None) -> None:
    whole = Proposer().propose(ids, 9, width=width)
    gains = sorted(map(math.exp, path_logprobs(ids, [], whole)), reverse=True)
    rates = [(1 + sum(gains[:nodes])) / (1 + cost * nodes) for nodes in range(len(gains) + 1)]
    found = Proposer().propose(ids, 9, width=width, cost=cost)
    assert rates[len(found[0])] == pytest.approx(max(rates), rel=1e-9)


def test_a_chain_follows_what_was_there_as_long_as_it_pays() -> None:
    ids = [1, 2, 3, 4, 5, 6, 1, 2]
    tokens, parents = Proposer().propose(ids, 4, width=1)
    assert tokens == [3, 4, 5, 6] and parents == [-1, 0, 1, 2]
    assert Proposer().propose(ids, 4, width=1, cost=0.4) == ([3], [-1])
    assert Proposer().propose(ids, 4, cost=0.6) == ([], [])


def test_a_prediction_is_drafted_from_the_first_token_on() -> None:
    assert Proposer([7, 8, 9]).propose([1, 2], 3)[0] == [7, 8, 9]
    assert Proposer().propose([1, 2], 3) == ([], [])


def test_a_bound_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="budget is -1"):
        Proposer().propose([1], -1)
    for cost in (-0.1, math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"cost is {cost}:"):
            Proposer().propose([1], 1, cost=cost)


def test_no_torch_is_loaded() -> None:
    """Other engines bring releases of transformers that ours does not go with."""
    code = "import sys; import draftree.integrations.other_engines; print({'torch', 'transformers'} & set(sys.modules))"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)  # noqa: S603
    assert made.stdout.strip() == "set()", made.stderr
