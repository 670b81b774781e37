"""Drafting along a known output: what a drafter proposes where the target has already said what comes next."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from ..config import Budget, SamplingParams
from ..draft.base import Drafter, Outcome, StepCost
from ..models.base import Row
from ..sequence import Sequence
from ..text import NoText
from ..tree import ROOT, DraftTree

_UNMEASURED = StepCost(batch=1, draft=0.0, verify=0.0, other=0.0, draft_passes=0)


class Replay:
    """A sequence that is decoded again with a drafter and without its target; a context that closes it.

    Attributes:
        left: the output that is still to come; its last token is never drafted from.
    """

    def __init__(
        self,
        drafter: Drafter,
        prompt: Many[int],
        output: Many[int],
        params: SamplingParams,
        features: Tensor | None = None,
    ) -> None:
        """
        Args:
            prompt, output: what the target was asked and what it said.
            params: how it decoded; the draft law follows its temperature.
            features: [n, H] its hidden states at all tokens but the last, for a drafter that reads them.
        """
        self.left = list(output[1:])
        self._drafter, self._features = drafter, features
        self._sequence = Sequence(prompt, params, len(output), frozenset(), NoText())
        none = torch.zeros(0)
        self._sequence.row = Row(slot=-1, length=0, logits=none, parents=none.long())
        drafter.open(self._sequence)
        self._gain(list(output[:1]))

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *error: object) -> None:
        self._drafter.close(self._sequence)

    def _gain(self, tokens: list[int]) -> None:
        row = self._sequence.row
        self._sequence.ids += tokens
        if row is not None:
            start, row.length = row.length, len(self._sequence.ids) - 1
            if self._features is not None:
                row.features.append(self._features[start : row.length])

    def propose(self, nodes: int) -> DraftTree:
        """What it drafts here, no deeper than the output goes on."""
        return self._drafter.propose([self._sequence], [Budget(nodes, len(self.left))])[0]

    def advance(self, tree: DraftTree, path: list[int], tokens: int) -> None:
        """Take the next ``tokens`` of the output, of which the nodes of ``path`` were drafted."""
        gained, self.left = self.left[:tokens], self.left[tokens:]
        self._gain(gained)
        self._drafter.observe([Outcome(self._sequence, tree, path, gained, len(gained), _UNMEASURED)])

    def accepted(self, tree: DraftTree) -> list[int]:
        """The nodes that match verification accepts: the longest path that the output follows."""
        path: list[int] = []
        node = ROOT
        for token in self.left:
            node = next((c for c in tree.children(node) if int(tree.tokens[c]) == token), ROOT)
            if node == ROOT:
                break
            path.append(node)
        return path
