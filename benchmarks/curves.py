"""Curves of what a token takes (verified nodes, or seconds) over acceptance, and their ratio at equal acceptance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftree.bench.summary import Interval

_DRAWS = 1000
_REACHED = 0.97
"""Share of them that must have a value."""


class Point(NamedTuple):
    """One policy with one setting: [prompts] what it takes (verified nodes, or seconds), steps and tokens gained."""

    label: str
    taken: Tensor
    steps: Tensor
    tokens: Tensor


Curve = list[Point]


def weighted(curve: Curve, weights: Tensor) -> tuple[Tensor, Tensor]:
    """[D, points] MAL and what a token takes, with [D, prompts] weights of the prompts."""
    taken, steps, tokens = (torch.stack([p[i] for p in curve], 1) for i in (1, 2, 3))  # type: ignore[misc]
    return (weights @ tokens) / (weights @ steps), (weights @ taken) / (weights @ tokens)


def taken_at(mal: Tensor, curve: Curve, weights: Tensor) -> Tensor:
    """[D] what a token takes on a curve where its MAL is ``mal`` [D]; nan beyond its ends."""
    x, y = weighted(curve, weights)
    found = torch.full_like(mal, float("nan"))
    for i in range(x.shape[1] - 1):
        below, above = (x[:, i], y[:, i]), (x[:, i + 1], y[:, i + 1])
        share = (mal - below[0]) / (above[0] - below[0]).clamp(min=1e-9)
        inside = (share >= 0) & (share <= 1) & ~(found <= below[1])  # where noise lets MAL fall, the cheaper
        found = torch.where(inside, below[1] + share * (above[1] - below[1]), found)
    return found


def every_prompt(curve: Curve) -> Tensor:
    """[1, prompts] weights that count each prompt once."""
    return torch.ones(1, len(curve[0].taken), dtype=torch.float64)


def over_at_equal_mal(curve: Curve, base: Curve, at: int) -> Interval | None:
    """What a token takes on a curve over what it takes at a point of ``base``, at that point's MAL.

    Returns:
        with its 95% bootstrap interval over prompts; None: the curve does not reach that MAL, or in so many draws that
        an interval of the others would be too narrow.
    """
    whole, prompts = every_prompt(base), len(base[0].taken)
    draws = torch.randint(prompts, (_DRAWS, prompts), generator=torch.Generator().manual_seed(0))
    weights = torch.zeros(_DRAWS, prompts, dtype=torch.float64).scatter_add_(1, draws, torch.ones_like(draws).double())

    def ratios(w: Tensor) -> Tensor:
        mal, own = (column[:, at] for column in weighted(base, w))
        return taken_at(mal, curve, w) / own

    if (found := float(ratios(whole))) != found:
        return None
    every = ratios(weights)
    ends = every[~every.isnan()].sort().values
    if len(ends) < _REACHED * _DRAWS:
        return None
    low, high = (float(ends[int(q * (len(ends) - 1))]) for q in (0.025, 0.975))
    return Interval(found, low, high)
