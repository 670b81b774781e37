"""Server-sent events, and the trace of a request under way beside its tokens."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..engine.speculation import EngineRequest, Observer
from ..openai import bad_bodies
from ..request import Outcome
from ..tracing.records import Record, plain
from ..tracing.trace import end_record, request_record, step_record
from .engine_loop import AsyncHandle

log = logging.getLogger("draftree.server")
_PING = 15.0
"""Seconds without a token after which a stream gets a comment, so that nobody between takes it for dead."""


class EventStream(StreamingResponse):
    """Events of answers that end with it, even if it was left before the first of them."""

    def __init__(self, found: Sequence[AsyncHandle], events: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._found = found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for answer in self._found:
                answer.cancel()


async def pinged(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The same, with a comment where nothing comes for long."""
    coming = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=_PING)
            if not done:
                yield ": waiting\n\n"
                continue
            if (event := coming.result()) is None:
                return
            yield event
            coming = asyncio.ensure_future(anext(events, None))
    finally:
        coming.cancel()


async def named_events(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Events with their names, or the error that ends them."""
    try:
        async for event in events:
            yield f"event: {event['type']}\n{event_line(event)}"
    except Exception as error:  # noqa: BLE001 - the client gets an event of it
        log.error("a request failed: %s", error)
        body = {"type": "error", **bad_bodies.error(str(error), "server_error")["error"]}
        yield f"event: error\n{event_line(body)}"


def event_line(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


class LiveTrace(Observer):
    """Records of the request that it is an observer of, until they are taken.

    Made in the engine's thread, taken in another; nobody else holds it, so it goes with its request.

    Args:
        number: of the request, in its records.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._records = deque[Record]()

    def opened(self, request: EngineRequest) -> None:
        self._records.append(request_record(request, self._number))

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        self._records.extend(step_record(outcome, self._number) for outcome in outcomes)

    def closed(self, request: EngineRequest) -> None:
        self._records.append(end_record(request, self._number))

    def take(self) -> list[Any]:
        """The records since the last call, as JSON has them."""
        return [plain(self._records.popleft()) for _ in range(len(self._records))]
