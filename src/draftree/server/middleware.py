"""What is not answered: requests without a key or too long, and errors in OpenAI's shape."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import QueueFullError
from ..openai.bad_bodies import INVALID, MISSING, NOT_JSON, body_error, error, failure

log = logging.getLogger("draftree.server")
OPEN = ("/", "/health", "/ready", "/metrics", "/version")
"""Paths that need no key; so do the files of the page, whose answers and traces come by the others."""
UNAVAILABLE = {"Retry-After": "1", "Connection": "close"}
"""Headers for who comes while no request is taken: the next connection may lead to another replica."""


DOCUMENTED: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is wrong; the message names the value and the way out."},
    503: {"description": "The server takes no requests now: it is loading, full or shutting down."},
}
"""Of every endpoint, for the OpenAPI document."""


class Limits:
    """Refuses bodies that are too long, as they come, and requests without a key."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], most_body: int) -> None:
        self._app, self._keys, self._most = app, keys, most_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        is_open = path in OPEN or path.startswith("/page/") or scope["method"] == "OPTIONS"
        if self._keys and not is_open:
            given = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ").strip()
            if not any(hmac.compare_digest(given, key.encode()) for key in self._keys):
                said = "no valid key: send 'Authorization: Bearer KEY'"
                body = error(said, "authentication_error", code="invalid_api_key")
                await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:
                raise HTTPException(413, f"the body has more than {self._most} bytes: send less")
            return message

        await self._app(scope, counted, send)


async def refuse(request: Request, found: Exception) -> Response:
    """The answer to a request that an exception has ended."""
    headers: Mapping[str, str] | None = None
    if isinstance(found, RequestValidationError):  # a body that is not what it should be
        errors = [{**each, "loc": each["loc"][1:]} for each in found.errors()]
        if errors[0]["type"] == "json_invalid":
            errors[0]["loc"] = ()
        status, body = 400, body_error(errors, found.body)
    elif isinstance(found, QueueFullError):
        status, body = 429, error(str(found), "rate_limit_error", code="rate_limit_exceeded")
        headers = {"Retry-After": f"{found.retry_after:.0f}"}
    elif isinstance(found, HTTPException):
        status, headers = found.status_code, found.headers
        kind = "server_error" if status >= 500 else MISSING if status == 404 else INVALID
        body = error(NOT_JSON if status == 400 else found.detail, kind)  # FastAPI's own: JSON that Python cannot read
    else:
        status, body = failure(found)
    if status == 500:
        log.exception("a request failed", exc_info=found)
    return JSONResponse(body, status, headers)
