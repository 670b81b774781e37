"""How a server and its connections begin and end.

While the model loads the server is alive, answers 503 to all but that, and so it does to new requests while those under
way get to their end; clients that stop in between are left.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from ..openai import bad_bodies
from .app import Server
from .middleware import UNAVAILABLE, refusal
from .streams import CONNECTION

_GRACE = 5
"""Seconds in which clients of requests that were cancelled at the end read that."""


PATIENCE = 60.0
"""Seconds, as of ``patient``."""


class DirectConnection:
    """Writes pieces of an answer of unknown length as uvicorn does, without its tasks and h11's state (``Connection``).

    Pieces of such an answer change no state of h11: only its begin and its end do.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._chunked = cycle, cycle.scope["http_version"] == "1.1"

    def write(self, piece: bytes) -> bool:
        """Write a piece, unless the client has not taken the one before it; whether it is written."""
        if self._cycle.flow.write_paused or self._cycle.disconnected:
            return False
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece)
        return True


class PatientProtocol(H11Protocol):
    """Closes connections whose request does not come in time, or whose answer is not taken.

    A request, its body included, has ``patience`` seconds from the connection's begin or the answer before it on; so
    has each piece of an answer until some of it is taken.
    """

    patience: float
    _coming: asyncio.TimerHandle | None = None
    _taken: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        served = self.app

        async def connected(scope: Scope, receive: Receive, send: Send) -> None:
            extensions = {**scope.get("extensions", {}), CONNECTION: DirectConnection(self.cycle)}
            await served({**scope, "extensions": extensions}, receive, send)

        self.app = connected

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # what the client has not taken pauses writing at once
        self._expect()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect()

    def _expect(self) -> None:
        if self._coming is None:
            self._coming = self.loop.call_later(self.patience, self.transport.abort)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._coming.cancel()
            self._coming = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def _watch(self, left: int) -> None:
        def look() -> None:
            now = self.transport.get_write_buffer_size()
            if now < left:
                self._watch(now)
            else:
                self.transport.abort()

        self._taken = self.loop.call_later(self.patience, look)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._taken is not None:
            self._taken.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._coming, self._taken):
            if timer is not None:
                timer.cancel()


def patient(seconds: float = PATIENCE) -> type[PatientProtocol]:
    """Return a class of ``PatientProtocol`` with a time limit in seconds, for uvicorn."""
    return type("Patient", (PatientProtocol,), {"patience": seconds})


@contextmanager
def loading(listener: socket.socket) -> Iterator[None]:
    """Answer 503 meanwhile, but 200 to ``/health``; connections that come before the server's start wait for it."""
    quiet: Any = {"log_config": None, "access_log": False, "timeout_graceful_shutdown": 1}
    server = uvicorn.Server(uvicorn.Config(_not_yet, http=patient(), ws="none", lifespan="off", **quiet))
    thread = threading.Thread(target=server.run, args=([listener.dup()],), name="draftree loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


async def _not_yet(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http" and scope["path"] == "/health":
        await JSONResponse({"status": "loading"})(scope, receive, send)
    elif scope["type"] == "http":
        body = bad_bodies.error("the model is being loaded: ask again later", "server_error", code="loading")
        await refusal(scope["path"], 503, body, UNAVAILABLE)(scope, receive, send)


class DrainingServer(uvicorn.Server):
    """On the first signal refuses new requests, and ends when those under way have ended; on the second ends at once.

    Args:
        served: what it serves.
        seconds: that requests under way get to end; then they are cancelled.
    """

    def __init__(self, config: uvicorn.Config, served: Server, seconds: float) -> None:
        super().__init__(config)
        config.timeout_graceful_shutdown = _GRACE
        self._served, self._seconds = served, seconds
        self._due: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._due is None:
            self._served.draining, self._due = True, time.monotonic() + self._seconds
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        if self._due is not None and (not self.server_state.tasks or time.monotonic() >= self._due):
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._served.loop.cancel()
        await super().shutdown(sockets)
