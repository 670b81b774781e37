"""*match*: its distribution by enumerating draws (oracle 4), its acceptance (oracle 6), ragged batches.

A scheme is run once for every script of outcomes, one outcome a draw, all of them in one batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftree.config import SamplingParams
from draftree.models.base import Nodes, prefill
from draftree.sampling import Draws
from draftree.tree import ROOT, DraftTree, TreeBatch
from draftree.verify.match import Draw, Verdict, greedy, match

from ..test_tree import tree
from ..toy import ToyModel, distribution

Scheme = Callable[[Tensor, TreeBatch, Draw], list[Verdict]]

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


def logits_over(model: ToyModel, prompt: Sequence[int], drafted: DraftTree) -> Tensor:
    """[1 + N, V]: what the model says after the prompt and after each node, as the engine asks for it."""
    row = prefill(model, prompt[:-1])
    root = torch.tensor([prompt[-1]])
    nodes = Nodes(torch.cat([root, drafted.tokens]), torch.cat([torch.tensor([ROOT]), drafted.parents + 1]))
    logits = model.extend([row], [nodes])[0]
    model.close(row)
    return logits


def enumerate_draws(scheme: Scheme, model: ToyModel, drafted: DraftTree) -> list[tuple[Verdict, float]]:
    """Every verdict that draws can lead to, with its exact probability; the same verdict may come several times."""
    vocab, draws = model.capabilities.vocab_size, drafted.depth + 2
    outcomes = torch.tensor(list(itertools.product(range(vocab), repeat=draws)))
    chances = torch.full(outcomes.shape, 1 / vocab, dtype=torch.float64)  # of draws that are never made
    made = 0

    def scripted(logits: Tensor, drawn: Tensor) -> Tensor:
        nonlocal made
        outcome = outcomes[:, made]
        chances[:, made] = logits.softmax(-1).gather(1, outcome[:, None])[:, 0]
        made += 1
        return outcome

    logits = logits_over(model, PROMPT, drafted).expand(len(outcomes), -1, -1)
    verdicts = scheme(logits, TreeBatch.pad([drafted] * len(outcomes)), scripted)
    return list(zip(verdicts, chances.prod(1).tolist(), strict=True))


def emitted_distribution(scheme: Scheme, model: ToyModel, drafted: DraftTree) -> Tensor:
    """[V] * HORIZON: exact distribution of one step's tokens, completed by plain draws."""
    chances: dict[tuple[int, ...], float] = {}
    for verdict, chance in enumerate_draws(scheme, model, drafted):
        tokens = tuple(verdict.tokens)
        chances[tokens] = chances.get(tokens, 0.0) + chance
    total = torch.zeros([model.capabilities.vocab_size] * HORIZON, dtype=torch.float64)
    for tokens, chance in chances.items():
        total[tokens] += chance * distribution(model, [*PROMPT, *tokens], HORIZON - len(tokens))
    return total


def variation(scheme: Scheme, model: ToyModel, drafted: DraftTree) -> float:
    """Total variation between the distribution of a scheme's output and the model's own."""
    return 0.5 * float(
        (emitted_distribution(scheme, model, drafted) - distribution(model, PROMPT, HORIZON)).abs().sum()
    )


def fits(trees: TreeBatch, parent: int, tokens: Tensor) -> Tensor:
    """[B] bool: the token is among the children of ``parent``."""
    return ((trees.parents == parent) & (trees.tokens == tokens[:, None])).any(1)


def refusing(logits: Tensor, trees: TreeBatch, draw: Draw) -> list[Verdict]:
    """Negative control, a forced rejection: refuses the first child that matches and draws again."""

    def stubborn(at: Tensor, drawn: Tensor) -> Tensor:
        tokens = draw(at, drawn)
        if drawn.shape[1]:
            return tokens
        return torch.where(fits(trees, ROOT, tokens), draw(at, drawn), tokens)

    return match(logits, trees, stubborn)


def credulous(logits: Tensor, trees: TreeBatch, draw: Draw) -> list[Verdict]:
    """Negative control: accepts the first child of the root when none matches."""

    def agreeing(at: Tensor, drawn: Tensor) -> Tensor:
        tokens = draw(at, drawn)
        if drawn.shape[1]:
            return tokens
        return torch.where(fits(trees, ROOT, tokens), tokens, trees.tokens[:, 0])

    return match(logits, trees, agreeing)


@pytest.mark.parametrize("vocab", [3, 4, 5])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_distribution_of_matched_tokens_is_the_models_own(shape: list[int], vocab: int) -> None:
    model = ToyModel(vocab, seed=vocab, dtype=torch.float64)
    assert variation(match, model, distinct(shape, vocab, seed=len(shape))) < 1e-12


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
    assert variation(match, model, tree(parents, tokens)) < 1e-12


@pytest.mark.parametrize("tokens", [[1, 1, 2, 0, 0], [2, 2, 2, 1, 2]])
def test_equal_siblings_do_not_change_the_distribution(tokens: list[int]) -> None:
    model = ToyModel(3, seed=7, dtype=torch.float64)
    assert variation(match, model, tree([ROOT, ROOT, ROOT, 0, 1], tokens)) < 1e-12


@pytest.mark.parametrize("shape", ["one", "chain", "wide", "binary"])
@pytest.mark.parametrize("scheme", [refusing, credulous])
def test_the_enumeration_sees_a_scheme_that_is_not_lossless(scheme: Scheme, shape: str) -> None:
    model = ToyModel(4, seed=1, dtype=torch.float64)
    assert variation(scheme, model, distinct(SHAPES[shape], 4, seed=0)) > 0.01


@pytest.mark.parametrize("shape", list(SHAPES.values())[1:], ids=list(SHAPES)[1:])
def test_acceptance_at_a_node_is_the_sum_of_its_childrens_probabilities(shape: list[int]) -> None:
    model = ToyModel(4, seed=2, dtype=torch.float64)
    drafted = distinct(shape, 4, seed=3)
    outcomes = enumerate_draws(match, model, drafted)
    distributions = logits_over(model, PROMPT, drafted).softmax(-1)
    for node in range(ROOT, len(drafted)):
        reached = sum(c for v, c in outcomes if node == ROOT or node in v.path)
        passed = sum(c for v, c in outcomes if any(child in v.path for child in drafted.children(node)))
        expected = float(distributions[node + 1][drafted.tokens[drafted.children(node)]].sum())
        assert passed / reached == pytest.approx(expected, abs=1e-12)


def test_the_tokens_of_a_verdict_are_those_of_its_path_and_one_more() -> None:
    model = ToyModel(4, seed=4, dtype=torch.float64)
    drafted = distinct(SHAPES["deep and wide"], 4, seed=1)
    for verdict, _ in enumerate_draws(match, model, drafted):
        assert verdict.tokens[:-1] == drafted.tokens[verdict.path].tolist()
        assert drafted.parents[verdict.path].tolist() == [ROOT, *verdict.path][: len(verdict.path)]


def test_the_walk_goes_on_while_a_child_fits() -> None:
    model = ToyModel(4, seed=4, dtype=torch.float64)
    drafted = distinct(SHAPES["binary"], 4, seed=1)
    for verdict, _ in enumerate_draws(match, model, drafted):
        end = verdict.path[-1] if verdict.path else ROOT
        assert verdict.tokens[-1] not in drafted.tokens[drafted.children(end)].tolist()


def test_at_temperature_zero_the_walk_follows_the_argmax() -> None:
    model = ToyModel(5, seed=5)
    greedy = list(PROMPT)
    for _ in range(4):
        greedy.append(int(model.after(greedy).argmax()))
    first, second, third = greedy[3:6]
    other = (first + 1) % 5
    drafted = tree([ROOT, ROOT, 1, 1, 2, 3], [other, first, (second + 1) % 5, second, third, third])
    draws = Draws([SamplingParams()], [0], [PROMPT])
    verdict = match(logits_over(model, PROMPT, drafted)[None], TreeBatch.pad([drafted]), draws)[0]
    assert verdict == Verdict(path=[1, 3, 5], tokens=greedy[3:])


def ragged(vocab: int = 3) -> tuple[list[DraftTree], list[Tensor]]:
    """Trees of all shapes, and the logits of one model over each after a prompt of its own."""
    model = ToyModel(vocab, seed=6, spread=1.0)
    trees = [distinct(shape, vocab, seed) for seed in range(6) for shape in SHAPES.values()]
    return trees, [logits_over(model, [b % vocab, *PROMPT], t) for b, t in enumerate(trees)]


def seeded(count: int, offset: int = 0) -> Draws:
    """Each request's own draws, at temperature 1."""
    prompts = [[(b + offset) % 3, *PROMPT] for b in range(count)]
    return Draws([SamplingParams(temperature=1.0)] * count, range(offset, offset + count), prompts)


@given(data=st.data())
def test_greedy_gives_what_match_gives_at_temperature_zero(data: st.DataObject) -> None:
    trees = [
        tree(shape, data.draw(st.lists(st.integers(0, 3), min_size=len(shape), max_size=len(shape))))
        for shape in data.draw(st.lists(st.sampled_from(list(SHAPES.values())), min_size=1, max_size=3))
    ]
    logits = torch.randn((len(trees), 1 + max(map(len, trees)), 4), generator=torch.Generator().manual_seed(len(trees)))
    draws = Draws([SamplingParams()] * len(trees), [0] * len(trees), [[0]] * len(trees))
    assert draws.greedy
    assert greedy(logits, trees) == match(logits, TreeBatch.pad(trees), draws)


def test_a_batch_of_ragged_trees_gives_what_each_gives_alone() -> None:
    trees, logits = ragged()
    together = match(
        torch.nn.utils.rnn.pad_sequence(logits, True, float("nan")), TreeBatch.pad(trees), seeded(len(trees))
    )
    alone = [
        match(each[None], TreeBatch.pad([t]), seeded(1, b))[0]
        for b, (t, each) in enumerate(zip(trees, logits, strict=True))
    ]
    assert together == alone
    assert {len(v.path) for v in together} == {0, 1, 2, 3}, "every length must occur for this test to mean anything"


def test_padding_is_never_accepted() -> None:
    trees = [DraftTree.empty(), distinct(SHAPES["deep and wide"], 5, seed=0)]

    def draw(logits: Tensor, drawn: Tensor) -> Tensor:
        return torch.full((2,), -1)  # no draw gives -1; if one did, padding still has no parent

    assert match(torch.zeros(2, 10, 5), TreeBatch.pad(trees), draw)[0].path == []


def test_the_first_of_equal_siblings_is_taken() -> None:
    drafted = tree([ROOT, ROOT, 0, 1], [3, 3, 1, 2])

    def draw(logits: Tensor, drawn: Tensor) -> Tensor:
        return torch.tensor([[3, 1, 4][drawn.shape[1]]])

    assert match(torch.zeros(1, 5, 5), TreeBatch.pad([drafted]), draw) == [Verdict(path=[0, 2], tokens=[3, 1, 4])]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_walk_takes_at_most_one_draw_a_level_and_one_more(shape: list[int]) -> None:
    drafted = distinct(shape, 4, seed=2)
    path = deepest(drafted)
    script = [*drafted.tokens[path].tolist(), 0]
    asked: list[tuple[tuple[int, ...], int]] = []

    def draw(logits: Tensor, drawn: Tensor) -> Tensor:
        asked.append((tuple(logits.shape), drawn.shape[1]))
        return torch.full((3,), script[drawn.shape[1]])

    verdicts = match(torch.zeros(3, 1 + len(drafted), 4), TreeBatch.pad([drafted] * 3), draw)
    assert verdicts == [Verdict(path, script)] * 3
    assert asked == [((3, 4), d) for d in range(drafted.depth + 1)]


def deepest(drafted: DraftTree) -> list[int]:
    """The path to the last node, which is a deepest one."""
    node, path = len(drafted) - 1, list[int]()
    while node != ROOT:
        path.insert(0, node)
        node = int(drafted.parents[node])
    return path


def test_each_draw_is_told_what_was_drawn_before_it() -> None:
    drafted, told = DraftTree.chain([2, 0, 1]), list[list[list[int]]]()

    def draw(logits: Tensor, drawn: Tensor) -> Tensor:
        told.append(drawn.tolist())
        return torch.tensor([[2, 0, 1, 3][drawn.shape[1]]])

    match(torch.zeros(1, 4, 4), TreeBatch.pad([drafted]), draw)
    assert told == [[[]], [[2]], [[2, 0]], [[2, 0, 1]]]


def test_processors_of_a_sequence_whose_walk_is_over_are_not_run() -> None:
    """They saw histories that never happen while another request of the batch walked on; a grammar could raise."""
    seen: list[list[int]] = []

    def note(ids: Tensor, logits: Tensor) -> Tensor:
        seen.append(ids[0].tolist())
        return logits

    drafted = DraftTree.chain([1, 2, 3])
    logits = torch.zeros(2, 4, 5)
    logits[0, :, 4] = 9.0  # the first request draws 4 at once
    logits[1, range(4), [1, 2, 3, 4]] = 9.0  # the second accepts everything
    draws = Draws([SamplingParams(processors=(note,)), SamplingParams()], [0, 0], [[0], [0]])
    assert [v.tokens for v in match(logits, TreeBatch.pad([drafted, drafted]), draws)] == [[4], [1, 2, 3, 4]]
    assert seen == [[0]]
