"""What tokens and texts of one vocabulary are in another (``native/translation.c``): Python finds each once for C."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, byref, c_int32, c_void_p

from ...text.translation import FirstTokens, TextReader
from .binding import check, open_library

FIRST_OF_TOKEN, FIRST_OF_TEXT, READING = range(3)
_MOST = 1 << 16
"""Entries and texts that are kept, about: some MB."""

Key = tuple[int, int, int]
"""Kind, number of a text, token, as ``TranslationKey``."""


class CTranslationKey(Structure):
    """``TranslationKey``."""

    _fields_ = [("kind", c_int32), ("text", c_int32), ("token", c_int32)]


class Translation:
    """C's table of a ``TranslatedModel``, and the texts that it knows by numbers.

    Attributes:
        pointer: of the table.
    """

    def __init__(self, text: TextReader, firsts: FirstTokens) -> None:
        self._library, self.pointer = open_library(), c_void_p()
        check(self._library.draftree_translation_open(byref(self.pointer)))
        self._text, self._firsts = text, firsts
        self._texts, self._numbers, self._known = [b""], {b"": 0}, 0

    def __del__(self) -> None:
        if pointer := getattr(self, "pointer", None):
            self._library.draftree_translation_close(pointer)

    def begin(self) -> None:
        """Forget all once it is much: a new step uses no number of an earlier one."""
        if self._known + len(self._texts) > _MOST:
            self._library.draftree_translation_clear(self.pointer)
            self._texts, self._numbers, self._known = [b""], {b"": 0}, 0

    def number(self, text: bytes) -> int:
        if (index := self._numbers.get(text)) is None:
            index = self._numbers[text] = len(self._texts)
            self._texts.append(text)
        return index

    def text(self, number: int) -> bytes:
        return self._texts[number]

    def find(self, keys: Sequence[Key]) -> None:
        """Put the entries of these keys into C's table."""
        for kind, text, token in dict.fromkeys(keys):
            first, behind, ids = self._entry(kind, text, token)
            array, key = (c_int32 * len(ids))(*ids), CTranslationKey(kind, text, token)
            check(self._library.draftree_translation_put(self.pointer, byref(key), first, behind, array, len(ids)))
            self._known += 1

    def _entry(self, kind: int, text: int, token: int) -> tuple[int, int, Sequence[int]]:
        left = self._texts[text]
        if kind == READING:
            ids, ends = self._text.read(left, [token], hold=False)
            return self.number(left + self._text.of(token)), self.number(ends[-1][1]), ids
        if kind == FIRST_OF_TOKEN:
            return self._firsts.of_token(token), self.number(self._firsts.behind(token)), ()
        first = self._firsts.of_text(left)
        return (-1, 0, ()) if first is None else (first[0], self.number(first[1]), ())
