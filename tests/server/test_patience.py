"""Connections whose request does not come, or whose answer is not taken, are closed after a time."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from draftree.server.lifecycle import PatientProtocol

from .running import HEAD, NAME, TEXT, Running, posted, running, slow_target

BODY = json.dumps({"model": NAME, "prompt": TEXT, "max_tokens": 2}).encode()
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
WHOLE = HEAD + LENGTH + BODY
PATIENCE = 0.2


def connected(served: Running) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


def read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    found = b""
    try:
        while piece := connection.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found


def test_two_hundred_half_open_connections_are_closed() -> None:
    beginnings = (
        b"",
        b"P",
        b"POST /v1/comp",
        HEAD[:-2],
        HEAD + LENGTH[:-2],
        HEAD + LENGTH,
        HEAD + LENGTH + BODY[:20],
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    )
    with running(patience=PATIENCE) as served, ExitStack() as open_:
        half = []
        for sent in beginnings * 25:
            half.append(open_.enter_context(connected(served)))
            half[-1].sendall(sent)
        assert len(half) == 200
        for connection in half:
            assert read_all(connection) == b""
        assert served.connections == 0 and served.idle


@pytest.mark.parametrize(
    "drips", [HEAD + b"X-A: " + b"a" * 10**6, HEAD + b"Content-Length: 1000000\r\n\r\n" + b" " * 10**6]
)
def test_a_client_that_drips_is_closed_too(drips: bytes) -> None:
    """Each byte comes in time, and the request never."""
    with running(patience=PATIENCE) as served, connected(served) as slow:
        slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = 0
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while True:
                slow.sendall(drips[sent : sent + 1] if sent else drips[:200])
                sent += 200 if not sent else 1
                time.sleep(PATIENCE / 20)
        assert served.idle


def test_so_is_one_whose_second_request_does_not_come_whole() -> None:
    with running(patience=1.0) as served, connected(served) as half:
        half.sendall(WHOLE + WHOLE[:-5])
        assert read_all(half).count(b"HTTP/1.1 200") == 1


def test_an_answer_may_take_longer_than_a_client() -> None:
    with running(slow_target(), patience=0.5) as served:
        body = {"prompt": TEXT, "max_tokens": 60, "ignore_eos": True, "draftree": {"drafter": "none"}}
        began = time.monotonic()
        status, found = posted(served, "/v1/completions", body)
        assert status == 200 and found["usage"]["completion_tokens"] == 60
        assert time.monotonic() - began > 1.0  # of 60 passes of 0.02 s: what this test is of


def test_a_deaf_client_is_left() -> None:
    """It sends requests without end and takes no answer."""
    with running(patience=PATIENCE) as served, connected(served) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while True:
                deaf.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while served.connections:
            time.sleep(0.01)


def test_a_deaf_client_of_a_stream_is_left() -> None:
    asked = {"model": NAME, "prompt": TEXT, "max_tokens": 100, "n": 16, "logprobs": 20, "ignore_eos": True}
    body = json.dumps({**asked, "stream": True, "stream_options": {"include_trace": True}}).encode()
    with running(patience=PATIENCE) as served, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        host, port = served.url.removeprefix("http://").split(":")
        deaf.connect((host, int(port)))
        deaf.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        while not served.connections:
            time.sleep(0.001)
        while served.connections:
            time.sleep(0.01)
        served.settle()


def test_an_answer_that_is_taken_slowly_is_not_cut() -> None:
    """Each time that some of it was taken, the rest gets as long again."""
    waiting: list[Callable[[], None]] = []
    aborted: list[bool] = []
    sizes = iter((9, 5, 5))
    found: Any = PatientProtocol.__new__(PatientProtocol)
    found.patience = PATIENCE
    found.loop = SimpleNamespace(call_later=lambda seconds, call: waiting.append(call))
    found.transport = SimpleNamespace(get_write_buffer_size=lambda: next(sizes), abort=lambda: aborted.append(True))
    found._watch(10)
    for ended in (False, False, True):
        waiting.pop()()
        assert bool(aborted) is ended
