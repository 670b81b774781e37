"""The warp of sampled beams acts on the joint distribution: by exact enumeration, and transformers'."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationMixin

from draftree.beams import layers as rules
from draftree.beams.forest import BeamParams
from draftree.beams.layers import target_distributions
from draftree.config import SamplingParams
from draftree.models.base import prefill_scored
from draftree.papers.dsbd import Residuals, beam_distribution
from draftree.sampling.warping import softmax

from ..pairs import target
from .parts import PROMPTS
from .test_sampling import (
    PLAIN,
    Distribution,
    Scripted,
    Warp,
    completed,
    distance,
    distribution_of,
    one_step,
    toys,
    variation,
)

SHARP = SamplingParams(temperature=0.5)
WARPS = [
    SHARP,
    SamplingParams(temperature=2.0),
    SamplingParams(temperature=1.0, top_k=2),
    SamplingParams(temperature=1.0, top_p=0.7),
    SamplingParams(temperature=2.0, top_k=3, top_p=0.9, min_p=0.2),
]
SEED = 4
"""Of a target whose beams differ in how sure they are."""
WIDE = (2, 2, 2, 1)


@cache
def stepped(shape: tuple[int, int, int, int], params: SamplingParams) -> Distribution:
    """The exact distribution of the beams after a step; shape: V, W, W_S and depth."""
    vocab, width, drafted, depth = shape
    beams = BeamParams(width=width, draft_width=drafted, depth=depth)
    return one_step(toys(vocab, seed=SEED), beams, depth + 2, params=params)


def from_definition(shape: tuple[int, int, int, int], params: SamplingParams, definition: Warp) -> float:
    """Total variation between a step's beams, completed by a definition, and the definition's."""
    vocab, width, _, depth = shape
    want = distribution_of(toys(vocab, seed=SEED)[0], width, depth + 2, params, definition)
    return distance(completed(stepped(shape, params), want), want.final(((),)))


@pytest.mark.parametrize(
    ("shape", "params"),
    [*((WIDE, params) for params in WARPS), *((((3, 1, 2, 1), (2, 1, 2, 2))[i % 2], p) for i, p in enumerate(WARPS))],
)
def test_drafted_beams_follow_the_warped_distribution(shape: tuple[int, int, int, int], params: SamplingParams) -> None:
    """DraftLayer above layer, to the end of the beams: Theorem 3.1 with T."""
    assert from_definition(shape, params, "joint") < 1e-12


@pytest.mark.parametrize("params", WARPS)
def test_a_warp_of_each_beams_tokens_is_caught(params: SamplingParams) -> None:
    """The joint warp is the paper's. Beams had another one, and so had the definition of the exact tests."""
    assert from_definition(WIDE, params, "token") > 1e-2


def test_both_warps_are_one_where_nothing_is_warped() -> None:
    assert from_definition(WIDE, PLAIN, "token") < 1e-12


@pytest.mark.parametrize("params", [SHARP, SamplingParams(temperature=1.0, top_k=2)])
def test_they_do_where_beams_finish(params: SamplingParams) -> None:
    """A finished beam keeps its place and has no cells."""
    assert variation(2, 2, 2, 1, frozenset({0}), params=params) < 1e-12


def test_renormalising_q_over_accepted_beams_but_counting_dead_drafts_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The joint warp of the drafts was over all drafted beams; what is recorded must be what was drawn from."""

    class Renormalised(Residuals):
        def __init__(self, p: NDArray[np.float64], q: NDArray[np.float64]) -> None:
            super().__init__(p, q / q.sum())

    monkeypatch.setattr(rules, "Residuals", Renormalised)
    assert variation(2, 1, 2, 2, params=SHARP) > 1e-3


def test_drawing_without_replacement_is_caught() -> None:
    class Distinct(Scripted):
        replacement = False

    assert variation(3, 1, 2, 1, script=Distinct, params=SHARP) > 1e-3


ROWS = np.array([[0.6, 0.3, 0.1], [0.4, 0.35, 0.25]])
"""Next-token distributions of two beams."""
WEIGHTS = (0.7, 0.3)
"""Their probabilities."""


def cells(params: SamplingParams, counts: tuple[int, int] = (1, 1)) -> NDArray[np.float64]:
    """[2, 3] p_beam."""
    distributions = target_distributions(np.log(ROWS).astype(np.float32), params)
    return beam_distribution([math.log(w) for w in WEIGHTS], counts, distributions, params)


def test_top_k_top_p_and_min_p_are_of_the_joint_distribution() -> None:
    """p_beam is [.42, .21, .07; .12, .105, .075]."""
    top_p, min_p = SamplingParams(temperature=1.0, top_p=0.7), SamplingParams(temperature=1.0, min_p=0.27)
    assert int((cells(SamplingParams(temperature=1.0, top_k=2)) > 0).sum()) == 2
    assert (cells(top_p) > 0).tolist() == [[True, True, False], [True, False, False]]
    assert (cells(min_p) > 0).tolist() == [[True, True, False], [True, False, False]]


@pytest.mark.parametrize("params", WARPS)
def test_a_beam_that_was_drawn_twice_has_two_copies_of_its_cells(params: SamplingParams) -> None:
    """W x V cells whatever coincides; of copies all are kept or none."""
    distributions = target_distributions(np.log(ROWS).astype(np.float32), params)
    scores = [math.log(w) for w in WEIGHTS]
    thrice = beam_distribution([scores[0], scores[0], scores[1]], [1, 1, 1], distributions[[0, 0, 1]], params)
    want = np.stack([thrice[0] + thrice[1], thrice[2]])
    np.testing.assert_allclose(cells(params, (2, 1)), want, rtol=0, atol=1e-12)


def test_the_definition_counts_copies_too() -> None:
    want = distribution_of(toys(2)[0], 2, 3, SHARP, "joint")
    assert want.cells([(0,), (0,), (1,)]) != pytest.approx(want.cells([(0,), (1,)]))


TEMPERED = SamplingParams(temperature=0.7)


def test_cells_are_transformers_where_temperature_alone_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers' beam sampling adds to a beam's score is its warped row, which it does not normalise: with a
    temperature alone these sums are the cells of the joint warp."""
    model, prompt, steps = target(), PROMPTS[0], list[tuple[Tensor, list[list[int]]]]()
    original = GenerationMixin._get_top_k_continuations

    def spy(self: GenerationMixin, accumulated_log_probs: Tensor, running_sequences: Tensor, **rest: Any) -> Any:
        running = running_sequences[0, :, : rest["cur_len"]].tolist()
        steps.append((accumulated_log_probs.view(len(running), -1).clone(), running))
        return original(self, accumulated_log_probs=accumulated_log_probs, running_sequences=running_sequences, **rest)

    monkeypatch.setattr(GenerationMixin, "_get_top_k_continuations", spy)
    torch.manual_seed(3)
    cast(Any, model.model).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
        do_sample=True,
        num_beams=3,
        max_new_tokens=4,
        temperature=TEMPERED.temperature,
        top_k=0,
        pad_token_id=0,
    )
    for accumulated, running in steps[1:]:  # at first all beams but one are masked
        logits = np.stack([after(model, ids) for ids in running])
        scores = [score(model, ids, len(prompt)) for ids in running]
        joint = beam_distribution(scores, [1] * len(running), target_distributions(logits, TEMPERED), TEMPERED)
        found = accumulated.double().flatten().softmax(-1).numpy()
        np.testing.assert_allclose(found, joint.flatten(), rtol=1e-3, atol=1e-5)
    assert len(steps) == 4


def after(model: Any, ids: list[int]) -> NDArray[np.float32]:
    row, scores = prefill_scored(model, ids)
    logits = scores.logits([0])
    model.close(row)
    return np.asarray(logits[0])


def score(model: Any, ids: list[int], start: int) -> float:
    """Log-probability of what follows the prompt, unwarped."""
    return sum(float(np.log(softmax(after(model, ids[:i])))[ids[i]]) for i in range(start, len(ids)))
