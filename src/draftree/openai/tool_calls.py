"""An answer's text as it comes, taken apart: what is said, and the functions that are called behind it."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from ..request import Chunk
from ..text.detokenizer import overlap
from ..text.encoding import CALL_TAGS

_OPENS, _CLOSES = CALL_TAGS
_HEAD = re.compile(r'\s*\{"name": "([^"\\]*)", "arguments": ')
_END = f"}}\n{_CLOSES}"
"""Behind arguments, in which it cannot be: JSON on one line has no line break."""


@dataclass(slots=True)
class ToolCall:
    """A call of a function.

    Attributes:
        index: its number in the answer.
        key: its id.
        arguments: as JSON, as far as they have come.
        whole: its end has come.
    """

    index: int
    key: str
    name: str
    arguments: str = ""
    whole: bool = False


@dataclass(slots=True)
class Parsed:
    """What a piece of text has brought.

    Attributes:
        content: what is said.
        begun: calls whose names have come.
        arguments: index of a call -> what has come of its arguments.
        ended: calls whose ends have come.
    """

    content: str = ""
    begun: list[ToolCall] = field(default_factory=list)
    arguments: dict[int, str] = field(default_factory=dict)
    ended: list[ToolCall] = field(default_factory=list)


class CallParser:
    """Parses texts of ``Grammars.calls``, whole or cut off anywhere.

    White space between what is said and a call, or between calls, belongs to neither.

    Attributes:
        content: what was said.
        calls: that were begun.

    Args:
        tags: tokens of tags that give no text.
    """

    def __init__(self, tags: Mapping[int, str]) -> None:
        self.content = ""
        self.calls: list[ToolCall] = []
        self._tags = tags
        self._held = ""
        self._inside = False  # a tag has opened, and no name has come

    @classmethod
    def of(cls, chunks: Iterable[Chunk], tags: Mapping[int, str]) -> Self:
        parser = cls(tags)
        for chunk in chunks:
            parser.push(chunk)
        parser.end()
        return parser

    @property
    def called(self) -> bool:
        """There are calls, all of them whole."""
        return bool(self.calls) and self.calls[-1].whole and not self._inside

    def push(self, chunk: Chunk) -> Parsed:
        self._held += chunk.text + self._tags.get(chunk.token, "")
        found = Parsed()
        while self._step(found):
            pass
        return found

    def end(self) -> Parsed:
        """The answer has ended: what was held back."""
        found, held = Parsed(), self._held
        self._held = ""
        if self._open is not None:
            if not _is_json(self._open.arguments):  # else what is held has begun to end the call
                self._argue(found, self._open, held)
        elif not (self._inside or self.calls):
            self._say(found, held)
        return found

    @property
    def _open(self) -> ToolCall | None:
        return self.calls[-1] if self.calls and not self.calls[-1].whole else None

    def _step(self, found: Parsed) -> bool:
        if (call := self._open) is not None:
            text, call.whole = self._until(_END)
            self._argue(found, call, text)
            if call.whole:
                found.ended.append(call)
            return call.whole
        if self._inside:
            if (head := _HEAD.match(self._held)) is None:
                return False
            self._held, self._inside = self._held[head.end() :], False
            self.calls.append(ToolCall(len(self.calls), f"call_{secrets.token_hex(12)}", head[1]))
            found.begun.append(self.calls[-1])
            return True
        text, self._inside = self._until(_OPENS)
        said = text.rstrip()
        if not self._inside:
            self._held = text[len(said) :] + self._held
        if not self.calls:
            self._say(found, said)
        return self._inside

    def _until(self, mark: str) -> tuple[str, bool]:
        """Text before a mark, which is taken too if it is there; the beginning of one stays held."""
        at = self._held.find(mark)
        if at >= 0:
            text, self._held = self._held[:at], self._held[at + len(mark) :]
            return text, True
        cut = len(self._held) - overlap(self._held, mark)
        text, self._held = self._held[:cut], self._held[cut:]
        return text, False

    def _say(self, found: Parsed, text: str) -> None:
        found.content += text
        self.content += text

    def _argue(self, found: Parsed, call: ToolCall, text: str) -> None:
        if text:
            found.arguments[call.index] = found.arguments.get(call.index, "") + text
            call.arguments += text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
