"""A head that predicts several positions in one pass: the tree comes of products of their marginals.

The pass is made when a request's root is scored. A node of depth d is then followed by the distribution of position
d + 1, whatever is on its path, so that all layers below the root take no pass. The most probable tree of n nodes under
such products is what DDTree builds (arXiv 2604.12989); here the growth policies do, as from any other source.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ...config import Budget
from ...errors import CacheError
from ...models.abilities import MarginalHead
from ...models.base import Row
from ...models.huggingface.features import feature_row
from ...policies.base import Candidates, Numbers
from ...request import Request
from ...sampling.constraint import ConstraintState
from ...tree import ROOT, Drawing
from ..base import Scorer, TokenSource, UnscoredNode
from ..constrained import NodeStates
from ..distributions import Drawn, joined
from .draft_logits import DraftLogits


@dataclass(slots=True)
class _Predicted:
    """What a head has read of a request, and predicts.

    Attributes:
        row: in the head; it holds the request's tokens but the first.
        read: tokens of the request when it predicted.
        logits: [depth, D].
    """

    row: Row
    read: int = 0
    logits: Tensor = field(default_factory=lambda: torch.zeros(0))


@dataclass(slots=True)
class MarginalSource(TokenSource):
    """Predicts by a head of marginals, no deeper than it has positions.

    Attributes:
        head: the target tracks the hidden states that it reads.
    """

    one_pass = True

    head: MarginalHead = field()
    _passes: int = field(default=0, repr=False)
    _seconds: float = field(default=0.0, repr=False)
    _states: dict[Request, _Predicted] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return self.head.capabilities.name

    @property
    def fingerprint(self) -> str:
        return self.head.capabilities.fingerprint

    @property
    def passes(self) -> int:
        return self._passes

    @property
    def pass_seconds(self) -> float:
        return self._seconds

    def fit(self, request: Request, budget: Budget) -> Budget:
        """The part that the positions reach."""
        return replace(budget, depth=self.head.depth if budget.depth is None else min(self.head.depth, budget.depth))

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        """A request's new tokens are read when its root is scored."""
        return _MarginalScorer(self, requests, drawing)

    def predict(self, requests: Sequence[Request]) -> list[Tensor]:
        """[depth, D] logits of what follows each request's last token; one pass for those that have grown.

        Raises:
            CacheError: a request has no row in the target.
        """
        fresh = [request for request in requests if self._state(request).read != len(request.ids)]
        if fresh:
            states, tokens, features = [self._states[request] for request in fresh], [], []
            for request, state in zip(fresh, states, strict=True):
                if request.row is None:
                    raise CacheError(
                        "a draft head reads the target's hidden states: give it a request with an open row"
                    )
                new = request.ids[state.row.length + 1 :]
                tokens.append(torch.tensor(new))
                features.append(feature_row(request.row).last_features(len(new), self.head.features))
            began = time.perf_counter()
            logits = self.head.marginals([state.row for state in states], tokens, features)
            self._passes, self._seconds = self._passes + 1, self._seconds + time.perf_counter() - began
            for request, state, own in zip(fresh, states, logits, strict=True):
                state.read, state.logits = len(request.ids), own
        return [self._states[request].logits for request in requests]

    def _state(self, request: Request) -> _Predicted:
        if request not in self._states:
            self.head.reserve(1, request.prompt_length + (request.params.max_tokens or 0) + self.head.depth)
            self._states[request] = _Predicted(self.head.open())
        return self._states[request]

    def close(self, request: Request) -> None:
        if request in self._states:
            self.head.close(self._states.pop(request).row)


class _MarginalScorer(Scorer):
    """Scores nodes by their depth.

    All nodes of one depth are followed by the same candidates, and those of all depths come to the host together. Where
    children are drawn, or a grammar has states, each node has candidates of its own.
    """

    def __init__(self, source: MarginalSource, requests: Sequence[Request], drawing: Drawing) -> None:
        self._source, self._requests = source, requests
        self._logits, self._states = DraftLogits(drawing), NodeStates(requests)
        self._are_apart = drawing.random or any(request.state for request in requests)
        self._depths: dict[tuple[int, int], int] = {}
        self._predicted: dict[int, Tensor] = {}
        self._table: Candidates | None = None
        self._width = 0
        self._starts: dict[int, int] = {}
        """Of each request in the table, where its first depth is."""

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> Candidates:
        """Candidates after nodes; none after those beyond the last position."""
        if roots := [n.row for n in nodes if n.node == ROOT]:
            self._predicted |= zip(roots, self._source.predict([self._requests[b] for b in roots]), strict=True)
        for b, node, parent, _ in nodes:
            self._depths[b, node] = 0 if node == ROOT else self._depths[b, parent] + 1
        depths, last = np.array([self._depths[b, node] for b, node, _, _ in nodes]), self._source.head.depth - 1
        within = np.minimum(depths, last)
        found = self._each(nodes, within, width) if self._are_apart else self._shared(nodes, within, width)
        return replace(
            found,
            logprobs=np.where((depths > last)[:, None], np.float32(-np.inf), found.logprobs),
            known=np.broadcast_to((depths < last)[:, None], found.tokens.shape),
        )

    def _shared(self, nodes: Sequence[UnscoredNode], depths: Numbers, width: int) -> Candidates:
        """Those of the nodes' depths."""
        if width > self._width:
            self._table, self._starts, self._width = None, {}, width
        if new := [b for b in dict.fromkeys(n.row for n in nodes) if b not in self._starts]:
            count = self._source.head.depth
            places = [UnscoredNode(b, ROOT, ROOT, 0) for b in new for _ in range(count)]
            found = self._candidates(places, np.tile(np.arange(count), len(new)), self._width)
            start = 0 if self._table is None else len(self._table.tokens)
            self._table = found if self._table is None else joined([self._table, found])
            self._starts |= {b: start + i * count for i, b in enumerate(new)}
        table = cast(Candidates, self._table)
        at = np.array([self._starts[n.row] for n in nodes]) + depths
        return Candidates(table.tokens[at, :width], table.logprobs[at, :width], table.entropies[at])

    def _each(self, nodes: Sequence[UnscoredNode], depths: Numbers, width: int) -> Candidates:
        """Those of each node, which can have children drawn."""
        return self._candidates(nodes, depths, width, self._states.of(nodes))

    def _candidates(
        self,
        nodes: Sequence[UnscoredNode],
        depths: Numbers,
        width: int,
        states: Sequence[ConstraintState | None] = (),
    ) -> Candidates:
        rows = {b: i for i, b in enumerate(dict.fromkeys(n.row for n in nodes))}
        logits, own = torch.cat([self._predicted[b] for b in rows]), self._source.head.vocabulary
        count, places = self._source.head.depth, depths.tolist()
        return self._logits.candidates(
            [(self._requests[n.row], n.node) for n in nodes],
            logits,
            [count * rows[n.row] + depth for n, depth in zip(nodes, places, strict=True)],
            width,
            () if own is None else [own] * len(nodes),
            depths=places,
            states=states,
        )

    def draw(self, counts: Numbers) -> Drawn:
        return self._logits.draw(counts)
