"""The seam between trees under construction and whatever says what may follow their nodes: n-grams, a table, a model.

A source shapes nothing: the growth loop and its policy choose among what it says (``grow.py``, ``drafter.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..config import Budget
from ..models.base import LanguageModel
from ..outcome import Outcome
from ..policies.base import Candidates
from ..request import Request
from ..tree import ROOT, DraftTree
from .distributions import Drawing, Drawn


class Scorer(Protocol):
    """Says what may follow the nodes of the trees under construction."""

    def score_roots(self, rows: Sequence[int], width: int) -> Candidates:
        """Candidates after the last token of these requests (positions in the batch that is being drafted)."""

    def score(self, rows: Tensor, nodes: Tensor, parents: Tensor, tokens: Tensor, width: int) -> Candidates:
        """Candidates after new nodes, flat over requests: their row, number, parent's number and token, [F] each."""

    def draw(self, counts: Tensor) -> Drawn:
        """Draw ``counts`` ([F]) children for the nodes that were asked about last, in that order."""


class TreeScorer(Scorer, Protocol):
    """Says all at once what may follow the nodes of whole trees."""

    def score_all(self, asked: Sequence[Asked], width: int) -> Candidates:
        """Candidates after nodes in the order of their rows, each after its parent; a root among them comes first."""


def ask(source: Source, scorer: Scorer, asked: Sequence[Asked], width: int) -> Candidates:
    """What a source's scorer says of nodes in order of their rows, each after its parent; in as few calls as it can."""
    if source.at_once:
        return cast(TreeScorer, scorer).score_all(asked, width)
    level: dict[tuple[int, int], int] = {}
    for row, node, parent, _ in asked:
        level[row, node] = 0 if node == ROOT else level.get((row, parent), 0) + 1
    parts: dict[int, Candidates] = {}
    order: list[int] = []
    for depth in sorted(set(level.values())):
        own = [i for i, a in enumerate(asked) if level[a.row, a.node] == depth]
        order += own
        rows, nodes, parents, tokens = torch.tensor([asked[i] for i in own]).unbind(1)
        if depth:
            parts[depth] = scorer.score(rows, nodes, parents, tokens, width)
        else:
            parts[depth] = scorer.score_roots(rows.tolist(), width)
    return joined(list(parts.values()), order)


def joined(parts: Sequence[Candidates], order: Sequence[int]) -> Candidates:
    """Candidates of several calls as those of one; ``order`` is where each of them belongs, flat over the parts."""
    width, back = max(p.tokens.shape[1] for p in parts), torch.tensor(order).argsort()
    tokens, logprobs = (
        torch.cat([pad(getattr(p, name), (0, width - p.tokens.shape[1]), value=fill) for p in parts])[back]
        for name, fill in (("tokens", 0), ("logprobs", float("-inf")))
    )
    origins = [p.origins for p in parts if p.origins is not None]
    said = torch.cat([pad(o, (0, width - o.shape[1])) for o in origins])[back] if len(origins) == len(parts) else None
    return Candidates(tokens, logprobs, torch.cat([p.entropies for p in parts])[back], said)


class Asked(NamedTuple):
    """A node that a scorer is asked about.

    Attributes:
        row: which request of the proposal.
        node: its number; ROOT for the request's root.
        parent: number of its parent, which is asked about before it.
        token: its token; of a root nothing is said.
    """

    row: int
    node: int
    parent: int
    token: int


class Grown(NamedTuple):
    """A finished tree.

    Attributes:
        tree: what is verified.
        numbers: [N] int64, the number that each node had while it grew: what the scorer knows it by.
    """

    tree: DraftTree
    numbers: Tensor


class Source(ABC):
    """Says what may follow, and keeps whatever state that takes for each request.

    Attributes:
        learns: what it says depends on other requests, so that drawn children would not repeat under the same seed.
        at_once: its scorers have ``score_all`` and may be asked about nodes of several levels in one call.
        rereads: what it says of a node gets better once the level above has read the node's parent, so that it wants to
            be asked again.
        near: its laws are nearly the target's, and so is its first candidate, however probable it finds it.
    """

    learns: ClassVar[bool] = False
    at_once: bool = False
    rereads: bool = False
    near: bool = False

    @property
    @abstractmethod
    def name(self) -> str:
        """What people call it."""

    @property
    def fingerprint(self) -> str:
        """What it drafts with: the fingerprint of its model's weights, or its name where it has no model."""
        return self.name

    @property
    def parts(self) -> tuple[Source, ...]:
        """The sources that it joins: itself, unless it is a union."""
        return (self,)

    @property
    def model(self) -> LanguageModel | None:
        """The language model whose passes it makes, one for each layer of the trees; None: there is none."""
        return None

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        """All language models that make passes for it."""
        own = [self.model] if self.model else [m for part in self.parts if part is not self for m in part.models]
        return tuple(own)

    @property
    def host(self) -> LanguageModel | None:
        """The target whose rows it drafts on; None: it keeps what it needs itself."""
        return next((part.host for part in self.parts if part is not self and part.host is not None), None)

    def unread(self, request: Request) -> list[tuple[LanguageModel, int]]:
        """Its models, each with how many tokens it must read before it can say what follows a request."""
        return [pair for part in self.parts if part is not self for pair in part.unread(request)]

    @property
    def costly(self) -> bool:
        """To ask it takes so long that it may not pay."""
        return self.model is not None

    @property
    def passes(self) -> int:
        """Model passes so far, prefills not counted.

        Each brings its candidates to the host in one transfer, and its drawn children in another.
        """
        return 0

    @property
    def successors(self) -> int:
        """How many of the target's most probable tokens after each verified node it wants to be told; 0: none."""
        return 0

    def prepare(self, target: LanguageModel) -> None:  # noqa: B027
        """It will draft for ``target``: called once, before anything else."""

    def open(self, request: Request) -> None:  # noqa: B027
        """A request begins: its prompt is in ``request.ids``."""

    def fit(self, request: Request, budget: Budget) -> Budget:
        """The part of a budget that it can draft within; no nodes or no depth: it is not asked about this request."""
        return budget

    @abstractmethod
    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        """What scores the nodes of one proposal's trees, whose roots are the last tokens of ``request.ids``."""

    def enable(self, parts: Sequence[bool]) -> None:  # noqa: B027
        """Which of its ``parts`` draft from now on."""

    @property
    def seconds(self) -> tuple[float, ...]:
        """What each of its ``parts`` took of the last proposal; none where it is the only one."""
        return ()

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:  # noqa: B027
        """The proposal's trees are finished: these are verified."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:  # noqa: B027
        """What became of them; ``request.ids`` already ends with the tokens gained."""

    @abstractmethod
    def close(self, request: Request) -> None:
        """A request has ended."""
