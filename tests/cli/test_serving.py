"""``draftree serve`` as a process, from loading to its end: what is refused, what goes on, and what the log has."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import pytest

from draftree.cli.main import run
from draftree.errors import ConfigError

from ..tiny import MAX_LENGTH
from ..tiny_gguf import write

SLOW = """
import sys, time
from draftree.cli.main import run
from draftree.models.native.native_model import NativeModel

fast = NativeModel.extend
def slow(self, rows, nodes):
    time.sleep(0.03)
    return fast(self, rows, nodes)
NativeModel.extend = slow
sys.exit(run(sys.argv[1:]))
"""
"""A server whose answers take long enough to be ended in between."""
PROMPT = "the cat in the hat"
LONG = MAX_LENGTH - 2 * len(PROMPT)
"""Tokens of an answer that takes seconds."""


class _Address:
    """A server, asked over a connection of its own each time."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connections = ExitStack()

    def asked(self, method: str, path: str, **body: Any) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._address)
        self._connections.callback(connection.close)
        content = json.dumps({"model": "tiny", **body}) if body else None
        connection.request(method, path, content, {"Content-Type": "application/json"})
        return self._connections.enter_context(connection.getresponse())

    def status(self, path: str) -> int:
        return self.asked("GET", path).status

    def leave(self) -> None:
        """Close all connections."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()


class _Served(_Address):
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        self.process, self.log = process, process.stderr
        super().__init__(next(m[1] for line in self.log if (m := re.search(r"http://(\S+)/v1", line))))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("models") / "tiny.gguf", context=MAX_LENGTH))


@contextmanager
def _serving(model: str, *words: str) -> Iterator[_Served]:
    command = [sys.executable, "-c", SLOW, "serve", model, "--port", "0", "--name", "tiny", "--drafter", "lookup"]
    with subprocess.Popen([*command, "--method", "chain", *words], stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            with _Served(process) as served:
                yield served
        finally:
            process.kill()


def _events(answer: http.client.HTTPResponse) -> Iterator[Any]:
    for line in answer:
        if line.startswith(b"data: "):
            yield None if line == b"data: [DONE]\n" else json.loads(line[6:])["choices"][0]


STREAM: dict[str, Any] = {"prompt": PROMPT, "stream": True, "ignore_eos": True, "draftree": {"drafter": "none"}}


def test_a_server_that_is_to_end_refuses_new_requests_and_lets_streams_end(model: str) -> None:
    with _serving(model) as served:
        assert served.status("/ready") == 200
        stream = served.asked("POST", "/v1/completions", **STREAM, max_tokens=60)
        events = _events(stream)
        found = [next(events)]
        served.process.send_signal(signal.SIGTERM)
        while served.status("/ready") == 200:
            pass
        assert served.status("/health") == 200
        for path, body in (
            ("/v1/completions", {"prompt": PROMPT}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "stream": True}),
            ("/v1/responses", {"input": PROMPT}),
        ):
            refused = served.asked("POST", path, **body)
            error = json.loads(refused.read())["error"]
            assert refused.status == 503 and error["type"] == "server_error" and "ending" in error["message"]
            assert refused.headers["Retry-After"] == "1" and refused.headers["Connection"] == "close"
        found += events
        assert found[-1] is None and found[-2]["finish_reason"] == "length"
        assert served.process.wait() == 0


@pytest.mark.parametrize(("drain", "twice"), [("1", False), ("600", True)])
def test_requests_that_have_not_ended_in_time_end_with_what_they_have(model: str, drain: str, twice: bool) -> None:
    """A second signal does not wait for them either."""
    with _serving(model, "--drain", drain) as served:
        events = _events(served.asked("POST", "/v1/completions", **STREAM, max_tokens=LONG))
        found = [next(events)]
        served.process.send_signal(signal.SIGTERM)
        while served.status("/ready") == 200:
            pass
        if twice:
            served.process.send_signal(signal.SIGTERM)
        found += events
        assert found[-1] is None and found[-2]["finish_reason"] == "cancelled" and len(found) < LONG
        assert served.process.wait() == (-signal.SIGTERM if twice else 0)


def test_it_is_alive_and_not_ready_while_the_model_is_loaded(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    seen: list[tuple[int, Any]] = []

    def load(name: str, **options: Any) -> Any:
        with _Address(f"127.0.0.1:{port}") as server:
            for answer in (
                server.asked("GET", "/ready"),
                server.asked("POST", "/v1/completions", prompt=PROMPT),
                server.asked("GET", "/health"),
            ):
                found = json.loads(answer.read())
                seen.append((answer.status, found["error"]["code"] if answer.status == 503 else found))
        raise ConfigError("it has loaded")

    monkeypatch.setattr("draftree.cli.options.load", load)
    assert run(["serve", model, "--port", str(port)]) == 2
    assert seen == [(503, "loading"), (503, "loading"), (200, {"status": "loading"})]


def test_the_log_has_a_line_for_each_request_without_texts(model: str) -> None:
    with _serving(model, "--log-format", "json") as served:
        bodies: list[dict[str, Any]] = [
            {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "n": 2},
            {
                "prompt": PROMPT,
                "max_tokens": 12,
                "temperature": 0,
                "ignore_eos": True,
                "draftree": {"method": "static"},
            },
        ]
        answers = [json.loads(served.asked("POST", "/v1/completions", **body).read()) for body in bodies]
        next(_events(served.asked("POST", "/v1/completions", **STREAM, max_tokens=LONG)))
        served.leave()
        while "cancelled" not in served.asked("GET", "/metrics").read().decode():
            pass
        served.process.send_signal(signal.SIGINT)
        lines = [json.loads(line) for line in served.log]
        assert served.process.wait() == 0
    assert all({"time", "level", "logger"} <= line.keys() for line in lines)
    ended = {(line["id"], line["choice"]): line for line in lines if line["logger"] == "draftree.requests"}
    keys = [(answers[0]["id"], 0), (answers[0]["id"], 1), (answers[1]["id"], 0)]
    whole = [ended.pop(key) for key in keys]
    (cancelled,) = ended.values()
    assert cancelled["finish_reason"] == "cancelled" and 0 < cancelled["tokens"] < LONG
    assert [line["method"] for line in whole] == ["chain", "chain", "static"]
    for line, answer in zip(whole, (answers[0], *answers), strict=True):
        assert line["finish_reason"] == "length" and line["tokens"] == 12 and line["drafter"] == "lookup"
        assert line["prompt_tokens"] == answer["usage"]["prompt_tokens"] and line["seconds"] >= 0.02
    figures = answers[1]["metrics"]["speculative_decoding"]
    assert whole[2]["drafted"] == figures["num_draft_tokens"]
    assert whole[2]["accepted"] == figures["num_accepted_draft_tokens"]
    assert whole[2]["mean_acceptance_length"] == pytest.approx(figures["mean_acceptance_length"], abs=1e-4)
    assert PROMPT not in json.dumps(lines)
