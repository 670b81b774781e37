"""Draft heads by the graph runner: the passes of the eager one, in few shapes."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from draftree.models.base import Nodes
from draftree.models.heads.eagle_model import HeadModel, HeadRow
from draftree.models.heads.eagle_network import HeadPasses
from draftree.models.heads.head_folder import load_head
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.runner import GraphRunner
from draftree.models.huggingface.torch_scores import HeadScores
from draftree.sampling.warping import Warping
from draftree.scores import Draft, Edit, Top
from draftree.tree import ROOT

from ..heads import DRAFTED, random_network
from ..published import KINDS, saved
from ..references import tensor_of
from ..tiny import VOCAB, tiny
from .test_graph_runner import Frozen
from .trees import random_ids

Heads = Callable[[str], tuple[HeadModel, HeadModel]]
KIND_OF = {"draftree's": "", "two layers": "eagle3 of two layers"}


@pytest.fixture
def heads(tmp_path: Path) -> Heads:
    """A head of one kind twice: by the eager runner, and by the graph runner."""

    def made(kind: str) -> tuple[HeadModel, HeadModel]:
        eager, graph = (HFModel(tiny(), runner=runner, self_test=False) for runner in ("eager", "graph"))
        if KIND_OF[kind]:
            folder = saved(KINDS[KIND_OF[kind]], tmp_path / "head")
            pair = load_head(folder, eager), load_head(folder, graph)
            assert isinstance(pair[0], HeadModel) and isinstance(pair[1], HeadModel)
            return pair[0], pair[1]
        network = random_network(eager)
        return HeadModel(deepcopy(network), DRAFTED, eager, "eager"), HeadModel(network, DRAFTED, graph, "graph")

    return made


class Both:
    """The same rows in two heads, and the largest difference of what they predict.

    The hidden states of the target are noise.
    """

    def __init__(self, heads: tuple[HeadModel, HeadModel], seed: int) -> None:
        self.heads, self.rng, self.noise = heads, Random(seed), torch.Generator().manual_seed(seed)
        self.rows = list[tuple[HeadRow, HeadRow]]()
        self.difference = 0.0

    def open(self, length: int) -> None:
        """A row with a text."""
        eager, graph = (head.open() for head in self.heads)
        self.rows.append((eager, graph))
        self.advance([len(self.rows) - 1], [length])

    def close(self, at: int) -> None:
        """The row is gone."""
        for head, row in zip(self.heads, self.rows.pop(at), strict=True):
            head.close(row)

    def advance(self, some: list[int], counts: list[int]) -> None:
        """Tokens that the target has committed."""
        texts = [random_ids(self.rng, n) for n in counts]
        features = [torch.randn((n, self.heads[0].network.sizes[1]), generator=self.noise) for n in counts]
        rows = [[self.rows[i][k] for i in some] for k in range(2)]
        self._compare([tensor_of(h.advance(own, texts, features)) for h, own in zip(self.heads, rows, strict=True)])

    def extend(self, some: list[int], parents: list[list[int]]) -> None:
        """Nodes below others that are there."""
        new = [Nodes(random_ids(self.rng, len(own)), own) for own in parents]
        scores = [h.extend([self.rows[i][k] for i in some], new) for k, h in enumerate(self.heads)]
        wanted, found = (own.top(range(own.starts[-1]), 3) for own in scores)
        assert np.array_equal(wanted.tokens, found.tokens)
        np.testing.assert_allclose(wanted.logprobs, found.logprobs, atol=1e-4)
        self._compare([tensor_of(own) for own in scores])

    def _compare(self, logits: list[Tensor]) -> None:
        eager, graph = logits
        assert eager.shape == graph.shape and torch.equal(eager.isfinite(), graph.isfinite())
        there = eager.isfinite()
        self.difference = max(self.difference, float((eager[there] - graph[there]).abs().max()))

    def drive(self, steps: int) -> None:
        """Rows open, are read, drafted for in trees of two or three layers, commit drafts, grow and close."""
        for length in (5, 50, 3):
            self.open(length)
        for step in range(steps):
            some = sorted(self.rng.sample(range(len(self.rows)), self.rng.randint(1, len(self.rows))))
            self.advance(some, [self.rng.randint(0 if step % 2 else 1, 3) for _ in some])
            self.extend(some, [[ROOT] * self.rng.choice((2, 4)) for _ in some])
            self.extend(some, [[self.rng.choice((0, 1)) for _ in range(3)] for _ in some])
            if step % 3 == 0:
                for i in some:
                    for head, row in zip(self.heads, self.rows[i], strict=True):
                        head.commit(row, [1])
            if step % 8 == 7:
                self.close(self.rng.randrange(len(self.rows)))
                self.open(self.rng.randint(1, 70))


def graphs(head: HeadModel) -> GraphRunner:
    assert isinstance(head._runner, GraphRunner)
    return head._runner


@pytest.mark.parametrize("kind", KIND_OF)
def test_what_was_captured_is_right_wherever_it_is_replayed(kind: str, heads: Heads) -> None:
    """To the last bits: padding makes products of other sizes, for which a CPU has other kernels."""
    pair = heads(kind)
    head = pair[1]
    capture = Frozen(lambda: head._rows.cache)
    head._runner = GraphRunner(head._passes, lambda: capture)
    both = Both(pair, seed=1)
    both.drive(24)
    assert capture.replayed > capture.made > 0
    assert both.difference < 1e-4
    assert head._rows.cache.placement.slots > 64, "rows outgrow their first slots"


@pytest.mark.parametrize("kind", KIND_OF)
def test_what_was_captured_is_bit_equal_to_the_same_passes_without(kind: str, heads: Heads) -> None:
    pair = heads(kind)
    capture = Frozen(lambda: pair[1]._rows.cache)
    pair[0]._passes.best = pair[1]._passes.best
    for head, captures in zip(pair, (None, lambda: capture), strict=True):
        head._runner = GraphRunner(head._passes, captures)
    both = Both(pair, seed=4)
    both.drive(24)
    assert capture.replayed > capture.made > 0
    assert both.difference == 0


@pytest.mark.parametrize("kind", KIND_OF)
def test_without_padding_they_are_bit_equal(kind: str, heads: Heads) -> None:
    both = Both(heads(kind), seed=2)
    both.open(64)
    both.extend([0], [[ROOT] * 64])
    assert both.difference == 0


def test_passes_have_few_shapes(heads: Heads) -> None:
    both = Both(heads("draftree's"), seed=3)
    both.open(20)
    before = len(graphs(both.heads[1])._inputs)
    for size in range(1, 17):
        both.extend([0], [[ROOT] * size])
        for head, row in zip(both.heads, both.rows[0], strict=True):
            head.commit(row, [])
    assert len(graphs(both.heads[1])._inputs) - before == 5, "1, 2, 4, 8 and 16 nodes"


def test_a_head_of_an_eager_target_is_eager(heads: Heads) -> None:
    eager, graph = heads("draftree's")
    assert isinstance(eager._runner, HeadPasses)
    assert graphs(graph).uncaptured == "device cpu has no CUDA graphs"


@pytest.mark.parametrize("kind", KIND_OF)
def test_candidates_that_are_found_in_a_pass_are_those_of_its_logits(kind: str, heads: Heads) -> None:
    """Whichever are asked for; others than a greedy draft's are found of the logits."""
    both = Both(heads(kind), seed=5)
    for length in (9, 40):
        both.open(length)
    head, rows = both.heads[1], [graph for _, graph in both.rows]
    scores = head.extend(rows, [Nodes([3, 9, 11], [ROOT] * 3), Nodes([7, 5], [ROOT] * 2)])
    assert isinstance(scores, HeadScores) and scores._best is not None
    found = HeadScores(scores.tensor, scores.ids, [3, 2])
    most = scores._best.shape[1] // 2
    mask = np.full(-(-VOCAB // 32), 0x0F0F0F0F, np.uint32)
    drafts = [Draft([Warping(temperature)] * 5, [3, 1, 4, 1, 5]) for temperature in (0.0, 0.7)]
    for slots in ([*range(5)], [3, 1]):
        some = [None, [Edit()] * len(slots), [Edit(mask=mask)] * len(slots)]
        for count, edits in [(1, some[0]), (most, some[1]), (most + 4, some[0]), (4, some[2])]:
            _equal(scores.top(slots, count, edits), found.top(slots, count, edits))
    for draft in drafts:
        _equal(scores.top(range(5), 4, None, draft), found.top(range(5), 4, None, draft))
    head.close(rows[0])


def _equal(one: Top, other: Top) -> None:
    assert np.array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-6)
    np.testing.assert_allclose(one.entropies, other.entropies, atol=1e-5)
