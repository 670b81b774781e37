"""Token recycling: the target's latest top-k successors of each token, kept in a table."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..policies.base import Candidates
from ..request import Outcome, Request
from ..tree import ROOT, Drawing
from .base import DraftSource, Scorer, UnscoredNode, candidates_of

WIDTH = 8
"""Successors of a context that are kept, as many as in the paper."""
CAPACITY = 1 << 16
"""Contexts that are kept, those that were seen last: 4.2 MB, and the index of their names."""
_SURE, _FAIR = 0.5, 0.35
"""How far the successors of the last two tokens are believed, and those of the last one where the two are not known: so
that of first candidates with a probability of 0.20, 0.60 on average 0.18, 0.63 are right where lookup is not sure."""

Context = tuple[int, int]
"""The token before the last, ANY for whatever, and the last token."""
ANY = -1


class SuccessorTable:
    """The last successors seen of every context, in numpy; queries are small, which lists handle faster.

    Args:
        width: successors of each.
        capacity: most contexts.
    """

    def __init__(self, width: int, capacity: int = CAPACITY) -> None:
        self._tokens = np.zeros((capacity, width), dtype=np.int32)
        self._probabilities = np.zeros((capacity, width), dtype=np.float32)
        self._rows: OrderedDict[Context, int] = OrderedDict()  # a dict would search its front for what it has lost

    def put(
        self, contexts: Mapping[Context, int], tokens: NDArray[np.int32], probabilities: NDArray[np.float32]
    ) -> None:
        """Keep [R, k] successors; ``contexts``: those that they were found after, each with its row of the R."""
        at, rows = [*map(self._row, contexts)], [*contexts.values()]
        width = min(tokens.shape[1], self._tokens.shape[1])
        self._tokens[at, :width] = tokens[rows, :width]
        self._probabilities[at, :width] = probabilities[rows, :width]

    def _row(self, context: Context) -> int:
        """A context's row, the oldest one's for a new context when all are taken."""
        row = self._rows.pop(context, None)
        if row is None:
            row = len(self._rows)
            if row == len(self._tokens):
                _, row = self._rows.popitem(last=False)
        self._rows[context] = row
        return row

    def after(self, context: Context) -> dict[int, float]:
        """Probabilities of all that is known to follow in descending order; of equal ones the surer source's first.

        They are blended of what followed the last two tokens and what followed the last one; the rest is one outcome.
        """
        before, token = context
        pair, one = None if before == ANY else self._rows.get(context), self._rows.get((ANY, token))
        blend: dict[int, float] = {}
        for row, weight in ((pair, _SURE), (one, _FAIR if pair is None else (1 - _SURE) * _FAIR)):
            if row is not None:
                for successor, p in zip(self._tokens[row].tolist(), self._probabilities[row].tolist(), strict=True):
                    if p:
                        blend[successor] = blend.get(successor, 0.0) + weight * p
        return dict(sorted(blend.items(), key=itemgetter(1), reverse=True))


@dataclass(slots=True)
class TokenRecyclingSource(DraftSource):
    """Predicts what the target found probable when it last saw the same one or two tokens; requests share the table.

    Attributes:
        width: successors that are kept of each context.

    Raises:
        ConfigError: a width below 1.
    """

    learns = True

    width: int = WIDTH
    _table: SuccessorTable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"recycle keeps {self.width} successors of a context: use at least 1")
        self._table = SuccessorTable(self.width)

    @property
    def name(self) -> str:
        return "recycle"

    @property
    def reads_scores(self) -> bool:
        return True

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        return _RecyclingScorer(self._table, requests)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the successors of every verified node; where a context was there twice, those on the accepted path."""
        for outcome in outcomes:
            if (found := outcome.top(self.width)) is not None:
                tree, ids = outcome.tree, outcome.request.ids[: -outcome.taken]
                of_node = [*tree.tokens.tolist(), ids[-1]]  # ROOT reads the last
                before = [*(of_node[parent] for parent in tree.parents.tolist()), ids[-2] if len(ids) > 1 else ANY]
                contexts: dict[Context, int] = {}
                for node in [*range(len(tree)), ROOT, *outcome.path]:
                    contexts[ANY, of_node[node]] = contexts[before[node], of_node[node]] = node
                self._table.put(contexts, found.tokens, np.exp(found.logprobs))


class _RecyclingScorer(Scorer):
    """Scores nodes by the last two tokens on their paths."""

    def __init__(self, table: SuccessorTable, requests: Sequence[Request]) -> None:
        self._table = table
        self._requests = requests
        self._tokens: dict[tuple[int, int], int] = {}

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        found = []
        for b, node, parent, token in nodes:
            if node == ROOT:
                ids = self._requests[b].ids
                context = ids[-2] if len(ids) > 1 else ANY, ids[-1]
            else:
                context = self._tokens[b, parent], token
            self._tokens[b, node] = context[1]
            found.append(candidates_of(self._table.after(context), width))
        return found
