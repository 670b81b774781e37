"""The lower source of a hierarchy, asked what may follow below nodes that are still being drafted.

Its trees are grown with numbers of their own; what it is asked about has the numbers of the whole proposal. Tokens that
the level above has said itself are told to it first, once, so that it never reads anything twice; unless it reads the
hidden states of the level above (``Source.rereads``): then it is told of all that was kept of its own tokens too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import ConfigError
from ..policies.base import Candidates
from ..tree import ROOT
from .drawing import Drawn
from .known import Known, answer, laws_of
from .source import Asked, Scorer, Source, ask


@runtime_checkable
class Restarts(Protocol):
    """A scorer that wants to know where the level above has said a token itself: a hierarchy's."""

    def restart(self, row: int, line: Sequence[int]) -> None:
        """``line``: the nodes from the root, left out, down to that token's."""


class BelowScorer:
    """Scores the nodes of trees below nodes.

    Args:
        source: the lower source.
        scorer: its scorer of the whole proposal.
        anchors: for each tree the row of its request, what is known of that, and the node that the tree is below.
    """

    def __init__(self, source: Source, scorer: Scorer, anchors: Sequence[tuple[int, Known, int]]) -> None:
        self._source, self._scorer, self._anchors = source, scorer, anchors
        self._names: dict[tuple[int, int], int] = {}  # tree and its node -> number in the whole proposal

    def score_roots(self, rows: Sequence[int], width: int) -> Candidates:
        """Tell it of the tokens on the way to the anchors that it has not been asked about."""
        asked, ends = [], []
        for tree in rows:
            b, known, anchor = self._anchors[tree]
            told = known.ways if self._source.rereads else known.told.keys()
            self._names[tree, ROOT] = anchor
            if anchor != ROOT and isinstance(self._scorer, Restarts):
                self._scorer.restart(b, known.line(anchor))
            new = [node for node in (ROOT, *known.line(anchor)) if node not in told]
            asked += [(known, known.asked(b, node)) for node in new]
            known.ways.update(new)
            ends.append((known, anchor))
        return self._said(asked, ends, width)

    def score(self, rows: Tensor, nodes: Tensor, parents: Tensor, tokens: Tensor, width: int) -> Candidates:
        """See ``Scorer``."""
        asked, ends = [], []
        for tree, node, parent, token in torch.stack([rows, nodes, parents, tokens], 1).tolist():
            b, known, _ = self._anchors[tree]
            above = self._names[tree, parent]
            own = self._names[tree, node] = known.child(above, token)
            if own not in known.told:
                asked.append((known, Asked(b, own, above, token)))
            ends.append((known, own))
        return self._said(asked, ends, width)

    def _said(self, asked: Sequence[tuple[Known, Asked]], ends: Sequence[tuple[Known, int]], width: int) -> Candidates:
        """Ask what has not been asked; what follows the ends."""
        if asked:
            laws = laws_of(ask(self._source, self._scorer, [node for _, node in asked], width))
            for (known, (_, node, _, _)), law in zip(asked, laws, strict=True):
                known.told[node] = law
        return answer([known.told[node] for known, node in ends])

    def draw(self, counts: Tensor) -> Drawn:
        """Never asked for: schemes that need it refuse what ``learns``."""
        raise ConfigError("a hierarchy does not draw children: use verification match")
