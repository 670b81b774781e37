"""Sampled text of the real code, by chi-square: engine, drafter, verification and commits of a toy (oracle 5)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from draftree.config import SamplingParams
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.grow import TreeDrafter
from draftree.draws import Draws
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.papers.entropy_trees import EntropyTree
from draftree.policies.base import GrowthPolicy
from draftree.policies.fixed import StaticTree
from draftree.scores import Scores
from draftree.tree import DraftTree
from draftree.verify.base import Verdict, match
from draftree.verify.schemes import Match

from .toy import ToyModel, chi_square, distribution

VOCAB, LENGTH, PROMPT = 3, 3, [1, 2]
REQUESTS = 2_000
"""Of three draws each: they find the bias of ``test_a_verification_that_prefers_drafts_is_caught`` by p = 5e-8."""


def _counts(policy: GrowthPolicy) -> torch.Tensor:
    """[V] * LENGTH counts of sampled continuations, each under a seed of its own."""
    target = ToyModel(VOCAB, spread=1.0)
    drafter = TreeDrafter(policy, ModelSource(ToyModel(VOCAB, seed=8, spread=1.0), VOCAB))
    decode = Engine(target, Speculation(drafter, 5))
    counts = torch.zeros((VOCAB,) * LENGTH)
    each = [SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=seed) for seed in range(REQUESTS)]
    ids = torch.tensor([g.token_ids for g in decode.generate([PROMPT] * REQUESTS, each)])
    counts.index_put_(tuple(ids.T), torch.ones(REQUESTS), accumulate=True)
    return counts


@pytest.mark.parametrize("policy", [StaticTree(width=2, depth=2), EntropyTree(depth=2)], ids=["static", "entropy"])
def test_sampled_text_through_trees_follows_the_targets_distribution(policy: GrowthPolicy) -> None:
    counts = _counts(policy)
    assert chi_square(counts.flatten(), distribution(ToyModel(VOCAB, spread=1.0), PROMPT, LENGTH).flatten()) > 1e-4


def test_a_verification_that_prefers_drafts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def biased(
        scores: Scores, roots: Sequence[int], trees: Sequence[DraftTree], draws: Sequence[Draws]
    ) -> list[Verdict]:
        """Gives up the target's draw for the first drafted child every second time that it is none."""
        verdicts = match(scores, roots, trees, draws)
        for b, v in enumerate(verdicts):
            if len(trees[b]) and not v.path and draws[b].seed % 2 == 0:
                verdicts[b] = Verdict([], [int(trees[b].tokens[0])])
        return verdicts

    monkeypatch.setattr(Match, "verify", staticmethod(biased))
    counts = _counts(StaticTree(width=2, depth=2))
    assert chi_square(counts.flatten(), distribution(ToyModel(VOCAB, spread=1.0), PROMPT, LENGTH).flatten()) < 1e-4
