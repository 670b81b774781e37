"""Schemes that accept a token with some probability, node by node on the way down a tree.

Pure functions of distributions and uniform draws, in float64. At each node a decision gives the token
that is emitted there; when it is a child's the walk goes down to that child, else it ends. Which tokens were drawn is
known in draw order (that of the nodes' numbers), and from what (``DraftTree.distributions``); nothing here ranks drawn
siblings by what they are.

p is the target distribution at a node, q the draft distribution, both warped; norm(x) = x / sum(x).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..sampling.warping import largest, softmax
from ..tree import ROOT, DraftDistribution, DraftTree


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one request gains from one target pass.

    Attributes:
        path: accepted nodes in order, by number; may be empty.
        tokens: the accepted tokens and then the target's own one (the bonus): ``len(path) + 1`` tokens.
    """

    path: list[int]
    tokens: list[int]


class UniformDraws(Protocol):
    """What chance decides in one step of one request."""

    def accepts(self, chance: float) -> bool:
        """A uniform draw, anew at each call; ``chance`` of 1 and more always accepts, 0 never."""

    def draw(self, logits: NDArray[np.floating], depth: int) -> int:
        """The token that the target emits ``depth`` tokens into this step, drawn from the softmax of [V] logits."""


TargetLogits = Callable[[int, Sequence[int]], NDArray[np.floating]]
"""(node, tokens emitted on the way to it) -> [V] the target's warped logits after it."""


class Visit(NamedTuple):
    """A node with children, for a decision.

    Attributes:
        logits: [V] the target's warped logits.
        children: drafted tokens in draw order, at least one.
        distribution: what they were drawn from; None where they were chosen.
        depth: 0 for the root.
        entropy: nats, of the draft distribution that the children were taken from.
    """

    logits: NDArray[np.floating]
    children: list[int]
    distribution: DraftDistribution | None
    depth: int
    entropy: float

    @property
    def p(self) -> NDArray[np.float64]:
        return softmax(self.logits)

    @property
    def draft_logits(self) -> NDArray[np.float64]:
        """[V] logits of q."""
        if self.distribution is None:
            raise ConfigError(
                "the drafter chose children where this verification needs them drawn: use verification 'match', or "
                "a drafter that draws them"
            )
        return self.distribution.dense(len(self.logits))


Decision = Callable[[Visit, UniformDraws], int]


def walk(tree: DraftTree, target: TargetLogits, decide: Decision, draws: UniformDraws) -> Verdict:
    """Go down ``tree`` for as long as the decisions name children; a leaf emits the target's own draw."""
    node, path, tokens = ROOT, list[int](), list[int]()
    while True:
        logits, children = target(node, tokens), tree.children(node)
        drafted = tree.tokens[children].tolist()
        if drafted:
            entropy = float(tree.entropies[children[0]])
            tokens.append(decide(Visit(logits, drafted, tree.distributions.get(node), len(tokens), entropy), draws))
        else:
            tokens.append(draws.draw(logits, len(tokens)))
        if tokens[-1] not in drafted:
            return Verdict(path, tokens)
        node = children[drafted.index(tokens[-1])]
        path.append(node)


def residual(p: NDArray[np.float64], taken: NDArray[np.float64]) -> NDArray[np.float64]:
    """norm(max(p - taken, 0)); p where nothing is left, which has probability 0 apart from rounding."""
    rest = np.maximum(p - taken, 0)
    total = rest.sum()
    return rest / total if total > 0 else p


def log(p: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return np.log(p)


def multi_round(visit: Visit, draws: UniformDraws, *, replacement: bool) -> int:
    """Offer the drawn children one after the other to what is left of p (SpecInfer; without replacement: RSD, Sequoia).

    r = p; each child x, drawn from z, is accepted with probability min(1, r[x] / z[x]); a rejection leaves
    r = norm(max(r - z, 0)) and, without replacement, takes x out of z. The last rejection emits y ~ r.
    """
    left, logits = visit.p, visit.draft_logits
    for token in visit.children:
        drawn = softmax(logits)
        if draws.accepts(min(1.0, _ratio(left, drawn, token))):
            return token
        left = residual(left, drawn)
        if not replacement:
            logits[token] = -np.inf
    return draws.draw(log(left), visit.depth)


def top_and_one(visit: Visit, draws: UniformDraws) -> int:
    """S = the k - 1 most probable children, one more x drawn from z = norm(q off S) (Hu et al., ICLR 2025).

    x is accepted with probability min(1, p[x] / z[x]); else y ~ norm(max(p - z, 0)), which may be in S. So the walk
    goes on with probability p(S) + sum off S of min(p, z).
    """
    *top, token = visit.children
    p, logits = visit.p, visit.draft_logits
    logits[top] = -np.inf
    rest = softmax(logits)
    if draws.accepts(min(1.0, _ratio(p, rest, token))):
        return token
    return draws.draw(log(residual(p, rest)), visit.depth)


def relaxed(visit: Visit, draws: UniformDraws, *, allowed: Callable[[float], int], both: bool = False) -> int:
    """*match*, but where the target is unsure one of its best tokens will do (lossy; Gunjur & Waitz, Section 6.1).

    The target draws y ~ p; when y is no child, the child that p ranks highest is taken if it is among the target's
    ``allowed(H)`` most probable tokens. H is the entropy of p in nats; with ``both``, the lesser of that and the
    entropy of the draft distribution, so that the draft must be unsure too.
    """
    token = draws.draw(visit.logits, visit.depth)
    if token in visit.children:
        return token
    p = visit.p
    entropy = -float((p * np.where(p > 0, log(p), 0.0)).sum())
    if both:
        entropy = min(entropy, visit.entropy)
    count = allowed(entropy)
    if not isinstance(count, int) or count < 0:
        raise ConfigError(f"relaxed: the function of entropy gave {count!r} for {entropy:.3g} nats: return 0 or more")
    for candidate in largest(visit.logits, min(count, len(visit.logits))).tolist():
        if candidate in visit.children and visit.logits[candidate] > -math.inf:
            return int(candidate)
    return token


def _ratio(p: NDArray[np.float64], q: NDArray[np.float64], token: int) -> float:
    theirs = float(q[token])
    return float(p[token]) / theirs if theirs else math.inf
