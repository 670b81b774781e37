"""The drafter without a model, prompt lookup: what followed the last tokens before.

``lookup`` goes on as the request's own prompt and output went on after the same tokens. A predicted output
(``Request.prediction``) counts as a text that followed the prompt once before: it is drafted from the first token on,
and again wherever the answer comes back to it after an edit. Where a constraint forces what comes next, such as the
name of a JSON key, that is drafted.

A path's matches go on with its next token: where one of them has that token, the matches of the path are those that
have it, each a token longer. An index is searched where none is left.

A match of n tokens votes for its successor with the weight n^1.5; each different successor brings a weight of 3 for the
tokens that no match has. So a longer or more frequent match is a surer one, and entropies mean what they mean for a
model: every growth policy works unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add, itemgetter, mul
from typing import Annotated

import numpy as np
from annotated_types import Interval

from ..config import check_fields
from ..policies.base import Candidates, DraftDistribution
from ..request import Request
from ..tree import ROOT
from .base import DraftSource, NodeStates, Scorer, UnscoredNode

SHORTEST, LONGEST = 2, 16
"""Lengths of matches, in tokens."""
MATCHES = 16
"""Most matches of a path."""
_UNSEEN = 3.0
_WEIGHTS = [n**1.5 for n in range(LONGEST + 1)]
"""By length. With ``_UNSEEN`` a single match of 2, 3, 4, 6, 8 tokens is right at 49, 63, 73, 83, 88%; in answers of
SmolLM2 to Spec-Bench it was at 53, 64, 70, 77, 90%."""
_BREAK = -1
"""In place of a token before each text."""


NgramMatch = tuple[Sequence[int], int, int]
"""A text that has the last tokens of a path, the position of what follows them there, and how many they are, at most
``LONGEST``."""


def followed(matches: Sequence[NgramMatch], token: int) -> list[NgramMatch]:
    """The matches of a path that goes on with ``token``."""
    return [
        (text, at + 1, min(length + 1, LONGEST))
        for text, at, length in matches
        if text[at] == token and at + 1 < len(text) and text[at + 1] != _BREAK
    ]


def probabilities(matches: Sequence[NgramMatch]) -> dict[int, float]:
    """Probabilities of the next tokens in descending order; of equal ones that of the earlier match comes first."""
    votes: dict[int, float] = {}
    for text, at, length in matches:
        token = text[at]
        votes[token] = votes.get(token, 0.0) + _WEIGHTS[length]
    total = reduce(add, votes.values(), 0.0) + _UNSEEN * len(votes)  # as C adds them: sum() is more exact
    ranked = sorted(votes.items(), key=itemgetter(1), reverse=True) if len(votes) > 1 else votes.items()
    return {token: weight / total for token, weight in ranked}


def candidates_of(blend: Mapping[int, float], width: int) -> Candidates:
    """Candidates of a distribution over few tokens.

    Args:
        blend: token -> probability, in descending order; what is missing from 1 is one outcome of the entropy.
        width: most candidates.
    """
    logs, rest = [*map(math.log, blend.values())], 1 - sum(blend.values())
    entropy = -sum(map(mul, blend.values(), logs)) - (rest * math.log(rest) if rest > 0 else 0.0)
    return Candidates([*blend][:width], logs[:width], entropy)


class NgramIndex:
    """Where each n-gram of ``shortest`` tokens stands in texts, of which the last one grows."""

    def __init__(self, shortest: int = SHORTEST) -> None:
        self._shortest = shortest
        self._text = [_BREAK] * shortest
        self._begin = shortest
        self._latest: dict[tuple[int, ...], int] = {}
        """n-gram -> the position behind where it stood last."""
        self._earlier = [0] * shortest
        """For each token the position behind where the n-gram that it ends stood before; 0: nowhere."""
        self._matches: list[NgramMatch] | None = None

    @classmethod
    def begun(cls, ids: Sequence[int], prediction: Sequence[int], shortest: int = SHORTEST) -> NgramIndex:
        """Of a text, and of a predicted continuation, as if it had followed the text once before."""
        index = cls(shortest)
        if prediction:
            index.extend([*ids[-LONGEST:], *prediction])
            index.end()
        index.extend(ids)
        return index

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        text, latest, earlier, n = self._text, self._latest, self._earlier, self._shortest
        for token in tokens:
            text.append(token)
            ngram = tuple(text[-n:])
            earlier.append(latest.get(ngram, 0))
            latest[ngram] = len(text)
            if self._matches is not None:
                self._matches = followed(self._matches, token) or self._search()

    def end(self) -> None:
        """What comes now is another text: no n-gram reaches across."""
        self._text.append(_BREAK)
        self._earlier.append(0)
        self._begin, self._matches = len(self._text), None

    def __len__(self) -> int:
        """Tokens of the text."""
        return len(self._text) - self._begin

    @property
    def text(self) -> list[int]:
        return self._text[self._begin :]

    def latest(self) -> list[NgramMatch]:
        """Matches of the text's own end; from now on they follow it."""
        if self._matches is None:
            self._matches = self._search()
        return self._matches

    def _search(self) -> list[NgramMatch]:
        return self.matches(self._text[max(self._begin, len(self._text) - LONGEST) :])

    def matches(self, tail: Sequence[int]) -> list[NgramMatch]:
        """The latest matches, the last one first."""
        text, matches = self._text, list[NgramMatch]()
        at = self._latest.get(tuple(tail[-self._shortest :]), 0)
        while at and len(matches) < MATCHES:
            if at < len(text) and text[at] != _BREAK:
                length = self._shortest
                while length < len(tail) and text[at - 1 - length] == tail[-1 - length]:
                    length += 1
                matches.append((text, at, length))
            at = self._earlier[at - 1]
        return matches


_FORCED = 0.99
"""Probability of the token that begins what a constraint forces: right at all of 508 such places that ``python -m
benchmarks.grammars`` finds, but a target may spell the string in other tokens."""


class NgramScorer(Scorer):
    """Scores nodes of the trees under construction by where the last tokens of their paths have stood.

    Args:
        indexes: of each request.
    """

    def __init__(self, indexes: Sequence[NgramIndex], requests: Sequence[Request]) -> None:
        self._indexes = indexes
        self._matches = {(b, ROOT): index.latest() for b, index in enumerate(indexes)}
        self._tails = {(b, ROOT): request.ids[-LONGEST:] for b, request in enumerate(requests)}
        self._states = NodeStates(requests)
        self._blends: dict[tuple[int, int], Mapping[int, float]] = {}

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        scored = []
        for (b, node, parent, token), state in zip(nodes, self._states.of(nodes), strict=True):
            if node != ROOT:
                tail = self._tails[b, node] = [*self._tails[b, parent], token][-LONGEST:]
                self._matches[b, node] = followed(self._matches[b, parent], token) or self._indexes[b].matches(tail)
            blend = probabilities(self._matches[b, node])
            if state is not None and (forced := state.forced) is not None:
                blend = {forced: _FORCED}
            self._blends[b, node] = blend
            scored.append(candidates_of(blend, width))
        return scored

    def distributions(self, nodes: Sequence[tuple[int, int]]) -> Sequence[DraftDistribution]:
        """Over the tokens that it knows after these nodes, whose probabilities are normalised for that."""
        distributions = list[DraftDistribution]()
        for blend in map(self._blends.__getitem__, nodes):
            logs = np.array([*map(math.log, blend.values())], np.float32)
            distributions.append(DraftDistribution(logs, np.array([*blend])))
        return distributions


@dataclass
class NgramSource(DraftSource):
    """Predicts what has followed the last tokens in each request's own prompt and output.

    Attributes:
        shortest: tokens that a match has at least.

    Raises:
        ConfigError: it is out of range.
    """

    name = "lookup"

    shortest: Annotated[int, Interval(ge=1, le=LONGEST)] = SHORTEST

    def __post_init__(self) -> None:
        check_fields(self)
        self._indexes: dict[Request, NgramIndex] = {}
        """Of requests whose trees are not grown by C, which has its own."""

    def _index(self, request: Request) -> NgramIndex:
        if request not in self._indexes:
            prompt = request.ids[: request.prompt_length]
            self._indexes[request] = NgramIndex.begun(prompt, request.prediction, self.shortest)
        return self._indexes[request]

    def scorer(self, requests: Sequence[Request], coupled: bool) -> Scorer:
        indexes = [*map(self._index, requests)]
        for index, request in zip(indexes, requests, strict=True):
            index.extend(request.ids[len(index) :])
        return NgramScorer(indexes, requests)

    def close(self, request: Request) -> None:
        self._indexes.pop(request, None)
