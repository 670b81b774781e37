"""Separates a model's thought from its answer, as the text comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..request import Chunk
from ..text.encoding import THINK_TAGS
from .tools import CallParser, Parsed, ToolCall, overlap

_OPENS, _CLOSES = THINK_TAGS
_NO_TOKEN = -1
"""Of a chunk that is text alone."""


class ThoughtParser:
    """A ``Parser`` of thoughts, which come first if at all, and what follows: text, or texts of ``CallParser``.

    White space around thoughts belongs to neither.

    Attributes:
        tokens: of thoughts, their tags included.

    Args:
        tags: tokens of tags that give no text.
        inside: the prompt has begun the thought.
        inner: parses what follows; None: it is text.
    """

    def __init__(self, tags: Mapping[int, str], *, inside: bool, inner: CallParser | None) -> None:
        self.tokens = 0
        self.calls: list[ToolCall] = [] if inner is None else inner.calls
        self._tags, self._inner = tags if inner is None else {**inner.tags, **tags}, inner
        self._waiting: list[Chunk] | None = None if inside else []  # of which it is open what they begin
        self._held = ""  # of a thought: white space, or what may begin its end
        self._thought, self._begun, self._blank = inside, False, inside  # blank: nothing of the answer has come

    @property
    def called(self) -> bool:
        return self._inner is not None and self._inner.called

    @property
    def thinking(self) -> bool:
        """Whether the last text belongs to a thought, or is white space behind it."""
        return self._thought or self._blank

    def push(self, chunk: Chunk) -> list[Parsed]:
        return list(self._parts(chunk))

    def end(self, rest: str) -> list[Parsed]:
        """Return the text that was held back at the end of an answer.

        Args:
            rest: ``Request.rest``.
        """
        parts = self.push(Chunk(_NO_TOKEN, rest, False, 0))
        parts += [part for chunk in self._waiting or () for part in self._answer(chunk)]
        if self._thought and (rest := self._held.rstrip()):
            parts.append(Parsed(rest, thought=True))
        return parts + ([] if self._inner is None else self._inner.end(""))

    def _parts(self, chunk: Chunk) -> Iterator[Parsed]:
        if self._waiting is not None:
            self._waiting.append(chunk)
            text = "".join(map(self._text, self._waiting)).lstrip()
            if _begins(text):
                return
            waiting, self._waiting = self._waiting, None
            if not text.startswith(_OPENS):
                for held in waiting:
                    yield from self._answer(held)
                return
            self._thought = self._blank = True
            self.tokens = sum(held.token != _NO_TOKEN for held in waiting)
            chunk = chunk._replace(token=_NO_TOKEN, text=text)
        if not self._thought:
            yield from self._answer(chunk)
            return
        self.tokens += chunk.token != _NO_TOKEN
        self._held += self._text(chunk)
        if not self._begun:
            self._held = self._held.lstrip()
            if _begins(self._held):
                return
            self._held = self._held.removeprefix(_OPENS).lstrip()
            self._begun = bool(self._held)
        text, closed, behind = self._held.partition(_CLOSES)
        said = text[: len(text) - (0 if closed else overlap(text, _CLOSES))].rstrip()
        self._held = text[len(said) :]
        if said:
            yield Parsed(said, thought=True)
        if closed:
            self._thought = False
            yield from self._answer(chunk._replace(token=_NO_TOKEN, text=behind))

    def _answer(self, chunk: Chunk) -> list[Parsed]:
        if self._blank:
            chunk = chunk._replace(text=chunk.text.lstrip())
            self._blank = not self._text(chunk)
        if self._inner is not None:
            return self._inner.push(chunk)
        return [Parsed(chunk.text)] if chunk.text else []

    def _text(self, chunk: Chunk) -> str:
        return chunk.text + self._tags.get(chunk.token, "")


def _begins(text: str) -> bool:
    """Test whether a text may become the tag that begins a thought."""
    return text != _OPENS and _OPENS.startswith(text)
