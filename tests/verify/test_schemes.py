"""The schemes that draw at random: their outputs and acceptance by exact enumeration (oracles 4 and 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftree.papers.entropy_trees import EntropyStop, EntropyTree
from draftree.policies.base import DraftDistribution, GrowthPolicy
from draftree.policies.fixed import StaticTree
from draftree.tree import ROOT, DraftTree
from draftree.verify.base import NodeByNode, TargetLogits, UniformDraws, Verdict, Visit, log
from draftree.verify.sampled import MultiRound, TopAndRest, WithoutReplacement, WithReplacement, residual
from draftree.verify.schemes import SCHEMES, Relaxed

from ..toy import ToyModel
from .chances import PROMPT, Chance, Judge, drawn_trees, outcomes, variation, verdicts_of

DRAWING = ["multi-round", "multi-round-replacement", "top1-residual"]

POLICIES: dict[str, tuple[int, GrowthPolicy, int]] = {
    "wide 3": (3, StaticTree(width=3, depth=1), 9),
    "wide 4": (4, StaticTree(width=3, depth=1), 9),
    "wide 5": (5, StaticTree(width=3, depth=1), 9),
    "chain 3": (3, StaticTree(width=1, depth=2), 9),
    "chain 5": (5, StaticTree(width=1, depth=2), 9),
    "binary": (3, StaticTree(width=2, depth=2), 9),
    "cut by the budget": (3, StaticTree(width=2, depth=2), 4),
    "by entropy": (3, EntropyTree(lambda h: 1 + (h > 0.75), None, 2, 2), 9),
    "last wide": (3, EntropyStop(stop=0.75, width=2), 2),
    "early stop": (4, EntropyStop(stop=1.0), 3),
}


def pair(vocab: int, seed: int = 0) -> tuple[ToyModel, ToyModel]:
    """A target and a drafter that differ, in float64."""
    return ToyModel(vocab, seed, dtype=torch.float64), ToyModel(vocab, seed + 50, dtype=torch.float64)


def scheme(name: str) -> NodeByNode:
    found = SCHEMES[name]
    assert isinstance(found, NodeByNode)
    return found


@pytest.mark.parametrize("shape", POLICIES)
@pytest.mark.parametrize("name", DRAWING)
def test_the_distribution_of_the_output_is_the_models_own(name: str, shape: str) -> None:
    vocab, policy, nodes = POLICIES[shape]
    model, drafter = pair(vocab, seed=vocab)
    trees = drawn_trees(drafter, policy, scheme(name).sampler, nodes)
    assert variation(scheme(name).accept, model, trees) < 1e-12


@pytest.mark.parametrize("name", DRAWING)
def test_a_drafter_with_the_models_own_distribution_is_always_accepted(name: str) -> None:
    model = ToyModel(4, 3, dtype=torch.float64)
    for tree, _ in drawn_trees(model, StaticTree(width=1, depth=2), scheme(name).sampler, 4):
        for verdict, chance in verdicts_of(scheme(name).accept, model, tree):
            assert len(verdict.path) == 2 or chance < 1e-12


def altered(
    trees: Iterator[tuple[DraftTree, float]], alter: Callable[[DraftTree], DraftTree]
) -> Iterator[tuple[DraftTree, float]]:
    return ((alter(tree), chance) for tree, chance in trees)


def by_value(tree: DraftTree) -> DraftTree:
    """Negative control: siblings (children of the root) in the order of their probabilities."""
    ranked = sorted(zip(tree.path_logprobs, tree.tokens, strict=True), key=itemgetter(0), reverse=True)
    return replace(tree, tokens=[token for _, token in ranked], path_logprobs=[path for path, _ in ranked])


def _first(tree: DraftTree, nodes: list[int]) -> DraftTree:
    """These nodes alone, whose numbers do not change but for one below the root."""
    names = ("tokens", "parents", "depths", "path_logprobs", "entropies")
    columns: dict[str, Any] = {name: [getattr(tree, name)[node] for node in nodes] for name in names}
    return replace(tree, **columns)


def pruned(tree: DraftTree) -> DraftTree:
    """Negative control: the most probable node alone survives."""
    return _first(tree, [tree.path_logprobs.index(max(tree.path_logprobs))])


def unlucky(judge: Judge, tree: DraftTree, distribution: TargetLogits, draws: UniformDraws) -> Verdict:
    """Negative control: the first child is refused without a draw."""

    class Refusing:
        first = True

        def accepts(self, chance: float) -> bool:
            refused, self.first = self.first, False
            return not refused and draws.accepts(chance)

        def draw(self, logits: NDArray[np.floating], depth: int) -> int:
            return draws.draw(logits, depth)

    return judge(tree, distribution, Refusing())


@pytest.mark.parametrize("name", DRAWING[:2])
@pytest.mark.parametrize("alter", [by_value, pruned])
def test_siblings_sorted_or_pruned_by_value_are_caught(name: str, alter: Callable[[DraftTree], DraftTree]) -> None:
    model, drafter = pair(4, seed=1)
    trees = altered(drawn_trees(drafter, StaticTree(width=2, depth=1), scheme(name).sampler, 9), alter)
    assert variation(scheme(name).accept, model, trees) > 1e-3


@pytest.mark.parametrize("name", DRAWING)
def test_a_forced_rejection_is_caught(name: str) -> None:
    model, drafter = pair(4, seed=1)
    trees = drawn_trees(drafter, StaticTree(width=1, depth=2), scheme(name).sampler, 9)
    assert variation(partial(unlucky, scheme(name).accept), model, trees) > 1e-3


def test_without_the_draft_distribution_nothing_is_judged() -> None:
    model, drafter = pair(3)
    tree, _ = next(drawn_trees(drafter, StaticTree(width=2, depth=1), MultiRound.sampler, 9))
    chosen = DraftTree(**{column.name: getattr(tree, column.name) for column in fields(DraftTree)})
    with pytest.raises(ValueError, match="chose children"):
        next(verdicts_of(MultiRound().accept, model, chosen))


def accepted_at_the_root(name: str, width: int, vocab: int, seed: int) -> float:
    model, drafter = pair(vocab, seed)
    return sum(
        weight * chance
        for tree, weight in drawn_trees(drafter, StaticTree(width, 1), scheme(name).sampler, 9)
        for verdict, chance in verdicts_of(scheme(name).accept, model, tree)
        if verdict.path
    )


def distributions(vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    """p and q after the prompt."""
    model, drafter = pair(vocab, seed)
    return model.after(PROMPT).softmax(-1), drafter.after(PROMPT).softmax(-1)


def left_of(p: Tensor, q: Tensor) -> Tensor:
    return torch.from_numpy(residual(p.numpy(), q.numpy()))


def refused(p: Tensor, q: Tensor, draws: int) -> float:
    """Probability that draws without replacement are all refused: (1 - beta) in each round, x by what refuses it."""
    excess = (q - p).clamp(min=0)
    if not draws or not float(excess.sum()):
        return float(excess.sum()) if draws else 1.0
    total = 0.0
    for x in excess.nonzero()[:, 0].tolist():
        rest = q.clone()
        rest[x] = 0
        rest = rest / rest.sum() if float(rest.sum()) else rest
        total += float(excess[x]) * refused(left_of(p, q), rest, draws - 1)
    return total


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_acceptance_of_rounds_is_one_less_the_product_of_refusals(width: int, seed: int) -> None:
    p, q = distributions(5, seed)
    assert accepted_at_the_root("multi-round", width, 5, seed) == pytest.approx(1 - refused(p, q, width), abs=1e-12)
    missed, left = 1.0, p
    for _ in range(width):
        missed *= 1 - float(torch.minimum(left, q).sum())
        left = left_of(left, q)
    assert accepted_at_the_root("multi-round-replacement", width, 5, seed) == pytest.approx(1 - missed, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_acceptance_of_top_and_one_is_its_formula_and_never_below_matching_the_top(width: int, seed: int) -> None:
    p, q = distributions(5, seed)
    top = q.topk(width - 1).indices
    rest = q.index_fill(0, top, 0)
    outside = torch.minimum(p.index_fill(0, top, 0), rest / rest.sum())
    accepted = accepted_at_the_root("top1-residual", width, 5, seed)
    assert accepted == pytest.approx(float(p[top].sum() + outside.sum()), abs=1e-12)
    assert accepted >= float(p[top].sum())


def test_equal_draws_with_replacement_stay_separate_nodes() -> None:
    drafter = pair(3)[1]
    trees = [t for t, _ in drawn_trees(drafter, StaticTree(2, 2), WithReplacement, 9)]
    assert all(len(t) == 6 for t in trees)
    assert any(t.tokens[0] == t.tokens[1] for t in trees)


def test_no_more_children_are_drawn_than_the_distribution_can_give() -> None:
    class Narrow(ToyModel):
        def after(self, ids: list[int]) -> Tensor:  # type: ignore[override]
            return super().after(ids).index_fill(0, torch.tensor([0, 2]), float("-inf"))

    drafter = Narrow(4, dtype=torch.float64)
    for sampler in (WithoutReplacement, TopAndRest):
        for tree, _ in drawn_trees(drafter, StaticTree(4, 1), sampler, 9):
            assert sorted(tree.tokens) == [1, 3]


def place(p: list[float], children: list[int], entropy: float = 0.0) -> Visit:
    return Visit(log(np.array(p)), children, DraftTree.empty(), ROOT, 0, entropy)


def relaxed_distribution(p: list[float], children: list[int], allowed: Callable[[float], int]) -> list[float]:
    total = [0.0] * len(p)
    for token, chance in outcomes(partial(Relaxed(allowed).decide, place(p, children))):
        total[token] += chance
    return total


def test_relaxed_takes_the_best_ranked_child_among_the_allowed() -> None:
    p = [0.4, 0.3, 0.2, 0.1]
    assert relaxed_distribution(p, [3, 2, 1], lambda h: 2) == pytest.approx([0.0, 0.7, 0.2, 0.1])
    assert relaxed_distribution(p, [3, 2], lambda h: 2) == pytest.approx(p)
    assert relaxed_distribution(p, [3, 2], lambda h: 3) == pytest.approx([0.0, 0.0, 0.9, 0.1])
    assert relaxed_distribution(p, [0, 1], lambda h: 0) == pytest.approx(p)


def test_relaxed_is_told_the_targets_entropy_in_nats_and_never_takes_an_impossible_token() -> None:
    told: list[float] = []

    def allowed(entropy: float) -> int:
        told.append(entropy)
        return 4

    assert relaxed_distribution([0.5, 0.5, 0.0], [2], allowed) == pytest.approx([0.5, 0.5, 0.0])
    assert told == pytest.approx([0.6931471805599453] * len(told))


@pytest.mark.parametrize(("entropy", "allowed"), [(0.0, 0), (0.99, 0), (1.0, 1), (1.2, 2), (3.0, 3)])
def test_by_default_a_sure_target_is_not_relaxed(entropy: float, allowed: int) -> None:
    assert Relaxed().allowed(entropy) == allowed


@pytest.mark.parametrize("answer", [-1, 1.5, None])
def test_a_function_that_gives_no_count_is_refused(answer: object) -> None:
    with pytest.raises(ValueError, match="relaxed: .*entropy"):
        Relaxed(lambda h: answer).decide(place([0.5, 0.5], [1]), Chance([]))  # type: ignore[arg-type, return-value]


def test_a_sparse_draft_distribution_is_read_at_its_tokens() -> None:
    dense = DraftDistribution(np.log([0.25, 0.75]), np.array([3, 1])).dense(5)
    assert np.exp(dense).tolist() == pytest.approx([0, 0.75, 0, 0.25, 0])


def test_a_walk_reads_only_the_distributions_of_the_nodes_that_it_visits() -> None:
    model, drafter = pair(3)
    tree, _ = next(drawn_trees(drafter, StaticTree(2, 2), MultiRound.sampler, 9))
    asked: list[int] = []

    def distribution(node: int, drawn: object) -> NDArray[np.floating]:
        asked.append(node)
        return model.after([*PROMPT, *[tree.tokens[n] for n in asked if n != ROOT]]).numpy()

    verdict = MultiRound().accept(tree, distribution, Chance([]))
    assert asked == [ROOT, *verdict.path]


def unsure(h: float) -> int:
    return 2 if h > 1 else 0


@pytest.mark.parametrize(("draft", "loose"), [(0.3, False), (1.0, False), (1.1, True), (5.0, True)])
def test_the_draft_must_be_unsure_too_where_both_are_asked_for(draft: float, loose: bool) -> None:
    p = [0.4, 0.3, 0.2, 0.1]
    found = [0.0] * 4
    for token, chance in outcomes(partial(Relaxed(unsure, "both").decide, place(p, [3, 1], draft))):
        found[token] += chance
    assert found == pytest.approx([0.0, 0.9, 0.0, 0.1] if loose else p)
    for token, chance in outcomes(partial(Relaxed(unsure).decide, place(p, [3, 1], draft))):
        found[token] -= chance
    assert found == pytest.approx([0.0] * 4 if loose else [0.4, -0.6, 0.2, 0.0])


def test_the_draft_entropy_is_that_of_the_node_whose_children_are_judged() -> None:
    tree = DraftTree([0, 1], [ROOT, 0], [1, 2], [0.0, 0.0], [0.1, 0.9])
    seen = []

    class Follows(NodeByNode):
        def decide(self, visit: Visit, draws: UniformDraws) -> int:
            seen.append(visit.entropy)
            return visit.children[0]

    Follows().accept(tree, lambda node, drawn: np.zeros(3), Chance([0] * 9))
    assert seen == pytest.approx([0.1, 0.9])
