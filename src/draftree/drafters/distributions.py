"""Draft distributions: candidates of them, and how children are drawn from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..policies.base import Candidates, Numbers
from ..request import Request
from ..sampling.noise import DRAFT_NOISE, derive_seed, gumbel_noise, stream_key
from ..sampling.warping import draw as draw_one
from ..sampling.warping import largest
from ..tree import DraftDistribution, Drawing, Floats


class Drawn(NamedTuple):
    """The children of F nodes.

    Attributes:
        tokens: [F, K] int64 in draw order; entries past a node's count mean nothing.
        logprobs: [F, K] float32, what the drafter gives each of them (nats).
        distributions: [F] what they were drawn from; None where nothing was drawn.
    """

    tokens: Numbers
    logprobs: Floats
    distributions: Sequence[DraftDistribution | None]


def candidates_of(blends: Sequence[Mapping[int, float]], width: int) -> Candidates:
    """Candidates after nodes whose distributions are over few tokens, for which lists are faster than arrays.

    Args:
        blends: [F] token -> probability, in descending order; what is missing from 1 is one outcome of the entropy.
        width: most candidates of a node.
    """
    width = min(width, max(1, *map(len, blends)))
    tokens, logprobs, entropies = list[list[int]](), list[list[float]](), list[float]()
    for blend in blends:
        logs = [*map(math.log, blend.values())]
        missing = width - len(blend)
        tokens.append([*blend, *[0] * missing][:width])
        logprobs.append([*logs, *[-math.inf] * missing][:width])
        rest = 1 - sum(blend.values())
        entropies.append(-sum(map(mul, blend.values(), logs)) - (rest * math.log(rest) if rest > 0 else 0.0))
    return Candidates(np.array(tokens), np.array(logprobs, np.float32), np.array(entropies, np.float32))


def split(found: Candidates) -> list[Candidates]:
    """Candidates after each of F nodes apart."""
    return [
        Candidates(
            found.tokens[f : f + 1],
            found.logprobs[f : f + 1],
            found.entropies[f : f + 1],
            None if found.origins is None else found.origins[f : f + 1],
            distributions=found.distributions[f : f + 1],
        )
        for f in range(len(found.tokens))
    ]


def joined(parts: Sequence[Candidates]) -> Candidates:
    """Candidates of several calls as those of one, in their order; origins are lost where a part has none."""
    width = max(part.tokens.shape[1] for part in parts)

    def column(name: str, fill: float = 0) -> NDArray[Any]:
        own = [getattr(part, name) for part in parts]
        return np.concatenate([np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=fill) for x in own])

    return Candidates(
        column("tokens"),
        column("logprobs", -np.inf),
        np.concatenate([part.entropies for part in parts]),
        None if any(part.origins is None for part in parts) else column("origins"),
        distributions=[q for part in parts for q in part.distributions],
    )


class Key(NamedTuple):
    """What the noise of a node's children depends on.

    Attributes:
        seed: the request's.
        position: of the step's root: no two steps share it.
        node: number in the step's tree while it grows, ROOT for the root.
    """

    seed: int
    position: int
    node: int


def draw(logits: NDArray[np.floating], count: int, key: Key, drawing: Drawing) -> Numbers:
    """Draw the children of one node by the Gumbel-max trick.

    The k largest of logits + Gumbel noise, in order, are k draws without replacement (Yellott 1977; Kool et al., ICML
    2019, "Stochastic Beams and Where to Find Them"); with replacement every draw has noise of its own.

    Args:
        logits: [K] of the draft distribution.
        count: children, at most as many as have positive probability.
        drawing: how.

    Returns:
        [count] entries of ``logits`` in draw order.
    """

    def stream(number: int) -> int:
        return stream_key(derive_seed(key.seed, DRAFT_NOISE, key.node, number), key.position)

    if not drawing.random:
        return largest(logits, count)
    if drawing is Drawing.WITHOUT_REPLACEMENT:
        return largest(logits + gumbel_noise(stream(0), len(logits)), count)
    if drawing is Drawing.TOP_AND_ONE:
        top, rest = largest(logits, count - 1), logits.copy()
        rest[top] = -np.inf
        return np.append(top, draw_one(rest, stream(0)))
    return np.array([draw_one(logits, stream(number)) for number in range(count)])


def draw_children(
    nodes: Sequence[tuple[Request, int]],
    distributions: Sequence[DraftDistribution],
    counts: Numbers,
    drawing: Drawing,
) -> Drawn:
    """Draw ``counts`` ([F]) children for nodes, by request and number; at temperature 0 the most probable ones."""
    width = int(counts.max())
    tokens, logprobs = np.zeros((len(counts), width), np.int64), np.zeros((len(counts), width), np.float32)
    drawn: list[DraftDistribution | None] = [None] * len(counts)
    for f in np.flatnonzero(counts).tolist():
        (request, node), q, count = nodes[f], distributions[f], int(counts[f])
        random = request.params.temperature > 0
        key = Key(request.seed, len(request.ids), node)
        columns = draw(q.logits, count, key, drawing if random else Drawing.TOP)
        tokens[f, :count] = columns if q.tokens is None else q.tokens[columns]
        logprobs[f, :count] = q.logits[columns]
        drawn[f] = q if random else None
    return Drawn(tokens, logprobs, drawn)
