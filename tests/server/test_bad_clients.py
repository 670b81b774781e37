"""Clients that send too much, too slowly, half, or nonsense: an error in OpenAI's shape, and others are answered."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from draftree.text.encoding import user

from .running import HEAD, NAME, TEXT, Running, fetched, posted

BODY = json.dumps({"model": NAME, "prompt": TEXT, "max_tokens": 2}).encode()
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)


def connected(served: Running) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


def answers(served: Running) -> bool:
    """It answers, and comes to hold nothing: it is waited for until it does."""
    status = posted(served, "/v1/completions", {"prompt": TEXT, "max_tokens": 2})[0]
    served.settle()
    return bool(status == 200)


def is_error(found: Any) -> bool:
    return set(found) == {"error"} and set(found["error"]) == {"message", "type", "param", "code"}


def test_ten_megabytes_are_refused_whoever_sends_them(served: Running) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        for _ in range(3):
            with pytest.raises(openai.APIStatusError, match=f"{4 << 20} bytes") as caught:
                client.completions.create(model=NAME, prompt="x" * (10 << 20))
            assert caught.value.status_code == 413 and is_error({"error": caught.value.body})
    assert answers(served)


def test_clients_that_stop_in_between_hold_up_nobody(served: Running) -> None:
    beginnings = (b"", b"POST /v1/comp", HEAD[:-2], HEAD + LENGTH[:-2], HEAD + LENGTH, HEAD + LENGTH + BODY[:20])
    with ExitStack() as open_:
        for sent in beginnings * 12:
            connection = open_.enter_context(connected(served))
            connection.sendall(sent)
        assert answers(served)
    assert answers(served)


def test_a_client_that_sends_byte_by_byte_is_answered(served: Running) -> None:
    with connected(served) as slow:
        slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in HEAD + LENGTH + BODY:
            slow.sendall(bytes([byte]))
        assert slow.recv(12) == b"HTTP/1.1 200"
    assert answers(served)


def test_a_client_that_reads_nothing_holds_up_nobody(served: Running) -> None:
    body = json.dumps({"model": NAME, "prompt": TEXT, "max_tokens": 64, "stream": True, "ignore_eos": True}).encode()
    with connected(served) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert answers(served)
    assert answers(served)


def test_half_closed_connections_leave_nothing_behind(served: Running) -> None:
    for sent in (b"", HEAD, HEAD + LENGTH + BODY[:9], HEAD + LENGTH + BODY):
        with connected(served) as half:
            half.sendall(sent)
            half.shutdown(socket.SHUT_WR)
            while half.recv(4096):
                pass
    assert answers(served)


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"\x00" * 9000, b"[]\r\n\r\n"]
)
def test_what_is_no_http_ends_its_connection_alone(served: Running, sent: bytes) -> None:
    with connected(served) as other:
        other.sendall(sent + b"\r\n\r\n")
        assert other.recv(4096).startswith(b"HTTP/1.1 400")
    assert answers(served)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/../../etc/passwd",
        "/v1/models/..%2f..%2fetc%2fpasswd",
        "/v1/models/%00",
        "/v1/models/%ff%fe",
        "/v1/models/",
        "/page/..%2fapp.py",
        "/page/../inspector.py",
        "/page/%2e%2e/app.py",
        "/page//etc/passwd",
        "/page/",
        "//etc/passwd",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/v1",
        "/v1/completions/1",
        "/static/x",
        "/" + "x" * 3000,
    ],
    ids=lambda path: path[:40],
)
def test_path_tricks_find_nothing(served: Running, path: str) -> None:
    status, text = fetched(served, path)
    assert status == 404 and is_error(json.loads(text))


def test_a_method_that_a_path_has_not_is_an_error_too(served: Running) -> None:
    status, text = fetched(served, "/v1/completions")
    assert status == 405 and is_error(json.loads(text))
    status, found = posted(served, "/v1/models", {})
    assert status == 405 and is_error(found)


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        DEEP,
        b'{"model": "tiny", "prompt": ' + DEEP + b"}",
        b'{"model": "tiny", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"model": "\\ud800", "prompt": "a"}',
        b'{"model": "tiny", "prompt": "a", "structured_outputs": {"regex": "\\ud800"}}',
        b'{"model": "tiny", "prompt": "a", "structured_outputs": {"choice": ["\\ud800"]}}',
        b'{"model": "tiny", "prompt": "a", "structured_outputs": {"grammar": "\\ud800"}}',
        b'{"model": "tiny", "prompt": "a", "structured_outputs": {"json": {"const": "\\ud800"}}}',
    ],
    ids=lambda body: body[:70].decode(errors="replace"),
)
def test_bodies_that_are_no_request_are_400(served: Running, body: bytes) -> None:
    status, found = posted(served, "/v1/completions", body)
    assert status == 400 and is_error(found), found
    assert answers(served)


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "((a{1,100}){1,100}){1,100}"},
        {"regex": "(a|a)*" * 2000},
        {"regex": "(" * 5000},
        {"regex": "a{1,1000000000}"},
        {"grammar": "start: start start start | start"},
        {"choice": ["x" * 200_000]},
        {"json": {"$ref": "#"}},
        {"json": {"type": "array", "minItems": 10**9}},
        {"json": {"type": "string", "pattern": "^(a+)+$"}},
    ],
    ids=lambda wanted: str(wanted)[:50],
)
def test_grammars_that_explode_elsewhere_end_soon(served: Running, wanted: dict[str, Any]) -> None:
    status, found = posted(
        served, "/v1/chat/completions", {"messages": user(TEXT), "max_tokens": 4, "structured_outputs": wanted}
    )
    assert status == 200 or status == 400 and is_error(found)
    assert answers(served)
