"""Draft trees for other engines: token ids go in, tokens and their parents come out, without torch.

    proposer = Proposer()                        # one for each request
    tokens, parents = proposer.propose(ids, 16)  # ids: the prompt, and what has been generated

Drafts are continuations of earlier occurrences in the text itself and in a predicted output: what drafter ``lookup``
knows, in trees that grow as everywhere. They have the n most probable paths, which of all trees of n nodes have the
largest expected acceptance length (OPT-Tree, Theorem 3.1).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import MAX_NODES, Budget, SamplingParams
from ..drafters.grow import TreeDrafter
from ..drafters.ngram import NgramSource
from ..errors import ConfigError
from ..papers.opt_tree import OptTree
from ..policies.base import MAX_WIDTH, GrowthRule, Plan, descending
from ..request import Request
from ..text.detokenizer import NoText
from ..tree import ROOT, DraftTree


@dataclass(slots=True)
class _WidePaths(OptTree):
    """The most probable paths, with at most ``width`` children of a node."""

    width: int = MAX_WIDTH

    def width_for(self, nodes: int) -> int:
        return min(nodes, self.width)

    def rule(self, plan: Plan) -> GrowthRule | None:
        rule = super(_WidePaths, self).rule(plan)
        return rule and rule._replace(width=min(rule.width, self.width))


class Proposer:
    """Drafts for one text that grows.

    Args:
        prediction: token ids of what is likely to follow the prompt.
    """

    def __init__(self, prediction: Sequence[int] = ()) -> None:
        self._prediction = list(prediction)
        self._policy = _WidePaths(delta=sys.float_info.min)
        self._drafter = TreeDrafter(self._policy, NgramSource())
        self._request: Request | None = None

    def propose(
        self, ids: Sequence[int], budget: int, *, width: int | None = None, cost: float = 0.0
    ) -> tuple[list[int], list[int]]:
        """Draft a tree below the last token of a text, as large as pays.

        A node pays, as in ``auto``, where what it is expected to gain, the probability of its path, exceeds the tokens
        that its time makes otherwise: cost x (1 + sum of the paths' probabilities) / (1 + cost x nodes).

        Args:
            ids: the text so far. It is read on from where the last call's ended; where it is another text, from its
                beginning.
            budget: most nodes.
            width: most children of a node; 1 gives a chain. None: any.
            cost: what one more node adds to a pass, over the time of a pass over one token.

        Returns:
            tokens [N] and the numbers of their parents [N], -1 for children of the root, in level order: a parent comes
            before its child. Fewer nodes than the budget where no more is known, or pays.

        Raises:
            ConfigError: a bound is out of range.
        """
        for name, value in (("budget", budget), ("width", width), ("cost", cost)):
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}: use a number, 0 or more")
        self._policy.width = MAX_WIDTH if width is None else width
        if not width and width is not None:
            return [], []
        (tree,) = self._drafter.propose([self._read(list(ids))], [Budget(min(budget, MAX_NODES))])
        return _paying(tree, cost) if cost else ([*tree.tokens], [*tree.parents])

    def _read(self, ids: list[int]) -> Request:
        request = self._request
        if request is None or ids[: len(request.ids)] != request.ids:
            if request is not None:
                self._drafter.close(request)
            request = Request(ids, SamplingParams(), len(ids), frozenset(), NoText(), self._prediction)
            self._request = request
        request.ids = ids
        return request


def _paying(tree: DraftTree, cost: float) -> tuple[list[int], list[int]]:
    """The nodes of a tree that pay."""
    paths, paying, expected = tree.path_logprobs, set[int](), 1.0
    for node in descending(paths):  # a child is no more probable than its parent, and comes behind it
        if (gain := math.exp(paths[node])) <= cost * expected / (1 + cost * len(paying)):
            break
        paying.add(node)
        expected += gain
    ranked = sorted(paying)
    numbers = {node: number for number, node in enumerate([ROOT, *ranked], start=ROOT)}
    return [tree.tokens[node] for node in ranked], [numbers[tree.parents[node]] for node in ranked]
