"""How one layer of beams follows another: searched (the most probable) or sampled (independent draws).

A rule reads the log-probabilities of the running beams' next tokens and the drafts of the layer, if it was drafted.

Sampled beams: processors (target only), then a softmax give a beam's next-token distribution; ``beam_distribution``
joins the beams and warps the joint distribution. Searched beams: a softmax, then processors, as in transformers' beam
search.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..config import SamplingParams
from ..draws import Draws
from ..papers.dsbd import Cell, Residuals, beam_distribution, verify, width_for
from ..sampling.warping import F, derive_seed, draw, largest, log_sum_exp, stream_key, uniform
from ..scores import edited
from .forest import BeamNode, BeamRequest


def target_distributions(
    rows: NDArray[np.float32],
    params: SamplingParams,
    draws: Draws | None = None,
    paths: Sequence[Sequence[int]] = (),
) -> NDArray[np.floating]:
    """[R, V] log-probabilities (nats) of the next token, whose sums score beams: float64 sampled, float32 searched.

    Args:
        rows: [R, V] logits.
        params: how the request is decoded.
        draws: of the request, whose penalties, biases and processors act on the rows; None: nothing acts on them.
        paths: [R] the tokens of the beams behind the prompt.
    """
    rows = rows if params.temperature else np.stack([_log_softmax(row) for row in rows])
    if draws is not None:
        pairs = zip(rows, paths, strict=True)
        rows = np.stack([draws.processed(edited(row, draws.edit(path)), path) for row, path in pairs])
    return np.stack([_log_softmax(row.astype(np.float64)) for row in rows]) if params.temperature else rows


def _log_softmax(row: NDArray[F]) -> NDArray[F]:
    logprobs: NDArray[F] = row - row.dtype.type(log_sum_exp(row))
    return logprobs


_ACCEPTANCE, _DRAFTS, _BEAMS, _DRAWS = 3, 4, 5, 6
"""Labels of streams that no other noise has (``sampling``)."""


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
        """Independent draws of drafted beams, by the inverse distribution function.

        Args:
            cells: [R, V] float64, probability of each cell; they sum to 1.
            count: how many.
            depth: layers below the step's root, 0 for the first drafted layer.
        """
        uniforms = [uniform(derive_seed(self.seed, _DRAFTS, depth, i), self.root) for i in range(count)]
        return [divmod(cell, cells.shape[1]) for cell in _picked(cells.reshape(-1), uniforms)]

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
    cells: list[int] = np.minimum(np.searchsorted(sums, at, side="right"), last).tolist()
    return cells


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """One drafted layer.

    Attributes:
        parents: [R] the nodes that its drafts follow.
        cells: [R, V] float64, the probability with which each (parent, token) was drawn; empty where drafts were
            chosen. It depends on all parents, accepted or not.
        drafts: in draw order, as often as they were drawn.
    """

    parents: Sequence[BeamNode]
    cells: NDArray[np.float64]
    drafts: Sequence[BeamNode]


@dataclass(slots=True, kw_only=True)
class DraftForest:
    """What is drafted below the running beams of one request.

    Attributes:
        layers: from the top down.
        nodes: (parent, token) -> node: one for each token that was drafted or drawn, however often.
    """

    layers: list[DraftLayer] = field(default_factory=list)
    nodes: dict[tuple[BeamNode, int], BeamNode] = field(default_factory=dict)

    def child(self, parent: BeamNode, token: int, score: float) -> BeamNode:
        """The node below ``parent``: the drafted one, which the target has seen, if there is one."""
        node = self.nodes.setdefault((parent, token), BeamNode(token, parent, parent.length + 1))
        node.score = score
        return node


def search(request: BeamRequest, logprobs: NDArray[np.floating], forest: DraftForest) -> None:
    """One layer of beam search, by transformers' rule (``GenerationMixin._beam_search``).

    Of the (1 + number of end tokens, at least 2) W most probable continuations those that end and are among the first W
    are finished; the first W of the others run on. All scores are float32.

    Args:
        request: its running beams are replaced.
        logprobs: [R, V] float32 log-probabilities after the running beams.
        forest: what was drafted.
    """
    beams, parents = request.beams, request.ends
    scores = (logprobs + np.array([n.score for n in parents], np.float32)[:, None]).reshape(-1)
    running, ended = list[BeamNode](), list[BeamNode]()
    for rank, index in enumerate(largest(scores, max(2, 1 + len(request.eos_ids)) * beams.width).tolist()):
        (row, token), score = divmod(index, logprobs.shape[-1]), float(scores[index])
        if score == -math.inf:
            break
        node = forest.child(parents[row], token, score)
        if request.ended(node) is None:
            running.append(node)
        elif rank < beams.width:
            ended.append(node)
    request.finish(ended)
    request.running = dict.fromkeys(running[: beams.width], 1)
    full = len(request.finished) == beams.width and beams.early_stopping is True
    request.done = full or not _improvable(request)


def _improvable(request: BeamRequest) -> bool:
    """The best running beam, at its length or at the greatest it may reach, scores above the worst finished one."""
    beams = request.beams
    if len(request.finished) < beams.width or not request.running:
        return bool(request.running)
    longest = beams.early_stopping == "never" and beams.length_penalty > 0
    length = request.limit if longest else request.length
    best: float = request.ends[0].score / length**beams.length_penalty
    return best > request.rank(request.finished[-1])


def sample(
    request: BeamRequest, logprobs: NDArray[np.floating], forest: DraftForest, depth: int, draws: BeamDraws
) -> None:
    """One layer of beam sampling (Eq. 1): independent draws from p_beam over (running beam, next token).

    Of W beams the finished ones stay, and only the others are drawn.

    Args:
        request: its running beams are replaced.
        logprobs: [R, V] float64 log-probabilities after the running beams (``target_distributions``).
        forest: what was drafted.
        depth: number of the layer below the step's root, from 0; beyond the drafts' last it is drawn without drafts.
        draws: the random draws of the step.
    """
    parents, counts = request.ends, list(request.running.values())
    p = beam_distribution([n.score for n in parents], counts, logprobs, request.params)
    position = len(request.ids) + request.length
    if depth < len(forest.layers):
        cells = _verified(request, p, forest.layers[depth], position, draws)
    else:
        cells = draws.target_cells(p, range(request.unfinished), position)
    drawn = Counter(
        forest.child(parents[row], token, parents[row].score + float(logprobs[row, token])) for row, token in cells
    )
    request.running = {node: count for node, count in drawn.items() if request.ended(node) is None}
    request.finish([node for node in drawn.elements() if request.ended(node) is not None])
    request.done = not request.running or not request.unfinished


def _verified(
    request: BeamRequest, p: NDArray[np.float64], layer: DraftLayer, position: int, draws: BeamDraws
) -> list[Cell]:
    """The beams of a drafted layer; p: [R, V] p_beam over the running beams."""
    beams, parents = request.beams, request.ends
    drafted = {parent: r for r, parent in enumerate(layer.parents)}
    rows = {parent: r for r, parent in enumerate(parents)}
    residuals = Residuals(p, layer.cells[[drafted[parent] for parent in parents]])
    width = request.unfinished
    if beams.threshold is not None:
        alphas = residuals.mean_acceptances(len(layer.drafts))
        width = width_for(alphas, beams.threshold, min(beams.min_width, width), width)
    drafts = [(rows[n.parent] if n.parent in rows else -1, n.token) for n in layer.drafts]
    draw = partial(draws.target_cells, position=position)
    cells, accepted = verify(residuals, drafts, width, draws.accepts, draw)
    request.accepted_widths.append(accepted)
    return cells
