"""Separates what a model thinks, says and calls in Harmony's channels (``text.harmony``), as the text comes."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping

from ..request import Chunk
from ..text.harmony import CHANNEL, CONSTRAIN, FUNCTIONS, MESSAGE
from .tools import Parsed, ToolCall

_RECIPIENT = re.compile(r"\bto=([\w.:/-]+)")
_ANALYSIS = re.compile(re.escape(CHANNEL) + r"\s*analysis")
_APART = "\n\n"
"""Between two messages of what is thought, or of what is said."""


class ChannelParser:
    """A ``Parser`` of messages in channels, whole or cut off anywhere.

    Control tokens are told by their ids: text that spells one is text. A message to anybody but an offered function is
    a thought; headers, and what stands between messages, are left out.

    Attributes:
        tokens: of thoughts, those that begin and end their texts included.

    Args:
        tags: control tokens, and those that end an answer, with the texts that they have where they are shown.
        begun: the message that the prompt ends in, without the token that begins it; None: it ends in none.
        functions: whether functions are offered.
    """

    def __init__(self, tags: Mapping[int, str], *, begun: str | None, functions: bool) -> None:
        self.calls: list[ToolCall] = []
        self.tokens, self.thinking = 0, False
        self._tags, self._functions = tags, functions
        self._held, self._due = "", deque[str]()  # text, and the control tokens whose texts have not come as a whole
        header, message, _ = (begun or "").partition(MESSAGE)
        self._header: str | None = None if begun is None else header  # None: inside a text
        self._call: ToolCall | None = None  # whose arguments the text is; None: it is thought, or said
        self._thought, self._kinds, self._between = False, set[bool](), ""  # kinds: of texts that have come
        if message:
            list(self._begin(header))

    @property
    def called(self) -> bool:
        return bool(self.calls) and self.calls[-1].whole

    def push(self, chunk: Chunk) -> list[Parsed]:
        before, tag = self._is_thought, self._tags.get(chunk.token)
        self._held += chunk.text
        if tag is not None:
            self._due.append(tag)
        parts = list(self._parts(last=False))
        self.tokens += before or self._is_thought
        self.thinking = tag is not None or self._header is not None or self._thought
        return parts

    def end(self, rest: str) -> list[Parsed]:
        """Return the text that was held back at the end of an answer.

        Args:
            rest: ``Request.rest``.
        """
        self._held += rest
        return list(self._parts(last=True))

    @property
    def _is_thought(self) -> bool:
        return self._header is None and self._thought

    def _parts(self, *, last: bool) -> Iterator[Parsed]:
        """What has come up to each control token and behind it; the text of one that ends an answer does not come."""
        while self._due:
            at = self._held.rfind(self._due[0])
            if at < 0 and not last:
                return
            tag, text = self._due.popleft(), self._held if at < 0 else self._held[:at]
            self._held = self._held[len(text) + len(tag) :]
            yield from self._text(text)
            yield from self._control(tag)
        text, self._held = self._held, ""
        yield from self._text(text)

    def _text(self, text: str) -> Iterator[Parsed]:
        if self._header is not None:
            self._header += text
        elif text and self._call is not None:
            yield Parsed(text, self._call)
        elif text:
            yield Parsed(self._between + text, thought=self._thought)
            self._kinds.add(self._thought)
            self._between = ""

    def _control(self, tag: str) -> Iterator[Parsed]:
        if self._header is not None and tag == MESSAGE:
            yield from self._begin(self._header)
        elif self._header is not None and tag in (CHANNEL, CONSTRAIN):
            self._header += tag
        elif tag not in (MESSAGE, CONSTRAIN):
            call, self._call = self._call, None
            if call is not None:
                call.whole = True
                yield Parsed("", call, ends=True)
            self._header = CHANNEL if tag == CHANNEL else ""

    def _begin(self, header: str) -> Iterator[Parsed]:
        """Begin a text: that of a call, a thought, or what is said."""
        found = _RECIPIENT.search(header)
        recipient = found[1] if found else ""
        if self._functions and recipient.startswith(FUNCTIONS):
            self._call = ToolCall(len(self.calls), recipient.removeprefix(FUNCTIONS))
            self.calls.append(self._call)
            yield Parsed("", self._call, begins=True)
        self._header, self._thought = None, not self._call and bool(recipient or _ANALYSIS.search(header))
        self._between = _APART if self._thought in self._kinds else ""
