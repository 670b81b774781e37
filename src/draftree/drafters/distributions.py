"""Draft distributions: candidates of them, and how children are drawn from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..policies.base import Candidates, Numbers
from ..request import Request
from ..sampling.warping import DRAFT_NOISE, derive_seed, gumbel_noise, largest, stream_key
from ..sampling.warping import draw as draw_one
from ..scores import Top
from ..tree import DraftDistribution, Drawing


class Drawn(NamedTuple):
    """The children that were drawn for one node.

    Attributes:
        tokens: in draw order.
        logprobs: what the drafter gives each of them (nats).
        distribution: what they were drawn from; None: nothing was drawn at random.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    distribution: DraftDistribution | None


def candidates_of(blend: Mapping[int, float], width: int) -> Candidates:
    """Candidates of a distribution over few tokens.

    Args:
        blend: token -> probability, in descending order; what is missing from 1 is one outcome of the entropy.
        width: most candidates.
    """
    logs, rest = [*map(math.log, blend.values())], 1 - sum(blend.values())
    entropy = -sum(map(mul, blend.values(), logs)) - (rest * math.log(rest) if rest > 0 else 0.0)
    return Candidates([*blend][:width], logs[:width], entropy)


def candidates_of_top(found: Top, distributions: Sequence[DraftDistribution]) -> list[Candidates]:
    """Candidates of nodes by scores of a pass; ``distributions``: whole ones, or none."""
    rows = zip(found.tokens.tolist(), found.logprobs.tolist(), found.entropies.tolist(), strict=True)
    candidates = []
    for (tokens, logprobs, entropy), q in zip_longest(rows, distributions):
        count = len(logprobs) if logprobs[-1] > -math.inf else sum([x > -math.inf for x in logprobs])
        candidates.append(Candidates(tokens[:count], logprobs[:count], entropy, q))
    return candidates


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
    counts: Sequence[int],
    drawing: Drawing,
) -> list[Drawn]:
    """Draw ``counts`` children for nodes, by request and number; at temperature 0 the most probable ones."""
    drawn = []
    for (request, node), q, count in zip(nodes, distributions, counts, strict=True):
        random = request.params.temperature > 0
        key = Key(request.seed, len(request.ids), node)
        at = draw(q.logits, count, key, drawing if random else Drawing.TOP) if count else np.zeros(0, np.int64)
        tokens = at if q.tokens is None else q.tokens[at]
        drawn.append(Drawn(tokens.tolist(), q.logits[at].tolist(), q if random and count else None))
    return drawn
