"""A corpus: continuations of earlier occurrences in files, and in the outputs of ended requests; no model.

Its successors are blended over match lengths as those of prompt lookup (``indexes.py``): a probability means the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from ..errors import ConfigError
from ..models.base import LanguageModel
from ..models.protocols import tokenizer_of
from ..request import Request
from ..tree import Drawing
from .base import DraftSource, Scorer
from .indexes import LONGEST, TOKEN_BYTES, CorpusIndex, Tail, read_texts
from .ngram import NgramScorer
from .token_recycling import vocabulary_of

MEMORY = 16
"""MiB that a corpus may take by default: two million tokens, or ten thousand answers of 200."""
_MOST_MEMORY = (1 << 14) - 1
"""MiB: of more, positions would not be int32."""


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
        self._index = CorpusIndex((memory << 20) // TOKEN_BYTES)
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
        needed = -(-TOKEN_BYTES * sum(len(text) + 1 for text in texts) // (1 << 20)) + self.outputs
        if needed > self.memory:
            raise ConfigError(f"corpus memory is {self.memory} MiB: the files need {needed} (--corpus-memory {needed})")
        self._index.keep(texts)

    def add(self, text: Sequence[int]) -> None:
        """Take in a text of token ids; it is forgotten for later ones when the memory is full."""
        self._index.add(text)

    def predict(self, tail: Tail) -> dict[int, float]:
        """As ``NgramIndex.predict``."""
        return self._index.predict(tail)


@dataclass(slots=True)
class CorpusSource(DraftSource):
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
