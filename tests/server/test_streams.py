"""What a stream sends of a request that fails, and to a client that reads slowly."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import socket
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, cast

import httpx2 as httpx
import openai
import pytest

from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.errors import RunError
from draftree.request import Chunk
from draftree.server.engine_loop import EngineLoop, Submission
from draftree.server.streams import CONNECTION, EventStream

from ..toy import ToyModel
from .running import HEAD, NAME, TEXT, GatedModel, bytes_target, running, slow_target

JSON = {"Content-Type": "application/json"}


class _Builder:
    closing = ""

    def frames(self) -> dict[int, tuple[str, str]]:
        return {}

    def first(self) -> list[dict[str, Any]]:
        return [{"first": True}]

    def events(self, index: int, chunks: Sequence[Chunk]) -> Iterator[dict[str, Any]]:
        yield from ({"token": chunk.text} for chunk in chunks)

    def ended(self, index: int) -> Iterator[dict[str, Any]]:
        raise RuntimeError("broken")

    def failed(self, error: Exception) -> dict[str, Any]:
        return {"error": str(error)}


class _Submission:
    """One step, with which the request ends."""

    over = False
    watch: Callable[[], None]

    def take(self) -> list[tuple[int, Sequence[Chunk], bool]]:
        return [(0, [Chunk(1, "a", False, 0), Chunk(2, "b", True, 1)], True)]

    def check(self) -> None:
        """The engine goes on."""

    def cancel(self) -> None:
        """Nothing runs."""


async def _left() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


def test_the_tokens_of_its_last_step_come_before_its_error() -> None:
    async def sent() -> str:
        stream, bodies = EventStream(cast(Submission, _Submission()), cast(Any, _Builder()), ()), list[bytes]()

        async def send(message: MutableMapping[str, Any]) -> None:
            bodies.append(message.get("body", b""))

        await stream({"type": "http"}, _left, send)
        return b"".join(bodies).decode()

    lines = asyncio.run(sent()).split("\n\n")
    assert lines[:3] == ['data: {"first": true}', 'data: {"token": "a"}', 'data: {"token": "b"}']
    assert "broken" in lines[3]


class _Written:
    """A connection that takes all."""

    def __init__(self) -> None:
        self.pieces = list[bytes]()

    def write(self, piece: bytes) -> bool:
        self.pieces.append(piece)
        return True


@pytest.mark.parametrize("way", ["whole", "stream", "stream past the library"])
def test_an_answer_ends_where_the_engine_has_ended_whatever_it_has_gained(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notified once of tokens and of the end, it took the tokens and waited for ever."""

    def broken(*args: object) -> None:
        raise RuntimeError("broken")

    async def answered() -> str:
        engine, written = Engine(ToyModel()), _Written()
        monkeypatch.setattr(engine.scheduler, "observe", broken)
        owner = EngineLoop(lambda: engine)
        request = engine.request([1, 2], SamplingParams(max_tokens=9))
        submission = owner.submit([request], lambda index, request: None)

        async def send(message: MutableMapping[str, Any]) -> None:
            written.write(message.get("body", b""))

        scope = {"type": "http", "extensions": {CONNECTION: written} if way == "stream past the library" else {}}
        stream = EventStream(submission, cast(Any, _Builder()), ())
        waiting = asyncio.ensure_future(submission.end() if way == "whole" else stream(scope, _left, send))
        for _ in range(9):
            await asyncio.sleep(0)
        owner.start()
        owner._thread.join()  # while this thread takes nothing
        await waiting
        assert len(request.chunks) == 2
        return b"".join(written.pieces).decode()

    monkeypatch.setattr("draftree.server.streams.QUIET", 1e6)
    if way == "whole":
        with pytest.raises(RunError, match="broken"):
            asyncio.run(answered())
    else:
        *lines, error, _ = asyncio.run(answered()).split("\n\n")
        assert len(lines) == 3 and "token" in lines[2] and "broken" in error


def events(url: str, **body: Any) -> list[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return list(client.responses.create(model=NAME, input=TEXT, stream=True, extra_body=body))


def test_a_response_that_waits_has_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codex ends a stream that has no event for five minutes, and a comment is none: long prompts were read in vain."""
    monkeypatch.setattr("draftree.server.streams.QUIET", 0.004)
    model, found = GatedModel(), list[Any]()
    with running(model) as served, openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        for event in client.responses.create(model=NAME, input=TEXT, stream=True, max_output_tokens=4):
            found.append(event)
            if [each.type for each in found].count("response.in_progress") == 5:
                model.gate.release(4)
    assert found[-1].type == "response.incomplete"
    assert [event.sequence_number for event in found] == list(range(len(found)))


def test_a_response_that_fails_ends_so() -> None:
    """Its last event had the type of the error for its own, such as "server_error", which no client knows."""
    with running(bytes_target()) as served:
        *_, last = events(served.url, allowed_token_ids=[5], structured_outputs={"regex": "zz"})
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.code and "token" in last.response.error.message


class _Endless(_Submission):
    """Steps without end; ``made`` of them were taken."""

    made = 0

    def take(self) -> list[tuple[int, Sequence[Chunk], bool]]:
        self.made += 1
        return [(0, [Chunk(1, "a", False, 0)], False)]


def test_a_stream_makes_no_event_before_the_last_one_was_taken() -> None:
    """Whatever the engine has made meanwhile: of a client that reads slowly one piece waits."""

    async def sent() -> list[tuple[int, int]]:
        submission, found = _Endless(), list[tuple[int, int]]()
        stream = EventStream(cast(Submission, submission), cast(Any, _Builder()), ())

        async def send(message: MutableMapping[str, Any]) -> None:
            for _ in range(50):
                submission.watch()
                await asyncio.sleep(0)  # others get their turn while the client takes it
            if message["type"] == "http.response.body":
                found.append((submission.made, message["body"].count(b"token")))
            if len(found) == 20:
                raise OSError("the client has left")

        with pytest.raises(OSError):
            await stream({"type": "http"}, _left, send)
        return found

    assert asyncio.run(sent()) == [(step, 1) for step in range(1, 21)]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_is_whole_by_either_version_of_http(version: str, path: str) -> None:
    """HTTP/1.0 knows no chunks: what is written past the server's library has to have the frames that it has begun."""
    asked = {"model": NAME, "max_tokens": 30, "stream": True, "temperature": 0}
    prompt = {"messages": [{"role": "user", "content": TEXT}]} if "chat" in path else {"prompt": TEXT}
    body = json.dumps(asked | prompt)
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close"
    with running(bytes_target()) as served:
        expected = httpx.post(f"{served.url}{path}", content=body, headers=JSON, timeout=None).text
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            whole = connection.makefile("rb").read()
    answer = http.client.HTTPResponse(cast(socket.socket, _Sent(whole)))
    answer.begin()

    read = answer.read().decode()
    assert read.endswith("data: [DONE]\n\n")
    assert _streamed_text(read) == _streamed_text(expected) != ""


def _streamed_text(lines: str) -> str:
    events = [json.loads(line[6:]) for line in lines.split("\n") if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


class _Sent:
    """A socket that has been read."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._content)


def test_what_a_deaf_client_leaves_of_a_stream_is_not_buffered() -> None:
    """The engine goes on to the end of the answer; of its text a piece waits in the server, not all of it."""
    asked = {"model": NAME, "prompt": TEXT, "max_tokens": 100, "n": 8, "logprobs": 20, "ignore_eos": True, "seed": 1}
    body = json.dumps({**asked, "stream": True, "stream_options": {"include_trace": True}}).encode()
    with running(slow_target()) as served:
        whole = len(httpx.post(f"{served.url}/v1/completions", content=body, timeout=None).content)
        host, port = served.url.removeprefix("http://").split(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            deaf.connect((host, int(port)))
            deaf.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            served.get_busy()
            served.settle()
            assert served.buffered < whole / 10
