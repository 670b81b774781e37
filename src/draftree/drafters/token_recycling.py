"""Token recycling: the target's latest top-k successors of each token, kept in a table and in a safetensors file."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..artifacts import write_whole
from ..errors import ConfigError, DraftreeWarning, RunError
from ..models.base import LanguageModel
from ..policies.base import Candidates
from ..request import Outcome, Request
from ..tree import ROOT, Drawing
from .base import DraftSource, Scorer, UnscoredNode
from .distributions import candidates_of

FORMAT = "draftree recycled successors"
VERSION = "1"
_WAY_OUT = "give a file that --recycle-file wrote with this target, or a new name"


class Entries(NamedTuple):
    """Contexts and their successors.

    Attributes:
        contexts: [R, 2] int64 (``Context``).
        successors: [R, k] int32.
        probabilities: [R, k] float32, descending; 0 where there is none.
    """

    contexts: NDArray[np.int64]
    successors: NDArray[np.int32]
    probabilities: NDArray[np.float32]

    def fit(self, vocab: int) -> bool:
        """They can be of a vocabulary of this size."""
        contexts, successors, probabilities = self
        if [x.dtype for x in self] != [np.int64, np.int32, np.float32] or any(x.ndim != 2 for x in self):
            return False
        count, width = successors.shape
        if not width or contexts.shape != (count, 2) or probabilities.shape != (count, width):
            return False
        return bool(
            ((contexts >= np.array([ANY, 0])) & (contexts < vocab)).all()
            and ((successors >= 0) & (successors < vocab)).all()
            and ((probabilities >= 0) & (probabilities <= 1.001)).all()
            and (probabilities[:, 1:] <= probabilities[:, :-1]).all()
        )


def vocabulary_of(target: LanguageModel) -> str:
    """What tells vocabularies apart: a digest of all tokens, or their number where there is no tokenizer."""
    tokenizer = getattr(target, "tokenizer", None)
    if tokenizer is None:
        return f"{target.capabilities.vocab_size} tokens"
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def write_entries(path: Path, entries: Entries, vocabulary: str) -> None:
    """Write the file, whole or not at all.

    Raises:
        RunError: it cannot be written.
    """
    from safetensors.numpy import save

    about = {"format": FORMAT, "version": VERSION, "vocabulary": vocabulary}
    write_whole(path, save(entries._asdict(), metadata=about))


def read_entries(path: Path, vocab: int, vocabulary: str) -> Entries | None:
    """What the file has; None where there is no file but could be one.

    Raises:
        ConfigError: it cannot be read, is no such file, or is of another vocabulary; or its folder is not there.
    """
    from safetensors import SafetensorError, safe_open

    if not path.exists() and path.parent.is_dir():
        return None
    try:
        with safe_open(path, framework="np") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT or about.get("version") != VERSION:
                raise ConfigError(f"{path} is no file of recycled successors of version {VERSION}: {_WAY_OUT}")
            if about.get("vocabulary") != vocabulary:
                raise ConfigError(f"recycle file {path} is of a model with another vocabulary: {_WAY_OUT}")
            entries = Entries(*(file.get_tensor(name) for name in Entries._fields))
    except OSError as error:
        raise ConfigError(f"cannot read recycle file {path}: {error.strerror or error}: {_WAY_OUT}") from None
    except SafetensorError as error:
        raise ConfigError(f"recycle file {path} is corrupt ({error}): {_WAY_OUT}") from None
    if not entries.fit(vocab):
        raise ConfigError(f"recycle file {path} is corrupt (its numbers make no table): {_WAY_OUT}")
    return entries


WIDTH = 8
"""Successors of a context that are kept, as many as in the paper."""
CAPACITY = 1 << 16
"""Contexts that are kept, those that were seen last: 4.2 MB, and the index of their names."""
_SURE, _FAIR = 0.5, 0.35
"""How far the successors of the last two tokens are believed, and those of the last one where the two are not known: so
that of first candidates with a probability of 0.20, 0.60 on average 0.18, 0.63 are right where lookup is not sure."""

Context = tuple[int, int]
"""The token before the last, ANY for whatever, and the last token."""
ANY = -1


class SuccessorTable:
    """The last successors seen of every context, in numpy; queries are small, which lists handle faster.

    Args:
        width: successors of each.
        capacity: most contexts.
    """

    def __init__(self, width: int, capacity: int = CAPACITY) -> None:
        self._tokens = np.zeros((capacity, width), dtype=np.int32)
        self._probabilities = np.zeros((capacity, width), dtype=np.float32)
        self._rows: OrderedDict[Context, int] = OrderedDict()  # a dict would search its front for what it has lost

    def put(
        self, contexts: Mapping[Context, int], tokens: NDArray[np.int32], probabilities: NDArray[np.float32]
    ) -> None:
        """Keep [R, k] successors; ``contexts``: those that they were found after, each with its row of the R."""
        at, rows = [*map(self._row, contexts)], [*contexts.values()]
        width = min(tokens.shape[1], self._tokens.shape[1])
        self._tokens[at, :width] = tokens[rows, :width]
        self._probabilities[at, :width] = probabilities[rows, :width]

    def _row(self, context: Context) -> int:
        """A context's row, the oldest one's for a new context when all are taken."""
        row = self._rows.pop(context, None)
        if row is None:
            row = len(self._rows)
            if row == len(self._tokens):
                _, row = self._rows.popitem(last=False)
        self._rows[context] = row
        return row

    def after(self, context: Context) -> dict[int, float]:
        """Probabilities of all that is known to follow in descending order; of equal ones the surer source's first.

        They are blended of what followed the last two tokens and what followed the last one; the rest is one outcome.
        """
        before, token = context
        pair, one = None if before == ANY else self._rows.get(context), self._rows.get((ANY, token))
        blend: dict[int, float] = {}
        for row, weight in ((pair, _SURE), (one, _FAIR if pair is None else (1 - _SURE) * _FAIR)):
            if row is not None:
                for successor, p in zip(self._tokens[row].tolist(), self._probabilities[row].tolist(), strict=True):
                    if p:
                        blend[successor] = blend.get(successor, 0.0) + weight * p
        return dict(sorted(blend.items(), key=itemgetter(1), reverse=True))

    @property
    def entries(self) -> Entries:
        """All that is known, the oldest first."""
        at = np.array(list(self._rows.values()), dtype=np.int64)
        contexts = np.array(list(self._rows), dtype=np.int64).reshape(-1, 2)
        return Entries(contexts, self._tokens[at], self._probabilities[at])

    def fill(self, entries: Entries) -> None:
        """Take over what was known elsewhere, the latest of it where it is too much."""
        most = len(self._tokens)
        if keys := {(before, token): row for row, (before, token) in enumerate(entries.contexts[-most:].tolist())}:
            self.put(keys, entries.successors[-most:], entries.probabilities[-most:])


@dataclass(slots=True)
class TokenRecyclingSource(DraftSource):
    """Predicts what the target found probable when it last saw the same one or two tokens; requests share the table.

    Attributes:
        width: successors that are kept of each context.
        file: read when it is there, and written whenever the last open request has ended; None: nothing is kept.

    Raises:
        ConfigError: a width below 1.
    """

    learns = True

    width: int = WIDTH
    file: Path | None = None
    _table: SuccessorTable = field(init=False, repr=False)
    _vocabulary: str = field(default="", repr=False)
    _open: set[Request] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"recycle keeps {self.width} successors of a context: use at least 1")
        self._table = SuccessorTable(self.width)

    @property
    def name(self) -> str:
        return "recycle"

    @property
    def reads_scores(self) -> bool:
        return True

    def prepare(self, target: LanguageModel, prefixes: int = 0) -> None:
        """Read the file.

        Raises:
            ConfigError: the file cannot be read, is none, or is of another vocabulary; or its folder is not there.
        """
        if self.file is not None:
            self._vocabulary = vocabulary_of(target)
            if (entries := read_entries(self.file, target.capabilities.vocab_size, self._vocabulary)) is not None:
                self._table.fill(entries)

    def open(self, request: Request) -> None:
        self._open.add(request)

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        return _RecyclingScorer(self._table, requests)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the successors of every verified node; where a context was there twice, those on the accepted path."""
        for outcome in outcomes:
            if (found := outcome.top(self.width)) is not None:
                tree, ids = outcome.tree, outcome.request.ids[: -outcome.taken]
                of_node = [*tree.tokens.tolist(), ids[-1]]  # ROOT reads the last
                before = [*(of_node[parent] for parent in tree.parents.tolist()), ids[-2] if len(ids) > 1 else ANY]
                contexts: dict[Context, int] = {}
                for node in [*range(len(tree)), ROOT, *outcome.path]:
                    contexts[ANY, of_node[node]] = contexts[before[node], of_node[node]] = node
                self._table.put(contexts, found.tokens, np.exp(found.logprobs))

    def close(self, request: Request) -> None:
        """Write the file when no request is left; where that fails, warn and go on."""
        if request not in self._open:
            return
        self._open.remove(request)
        if self.file is not None and not self._open:
            try:
                write_entries(self.file, self._table.entries, self._vocabulary)
            except RunError as error:
                warnings.warn(str(error), DraftreeWarning, stacklevel=2)


class _RecyclingScorer(Scorer):
    """Scores nodes by the last two tokens on their paths."""

    def __init__(self, table: SuccessorTable, requests: Sequence[Request]) -> None:
        self._table = table
        self._requests = requests
        self._tokens: dict[tuple[int, int], int] = {}

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        found = []
        for b, node, parent, token in nodes:
            if node == ROOT:
                ids = self._requests[b].ids
                context = ids[-2] if len(ids) > 1 else ANY, ids[-1]
            else:
                context = self._tokens[b, parent], token
            self._tokens[b, node] = context[1]
            found.append(candidates_of(self._table.after(context), width))
        return found
