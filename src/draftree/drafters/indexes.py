"""Which tokens have followed in texts: n-gram indexes, suffix arrays, and the text files that they are made of.

Knows no models and no torch, so that other engines can draft by it (``integrations/propose.py``).

An index counts what followed the last n tokens of a text for several n. Counts are blended over these match lengths as
in prediction by partial matching (escape method C: a context seen C times with U different successors gives each
successor count / (C + U) and passes U / (C + U) on to the next shorter context). So a longer or more frequent match is
a surer one, and entropies mean what they mean for a model. What the shortest context passes on counts as one outcome.

A corpus lies in blocks: token ids behind one another, and a suffix array of positions, read backwards: all occurrences
of a tail are one range of it, within the range of every shorter tail. A text that is added is a block at first; a block
takes in smaller ones behind it, and the oldest texts are dropped when the memory is full.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..artifacts import LARGEST_DATA, read_text, user_path
from ..errors import ConfigError

Tail = tuple[int, ...]
Tokens = NDArray[np.int32]

SHORTEST, LONGEST = 2, 8
"""Match lengths in a corpus, in tokens."""
TOKEN_BYTES = 8
"""Of one token and its position in the suffix array."""
_OCCURRENCES = 256
"""Most occurrences of a tail in a block that are counted, evenly spread over those that there are."""
_GROWTH = 16
"""A block takes in those behind it that have a sixteenth of its tokens: there are few blocks, and they seldom grow."""
_LARGEST = 1 << 20
"""Tokens up to which blocks grow: to put these in order takes about half a second, in which no request goes on."""
_BREAK = -1
"""In place of a token before each text."""
_FIELDS = ("text", "prompt", "completion")
"""What has text in an object of a .jsonl file; of several, one follows the other."""


def count(successors: dict[int, int], token: int, times: int = 1) -> None:
    """Count a successor; the latest one comes last."""
    successors[token] = successors.pop(token, 0) + times


def blended(contexts: Iterable[Mapping[int, int]]) -> dict[int, float]:
    """Blend how often each token followed contexts, the longest of them first.

    Returns:
        probabilities in descending order; of equal ones the most recent successor comes first.
    """
    blend: dict[int, float] = {}
    left = 1.0
    for counts in contexts:
        if counts:
            total = sum(counts.values()) + len(counts)
            for token in reversed(counts):
                blend[token] = blend.get(token, 0.0) + left * counts[token] / total
            left *= len(counts) / total
    return dict(sorted(blend.items(), key=itemgetter(1), reverse=True))


class SuccessorIndex(Protocol):
    """Knows what has followed in texts."""

    def counts(self, tail: Tail) -> Mapping[int, Mapping[int, int]]:
        """How often each token followed the last n tokens of a tail, by n from the longest match on.

        Of equally frequent tokens the latest one comes last.
        """


def joined(indexes: Sequence[SuccessorIndex], tail: Tail) -> dict[int, float]:
    """Probabilities of the next tokens as if all texts were in one index, those of the last index the latest."""
    found = [index.counts(tail) for index in indexes]
    totals: dict[int, dict[int, int]] = {n: {} for n in sorted({n for each in found for n in each}, reverse=True)}
    for each in found:
        for n, successors in each.items():
            for token, times in successors.items():
                count(totals[n], token, times)
    return blended(totals.values())


class NgramIndex:
    """Which tokens have followed each n-gram, ``shortest <= n <= longest``, in texts, of which the last one grows.

    Attributes:
        text: that one.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._successors: dict[Tail, dict[int, int]] = {}
        self.text: list[int] = []

    @classmethod
    def begun(cls, ids: Sequence[int], prediction: Sequence[int], shortest: int, longest: int) -> NgramIndex:
        """Of a text, and of a predicted continuation, as if it had followed the text once before."""
        index = cls(shortest, longest)
        if prediction:
            index.extend([*ids[-longest:], *prediction])
            index.end()
        index.extend(ids)
        return index

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            for n in self._lengths:
                if n <= len(self.text):
                    count(self._successors.setdefault(tuple(self.text[-n:]), {}), token)
            self.text.append(token)

    def end(self) -> None:
        """What comes now is another text: no n-gram reaches across."""
        self.text = []

    def __len__(self) -> int:
        """Tokens of the text."""
        return len(self.text)

    def counts(self, tail: Tail) -> dict[int, Mapping[int, int]]:
        """As of ``SuccessorIndex``."""
        keys = ((n, tail[-n:]) for n in self._lengths if n <= len(tail))
        return {n: found for n, key in keys if (found := self._successors.get(key))}

    def predict(self, tail: Tail) -> dict[int, float]:
        """Probabilities of the next tokens, as ``blended``."""
        return blended(self.counts(tail).values())


def _ordered(tokens: Tokens) -> Tokens:
    """The positions of all tokens that have a successor, in the order of the tokens up to them, read backwards.

    At least ``LONGEST`` tokens count; the first token is a break, before which nothing does. Ranks of n tokens give
    those of 2n (prefix doubling, Manber & Myers 1990).
    """
    ranks, read = np.unique(tokens, return_inverse=True)[1], 1
    while read < LONGEST:
        before = np.zeros_like(ranks)
        before[read:] = ranks[:-read]
        ranks = np.unique(ranks * len(tokens) + before, return_inverse=True)[1]
        read *= 2
    kept = np.flatnonzero((tokens[:-1] != _BREAK) & (tokens[1:] != _BREAK))
    return kept[np.argsort(ranks[kept])].astype(np.int32)


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

    def successors(self, tail: Tail) -> Iterator[list[int]]:
        """What followed the last ``SHORTEST`` tokens of a tail, the last ``SHORTEST`` + 1, ..., the latest at the end.

        It ends where the next longer one does not occur.
        """
        tokens, positions = self.tokens.data, self.positions.data
        low, high = 0, len(positions)
        for n in range(1, min(len(tail), LONGEST) + 1):

            def before(position: int, back: int = n - 1) -> int:
                return tokens[position - back]

            low = bisect_left(positions, tail[-n], low, high, key=before)
            high = bisect_right(positions, tail[-n], low, high, key=before)
            if low == high:
                return
            if n >= SHORTEST:
                found = np.sort(self.positions[low : high : -(-(high - low) // _OCCURRENCES)])
                yield self.tokens[found + 1].tolist()


class CorpusIndex:
    """Which tokens have followed each tail in texts, within a bound of memory.

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

    def counts(self, tail: Tail) -> dict[int, Mapping[int, int]]:
        """As of ``SuccessorIndex``."""
        found = [list(block.successors(tail)) for block in self._blocks]
        counts: list[dict[int, int]] = [{} for _ in range(max(map(len, found), default=0))]
        for block in found:
            for own, successors in zip(counts, block, strict=False):
                for token in successors:
                    count(own, token)
        return {SHORTEST + i: counts[i] for i in reversed(range(len(counts)))}

    def predict(self, tail: Tail) -> dict[int, float]:
        """As ``NgramIndex.predict``."""
        return blended(self.counts(tail).values())


def _with_break(text: Sequence[int]) -> Tokens:
    return np.array([_BREAK, *text], dtype=np.int32)


_WAY_OUT = "give a text file, or .jsonl"


def read_texts(name: str) -> list[str]:
    """The texts of a .jsonl file, one a line (``_FIELDS``); any other file is one text.

    Raises:
        ConfigError: it cannot be read, or has no text; the message says which line.
    """
    path = user_path(name)
    try:
        content = read_text(path, LARGEST_DATA)
    except UnicodeError:
        raise ConfigError(f"corpus {name} is not valid UTF-8: convert it, for example with iconv") from None
    except OSError as error:
        raise ConfigError(f"cannot read corpus {name}: {error.strerror}: {_WAY_OUT}") from None
    if not content.strip():
        raise ConfigError(f"corpus {name} is empty: {_WAY_OUT}")
    if path.suffix != ".jsonl":
        return [content]
    lines = enumerate(content.split("\n"), start=1)
    return [_text(line, f"corpus {name} line {at}") for at, line in lines if line.strip()]


def _text(line: str, where: str) -> str:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where} is not JSON: write one object a line") from None
    found = [item[key] for key in _FIELDS if isinstance(item.get(key), str)] if isinstance(item, dict) else []
    if not (text := "".join(found)):
        *others, last = (f'"{key}"' for key in _FIELDS)
        raise ConfigError(f"{where} has no {', '.join(others)} or {last} with at least one character: add one")
    return text
