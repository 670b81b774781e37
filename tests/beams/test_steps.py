"""Theorem 3.2, the expected layers of a step, by exact enumeration: what of it holds, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftree.beams import layers as rules
from draftree.beams.forest import BeamParams, BeamRequest
from draftree.drafters.draft_model import ModelSource
from draftree.papers.dsbd import Cell, Residuals, acceptance_distribution, verify

from ..toy import ToyModel
from ..verify.chances import Chance, outcomes
from .test_sampling import PLAIN, PROMPT, Scriptable, Scripted, toys


def expected_layers(acceptance: float, depth: int) -> float:
    """1 + a + ... + a^d: expected layers of a step that drafts d of them, each accepted with probability a.

    Theorem 3.2 with a = min(t, beta). Exact where a is the same for all layers, whatever became of those above.
    """
    return sum(acceptance**layer for layer in range(depth + 1))


class Judged(NamedTuple):
    """One drafted layer: its probability of being accepted by Eq. 2 to 7, beta by the same, and what became of it."""

    chance: float
    beta: float
    accepted: bool


class Step(NamedTuple):
    """One way that a step can go: its drafted layers as far as all were accepted, layers gained, and probability."""

    layers: list[Judged]
    gained: int
    probability: float


Models = tuple[ToyModel, ToyModel]


def steps(models: Models, beams: BeamParams, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Every way that the step behind the prefill can go."""
    seen: list[Judged] = []

    def observed(
        residuals: Residuals,
        drafts: Sequence[Cell],
        width: int,
        accepts: Callable[[float], bool],
        draw: Callable[[NDArray[np.float64], Sequence[int]], list[Cell]],
    ) -> tuple[list[Cell], int]:
        distribution = acceptance_distribution(residuals.mean_acceptances(len(drafts)))
        found, accepted = verify(residuals, drafts, width, accepts, draw)
        if all(layer.accepted for layer in seen):
            seen.append(Judged(sum(distribution[width:]), sum(distribution[beams.min_width :]), accepted == width))
        return found, accepted

    monkeypatch.setattr(rules, "verify", observed)

    def program(chance: Chance) -> tuple[list[Judged], int]:
        engine = Scriptable(models[0], ModelSource(models[1], models[1].capabilities.vocab_size))
        engine.script = Scripted(chance)
        request = BeamRequest(PROMPT, PLAIN, beams, 3 + (beams.depth or 0), frozenset())
        try:
            engine.open(request)
            seen.clear()
            engine.step([request])
        finally:
            engine.close(request)
        return list(seen), request.stats.tokens - 1

    return [Step(layers, gained, chance) for (layers, gained), chance in outcomes(program)]


def mean(made: Sequence[Step], of: Callable[[Step], float]) -> float:
    return sum(step.probability * of(step) for step in made)


def paper_layers(step: Step) -> int:
    """Layers of Algorithm 1, which a layer with too few accepted drafts ends."""
    return 1 + sum(layer.accepted for layer in step.layers)


class Memoryless(ToyModel):
    """Every token has one distribution, whatever came before it."""

    def __init__(self, distribution: Sequence[float]) -> None:
        super().__init__(len(distribution), dtype=torch.float64)
        self._distribution = torch.tensor(distribution, dtype=torch.float64).log()

    def after(self, ids: Sequence[int]) -> Tensor:
        return self._distribution


ALIKE = Memoryless([0.5, 0.3, 0.2]), Memoryless([0.2, 0.2, 0.6])
ALPHA = 0.6
"""sum(min(p, q)) of these."""


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_theorem_is_exact_where_all_layers_are_alike(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One draft a layer of models without memory: beta is alpha in every layer, whatever came before it."""
    made = steps(ALIKE, BeamParams(width=1, draft_width=1, depth=depth), monkeypatch)
    assert mean(made, lambda step: step.gained) == pytest.approx(expected_layers(ALPHA, depth), abs=1e-6)
    assert expected_layers(ALPHA, depth) == pytest.approx((1 - ALPHA ** (depth + 1)) / (1 - ALPHA))


def test_the_theorem_takes_the_threshold_for_the_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is printed to be accepted with probability min(t, beta), but its width is a whole number that at least t
    allows: here 0.6 for t = 0.5. So with t < beta the theorem gives too little."""
    made = steps(ALIKE, BeamParams(width=1, draft_width=1, depth=2, threshold=0.5), monkeypatch)
    assert mean(made, lambda step: step.gained) == pytest.approx(expected_layers(ALPHA, 2), abs=1e-6)
    assert expected_layers(0.5, 2) < expected_layers(ALPHA, 2) - 0.2


def test_the_theorem_holds_with_a_threshold_above_beta(monkeypatch: pytest.MonkeyPatch) -> None:
    made = steps(ALIKE, BeamParams(width=1, draft_width=1, depth=2, threshold=0.9), monkeypatch)
    assert mean(made, lambda step: step.gained) == pytest.approx(expected_layers(min(0.9, ALPHA), 2), abs=1e-6)


SETTINGS = [
    BeamParams(width=1, draft_width=2, depth=2),
    BeamParams(width=1, draft_width=2, depth=2, threshold=0.7),
    BeamParams(width=2, draft_width=2, depth=1, threshold=0.3),
    BeamParams(width=2, draft_width=3, depth=1, threshold=0.9),
    BeamParams(width=2, draft_width=2, depth=1),
]


@pytest.mark.parametrize("beams", SETTINGS)
def test_the_expected_layers_are_sums_of_products_of_each_layers_own_probability(
    beams: BeamParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E[steps] = sum over d of the probability that d layers are accepted, each given those above by Eq. 2 to 7; and
    with b the least beta, sum of min(t, b)^d is a lower bound. Ours go on where a corrected layer was drafted."""
    made = steps(toys(2), beams, monkeypatch)
    exact = mean(made, paper_layers)
    assert exact == pytest.approx(1 + mean(made, lambda step: sum(layer.chance for layer in step.layers)), abs=1e-12)
    assert mean(made, lambda step: step.gained) >= exact - 1e-12
    layers = [layer for step in made for layer in step.layers]
    if beams.threshold is not None:
        assert all(layer.chance >= min(beams.threshold, layer.beta) - 1e-12 for layer in layers)
    worst = min(layer.beta if beams.threshold is not None else layer.chance for layer in layers)
    least = expected_layers(min(1.0 if beams.threshold is None else beams.threshold, worst), beams.depth)
    assert least <= exact + 1e-12


def test_the_mean_beta_gives_other_layers_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The theorem puts the mean of beta for that of each layer and their products for independent: not so here."""
    made = steps(toys(2), SETTINGS[0], monkeypatch)
    reached = mean(made, lambda step: len(step.layers))
    beta = mean(made, lambda step: sum(layer.beta for layer in step.layers)) / reached
    assert abs(mean(made, paper_layers) - expected_layers(beta, 2)) > 1e-3
