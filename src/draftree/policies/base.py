"""The seam between the growth loop and whatever shapes trees: what a policy is told and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..config import DEFAULT_NODES, Budget
from ..errors import ConfigError
from ..models.base import LanguageModel
from ..outcome import Outcome
from ..request import Request
from ..tree import DraftTree


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a scorer thinks may follow each of F nodes: its K most probable tokens.

    Attributes:
        tokens: [F, K] int64.
        logprobs: [F, K] float32, log-probabilities (nats) in descending order; -inf where there is no candidate.
        entropies: [F] float32, entropy (nats) of the whole draft law, not of the K.
        origins: [F, K] int64, the parts of a union that said so, bit i for part i; None: there is one source.
        known: [F, K] bool, what may follow these is known already, so that to ask about them takes no pass; None: of
            none.
    """

    tokens: Tensor
    logprobs: Tensor
    entropies: Tensor
    origins: Tensor | None = None
    known: Tensor | None = None


class Pool(NamedTuple):
    """Every node that has been drafted so far, over all requests, layer by layer.

    Attributes:
        rows: [P] int64, which request.
        path_logprobs: [P] float32.
        tags: [P] what the policy said of them (``Growth.tags``).
    """

    rows: Tensor
    path_logprobs: Tensor
    tags: Tensor

    def plus(self, rows: Tensor, path_logprobs: Tensor, tags: Tensor) -> Pool:
        """With one more layer."""
        new = (rows, path_logprobs, tags)
        return Pool(*(torch.cat([old, more]) for old, more in zip(self, new, strict=True)))


@dataclass(frozen=True, slots=True)
class Frontier:
    """Nodes of one depth that may get children, over all requests, in order of request and number.

    Attributes:
        depth: of these nodes; 0 for the roots.
        rows: [F] int64, which request.
        nodes: [F] int64, number in the request's tree, ROOT (-1) for roots.
        path_logprobs: [F] float32, 0 for roots.
        tags: [F] what the policy said of them when it kept them (``Growth.tags``); 0 for roots.
        candidates: what may follow.
        budgets: [B] int64, nodes of each request's finished tree, whatever has been drafted so far.
        limits: [B] int64, deepest level that each request's tree may have.
        pool: what has been drafted so far, these nodes included.
        above: the frontier that these nodes came from, and [F] int64, which of its nodes each one's parent is; None for
            roots.
    """

    depth: int
    rows: Tensor
    nodes: Tensor
    path_logprobs: Tensor
    tags: Tensor
    candidates: Candidates
    budgets: Tensor
    limits: Tensor
    pool: Pool
    above: tuple[Frontier, Tensor] | None = None

    @property
    def scores(self) -> Tensor:
        """[F, K] path log-probs of the candidates; -inf where there is none."""
        return self.path_logprobs[:, None] + self.candidates.logprobs


class Growth(NamedTuple):
    """A policy's answer: which candidates become nodes, and which of those may get children in turn.

    Attributes:
        keep: [F, K] bool.
        extend: [F, K] bool; only read where ``keep`` is true.
        tags: [F, K] numbers, whatever the policy wants to be told again of the nodes it keeps; None: zeros.
    """

    keep: Tensor
    extend: Tensor
    tags: Tensor | None = None


class SourceInfo(Protocol):
    """What a policy may know of a drafter.

    Attributes:
        name: of the drafter.
        fingerprint: of what it drafts with.
        near: its distribution is nearly the target's, as that of quantized weights.
        costly: drafting takes so long that it may not pay.
        model: makes one pass for each layer of its trees; None: there is no such model.
        models: all that make passes for it.
        successors: of the target's most probable tokens after each verified node, how many it learns from.
    """

    near: bool

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def costly(self) -> bool: ...

    @property
    def model(self) -> LanguageModel | None: ...

    @property
    def models(self) -> Sequence[LanguageModel]: ...

    @property
    def successors(self) -> int: ...

    def unread(self, request: Request) -> Sequence[tuple[LanguageModel, int]]:
        """Its models, each with how many tokens it must read before it can draft for a request."""


class GrowthPolicy(ABC):
    """Shapes trees: ``grow`` is all that a policy must have.

    A policy without ``pool`` stays within the budget layer by layer: where a layer wants more nodes than are left, the
    most probable paths stay. One with it drafts more and ``prune``s the finished pool down to the budget.

    Attributes:
        by_value: siblings are ranked or dropped by their probabilities. Then children may not be drawn at random.
    """

    by_value: bool = False

    @property
    def default_nodes(self) -> int:
        """Node budget where none is given."""
        return DEFAULT_NODES

    @property
    def partner(self) -> str | None:
        """Name of the only drafter that it was made for; None: any will do."""
        return None

    @property
    def enabled(self) -> Sequence[bool] | None:
        """Which of the drafters of ``prepare`` draft in the proposal that ``plan`` began; None: all."""
        return None

    @abstractmethod
    def grow(self, frontier: Frontier) -> Growth:
        """Choose the children of a frontier."""

    def width_for(self, nodes: int) -> int:
        """Most children of a node in a tree of ``nodes`` nodes: the K that scorers are asked for."""
        return nodes

    def plan(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> Sequence[Budget]:
        """Before a proposal: the budgets to draft within; no nodes: nothing is asked of the drafter."""
        return budgets

    def pool(self, nodes: int) -> int:
        """Most nodes to draft for a finished tree of ``nodes``."""
        return nodes

    def prune(
        self, pools: Sequence[DraftTree], tags: Sequence[Tensor], budgets: Sequence[Budget]
    ) -> Sequence[Tensor | None]:
        """Which nodes of each drafted pool, with these tags, are verified.

        Returns:
            for each pool [N] bool, closed under parents, or None: all of them.
        """
        return [None for _ in pools]

    def check(self, target: str, drafter: str) -> None:  # noqa: B027
        """Make sure that it can draft for these models, given by name.

        Raises:
            ConfigError: it was made for others.
        """

    def prepare(self, target: LanguageModel, sources: Sequence[SourceInfo]) -> None:  # noqa: B027
        """Before any drafting: whom the trees are for, and whose candidates they will be made of."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:  # noqa: B027
        """What became of the trees of the last proposal, and what they cost."""


def node_budget(policy: GrowthPolicy | None, nodes: int | None) -> int:
    """The node budget that is given, or the policy's own; without a policy nothing is drafted.

    Raises:
        ConfigError: it is out of range.
    """
    if nodes is None:
        return DEFAULT_NODES if policy is None else policy.default_nodes
    if Budget(nodes).nodes < 1:
        raise ConfigError(f"node budget is {nodes}: use at least 1, or drafter 'none' for plain decoding")
    return nodes


def best_per_row(scores: Tensor, rows: Tensor, limits: Tensor) -> Tensor:
    """[F] bool: the ``limits[row]`` highest scores of each row; ties go to the earlier entry."""
    return _ranks_per_row(scores, rows, len(limits)) < limits.take(rows)


def _ranks_per_row(scores: Tensor, rows: Tensor, batch: int) -> Tensor:
    """[F] how many entries of the same row score higher, or as high and come before; there are ``batch`` rows."""
    order = scores.argsort(descending=True, stable=True)
    ranks = torch.empty_like(order)
    if batch == 1:
        ranks[order] = torch.arange(len(order))
        return ranks
    order = order[rows[order].argsort(stable=True)]  # by row, then by score, then by index
    ranks[order] = count_within(rows[order], torch.bincount(rows, minlength=batch))
    return ranks


def count_within(rows: Tensor, counts: Tensor) -> Tensor:
    """[F] how many entries of the same row come before each entry; ``rows`` ascends, ``counts`` is its histogram."""
    return torch.arange(rows.shape[0]) - (counts.cumsum(0) - counts).take(rows)
