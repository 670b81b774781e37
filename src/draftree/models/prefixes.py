"""Rows of texts that a model has read, kept for texts that begin as they do: the turns of a chat, a common preamble."""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..artifacts import write_whole
from ..errors import CacheError
from .base import LanguageModel, Row
from .protocols import SavingModel, saving

log = logging.getLogger("draftree.prefixes")

WORTHWHILE = 16
"""Tokens in common from which on a row is used again: fewer are read as fast as they are copied."""


SUFFIX = ".row"
_MOST_SAVED = 1 << 30
"""Bytes of the rows that are written."""


class PrefixCache:
    """Rows that nobody works on, the least recently used first.

    Args:
        model: whose rows they are.
        most: rows that are kept; 0: none.
    """

    def __init__(self, model: LanguageModel, most: int) -> None:
        self._model, self._most = model, most
        self._kept: list[tuple[Sequence[int], Row]] = []  # rows, and the texts that they begin with

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [row.length for _, row in self._kept]

    def find(self, ids: Sequence[int], live: Sequence[tuple[Sequence[int], Row]] = ()) -> Row:
        """A row with as much of a text as there is of it, but for its last token; an empty one where there is nothing.

        A kept row of nothing else is taken over, any other is forked.

        Args:
            live: texts that other rows hold the beginnings of, which somebody works on.
        """
        shared = [self._shared(ids, *kept) for kept in self._kept]
        others = [self._shared(ids, *other) for other in live]
        length = max([*shared, *others], default=0)
        if length < WORTHWHILE:
            return self._model.open()
        if length not in shared:
            return self._model.fork(live[others.index(length)][1], length)
        text, row = self._kept.pop(shared.index(length))
        if length == row.length:
            return row
        found = self._model.fork(row, length)
        if length == len(text):
            self._model.close(row)
        else:
            self._kept.append((text, row))
        return found

    def _shared(self, ids: Sequence[int], others: Sequence[int], row: Row) -> int:
        """How much of a text a row holds.

        Nothing where it lacks hidden states: a row that was opened before they were tracked has none.
        """
        usable = row.has_features(self._model.tracked)
        return min(common_prefix(others, ids), row.length, len(ids) - 1) if usable else 0

    def keep(self, ids: Sequence[int], row: Row) -> None:
        """Keep a row that begins as a text does, in place of the oldest where there are too many.

        It may go on otherwise: the text ended inside an accepted path, or its step was interrupted between the commit
        and the request's tokens.
        """
        self._model.commit(row, [])
        self._kept.append((ids[: row.length], row))
        while len(self._kept) > self._most:
            self.evict()

    def evict(self) -> None:
        """Close the row that was used least recently."""
        self._model.close(self._kept.pop(0)[1])

    def save(self, folder: Path) -> None:
        """Write the rows that are kept, the last ones first as far as there is room, and delete those kept no more.

        Raises:
            RunError: one cannot be written.
        """
        model, room, written = saving(self._model), _MOST_SAVED, set[Path]()
        for ids, row in reversed(self._kept):
            tokens = np.array(ids, np.int32)
            path = folder / f"{_of_model(model)}-{_digest(tokens)}{SUFFIX}"
            if not path.exists():
                text = model.fork(row, len(tokens))  # the row may go on
                content = model.saved(text)
                model.close(text)
                about = {"digest": _digest(tokens, content)}
                write_whole(path, save({"tokens": tokens, "content": content}, about))
            room -= path.stat().st_size
            written.add(path)
            if room <= 0:
                break
        for path in {*folder.glob(f"{_of_model(model)}-*{SUFFIX}")} - written:
            path.unlink(missing_ok=True)

    def load(self, folder: Path) -> None:
        """Keep the rows that were written for this model; a damaged file is named in the log and left out."""
        model = saving(self._model)
        for path in sorted(folder.glob(f"{_of_model(model)}-*{SUFFIX}"), key=lambda path: path.stat().st_mtime):
            try:
                with safe_open(path, framework="numpy") as file:
                    tokens, content = file.get_tensor("tokens"), file.get_tensor("content")
                    if file.metadata()["digest"] != _digest(tokens, content):
                        raise ValueError("its digest is another one")
                ids: list[int] = tokens.tolist()
                self.keep(ids, model.restored(len(ids), content))
            except (OSError, SafetensorError, ValueError, KeyError, TypeError, CacheError) as error:
                log.warning("the kept row in %s is damaged and was left out: %s", path, error)

    def clear(self) -> None:
        """Close all rows."""
        while self._kept:
            self.evict()


def _digest(*parts: NDArray[np.generic]) -> str:
    return hashlib.sha256(b"".join(map(np.ndarray.tobytes, parts))).hexdigest()


def _of_model(model: SavingModel) -> str:
    """What the names of the files of a model's rows begin with."""
    return hashlib.sha256(model.row_identity.encode()).hexdigest()[:16]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    most = min(len(one), len(other))
    # slices are compared in C: a handful of comparisons in place of one a token
    return bisect(range(1, most + 1), False, key=lambda n: one[:n] != other[:n])
