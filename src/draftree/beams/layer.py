"""One layer of speculative beam sampling: how wide it is, and which drafted beams are accepted. Pure mathematics.

p is p_beam of the layer (Eq. 1): the joint distribution over (beam, next token) of the beams that were accepted in the
layer above, each counted as often as it is there. q is the joint distribution that the drafts were drawn from,
independently and with replacement, restricted to the same beams: drafts of a beam that was not accepted are rejected
like any draft with p = 0, so q may sum to less than 1. Both come warped (``laws.beam_distribution``).

Differences from the paper, which its own Theorem 3.1 needs: a draft x is accepted with probability min(1, p'(x) / q(x))
(Algorithm 1 prints the ratio upside down), q is subtracted once, and drafts are drawn with replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

Cell = tuple[int, int]


class Residuals:
    """What is left of p after 0, 1, 2, ... refusals: p_1 = p, p_{j+1} = norm(max(p_j - q, 0)).

    None of them is built: p_{j+1} = max(p - c_j q, 0) / N_j with c_1 = 1, N_j = sum(max(p - c_j q, 0)),
    c_{j+1} = c_j + N_j, because what has fallen to 0 stays 0. So sum(min(p_j, q)) = 1 - N_j / N_{j-1}.

    Args:
        p: [R, V] float64, sums to 1.
        q: [R, V] float64, sums to 1 or less.
    """

    def __init__(self, p: Tensor, q: Tensor) -> None:
        self.p, self.q = p, q
        self._factors, self._sums = [0.0], [1.0]

    def _upto(self, refused: int) -> None:
        while len(self._factors) <= refused:
            factor = self._factors[-1] + self._sums[-1]
            self._factors.append(factor)
            self._sums.append(float((self.p - factor * self.q).clamp_(min=0).sum()))

    def chance(self, cell: Cell, refused: int) -> float:
        """min(1, p'(x) / q(x)), the probability of accepting a draft x after so many refusals in a row."""
        self._upto(refused)
        p, q = float(self.p[cell]), float(self.q[cell])
        left, total = max(0.0, p - self._factors[refused] * q), self._sums[refused]
        return min(1.0, left / (total * q)) if total * q > 0 else float(left > 0)

    def law(self, refused: int) -> Tensor:
        """[R, V] p' after so many refusals, not normalised; p where nothing is left, which has probability 0."""
        self._upto(refused)
        if self._sums[refused] <= 0:
            return self.p
        return (self.p - self._factors[refused] * self.q).clamp_(min=0)

    def acceptance(self, drafts: int) -> list[float]:
        """[drafts] alpha_j = sum(min(p_j, q)), the probability of accepting a draft after j - 1 refusals (Eq. 4)."""
        self._upto(drafts)
        pairs = zip(self._sums[: drafts + 1], self._sums[1 : drafts + 1], strict=False)
        return [min(1.0, max(0.0, 1 - after / before)) if before > 0 else 0.0 for before, after in pairs]


def accepted_law(alphas: Sequence[float]) -> list[float]:
    """[m + 1] P(m, k): the probability that k of m drafts are accepted (Eq. 2 and 3).

    P(m, 0) = prod (1 - alpha_j), P(m, k) = sum_i alpha_i prod_{j<i} (1 - alpha_j) P(m - i, k - 1).
    """
    m = len(alphas)
    refused = [1.0]
    for alpha in alphas:
        refused.append(refused[-1] * (1 - alpha))
    first = [alpha * before for alpha, before in zip(alphas, refused, strict=False)]  # the i-th is the first accepted
    table = [[refused[n]] + [0.0] * m for n in range(m + 1)]
    for k in range(1, m + 1):
        for n in range(k, m + 1):
            table[n][k] = sum(first[i - 1] * table[n - i][k - 1] for i in range(1, n + 1))
    return table[m]


def width_for(alphas: Sequence[float], threshold: float, least: int, most: int) -> int:
    """The beams W_L of a layer: the most that are accepted with probability ``threshold`` (Eq. 7), at least ``least``
    (Eq. 6) and at most ``most``."""
    tail, width = 0.0, 0
    chances = accepted_law(alphas)
    for k in range(len(alphas), 0, -1):
        tail += chances[k]
        if tail >= threshold:
            width = k
            break
    return min(most, max(least, width))


class Verdict(NamedTuple):
    """What became of one layer's drafts.

    Attributes:
        cells: the layer's beams in the order they were found: (row of p, token).
        accepted: how many of them, the first ones, were drafted.
    """

    cells: list[Cell]
    accepted: int


Draw = Callable[[Tensor, Sequence[int]], list[Cell]]
"""(a law, places among the layer's beams) -> a draw from the law for each."""


def verify(
    residuals: Residuals, drafts: Sequence[Cell], width: int, accepts: Callable[[float], bool], draw: Draw
) -> Verdict:
    """Take ``width`` beams that are independent draws from p (Algorithm 1, lines 13 to 31, corrected).

    Args:
        residuals: of the layer.
        drafts: in draw order; a negative row: drafted below a beam that was not accepted.
        width: how many beams.
        accepts: throws a coin of this chance.
        draw: the target's own draws.
    """
    cells, refused = list[Cell](), 0
    for cell in drafts:
        if len(cells) == width:
            break
        if cell[0] >= 0 and accepts(residuals.chance(cell, refused)):
            cells.append(cell)
            refused = 0
        else:
            refused += 1
    accepted = len(cells)
    if accepted < width:
        cells += draw(residuals.law(refused), [accepted])
        cells += draw(residuals.p, range(accepted + 1, width)) if accepted + 1 < width else []
    return Verdict(cells, accepted)


def expected_layers(acceptance: float, depth: int) -> float:
    """1 + a + ... + a^d: expected layers of a step that drafts d of them, each accepted with probability a.

    Theorem 3.2 with a = min(t, beta). Exact where a is the same for all layers, whatever became of those above.
    """
    return sum(acceptance**layer for layer in range(depth + 1))
