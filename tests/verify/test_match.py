"""*match*: its distribution by enumerating draws (oracle 4), its acceptance (oracle 6), ragged batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from draftree.config import SamplingParams
from draftree.draws import Draws
from draftree.sampling.constraint import TextEnded
from draftree.sampling.warping import softmax
from draftree.scores import NumpyScores
from draftree.tree import ROOT, DraftTree
from draftree.verify.base import Verdict, match

from ..test_tree import tree
from ..toy import ToyModel, chain_tree, distribution
from .chances import Chance, outcomes

PROMPT = [1, 0, 2]
HORIZON = 4

SHAPES = {
    "empty": [],
    "one": [-1],
    "chain": [-1, 0, 1],
    "wide": [-1, -1, -1],
    "binary": [-1, -1, 0, 0, 1, 1],
    "uneven": [-1, -1, 1, 1, 2, 2],
    "deep and wide": [-1, -1, -1, 0, 2, 2, 4, 5, 5],
}


def distinct(shape: Sequence[int], vocab: int, seed: int) -> DraftTree:
    """A tree of this shape with random tokens that differ among siblings."""
    rng, tokens = Random(seed), list[int]()
    for i, parent in enumerate(shape):
        taken = {t for t, p in zip(tokens, shape[:i], strict=True) if p == parent}
        tokens.append(rng.choice([t for t in range(vocab) if t not in taken]))
    return tree(list(shape), tokens)


def logits_over(model: ToyModel, prompt: Sequence[int], drafted: DraftTree) -> NDArray[np.floating]:
    """[1 + N, V]: what the model says after the prompt and after each node."""
    paths = list[list[int]]([[]])
    for parent, token in zip(drafted.parents, drafted.tokens, strict=True):
        paths.append([*paths[parent + 1], token])
    return np.stack([model.after([*prompt, *path]).numpy() for path in paths])


class Scripted(NumpyScores):
    """Scores whose draws are by script: each possible outcome with its probability."""

    def __init__(self, rows: NDArray[np.floating], drafted: DraftTree, chance: Chance) -> None:
        super().__init__(rows, [len(rows)])
        self.drafted, self.chance = drafted, chance
        self.drawn: list[int] = []

    def draw(self, slots: Sequence[int], *others: object) -> NDArray[np.int32]:  # type: ignore[override]
        self.drawn += slots
        return np.array([self.token(slot) for slot in slots], np.int32)

    def token(self, slot: int) -> int:
        return self.chance.choose(softmax(self.rows[slot]).tolist())

    @property
    def children(self) -> list[int]:
        """Tokens of the root's children."""
        return [self.drafted.tokens[child] for child in self.drafted.children(ROOT)]


class Refusing(Scripted):
    """Negative control, a forced rejection: refuses the first child that matches and draws again."""

    def token(self, slot: int) -> int:
        token = super().token(slot)
        return super().token(slot) if slot == 0 and token in self.children else token


class Credulous(Scripted):
    """Negative control: accepts the first child of the root when none matches."""

    def token(self, slot: int) -> int:
        token = super().token(slot)
        return token if slot or token in self.children else self.children[0]


WALKING = TextEnded()
"""A constraint that allows everything: nodes are drawn one by one as the walk comes to them."""


def enumerate_draws(
    model: ToyModel, drafted: DraftTree, kind: type[Scripted] = Scripted
) -> list[tuple[Verdict, float]]:
    """Every verdict that draws can lead to, with its exact probability; the same verdict may come several times."""
    rows = logits_over(model, PROMPT, drafted)
    draws = Draws(SamplingParams(temperature=1.0), 0, PROMPT, state=WALKING)
    return list(outcomes(lambda chance: match(kind(rows, drafted, chance), [1], [drafted], [draws])[0]))


def emitted_distribution(model: ToyModel, drafted: DraftTree, kind: type[Scripted]) -> Tensor:
    """[V] * HORIZON: exact distribution of one step's tokens, completed by plain draws."""
    chances: dict[tuple[int, ...], float] = {}
    for verdict, chance in enumerate_draws(model, drafted, kind):
        tokens = tuple(verdict.tokens)
        chances[tokens] = chances.get(tokens, 0.0) + chance
    total = 0 * distribution(model, PROMPT, HORIZON)
    for tokens, chance in chances.items():
        total[tokens] += chance * distribution(model, [*PROMPT, *tokens], HORIZON - len(tokens))
    return total


def variation(model: ToyModel, drafted: DraftTree, kind: type[Scripted] = Scripted) -> float:
    """Total variation between the distribution of a scheme's output and the model's own."""
    return 0.5 * float((emitted_distribution(model, drafted, kind) - distribution(model, PROMPT, HORIZON)).abs().sum())


@pytest.mark.parametrize("vocab", [3, 4, 5])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_distribution_of_matched_tokens_is_the_models_own(shape: list[int], vocab: int) -> None:
    model = ToyModel(vocab, seed=vocab, dtype=torch.float64)
    assert variation(model, distinct(shape, vocab, seed=len(shape))) < 1e-12


@given(data=st.data(), size=st.integers(1, 8))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_the_distribution_is_the_models_own_for_any_tree(data: st.DataObject, size: int) -> None:
    depths, parents = [0], list[int]()
    for i in range(size):
        choices = [p for p in range(ROOT, i) if depths[p + 1] < 3 and p >= (parents[-1] if parents else ROOT)]
        parents.append(data.draw(st.sampled_from(choices or parents[-1:])))
        depths.append(depths[parents[-1] + 1] + 1)
    tokens = [data.draw(st.integers(0, 2)) for _ in range(size)]  # equal siblings included
    model = ToyModel(3, seed=data.draw(st.integers(0, 99)), dtype=torch.float64)
    assert variation(model, tree(parents, tokens)) < 1e-12


@pytest.mark.parametrize("tokens", [[1, 1, 2, 0, 0], [2, 2, 2, 1, 2]])
def test_equal_siblings_do_not_change_the_distribution(tokens: list[int]) -> None:
    model = ToyModel(3, seed=7, dtype=torch.float64)
    assert variation(model, tree([ROOT, ROOT, ROOT, 0, 1], tokens)) < 1e-12


@pytest.mark.parametrize("shape", ["one", "chain", "wide", "binary"])
@pytest.mark.parametrize("kind", [Refusing, Credulous])
def test_the_enumeration_sees_a_scheme_that_is_not_lossless(kind: type[Scripted], shape: str) -> None:
    model = ToyModel(4, seed=1, dtype=torch.float64)
    assert variation(model, distinct(SHAPES[shape], 4, seed=0), kind) > 0.01


@pytest.mark.parametrize("shape", list(SHAPES.values())[1:], ids=list(SHAPES)[1:])
def test_acceptance_at_a_node_is_the_sum_of_its_childrens_probabilities(shape: list[int]) -> None:
    model = ToyModel(4, seed=2, dtype=torch.float64)
    drafted = distinct(shape, 4, seed=3)
    outcomes = enumerate_draws(model, drafted)
    distributions = softmax(logits_over(model, PROMPT, drafted))
    for node in range(ROOT, len(drafted)):
        reached = sum(c for v, c in outcomes if node == ROOT or node in v.path)
        passed = sum(c for v, c in outcomes if any(child in v.path for child in drafted.children(node)))
        expected = float(distributions[node + 1][[drafted.tokens[child] for child in drafted.children(node)]].sum())
        assert passed / reached == pytest.approx(expected, abs=1e-12)


def test_the_tokens_of_a_verdict_are_those_of_its_path_and_one_more() -> None:
    model = ToyModel(4, seed=4, dtype=torch.float64)
    drafted = distinct(SHAPES["deep and wide"], 4, seed=1)
    for verdict, _ in enumerate_draws(model, drafted):
        assert verdict.tokens[:-1] == [drafted.tokens[node] for node in verdict.path]
        assert [drafted.parents[node] for node in verdict.path] == [ROOT, *verdict.path][: len(verdict.path)]


def test_the_walk_goes_on_while_a_child_fits() -> None:
    model = ToyModel(4, seed=4, dtype=torch.float64)
    drafted = distinct(SHAPES["binary"], 4, seed=1)
    for verdict, _ in enumerate_draws(model, drafted):
        end = verdict.path[-1] if verdict.path else ROOT
        assert verdict.tokens[-1] not in [drafted.tokens[child] for child in drafted.children(end)]


def test_at_temperature_zero_the_walk_follows_the_argmax() -> None:
    model = ToyModel(5, seed=5)
    greedy = list(PROMPT)
    for _ in range(4):
        greedy.append(int(model.after(greedy).argmax()))
    first, second, third = greedy[3:6]
    other = (first + 1) % 5
    drafted = tree([ROOT, ROOT, 1, 1, 2, 3], [other, first, (second + 1) % 5, second, third, third])
    draws = Draws(SamplingParams(), 0, PROMPT)
    verdict = match(NumpyScores(logits_over(model, PROMPT, drafted), [7]), [1], [drafted], [draws])[0]
    assert verdict == Verdict(path=[1, 3, 5], tokens=greedy[3:])


SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=2),
    SamplingParams(repetition_penalty=1.7, frequency_penalty=0.4),
    SamplingParams(temperature=1.3, presence_penalty=0.5, logit_bias={1: 0.7}),
]


def batch(count: int, vocab: int = 4) -> tuple[NumpyScores, list[int], list[DraftTree]]:
    """Random scores of a pass over trees of all shapes, with other rows before and behind them."""
    shapes = list(itertools.islice(itertools.cycle(SHAPES.values()), count))
    trees = [distinct(shape, vocab, seed) for seed, shape in enumerate(shapes)]
    counts = [1 + len(t) for t in trees]
    rows = np.random.default_rng(count).standard_normal((sum(counts) + 3, vocab)).astype(np.float32)
    scores = NumpyScores(rows, [2, *counts, 1])
    return scores, scores.starts[1 : count + 1], trees


def draws_of(count: int, state: TextEnded | None = None) -> list[Draws]:
    return [Draws(SETTINGS[b % len(SETTINGS)], b, [b % 4, *PROMPT], 2, state) for b in range(count)]


def test_all_nodes_drawn_at_once_give_what_a_walk_gives() -> None:
    """Greedy and sampled, with penalties on each node's own path; alone and in a batch of ragged trees."""
    count = 40 * len(SETTINGS)
    scores, roots, trees = batch(count)
    together = match(scores, roots, trees, draws_of(count))
    assert together == match(scores, roots, trees, draws_of(count, WALKING))
    alone = [match(scores, [root], [t], [own])[0] for root, t, own in zip(roots, trees, draws_of(count), strict=True)]
    assert together == alone
    assert {len(v.path) for v in together} == {0, 1, 2, 3}, "every length must occur for this test to mean anything"


def test_the_first_of_equal_siblings_is_taken() -> None:
    drafted = tree([ROOT, ROOT, 0, 1], [3, 3, 1, 2])
    rows = np.zeros((5, 5), np.float32)
    rows[range(5), [3, 1, 0, 4, 0]] = 9.0
    for state in (None, WALKING):
        draws = Draws(SamplingParams(), 0, [0], state=state)
        assert match(NumpyScores(rows, [5]), [1], [drafted], [draws]) == [Verdict(path=[0, 2], tokens=[3, 1, 4])]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_walk_draws_only_where_it_comes_to(shape: list[int]) -> None:
    drafted = distinct(shape, 4, seed=2)
    draws = Draws(SamplingParams(temperature=1.0), 0, PROMPT, state=WALKING)
    rows = np.zeros((1 + len(drafted), 4), np.float32)
    made: list[Scripted] = []

    def run(chance: Chance) -> Verdict:
        made.append(Scripted(rows, drafted, chance))
        return match(made[-1], [1], [drafted], [draws])[0]

    for verdict, _ in outcomes(run):
        assert made[-1].drawn == [0, *(node + 1 for node in verdict.path)]


def test_without_constraint_or_processor_a_batch_is_one_call() -> None:
    calls: list[int] = []

    class Counting(NumpyScores):
        def draw(self, slots: Sequence[int], *others: Any) -> NDArray[np.int32]:  # type: ignore[override]
            calls.append(len(slots))
            return super().draw(slots, *others)

    scores, roots, trees = batch(9)
    match(Counting(scores.rows, [len(scores.rows)]), roots, trees, draws_of(9))
    assert calls == [sum(1 + len(t) for t in trees)]


def note_in(seen: list[list[int]]) -> Callable[[NDArray[np.int64], NDArray[np.float32]], NDArray[np.float32]]:
    def note(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        seen.append(ids.tolist())
        return logits

    return note


def test_a_processor_sees_what_was_drawn_before_and_only_where_the_walk_goes() -> None:
    """They saw histories that never happen while another request of the batch walked on; a grammar could raise."""
    seen, other = list[list[int]](), list[list[int]]()
    drafted = chain_tree([1, 2, 3])
    rows = np.zeros((8, 5), np.float32)
    rows[:4, 4] = 9.0  # the first request draws 4 at once
    rows[range(4, 8), [1, 2, 3, 4]] = 9.0  # the second accepts everything
    draws = [Draws(SamplingParams(processors=(note_in(each),)), 0, [0]) for each in (seen, other)]
    found = match(NumpyScores(rows, [4, 4]), [1, 5], [drafted, drafted], draws)
    assert [v.tokens for v in found] == [[4], [1, 2, 3, 4]]
    assert seen == [[0]]
    assert other == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
