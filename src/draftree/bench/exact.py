"""Do two decodings agree, and if not, was it a near-tie?

Floating-point results depend on the shape of a matrix product: a token's logits differ by about 1e-5 between a pass
over one token and a pass over a tree. Where the two best tokens are closer than that, either is the target's answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import SamplingParams
from ..models.base import LanguageModel
from ..sampling import Draws, gumbel_noise, warp

NEAR_TIE = 1e-3
"""Largest gap, in logits, that the rounding of differently shaped passes can explain in float32."""
NEAR_TIES = {"int8": 0.05}
"""The same for numerics where it is another: in int8 rounding moves the second digit of an activation now and then."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two decodings part.

    Attributes:
        index: of the first generated token that differs.
        gap: by how much the target prefers one of the two tokens there, in (warped, noisy) logits; infinite when
            one decoding is a beginning of the other.
        tie: largest gap that rounding explains.
    """

    index: int
    gap: float
    tie: float = NEAR_TIE

    @property
    def near_tie(self) -> bool:
        return self.gap <= self.tie


@torch.inference_mode()
def first_difference(
    target: LanguageModel,
    prompt_ids: Sequence[int],
    one: Sequence[int],
    other: Sequence[int],
    params: SamplingParams,
    seed: int = 0,
) -> Difference | None:
    """The first difference between two decodings of one prompt under one seed; None when they are equal."""
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if shared == len(one) == len(other):
        return None
    if shared in (len(one), len(other)):
        return Difference(shared, float("inf"))
    ids = [*prompt_ids, *one[:shared]]
    row = target.open(ids)
    draws = Draws([params], [seed], [ids])
    logits = draws.process(row.logits[None].float(), torch.empty((1, 0), dtype=torch.int64, device=row.logits.device))
    target.close(row)
    if params.temperature > 0:
        logits = warp(logits, params) + gumbel_noise([seed], [len(ids)], logits.shape[-1], logits.device)
    gap = float((logits[0, one[shared]] - logits[0, other[shared]]).abs())
    return Difference(shared, gap, NEAR_TIES.get(target.capabilities.numerics, NEAR_TIE))
