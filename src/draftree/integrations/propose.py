"""Draft trees for other engines: token ids go in, tokens and their parents come out; no model, no torch.

Drafts are continuations of earlier occurrences in the text itself and in a predicted output: what drafter ``lookup``
knows, by the same index (``drafters/ngram.py``). The tree has the n most probable paths, which of all trees of n nodes
has the largest expected acceptance length (OPT-Tree, Theorem 3.1).

    proposer = Proposer()                        # one for each request
    tokens, parents = proposer.propose(ids, 16)  # ids: the prompt, and what has been generated
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count, islice
from typing import NamedTuple

from ..drafters.ngram import LONGEST, NgramIndex, followed, probabilities
from ..errors import ConfigError

_ROOT = -1


class _Candidate(NamedTuple):
    """A node that may come next.

    Attributes:
        order: minus the probability of its path: the least is the best; then the shallowest, then the oldest.
        parent: number of its parent in the order of drafting.
    """

    order: float
    depth: int
    age: int
    parent: int
    token: int


class Proposer:
    """Drafts for one text that grows.

    Args:
        prediction: token ids of what is likely to follow the prompt.
    """

    def __init__(self, prediction: Sequence[int] = ()) -> None:
        self._prediction = list(prediction)
        self._index: NgramIndex | None = None

    def propose(
        self, ids: Sequence[int], budget: int, *, depth: int | None = None, width: int | None = None, least: float = 0.0
    ) -> tuple[list[int], list[int]]:
        """Draft a tree below the last token of a text.

        Args:
            ids: the text so far. It is read on from where the last call's ended; where it is another text, from its
                beginning.
            budget: most nodes.
            depth: deepest node; the root's children have depth 1. None: any.
            width: most children of a node; 1 gives a chain. None: any.
            least: probability of its path that a node must have.

        Returns:
            tokens [N] and the numbers of their parents [N], -1 for children of the root, in level order: a parent comes
            before its child. Fewer nodes than the budget where no more is known.

        Raises:
            ConfigError: a bound is out of range.
        """
        for name, value in (("budget", budget), ("depth", depth), ("width", width)):
            if value is not None and value < 0:
                raise ConfigError(f"{name} is {value}: use a whole number, 0 or more")
        own = self._read(list(ids))
        most = budget if width is None else min(width, budget)
        tails = [list(ids[-LONGEST:])]  # that of node i is tails[i + 1], the root's the first
        matches = [own.latest()]  # as the tails
        drafted: list[_Candidate] = []
        ages, candidates = count(), list[_Candidate]()

        def extend(node: int, probability: float, level: int) -> None:
            if depth is None or level < depth:
                for token, p in islice(probabilities(matches[node + 1]).items(), most):
                    if probability * p >= least:
                        heappush(candidates, _Candidate(-probability * p, level + 1, next(ages), node, token))

        extend(_ROOT, 1.0, 0)
        while candidates and len(drafted) < budget:
            best = heappop(candidates)
            drafted.append(best)
            tails.append([*tails[best.parent + 1], best.token][-LONGEST:])
            found = followed(matches[best.parent + 1], best.token)
            matches.append(found or own.matches(tails[-1]))
            extend(len(drafted) - 1, -best.order, best.depth)
        return _in_levels(drafted)

    def _read(self, ids: list[int]) -> NgramIndex:
        index = self._index
        if index is None or ids[: len(index)] != index.text:
            index = self._index = NgramIndex.begun(ids, self._prediction)
        else:
            index.extend(ids[len(index) :])
        return index


def _in_levels(drafted: Sequence[_Candidate]) -> tuple[list[int], list[int]]:
    """Tokens and parents of nodes, numbered level by level; those of a level keep their order."""
    ranked = sorted(range(len(drafted)), key=lambda node: drafted[node].depth)
    numbers = {_ROOT: _ROOT} | {node: number for number, node in enumerate(ranked)}
    return [drafted[node].token for node in ranked], [numbers[drafted[node].parent] for node in ranked]
