"""Rows of a ``TranslatedModel`` whose passes C makes (``native/draft_translated.c``): what they read, and have read."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, addressof, c_int32
from typing import Any, NamedTuple

from ..models.native.draft_binding import CSource, GrownTree
from ..models.native.translations import Translation
from ..models.translated import TranslatedModel, TranslatedRow
from ..request import Request
from ..text.translation import Ends
from .draft_model import ModelSource


class _Begun(NamedTuple):
    """What a step reads of a request's text.

    Attributes:
        tokens: of the target's.
        ends: of these, counted from the row's last committed token.
        ids: the model's own; C reads this memory.
    """

    tokens: list[int]
    ends: Ends
    ids: Array[Any]


class NativeTranslation(Translation):
    """A ``Translation`` that follows the rows of one drafter.

    Args:
        source: has a ``TranslatedModel`` on a model of the native engine.
    """

    def __init__(self, source: ModelSource) -> None:
        model = source.model
        assert isinstance(model, TranslatedModel)  # noqa: S101
        super().__init__(model.text, model.firsts)
        self._source, self._model = source, model
        self._begun: dict[Request, _Begun] = {}

    def begin(self) -> None:
        """A step begins."""
        super().begin()
        self._begun.clear()

    def _row(self, request: Request) -> TranslatedRow:
        row = self._source.opened(request).row
        assert isinstance(row, TranslatedRow)  # noqa: S101
        return row

    def read(self, request: Request, source: CSource) -> int:
        """Let C read the next tokens of a text; returns how many they are of the model's own."""
        row = self._row(request)
        if row.nodes:  # a step of the loop in Python failed and left them
            self._model.commit(row, [])
        run = request.ids[row.length :]
        ids, ends = self._model.next_text(row, run, hold=False)
        begun = self._begun[request] = _Begun(run, ends, (c_int32 * len(ids))(*ids))
        source.row = row.inner.number
        source.unread, source.unread_count = addressof(begun.ids), len(ids)
        source.read, source.left = ends[-1][0], self.number(ends[-1][1])
        return len(ids)

    def close(self, request: Request) -> None:
        """A request has ended."""
        self._begun.pop(request, None)

    def observe(self, request: Request, grown: GrownTree, path: Sequence[int], length: int) -> None:
        """Follow what C has committed.

        Args:
            grown: the request's tree.
            path: accepted nodes of it that this model has drafted.
            length: committed tokens of its own, now.
        """
        if (begun := self._begun.pop(request, None)) is None:
            return
        row = self._row(request)
        before, row.inner.length, row.inner.parents = row.inner.length, length, []
        if length == before and begun.ends[-1][0]:
            return  # another part drafted, and C has read nothing of this text
        tokens, ends = [*begun.tokens], [*begun.ends]
        for node in path:
            if grown.read[node] < 0:
                break
            tokens.append(grown.tree.tokens[node])
            ends.append((grown.read[node], self.text(grown.left[node])))
        row.add(tokens, [(before + read, left) for read, left in ends])
