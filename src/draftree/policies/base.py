"""The seam between the growth loop and what shapes trees: frontiers go in, children come out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from annotated_types import Interval
from numpy.typing import NDArray

from ..config import DEFAULT_NODES, Budget, NodeCount, check_type
from ..errors import ConfigError
from ..models.base import LanguageModel
from ..request import Outcome, Request
from ..tree import DraftTree
from .report import Report

Numbers = NDArray[np.int64]

MAX_WIDTH = 64
"""Most children of a node that any policy may have."""
Width = Annotated[int, Interval(ge=1, le=MAX_WIDTH)]


class Candidates(NamedTuple):
    """What may follow one node, the most probable token first.

    Attributes:
        tokens: [K].
        logprobs: [K] log-probabilities (nats), finite, in descending order.
        entropy: nats, of the whole draft distribution, not of the K.
        part: number of the source that predicts them in its ensemble.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    entropy: float
    part: int = 0


NO_CANDIDATES = Candidates((), (), 0.0)


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """A whole draft distribution, the softmax of ``logits``.

    Attributes:
        logits: [K]; -inf where nothing is ever drawn.
        tokens: [K] whose logits they are; None: tokens 0 to K - 1.
    """

    logits: NDArray[np.floating]
    tokens: NDArray[np.integer] | None = None

    def dense(self, vocab: int) -> NDArray[np.float64]:
        """[vocab] logits, -inf for the tokens that are left out."""
        full = np.full(vocab, -np.inf)
        full[slice(len(self.logits)) if self.tokens is None else self.tokens] = self.logits
        return full


class Child(NamedTuple):
    """A candidate that becomes a node.

    Attributes:
        parent: its index in the frontier.
        rank: its index among the parent's candidates.
        extend: it may get children in turn.
        tag: comes back with the frontier and the pool.
    """

    parent: int
    rank: int
    extend: bool = True
    tag: Any = 0


class Pool(NamedTuple):
    """The P nodes that have been drafted for one request, layer by layer: columns as those of ``DraftTree``.

    Attributes:
        tags: [P] the policy's (``Child.tag``).
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    path_logprobs: list[float]
    entropies: list[float]
    tags: list[Any]


Trial = tuple[int, bool, float]
"""A node's candidates against what followed it in the text: the number of the source that predicted them, whether the
first of them followed, and its log-probability."""


@dataclass(slots=True)
class Plan:
    """One proposal, from its budgets to its outcomes: a policy that keeps more of it has a subclass of its own.

    Attributes:
        budgets: [B] to draft within; a drafter narrows them to what its source can draft.
        enabled: which of the drafters of ``GrowthPolicy.prepare`` draft; None: all.
        left_out: of each of these, requests for which it does not; empty: there are none.
        requests: [B] that it is for.
        layers: that were sought, where C grew the trees by ``GrowthPolicy.rule``.
        trials: what C found of their outcomes; None: the policy's own methods grew them.
    """

    budgets: Sequence[Budget]
    enabled: Sequence[bool] | None = None
    left_out: Sequence[Sequence[Request]] = ()
    requests: Sequence[Request] = ()
    layers: int = 0
    trials: Sequence[Trial] | None = None


class PartRule(NamedTuple):
    """What a rule says of one source.

    Attributes:
        trust: how often its first candidates are right over how often they should be.
        onward: how often a first candidate is right below a token that was.
        layer: seconds of one layer.
    """

    trust: float = 1.0
    onward: float = 1.0
    layer: float = 0.0


class GrowthRule(NamedTuple):
    """A policy as numbers, by which C grows a proposal's trees.

    With ``seconds`` nodes and layers that pay are drafted, as ``AutoTree`` does; without, the most probable paths of
    each budget, as ``OptTree`` does.

    Attributes:
        width, depth: most candidates of a node; deepest level.
        threshold: least gain in expected tokens for one more layer, without ``seconds``.
        seconds, below: of verifying 0, 1, ... nodes in all, and the largest convex curve nowhere above.
        rate: tokens a second that the step must yield.
        tokens: that a step without nodes yields.
        parts: of each source, by its number in the ensemble; empty: they do not matter.
    """

    width: int
    depth: int
    threshold: float = 0.0
    seconds: Sequence[float] = ()
    below: Sequence[float] = ()
    rate: float = 0.0
    tokens: float = 0.0
    parts: Sequence[PartRule] = ()


class Frontier(NamedTuple):
    """F nodes of one depth that may get children, over all B requests, in order of request and number.

    Attributes:
        plan: of the proposal.
        depth: 0 for the roots.
        requests: [F] which one, from 0.
        nodes: [F] number in the request's pool, ROOT (-1) for roots.
        path_logprobs: [F] 0 for roots.
        tags: [F] the policy's tags of them (``Child.tag``); 0 for roots.
        candidates: [F] what may follow each of them.
        budgets: [B] nodes of each request's finished tree, whatever has been drafted so far.
        limits: [B] deepest level that each request's tree may have.
        pools: [B] what has been drafted so far, these nodes included.
    """

    plan: Plan
    depth: int
    requests: Sequence[int]
    nodes: Sequence[int]
    path_logprobs: Sequence[float]
    tags: Sequence[Any]
    candidates: Sequence[Candidates]
    budgets: Sequence[int]
    limits: Sequence[int]
    pools: Sequence[Pool]

    @property
    def scores(self) -> list[list[float]]:
        """[F][K] path log-probabilities of the candidates."""
        pairs = zip(self.path_logprobs, self.candidates, strict=True)
        return [[path + logprob for logprob in candidates.logprobs] for path, candidates in pairs]

    def likeliest(self, counts: Sequence[int], extend: Sequence[bool]) -> list[Child]:
        """Of each node the first ``counts[f]`` candidates, or all that there are; ``extend``: of their node."""
        return [
            Child(parent, rank, more)
            for parent, (candidates, count, more) in enumerate(zip(self.candidates, counts, extend, strict=True))
            for rank in range(min(count, len(candidates.tokens)))
        ]


Distributions = Callable[[Sequence[tuple[int, int]]], Sequence[DraftDistribution]]
"""Nodes of the layer that was scored last, by request and number -> the draft distributions after them."""


class ChildSampler(ABC):
    """Draws the children of one proposal's nodes at random, once the policy has settled how many each of them gets.

    Args:
        requests: [B] that the proposal is for.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests

    @abstractmethod
    def draw(self, frontier: Frontier, counts: Sequence[int], distributions: Distributions) -> list[Candidates]:
        """[F] the children of a frontier's nodes, ``counts[f]`` of each, in draw order."""

    @abstractmethod
    def finished(self, request: int, tree: DraftTree, numbers: Sequence[int]) -> DraftTree:
        """A request's tree with what its verification needs; ``numbers``: [N] of its nodes in the pool."""


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
        model: makes one pass for each layer of its trees; None: there is no such model.
        models: all that make passes for it.
    """

    name: str
    model: LanguageModel | None

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
        default_nodes: node budget where none is given.
        made_for: the models that it was made for, by calibration or training; None: any.
        report: why it chose what it chose, if it weighs costs; None: it weighs none.
        over_cascade: shapes the trees of a cascade, whose proposals this policy then shapes; None: this one does.
    """

    by_value: bool = False
    default_nodes: int = DEFAULT_NODES
    made_for: Provenance | None = None
    report: Report | None = None
    over_cascade: GrowthPolicy | None = None

    @abstractmethod
    def grow(self, frontier: Frontier) -> list[Child]:
        """Choose the children of a frontier, in order of their parents and then of their ranks."""

    def width_for(self, nodes: int) -> int:
        """Most children of a node in a tree of ``nodes`` nodes: the K of the scorers' candidates."""
        return nodes

    def plan(self, requests: Sequence[Request], budgets: Sequence[Budget], other_tokens: int = 0) -> Plan:
        """Begin a proposal; without nodes in the plan's budgets the drafter is not run.

        ``other_tokens``: those that the pass which verifies the trees computes for other requests.
        """
        return Plan(budgets, requests=requests)

    def rule(self, plan: Plan) -> GrowthRule | None:
        """The numbers by which C grows the same trees as ``grow``, ``pool`` and ``prune``; None: there are none.

        A subclass that overrides one of these, or ``width_for``, and not this one is not grown by C.
        """
        return None

    def pool(self, nodes: int) -> int:
        """Most nodes to draft for a finished tree of ``nodes``."""
        return nodes

    def prune(self, plan: Plan, pools: Sequence[Pool]) -> Sequence[Sequence[bool] | None]:
        """Which nodes of each request's pool are verified.

        Returns:
            for each pool [P], closed under parents, or None: all of them.
        """
        return [None for _ in pools]

    def prepare(self, target: LanguageModel, sources: Sequence[SourceInfo]) -> None:  # noqa: B027
        """Before any drafting: the model that verifies the trees, and the drafters of their candidates."""

    def observe(self, plan: Plan, outcomes: Sequence[Outcome]) -> None:  # noqa: B027
        """Learn from the outcomes of a proposal.

        ``plan``: what ``plan`` returned; a bare ``Plan`` of a step in which only texts draft and say nothing, for which
        it is not called where C grows the trees (``rule``).
        """


def node_budget(policy: GrowthPolicy | None, nodes: int | None) -> int:
    """The node budget that is given, or the policy's own; without a policy nothing is drafted.

    Raises:
        ConfigError: it is out of range.
    """
    name = "nodes"
    if nodes is None:
        name = f"policy {type(policy).__name__}: default_nodes"
        nodes = DEFAULT_NODES if policy is None else policy.default_nodes
    check_type(name, nodes, NodeCount)
    return nodes


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


def descending(scores: Sequence[float]) -> list[int]:
    """[N] where the scores are in descending order; of equal ones the earlier entry comes first."""
    return sorted(range(len(scores)), key=scores.__getitem__, reverse=True)


def highest_in_budget(scores: Sequence[Sequence[float]], budgets: Sequence[Budget]) -> list[list[bool] | None]:
    """What ``GrowthPolicy.prune`` returns where the nodes of highest scores are verified; [P] scores a pool."""
    return [
        None if len(pool) <= budget.nodes else best_per_request(pool, [0] * len(pool), [budget.nodes])
        for pool, budget in zip(scores, budgets, strict=True)
    ]


def best_per_request(scores: Sequence[float], requests: Sequence[int], limits: Sequence[int]) -> list[bool]:
    """[N] the ``limits[request]`` highest scores of each request; ties go to the earlier entry."""
    left, keep = list(limits), [False] * len(scores)
    for at in descending(scores):
        request = requests[at]
        keep[at] = left[request] > 0
        left[request] -= 1
    return keep
