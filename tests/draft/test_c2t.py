"""C2T's trees: what is kept, by brute force; chains; batches; whom they are for."""

from __future__ import annotations

import math
import warnings
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftree.config import Budget, SamplingParams
from draftree.draft.c2t import ClassifierTree, Score
from draftree.draft.classifier import Classifier
from draftree.draft.load import load_drafter, resolved
from draftree.draft.methods import find_policy
from draftree.draft.policy import Frontier
from draftree.draft.static import Pair
from draftree.engine import Engine
from draftree.errors import ConfigError, DraftreeWarning
from draftree.names import load_engine
from draftree.tree import ROOT, DraftTree

from ..pairs import drafter, target
from ..toy import Path, Script, ScriptedScorer, trees_of

WIDTH = 3


def flat(row: int, path: Path) -> tuple[list[int], list[float], float]:
    """Three candidates anywhere, told apart by the path's length and tokens alone."""
    return [1, 2, 3], [math.log(x) for x in (0.5, 0.3, 0.2)], 1.0


class Scripted:
    """A score for every path, drawn from a seed: not monotone along paths."""

    def __init__(self, seed: int, scorer: ScriptedScorer) -> None:
        self.seed, self.scorer = seed, scorer

    def of(self, row: int, path: Path) -> float:
        return Random(f"{self.seed} {row} {path}").random()

    def __call__(self, frontier: Frontier) -> Tensor:
        paths = [self.scorer._paths[b, n] for b, n in zip(frontier.rows.tolist(), frontier.nodes.tolist(), strict=True)]
        tokens = frontier.candidates.tokens.tolist()
        rows = frontier.rows.tolist()
        return torch.tensor([[self.of(b, (*p, t)) for t in own] for b, p, own in zip(rows, paths, tokens, strict=True)])


def grown(seed: int, budgets: list[Budget], script: Script = flat, **settings: float) -> list[DraftTree]:
    scorer = ScriptedScorer(script)
    return trees_of(scorer, ClassifierTree(Scripted(seed, scorer), **settings), budgets)  # type: ignore[arg-type]


def paths(tree: DraftTree) -> list[Path]:
    out: list[Path] = []
    for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
        out.append((*(out[parent] if parent != ROOT else ()), token))
    return out


def every(seed: int, beta: float, depth: int, row: int = 0) -> dict[Path, float]:
    """Path -> its least score, of all paths whose prefixes all score at least beta."""
    scores, found = Scripted(seed, ScriptedScorer(flat)), dict[Path, float]()
    layer: dict[Path, float] = {(): 1.0}
    for _ in range(depth):
        below = {(*p, t): min(x, scores.of(row, (*p, t))) for p, x in layer.items() for t in (1, 2, 3)}
        layer = {p: x for p, x in below.items() if x >= beta}
        found |= layer
    return found


@given(seed=st.integers(0, 10_000), beta=st.sampled_from([0.0, 0.3, 0.6, 0.95]), depth=st.integers(1, 3))
def test_all_that_scores_at_least_beta_below_what_does_is_verified(seed: int, beta: float, depth: int) -> None:
    tree = grown(seed, [Budget(100)], beta=beta, width=WIDTH, top=0, depth=depth)[0]
    assert set(paths(tree)) == set(every(seed, beta, depth))


@given(seed=st.integers(0, 10_000), nodes=st.integers(1, 12))
def test_a_budget_keeps_the_paths_with_the_highest_least_score(seed: int, nodes: int) -> None:
    tree = grown(seed, [Budget(nodes)], beta=0.1, width=WIDTH, top=0, depth=3)[0]
    law = every(seed, 0.1, 3)
    found = sorted((law[p] for p in paths(tree)), reverse=True)
    assert found == pytest.approx(sorted(law.values(), reverse=True)[:nodes])
    for path in paths(tree):
        assert len(path) == 1 or path[:-1] in paths(tree)


@given(seed=st.integers(0, 10_000), top=st.integers(1, 4))
def test_each_layer_keeps_its_best_and_only_their_children_are_asked_about(seed: int, top: int) -> None:
    tree = grown(seed, [Budget(100)], beta=0.2, width=WIDTH, top=top, depth=3)[0]
    scores = Scripted(seed, ScriptedScorer(flat))
    layer: dict[Path, float] = {(): 1.0}
    want: set[Path] = set()
    for _ in range(3):
        below = {(*p, t): min(x, scores.of(0, (*p, t))) for p, x in layer.items() for t in (1, 2, 3)}
        best = sorted((p for p in below if below[p] >= 0.2), key=below.__getitem__, reverse=True)[:top]
        layer = {p: below[p] for p in best}
        want |= set(best)
    assert set(paths(tree)) == want


@given(seed=st.integers(0, 10_000), nodes=st.integers(1, 12))
def test_scores_given_their_parents_are_multiplied_along_a_path(seed: int, nodes: int) -> None:
    scores = Scripted(seed, ScriptedScorer(flat))
    law: dict[Path, float] = {(): 1.0}
    for depth in range(3):
        law |= {(*p, t): x * scores.of(0, (*p, t)) for p, x in law.items() if len(p) == depth for t in (1, 2, 3)}
    best = sorted((x for p, x in law.items() if p and x >= 0.05), reverse=True)[:nodes]
    tree = grown(seed, [Budget(nodes)], beta=0.05, width=WIDTH, top=0, depth=3, given_parent=True)[0]
    assert sorted((law[p] for p in paths(tree)), reverse=True) == pytest.approx(best)


def test_what_cannot_be_in_the_tree_is_not_asked_about() -> None:
    scorer = ScriptedScorer(flat)
    score: Score = lambda frontier: frontier.scores.exp()  # noqa: E731
    tree = trees_of(scorer, ClassifierTree(score, 0.0, WIDTH, 0, 10), [Budget(2)])[0]
    assert paths(tree) == [(1,), (2,)]  # 0.5 and 0.3: both children of (1,) have 0.25 and less
    assert [len(call) for call in scorer.calls] == [1, 2]


def test_a_chain_ends_where_the_score_falls_below_beta() -> None:
    falling = [0.9, 0.8, 0.65, 0.7, 0.1]
    score: Score = lambda frontier: torch.full((1, 1), falling[frontier.depth])  # noqa: E731
    for beta, length in ((0.85, 1), (0.66, 2), (0.6, 4), (0.95, 0)):
        tree = trees_of(ScriptedScorer(flat), ClassifierTree(score, beta, 1), [Budget(9)])[0]
        assert tree.tokens.tolist() == [1] * length


def test_three_sequences_get_what_each_gets_alone() -> None:
    budgets = [Budget(5), Budget(12, 2), Budget(1)]
    together = grown(3, budgets, width=WIDTH, beta=0.1)
    for b, (tree, budget) in enumerate(zip(together, budgets, strict=True)):
        alone = [Budget(0)] * 3
        alone[b] = budget
        assert paths(grown(3, alone, width=WIDTH, beta=0.1)[b]) == paths(tree)
        assert len(tree)


NET = Classifier(
    features=("probability", "entropy", "depth"),
    hidden=((4.0, -0.2, 0.0), (1.0, 0.3, -0.1)),
    bias=(0.1, 0.0),
    output=(1.5, 0.5),
    threshold=-1.0,
)
PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8]]


@pytest.mark.parametrize("name", ["lookup", "relative", "stranger", "lookup+relative"])
@pytest.mark.parametrize(("temperature", "width"), [(0.0, 15), (1.0, 15), (0.0, 1), (1.0, 1)])
def test_output_is_plain_decodings_alone_and_in_a_batch_of_three(name: str, temperature: float, width: int) -> None:
    model, params = target(), SamplingParams(max_tokens=30, temperature=temperature, seed=5)
    want = [g.token_ids for g in Engine(model).generate(PROMPTS, params)]
    policy = ClassifierTree(NET, 0.3, width)
    together = Engine(model, drafter(name, model, policy), nodes=12).generate(PROMPTS, params)
    assert [g.token_ids for g in together] == want
    for prompt, ids in zip(PROMPTS, want, strict=True):
        alone = Engine(model, drafter(name, model, policy), nodes=12).generate([prompt], params)[0]
        assert alone.token_ids == ids
    assert sum(sum(g.stats.drafted) for g in together) > 0


@pytest.mark.parametrize("scheme", ["multi-round", "multi-round-replacement", "top1-residual", "block"])
@pytest.mark.parametrize("width", ["1", "15"])
def test_schemes_that_draw_children_refuse_a_policy_that_ranks_them(scheme: str, width: str) -> None:
    with pytest.raises(ConfigError, match=f"verification {scheme} with ClassifierTree"):
        load_engine("./never-loaded", method="c2t", settings={"width": width}, verification=scheme)


def test_another_drafter_is_warned_about() -> None:
    policy = ClassifierTree(NET, made_for=Pair("elsewhere/big", "somewhere/small"))
    policy.check("big", "small")
    with pytest.warns(DraftreeWarning, match="for target elsewhere/big and drafter somewhere/small, not big and"):
        policy.check("big", "lookup")
    with pytest.warns(DraftreeWarning, match="drafts may be worse; train one with 'draftree train classifier'"):
        policy.check("other", "small")


def test_the_shipped_head_has_one_target_by_whatever_name() -> None:
    policy = find_policy("c2t")
    assert policy.partner == "head"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.check("HuggingFaceTB/SmolLM2-135M-Instruct", "head")


def test_a_target_without_a_head_gets_lookup_and_a_warning() -> None:
    model = target()
    assert resolved("auto", model, find_policy("c2t")) == "lookup"
    with pytest.warns(DraftreeWarning, match="drafter head, not .* and lookup"):
        made = load_drafter("auto", model, find_policy("c2t"))
    assert made.name == "lookup"


def test_a_law_that_is_no_law_is_refused_by_the_features_name() -> None:
    script: Script = lambda row, path: ([1, 2], [-0.5, -1.0], math.nan)  # noqa: E731
    with pytest.raises(ConfigError, match="the drafter's law has entropy nan: its logits are no numbers"):
        trees_of(ScriptedScorer(script), ClassifierTree(NET), [Budget(4)])


def test_nothing_is_drafted_where_there_are_no_candidates() -> None:
    script: Script = lambda row, path: ([1, 2], [-math.inf, -math.inf], 0.0)  # noqa: E731
    assert not len(trees_of(ScriptedScorer(script), ClassifierTree(NET, 0.0), [Budget(4)])[0])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"beta": -0.1}, "beta is -0.1"),
        ({"beta": 1.1}, "beta is 1.1"),
        ({"beta": math.nan}, "beta is nan"),
        ({"width": 0}, "width is 0: use a whole number from 1 to 64"),
        ({"width": 65}, "width is 65"),
        ({"top": -1}, "top is -1: use a whole number from 0"),
        ({"depth": 0}, "depth is 0"),
    ],
)
def test_a_value_out_of_range_is_named(settings: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        find_policy("c2t", settings)


def test_a_chain_has_no_second_candidate_to_tell_a_margin_by() -> None:
    net = Classifier(("margin",), ((1.0,),), (0.0,), (1.0,), 0.0)
    assert ClassifierTree(net, width=2).width == 2
    with pytest.raises(ConfigError, match="width is 1, and the classifier sees the margin .* use at least 2"):
        ClassifierTree(net, width=1)
