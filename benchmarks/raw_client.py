"""A client that costs little: HTTP/1.1 over plain sockets in a process of its own, for ``server_speed``.

It reads answers as bytes and parses none of them while they come; ``poll`` waits for all of its sockets.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import select
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

_END = b"\r\n0\r\n\r\n"
_PIECE = 1 << 16
_TEXT = re.compile(rb'"content": ?"[^"]')


@dataclass(slots=True)
class Answer:
    """What came of a request.

    Attributes:
        began: when it was sent, by ``time.perf_counter()``.
        pieces: bytes of the answer that had come, headers included, and when.
        body: the answer as it came, with headers and the frames of chunks.
    """

    began: float
    pieces: list[tuple[int, float]] = field(default_factory=list)
    body: bytes = b""

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of a stream, the last one ("[DONE]") left out."""
        lines = [line for line in self.body.split(b"\n") if line.startswith(b"data: {")]
        return [json.loads(line.removeprefix(b"data: ")) for line in lines]

    @property
    def text(self) -> str:
        """The text of a chat's stream."""
        return "".join(c["delta"].get("content") or "" for event in self.events for c in event.get("choices", ()))

    @property
    def first_text(self) -> float:
        """When the first text of a chat's stream came, or the end of a stream without any."""
        found = _TEXT.search(self.body)
        return next(at for size, at in self.pieces if size >= (found.end() if found else len(self.body)))

    @property
    def usage(self) -> dict[str, Any]:
        """What a stream that was asked for its usage says of it."""
        (usage,) = (event["usage"] for event in self.events if event.get("usage"))
        return dict(usage)


def _request(host: str, path: str, body: Mapping[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


class _Loop:
    """A closed loop: requests one after the other, each over a new connection.

    llama.cpp's server closes one after an answer.
    """

    def __init__(self, url: str, path: str, bodies: Sequence[Mapping[str, Any]]) -> None:
        parts = urlsplit(url)
        self.answers, self._host, self._path, self._left = list[Answer](), parts.netloc, path, iter(bodies)
        self._address = parts.hostname or "", parts.port or 80
        self._buffer = bytearray()

    def go_on(self) -> bool:
        """Send the next request; whether there is one."""
        if (body := next(self._left, None)) is None:
            return False
        self._buffer.clear()
        self.answers.append(Answer(time.perf_counter()))
        self.connection = socket.create_connection(self._address)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.sendall(_request(self._host, self._path, body))
        return True

    def read(self) -> bool:
        """Read a piece; whether it was the answer's last."""
        piece = self.connection.recv(_PIECE)
        self._buffer += piece
        self.answers[-1].pieces.append((len(self._buffer), time.perf_counter()))
        if piece and not self._buffer.endswith(_END):
            return False
        if not (piece and self._buffer.startswith(b"HTTP/1.1 200")):
            raise ConnectionError(f"the server answered {bytes(self._buffer[:400])!r}")
        self.answers[-1].body = bytes(self._buffer)
        self.connection.close()
        return True


def _send(url: str, path: str, queues: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[Answer]]:
    """The answers of closed loops, all at once."""
    loops = [_Loop(url, path, bodies) for bodies in queues]
    poll, running = select.poll(), dict[int, _Loop]()
    for loop in loops:
        if loop.go_on():
            running[loop.connection.fileno()] = loop
            poll.register(loop.connection, select.POLLIN)
    while running:
        for number, _ in poll.poll():
            if running[number].read():
                loop = running.pop(number)
                poll.unregister(number)
                if loop.go_on():
                    running[loop.connection.fileno()] = loop
                    poll.register(loop.connection, select.POLLIN)
    return [loop.answers for loop in loops]


def _serve(pipe: Connection) -> None:
    while (work := pipe.recv()) is not None:
        began = time.process_time()
        answers = _send(*work)
        pipe.send((answers, time.process_time() - began))


class RawClient:
    """The client's process.

    Attributes:
        busy: CPU seconds of all sends.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self.busy = pipe, 0.0

    def send(self, url: str, queues: Sequence[Sequence[Mapping[str, Any]]], path: str) -> list[list[Answer]]:
        """Send each queue's requests, one after the other, all queues at once."""
        self._pipe.send((url, path, queues))
        answers, busy = self._pipe.recv()
        self.busy += busy
        return list(answers)


@contextmanager
def raw_client() -> Iterator[RawClient]:
    """A client in a process of its own, which ends with the context."""
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield RawClient(ours)
    finally:
        ours.send(None)
        process.join()
