"""DSBD: Qin et al., "Dynamic-Width Speculative Beam Decoding": drafted beams, verified so that samples stay exact.

The rules on arrays: the distribution over beams (Eq. 1), what rejections leave of it, the width of a layer (Eq. 2 to 7)
and Algorithm 1. ``beams/`` decodes by them. Where we differ: Algorithm 1 is corrected (``verify``), and
``docs/how-it-works/beams.md`` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..config import SamplingParams
from ..sampling.warping import softmax, warp

Cell = tuple[int, int]
"""(row of a joint distribution over (beam, token), token)."""


def beam_distribution(
    scores: Sequence[float], counts: Sequence[int], logprobs: NDArray[np.floating], params: SamplingParams
) -> NDArray[np.float64]:
    """[R, V] p_beam, or q_beam of a drafter: the probability of each cell (beam, token); sums to 1 (Eq. 1).

    T o p_beam: temperature, top-k, top-p and min-p act on the cells log p(beam) + log p(token | beam) of all beams
    together. A beam that was drawn c times has c copies of its cells.

    Args:
        scores: [R] log-probabilities (nats) of the beams.
        counts: [R] how often each of them was drawn.
        logprobs: [R, V] log-probabilities of the next token (``target_distributions``, or a drafter's).
        params: temperature, top_k, top_p, min_p.
    """
    copies, cells = np.array(counts), np.array(scores, np.float64)[:, None] + logprobs
    every = cells.repeat(copies, 0)
    cells = warp(every.reshape(-1), params.warping).reshape(every.shape)[copies.cumsum() - copies]
    cells = cells + np.log(copies)[:, None]
    return softmax(cells.reshape(-1)).reshape(cells.shape)


class Residuals:
    """What is left of p after 0, 1, 2, ... rejections: p_1 = p, p_{j+1} = norm(max(p_j - q, 0)).

    None of them is built: p_{j+1} = max(p - c_j q, 0) / N_j with c_1 = 1, N_j = sum(max(p - c_j q, 0)),
    c_{j+1} = c_j + N_j, because what has fallen to 0 stays 0. So sum(min(p_j, q)) = 1 - N_j / N_{j-1}.

    Args:
        p: [R, V] float64, sums to 1.
        q: [R, V] float64, sums to 1 or less.
    """

    def __init__(self, p: NDArray[np.float64], q: NDArray[np.float64]) -> None:
        self.p, self.q = p, q
        self._factors, self._sums = [0.0], [1.0]

    def _upto(self, rejected: int) -> None:
        while len(self._factors) <= rejected:
            factor = self._factors[-1] + self._sums[-1]
            self._factors.append(factor)
            self._sums.append(float(np.maximum(self.p - factor * self.q, 0).sum()))

    def acceptance(self, cell: Cell, rejected: int) -> float:
        """min(1, p'(x) / q(x)), the probability of accepting a draft x after so many rejections in a row."""
        self._upto(rejected)
        p, q = float(self.p[cell]), float(self.q[cell])
        left, total = max(0.0, p - self._factors[rejected] * q), self._sums[rejected]
        return min(1.0, left / (total * q)) if total * q > 0 else float(left > 0)

    def distribution(self, rejected: int) -> NDArray[np.float64]:
        """[R, V] p' after so many rejections, not normalised; p where nothing is left, which has probability 0."""
        self._upto(rejected)
        if self._sums[rejected] <= 0:
            return self.p
        return np.maximum(self.p - self._factors[rejected] * self.q, 0)

    def mean_acceptances(self, drafts: int) -> list[float]:
        """[drafts] alpha_j = sum(min(p_j, q)), the probability of accepting a draft after j - 1 rejections (Eq. 4)."""
        self._upto(drafts)
        pairs = zip(self._sums[: drafts + 1], self._sums[1 : drafts + 1], strict=False)
        return [min(1.0, max(0.0, 1 - after / before)) if before > 0 else 0.0 for before, after in pairs]


def acceptance_distribution(alphas: Sequence[float]) -> NDArray[np.float64]:
    """[m + 1] P(m, k): the probability that k of m drafts are accepted (Eq. 2 and 3).

    P(m, 0) = prod (1 - alpha_j), P(m, k) = sum_i alpha_i prod_{j<i} (1 - alpha_j) P(m - i, k - 1).
    """
    m, accepts = len(alphas), np.array(alphas, np.float64)
    chances = np.zeros((m + 1, m + 1))  # of so many that are accepted, and so many rejected since the last of them
    chances[0, 0] = 1.0
    for _ in range(m):
        accepted = chances[:, :-1] @ accepts
        chances[:, 1:] = chances[:, :-1] * (1 - accepts)
        chances[:, 0] = np.append(0.0, accepted[:-1])
    probabilities: NDArray[np.float64] = chances.sum(1)
    return probabilities


def width_for(alphas: Sequence[float], threshold: float, least: int, most: int) -> int:
    """The beams W_L of a layer: the most that are accepted with probability ``threshold`` (Eq. 7), at least ``least``
    (Eq. 6) and at most ``most``."""
    tails = np.cumsum(acceptance_distribution(alphas)[::-1])[::-1]  # [k] P(at least k are accepted)
    width = max((k for k, tail in enumerate(tails.tolist()) if tail >= threshold), default=0)
    return min(most, max(least, width))


Draw = Callable[[NDArray[np.float64], Sequence[int]], list[Cell]]
"""(a distribution, numbers among the layer's beams) -> a draw from it for each."""


def verify(
    residuals: Residuals, drafts: Sequence[Cell], width: int, accepts: Callable[[float], bool], draw: Draw
) -> tuple[list[Cell], int]:
    """Take ``width`` beams that are independent draws from p (Algorithm 1, lines 13 to 31, corrected).

    Args:
        residuals: of the layer.
        drafts: in draw order; a negative row: drafted below a beam that was rejected.
        width: how many beams.
        accepts: an acceptance draw of this probability.
        draw: the target's own draws.

    Returns:
        (the layer's beams in the order they were found: (row of p, token); how many of them, the first ones, were
        drafted).
    """
    cells, rejected = list[Cell](), 0
    for cell in drafts:
        if len(cells) == width:
            break
        if cell[0] >= 0 and accepts(residuals.acceptance(cell, rejected)):
            cells.append(cell)
            rejected = 0
        else:
            rejected += 1
    accepted = len(cells)
    if accepted < width:
        cells += draw(residuals.distribution(rejected), [accepted])
        cells += draw(residuals.p, range(accepted + 1, width)) if accepted + 1 < width else []
    return cells, accepted
