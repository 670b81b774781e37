"""Where two decodings of one prompt differ, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config import SamplingParams
from ..models.base import LanguageModel, prefill_scored
from ..sampling.constraint import followed
from ..sampling.draws import Draws
from ..sampling.noise import gumbel_noise

LARGEST_GAP = 1e-3
"""Largest gap, in logits, that the rounding of differently shaped passes can explain in float32."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two decodings first differ.

    Attributes:
        index: of the first generated token that differs.
        gap: by how much the target prefers one of the two tokens there, in (warped, noisy) logits; None: one decoding
            is the beginning of the other.
        near_tie: rounding explains the gap.
    """

    index: int
    gap: float | None
    near_tie: bool


def first_difference(
    target: LanguageModel, prompt_ids: Sequence[int], one: Sequence[int], other: Sequence[int], params: SamplingParams
) -> Difference | None:
    """The first difference between two decodings of one prompt under one seed; None when they are equal."""
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if shared == len(one) == len(other):
        return None
    if shared in (len(one), len(other)):
        return Difference(shared, None, near_tie=False)
    seed, ids = params.seed or 0, [*prompt_ids, *one[:shared]]
    row, scores = prefill_scored(target, ids)
    state = None if params.constraint is None else followed(params.constraint.start(), one[:shared])
    draws = Draws(params, seed, ids, len(prompt_ids), state)
    logits = draws.warped(scores, 0, ()).astype(np.float64)
    target.close(row)
    if params.temperature > 0:
        logits += gumbel_noise(draws.key(0), len(logits))
    gap = abs(float(logits[one[shared]] - logits[other[shared]]))
    rounding = target.capabilities.rounding
    allowed = LARGEST_GAP if rounding is None else rounding
    return Difference(shared, gap, gap <= allowed)
