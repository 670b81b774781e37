"""The seams of drafting: what proposes trees to the engine, what predicts their tokens, what scores their nodes.

A source shapes nothing: the growth loop and its policy choose among its candidates (``grow.py``). Children are the most
probable candidates, or drawn at random (``ChildSampler``).

A node has one number while a proposal grows: that of the pool (``grow.py``), or of the proposal's trie in a cascade
(``cascade.py``). In the finished tree it has another. ``Grown.numbers`` maps the second to the first, and
``DraftSource.settle`` is where a source changes over.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import methodcaller
from typing import NamedTuple

from ..config import Budget
from ..errors import ConfigError
from ..models.base import LanguageModel
from ..policies.base import Candidates, ChildSampler, DraftDistribution, GrowthPolicy
from ..request import Outcome, Request
from ..sampling.constraint import ConstraintState
from ..tree import ROOT, DraftTree


class Drafter:
    """Proposes a draft tree for each request, and keeps what state that takes; this one drafts nothing (AR decoding).

    Attributes:
        name: that ``load_drafter`` made it by.
        passes: drafter model passes of the last proposal; each brings its candidates to the host in one transfer, and
            the distributions that children are drawn from in another.
        seconds: wall-clock seconds of the last proposal, and of learning from the outcomes before it.
        part_seconds: of these, what each of ``parts`` took; none where it is the only one.
        part_passes: of ``passes``, those by each of ``parts``; none where it is the only one.
        policy: what shapes its trees; None: it drafts nothing.
        parts: names of the drafters that ``DraftTree.part`` tells apart, in the order of their numbers.
        learns: its predictions depend on other requests, so that drawn children would not repeat under the same seed.
    """

    name: str = "none"
    passes: int = 0
    seconds: float = 0.0
    part_seconds: tuple[float, ...] = ()
    part_passes: tuple[int, ...] = ()
    policy: GrowthPolicy | None = None
    parts: tuple[str, ...] = ("none",)
    learns: bool = False

    def prepare(self, target: LanguageModel, prefixes: int = 0) -> None:
        """Make ready to draft for ``target``: called once, before anything else.

        Args:
            prefixes: rows of ended requests that each draft model keeps, for texts that begin as they do.
        """

    def open(self, request: Request) -> None:
        """A request begins: its prompt is in ``request.ids``."""

    def propose(
        self,
        requests: Sequence[Request],
        budgets: Sequence[Budget],
        coupled: bool = True,
        other_tokens: int = 0,
        reading: int | None = None,
        sampler: type[ChildSampler] | None = None,
    ) -> list[DraftTree]:
        """One tree for each request, rooted at its last token and within its budget.

        Args:
            coupled: of ``DraftSource.scorer``.
            other_tokens: tokens that the pass which verifies the trees computes for other requests.
            reading: draft models may read so much of a request's text now as takes the target's time for so many
                tokens; one of which more is unread gets no tree yet. None: all.
            sampler: class of what draws children at random; None: they are the first candidates.
        """
        return [DraftTree.empty() for _ in requests]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn what became of the proposed trees; ``request.ids`` already ends with the tokens gained."""

    def close(self, request: Request) -> None:
        """A request has ended."""


class UnscoredNode(NamedTuple):
    """A node to be scored.

    Attributes:
        request: which one of the proposal, from 0.
        node: its number; ROOT for the request's root.
        parent: number of its parent; ROOT for a root.
        token: its token; of a root it means nothing.
    """

    request: int
    node: int
    parent: int
    token: int


class Scorer(ABC):
    """Scores the nodes of growing trees."""

    @abstractmethod
    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        """What may follow each of these nodes, at most ``width`` candidates.

        Nodes come in the order of their requests, each after its parent, and a root first.
        """

    def distributions(self, nodes: Sequence[tuple[int, int]]) -> Sequence[DraftDistribution]:
        """The whole draft distributions after nodes that were scored last, by request and number; to draw from.

        Raises:
            ConfigError: it has none.
        """
        raise ConfigError("this drafter does not draw children: use verification match")


def scored(name: str, scorer: Scorer, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
    """The candidates of a scorer that messages call ``name``; ConfigError unless there are some for each node."""
    candidates = scorer.score(nodes, width)
    try:
        fits = len(candidates) == len(nodes)
        for tokens, logprobs, entropy, _ in candidates:
            fits = fits and len(tokens) == len(logprobs) and math.isfinite(entropy + sum(logprobs))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ConfigError(
            f"{name}: score returned {candidates!r}: return a list with Candidates for each node, as many "
            "log-probabilities as tokens, and all of them and the entropy finite"
        )
    return candidates


class NodeStates:
    """The states of a proposal's nodes.

    Args:
        requests: the requests that the proposal is for.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._states: dict[tuple[int, int], ConstraintState | None] = {}
        self._constrained = any([request.state for request in requests])

    def of(self, nodes: Sequence[UnscoredNode]) -> list[ConstraintState | None]:
        """The states of nodes, each after its parent; None where the request has no constraint."""
        if not self._constrained:
            return [None] * len(nodes)
        states = []
        for b, node, parent, token in nodes:
            above = self._states.get((b, parent))
            state = self._requests[b].state if node == ROOT else above and above.after(token)
            self._states[b, node] = state
            states.append(state)
        return states


class Grown(NamedTuple):
    """A finished tree.

    Attributes:
        tree: what is verified.
        numbers: [N] the number that each node had while it grew.
    """

    tree: DraftTree
    numbers: Sequence[int]


NOTHING_GROWN = Grown(DraftTree.empty(), ())


class DraftSource(ABC):
    """Predicts what may follow, and keeps what state that takes for each request.

    Attributes:
        name: what people call it; by default the class's.
        learns: its predictions depend on other requests, so that drawn children would not repeat under the same seed.
        own_passes: of its own model so far.
        sources: that it is made of: the parts of an ensemble, A and B of a cascade.
        parts: what a policy enables or disables: the sources that an ensemble joins; none: itself.
        seconds: that each of ``parts`` took of the last proposal.
        model: the language model whose passes it makes, one for each layer of the trees; None: there is none.
    """

    name: str
    learns: bool = False
    own_passes: int = 0
    sources: tuple[DraftSource, ...] = ()
    parts: tuple[DraftSource, ...] = ()
    seconds: Sequence[float] = ()
    model: LanguageModel | None = None

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "name"):
            cls.name = cls.__name__

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        """All language models that make passes for it."""
        inner = tuple(model for source in self.sources for model in source.models)
        return (self.model, *inner) if self.model else inner

    def unread(self, request: Request) -> list[tuple[LanguageModel, int]]:
        """Its models, each with how many tokens it must read before it can score a request's root."""
        return [pair for source in self.sources for pair in source.unread(request)]

    @property
    def passes(self) -> int:
        """Model passes so far, prefills not counted, those of its sources included.

        Each brings its candidates to the host in one transfer, and the distributions to draw from in another.
        """
        return self.own_passes + sum([source.passes for source in self.sources])

    def prepare(self, target: LanguageModel, prefixes: int = 0) -> None:
        """Make ready to draft (``Drafter.prepare``)."""
        for source in self.sources:
            source.prepare(target, prefixes)

    def open(self, request: Request) -> None:
        """A request begins: its prompt is in ``request.ids``."""
        for source in self.sources:
            source.open(request)

    def read(self, request: Request, most: int) -> bool:
        """Read up to ``most`` tokens of what its models have not read of a request; true where more is not to be read.

        What is left then is read when the request's root is scored.
        """
        return all([*map(methodcaller("read", request, most), self.sources)])

    def fit(self, request: Request, budget: Budget) -> Budget:
        """The part of a budget that it can draft within; no nodes or no depth: it drafts nothing for this request."""
        return budget

    @abstractmethod
    def scorer(self, requests: Sequence[Request], coupled: bool) -> Scorer:
        """What scores the nodes of one proposal's trees, whose roots are the last tokens of ``request.ids``.

        Args:
            coupled: a model ranks candidates by its logits and the noise that the target will draw with; others may
                ignore it.
        """

    def forget(self) -> None:
        """The last proposal will not be observed: its step failed."""
        for source in self.sources:
            source.forget()

    def enable(self, parts: Sequence[bool], left_out: Sequence[Sequence[Request]] = ()) -> None:  # noqa: B027
        """Which of its ``parts`` draft from now on; for which requests of the next proposal each of them does not."""

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
        """The proposal's trees are finished: from now on node i of a tree is what was node ``numbers[i]``."""
        for source in self.sources:
            source.settle(requests, grown)

    def give_up(self, requests: Sequence[Request]) -> None:
        """A model had no room for a proposal: drop what it drafted of it, and what is kept for later requests."""
        for source in self.sources:
            source.give_up(requests)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn what became of the trees; ``request.ids`` already ends with the tokens gained."""
        for source in self.sources:
            source.observe(outcomes)

    def close(self, request: Request) -> None:
        """A request has ended."""
        for source in self.sources:
            source.close(request)


def fitted_depth(source: DraftSource, request: Request, budget: Budget) -> float:
    """How deep a source drafts within a budget; 0: not at all."""
    fit = source.fit(request, budget)
    return 0 if not fit.nodes else math.inf if fit.depth is None else fit.depth
