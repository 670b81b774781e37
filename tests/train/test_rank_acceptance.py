"""Calibration on tiny models: what is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftree.config import SamplingParams
from draftree.drafters.base import Drafter
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.engine.replay import Replay
from draftree.models.base import prefill
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.torch_scores import gumbel_noise
from draftree.policies.base import MAX_WIDTH
from draftree.policies.fixed import Counts
from draftree.sampling.warping import stream_key
from draftree.train import rank_acceptance
from draftree.train.rank_acceptance import (
    CalibrationOptions,
    Tally,
    TruePath,
    measure,
    ranks_along,
)

from ..lookups import Reference
from ..pairs import drafter, target
from ..tiny import VOCAB, causal_logits, tiny

PROMPTS = ((3, 14, 15, 9, 2, 6, 14, 15), (27, 1, 8), (31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8))
TOKENS = 24


def counts(name: str, stride: int, at: Path) -> Counts:
    model, policy = target(), TruePath()
    options = CalibrationOptions(depth=4, stride=stride, max_tokens=TOKENS)
    tally = Tally.load(at / "tally", "", 4)
    assert [*measure(options, model, drafter(name, model, policy), policy, PROMPTS, 0, tally)] == [
        *range(1, len(PROMPTS) + 1)
    ]
    return tally.counts


def test_responses_that_are_drawn_together_are_counted_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt's answer ends before those of the prompts before it."""
    texts = [decoded(prompt)[0] for prompt in PROMPTS]
    end = next(token for token in texts[-1] if token not in texts[0])
    tallies, options = list[Tally](), CalibrationOptions(depth=4, stride=1, max_tokens=TOKENS)
    for rows in (1, 8):
        monkeypatch.setattr(rank_acceptance, "_ROWS", rows)
        model, policy, tally = target(eos=end), TruePath(), Tally("", [0] * 4, [[0] * MAX_WIDTH for _ in range(4)])
        made = drafter("relative", model, policy)
        assert [*measure(options, model, made, policy, PROMPTS, 0, tally)] == [1, 2, 3]
        tallies.append(tally)
    assert tallies[0] == tallies[1]


def decoded(prompt: tuple[int, ...], temperature: float = 0.0) -> tuple[list[int], SamplingParams]:
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=5)
    return Engine(target()).generate([list(prompt)], params)[0].token_ids, params


def along(made: Drafter, policy: TruePath, stride: int, temperature: float = 0.0) -> list[list[int | None]]:
    output, params = decoded(PROMPTS[0], temperature)
    with Replay(made, PROMPTS[0], output, params) as replay:
        return list(ranks_along(replay, policy, depth=4, stride=stride))


@pytest.mark.parametrize("stride", [1, 3, 4, 7])
def test_a_drafter_that_is_the_target_is_always_right_at_rank_0(stride: int, tmp_path: Path) -> None:
    found = counts("self", stride, tmp_path)
    assert found.acceptance.tolist() == [[1.0]] * 4


@pytest.mark.parametrize("stride", [1, 2, 5, 30])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_ranks_of_a_model_are_those_of_a_plain_forward(stride: int, temperature: float) -> None:
    """Whatever the stride and depth: distributions depend on the tokens before, and on the target's noise, alone."""
    policy, weights = TruePath(), tiny(seed=5)
    made = TreeDrafter(policy, ModelSource(HFModel(weights, self_test=False), VOCAB))
    output, _ = decoded(PROMPTS[0], temperature)
    logits = causal_logits(weights, [*PROMPTS[0], *output])[len(PROMPTS[0]) - 1 : -1]
    if temperature:  # the drafter foresees the target's noise
        positions = range(len(PROMPTS[0]), len(PROMPTS[0]) + len(output))
        every = torch.arange(logits.shape[1]).expand(logits.shape)
        logits = logits + gumbel_noise([stream_key(5, position) for position in positions], every)
    ranks = [int((row > row[token]).sum()) for row, token in zip(logits, output, strict=True)]
    want = [ranks[start : start + 4] for start in range(1, len(output), stride)]
    assert along(made, policy, stride, temperature) == want


def test_the_ranks_of_lookup_are_those_of_its_index_at_the_start_of_the_draft() -> None:
    policy = TruePath()
    made = TreeDrafter(policy, NgramSource(shortest=1))
    output, _ = decoded(PROMPTS[0])
    for start, ranks in zip(range(1, len(output)), along(made, policy, 1), strict=True):
        reference = Reference([[*PROMPTS[0], *output[:start]]], shortest=1)
        for d, rank in enumerate(ranks):
            path, token = output[start : start + d], output[start + d]
            best = list(reference.predict(path, start - 1))[:64]
            assert rank == (best.index(token) if token in best else None)


def test_a_draft_ends_at_the_first_token_without_a_rank() -> None:
    policy = TruePath()
    for ranks in along(TreeDrafter(policy, NgramSource(shortest=1)), policy, 1):
        assert None not in ranks[:-1]
        assert 1 <= len(ranks) <= 4


def test_the_drafter_is_left_without_sequences() -> None:
    policy, model = TruePath(), target()
    drafting = model.twin()
    along(TreeDrafter(policy, ModelSource(drafting, VOCAB)), policy, 3)
    assert prefill(drafting, list(PROMPTS[1])).number == 0


def test_what_is_accepted_at_rank_0_is_what_the_drafters_own_argmax_gets_right(tmp_path: Path) -> None:
    found = counts("relative", 1, tmp_path)
    model, policy = target(), TruePath()
    hits = total = 0
    for prompt in PROMPTS:
        output = Engine(model).generate([list(prompt)], SamplingParams(max_tokens=TOKENS))[0].token_ids
        made = drafter("relative", model, policy)
        logits = causal_logits(made.source.model.model, [*prompt, *output])[len(prompt) :]  # type: ignore[attr-defined]
        hits += int((logits[:-1].argmax(-1) == torch.tensor(output[1:])).sum())
        total += len(output) - 1
    assert (found.accepted[0][0], found.trials[0]) == (hits, total)
