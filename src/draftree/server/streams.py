"""Server-sent events: the tokens of a request under way, and its trace beside them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..engine.trace import RequestTrace
from ..openai.answers import AnswerBuilder, encode_json, encode_text
from .engine_loop import Submission

CONNECTION = "draftree.connection"
"""The extension of an ASGI scope that is a ``Connection``."""
QUIET = 15.0
"""Seconds without a token after which a stream says that it is not dead."""

log = logging.getLogger("draftree.server")


class Connection(Protocol):
    """Writes pieces of an answer that has begun, without a task."""

    def write(self, piece: bytes) -> bool:
        """Write a piece, unless the client has not taken the one before it; whether it is written."""


class EventStream(StreamingResponse):
    """Events of an answer that ends with it, even if it was left before the first of them.

    The event loop's notification of a step writes that step's events to the connection. Where there is none, or the
    client has not taken the last piece, a task sends them; while it waits for the client, no event is made.

    Args:
        traces: of the answer's requests: their records stand before the events that they belong to.
    """

    def __init__(self, submission: Submission, builder: AnswerBuilder, traces: Sequence[RequestTrace]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__((), media_type="text/event-stream", headers=headers)
        self._submission, self._builder, self._traces = submission, builder, traces
        self._frames = {} if traces else builder.frames()
        self._connection: Connection | None = None
        self._failure: Exception | None = None
        self._stirred = asyncio.Event()
        self._idle = self._left = False  # the task has nothing to send; the client has left
        self._unsent = ""  # for the task
        self._written = 0.0  # when the last piece was, by the event loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        leaving = asyncio.ensure_future(self._leave(receive))
        self._quiet = loop.call_later(QUIET, self._reassure)
        self._connection = scope.get("extensions", {}).get(CONNECTION)
        self._submission.watch = self._push
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._unsent, ended = self._text(self._builder.first()), False
            while not (self._left or ended):
                self._unsent += self._gained()
                if ended := self._ended:
                    self._unsent += await self._end()
                text, self._unsent = self._unsent, ""
                if text or ended:
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": not ended})
                    self._written = loop.time()
                else:
                    self._idle = True
                    await self._stirred.wait()
                    self._stirred.clear()
                    self._idle = False
        finally:
            self._quiet.cancel()
            leaving.cancel()
            self._submission.cancel()

    async def _leave(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._stirred.set()

    def _push(self) -> None:
        """Write what a step has brought, or leave it to the task."""
        if not self._idle:
            return
        self._unsent += self._gained()
        if self._unsent and not self._ended and self._connection and self._connection.write(self._unsent.encode()):
            self._unsent, self._written = "", asyncio.get_running_loop().time()
        elif self._unsent or self._ended:
            self._stirred.set()

    def _reassure(self) -> None:
        """Send that the stream waits where nothing came for ``QUIET`` seconds."""
        loop = asyncio.get_running_loop()
        due = self._written + QUIET - loop.time()
        if due <= 0 and self._idle:
            self._unsent += self._text(self._builder.waiting()) or ": waiting\n\n"
            self._stirred.set()
        self._quiet = loop.call_later(due if due > 0 else QUIET, self._reassure)

    @property
    def _ended(self) -> bool:
        return self._failure is not None or self._submission.over

    def _gained(self) -> str:
        """The events of what has come since the last call; an error becomes ``_failure``."""
        lines = list[str]()
        try:
            for index, chunks, ended in self._submission.take():
                if frame := self._frames.get(index):
                    if text := "".join([chunk.text for chunk in chunks]):
                        lines += frame[0], encode_text(text), frame[1]
                else:
                    lines.append(self._text(self._builder.events(index, chunks)))
                if ended:
                    lines.append(self._text(self._builder.ended(index)))
            self._submission.check()
        except Exception as error:  # noqa: BLE001 - the client gets an event of it
            self._failure = error
        return "".join(lines)

    async def _end(self) -> str:
        """The last events: of the whole answer, or of the error."""
        text = ""
        if self._failure is None:
            try:
                text = self._text(await asyncio.to_thread(self._builder.last))
            except Exception as error:  # noqa: BLE001 - as above
                self._failure = error
        if self._failure is not None:
            log.error("a request failed: %s", self._failure)
            text = line(self._builder.failed(self._failure))
        return text + self._builder.closing

    def _text(self, events: Iterable[Mapping[str, Any]]) -> str:
        lines = list[str]()
        for event in events:
            records = [record for trace in self._traces for record in trace.take()]
            if records:
                lines.append(line({**event, "choices": [], "trace": records}))
            lines.append(line(event))
        return "".join(lines)


def line(event: Mapping[str, Any]) -> str:
    """An event as it is sent; those with a type are named by it."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {encode_json(event)}\n\n"
