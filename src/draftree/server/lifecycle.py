"""How a server begins and ends: 503 while the model loads, and again while requests under way get to their end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from . import bad_bodies
from .app import Server
from .refusals import UNAVAILABLE

_GRACE = 5
"""Seconds in which clients of requests that were cancelled at the end read that."""


@contextmanager
def loading(listener: socket.socket) -> Iterator[None]:
    """Answer 503 meanwhile; connections that come between this and the server's start wait for it."""
    config = uvicorn.Config(_not_yet, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener.dup()],), name="draftree loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


async def _not_yet(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        body = bad_bodies.error("the model is being loaded: ask again later", "server_error", code="loading")
        await JSONResponse(body, 503, UNAVAILABLE)(scope, receive, send)


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
        self._served.cancel()
        await super().shutdown(sockets)
