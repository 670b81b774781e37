"""Constrained decoding through trees: the target's distribution over what is allowed at each node, and no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftree.beams.forest import BeamParams
from draftree.config import SamplingParams
from draftree.drafters import grow as growing
from draftree.drafters.base import DraftSource
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.engine.speculation import Observer, Speculation
from draftree.errors import ConfigError, RunError
from draftree.models.huggingface.torch_scores import HeadScores, TorchScores
from draftree.papers.opt_tree import OptTree
from draftree.policies.base import GrowthPolicy
from draftree.policies.fixed import StaticTree
from draftree.request import Outcome
from draftree.sampling.constraint import ConstraintState, TextEnded, followed
from draftree.scores import Edit, NumpyScores, Scores
from draftree.verify.schemes import find_scheme

from .drafters.test_ensemble import Says
from .toy import ToyModel, chi_square

VOCAB, LENGTH, PROMPT = 5, 4, [1, 2]
EOS = 4
UNAWARE = {0: 0.4, 1: 0.3, 3: 0.2}
"""What a source predicts that knows no constraint."""

Rule = Callable[[Sequence[int]], set[int]]


def no_twin(path: Sequence[int]) -> set[int]:
    """No token twice in a row, no end before the second; after a 3 comes a 0 or the end."""
    allowed = {t for t in range(VOCAB) if not path or t != path[-1]}
    if len(path) < 2:
        allowed.discard(EOS)
    return allowed & {0, EOS} or {0} if path and path[-1] == 3 else allowed


@dataclass
class ToyState(ConstraintState):
    """A state that is its path."""

    rule: Rule
    path: tuple[int, ...] = ()

    @property
    def mask(self) -> NDArray[np.uint32]:
        return np.array([sum(1 << t for t in self.rule(self.path))], np.uint32)

    def after(self, token: int) -> ConstraintState | None:
        if token not in self.rule(self.path):
            return None
        return TextEnded() if token == EOS else ToyState(self.rule, (*self.path, token))


@dataclass(frozen=True)
class ToyConstraint:
    """What ``rule`` allows."""

    rule: Rule = field(default=no_twin)

    def start(self) -> ConstraintState:
        return ToyState(self.rule)


def model(seed: int = 0) -> ToyModel:
    return ToyModel(VOCAB, seed=seed, spread=1.0, eos_ids=frozenset({EOS}))


def sources() -> dict[str, DraftSource]:
    return {
        "lookup": NgramSource(1),
        "model": ModelSource(model(8), VOCAB),
        "unaware": Says("unaware", UNAWARE),
        "ensemble": EnsembleSource((NgramSource(1), ModelSource(model(8), VOCAB))),
    }


class Drafted(Observer):
    """Collects what was drafted: the path to each node, behind what was generated before."""

    def __init__(self) -> None:
        self.paths: list[tuple[int, ...]] = []

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            before = outcome.request.output_ids[: len(outcome.request.output_ids) - outcome.taken]
            tokens, parents = outcome.tree.tokens, outcome.tree.parents
            paths: dict[int, tuple[int, ...]] = {-1: tuple(before)}
            for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
                paths[node] = (*paths[parent], token)
                self.paths.append(paths[node])


def allowed(path: Sequence[int], rule: Rule = no_twin) -> bool:
    return all(token in rule(path[:i]) for i, token in enumerate(path) if EOS not in path[:i])


@pytest.mark.parametrize("name", list(sources()))
@pytest.mark.parametrize("policy", [OptTree(), StaticTree(width=3, depth=3)], ids=["opt-tree", "static"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_that_of_ar_decoding_and_no_node_is_refused(
    name: str, policy: GrowthPolicy, temperature: float
) -> None:
    seen = Drafted()
    engine = Engine(model(), Speculation(TreeDrafter(policy, sources()[name]), 9), observers=[seen])
    each = [
        SamplingParams(max_tokens=12, temperature=temperature, seed=seed, constraint=ToyConstraint())
        for seed in range(12)
    ]
    prompts = [[*PROMPT, 1, seed % 4, 2] for seed in range(12)]
    found, alone = engine.generate(prompts, each), Engine(model()).generate(prompts, each)
    assert [g.token_ids for g in found] == [g.token_ids for g in alone]
    assert all(allowed(g.token_ids) for g in found)
    assert any(not allowed(g.token_ids) for g in Engine(model()).generate(prompts, SamplingParams(max_tokens=12)))
    assert seen.paths and all(allowed(path) for path in seen.paths)
    assert any(chunk.drafted for g in found for chunk in g.chunks)


def exact(prompt: Sequence[int], path: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
    """Probability of each constrained text of at most ``LENGTH`` tokens."""
    if len(path) == LENGTH or (path and path[-1] == EOS):
        return {path: 1.0}
    logits = model().after([*prompt, *path]).double()
    open_ = torch.tensor([t in no_twin(path) for t in range(VOCAB)])
    p = logits.masked_fill(~open_, float("-inf")).softmax(-1).tolist()
    return {text: p[t] * q for t in range(VOCAB) if p[t] for text, q in exact(prompt, (*path, t)).items()}


def sampled(verification: str, policy: GrowthPolicy, count: int = 1000, constrained: bool = True) -> float:
    """p-value that so many texts through trees follow the constrained distribution."""
    engine = Engine(
        model(), Speculation(TreeDrafter(policy, ModelSource(model(8), VOCAB)), 5, find_scheme(verification))
    )
    wanted = exact(PROMPT)
    constraint = ToyConstraint() if constrained else None
    each = [
        SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=seed, constraint=constraint) for seed in range(count)
    ]
    number = {text: i for i, text in enumerate(wanted)}
    counts = torch.zeros(len(wanted) + 1)
    for generation in engine.generate([PROMPT] * count, each):
        counts[number.get(tuple(generation.token_ids), len(wanted))] += 1
    return chi_square(counts, torch.tensor([*wanted.values(), 0.0]))


@pytest.mark.parametrize(
    ("verification", "policy"),
    [
        ("match", OptTree()),
        ("multi-round", StaticTree(width=2, depth=2)),
        ("multi-round-replacement", StaticTree(width=2, depth=2)),
        ("top1-residual", StaticTree(width=2, depth=2)),
    ],
)
def test_every_scheme_follows_the_constrained_distribution(verification: str, policy: GrowthPolicy) -> None:
    assert sampled(verification, policy) > 1e-4


def test_what_is_sampled_without_the_constraint_is_caught() -> None:
    assert sampled("match", OptTree(), 50, constrained=False) < 1e-4


def test_drafts_that_do_not_know_the_constraint_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "allowed", lambda found, state: found)
    seen = Drafted()
    engine = Engine(
        model(), Speculation(TreeDrafter(StaticTree(width=3, depth=3), Says("unaware", UNAWARE))), observers=[seen]
    )
    prompts = [[*PROMPT, 1, seed % 4, 2] for seed in range(12)]
    engine.generate(prompts, SamplingParams(max_tokens=12, temperature=0.9, seed=1, constraint=ToyConstraint()))
    assert not all(allowed(path) for path in seen.paths)


def test_a_draft_models_distribution_is_masked_before_candidates_are_chosen() -> None:
    """One child a node: without the mask the draft's best token would be refused, and nothing drafted."""
    forbidden = [int(model(8).after(PROMPT).argmax()), int(model(8).after([*PROMPT, 0]).argmax())]
    rule = ToyConstraint(lambda path: set(range(VOCAB - 1)) - set(forbidden))
    seen = Drafted()
    engine = Engine(
        model(), Speculation(TreeDrafter(StaticTree(width=1, depth=1), ModelSource(model(8), VOCAB))), observers=[seen]
    )
    engine.generate([PROMPT], SamplingParams(max_tokens=10, constraint=rule))
    assert len(seen.paths) >= 4


def test_processors_see_constrained_logits() -> None:
    seen: list[list[int]] = []

    def note(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        seen.append(np.flatnonzero(np.isinf(logits)).tolist())
        return logits

    params = SamplingParams(max_tokens=4, constraint=ToyConstraint(), processors=(note,))
    text = Engine(model()).generate([PROMPT], params)[0].token_ids
    for i, refused in enumerate(seen[: len(text)]):
        assert set(refused) == set(range(VOCAB)) - no_twin(text[:i])


def test_requests_with_and_without_constraints_share_a_step() -> None:
    each = [SamplingParams(max_tokens=8, constraint=ToyConstraint() if i % 2 else None) for i in range(4)]
    drafter = TreeDrafter(OptTree(), ModelSource(model(8), VOCAB))
    together = Engine(model(), Speculation(drafter)).generate([PROMPT] * 4, each)
    alone = [Engine(model()).generate([PROMPT], params)[0] for params in each]
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]


@given(st.integers(1, 200), st.integers(0, 2**32), st.booleans())
@settings(max_examples=60, deadline=None)
def test_masks_are_those_of_each_bit(vocab: int, seed: int, named: bool) -> None:
    """Of scores, in NumPy and in torch, and of drafters' logits, which may be of some tokens alone."""
    rng = np.random.default_rng(seed)
    open_ = rng.random(vocab) < 0.4
    bits = np.zeros(-(-vocab // 32) * 32, np.bool_)
    bits[:vocab] = open_
    mask = np.packbits(bits, bitorder="little").view(np.uint32)

    class Fixed(TextEnded):
        @property
        def mask(self) -> NDArray[np.uint32] | None:
            return mask

    assert np.array_equal(Fixed().allows(np.arange(vocab)), open_)
    assert [Fixed().allows(token) for token in range(vocab)] == open_.tolist()
    entries = rng.permutation(vocab)[: vocab // 2 + 1] if named else np.arange(vocab)
    logits = rng.standard_normal((2, len(entries))).astype(np.float32)
    allowed = open_[entries]
    want = np.where(allowed, logits[0], np.float32(-np.inf)) if allowed.any() else logits[0]
    rows, edits = torch.from_numpy(logits), [Edit(mask=mask), Edit()]
    found: list[Scores] = [HeadScores(rows, torch.from_numpy(entries).expand(2, -1), [2])]
    if not named:
        found += [NumpyScores(logits, [2]), TorchScores(rows, [2])]
    for scores in found:
        assert np.array_equal(scores.logits([0, 1], edits), np.stack([want, logits[1]]))


def test_tokens_that_were_not_drawn_under_the_constraint_are_an_error() -> None:
    with pytest.raises(RunError, match="token 1 "):
        followed(ToyConstraint().start(), [0, 1, 1])


def test_what_a_constraint_does_not_go_with() -> None:
    with pytest.raises(ConfigError, match="ignore_eos"):
        Engine(model()).submit(PROMPT, SamplingParams(ignore_eos=True, constraint=ToyConstraint()))
    with pytest.raises(ConfigError, match="constraint is 3"):
        SamplingParams(constraint=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="constraint"):
        BeamParams(width=2).check(SamplingParams(constraint=ToyConstraint()))
