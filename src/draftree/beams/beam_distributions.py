"""The distributions that beams are sampled from or searched by, and the draws from them.

Sampled beams: processors (target only), then a softmax give a beam's next-token distribution; with beam warp "token"
temperature, top-k, top-p and min-p come between the two, as where a single sequence is sampled. ``beam_distribution``
joins the beams; with beam warp "joint" it warps the joint distribution. Searched beams: a softmax, then processors, as
in transformers' beam search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..config import SamplingParams
from ..sampling.draws import Draws
from ..sampling.noise import derive_seed, stream_key, uniform
from ..sampling.warping import F, draw, log_sum_exp, softmax, warp
from ..scores import edited
from .params import BeamWarp


def target_distributions(
    rows: NDArray[np.float32], params: SamplingParams, beam_warp: BeamWarp, draws: Sequence[Draws] = ()
) -> NDArray[np.floating]:
    """[R, V] log-probabilities (nats) of the next token, whose sums score beams: float64 sampled, float32 searched.

    Args:
        rows: [R, V] logits.
        params: how the request is decoded.
        beam_warp: where beams are sampled: "token" warps these rows, "joint" leaves that to ``beam_distribution``.
        draws: [R] of the beams, whose penalties, biases and processors act on the rows; none: nothing acts on them.
    """
    rows = rows if params.temperature else np.stack([_log_softmax(row) for row in rows])
    if draws:
        rows = np.stack([own.processed(edited(row, own.edit(())), ()) for row, own in zip(rows, draws, strict=True)])
    if not params.temperature:
        return rows
    warped = [warp(row, params.warping) for row in rows] if beam_warp == "token" else rows
    return np.stack([_log_softmax(row.astype(np.float64)) for row in warped])


def _log_softmax(row: NDArray[F]) -> NDArray[F]:
    found: NDArray[F] = row - row.dtype.type(log_sum_exp(row))
    return found


def beam_distribution(
    scores: Sequence[float],
    counts: Sequence[int],
    logprobs: NDArray[np.floating],
    params: SamplingParams,
    beam_warp: BeamWarp,
) -> NDArray[np.float64]:
    """[R, V] p_beam, or q_beam of a drafter: the probability of each cell (beam, token); sums to 1 (Eq. 1).

    "token": p(beam) p(token | beam), normalised; the warp is in ``logprobs``, and so in the scores. "joint":
    T o p_beam, where temperature, top-k, top-p and min-p act on the cells log p(beam) + log p(token | beam) of all
    beams together.
    A beam that was drawn c times has c copies of its cells.

    Args:
        scores: [R] log-probabilities (nats) of the beams.
        counts: [R] how often each of them was drawn.
        logprobs: [R, V] log-probabilities of the next token (``target_distributions``, or a drafter's).
        params: temperature, top_k, top_p, min_p.
        beam_warp: what they act on.
    """
    copies, cells = np.array(counts), np.array(scores, np.float64)[:, None] + logprobs
    if beam_warp == "joint":
        every = cells.repeat(copies, 0)
        cells = warp(every.reshape(-1), params.warping).reshape(every.shape)[copies.cumsum() - copies]
    cells = cells + np.log(copies)[:, None]
    return softmax(cells.reshape(-1)).reshape(cells.shape)


_ACCEPTANCE, _DRAFTS, _BEAMS, _DRAWS = 3, 4, 5, 6
"""Labels of streams that no other noise has (``sampling``)."""

Cell = tuple[int, int]
"""(row of a joint distribution over (beam, token), token)."""


@dataclass(slots=True)
class BeamDraws:
    """The random draws of one step of one request, by counter-based noise.

    Attributes:
        seed: the request's.
        root: absolute position of the last token that all of the step's beams had before it.
    """

    seed: int
    root: int
    _accepting: int = 0

    def accepts(self, probability: float) -> bool:
        """A new acceptance draw at each call; 1 and more always accepts, 0 never."""
        self._accepting += 1
        return uniform(derive_seed(self.seed, _ACCEPTANCE, self._accepting), self.root) <= probability

    def draft_cells(self, cells: NDArray[np.float64], count: int, depth: int) -> list[Cell]:
        """Independent draws of drafted beams, by inverse distribution functions.

        Args:
            cells: [R, V] float64, probability of each cell; they sum to 1.
            count: how many.
            depth: layers below the step's root, 0 for the first drafted layer.
        """
        keys = [derive_seed(self.seed, _DRAFTS, depth, i) for i in range(count)]
        rows = _picked(cells.sum(-1), [uniform(key, self.root) for key in keys])
        uniforms = [uniform(derive_seed(key, _DRAWS), self.root) for key in keys]
        tokens = [0] * count
        for row in set(rows):
            own = [i for i in range(count) if rows[i] == row]
            for i, token in zip(own, _picked(cells[row], [uniforms[i] for i in own]), strict=True):
                tokens[i] = token
        return list(zip(rows, tokens, strict=True))

    def target_cells(self, cells: NDArray[np.float64], numbers: Sequence[int], position: int) -> list[Cell]:
        """The target's own draws: the beam by its inverse distribution function, the token by Gumbel noise.

        Args:
            cells: [R, V] float64, proportional to the probability of each cell; need not sum to 1.
            numbers: of the draws among the beams at ``position``, no two the same.
            position: absolute, of the token.
        """
        seeds = [self.seed if n == 0 else derive_seed(self.seed, _DRAWS, n) for n in numbers]
        rows = _picked(cells.sum(-1), [uniform(derive_seed(self.seed, _BEAMS, n), position) for n in numbers])
        with np.errstate(divide="ignore"):
            tokens = [
                draw(np.log(cells[row]), stream_key(seed, position)) for row, seed in zip(rows, seeds, strict=True)
            ]
        return list(zip(rows, tokens, strict=True))


def _picked(weights: NDArray[np.float64], uniforms: Sequence[float]) -> list[int]:
    sums = weights.cumsum()
    at = np.array(uniforms) * sums[-1]
    last = int(np.flatnonzero(weights > 0)[-1])  # rounding may carry a draw to the end
    found: list[int] = np.minimum(np.searchsorted(sums, at, side="right"), last).tolist()
    return found
