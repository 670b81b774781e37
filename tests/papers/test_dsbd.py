"""One layer of beams: what is accepted, by exact enumeration, its width, and what must fail the same test."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from draftree.papers.dsbd import Cell, Residuals, acceptance_distribution, verify, width_for

from ..verify.chances import Chance, outcomes

ROWS, VOCAB = 2, 3

Cells = NDArray[np.float64]


def distributions(seed: int, dead: float = 0.0) -> tuple[Cells, Cells]:
    """p and q over (row, token); a share ``dead`` of q's mass belongs to beams that were not accepted."""
    rng = torch.Generator().manual_seed(seed)
    p, q = torch.rand((2, ROWS, VOCAB), generator=rng, dtype=torch.float64).pow(2).numpy()
    return p / p.sum(), q / q.sum() * (1 - dead)


def cells() -> list[Cell]:
    return list(product(range(ROWS), range(VOCAB)))


def drawn(chance: Chance, distribution: Cells, count: int) -> list[Cell]:
    flat = (distribution / distribution.sum()).flatten().tolist()
    return [cells()[chance.choose(flat)] for _ in range(count)]


def with_replacement(chance: Chance, q: Cells, count: int) -> list[Cell]:
    """Drafts: cells of q, or (-1, 0) with what is left to 1."""
    rest = 1 - float(q.sum())
    flat = [*q.flatten().tolist(), rest if rest > 1e-12 else 0.0]
    places = [*cells(), (-1, 0)]
    return [places[chance.choose(flat)] for _ in range(count)]


def without_replacement(chance: Chance, q: Cells, count: int) -> list[Cell]:
    """As the paper's code draws them."""
    left, found = q.copy(), list[Cell]()
    for _ in range(count):
        found += drawn(chance, left, 1)
        left[found[-1]] = 0
    return found


def variation(
    p: Cells,
    q: Cells,
    drafts: int,
    width: int,
    residuals: Callable[[Cells, Cells], Residuals] = Residuals,
    draw: Callable[[Chance, Cells, int], list[Cell]] = with_replacement,
) -> float:
    """Total variation between the layer's beams and ``width`` independent draws from p, over all that chance can do."""

    def program(chance: Chance) -> tuple[Cell, ...]:
        return tuple(
            verify(
                residuals(p, q),
                draw(chance, q, drafts),
                width,
                chance.accepts,
                lambda distribution, numbers: drawn(chance, distribution, len(numbers)),
            )[0]
        )

    found: dict[tuple[Cell, ...], float] = defaultdict(float)
    for beams, probability in outcomes(program):
        found[beams] += probability
    want = {beams: math.prod(float(p[cell]) for cell in beams) for beams in product(cells(), repeat=width)}
    assert set(found) <= set(want)
    return 0.5 * sum(abs(found[beams] - chance) for beams, chance in want.items())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("drafts", "width"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_accepted_beams_are_independent_draws_from_the_targets_distribution(seed: int, drafts: int, width: int) -> None:
    assert variation(*distributions(seed), drafts, width) < 1e-12


@pytest.mark.parametrize("dead", [0.3, 1.0])
def test_drafts_of_refused_beams_count_as_refused(dead: float) -> None:
    assert variation(*distributions(4, dead), 3, 2) < 1e-12


def test_equal_distributions_are_always_accepted() -> None:
    p, _ = distributions(0)
    for (_, accepted), _ in outcomes(
        lambda chance: verify(Residuals(p, p.copy()), with_replacement(chance, p, 2), 2, chance.accepts, never)
    ):
        assert accepted == 2


def never(distribution: Cells, numbers: Sequence[int]) -> list[Cell]:
    raise AssertionError("nothing is left to draw")


class Upside(Residuals):
    """The ratio as Algorithm 1 prints it."""

    def acceptance(self, cell: Cell, rejected: int) -> float:
        distribution = self.distribution(rejected)
        p = float(distribution[cell] / distribution.sum())
        return min(1.0, float(self.q[cell]) / p) if p else 1.0


class Twice(Residuals):
    """q subtracted twice, as in the paper's code."""

    def _upto(self, rejected: int) -> None:
        while len(self._factors) <= rejected:
            self._factors.append(self._factors[-1] + 2 * self._sums[-1])
            self._sums.append(float(np.maximum(self.p - self._factors[-1] * self.q, 0).sum()))


def test_the_printed_ratio_is_caught() -> None:
    assert variation(*distributions(0), 2, 2, residuals=Upside) > 1e-3


def test_subtracting_twice_is_caught() -> None:
    assert variation(*distributions(0), 2, 2, residuals=Twice) > 1e-3


def test_drawing_without_replacement_is_caught() -> None:
    assert variation(*distributions(0), 2, 2, draw=without_replacement) > 1e-3


def test_leaving_out_dead_drafts_without_renormalising_their_distribution_is_caught() -> None:
    """To count them as refused, or to leave them out and renormalise q: either is lossless, the mixture is not."""

    def living(chance: Chance, q: Cells, count: int) -> list[Cell]:
        return [cell for cell in with_replacement(chance, q, count) if cell[0] >= 0]

    assert variation(*distributions(4, 0.5), 2, 1, draw=living) > 1e-3


def test_residuals_are_those_of_the_definition() -> None:
    p, q = distributions(1)
    made, left = Residuals(p, q), p
    for refused, alpha in enumerate(made.mean_acceptances(4)):
        np.testing.assert_allclose(made.distribution(refused) / made.distribution(refused).sum(), left, rtol=1e-9)
        assert alpha == pytest.approx(float(np.minimum(left, q).sum()), abs=1e-12)
        left = np.maximum(left - q, 0)
        left = left / left.sum()


GOLDEN = np.array([[0.5, 0.3, 0.2]]), np.array([[0.2, 0.2, 0.6]])


def test_the_distribution_of_accepted_drafts_is_that_of_the_golden_example() -> None:
    assert acceptance_distribution(Residuals(*GOLDEN).mean_acceptances(2)) == pytest.approx(
        [0.24, 0.40, 0.36], abs=1e-12
    )


def test_the_references_code_gets_another_distribution() -> None:
    assert acceptance_distribution(Twice(*GOLDEN).mean_acceptances(2)) != pytest.approx([0.24, 0.40, 0.36], abs=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_the_distribution_of_accepted_drafts_is_that_of_the_rounds(seed: int) -> None:
    p, q = distributions(seed, 0.2)
    counts = [0.0] * 4
    for (_, accepted), probability in outcomes(
        lambda chance: verify(
            Residuals(p, q),
            with_replacement(chance, q, 3),
            4,
            chance.accepts,
            lambda distribution, n: [(0, 0)] * len(n),
        )
    ):
        counts[accepted] += probability
    assert acceptance_distribution(Residuals(p, q).mean_acceptances(3)) == pytest.approx(counts, abs=1e-12)


@pytest.mark.parametrize(
    ("threshold", "least", "most", "width"),
    [
        (0.30, 1, 4, 2),
        (0.36, 1, 4, 2),
        (0.37, 1, 4, 1),
        (0.76, 1, 4, 1),
        (0.77, 1, 4, 1),
        (0.77, 2, 4, 2),
        (0.3, 1, 1, 1),
    ],
)
def test_the_width_is_the_most_that_are_accepted_often_enough(
    threshold: float, least: int, most: int, width: int
) -> None:
    """P(at least 2) = 0.36 and P(at least 1) = 0.76 in the golden example (Eq. 6 and 7)."""
    assert width_for(Residuals(*GOLDEN).mean_acceptances(2), threshold - 1e-9, least, most) == width
