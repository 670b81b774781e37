"""The seam between growing trees and what predicts the tokens after their nodes: n-grams, a table, a model.

A source shapes nothing: the growth loop and its policy choose among its candidates (``grow.py``).

A node has one number while a proposal grows: that of the pool (``grow.py``), or of the proposal's trie in a cascade
(``cascade/trie.py``). In the finished tree it has another. ``Grown.numbers`` maps the second to the first, and
``TokenSource.settle`` is where a source changes over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..config import Budget
from ..models.base import LanguageModel
from ..policies.base import Candidates
from ..request import Outcome, Request
from ..tree import ROOT, DraftTree
from .distributions import Drawing, Drawn


class Scorer(Protocol):
    """Scores the nodes of growing trees."""

    def score_roots(self, rows: Sequence[int], width: int) -> Candidates:
        """Candidates after the last token of these requests (positions in the batch that is being drafted)."""

    def score(self, rows: Tensor, nodes: Tensor, parents: Tensor, tokens: Tensor, width: int) -> Candidates:
        """Candidates after new nodes, flat over requests: their row, number, parent's number and token, [F] each."""

    def draw(self, counts: Tensor) -> Drawn:
        """Draw ``counts`` ([F]) children for the nodes that were scored last, in that order."""


@runtime_checkable
class TreeScorer(Scorer, Protocol):
    """Scores nodes of several depths in one call."""

    def score_all(self, new: Sequence[UnscoredNode], width: int) -> Candidates:
        """Candidates after nodes in the order of their rows, each after its parent; a root among them comes first."""


def score_nodes(scorer: Scorer, new: Sequence[UnscoredNode], width: int) -> Candidates:
    """Candidates after nodes in order of their rows, each after its parent; in as few calls as the scorer can."""
    if isinstance(scorer, TreeScorer):
        return scorer.score_all(new, width)
    depths: dict[tuple[int, int], int] = {}
    for row, node, parent, _ in new:
        depths[row, node] = 0 if node == ROOT else depths.get((row, parent), 0) + 1
    parts: dict[int, Candidates] = {}
    order: list[int] = []
    for depth in sorted(set(depths.values())):
        own = [i for i, a in enumerate(new) if depths[a.row, a.node] == depth]
        order += own
        rows, nodes, parents, tokens = torch.tensor([new[i] for i in own]).unbind(1)
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
    merged = torch.cat([pad(o, (0, width - o.shape[1])) for o in origins])[back] if len(origins) == len(parts) else None
    entropies = torch.cat([p.entropies for p in parts])[back]
    found = [d for p in parts for d in p.distributions]
    return Candidates(
        tokens, logprobs, entropies, merged, distributions=[found[i] for i in back.tolist()] if found else ()
    )


class UnscoredNode(NamedTuple):
    """A node to be scored.

    Attributes:
        row: which request of the proposal.
        node: its number; ROOT for the request's root.
        parent: number of its parent, which is scored before it.
        token: its token; of a root it means nothing.
    """

    row: int
    node: int
    parent: int
    token: int


class Grown(NamedTuple):
    """A finished tree.

    Attributes:
        tree: what is verified.
        numbers: [N] int64, the number that each node had while it grew.
    """

    tree: DraftTree
    numbers: Tensor


class TokenSource(ABC):
    """Predicts what may follow, and keeps what state that takes for each request.

    Attributes:
        learns: its predictions depend on other requests, so that drawn children would not repeat under the same seed.
        near: its distributions are nearly the target's, and so is its first candidate, however probable it finds it.
    """

    learns: ClassVar[bool] = False
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
    def parts(self) -> tuple[TokenSource, ...]:
        """The sources that it joins: itself, unless it is an ensemble."""
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
        """Its models, each with how many tokens it must read before it can score a request's root."""
        return [pair for part in self.parts if part is not self for pair in part.unread(request)]

    @property
    def passes(self) -> int:
        """Model passes so far, prefills not counted.

        Each brings its candidates to the host in one transfer, and its drawn children in another.
        """
        return 0

    @property
    def successors(self) -> int:
        """How many of the target's most probable tokens after each verified node it learns from; 0: none."""
        return 0

    def prepare(self, target: LanguageModel) -> None:  # noqa: B027
        """Make ready to draft for ``target``: called once, before anything else."""

    def open(self, request: Request) -> None:  # noqa: B027
        """A request begins: its prompt is in ``request.ids``."""

    def fit(self, request: Request, budget: Budget) -> Budget:
        """The part of a budget that it can draft within; no nodes or no depth: it drafts nothing for this request."""
        return budget

    @abstractmethod
    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        """What scores the nodes of one proposal's trees, whose roots are the last tokens of ``request.ids``."""

    def is_stale(self, request: Request, node: int, parent: int) -> bool:
        """Scoring this node again would use what an intermediate verifier has computed at its parent since."""
        return False

    def enable(self, parts: Sequence[bool]) -> None:  # noqa: B027
        """Which of its ``parts`` draft from now on."""

    @property
    def seconds(self) -> tuple[float, ...]:
        """What each of its ``parts`` took of the last proposal; none where it is the only one."""
        return ()

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:  # noqa: B027
        """The proposal's trees are finished: from now on node i of a tree is what was node ``numbers[i]``."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:  # noqa: B027
        """What became of them; ``request.ids`` already ends with the tokens gained."""

    @abstractmethod
    def close(self, request: Request) -> None:
        """A request has ended."""


class BeamSource(TokenSource):
    """A source that can draft for beams: a request that goes on with several paths below its last token.

    The target has read the last token of ``request.ids`` and some nodes below it; these have the numbers that they have
    in the target's row. Nodes that the source has not read are scored once more, those above them first.
    """

    def has_read(self, request: Request, node: int) -> bool:
        """It holds this node, or the root, so that nodes below can be scored."""
        return False

    def leave(self, requests: Sequence[Request]) -> None:  # noqa: B027
        """The drafts of these requests are made, or could not be: the target goes on with its rows."""

    def prune(self, request: Request, keep: Sequence[int], trunk: int) -> None:  # noqa: B027
        """Keep these nodes and drop all others, as ``ForestModel.prune``; the first ``trunk`` are in ``request.ids``.

        The last of these is the root from now on, and the i-th of the others is node i.
        """
