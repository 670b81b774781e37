"""What verification schemes are: one turns the target's distributions over draft trees into accepted tokens.

Never drafts, never touches a cache. A scheme is lossless when its output follows the target distribution. *match*, the
default, is, for any tree: the target draws its own next token at every node of the walk; when a child equals the draw
the walk goes down to it, else the draw is emitted and the walk ends. The output is the target's own draws in order, so
it does not depend on the tree at all; the tree decides only how many of them one pass yields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..draws import Draws
from ..errors import ConfigError, call_named, check_tokens
from ..policies.base import ChildSampler, GrowthPolicy
from ..sampling.warping import Warping, softmax, stream_key
from ..scores import Scores
from ..tree import ROOT, DraftTree


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
        tree, node: where they are.
        depth: 0 for the root.
        entropy: nats, of the draft distribution that the children were taken from.
    """

    logits: NDArray[np.floating]
    children: list[int]
    tree: DraftTree
    node: int
    depth: int
    entropy: float

    @property
    def p(self) -> NDArray[np.float64]:
        return softmax(self.logits)


def log(p: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return np.log(p)


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
    for b, (first, tree, request_draws) in enumerate(zip(firsts, trees, draws, strict=True)):
        if request_draws.walks:
            walking.append(b)
            continue
        together.append(b)
        root, count = len(paths), 1 + len(tree.tokens)
        slots += range(first + ROOT, first + ROOT + count)
        owners += [request_draws] * count
        paths.append([])
        for parent, token in zip(tree.parents, tree.tokens, strict=True):
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
    verdicts = {b: Verdict([], []) for b in walking}
    while walking:
        ends = [(verdicts[b].path or [ROOT])[-1] for b in walking]
        slots, owners = [firsts[b] + end for b, end in zip(walking, ends, strict=True)], [draws[b] for b in walking]
        further, every = [], draw_at(scores, slots, owners, [verdicts[b].tokens for b in walking])
        for b, end, token in zip(walking, ends, every, strict=True):
            tree, (path, tokens) = trees[b], (verdicts[b].path, verdicts[b].tokens)
            node = next((c for c in tree.children(end) if tree.tokens[c] == token), None)
            tokens.append(token)
            if node is not None:
                path.append(node)
                further.append(b)
        walking = further
    return verdicts


def draw_at(scores: Scores, slots: Sequence[int], draws: Sequence[Draws], paths: Sequence[Sequence[int]]) -> list[int]:
    """The target's own next token after each slot; without processors of users in one call of ``scores``.

    Args:
        slots: [w] of the scores.
        draws: [w] of their requests.
        paths: [w] tokens of this step above them.
    """
    edited = sampled = False
    for distinct in set(draws):
        if distinct.params.processors:
            if len(slots) == 1:
                return [distinct.draw(distinct.warped(scores, slots[0], paths[0]), len(paths[0]))]
            return [draw_at(scores, [s], [d], [p])[0] for s, d, p in zip(slots, draws, paths, strict=True)]
        edited |= distinct.edits
        sampled |= distinct.warping.temperature > 0
    edits = [d.edit(path) for d, path in zip(draws, paths, strict=True)] if edited else None
    if not sampled:
        return [*scores.argmax(slots, edits).tolist()]
    seeds, positions, warpings = list[int](), list[int](), list[Warping]()
    for d, path in zip(draws, paths, strict=True):
        seeds.append(d.seed)
        positions.append(len(d.history) + len(path))
        warpings.append(d.warping)
    keys = stream_key(np.array(seeds, np.uint64), np.array(positions, np.uint64))
    return [*scores.draw(slots, keys.tolist(), warpings, edits).tolist()]


class Scheme(ABC):
    """Turns the target's logits over draft trees into accepted tokens.

    Attributes:
        name: as on the command line; by default the class's.
        summary: one line.
        coupled: candidates are ranked by the noise that the target draws with, rather than by the draft distribution
            alone.
        sampler: class of what draws children at random; None: they are the first candidates.
        lossy: its output does not follow the target distribution.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    coupled: bool = False
    sampler: type[ChildSampler] | None = None
    lossy: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.name = vars(cls).get("name", cls.__name__)

    @property
    def candidates(self) -> str:
        """What its children are: "coupled", "plain", or "drawn" at random."""
        return "drawn" if self.sampler else "coupled" if self.coupled else "plain"

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
        if self.sampler and learns:
            raise ConfigError(
                f"verification {self.name} draws children: cascades and ensembles draw none, and what learns from "
                "other requests would not repeat a text under its seed: use verification match, or drafter auto"
            )
        if self.sampler and policy.by_value:
            raise ConfigError(
                f"verification {self.name} with {method or type(policy).__name__}, which ranks or prunes siblings by "
                "their probabilities, where they must be drawn: use verification match, or a method such as static"
            )


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
            drafted = [*map(tree.tokens.__getitem__, children)]
            if drafted:
                visit = Visit(logits, drafted, tree, node, len(tokens), tree.entropies[children[0]])
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
        chosen = [
            b for b, request_draws in enumerate(draws) if request_draws.params.temperature == 0 and not self.lossy
        ]
        matched = match(scores, [firsts[b] for b in chosen], [trees[b] for b in chosen], [draws[b] for b in chosen])
        verdicts = dict(zip(chosen, matched, strict=True))
        for b, (first, tree, request_draws) in enumerate(zip(firsts, trees, draws, strict=True)):
            if b not in verdicts:
                request_draws.begin()
                verdicts[b] = self.accept(tree, _target_logits(scores, first, request_draws), request_draws)
        return [verdicts[b] for b in range(len(trees))]


def _target_logits(scores: Scores, first: int, draws: Draws) -> TargetLogits:
    return lambda node, drawn: draws.warped(scores, first + node, drawn)
