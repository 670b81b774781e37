"""The verification schemes by name, and which trees each of them can verify. Never drafts, never touches a cache.

A scheme is lossless when its output follows the target distribution. *match*, the default, is, for any tree: the target
draws its own next token at every node of the walk; when a child equals the draw the walk goes down to it, else the draw
is emitted and the walk ends. The output is the target's own draws in order, so it does not depend on the tree at all;
the tree decides only how many of them one pass yields.

Schemes that offer *drawn* children to the target distribution accept more, but only of trees whose shape never depends
on a drawn sibling: ``check`` rejects what cannot promise that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..config import Checked
from ..errors import ConfigError, unknown_name
from ..policies.base import GrowthPolicy
from ..sampling.draws import DrawPlace, Draws, draw_at
from ..scores import Scores
from ..tree import ROOT, DraftTree, Drawing
from .rejection import TargetLogits, UniformDraws, Verdict, Visit, multi_round, relaxed, top_and_one, walk


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
    places, together, walking = list[DrawPlace](), list[int](), list[int]()
    for b, own in enumerate(draws):
        if own.walks:
            walking.append(b)
        else:
            together.append(b)
            places += _places(own, firsts[b], trees[b])
    verdicts = _walked(scores, firsts, trees, draws, walking) if walking else {}
    drawn, at = draw_at(scores, places) if places else [], 0
    for b in together:
        verdicts[b] = _followed(trees[b], drawn[at : at + 1 + len(trees[b])])
        at += 1 + len(trees[b])
    return [verdicts[b] for b in range(len(trees))]


def _places(draws: Draws, first: int, tree: DraftTree) -> list[DrawPlace]:
    """Of the root, and then of each node."""
    places = [DrawPlace(draws, first + ROOT, [])]
    for slot, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True), start=first):
        places.append(DrawPlace(draws, slot, [*places[parent - ROOT].drawn, token]))
    return places


def _followed(tree: DraftTree, drawn: Sequence[int]) -> Verdict:
    """The walk along what was drawn at the root and at each node; of equal siblings it goes to the first."""
    node, path, tokens = ROOT, list[int](), [drawn[0]]
    for child, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        if parent == node and token == tokens[-1]:
            node = child
            path.append(child)
            tokens.append(drawn[child - ROOT])
    return Verdict(path, tokens)


def _walked(
    scores: Scores, firsts: Sequence[int], trees: Sequence[DraftTree], draws: Sequence[Draws], walking: Sequence[int]
) -> dict[int, Verdict]:
    """The walks of some of the requests, together, a draw of each in one turn."""
    found = {b: Verdict([], []) for b in walking}
    while walking:
        places = []
        for b in walking:
            path, tokens = found[b].path, found[b].tokens
            places.append(DrawPlace(draws[b], firsts[b] + (path[-1] if path else ROOT), tokens))
        further = []
        for b, token in zip(walking, draw_at(scores, places), strict=True):
            tree, (path, tokens) = trees[b], (found[b].path, found[b].tokens)
            node = next((c for c in tree.children(path[-1] if path else ROOT) if tree.tokens[c] == token), None)
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
        name: as on the command line.
        summary: one line.
        drawing: how the children that it verifies must come out of the draft distribution.
        lossy: its output does not follow the target distribution.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    drawing: Drawing = Drawing.TOP
    lossy: ClassVar[bool] = False

    @property
    def candidates(self) -> str:
        """What its children are: "coupled", "plain" (``CANDIDATES``), or "drawn" at random."""
        return next((name for name, drawing in CANDIDATES.items() if drawing is self.drawing), "drawn")

    @abstractmethod
    def verify(
        self, scores: Scores, firsts: Sequence[int], trees: Sequence[DraftTree], draws: Sequence[Draws]
    ) -> list[Verdict]:
        """Verify a batch of trees (``match.match`` for the arguments)."""

    def check(self, policy: GrowthPolicy, nodes: int, learns: bool = False, method: str = "") -> None:
        """Raise ConfigError unless trees that ``policy`` shapes, of up to ``nodes`` nodes, can be verified.

        Args:
            learns: what the drafter predicts depends on other requests (``DraftSource.learns``).
            method: what people call the policy; by default its class.
        """
        if self.drawing.random and learns:
            raise ConfigError(
                f"verification {self.name} draws children: cascades and ensembles draw none, and recycle and corpora "
                "of outputs learn from all requests, so that a seed would not give the same text again: use "
                "verification match, or drafter auto"
            )
        if self.drawing.random and policy.by_value:
            raise ConfigError(
                f"verification {self.name} with {method or type(policy).__name__}, which ranks or prunes siblings by "
                "their probabilities, where they must be drawn: use verification match, or a method such as static"
            )


class Match(Scheme):
    """See ``match.match``; the text is the same with all ``CANDIDATES``."""

    name = "match"
    summary = "the target's own draw is followed for as long as it was drafted: the same text as AR decoding"

    def __init__(self, candidates: str = COUPLED) -> None:
        if candidates not in CANDIDATES:
            raise ConfigError(f"candidates are {candidates!r}: choose from {', '.join(CANDIDATES)}")
        self.drawing = CANDIDATES[candidates]

    def verify(
        self, scores: Scores, firsts: Sequence[int], trees: Sequence[DraftTree], draws: Sequence[Draws]
    ) -> list[Verdict]:
        return match(scores, firsts, trees, draws)


class _NodeByNode(Scheme):
    """A scheme that walks down one tree after the other, by a decision at each node that it visits."""

    @abstractmethod
    def decide(self, visit: Visit, draws: UniformDraws) -> int:
        """The token that is emitted at a node."""

    def accept(self, tree: DraftTree, target: TargetLogits, draws: UniformDraws) -> Verdict:
        """Verify one tree."""
        return walk(tree, target, self.decide, draws)

    def verify(
        self, scores: Scores, firsts: Sequence[int], trees: Sequence[DraftTree], draws: Sequence[Draws]
    ) -> list[Verdict]:
        """Trees whose children were chosen because their request decodes greedily are matched."""
        chosen = [b for b, own in enumerate(draws) if own.params.temperature == 0 and not self.lossy]
        matched = match(scores, [firsts[b] for b in chosen], [trees[b] for b in chosen], [draws[b] for b in chosen])
        verdicts = dict(zip(chosen, matched, strict=True))
        for b, (first, tree, own) in enumerate(zip(firsts, trees, draws, strict=True)):
            if b not in verdicts:
                verdicts[b] = self.accept(tree, _target_logits(scores, first, own), own)
        return [verdicts[b] for b in range(len(trees))]


def _target_logits(scores: Scores, first: int, draws: Draws) -> TargetLogits:
    return lambda node, drawn: draws.warped(scores, first + node, drawn)


class MultiRound(_NodeByNode):
    """See ``rejection.multi_round``; children drawn without replacement."""

    name = "multi-round"
    summary = "children drawn without replacement, offered one by one to what is left of the target distribution"
    drawing = Drawing.WITHOUT_REPLACEMENT

    def decide(self, visit: Visit, draws: UniformDraws) -> int:
        return multi_round(visit, draws, replacement=False)


class MultiRoundReplacement(_NodeByNode):
    """See ``rejection.multi_round``; children drawn with replacement."""

    name = "multi-round-replacement"
    summary = "multi-round with children drawn with replacement"
    drawing = Drawing.WITH_REPLACEMENT

    def decide(self, visit: Visit, draws: UniformDraws) -> int:
        return multi_round(visit, draws, replacement=True)


class TopAndOne(_NodeByNode):
    """See ``rejection.top_and_one``."""

    name = "top1-residual"
    summary = "the k - 1 most probable children and one drawn from the rest; never below match with the k - 1"
    drawing = Drawing.TOP_AND_ONE

    def decide(self, visit: Visit, draws: UniformDraws) -> int:
        return top_and_one(visit, draws)


def allowed_by_entropy(entropy: float) -> int:
    """The default of ``Relaxed``: 0 below 1 nat, then ceil(H)."""
    return math.ceil(entropy) if entropy >= 1 else 0


Unsure = Literal["target", "both"]
"""Whose entropy counts for ``Relaxed``: the target's, or the lesser of target's and draft's (the paper's idea)."""


@dataclass(frozen=True, slots=True)
class Relaxed(Checked, _NodeByNode):
    """See ``rejection.relaxed``; lossy. At temperature 0 entropy and ranks are those at temperature 1.

    Attributes:
        allowed: entropy in nats -> how many of the target's most probable tokens will do.
        when: what must be unsure.

    Raises:
        ConfigError: ``when`` is none of them.
    """

    allowed: Callable[[float], int] = allowed_by_entropy
    when: Unsure = "target"

    name: ClassVar[str] = "relaxed"
    summary: ClassVar[str] = "lossy: match, but where the target's entropy is high one of its best tokens will do"
    lossy: ClassVar[bool] = True

    def decide(self, visit: Visit, draws: UniformDraws) -> int:
        return relaxed(visit, draws, allowed=self.allowed, both=self.when == "both")


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
        return Match(candidates)
    if isinstance(scheme, Scheme):
        return scheme
    if scheme not in SCHEMES:
        raise unknown_name("verification", scheme, SCHEMES)
    return SCHEMES[scheme]
