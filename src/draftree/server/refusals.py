"""What is not answered: requests without a key or too long, and errors in OpenAI's shape."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import FieldError, PromptError
from . import answers as shapes
from .answers import INVALID, MISSING

log = logging.getLogger("draftree.server")
OPEN = ("/", "/health", "/ready", "/metrics", "/version")
"""Paths that need no key."""
_PAGE = "/page/"
"""So do the files of the page; its answers and traces come by the others."""
UNAVAILABLE = {"Retry-After": "1", "Connection": "close"}
"""Headers for who comes while no request is taken: the next connection may lead to another replica."""
DENIED = "authentication_error"


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error, as OpenAI's API has it."""

    error: ErrorDetail


DOCUMENTED: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "What was sent does not do; it is said why."},
    503: {"model": ErrorBody, "description": "No request is taken now."},
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
        headers = dict(scope["headers"])
        path: str = scope["path"]
        is_open = path in OPEN or path.startswith(_PAGE) or scope["method"] == "OPTIONS"
        if self._keys and not is_open:
            given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
            if not any(hmac.compare_digest(given, key.encode()) for key in self._keys):
                body = shapes.error("no valid key: send 'Authorization: Bearer KEY'", DENIED, code="invalid_api_key")
                await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        most, read = self._most, 0
        long = f"the body has more than {most} bytes: send less"
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            await JSONResponse(shapes.error(long, INVALID), 413)(scope, receive, send)
            return

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > most:
                raise HTTPException(413, long)
            return message

        await self._app(scope, counted, send)


async def invalid(request: Request, error: Exception) -> Response:
    """A body that is not what it should be: the first field that does not do."""
    first = error.errors()[0] if isinstance(error, RequestValidationError) else {"loc": (), "msg": str(error)}
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    message = f"{place}: {first['msg']}" if place else str(first["msg"])
    return JSONResponse(shapes.error(message, INVALID, place or None), 400)


async def wrong(request: Request, error: Exception) -> Response:
    where = error.field if isinstance(error, FieldError) else "messages" if isinstance(error, PromptError) else None
    return JSONResponse(shapes.error(str(error), INVALID, where), 400)


async def http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = str(error.detail) if isinstance(error, HTTPException) else str(error)
    kind, code = (MISSING, "model_not_found" if "no model" in detail else None) if status == 404 else (INVALID, None)
    if status >= 500:
        kind = "server_error"
    headers = error.headers if isinstance(error, HTTPException) else None
    return JSONResponse(shapes.error(detail, kind, code=code), status, headers)


async def failed(request: Request, error: Exception) -> Response:
    log.exception("a request failed", exc_info=error)
    return JSONResponse(shapes.error(f"{type(error).__name__}: {error}", "server_error"), 500)
