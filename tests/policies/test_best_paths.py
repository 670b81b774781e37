"""OPT-Tree and EAGLE-2: the best subtree by brute force (oracle 1), the paper's example, when drafting stops."""

from __future__ import annotations

import heapq
import itertools
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.config import Budget
from draftree.errors import ConfigError
from draftree.papers.opt_tree import OptTree
from draftree.policies.base import GrowthPolicy, Plan, best_per_request
from draftree.policies.best_paths import Eagle2Tree
from draftree.request import Outcome, Request, Stats, StepCost
from draftree.tree import DraftTree

from ..toy import Path, Script, ScriptedScorer, chain_tree, trees_of

TINY = 1e-9
"""A threshold that any gain passes."""


def markov(seed: int, vocab: int = 3) -> Script:
    """A toy drafter: the distribution hangs on the whole path."""

    def script(row: int, path: Path) -> tuple[list[int], list[float], float]:
        rng = Random(f"{seed} {row} {path}")
        weights = [rng.random() + 0.01 for _ in range(vocab)]
        distribution = sorted(((w / sum(weights), t) for t, w in enumerate(weights)), reverse=True)
        return [t for _, t in distribution], [math.log(p) for p, _ in distribution], 1.0

    return script


def every_path(script: Script, depth: int, row: int = 0) -> dict[Path, float]:
    """Path -> probability, of the complete tree."""
    found: dict[Path, float] = {}
    layer: dict[Path, float] = {(): 1.0}
    for _ in range(depth):
        below: dict[Path, float] = {}
        for path, p in layer.items():
            tokens, logprobs, _ = script(row, path)
            below |= {(*path, t): p * math.exp(x) for t, x in zip(tokens, logprobs, strict=True)}
        found |= below
        layer = below
    return found


def paths(tree: DraftTree) -> set[Path]:
    out: list[Path] = []
    for parent, token in zip(tree.parents, tree.tokens, strict=True):
        out.append((*(out[parent] if parent >= 0 else ()), token))
    return set(out)


@given(seed=st.integers(0, 10_000), nodes=st.integers(1, 5), depth=st.integers(1, 3))
def test_opt_tree_is_the_best_of_all_subtrees(seed: int, nodes: int, depth: int) -> None:
    script = markov(seed)
    tree = trees_of(ScriptedScorer(script), OptTree(TINY, depth), [Budget(nodes)])[0]
    distribution = every_path(script, min(depth, nodes))
    best = max(
        sum(distribution[p] for p in some)
        for some in itertools.combinations(
            sorted(distribution, key=distribution.__getitem__, reverse=True)[:12], min(nodes, len(distribution))
        )
        if all(len(p) == 1 or p[:-1] in some for p in some)
    )
    assert len(tree) == min(nodes, len(distribution))
    assert tree.expected_acceptance_length == pytest.approx(1 + best, abs=1e-5)


def figure_4(row: int, path: Path) -> tuple[list[int], list[float], float]:
    """The draft distribution of OPT-Tree's Figure 4, from the calculation in its Appendix B."""
    children = {
        (): {0: 0.5, 1: 0.4},
        (0,): {0: 0.8, 1: 0.1},
        (1,): {0: 0.6, 1: 0.2},
        (0, 0): {0: 0.5, 1: 0.2},
        (1, 0): {0: 0.5},
    }.get(path, {})
    distribution = [*children.items()] + [(7 + i, 0.0) for i in range(2 - len(children))]
    return [t for t, _ in distribution], [math.log(p) if p else -math.inf for _, p in distribution], 1.0


def test_the_papers_example_has_an_expected_acceptance_length_of_3_07() -> None:
    tree = trees_of(ScriptedScorer(figure_4), OptTree(TINY, 3), [Budget(9)])[0]
    assert len(tree) == 9
    assert tree.expected_acceptance_length == pytest.approx(3.07, abs=1e-6)


def certain(p: float) -> Script:
    return lambda row, path: ([1, 2], [math.log(p), math.log(1 - p)], 1.0)


@pytest.mark.parametrize(("delta", "depth"), [(0.75, 1), (0.6, 2), (0.45, 3), (0.4, 4)])
def test_drafting_stops_after_the_first_layer_that_gains_no_more_than_delta(delta: float, depth: int) -> None:
    # A single node a layer: layer d gains 0.8^d (0.8, 0.64, 0.512, 0.4096, 0.328) beyond the first; none gains less
    # before it has been drafted, so the layer that fails the test is still in the tree.
    script: Script = lambda row, path: ([1], [math.log(0.8)], 1.0)  # noqa: E731
    scorer = ScriptedScorer(script)
    tree = trees_of(scorer, OptTree(delta, 9), [Budget(9)])[0]
    gains = [0.8 ** (d + 1) for d in range(9)]
    assert tree.depth == next(d for d, gain in enumerate(gains, start=1) if gain <= delta) == depth + 1
    assert len(scorer.calls) == tree.depth  # no draft pass beyond it


def test_each_sequence_stops_for_itself() -> None:
    script: Script = lambda b, path: ([1], [math.log(0.9 if b else 0.3)], 1.0)  # noqa: E731
    shallow, deep = trees_of(ScriptedScorer(script), OptTree(0.5, 9), [Budget(6), Budget(6)])
    assert (shallow.depth, deep.depth) == (1, 6)


@given(seed=st.integers(0, 10_000), width=st.integers(1, 3), depth=st.integers(1, 4), nodes=st.integers(1, 30))
def test_eagle2_keeps_the_best_of_all_children_of_its_beams(seed: int, width: int, depth: int, nodes: int) -> None:
    script = markov(seed)
    pool: dict[Path, float] = {}
    beam: dict[Path, float] = {(): 1.0}
    for _ in range(min(depth, nodes)):
        below: dict[Path, float] = {}
        for path, p in beam.items():
            tokens, logprobs, _ = script(0, path)
            below |= {(*path, t): p * math.exp(x) for t, x in zip(tokens[:width], logprobs[:width], strict=True)}
        pool |= below
        beam = {p: below[p] for p in sorted(below, key=below.__getitem__, reverse=True)[:width]}
    tree = trees_of(ScriptedScorer(script), Eagle2Tree(width, depth), [Budget(nodes)])[0]
    assert paths(tree) == set(sorted(pool, key=pool.__getitem__, reverse=True)[:nodes])


def test_opt_tree_never_expects_less_than_eagle2() -> None:
    for seed in range(30):
        opt, eagle2 = (
            trees_of(ScriptedScorer(markov(seed)), policy, [Budget(8)])[0].expected_acceptance_length
            for policy in (OptTree(TINY, 4), Eagle2Tree(2, 4))
        )
        assert opt >= eagle2 - 1e-6


@pytest.mark.parametrize("policy", [OptTree(TINY), Eagle2Tree()])
def test_batched_trees_are_what_each_is_alone(policy: GrowthPolicy) -> None:
    script = markov(3)
    budgets = [Budget(5), Budget(12, 2), Budget(1)]
    together = trees_of(ScriptedScorer(script), policy, budgets)
    for b, (tree, budget) in enumerate(zip(together, budgets, strict=True)):
        alone = trees_of(ScriptedScorer(lambda _, path, b=b: script(b, path)), policy, [budget])[0]  # type: ignore[misc]
        assert paths(tree) == paths(alone)


def outcome(depth: int, taken: int, draft: float, verify: float) -> Outcome:
    tree = chain_tree([1] * depth)
    request = Request.__new__(Request)
    request.stats = Stats(steps=1)
    return Outcome(request, tree, [], [1] * taken, taken, StepCost(1, draft, verify, 0.0, depth))


def test_the_automatic_threshold_is_the_rate_times_the_time_of_a_pass() -> None:
    policy = OptTree()
    assert policy.threshold == 0.5
    first = outcome(depth=4, taken=3, draft=9.0, verify=0.8)
    first.request.stats.steps = 0
    policy.observe(Plan([]), [first])  # a drafting model has read the prompt
    assert policy.threshold == 0.5
    policy.observe(Plan([]), [outcome(depth=4, taken=3, draft=0.2, verify=0.8)])
    assert policy.threshold == pytest.approx(3 / 1.0 * 0.2 / 4)
    for _ in range(200):
        policy.observe(Plan([]), [outcome(depth=2, taken=1, draft=0.5, verify=0.5)])
    assert policy.threshold == pytest.approx(1.0 * 0.25, rel=1e-3)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.5, math.nan, math.inf])
def test_a_threshold_outside_0_and_1_is_refused(delta: float) -> None:
    with pytest.raises(ConfigError, match=f"delta is {delta}"):
        OptTree(delta)


def test_best_paths_are_closed_under_parents_when_scores_tie() -> None:
    sure: Script = lambda row, path: ([1, 2], [0.0, -math.inf], 0.0)  # noqa: E731
    tree = trees_of(ScriptedScorer(sure), OptTree(TINY, 10), [Budget(4)])[0]
    assert tree.parents == [-1, 0, 1, 2]
    assert best_per_request([0.0, 0.0, 0.0], [0, 0, 0], [2]) == [True, True, False]


def best_first(script: Script, nodes: int) -> set[Path]:
    """The ``nodes`` most probable of all paths, whatever their depth: a search from the likeliest on."""
    found, queue = set[Path](), [(-1.0, Path())]
    while len(found) <= nodes:
        p, path = heapq.heappop(queue)
        found.add(path)
        tokens, logprobs, _ = script(0, path)
        for token, logprob in zip(tokens, logprobs, strict=True):
            heapq.heappush(queue, (p * math.exp(logprob), (*path, token)))
    return found - {()}


@pytest.mark.parametrize("nodes", [200, 1024, 1500])
def test_the_depth_is_bounded_by_the_nodes_alone(nodes: int) -> None:
    """A depth of at most 10 cut what Algorithm 1 leaves to the node budget (D(T) < n), and with it large trees."""

    sure = [math.log(0.96), math.log(0.03), math.log(0.009)]

    def script(row: int, path: Path) -> tuple[list[int], list[float], float]:
        tokens, logprobs, _ = markov(1)(row, path)
        return list(tokens), sure if len(path) % 3 else list(logprobs), 1.0

    tree = trees_of(ScriptedScorer(script), OptTree(TINY), [Budget(nodes)])[0]
    assert paths(tree) == best_first(script, nodes)
    assert tree.depth > 10


def test_a_chain_of_certain_tokens_is_as_deep_as_the_budget() -> None:
    sure: Script = lambda row, path: ([1], [-1e-4], 0.0)  # noqa: E731
    assert trees_of(ScriptedScorer(sure), OptTree(TINY), [Budget(40)])[0].depth == 40


def test_before_anything_is_measured_drafting_stops_at_the_published_threshold() -> None:
    """With no threshold and no bound on the depth, first steps drafted until no layer gained anything."""
    scorer = ScriptedScorer(lambda row, path: ([1], [math.log(0.8)], 1.0))
    tree = trees_of(scorer, OptTree(), [Budget(1024)])[0]
    assert (tree.depth, len(scorer.calls)) == (4, 4)  # gains 0.8, 0.64, 0.51, 0.41
