"""The verification schemes: their rules, their names, and which trees each of them can verify.

Never drafts, never touches a cache. A scheme is lossless when its output follows the target distribution. *match*, the
default, is, for any tree: the target draws its own next token at every node of the walk; when a child equals the draw
the walk goes down to it, else the draw is emitted and the walk ends. The output is the target's own draws in order, so
it does not depend on the tree at all; the tree decides only how many of them one pass yields.

Schemes that offer *drawn* children to the target distribution accept more, but only of trees whose shape never depends
on a drawn sibling: ``check`` rejects what cannot promise that. Their rules are pure functions of distributions and
uniform draws, in float64. At each node a decision gives the token that is emitted there. Which tokens were drawn is
known in draw order (that of the nodes' numbers), and from what (``DraftTree.distributions``). p is the target
distribution at a node, q the draft distribution, both warped; norm(x) = x / sum(x).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..config import Checked
from ..draws import Draws, draw_at
from ..errors import ConfigError, call_named, check_tokens, unknown_name
from ..importing import import_named
from ..policies.base import GrowthPolicy
from ..sampling.warping import largest, softmax
from ..scores import Scores
from ..tree import ROOT, DraftDistribution, DraftTree, Drawing


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


def residual(p: NDArray[np.float64], taken: NDArray[np.float64]) -> NDArray[np.float64]:
    """norm(max(p - taken, 0)); p where nothing is left, which has probability 0 apart from rounding."""
    rest = np.maximum(p - taken, 0)
    total = rest.sum()
    return rest / total if total > 0 else p


def log(p: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return np.log(p)


def _ratio(p: NDArray[np.float64], q: NDArray[np.float64], token: int) -> float:
    theirs = float(q[token])
    return float(p[token]) / theirs if theirs else math.inf


def match(scores: Scores, firsts: Sequence[int], trees: Sequence[DraftTree], draws: Sequence[Draws]) -> list[Verdict]:
    """Walk down each tree along the target's own draws.

    What is drawn at a node mostly depends on its path alone: then all nodes of all trees are drawn in one call of
    ``scores``, and the walk is a look at the tree. Under a constraint, or a user's processors, only nodes that the walk
    visits are drawn, level by level.

    Args:
        scores: of the target's pass over the trees.
        firsts: [B] slot of each tree's node 0; its node n has slot firsts[b] + n, ROOT included.
        trees: [B].
        draws: [B] of their requests.
    """
    walking, together = list[int](), list[int]()
    slots, owners, paths = list[int](), list[Draws](), list[list[int]]()
    for b, (first, tree, own) in enumerate(zip(firsts, trees, draws, strict=True)):
        if own.walks:
            walking.append(b)
            continue
        together.append(b)
        root, count = len(paths), 1 + len(tree.tokens)
        slots += range(first + ROOT, first + ROOT + count)
        owners += [own] * count
        paths.append([])
        for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
            paths.append([*paths[root + parent - ROOT], token])
    verdicts = _walked(scores, firsts, trees, draws, walking) if walking else {}
    drawn = iter(draw_at(scores, slots, owners, paths) if together else ())
    for b in together:
        verdicts[b] = Verdict(*trees[b].follow([*islice(drawn, 1 + len(trees[b].tokens))]))
    return [*map(verdicts.__getitem__, range(len(trees)))]


def _walked(
    scores: Scores, firsts: Sequence[int], trees: Sequence[DraftTree], draws: Sequence[Draws], walking: Sequence[int]
) -> dict[int, Verdict]:
    """The walks of some of the requests, together, a draw of each in one turn."""
    found = {b: Verdict([], []) for b in walking}
    while walking:
        ends = [(found[b].path or [ROOT])[-1] for b in walking]
        slots, owners = [firsts[b] + end for b, end in zip(walking, ends, strict=True)], [draws[b] for b in walking]
        further, every = [], draw_at(scores, slots, owners, [found[b].tokens for b in walking])
        for b, end, token in zip(walking, ends, every, strict=True):
            tree, (path, tokens) = trees[b], (found[b].path, found[b].tokens)
            node = next((c for c in tree.children(end) if tree.tokens[c] == token), None)
            tokens.append(token)
            if node is not None:
                path.append(node)
                further.append(b)
        walking = further
    return found


COUPLED = "coupled"
CANDIDATES = {COUPLED: Drawing.COUPLED, "plain": Drawing.TOP}
"""Which tokens are candidates under match: the likeliest draws of the target given the noise that it shares, or the
most probable ones of the draft distribution alone (the papers' setting). Without a temperature both are the same."""


class Scheme(ABC):
    """Turns the target's logits over draft trees into accepted tokens.

    Attributes:
        name: as on the command line; by default the class's.
        summary: one line.
        drawing: how the children that it verifies must come out of the draft distribution.
        lossy: its output does not follow the target distribution.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    drawing: Drawing = Drawing.TOP
    lossy: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.name = vars(cls).get("name", cls.__name__)

    @property
    def candidates(self) -> str:
        """What its children are: "coupled", "plain" (``CANDIDATES``), or "drawn" at random."""
        return next((name for name, drawing in CANDIDATES.items() if drawing is self.drawing), "drawn")

    @abstractmethod
    def verify(
        self, scores: Scores, firsts: Sequence[int], trees: Sequence[DraftTree], draws: Sequence[Draws]
    ) -> list[Verdict]:
        """Verify a batch of trees (``match`` for the arguments)."""

    def check(self, policy: GrowthPolicy, nodes: int, learns: bool = False, method: str = "") -> None:
        """Raise ConfigError unless trees that ``policy`` shapes, of up to ``nodes`` nodes, can be verified.

        Args:
            learns: what the drafter predicts depends on other requests (``DraftSource.learns``).
            method: what people call the policy; by default its class.
        """
        if self.drawing.random and learns:
            raise ConfigError(
                f"verification {self.name} draws children: cascades and ensembles draw none, and what learns from "
                "other requests would not repeat a text under its seed: use verification match, or drafter auto"
            )
        if self.drawing.random and policy.by_value:
            raise ConfigError(
                f"verification {self.name} with {method or type(policy).__name__}, which ranks or prunes siblings by "
                "their probabilities, where they must be drawn: use verification match, or a method such as static"
            )


class Match(Scheme):
    """See ``match``; the text is the same with all ``CANDIDATES``."""

    name = "match"
    summary = "the target's own draw is followed for as long as it was drafted: the same text as AR decoding"

    def __init__(self, candidates: str = COUPLED) -> None:
        if candidates not in CANDIDATES:
            raise ConfigError(f"candidates are {candidates!r}: choose from {', '.join(CANDIDATES)}")
        self.drawing = CANDIDATES[candidates]

    verify = staticmethod(match)


class NodeByNode(Scheme):
    """A scheme that walks down one tree after the other, by a decision at each node that it visits."""

    @abstractmethod
    def decide(self, visit: Visit, draws: UniformDraws) -> int:
        """The token that is emitted at a node."""

    def accept(self, tree: DraftTree, target: TargetLogits, draws: UniformDraws) -> Verdict:
        """Go down ``tree`` for as long as the decisions name children; a leaf emits the target's own draw.

        Raises:
            ConfigError: a decision is no token of the vocabulary.
            RunError: ``decide`` raised.
        """
        name, node, path, tokens = f"verification {self.name}", ROOT, list[int](), list[int]()
        while True:
            logits, children = target(node, tokens), tree.children(node)
            drafted = tree.tokens[children].tolist()
            if drafted:
                entropy = float(tree.entropies[children[0]])
                visit = Visit(logits, drafted, tree.distributions.get(node), len(tokens), entropy)
                tokens.append(call_named(name, self._decided, visit, draws))
                check_tokens(name, tokens[-1:], len(logits))
            else:
                tokens.append(draws.draw(logits, len(tokens)))
            if tokens[-1] not in drafted:
                return Verdict(path, tokens)
            node = children[drafted.index(tokens[-1])]
            path.append(node)

    def _decided(self, visit: Visit, draws: UniformDraws) -> int:
        return index(self.decide(visit, draws))

    def verify(
        self, scores: Scores, firsts: Sequence[int], trees: Sequence[DraftTree], draws: Sequence[Draws]
    ) -> list[Verdict]:
        """Trees whose children were chosen because their request decodes greedily are matched."""
        chosen = [b for b, own in enumerate(draws) if own.params.temperature == 0 and not self.lossy]
        matched = match(scores, [firsts[b] for b in chosen], [trees[b] for b in chosen], [draws[b] for b in chosen])
        verdicts = dict(zip(chosen, matched, strict=True))
        for b, (first, tree, own) in enumerate(zip(firsts, trees, draws, strict=True)):
            if b not in verdicts:
                own.begin()
                verdicts[b] = self.accept(tree, _target_logits(scores, first, own), own)
        return [verdicts[b] for b in range(len(trees))]


def _target_logits(scores: Scores, first: int, draws: Draws) -> TargetLogits:
    return lambda node, drawn: draws.warped(scores, first + node, drawn)


class MultiRound(NodeByNode):
    """Offer the drawn children one after the other to what is left of p (SpecInfer; without replacement: RSD, Sequoia).

    r = p; each child x, drawn from z, is accepted with probability min(1, r[x] / z[x]); a rejection leaves
    r = norm(max(r - z, 0)) and, without replacement, takes x out of z. The last rejection emits y ~ r.
    """

    name = "multi-round"
    summary = "children drawn without replacement, offered one by one to what is left of the target distribution"
    drawing = Drawing.WITHOUT_REPLACEMENT

    def decide(self, visit: Visit, draws: UniformDraws) -> int:
        left, logits = visit.p, visit.draft_logits
        for token in visit.children:
            drawn = softmax(logits)
            if draws.accepts(min(1.0, _ratio(left, drawn, token))):
                return token
            left = residual(left, drawn)
            if self.drawing is Drawing.WITHOUT_REPLACEMENT:
                logits[token] = -np.inf
        return draws.draw(log(left), visit.depth)


class MultiRoundReplacement(MultiRound):
    """``MultiRound`` of children drawn with replacement."""

    name = "multi-round-replacement"
    summary = "multi-round with children drawn with replacement"
    drawing = Drawing.WITH_REPLACEMENT


class TopAndOne(NodeByNode):
    """S = the k - 1 most probable children, one more x drawn from z = norm(q off S) (Hu et al., ICLR 2025).

    x is accepted with probability min(1, p[x] / z[x]); else y ~ norm(max(p - z, 0)), which may be in S. So the walk
    goes on with probability p(S) + sum off S of min(p, z).
    """

    name = "top1-residual"
    summary = "the k - 1 most probable children and one drawn from the rest; never below match with the k - 1"
    drawing = Drawing.TOP_AND_ONE

    def decide(self, visit: Visit, draws: UniformDraws) -> int:
        *top, token = visit.children
        p, logits = visit.p, visit.draft_logits
        logits[top] = -np.inf
        rest = softmax(logits)
        if draws.accepts(min(1.0, _ratio(p, rest, token))):
            return token
        return draws.draw(log(residual(p, rest)), visit.depth)


def allowed_by_entropy(entropy: float) -> int:
    """The default of ``Relaxed``: 0 below 1 nat, then ceil(H)."""
    return math.ceil(entropy) if entropy >= 1 else 0


@dataclass(frozen=True, slots=True)
class Relaxed(Checked, NodeByNode):
    """*match*, but where the target is unsure one of its best tokens will do (lossy; Gunjur & Waitz, Section 6.1).

    The target draws y ~ p; when y is no child, the child that p ranks highest is taken if it is among the target's
    ``allowed(H)`` most probable tokens. At temperature 0 entropy and ranks are those at temperature 1.

    Attributes:
        allowed: entropy in nats -> how many of the target's most probable tokens will do.
        when: whose entropy H is: the target's, or with "both" the lesser of that and the entropy of the draft
            distribution, so that the draft must be unsure too (the paper's idea).

    Raises:
        ConfigError: ``when`` is none of them.
    """

    allowed: Callable[[float], int] = allowed_by_entropy
    when: Literal["target", "both"] = "target"

    name: ClassVar[str] = "relaxed"
    summary: ClassVar[str] = "lossy: match, but where the target's entropy is high one of its best tokens will do"
    lossy: ClassVar[bool] = True

    def decide(self, visit: Visit, draws: UniformDraws) -> int:
        token = draws.draw(visit.logits, visit.depth)
        if token in visit.children:
            return token
        p = visit.p
        entropy = -float((p * np.where(p > 0, log(p), 0.0)).sum())
        if self.when == "both":
            entropy = min(entropy, visit.entropy)
        count = self.allowed(entropy)
        if not isinstance(count, int) or count < 0:
            rule = "return 0 or more"
            raise ConfigError(f"relaxed: the function of entropy gave {count!r} for {entropy:.3g} nats: {rule}")
        for candidate in largest(visit.logits, min(count, len(visit.logits))).tolist():
            if candidate in visit.children and visit.logits[candidate] > -math.inf:
                return int(candidate)
        return token


SCHEMES: dict[str, Scheme] = {
    s.name: s for s in (Match(), MultiRound(), MultiRoundReplacement(), TopAndOne(), Relaxed())
}
DEFAULT_SCHEME = Match.name


def find_scheme(scheme: str | Scheme, candidates: str | None = None) -> Scheme:
    """A scheme by its name, or the scheme itself.

    Args:
        scheme: its name, or the scheme.
        candidates: of match, one of ``CANDIDATES``; None: as the scheme has them.

    Raises:
        UnknownNameError: there is no such scheme.
        ConfigError: there are no such candidates, or the scheme has one kind alone.
    """
    if candidates is not None:
        if not isinstance(found := find_scheme(scheme), Match):
            raise ConfigError(
                f"candidates are {candidates!r} but those of verification {found.name} are always {found.candidates}: "
                "leave candidates out, or use verification match"
            )
        chosen = copy(found)  # it may be a user's own
        chosen.drawing = Match(candidates).drawing
        return chosen
    if isinstance(scheme, Scheme):
        return scheme
    if scheme not in SCHEMES:
        raise unknown_name("verification", scheme, SCHEMES)
    return SCHEMES[scheme]


def read_scheme(text: str) -> str | Scheme:
    """The scheme that a command line names: MODULE:NAME is imported, another text is the name of a scheme.

    The attribute is a scheme, which is copied, or returns one when it is called without arguments.

    Raises:
        UnknownNameError: there is no such attribute.
        ConfigError: the module cannot be imported, or no scheme is returned.
        RunError: the call raised.
    """
    return import_named("verification", text, Scheme).make() if ":" in text else text  # type: ignore[type-abstract]
