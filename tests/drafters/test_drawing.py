"""Children drawn from the draft distribution: their distribution, their keys, and what drafters make of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from draftree.config import Budget, SamplingParams
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.input_processor import text_stream
from draftree.errors import ConfigError
from draftree.models.huggingface.torch_scores import warp
from draftree.policies.base import NO_CANDIDATES, Child, DraftDistribution, Frontier, GrowthPolicy, Plan
from draftree.policies.fixed import StaticTree
from draftree.request import Request
from draftree.sampling.warping import softmax
from draftree.tree import ROOT, DraftTree
from draftree.verify.sampled import (
    RandomChildren,
    SampledTree,
    TopAndRest,
    WithoutReplacement,
    WithReplacement,
    streams_of,
)

from ..lookups import Reference
from ..toy import ToyModel, chi_square

Q = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0])
SAMPLERS: list[type[RandomChildren]] = [WithoutReplacement, WithReplacement, TopAndRest]
DRAWS = 6000
"""They find a probability that is off by a tenth of itself or more with a chance of 0.99."""


def distribution_of(sampler: type[RandomChildren], count: int) -> Tensor:
    """[V] * count: exact distribution of the drawn tuples."""
    out = torch.zeros([len(Q)] * count, dtype=torch.float64)
    for tokens in itertools.product(range(len(Q)), repeat=count):
        left, chance = Q.double(), 1.0
        for i, token in enumerate(tokens):
            if sampler is TopAndRest and i < count - 1:
                chance *= token == int(left.argmax())
            else:
                chance *= float(left[token] / left.sum()) if float(left.sum()) else 0.0
            if sampler is not WithReplacement:
                left = left.index_fill(0, torch.tensor([token]), 0)
        out[tokens] = chance
    return out


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_children_follow_the_distribution_of_their_drawing(sampler: type[RandomChildren], count: int) -> None:
    n = DRAWS // count
    logits, counts = Q.log().numpy(), torch.zeros([len(Q)] * count)
    for seed in range(n):
        counts[tuple(sampler([]).choose(logits, count, streams_of(seed, 7, ROOT)).tolist())] += 1
    assert chi_square(counts.flatten(), distribution_of(sampler, count).flatten()) > 1e-4


@pytest.mark.parametrize("other", [(3, 8, 0), (3, 7, 1), (4, 7, 0)])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_part_of_the_key_changes_the_draws(sampler: type[RandomChildren], other: tuple[int, int, int]) -> None:
    flat = np.zeros(1000, np.float32)
    first, second = (sampler([]).choose(flat, 3, streams_of(*key)) for key in ((3, 7, 0), other))
    assert first[-1] != second[-1]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_children_do_not_depend_on_who_else_is_drawn(sampler: type[RandomChildren]) -> None:
    made = request(SamplingParams(temperature=1.0, seed=9), [1, 2])
    rows = [DraftDistribution(row) for row in np.random.default_rng(0).normal(size=(5, 20)).astype(np.float32)]
    counts = [3, 1, 0, 4, 2]
    drawn_from = lambda nodes: [rows[f] for _, f in nodes]  # noqa: E731
    together = sampler([made]).draw(frontier(range(5)), counts, drawn_from)
    for f, count in enumerate(counts):
        assert len(together[f].tokens) == count
        if count:
            alone = sampler([made]).draw(frontier([f]), [count], drawn_from)
            assert alone[0].tokens == together[f].tokens


def frontier(nodes: Sequence[int]) -> Frontier:
    n = len(nodes)
    return Frontier(Plan([]), 1, [0] * n, nodes, [0.0] * n, [0] * n, [NO_CANDIDATES] * n, [], [], [])


def request(params: SamplingParams, ids: list[int]) -> Request:
    return Request(ids, params, 50, frozenset(), text_stream(None, params, ids))


def model_tree(
    params: SamplingParams, sampler: type[RandomChildren] | None, policy: GrowthPolicy, nodes: int = 12
) -> DraftTree:
    drafter = TreeDrafter(policy, ModelSource(ToyModel(6, seed=2), 6))
    made = request(params, [1, 2])
    drafter.open(made)
    made.ids.append(3)  # the root: the last token, which no model has seen
    return drafter.propose([made], [Budget(nodes)], coupled=False, sampler=sampler)[0]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("shape", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}])
def test_the_distribution_of_a_model_draft_is_warped_as_the_targets(
    shape: dict[str, float], sampler: type[RandomChildren]
) -> None:
    params = SamplingParams(temperature=0.7, seed=4, **shape)  # type: ignore[arg-type]
    tree = model_tree(params, sampler, StaticTree(width=2, depth=2))
    assert isinstance(tree, SampledTree)
    assert {ROOT, *tree.parents} == set(tree.distributions)
    for parent, distribution in tree.distributions.items():
        path = [] if parent == ROOT else [int(tree.tokens[parent])]
        want = warp(ToyModel(6, seed=2).after([1, 2, 3, *path])[None], params.warping)[0].softmax(-1)
        assert np.allclose(softmax(distribution.dense(6)), want.numpy(), atol=1e-6)
        above = 0.0 if parent == ROOT else float(tree.path_logprobs[parent])
        for child in tree.children(parent):
            logprob = float(tree.path_logprobs[child]) - above
            assert logprob == pytest.approx(float(want[tree.tokens[child]].log()), abs=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_at_temperature_zero_children_are_the_most_probable(sampler: type[RandomChildren]) -> None:
    params = SamplingParams()
    tree = model_tree(params, sampler, StaticTree(width=3, depth=2))
    assert tree.tokens == model_tree(params, None, StaticTree(width=3, depth=2)).tokens
    assert isinstance(tree, SampledTree) and not tree.distributions


def test_the_layer_that_overflows_is_cut_before_its_children_are_drawn() -> None:
    """How many children each node gets is the same for every seed that drew the same nodes above."""
    shapes: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for seed in range(200):
        params = SamplingParams(temperature=1.5, seed=seed)
        tree = model_tree(params, WithoutReplacement, StaticTree(width=2, depth=2), nodes=4)
        shapes.setdefault(tuple(tree.tokens[:2]), set()).add(tuple(tree.parents))
    assert len(shapes) > 5
    assert all(len(parents) == 1 for parents in shapes.values())


def test_a_policy_that_passes_over_candidates_cannot_have_them_drawn() -> None:
    class Second(GrowthPolicy):
        def grow(self, frontier: Frontier) -> list[Child]:
            return [Child(parent, 1, extend=False) for parent in range(len(frontier.requests))]

    with pytest.raises(ConfigError, match="first ones"):
        model_tree(SamplingParams(temperature=1.0, seed=0), WithoutReplacement, Second())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_lookup_draws_from_its_blend_normalised_over_what_it_knows(sampler: type[RandomChildren]) -> None:
    drafter = TreeDrafter(StaticTree(width=5, depth=1), NgramSource(shortest=1))
    text = [1, 2, 3, 1, 2, 3, 1, 2, 4, 5, 2, 6, 1, 2]
    counts = torch.zeros(7)
    for seed in range(800):
        made = request(SamplingParams(temperature=1.0, seed=seed), text)
        drafter.open(made)
        tree = drafter.propose([made], [Budget(1)], coupled=False, sampler=sampler)[0]
        counts[tree.tokens[0]] += 1
        drafter.close(made)
    blend = Reference([text], 1).predict()
    distribution = torch.zeros(7).index_put((torch.tensor(list(blend)),), torch.tensor(list(blend.values())))
    assert chi_square(counts, distribution / distribution.sum()) > 1e-4
    want = (distribution / distribution.sum()).numpy()
    assert isinstance(tree, SampledTree)
    assert np.allclose(softmax(tree.distributions[ROOT].dense(7)), want, atol=1e-6)


def test_lookup_draws_no_more_children_than_it_knows_tokens() -> None:
    drafter = TreeDrafter(StaticTree(width=5, depth=1), NgramSource(shortest=1))
    made = request(SamplingParams(temperature=1.0, seed=0), [1, 2, 3, 1, 2, 4, 1, 2])
    drafter.open(made)
    tree = drafter.propose([made], [Budget(5)], coupled=False, sampler=WithoutReplacement)[0]
    assert sorted(tree.tokens) == [3, 4]
