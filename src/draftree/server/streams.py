"""Server-sent events: the tokens of a request under way, and its trace beside them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..engine.trace import RequestTrace
from ..openai.answers import CompletionBuilder
from ..openai.bad_bodies import failure
from ..openai.responses_api import ResponseBuilder
from .engine_loop import Submission

log = logging.getLogger("draftree.server")


class EventStream(StreamingResponse):
    """Events of an answer that ends with it, even if it was left before the first of them.

    Args:
        traces: of the answer's requests: their records stand before the events that they belong to.
    """

    def __init__(
        self, submission: Submission, builder: CompletionBuilder | ResponseBuilder, traces: Sequence[RequestTrace]
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._lines(), media_type="text/event-stream", headers=headers)
        self._submission, self._builder, self._traces = submission, builder, traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._submission.cancel()

    async def _lines(self) -> AsyncIterator[str]:
        builder = self._builder
        responding = builder if isinstance(builder, ResponseBuilder) else None
        try:
            if text := self._text(builder.first()):
                yield text
            async for steps in self._submission.steps():
                text = self._text(event for at, chunks, _ in steps for event in builder.events(at, chunks))
                if text or not steps:
                    yield text or (self._text(responding.waiting()) if responding else ": waiting\n\n")
                for at in [at for at, _, ended in steps if ended]:
                    yield self._text(builder.ended(at))
            if text := self._text(await asyncio.to_thread(builder.last)):
                yield text
        except Exception as error:  # noqa: BLE001 - the client gets an event of it
            log.error("a request failed: %s", error)
            body = failure(error)[1]
            yield _line(responding.failed(body["error"]) if responding else body)
        if responding is None:
            yield "data: [DONE]\n\n"

    def _text(self, events: Iterable[dict[str, Any]]) -> str:
        lines = list[str]()
        for event in events:
            records = [record for trace in self._traces for record in trace.take()]
            if records:
                lines.append(_line(event | {"choices": [], "trace": records}))
            lines.append(_line(event))
        return "".join(lines)


def _line(event: dict[str, Any]) -> str:
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event, ensure_ascii=False)}\n\n"
