"""The seam between the growth loop and what shapes trees: frontiers go in, children come out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from annotated_types import Interval
from numpy.typing import NDArray

from ..config import DEFAULT_NODES, MAX_NODES, Budget, Nodes, check_type
from ..errors import ConfigError
from ..models.base import LanguageModel
from ..request import Outcome, Request
from ..tree import DraftDistribution, DraftTree, Floats

Flags = NDArray[np.bool_]
Numbers = NDArray[np.int64]
Tags = NDArray[Any]

MAX_WIDTH = 64
"""Most children of a node that any policy may have."""
Width = Annotated[int, Interval(ge=1, le=MAX_WIDTH)]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The K most probable tokens after each of F nodes, by a scorer.

    Attributes:
        tokens: [F, K] int64 or int32.
        logprobs: [F, K] float32, log-probabilities (nats) in descending order; -inf where there is no candidate.
        entropies: [F] float32, entropy (nats) of the whole draft distribution, not of the K.
        origins: [F, K] int64, the drafters of an ensemble that proposed them, bit i for drafter i; None: one source.
        distributions: [F] the whole draft distributions, where children are drawn at random; else empty.
    """

    tokens: NDArray[np.integer]
    logprobs: Floats
    entropies: Floats
    origins: Numbers | None = None
    distributions: Sequence[DraftDistribution] = ()


class DraftedNodes(NamedTuple):
    """Every node that has been drafted so far, over all requests, layer by layer.

    Attributes:
        rows: [P] int64, which request.
        path_logprobs: [P] float32.
        tags: [P] the policy's tags of them (``Growth.tags``).
    """

    rows: Numbers
    path_logprobs: Floats
    tags: Tags


@dataclass(slots=True)
class Plan:
    """One proposal, from its budgets to its outcomes: a policy that keeps more of it has a subclass of its own.

    Attributes:
        budgets: [B] to draft within; a drafter narrows them to what its source can draft.
        enabled: which of the drafters of ``GrowthPolicy.prepare`` draft; None: all.
    """

    budgets: Sequence[Budget]
    enabled: Sequence[bool] | None = None

    @property
    def together(self) -> int | None:
        """Most nodes of all its trees, which the growth loop divides; None: the policy does, or there is no bound."""
        return least_together(self.budgets)


@dataclass(frozen=True, slots=True)
class Frontier:
    """Nodes of one depth that may get children, over all requests, in order of request and number.

    Attributes:
        plan: of the proposal.
        depth: 0 for the roots.
        rows: [F] int64, which request.
        nodes: [F] int64, number in the request's tree, ROOT (-1) for roots.
        path_logprobs: [F] float32, 0 for roots.
        tags: [F] the policy's tags of them (``Growth.tags``); 0 for roots.
        candidates: what may follow.
        budgets: [B] int64, nodes of each request's finished tree, whatever has been drafted so far.
        limits: [B] int64, deepest level that each request's tree may have.
        layers: what has been drafted so far, layer by layer, these nodes included.
    """

    plan: Plan
    depth: int
    rows: Numbers
    nodes: Numbers
    path_logprobs: Floats
    tags: Tags
    candidates: Candidates
    budgets: Numbers
    limits: Numbers
    layers: Sequence[DraftedNodes]

    @property
    def pool(self) -> DraftedNodes:
        """What has been drafted so far."""
        return DraftedNodes(*map(np.concatenate, zip(*self.layers, strict=True)))

    @property
    def scores(self) -> Floats:
        """[F, K] path log-probs of the candidates; -inf where there is none."""
        return self.path_logprobs[:, None] + self.candidates.logprobs


class Growth(NamedTuple):
    """Which candidates become nodes, and which of those may get children in turn.

    Attributes:
        keep: [F, K] bool.
        extend: [F, K] bool, read where ``keep`` is true alone.
        tags: [F, K] numbers, which come back with the frontier and to ``prune``; None: zeros.
    """

    keep: Flags
    extend: Flags
    tags: Tags | None = None


@dataclass(frozen=True, slots=True)
class Provenance:
    """A pair of models: those that a tree was calibrated for, or a classifier trained for.

    Attributes:
        target, drafter: names.
        target_weights, drafter_weights: fingerprints of the weights; empty where names alone are recorded.
    """

    target: str
    drafter: str
    target_weights: str = ""
    drafter_weights: str = ""

    def __str__(self) -> str:
        return f"target {self.target} [{self.target_weights}] and drafter {self.drafter} [{self.drafter_weights}]"


class SourceInfo(Protocol):
    """What a policy may know of a drafter.

    Attributes:
        fingerprint: of what it drafts with.
        model: makes one pass for each layer of its trees; None: there is no such model.
        models: all that make passes for it.
    """

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def model(self) -> LanguageModel | None: ...

    @property
    def models(self) -> Sequence[LanguageModel]: ...

    def unread(self, request: Request) -> Sequence[tuple[LanguageModel, int]]:
        """Its models, each with how many tokens it must read before it can draft for a request."""


class GrowthPolicy(ABC):
    """Shapes trees: ``grow`` is all that a policy must have.

    It keeps what it learns, and nothing of a proposal: that is in the plan, so that several may be under way at once.

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
    def made_for(self) -> Provenance | None:
        """The models that it was made for, by calibration or training; None: any."""
        return None

    @abstractmethod
    def grow(self, frontier: Frontier) -> Growth:
        """Choose the children of a frontier."""

    def width_for(self, nodes: int) -> int:
        """Most children of a node in a tree of ``nodes`` nodes: the K of the scorers' candidates."""
        return nodes

    def plan(self, requests: Sequence[Request], budgets: Sequence[Budget], other_tokens: int = 0) -> Plan:
        """Begin a proposal; without nodes in the plan's budgets the drafter is not run.

        ``other_tokens``: those that the pass which verifies the trees computes for other requests.
        """
        return Plan(budgets)

    def pool(self, nodes: int) -> int:
        """Most nodes to draft for a finished tree of ``nodes``."""
        return nodes

    def prune(self, plan: Plan, pools: Sequence[DraftTree], tags: Sequence[Tags]) -> Sequence[Flags | None]:
        """Which nodes of each drafted pool, with these tags, are verified.

        Returns:
            for each pool [N] bool, closed under parents, or None: all of them.
        """
        return [None for _ in pools]

    def prepare(self, target: LanguageModel, sources: Sequence[SourceInfo]) -> None:  # noqa: B027
        """Before any drafting: the model that verifies the trees, and the drafters of their candidates."""

    def observe(self, plan: Plan, outcomes: Sequence[Outcome]) -> None:  # noqa: B027
        """Learn from the outcomes of a proposal."""


def unbounded(name: str, nodes: int, bound: str) -> str | None:
    """What to know of a method with this node budget before it starts, if anything.

    Args:
        bound: how to give it another budget.
    """
    if nodes < MAX_NODES:
        return None
    return (
        f"{name} has no node budget: a step may draft {MAX_NODES} tokens, and take minutes; bound it with {bound}, or "
        "take dynamic-width-budget"
    )


def node_budget(policy: GrowthPolicy | None, nodes: int | None) -> int:
    """The node budget that is given, or the policy's own; without a policy nothing is drafted.

    Raises:
        ConfigError: it is out of range.
    """
    if nodes is None:
        return DEFAULT_NODES if policy is None else policy.default_nodes
    check_type("nodes", nodes, Nodes)
    return nodes


def least_together(budgets: Sequence[Budget]) -> int | None:
    """``Budget.together`` of all of them."""
    return min((budget.together for budget in budgets if budget.together is not None), default=None)


N = TypeVar("N", int, float)


def read_number(kind: type[N], what: str, text: float | str, way_out: str) -> N:
    """The setting ``what`` as a number.

    Raises:
        ConfigError: it is none; ``way_out`` ends the message.
    """
    try:
        return kind(text)
    except (ValueError, OverflowError):
        raise ConfigError(f"{what} is {text!r}: {way_out}") from None


def descending(scores: NDArray[np.number]) -> Numbers:
    """[N] where the scores are in descending order; of equal ones the earlier entry comes first."""
    return np.argsort(-scores, kind="stable")


def highest(scores: NDArray[np.number], count: int) -> Flags:
    """[N] bool: the ``count`` highest scores; ties go to the earlier entry."""
    if len(scores) <= count:
        return np.ones(len(scores), np.bool_)
    keep = np.zeros(len(scores), np.bool_)
    keep[descending(scores)[:count]] = True
    return keep


def highest_in_budget(scores: Sequence[NDArray[np.number]], budgets: Sequence[Budget]) -> list[Flags | None]:
    """What ``GrowthPolicy.prune`` returns where the nodes of highest scores are verified; [N] scores a pool."""
    return [
        None if len(own) <= budget.nodes else highest(own, budget.nodes)
        for own, budget in zip(scores, budgets, strict=True)
    ]


def best_per_row(scores: NDArray[np.number], rows: Numbers, limits: Numbers) -> Flags:
    """[F] bool: the ``limits[row]`` highest scores of each row; ties go to the earlier entry."""
    if len(limits) == 1:
        return highest(scores, int(limits[0]))
    order = descending(scores)
    order = order[np.argsort(rows[order], kind="stable")]  # by row, then by score, then by index
    ranks = np.empty_like(order)
    ranks[order] = count_within(rows[order], np.bincount(rows, minlength=len(limits)))
    return ranks < limits[rows]


def count_within(rows: Numbers, counts: Numbers) -> Numbers:
    """[F] how many entries of the same row come before each entry; ``rows`` ascends, ``counts`` is its histogram."""
    return np.arange(len(rows)) - (counts.cumsum() - counts)[rows]
