"""A corpus: continuations of earlier occurrences in files, and in the outputs of ended requests; no model.

Its successors are blended over match lengths as those of prompt lookup (``ngram.py``), so a probability means the same.

The texts lie in blocks: token ids behind one another, and a suffix array of positions, read backwards: all occurrences
of a tail are one range of it, within the range of every shorter tail. Outputs of requests are a block each at first; a
block takes in smaller ones behind it, and the oldest texts are dropped when the memory is full.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from ..artifacts import user_path
from ..errors import ConfigError
from ..models.abilities import tokenizer_of
from ..models.base import LanguageModel
from ..request import Request
from .base import Scorer, TokenSource
from .distributions import Drawing
from .ngram import NgramScorer, Tail, blended, count
from .token_recycling import vocabulary_of

Tokens = NDArray[np.int32]

SHORTEST, LONGEST = 2, 8
"""Match lengths in tokens."""
MEMORY = 16
"""MiB that a corpus may take by default: two million tokens, or ten thousand answers of 200."""
_MOST_MEMORY = (1 << 14) - 1
"""MiB: of more, positions would not be int32."""
_TOKEN_BYTES = 8
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

    def predict(self, tail: Tail) -> dict[int, float]:
        """As ``NgramIndex.predict``."""
        found = [list(block.successors(tail)) for block in self._blocks]
        counts: list[dict[int, int]] = [{} for _ in range(max(map(len, found), default=0))]
        for block in found:
            for own, successors in zip(counts, block, strict=False):
                for token in successors:
                    count(own, token)
        return blended(reversed(counts))


def _with_break(text: Sequence[int]) -> Tokens:
    return np.array([_BREAK, *text], dtype=np.int32)


class Corpus:
    """Texts to draft from. Drafters that are given the same one share it, and what it learns.

    Args:
        files: text files, and .jsonl files of objects that have text under "text", "prompt" or "completion". They are
            read at once, and tokenised for the first target.
        outputs: take in the output of every request that has ended. Other requests are then drafted for by it: their
            text stays the same, but the time that it takes may tell what somebody else was answered.
        memory: MiB that all texts may take; the oldest outputs are forgotten for new ones.

    Raises:
        ConfigError: a file cannot be read or has no text, or the memory is out of range.
    """

    def __init__(self, files: Sequence[str | Path] = (), *, outputs: bool = False, memory: int = MEMORY) -> None:
        if not 1 <= memory <= _MOST_MEMORY:
            raise ConfigError(f"corpus memory is {memory} MiB: use 1 to {_MOST_MEMORY}")
        self.files, self.outputs, self.memory = tuple(map(str, files)), outputs, memory
        self._texts = [text for file in self.files for text in read_texts(file)]
        self._index = CorpusIndex((memory << 20) // _TOKEN_BYTES)
        self._vocabulary: str | None = None
        self._lock = Lock()

    def prepare(self, target: LanguageModel) -> None:
        """Tokenise the files, once.

        Raises:
            ConfigError: the target has no tokenizer, or another vocabulary than the one before; or the files have more
                tokens than the memory holds.
        """
        with self._lock:
            vocabulary = vocabulary_of(target)
            if self._vocabulary not in (None, vocabulary):
                raise ConfigError("a corpus drafts for targets of two vocabularies: make one for each")
            if self._texts:
                self._keep([self._encoder(target)(text) for text in self._texts])
                self._texts = []
            self._vocabulary = vocabulary

    def _encoder(self, target: LanguageModel) -> Callable[[str], list[int]]:
        tokenizer = tokenizer_of(target)
        if tokenizer is None:
            raise ConfigError(f"corpus {self.files[0]} is text but the model has no tokenizer: load it with one")
        return tokenizer.encode

    def _keep(self, texts: Sequence[Sequence[int]]) -> None:
        needed = -(-_TOKEN_BYTES * sum(len(text) + 1 for text in texts) // (1 << 20)) + self.outputs
        if needed > self.memory:
            raise ConfigError(f"corpus memory is {self.memory} MiB: the files need {needed} (--corpus-memory {needed})")
        self._index.keep(texts)

    def add(self, text: Sequence[int]) -> None:
        """Take in a text of token ids; it is forgotten for later ones when the memory is full."""
        self._index.add(text)

    def predict(self, tail: Tail) -> dict[int, float]:
        """As ``NgramIndex.predict``."""
        return self._index.predict(tail)


_WAY_OUT = "give a text file, or .jsonl"


def read_texts(name: str) -> list[str]:
    """The texts of a .jsonl file, one a line (``_FIELDS``); any other file is one text.

    Raises:
        ConfigError: it cannot be read, or has no text; the message says which line.
    """
    path = user_path(name)
    try:
        content = path.read_text(encoding="utf-8-sig")
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


@dataclass(slots=True)
class CorpusSource(TokenSource):
    """Predicts what followed the last tokens in a corpus.

    Attributes:
        corpus: it takes in what is generated, if it takes outputs.
    """

    corpus: Corpus
    learns: bool = field(init=False)
    _open: set[Request] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        self.learns = self.corpus.outputs

    @property
    def name(self) -> str:
        return "corpus"

    def prepare(self, target: LanguageModel, prefixes: int = 0) -> None:
        self.corpus.prepare(target)

    def open(self, request: Request) -> None:
        self._open.add(request)

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        return NgramScorer([self.corpus] * len(requests), requests, drawing, LONGEST)

    def close(self, request: Request) -> None:
        """Add the request's output to the corpus, with the few tokens of the prompt that it followed."""
        if request in self._open and self.corpus.outputs and request.decodes:
            self.corpus.add(request.ids[max(0, request.prompt_length - LONGEST) :])
        self._open.discard(request)
