"""What takes long because of what a client sent holds up nobody else: grammars and long texts have their own threads.

Nothing is timed: work waits until the test lets it go on, and the neighbour is answered meanwhile.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from draftree.engine.engine import Handle
from draftree.engine.input_processor import InputProcessor
from draftree.engine.speculation import EngineRequest
from draftree.sandbox import workers
from draftree.text.encoding import user

from .running import HEAD, TEXT, Running, bytes_target, fetched, posted, running

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SLOW = {"messages": user(TEXT), "max_tokens": 2, "structured_outputs": {"regex": "held[ab]*"}}
SHORT = {"prompt": TEXT, "max_tokens": 1}
LONG = {"prompt": "a held text", "max_tokens": 1, "note": "x" * 70_000}


class Held:
    """Calls that wait until they may go on."""

    def __init__(self) -> None:
        self.begun, self._go_on = 0, threading.Event()

    def __call__(self) -> None:
        self.begun += 1
        self._go_on.wait()

    def release(self) -> None:
        self._go_on.set()


@pytest.fixture
def served() -> Iterator[Running]:
    with running(bytes_target()) as found:
        yield found


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held, run = Held(), workers.run

    def waits(name: str, *arguments: Any) -> Any:
        if name == "read_grammar" and "held" in arguments[1]:
            held()
        return run(name, *arguments)

    monkeypatch.setattr("draftree.sampling.grammar.run", waits)
    yield held
    held.release()


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held, encode = Held(), InputProcessor.encode

    def waits(self: InputProcessor, prompt: Any, field: str = "prompt") -> list[int]:
        if isinstance(prompt, str) and "held" in prompt:
            held()
        return encode(self, prompt, field)

    monkeypatch.setattr(InputProcessor, "encode", waits)
    yield held
    held.release()


def until(found: Callable[[], bool]) -> None:
    watchdog = time.monotonic() + 120
    while not found():
        assert time.monotonic() < watchdog
        time.sleep(0.001)


@contextmanager
def sent(served: Running, path: str, body: dict[str, Any], count: int) -> Iterator[list[int]]:
    """So many requests under way; their statuses as they come, all of them at the end."""
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(posted(served, path, body)[0]), daemon=True)
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    yield statuses
    for thread in threads:
        thread.join()


def test_a_neighbour_waits_for_no_grammar(served: Running, compiling: Held) -> None:
    """32 grammars of 5 s each took all threads: a request for one token beside them waited for 23.6 s."""
    with sent(served, CHAT, SLOW, 32) as statuses:
        until(lambda: compiling.begun == 2 and served.connections == 32)
        assert posted(served, COMPLETION, SHORT)[0] == 200
        assert fetched(served, "/metrics")[0] == 200
        assert compiling.begun == 2 and not statuses
        compiling.release()
    assert statuses == [200] * 32


def test_nor_for_long_texts(served: Running, reading: Held) -> None:
    with sent(served, COMPLETION, LONG, 16) as statuses:
        until(lambda: reading.begun == 2 and served.connections == 16)
        assert posted(served, COMPLETION, SHORT)[0] == posted(served, "/tokenize", {"prompt": TEXT})[0] == 200
        assert reading.begun == 2 and not statuses
        reading.release()
    assert statuses == [200] * 16


def test_nor_does_a_grammar_wait_for_long_texts(served: Running, reading: Held) -> None:
    body = {"prompt": TEXT, "max_tokens": 2, "structured_outputs": {"regex": "[ab]+"}}
    with sent(served, COMPLETION, LONG, 8):
        until(lambda: reading.begun == 2)
        assert posted(served, COMPLETION, body)[0] == 200
        reading.release()


def test_more_grammars_than_can_wait_are_told_to_come_back(served: Running, compiling: Held) -> None:
    with sent(served, CHAT, SLOW, 80) as statuses:
        until(lambda: len(statuses) == 80 - 2 - 64)
        assert set(statuses) == {429}
        assert "draftree:admission_rejections_total 14.0" in fetched(served, "/metrics")[1]
        compiling.release()
    assert sorted(statuses) == [200] * 66 + [429] * 14


def connected(served: Running, body: dict[str, Any]) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    content = json.dumps({"model": "tiny", **body}).encode()
    connection = socket.create_connection((host, int(port)))
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_while_grammars_wait_gets_none_and_runs_nothing(
    served: Running, compiling: Held, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    queued, enqueue = list[int](), served.engine.enqueue

    def counted(requests: Sequence[EngineRequest], *given: Any) -> list[Handle]:
        queued.append(len(requests))
        return enqueue(requests, *given)

    monkeypatch.setattr(served.engine, "enqueue", counted)
    body = {"prompt": TEXT, "stream": stream, "structured_outputs": {"regex": "held[ab]*"}}
    clients = [connected(served, body) for _ in range(12)]
    until(lambda: compiling.begun == 2 and served.connections == 12)
    for client in clients:
        client.close()
    until(lambda: not served.connections)
    compiling.release()
    assert posted(served, COMPLETION, {**SHORT, "structured_outputs": {"regex": "[ab]+"}})[0] == 200
    assert compiling.begun == 2 and queued == [1]
