"""Prompt lookup by n-grams: continuations of earlier occurrences of the last tokens; no model.

``lookup`` finds them in the request's own prompt and output. A predicted output (``Request.prediction``) counts as a
text that followed the prompt once before: it is drafted from the first token on, and again wherever the answer comes
back to it after an edit. Where a constraint forces what comes next, such as the name of a JSON key, that is drafted.
``corpus`` finds them in files, and in the outputs of ended requests.

Probabilities are those of the matches (``indexes.py``); entropies mean what they mean for a model, so that every growth
policy works unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import numpy as np

from ..artifacts import LARGEST_DATA, read_text, user_path
from ..errors import ConfigError
from ..models.base import LanguageModel
from ..models.protocols import tokenizer_of
from ..policies.base import Candidates
from ..request import Request
from ..sampling.constraint import ConstraintState
from ..tree import ROOT, DraftDistribution, Drawing
from .base import BeamSource, DraftSource, NodeStates, Scorer, UnscoredNode
from .distributions import Drawn, candidates_of, draw_children
from .indexes import LONGEST, SHORTEST, TOKEN_BYTES, CorpusIndex, Match, NgramIndex, TextIndex, followed, probabilities
from .token_recycling import vocabulary_of

MEMORY = 16
"""MiB that a corpus may take by default: two million tokens, or ten thousand answers of 200."""
_MOST_MEMORY = (1 << 14) - 1
"""MiB: of more, positions would not be int32."""
_FIELDS = ("text", "prompt", "completion")
"""What has text in an object of a .jsonl file; of several, one follows the other."""
_WAY_OUT = "give a text file, or .jsonl"
_FORCED = 0.99
"""Probability of the token that begins what a constraint forces: right at all of 508 such places that ``python -m
benchmarks.grammars`` finds, but a target may spell the string in other tokens."""


class NgramScorer(Scorer):
    """Scores nodes of the trees under construction by where the last tokens of their paths have stood.

    Args:
        indexes: of each request.
        matches: of each request's root.
    """

    def __init__(
        self,
        indexes: Sequence[TextIndex],
        matches: Sequence[list[Match]],
        requests: Sequence[Request],
        drawing: Drawing,
    ) -> None:
        self._indexes, self._requests, self._drawing = indexes, requests, drawing
        self._matches = {(row, ROOT): found for row, found in enumerate(matches)}
        self._tails = {(row, ROOT): request.ids[-LONGEST:] for row, request in enumerate(requests)}
        self._states = NodeStates(requests)
        self._scored: list[tuple[int, int, dict[int, float]]] = []

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        self._scored = [
            (n.row, n.node, self._predict(n, state)) for n, state in zip(nodes, self._states.of(nodes), strict=True)
        ]
        return [candidates_of(found, width) for _, _, found in self._scored]

    def _predict(self, node: UnscoredNode, state: ConstraintState | None) -> dict[int, float]:
        """What a constraint forces; else what has followed, as far as the constraint allows it."""
        found = probabilities(self._matches_of(node))
        if state is None:
            return found
        if (forced := state.forced) is not None:
            return {forced: _FORCED}
        if not found:
            return found
        allowed = state.allows(np.array(list(found))).tolist()
        return {token: p for (token, p), open_ in zip(found.items(), allowed, strict=True) if open_}

    def _matches_of(self, node: UnscoredNode) -> list[Match]:
        row, number, parent, token = node
        if number == ROOT:
            return self._matches[row, ROOT]
        tail = self._tails[row, number] = [*self._tails[row, parent], token][-LONGEST:]
        found = followed(self._matches[row, parent], token) or self._indexes[row].matches(tail)
        self._matches[row, number] = found
        return found

    def draw(self, counts: Sequence[int]) -> list[Drawn]:
        """Draw from the successors alone, normalised; see ``Scorer``."""
        nodes = [(self._requests[b], node) for b, node, _ in self._scored]
        known = [
            DraftDistribution(np.log(np.array(list(found.values()), np.float32)), np.array(list(found)))
            for _, _, found in self._scored
        ]
        return draw_children(nodes, known, counts, self._drawing)


@dataclass(slots=True)
class NgramSource(BeamSource):
    """Predicts what has followed the last tokens in each request's own prompt and output.

    Attributes:
        shortest: tokens that a match has at least.

    Raises:
        ConfigError: it is out of range.
    """

    shortest: int = SHORTEST
    _indexes: dict[Request, NgramIndex] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= LONGEST:
            raise ConfigError(f"shortest match of lookup is {self.shortest}: use 1 to {LONGEST} tokens")

    @property
    def name(self) -> str:
        return "lookup"

    def open(self, request: Request) -> None:
        self._indexes[request] = NgramIndex.begun(request.ids, request.prediction, self.shortest)

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        indexes = [self._indexes[r] for r in requests]
        for index, request in zip(indexes, requests, strict=True):
            index.extend(request.ids[len(index) :])
        return NgramScorer(indexes, [index.latest() for index in indexes], requests, drawing)

    def close(self, request: Request) -> None:
        self._indexes.pop(request, None)


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

    def matches(self, tail: Sequence[int]) -> list[Match]:
        """As of ``TextIndex``."""
        return self._index.matches(tail)


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
        matches = [self.corpus.matches(request.ids[-LONGEST:]) for request in requests]
        return NgramScorer([self.corpus] * len(requests), matches, requests, drawing)

    def close(self, request: Request) -> None:
        """Add the request's output to the corpus, with the few tokens of the prompt that it followed."""
        if request in self._open and self.corpus.outputs and request.decodes:
            self.corpus.add(request.ids[max(0, request.prompt_length - LONGEST) :])
        self._open.discard(request)
