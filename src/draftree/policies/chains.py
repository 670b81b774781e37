"""``hsddw``: a chain that ends at a threshold on entropy, learned from the tokens rejected so far ("self-verify").

Source: Syu & Lee, *Hierarchical Speculative Decoding with Dynamic Window* (HSDDW; Findings of NAACL 2025). Entropies
are in nats, of the draft law at the node whose children are chosen. ``docs/algorithms.md`` says where we differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..config import MAX_NODES, Budget
from ..errors import ConfigError
from ..models.base import LanguageModel
from ..outcome import Outcome
from ..request import Request
from ..tree import DraftTree
from ..typed import check_fields
from .base import Frontier, Growth, GrowthPolicy, SourceInfo
from .entropy import StaticTree

FIRST = "first"
"""In place of an initial threshold: the least entropy of the request's first draft."""
CHAIN = StaticTree(1, MAX_NODES)
"""A chain as long as its budget."""
_MEMORIES = "use a number of tokens, 1 or more, or inf to forget nothing"


@dataclass(slots=True)
class Threshold:
    """The threshold tau of one request: the mean entropy of its rejected tokens.

    Attributes:
        start: tau while nothing has been rejected; None: the least entropy of the first draft.
        memory: each new token leaves 1 - 1 / memory of the weight of those before; infinite: a plain mean (the paper).
        share: tau is this share of the mean.
    """

    start: float | None = None
    memory: float = math.inf
    share: float = 1.0
    _least: float = field(default=math.inf, repr=False)
    _sum: float = field(default=0.0, repr=False)
    _weight: float = field(default=0.0, repr=False)

    @property
    def value(self) -> float:
        """Tau in nats; infinite during a first draft whose entropies are to set it."""
        if self._weight:
            return self.share * self._sum / self._weight
        return self._least if self.start is None else self.start

    def drafted(self, least: float) -> None:
        """A draft has ended, in which ``least`` was the smallest entropy: it counts if it was the first."""
        if self._least == math.inf:
            self._least = least

    def rejected(self, entropy: float) -> None:
        """A token was rejected, and this was the entropy of its law."""
        self._count(entropy)

    def stopped(self, entropy: float) -> None:
        """A draft was accepted as far as it went, and this entropy had ended it: tau may have been too low.

        It counts as one more token unless the memory is infinite. Without it tau could freeze: where nothing is
        drafted that can be rejected, a mean of rejected tokens never moves.
        """
        if self.memory < math.inf:
            self._count(entropy)

    def _count(self, entropy: float) -> None:
        left = 1 - 1 / self.memory
        self._sum, self._weight = left * self._sum + entropy, left * self._weight + 1


def learn(threshold: Threshold, outcome: Outcome, crossed: float) -> None:
    """Update tau by an outcome; the token behind which a request ended within its tree was not rejected.

    Args:
        threshold: of the request.
        outcome: of the tree.
        crossed: least entropy that ended something in it; infinite: none did.
    """
    if len(outcome.tree):
        threshold.drafted(float(outcome.tree.entropies.min()))
    if outcome.taken < len(outcome.tokens):
        return
    if (entropy := outcome.rejected_entropy) is not None:
        threshold.rejected(entropy)
    elif crossed < math.inf:
        threshold.stopped(crossed)


@dataclass(frozen=True, slots=True)
class Window:
    """How far a draft goes; by default as published.

    Attributes:
        start: tau before any rejection in nats; None: the least entropy of the request's first draft.
        share: of the mean entropy of rejected tokens that tau is; 1 in the paper.
        keep: the token whose distribution crossed tau is still drafted, as in the authors' code; else it is left out.
        floor: least tokens of a draft, whatever tau is: with 0 nothing might ever be rejected, and tau would be frozen.
        cap: most tokens of a draft.
        memory: see ``Threshold``.

    Raises:
        ConfigError: a value is out of range, or the cap lies below the floor.
    """

    start: float | None = None
    share: float = 1.0
    keep: bool = True
    floor: int = 1
    cap: int = 10
    memory: float = math.inf

    def __post_init__(self) -> None:
        check_fields(self)
        check_threshold("start", self.start, self.memory)
        if not 0 < self.share < math.inf:
            raise ConfigError(f"share is {self.share}: use a positive number; 1 is the paper's")
        check_lengths(self.floor, self.cap)


def check_lengths(floor: int, cap: int) -> None:
    """Make sure that drafts can have these lengths.

    Raises:
        ConfigError: one is out of range, or the cap lies below the floor.
    """
    if floor < 1:
        raise ConfigError(f"floor is {floor}: use at least 1 token, or nothing is learned from rejections")
    if not floor <= cap <= MAX_NODES:
        raise ConfigError(f"cap is {cap} and floor {floor}: use a cap from the floor to {MAX_NODES}, or a lower floor")


def check_threshold(what: str, start: float | None, memory: float) -> None:
    """Make sure that a threshold can be made of these.

    Raises:
        ConfigError: the entropy called ``what`` is negative or no number, or the memory is below one token.
    """
    if start is not None and not start >= 0:
        raise ConfigError(f"{what} is {start}: use an entropy in nats, 0 or more, or {FIRST!r}")
    if not memory >= 1:
        raise ConfigError(f"memory is {memory}: {_MEMORIES}")


def read_start(what: str, text: float | str) -> float | None:
    """An initial threshold as it is written.

    Raises:
        ConfigError: it is neither a number nor "first".
    """
    if text == FIRST:
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{what} is {text!r}: use an entropy in nats, 0 or more, or {FIRST!r}") from None


def read_memory(text: str) -> float:
    """A number of tokens as it is written, perhaps "inf".

    Raises:
        ConfigError: it is no number.
    """
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"memory is {text!r}: {_MEMORIES}") from None


@dataclass(slots=True)
class _Round:
    """One proposal.

    Attributes:
        thresholds: of its requests.
        crossed: [B] least entropy that ended something; infinite: none did.
    """

    thresholds: Sequence[Threshold]
    crossed: list[float]


@dataclass(slots=True)
class DynamicWindow(GrowthPolicy):
    """Ends drafting below every node whose entropy exceeds tau, the mean entropy of the request's rejected tokens.

    Attributes:
        window: how far.
        tree: shapes what lies within; a chain by default.
        by_value: the tree's.
    """

    window: Window = Window()
    tree: GrowthPolicy = CHAIN
    by_value: bool = field(init=False, repr=False, compare=False)
    _thresholds: WeakKeyDictionary[Request, Threshold] = field(
        default_factory=WeakKeyDictionary, repr=False, compare=False
    )
    _round: _Round | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        self.by_value = self.tree.by_value

    @property
    def default_nodes(self) -> int:
        """The tree's."""
        return self.tree.default_nodes

    @property
    def partner(self) -> str | None:
        """The tree's."""
        return self.tree.partner

    def threshold(self, request: Request) -> Threshold:
        """A request's tau."""
        return self._thresholds.setdefault(request, self._new())

    def _new(self) -> Threshold:
        return Threshold(self.window.start, self.window.memory, self.window.share)

    def width_for(self, nodes: int) -> int:
        """The tree's."""
        return self.tree.width_for(nodes)

    def pool(self, nodes: int) -> int:
        """The tree's."""
        return self.tree.pool(nodes)

    def plan(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> Sequence[Budget]:
        """Look up the thresholds."""
        self._round = _Round([self.threshold(s) for s in requests], [math.inf] * len(requests))
        return self.tree.plan(requests, budgets)

    def grow(self, frontier: Frontier) -> Growth:
        """The tree's choice, ended where tau is crossed, but for the floor."""
        growth, at, depth = self.tree.grow(frontier), self._round, frontier.depth
        entropies, rows = frontier.candidates.entropies, frontier.rows.tolist()
        taus = [self._new().value if at is None else at.thresholds[b].value for b in rows]
        crossed = entropies > torch.tensor(taus)
        if at is not None:
            for b, h, over in zip(rows, entropies.tolist(), crossed.tolist(), strict=True):
                if over and depth + 1 >= self.window.floor:
                    at.crossed[b] = min(at.crossed[b], h)
        keep, extend, tags = growth
        if not self.window.keep and depth >= self.window.floor:
            keep = keep & ~crossed[:, None]
        if depth + 1 >= self.window.floor:
            extend = extend & ~crossed[:, None]
        if depth + 1 >= self.window.cap:
            extend = torch.zeros_like(extend)
        return Growth(keep, extend, tags)

    def prune(
        self, pools: Sequence[DraftTree], tags: Sequence[Tensor], budgets: Sequence[Budget]
    ) -> Sequence[Tensor | None]:
        """The tree's."""
        return self.tree.prune(pools, tags, budgets)

    def check(self, target: str, drafter: str) -> None:
        """The tree's."""
        self.tree.check(target, drafter)

    def prepare(self, target: LanguageModel, sources: Sequence[SourceInfo]) -> None:
        """Tell the tree."""
        self.tree.prepare(target, sources)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn tau: from each rejected token, and from drafts that tau ended though all of them was accepted."""
        at, self._round = self._round, None
        if at is not None:
            for outcome, tau, crossed in zip(outcomes, at.thresholds, at.crossed, strict=True):
                learn(tau, outcome, crossed)
        self.tree.observe(outcomes)
