"""Schemes that offer children drawn at random to the target distribution, and what draws these children.

They accept more than *match*, but only of trees whose shape never depends on a drawn sibling: ``Scheme.check`` rejects
what cannot promise that. Their rules are pure functions of distributions and uniform draws, in float64. At each node a
decision gives the token that is emitted there. Which tokens were drawn is known in draw order (that of the nodes'
numbers), and from what (``SampledTree``). p is the target distribution at a node, q the draft distribution, both
warped; norm(x) = x / sum(x).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..policies.base import Candidates, ChildSampler, Distributions, DraftDistribution, Frontier, Numbers
from ..request import Request
from ..sampling.warping import DRAFT_NOISE, derive_seed, gumbel_noise, largest, softmax, stream_key
from ..sampling.warping import draw as draw_one
from ..tree import ROOT, DraftTree
from .base import NodeByNode, UniformDraws, Visit, log


@dataclass(frozen=True, slots=True)
class SampledTree(DraftTree):
    """A tree whose children were drawn at random.

    Attributes:
        distributions: node (ROOT for the root) -> what its children were drawn from, in the order of their numbers.
    """

    distributions: Mapping[int, DraftDistribution] = field(default_factory=dict, repr=False)


def draft_logits(visit: Visit) -> NDArray[np.float64]:
    """[V] logits of the draft distribution that a node's children were drawn from.

    Raises:
        ConfigError: they were not.
    """
    q = visit.tree.distributions.get(visit.node) if isinstance(visit.tree, SampledTree) else None
    if q is None:
        raise ConfigError(
            "the drafter chose children where this verification needs them drawn: use verification 'match', or "
            "a drafter that draws them"
        )
    return q.dense(len(visit.logits))


Streams = Callable[[int], int]
"""Number of a draw among the children of one node -> the key of its noise."""


def streams_of(seed: int, position: int, node: int) -> Streams:
    """The keys of a node's draws.

    Args:
        seed: the request's.
        position: of the step's root: no two steps share it.
        node: number in the step's tree while it grows.
    """
    return lambda number: stream_key(derive_seed(seed, DRAFT_NOISE, node, number), position)


class RandomChildren(ChildSampler):
    """Draws children, and gives finished trees their distributions.

    At temperature 0 the children are the first candidates, which are the most probable ones.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        super().__init__(requests)
        self._distributions: list[dict[int, DraftDistribution]] = [{} for _ in requests]

    @abstractmethod
    def choose(self, logits: NDArray[np.floating], count: int, streams: Streams) -> Numbers:
        """[count] entries of [K] logits in draw order, at most as many as have positive probability."""

    def draw(self, frontier: Frontier, counts: Sequence[int], distributions: Distributions) -> list[Candidates]:
        children, nodes = [*frontier.candidates], [*zip(frontier.requests, frontier.nodes, strict=True)]
        drawn = [f for f, (b, _) in enumerate(nodes) if counts[f] and self.requests[b].params.temperature]
        for f, q in zip(drawn, distributions([nodes[f] for f in drawn]) if drawn else (), strict=True):
            b, node = nodes[f]
            request = self.requests[b]
            entries = self.choose(q.logits, counts[f], streams_of(request.seed, len(request.ids), node))
            tokens = entries if q.tokens is None else q.tokens[entries]
            children[f] = children[f]._replace(tokens=tokens.tolist(), logprobs=q.logits[entries].tolist())
            self._distributions[b][node] = q
        return children

    def finished(self, request: int, tree: DraftTree, numbers: Sequence[int]) -> DraftTree:
        old = enumerate([ROOT, *numbers], start=ROOT)
        drawn_from = self._distributions[request]
        distributions = {new: drawn_from[node] for new, node in old if node in drawn_from}
        columns = tree.tokens, tree.parents, tree.depths, tree.path_logprobs, tree.entropies
        return SampledTree(*columns, tree.part, distributions)


class WithoutReplacement(RandomChildren):
    """The k largest of logits + Gumbel noise, in order, are k draws without replacement.

    Yellott 1977; Kool et al., ICML 2019, "Stochastic Beams and Where to Find Them".
    """

    def choose(self, logits: NDArray[np.floating], count: int, streams: Streams) -> Numbers:
        return largest(logits + gumbel_noise(streams(0), len(logits)), count)


class WithReplacement(RandomChildren):
    """Every draw has noise of its own."""

    def choose(self, logits: NDArray[np.floating], count: int, streams: Streams) -> Numbers:
        return np.array([draw_one(logits, streams(number)) for number in range(count)])


class TopAndRest(RandomChildren):
    """The k - 1 most probable tokens, then one draw from the rest of q."""

    def choose(self, logits: NDArray[np.floating], count: int, streams: Streams) -> Numbers:
        top, rest = largest(logits, count - 1), logits.copy()
        rest[top] = -np.inf
        return np.append(top, draw_one(rest, streams(0)))


def residual(p: NDArray[np.float64], taken: NDArray[np.float64]) -> NDArray[np.float64]:
    """norm(max(p - taken, 0)); p where nothing is left, which has probability 0 apart from rounding."""
    rest = np.maximum(p - taken, 0)
    total = rest.sum()
    return rest / total if total > 0 else p


def _ratio(p: NDArray[np.float64], q: NDArray[np.float64], token: int) -> float:
    theirs = float(q[token])
    return float(p[token]) / theirs if theirs else math.inf


class MultiRound(NodeByNode):
    """Offer the drawn children one after the other to what is left of p (SpecInfer; without replacement: RSD, Sequoia).

    r = p; each child x, drawn from z, is accepted with probability min(1, r[x] / z[x]); a rejection leaves
    r = norm(max(r - z, 0)) and, without replacement, takes x out of z. The last rejection emits y ~ r.
    """

    name = "multi-round"
    summary = "children drawn without replacement, offered one by one to what is left of the target distribution"
    sampler: type[ChildSampler] | None = WithoutReplacement

    def decide(self, visit: Visit, draws: UniformDraws) -> int:
        left, logits = visit.p, draft_logits(visit)
        for token in visit.children:
            drawn = softmax(logits)
            if draws.accepts(min(1.0, _ratio(left, drawn, token))):
                return token
            left = residual(left, drawn)
            if self.sampler is WithoutReplacement:
                logits[token] = -np.inf
        return draws.draw(log(left), visit.depth)


class MultiRoundReplacement(MultiRound):
    """``MultiRound`` of children drawn with replacement."""

    name = "multi-round-replacement"
    summary = "multi-round with children drawn with replacement"
    sampler = WithReplacement


class TopAndOne(NodeByNode):
    """S = the k - 1 most probable children, one more x drawn from z = norm(q off S) (Hu et al., ICLR 2025).

    x is accepted with probability min(1, p[x] / z[x]); else y ~ norm(max(p - z, 0)), which may be in S. So the walk
    goes on with probability p(S) + sum off S of min(p, z).
    """

    name = "top1-residual"
    summary = "the k - 1 most probable children and one drawn from the rest; never below match with the k - 1"
    sampler = TopAndRest

    def decide(self, visit: Visit, draws: UniformDraws) -> int:
        *top, token = visit.children
        p, logits = visit.p, draft_logits(visit)
        logits[top] = -np.inf
        rest = softmax(logits)
        if draws.accepts(min(1.0, _ratio(p, rest, token))):
            return token
        return draws.draw(log(residual(p, rest)), visit.depth)
