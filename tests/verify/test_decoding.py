"""Every scheme through the engine: the distribution of the text (oracle 5), greedy text, batches, seeds, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from draftree.config import SamplingParams
from draftree.drafters.base import Drafter
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation, SpeculationParams
from draftree.errors import ConfigError, UnknownNameError
from draftree.integrations.hf_generate import as_processor
from draftree.papers.entropy_trees import EntropyTree
from draftree.policies.base import GrowthPolicy
from draftree.policies.fixed import StaticTree
from draftree.request import Generation
from draftree.sampling.warping import warp
from draftree.verify.base import Scheme
from draftree.verify.schemes import SCHEMES, Relaxed, find_scheme

from ..pairs import DRAFTERS, drafter, generated, target
from ..tiny import tiny
from ..toy import ToyModel, chi_square, distribution

LOSSLESS = [name for name, scheme in SCHEMES.items() if not scheme.lossy]
DRAWING = [name for name in LOSSLESS if name != "match"]
PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8]]
TOKENS = 20
VOCAB, LENGTH, PROMPT, BATCH = 3, 3, [1, 2], 700
"""Draws: a total variation of 0.12 over the 27 texts is found with a chance of 0.96 (chi-square at 1e-4)."""


def policy_for(scheme: str) -> GrowthPolicy:
    return StaticTree(width=2, depth=2)


def counts_of(scheme: str | Scheme, made: Drafter, params: dict[str, float]) -> Tensor:
    """[V ** LENGTH] counts of sampled continuations, each under a seed of its own."""
    engine = Engine(ToyModel(VOCAB, spread=1.0), Speculation(made, 6, find_scheme(scheme)))
    counts = torch.zeros((VOCAB,) * LENGTH)
    each = [SamplingParams(max_tokens=LENGTH, seed=i, **params) for i in range(BATCH)]  # type: ignore[arg-type]
    ids = torch.tensor([g.token_ids for g in engine.generate([PROMPT] * BATCH, each)])
    counts.index_put_(tuple(ids.T), torch.ones(BATCH), accumulate=True)
    return counts.flatten()


class Warped(ToyModel):
    """The target's toy, warped."""

    def __init__(self, params: dict[str, float]) -> None:
        super().__init__(VOCAB, spread=1.0)
        self._params = SamplingParams(**params)  # type: ignore[arg-type]

    def after(self, ids: object) -> Tensor:
        """[V] warped logits."""
        row = super().after(ids)  # type: ignore[arg-type]
        return torch.from_numpy(warp(row.numpy(), self._params.warping))


@pytest.mark.parametrize("scheme", DRAWING)
def test_sampled_text_follows_the_targets_warped_distribution(scheme: str) -> None:
    params = {"temperature": 1.3, "top_k": 2}
    made = TreeDrafter(policy_for(scheme), ModelSource(ToyModel(VOCAB, seed=8, spread=1.0), VOCAB))
    counts = counts_of(scheme, made, params)
    assert chi_square(counts, distribution(Warped(params), PROMPT, LENGTH).flatten()) > 1e-4


@pytest.mark.parametrize("scheme", DRAWING)
def test_sampled_text_follows_the_targets_distribution_when_lookup_drafts(scheme: str) -> None:
    counts = counts_of(scheme, TreeDrafter(policy_for(scheme), NgramSource(shortest=1)), {"temperature": 1.0})
    assert chi_square(counts, distribution(ToyModel(VOCAB, spread=1.0), PROMPT, LENGTH).flatten()) > 1e-4


def test_a_lossy_scheme_is_caught() -> None:
    made = TreeDrafter(StaticTree(width=2, depth=2), ModelSource(ToyModel(VOCAB, seed=8, spread=1.0), VOCAB))
    counts = counts_of(Relaxed(lambda entropy: 2), made, {"temperature": 1.0})
    assert chi_square(counts, distribution(ToyModel(VOCAB, spread=1.0), PROMPT, LENGTH).flatten()) < 1e-4


def decode(
    scheme: str | Scheme, name: str, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[Generation]:
    model = target()
    policy = EntropyTree(width=3, depth=3)
    return Engine(model, Speculation(drafter(name, model, policy), 8, find_scheme(scheme))).generate(prompts, params)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("scheme", DRAWING)
def test_greedy_text_is_the_targets_own(scheme: str, name: str) -> None:
    want = [generated(tiny(), p, TOKENS) for p in PROMPTS]
    assert [g.token_ids for g in decode(scheme, name, PROMPTS, SamplingParams(max_tokens=TOKENS))] == want


@pytest.mark.parametrize("name", ["lookup", "relative"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_batch_of_greedy_and_sampled_sequences_gives_what_each_gives_alone(scheme: str, name: str) -> None:
    each = [
        SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=5),
        SamplingParams(max_tokens=TOKENS),
        SamplingParams(max_tokens=TOKENS, temperature=0.6, top_k=9, seed=6),
    ]
    together = [g.token_ids for g in decode(scheme, name, PROMPTS, each)]
    assert together == [decode(scheme, name, [p], s)[0].token_ids for p, s in zip(PROMPTS, each, strict=True)]
    assert together == [g.token_ids for g in decode(scheme, name, PROMPTS, each)]


@pytest.mark.parametrize("scheme", DRAWING)
def test_another_seed_gives_another_text(scheme: str) -> None:
    texts = [
        decode(scheme, "self", PROMPTS[:1], SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=seed))[0].token_ids
        for seed in (1, 2)
    ]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("scheme", DRAWING)
def test_the_target_as_its_own_drafter_is_accepted(scheme: str) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=3)
    stats = decode(scheme, "self", PROMPTS[:1], params)[0].stats
    assert stats.accepted[0] > 0
    assert stats.rejected_entropies == []


@pytest.mark.parametrize("scheme", DRAWING)
def test_processors_shape_the_distribution_at_each_node(scheme: str) -> None:
    """A processor that allows one token after each path leaves no choice: drafts are refused, the text is its own."""

    def counting(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        found = np.full_like(logits, -np.inf)
        found[(ids[-1] + 1) % len(logits)] = 0.0
        return found

    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, processors=(counting,))
    assert decode(scheme, "self", [[3, 4]], params)[0].token_ids == [5, 6, 7, 8, 9, 10, 11, 12]
    penalised = SamplingParams(max_tokens=8, processors=(as_processor(RepetitionPenaltyLogitsProcessor(1.5)),))
    want = generated(tiny(), PROMPTS[0], 8, repetition_penalty=1.5)
    assert decode(scheme, "self", PROMPTS[:1], penalised)[0].token_ids == want


def test_relaxed_without_allowance_is_match_and_still_marked() -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=3)
    plain, strict = (
        decode("match", "relative", PROMPTS, params),
        decode(Relaxed(lambda h: 0), "relative", PROMPTS, params),
    )
    assert [g.token_ids for g in strict] == [g.token_ids for g in plain]
    assert [g.lossy for g in strict] == [True] * 3
    assert [g.lossy for g in plain] == [False] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_relaxed_accepts_more_and_changes_the_text(temperature: float) -> None:
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=3)
    plain, loose = decode("match", "relative", PROMPTS, params), decode("relaxed", "relative", PROMPTS, params)
    assert sum(g.stats.steps for g in loose) < sum(g.stats.steps for g in plain)
    assert [g.token_ids for g in loose] != [g.token_ids for g in plain]


class ByValue(StaticTree):
    by_value = True


@pytest.mark.parametrize("scheme", DRAWING)
def test_policies_that_rank_siblings_are_refused(scheme: str) -> None:
    with pytest.raises(ConfigError, match=f"{scheme} with ByValue.*match") as refusal:
        Engine(ToyModel(), Speculation(TreeDrafter(ByValue(width=1), NgramSource()), scheme=find_scheme(scheme)))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("scheme", ["match", "relaxed"])
def test_match_and_relaxed_take_any_policy(scheme: str) -> None:
    Engine(ToyModel(), Speculation(TreeDrafter(ByValue(), NgramSource()), scheme=find_scheme(scheme)))


def test_a_refused_method_is_named_as_it_was_given() -> None:
    for method in ("auto", "opt-tree"):
        with pytest.raises(ConfigError, match=f"multi-round .*{method}, "):
            SpeculationParams(method=method, verification="multi-round")


def test_a_misspelt_scheme_is_answered_with_the_nearest_and_all_names() -> None:
    with pytest.raises(UnknownNameError, match="multi-round.*top1-residual"):
        Engine(ToyModel(), Speculation(scheme=find_scheme("multiround")))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_a_drafter_every_scheme_is_ar_decoding(scheme: str) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=9)
    want = decode("match", "none", PROMPTS, params)
    assert [g.token_ids for g in decode(scheme, "none", PROMPTS, params)] == [g.token_ids for g in want]
