"""Where the last tokens of a path have stood in texts, and what followed them there: n-gram indexes and suffix arrays.

Knows no models and no torch, so that other engines can draft by it (``integrations/propose.py``).

A path's matches go on with its next token: where one of them has that token, the matches of the path are those that
have it, each a token longer. An index is searched where none is left.

A match of n tokens votes for its successor with the weight n^1.5; each different successor brings a weight of 3 for the
tokens that no match has. So a longer or more frequent match is a surer one, and entropies mean what they mean for a
model.

A corpus lies in blocks: token ids behind one another, and a suffix array of positions, read backwards: the longest
matches of a tail lie where it would stand. A text that is added is a block at first; a block takes in smaller ones
behind it, and the oldest texts are dropped when the memory is full.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

SHORTEST, LONGEST = 2, 16
"""Match lengths, in tokens."""
MATCHES = 16
"""Most matches of a path."""
TOKEN_BYTES = 8
"""Of one token of a corpus and its position in the suffix array."""
_UNSEEN = 3.0
_WEIGHTS = [n**1.5 for n in range(LONGEST + 1)]
"""By length. With ``_UNSEEN`` a single match of 2, 3, 4, 6, 8 tokens is right at 49, 63, 73, 83, 88%; in answers of
SmolLM2 to Spec-Bench it was at 53, 64, 70, 77, 90%."""
_GROWTH = 16
"""A block takes in those behind it that have a sixteenth of its tokens: there are few blocks, and they seldom grow."""
_LARGEST = 1 << 20
"""Tokens up to which blocks grow: to put these in order takes about a second, in which no request goes on."""
_BREAK = -1
"""In place of a token before each text."""


Match = tuple[Sequence[int], int, int]
"""A text that has the last tokens of a path, the position of what follows them there, and how many they are, at most
``LONGEST``."""


def followed(matches: Sequence[Match], token: int) -> list[Match]:
    """The matches of a path that goes on with ``token``."""
    return [
        (text, at + 1, min(length + 1, LONGEST))
        for text, at, length in matches
        if text[at] == token and at + 1 < len(text) and text[at + 1] != _BREAK
    ]


def probabilities(matches: Sequence[Match]) -> dict[int, float]:
    """Probabilities of the next tokens in descending order; of equal ones that of the earlier match comes first."""
    votes: dict[int, float] = {}
    for text, at, length in matches:
        token = text[at]
        votes[token] = votes.get(token, 0.0) + _WEIGHTS[length]
    total = sum(votes.values()) + _UNSEEN * len(votes)
    ranked = sorted(votes.items(), key=itemgetter(1), reverse=True) if len(votes) > 1 else votes.items()
    return {token: weight / total for token, weight in ranked}


class TextIndex(Protocol):
    """Finds where tokens stand in texts."""

    def matches(self, tail: Sequence[int]) -> list[Match]:
        """Up to ``MATCHES`` matches of a path's last tokens, of which at most ``LONGEST`` are given."""


def search(indexes: Sequence[TextIndex], tail: Sequence[int]) -> list[Match]:
    """Matches in several indexes, those in the first one first."""
    return [match for index in indexes for match in index.matches(tail)]


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
        self._matches: list[Match] | None = None

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
        """The one that grows."""
        return self._text[self._begin :]

    def latest(self) -> list[Match]:
        """Matches of the text's own end; from now on they follow it."""
        if self._matches is None:
            self._matches = self._search()
        return self._matches

    def _search(self) -> list[Match]:
        return self.matches(self._text[max(self._begin, len(self._text) - LONGEST) :])

    def matches(self, tail: Sequence[int]) -> list[Match]:
        """The latest matches, the last one first."""
        text, found = self._text, list[Match]()
        at = self._latest.get(tuple(tail[-self._shortest :]), 0)
        while at and len(found) < MATCHES:
            if at < len(text) and text[at] != _BREAK:
                length = self._shortest
                while length < len(tail) and text[at - 1 - length] == tail[-1 - length]:
                    length += 1
                found.append((text, at, length))
            at = self._earlier[at - 1]
        return found


def _ordered(tokens: Tokens) -> Tokens:
    """The positions of all tokens that have a successor, in the order of the tokens up to them, read backwards.

    ``LONGEST`` tokens count, and the earlier of equal positions comes first; the first token is a break, before which
    nothing counts. Ranks of n tokens give those of 2n (prefix doubling, Manber & Myers 1990).
    """
    ranks, read = np.unique(tokens, return_inverse=True)[1], 1
    while read < LONGEST:
        before = np.zeros_like(ranks)
        before[read:] = ranks[:-read]
        ranks = np.unique(ranks * len(tokens) + before, return_inverse=True)[1]
        read *= 2
    kept = np.flatnonzero((tokens[:-1] != _BREAK) & (tokens[1:] != _BREAK))
    return kept[np.argsort(ranks[kept], kind="stable")].astype(np.int32)


class _Block:
    """Texts behind one another, a break before each.

    Attributes:
        tokens: [N] of the texts.
        positions: ``_ordered``.
    """

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.positions = _ordered(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def forget(self, tokens: int) -> None:
        """Drop the oldest texts, at least so many tokens of them."""
        later = np.flatnonzero(self.tokens[tokens:] == _BREAK)
        cut = tokens + int(later[0]) if len(later) else len(self)
        self.tokens = self.tokens[cut:].copy()
        self.positions = self.positions[self.positions >= cut] - np.int32(cut)

    def matches(self, tail: Sequence[int]) -> list[Match]:
        """The longest matches, earlier ones first: they lie around where the tail would stand in the suffix array."""
        text, positions, backwards, found = self.tokens.data, self.positions.data, [*tail[::-1]], list[Match]()

        def before(position: int) -> list[int]:
            return text[max(0, position + 1 - LONGEST) : position + 1].tolist()[::-1]

        middle = bisect_right(positions, backwards, key=before)
        for position in sorted(positions[max(0, middle - MATCHES) : middle + MATCHES]):
            length = 0
            while length < len(backwards) and text[position - length] == backwards[length]:
                length += 1
            if length >= SHORTEST:
                found.append((text, position + 1, length))
        return found


class CorpusIndex:
    """Where tokens stand in texts, within a bound of memory.

    Args:
        room: most tokens; a text takes one more than it has.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._kept: list[_Block] = []
        self._passing: list[_Block] = []

    def __len__(self) -> int:
        """Tokens of all texts and what parts them."""
        return sum(map(len, self._blocks))

    @property
    def _blocks(self) -> list[_Block]:
        """The oldest texts first."""
        return self._kept + self._passing

    @property
    def bytes(self) -> int:
        """Memory that the texts take."""
        return sum(block.tokens.nbytes + block.positions.nbytes for block in self._blocks)

    def keep(self, texts: Sequence[Sequence[int]]) -> None:
        """Take texts in, never to be forgotten; they must have room."""
        self._kept.append(_Block(np.concatenate([_with_break(text) for text in texts])))

    def add(self, text: Sequence[int]) -> None:
        """Take a text in, or its end where it is too long; the oldest texts that were added are forgotten for it."""
        most = self._room - sum(map(len, self._kept))
        if len(text) < 2 or most < 3:
            return
        block = _with_break(text[1 - most :])
        self._make_room(most - len(block), most)
        while self._passing and self._takes_in(len(block)):
            block = np.concatenate([self._passing.pop().tokens, block])
        self._passing.append(_Block(block))

    def _takes_in(self, tokens: int) -> bool:
        """The last block takes in a text of so many tokens."""
        last = len(self._passing[-1])
        return last < _GROWTH * tokens and last + tokens <= _LARGEST

    def _make_room(self, left: int, most: int) -> None:
        """Forget the oldest texts until at most ``left`` tokens are there; if any, a sixteenth of ``most`` as well."""
        excess = sum(map(len, self._passing)) - left
        if excess > 0:
            excess += most // 16
        while excess > 0 and self._passing:
            oldest = self._passing[0]
            before = len(oldest)
            oldest.forget(min(excess, before))
            excess -= before - len(oldest)
            if not len(oldest):
                del self._passing[0]

    def matches(self, tail: Sequence[int]) -> list[Match]:
        """The longest matches; of equal ones the latest first."""
        found = [match for block in self._blocks for match in block.matches(tail)]
        return sorted(found[::-1], key=itemgetter(2), reverse=True)[:MATCHES]


def _with_break(text: Sequence[int]) -> Tokens:
    return np.array([_BREAK, *text], dtype=np.int32)
