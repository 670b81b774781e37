"""An EAGLE head: reads the target's hidden states and drafts with its own predictions of them (Li et al., *EAGLE*).

Its cache keeps no prediction: accepted tokens are fed with the target's hidden states when the next tree begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from ...errors import CacheError
from ...models.base import LanguageModel, Nodes, Row
from ...models.huggingface.features import feature_row
from ...models.protocols import DraftHead, HeadRow
from ...policies.base import Candidates
from ...request import Outcome, Request
from ...scores import Scores
from ...tree import ROOT, Drawing
from ..base import Grown, Scorer, UnscoredNode
from ..distributions import joined, split
from ..draft_model import ModelScorer, ModelSource, State


@dataclass(slots=True)
class EagleSource(ModelSource):
    """Predicts by an EAGLE head. Its rows hold a request's tokens but the first, which has no hidden state before it.

    Attributes:
        model: the head; the target tracks hidden states.
    """

    model: DraftHead = field()

    def prepare(self, target: LanguageModel, prefixes: int = 0) -> None:
        """Keep no rows: what a head has read of a text, it reads again in one pass of one layer."""

    def read(self, request: Request, most: int) -> bool:
        """It reads all at once, by one layer."""
        return True

    def unread(self, request: Request) -> list[tuple[LanguageModel, int]]:
        """Nothing that counts: of a prompt it needs keys and values alone, of one layer."""
        return []

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        """A request's new tokens are fed when its root is scored."""
        return _EagleScorer(self, requests, drawing)

    def tokens(self, row: Row) -> Tensor:
        """The row's draft vocabulary."""
        return self.model.own(row).tokens

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
        """Of what was drafted nothing is kept."""

    def has_read(self, request: Request, node: int) -> bool:
        """Never for long: each proposal begins with what the target has read, and its hidden states."""
        return False

    def prune(self, request: Request, keep: Sequence[int], trunk: int) -> None:
        """Of what was drafted nothing is kept."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """What was accepted comes with the target's hidden states."""


class _EagleScorer(ModelScorer):
    """Scores nodes by passes over them; roots by a pass over the tokens that the target has committed since."""

    _source: EagleSource

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> Candidates:
        """Feed nodes in as few passes as it takes: a node that follows a predicted hidden state comes after it."""
        waves: dict[tuple[int, int], int] = {}
        for b, node, parent, _ in nodes:
            before = waves.get((b, parent), 0)
            waves[b, node] = 0 if node == ROOT else before if before and self._is_read(b, parent) else before + 1
        found: dict[int, Candidates] = {}
        for wave in sorted(set(waves.values())):
            own = [i for i, n in enumerate(nodes) if waves[n.row, n.node] == wave]
            some = [nodes[i] for i in own]
            scored = super().score(some, width) if wave else self._score_roots([n.row for n in some], width)
            if len(own) == len(nodes):
                return scored
            found |= zip(own, split(scored), strict=True)
        return joined([found[i] for i in range(len(nodes))])

    def _score_roots(self, rows: Sequence[int], width: int) -> Candidates:
        """Feed each request's new tokens with the target's hidden states; the last of them is the root."""
        source = self._source
        fed: list[HeadRow] = []
        tokens, features, roots = [], [], list[Tensor]()
        for b in rows:
            request = self._requests[b]
            if request.row is None:
                raise CacheError("a draft head reads the target's hidden states: give it a request with an open row")
            if request not in source._states:
                source.model.reserve(1, request.prompt_length + (request.params.max_tokens or 0))
                source._states[request] = State(source.model.open())
            state = source._states[request]
            state.slots = {ROOT: ROOT}
            fed.append(source.model.own(state.row))
            tokens.append(torch.tensor(request.ids[state.row.length + 1 :]))
            new, ahead = len(tokens[-1]), int(self._is_beam(request))
            wanted = source.model.features
            known = source.model.nothing
            if new or ahead:
                known = feature_row(request.row).last_features(new + ahead, wanted)
            features.append(known[:new])
            roots.append(known[new:])
        scored = [(self._requests[b], ROOT) for b in rows]
        self._depths |= {(b, ROOT): 0 for b in rows}
        logits = source.model.advance(fed, tokens, features)
        source._passes += 1
        for row, root in zip(fed, roots, strict=True):
            if len(root):  # the next proposal may begin there again
                source.model.know(row, root)
        none = [0] * len(rows)
        states = self._states.of([UnscoredNode(b, ROOT, ROOT, 0) for b in rows])
        named = [row.tokens for row in fed]
        return self._logits.candidates(scored, logits, range(len(rows)), width, named, depths=none, states=states)

    def _is_beam(self, request: Request) -> bool:
        """The target has read the root, and maybe nodes below it."""
        return request.row is not None and request.row.length == len(request.ids)

    def _is_read(self, b: int, node: int) -> bool:
        """The target has read it, for beams."""
        request = self._requests[b]
        return request.row is not None and self._is_beam(request) and 0 <= node < len(request.row.parents)

    def _pass(self, rows: Sequence[Row], new: Sequence[Nodes], nodes: Sequence[UnscoredNode]) -> Scores:
        """A node's input is the target's hidden state at its parent, or else what was predicted there."""
        model = self._source.model
        if not any(self._is_read(b, parent) for b, _, parent, _ in nodes):
            return model.extend(rows, new)
        states: dict[int, list[Tensor]] = {}
        for b, _, parent, _ in nodes:
            if self._is_read(b, parent):
                row = feature_row(cast(Row, self._requests[b].row))
                state_there = model.fused(row.pending_feature(parent, model.features)[None])[0]
            else:
                state = self._state(b)
                state_there = model.own(state.row).predicted[state.slots[parent] + 1]
            states.setdefault(b, []).append(state_there)
        return model.extend(rows, new, [torch.stack(given) for given in states.values()])
