"""The distributions that beams are sampled from or searched by, and the draws from them.

Sampled beams: processors (target only), then a softmax give a beam's next-token distribution; with beam warp "token"
temperature, top-k, top-p and min-p come between the two, as where a single sequence is sampled. ``beam_distribution``
joins the beams; with beam warp "joint" it warps the joint distribution. Searched beams: a softmax, then processors, as
in transformers' beam search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import SamplingParams
from ..sampling import derive_seed, gumbel_noise, uniform, warp
from .params import BeamWarp


def target_distributions(
    logits: Tensor, params: SamplingParams, beam_warp: BeamWarp, histories: Sequence[Sequence[int]]
) -> Tensor:
    """[R, V] log-probabilities (nats) of the next token, whose sums score beams: float64 sampled, float32 searched.

    Args:
        logits: [R, V].
        params: how the request is decoded.
        beam_warp: where beams are sampled: "token" warps these rows, "joint" leaves that to ``beam_distribution``.
        histories: [R] token ids before each row's token, prompt included; read where there are processors.
    """
    if not params.temperature:
        return _processed(logits.float().log_softmax(-1), params, histories)
    rows = _processed(logits.float(), params, histories)
    return (warp(rows, params) if beam_warp == "token" else rows).double().log_softmax(-1)


def beam_distribution(
    scores: Sequence[float], counts: Sequence[int], logprobs: Tensor, params: SamplingParams, beam_warp: BeamWarp
) -> Tensor:
    """[R, V] float64 p_beam, or q_beam of a drafter: the probability of each cell (beam, token); sums to 1 (Eq. 1).

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
    copies = torch.tensor(counts).to(logprobs.device)
    cells = torch.tensor(scores, dtype=torch.float64).to(logprobs.device)[:, None] + logprobs
    if beam_warp == "joint":
        every = cells.repeat_interleave(copies, 0)
        cells = warp(every.reshape(1, -1), params).view_as(every)[copies.cumsum(0) - copies]
    cells = cells + copies.double().log()[:, None]
    return cells.flatten().softmax(0).view_as(cells)


def _processed(rows: Tensor, params: SamplingParams, histories: Sequence[Sequence[int]]) -> Tensor:
    if not params.processors:
        return rows
    done = []
    for row, history in zip(rows.split(1), histories, strict=True):
        ids = torch.tensor([list(history)]).to(rows.device, non_blocking=True)
        for processor in params.processors:
            row = processor(ids, row)
        done.append(row)
    return torch.cat(done)


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

    def draft_cells(self, cells: Tensor, count: int, depth: int) -> list[Cell]:
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

    def target_cells(self, cells: Tensor, numbers: Sequence[int], position: int) -> list[Cell]:
        """The target's own draws: the beam by its inverse distribution function, the token by Gumbel noise.

        Args:
            cells: [R, V] float64, proportional to the probability of each cell; need not sum to 1.
            numbers: of the draws among the beams at ``position``, no two the same.
            position: absolute, of the token.
        """
        seeds = [self.seed if n == 0 else derive_seed(self.seed, _DRAWS, n) for n in numbers]
        rows = _picked(cells.sum(-1), [uniform(derive_seed(self.seed, _BEAMS, n), position) for n in numbers])
        noise = gumbel_noise(seeds, [position] * len(seeds), cells.shape[-1], cells.device)
        return list(zip(rows, (cells[rows].log() + noise).argmax(-1).tolist(), strict=True))


def _picked(weights: Tensor, uniforms: Sequence[float]) -> list[int]:
    """The entries at which the running sum of ``weights`` passes each uniform draw's share of the whole."""
    sums = weights.cumsum(0)
    at = torch.tensor(uniforms, dtype=torch.float64).to(sums.device) * sums[-1]
    last = int((weights > 0).nonzero()[-1])  # rounding may carry a draw to the end
    found: list[int] = torch.searchsorted(sums, at, right=True).clamp(max=last).tolist()
    return found
