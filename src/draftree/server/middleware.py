"""Rejects requests without a key or with too long a body; writes errors in OpenAI's shape."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import QueueFullError, shortened
from ..openai.bad_bodies import INVALID, MISSING, NOT_JSON, body_error, error, failure
from ..openai.messages_api import message_error

log = logging.getLogger("draftree.server")
OPEN = ("/", "/health", "/ready", "/metrics", "/version")
"""Paths that need no key; so do the files of the page, whose answers and traces come by the others."""
MESSAGES = "/v1/messages"
"""Path below which errors have Anthropic's shape."""
UNAVAILABLE = {"Retry-After": "1", "Connection": "close"}
"""Headers for who comes while no request is taken: the next connection may lead to another replica."""


DOCUMENTED: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is wrong; the message names the value and the way out."},
    503: {"description": "The server takes no requests now: it is loading, full or shutting down."},
}
"""Of every endpoint, for the OpenAPI document."""


_BEARER = re.compile(rb"(?i:bearer) +([!-~]+)")
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d*)?")
"""Of a Host header: a name or an address, and a port."""


class Limits:
    """Refuses bodies that are too long, as they come, and requests without a key.

    Where there are no keys, a web page could send requests by a name of its own that leads to this machine (DNS
    rebinding): a request must call the server by an address, which no page can make its own, or by a name of ``hosts``.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], hosts: Sequence[str], most_body: int) -> None:
        self._app, self._keys, self._most = app, [key.encode() for key in keys], most_body
        self._hosts = {"localhost", *map(_name, hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (refusal := self._unlocked(scope) if self._keys else self._called(scope)) is not None:
            await refusal(scope, receive, send)
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

    def _unlocked(self, scope: Scope) -> Response | None:
        """The refusal of a request without a key (RFC 9110, 11.6.2); None: it has one, or needs none."""
        path: str = scope["path"]
        if path in OPEN or path.startswith("/page/") or scope["method"] == "OPTIONS":
            return None
        bearers = [_BEARER.fullmatch(value) for value in _values(scope, b"authorization")]
        sent = [bearer and bearer[1] for bearer in bearers] or _values(scope, b"x-api-key")
        if len(sent) == 1 and sent[0] and any([hmac.compare_digest(sent[0], key) for key in self._keys]):
            return None
        said = "no valid key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY', once"
        body = error(said, "authentication_error", code="invalid_api_key")
        return refusal(path, 401, body, {"WWW-Authenticate": "Bearer"})

    def _called(self, scope: Scope) -> Response | None:
        """The refusal of a request to another host; None: it is to this one. Browsers send a host in any case."""
        for value in _values(scope, b"host"):
            name = _name(sent := value.decode("latin-1"))
            if not (name in self._hosts or "*" in self._hosts or _is_address(name)):
                way_out = f"start it with --allowed-host {name or 'NAME'}, or with a key"
                said = shortened(f"the server is not called {sent!r}: {way_out}")
                return refusal(scope["path"], 403, error(said, INVALID, code="host_not_allowed"))
        return None


def _values(scope: Scope, name: bytes) -> list[bytes]:
    """Return the values of all headers of a name."""
    return [value for key, value in scope["headers"] if key == name]


def _name(host: str) -> str:
    """Return a host in small letters, without its port; another text stays as it is."""
    match = _HOST.fullmatch(host)
    return (match[1] if match else host).lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True


def refusal(path: str, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """Return an error in the shape of the endpoint's API; ``body`` is in OpenAI's."""
    return JSONResponse(message_error(status, body["error"]) if path.startswith(MESSAGES) else body, status, headers)


async def refuse(request: Request, raised: Exception) -> Response:
    """Convert an exception to an error response."""
    headers: Mapping[str, str] | None = None
    if isinstance(raised, RequestValidationError):  # a body that is not what it should be
        errors = [{**each, "loc": each["loc"][1:]} for each in raised.errors()]
        if errors[0]["type"] == "json_invalid":
            errors[0]["loc"] = ()
        status, body = 400, body_error(errors, raised.body)
    elif isinstance(raised, QueueFullError):
        status, body = 429, error(str(raised), "rate_limit_error", code="rate_limit_exceeded")
        headers = {"Retry-After": f"{raised.retry_after:.0f}"}
    elif isinstance(raised, HTTPException):
        status, headers = raised.status_code, raised.headers
        kind = "server_error" if status >= 500 else MISSING if status == 404 else INVALID
        body = error(NOT_JSON if status == 400 else raised.detail, kind)  # FastAPI's own: JSON that Python cannot read
    else:
        status, body = failure(raised)
    if status == 500:
        log.exception("a request failed", exc_info=raised)
    return refusal(request.url.path, status, body, headers)
