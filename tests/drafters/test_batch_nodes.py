"""A node budget that requests share: the most probable nodes of all trees, and no output depends on it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.config import Budget, SamplingParams
from draftree.drafters import grow as growing
from draftree.drafters.base import Drafter
from draftree.engine.engine import Engine, Generation
from draftree.engine.observer import Observer
from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import Speculation
from draftree.errors import ConfigError
from draftree.models.huggingface.hf_model import HFModel
from draftree.policies.base import GrowthPolicy
from draftree.policies.best_paths import Eagle2Tree, OptTree
from draftree.policies.fixed import RankTree, StaticTree
from draftree.request import Outcome
from draftree.tree import DraftTree
from draftree.verify.schemes import SCHEMES, _OneByOne, find_scheme

from ..pairs import drafter, policy, target
from ..toy import ScriptedScorer, ToyModel, trees_of
from ..verify.chances import drawn_batches, variation
from .test_grow import random_script

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8]]


def probabilities(trees: Sequence[DraftTree], budgets: Sequence[Budget]) -> list[float]:
    """Weighted path probabilities of all nodes, the largest first."""
    found = [
        budget.weight * math.exp(p)
        for tree, budget in zip(trees, budgets, strict=True)
        for p in tree.path_logprobs.tolist()
    ]
    return sorted(found, reverse=True)


weighted = st.builds(Budget, st.integers(1, 12), st.none(), st.sampled_from([0.5, 1.0, 2.0]))


@pytest.mark.parametrize("shape", [StaticTree(3, 3), OptTree(1e-9, 4), Eagle2Tree(3, 3)])
@given(seed=st.integers(0, 10**6), own=st.lists(weighted, min_size=1, max_size=4), most=st.integers(1, 20))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_most_probable_nodes_of_all_trees_are_verified(
    shape: GrowthPolicy, seed: int, own: list[Budget], most: int
) -> None:
    """Of trees that are not cut while they grow; those of budgets below the layers' sizes reach deeper if shared."""
    asked = [replace(budget, nodes=40) for budget in own] if isinstance(shape, StaticTree) else own
    every = trees_of(ScriptedScorer(random_script(seed)), shape, asked)
    budgets = [replace(budget, together=most) for budget in asked]
    trees = trees_of(ScriptedScorer(random_script(seed)), shape, budgets)
    assert probabilities(trees, budgets) == pytest.approx(probabilities(every, budgets)[:most])


def test_what_cannot_be_verified_is_not_extended() -> None:
    """The second request is unsure: nodes of its second layer are beaten, and it is drafted for no further."""

    def script(row: int, path: tuple[int, ...]) -> tuple[list[int], list[float], float]:
        return [1, 2], [math.log(p) for p in ((0.9, 0.1) if row == 0 else (0.3, 0.2))], 1.0

    scorer = ScriptedScorer(script)
    trees = trees_of(scorer, StaticTree(2, 4), [Budget(30, None, 1.0, 4)] * 2)
    assert [tree.tokens.tolist() for tree in trees] == [[1, 1, 1, 1], []]
    assert [asked for asked in scorer.scored if asked[0] == 1] == [(1, (1,)), (1, (2,))]


SHARED: dict[str, tuple[GrowthPolicy, int]] = {
    "chain": (StaticTree(width=1, depth=2), 3),
    "wide": (RankTree(((0,), (1,), (0, 0))), 5),
    "below the drawn one": (RankTree(((0,), (1,), (1, 0))), 5),
}


def of_the_second(batches: Iterator[tuple[list[DraftTree], float]]) -> Iterator[tuple[DraftTree, float]]:
    """The second request's trees, each once."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[DraftTree, float]] = {}
    for (_, tree), chance in batches:
        key = tuple(tree.tokens.tolist()), tuple(tree.parents.tolist())
        found[key] = tree, chance + (found[key][1] if key in found else 0.0)
    return iter(found.values())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("multi-round", "wide"),
        ("multi-round-replacement", "wide"),
        ("top1-residual", "below the drawn one"),
        ("block", "chain"),
    ],
)
def test_drawn_children_that_share_nodes_leave_the_distribution_as_it_is(name: str, shape: str) -> None:
    """Exactly, over all trees of both requests; and trees of different sizes occur, so that something was shared."""
    shaped, most = SHARED[shape]
    scheme = SCHEMES[name]
    assert isinstance(scheme, _OneByOne)
    model, drafting = ToyModel(3, 3, dtype=torch.float64), ToyModel(3, 53, dtype=torch.float64)
    budgets = [Budget(3, None, 1.0, most)] * 2
    trees = list(of_the_second(drawn_batches(drafting, shaped, scheme.drawing, budgets)))
    assert len({len(tree) for tree, _ in trees}) > 1
    assert variation(scheme.accept, model, iter(trees)) < 1e-12


def test_siblings_that_come_in_one_by_one_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the drawn child gives way to children of the top one, as where all of them are chosen."""

    share = growing._Share
    monkeypatch.setattr(growing, "_Share", lambda most, budgets, drawn: share(most, budgets, drawn=False))
    model, drafting = ToyModel(3, 3, dtype=torch.float64), ToyModel(3, 54, dtype=torch.float64)
    scheme = SCHEMES["top1-residual"]
    assert isinstance(scheme, _OneByOne)
    batches = drawn_batches(drafting, SHARED["wide"][0], scheme.drawing, [Budget(3, None, 1.0, 4)] * 2)
    assert variation(scheme.accept, model, of_the_second(batches)) > 1e-3


class Nodes(Observer):
    """Drafted nodes of each step, and the requests that had some."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        """See ``Observer``."""
        self.steps.append([len(outcome.tree) for outcome in outcomes])


def decode(
    model: HFModel, drafts: Drafter | None, params: SamplingParams, most: int | None = None, verification: str = "match"
) -> tuple[list[Generation], Nodes]:
    seen = Nodes()
    engine = Engine(
        model,
        Speculation(drafts, 12 if drafts else None, find_scheme(verification)),
        observers=[seen],
        scheduling=SchedulerParams(rows=3, batch_nodes=most),
    )
    return engine.generate(PROMPTS, params), seen


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["auto", "chain", "static", "eagle", "eagle2", "opt-tree", "dynamic-width", "c2t"])
def test_ids_are_those_of_ar_decoding(method: str, temperature: float) -> None:
    model, params = target(), SamplingParams(max_tokens=30, temperature=temperature, seed=11)
    want, _ = decode(model, None, params)
    found, seen = decode(model, drafter("relative", model, policy(method)), params, 5)
    assert [g.token_ids for g in found] == [g.token_ids for g in want]
    assert 5 >= max(map(sum, seen.steps)) > 1
    assert max(max(step) for step in seen.steps) > 5 // 3, "no request has more than an equal share"


@pytest.mark.parametrize("verification", ["multi-round", "top1-residual", "block"])
def test_drawn_trees_keep_to_the_budget_too(verification: str) -> None:
    model, shape = target(), StaticTree(1 if verification == "block" else 2, 4)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3)
    found, seen = decode(model, drafter("relative", model, shape), params, 5, verification)
    assert all(len(g.token_ids) <= 20 for g in found)
    assert 5 >= max(map(sum, seen.steps)) > 2
    greedy = SamplingParams(max_tokens=20)
    want, _ = decode(model, None, greedy)
    found, _ = decode(model, drafter("relative", model, shape), greedy, 5, verification)
    assert [g.token_ids for g in found] == [g.token_ids for g in want]


def test_drafters_divide_the_budget_by_their_requests() -> None:
    model, match, params = target(), find_scheme("match"), SamplingParams(max_tokens=30, ignore_eos=True)
    engine = Engine(model)
    one, other = (Speculation(drafter("relative", model, StaticTree(2, 4)), 30, match) for _ in range(2))
    requests = [
        engine.stepper.open(engine.request(p, params, s)) for p, s in zip(PROMPTS, (one, other, other), strict=True)
    ]
    sizes = [len(outcome.tree) for outcome in engine.stepper.step(requests, batch_nodes=6)]
    assert sizes[0] == 2 and sum(sizes[1:]) == 4
    for request in requests:
        engine.stepper.close(request)


def test_no_nodes_at_all_are_no_budget() -> None:
    with pytest.raises(ConfigError, match="batch_nodes is 0: use at least 1"):
        SchedulerParams(batch_nodes=0)
