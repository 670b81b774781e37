"""A real server on a port of its own, in a thread."""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from draftree.engine.engine import Engine
from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import Observer, SpeculationParams
from draftree.models.base import LanguageModel, Nodes, Row
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.native.native_model import NativeModel
from draftree.scores import Scores
from draftree.server.app import Server, ServerSettings
from draftree.server.engine_loop import EngineLoop
from draftree.server.lifecycle import PATIENCE, patient
from draftree.server.metrics import Metrics

from ..tiny import BYTES_VOCAB, bytes_tokenizer, tiny, tiny_tokenizer
from ..tiny_gguf import Vocabulary, write

NAME = "tiny"
TEXT = "a b a b a b a b a b"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LOOKUP = SpeculationParams(drafter="lookup", method="chain")


def target() -> HFModel:
    return HFModel(tiny(), tiny_tokenizer(), name=NAME, self_test=False)


def ending_target() -> HFModel:
    """The same with an end-of-sequence token."""
    model, tokenizer = tiny(), tiny_tokenizer()
    if model.generation_config is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    return HFModel(model, tokenizer, name=NAME, self_test=False)


def bytes_target(tags: bool | None = None, context: int = 1024, seed: int = 0) -> NativeModel:
    """A model of the native engine that can spell any text, with an end-of-sequence token; its passes take no time.

    Args:
        tags: as for ``bytes_tokenizer``.
    """
    tokenizer, nothing = bytes_tokenizer(tags), Vocabulary("none", ("",) * BYTES_VOCAB, ())
    with tempfile.TemporaryDirectory() as folder:
        path = write(
            Path(folder) / "m.gguf",
            layers=1,
            hidden=64,
            heads=2,
            kv_heads=1,
            context=context,
            vocabulary=nothing,
            seed=seed,
        )
        model = NativeModel(path, name=NAME, threads=1)
    model.tokenizer = tokenizer
    model.capabilities = replace(model.capabilities, eos_ids=frozenset({tokenizer.eos_token_id}))
    return model


class _Slow(HFModel):
    """A model whose answers take long enough to be left."""

    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        time.sleep(0.02)
        return super().extend(rows, nodes)


def slow_target() -> HFModel:
    return _Slow(tiny(), tiny_tokenizer(), name=NAME, self_test=False)


class GatedModel(HFModel):
    """A model that makes a pass only when the test has released one, so that no result depends on who is faster."""

    def __init__(self) -> None:
        super().__init__(tiny(), tiny_tokenizer(), name=NAME, self_test=False)
        self.gate = threading.Semaphore(0)

    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        assert self.gate.acquire(timeout=120)
        return super().extend(rows, nodes)


def until(found: Callable[[], bool]) -> None:
    """Wait until something is so; it has to be at last."""
    watchdog = time.monotonic() + 120
    while not found():
        assert time.monotonic() < watchdog
        time.sleep(0.002)


class Running:
    """A server that runs.

    Attributes:
        engine: its engine.
        url: where it listens.
    """

    def __init__(self, engine: Engine, url: str, server: uvicorn.Server) -> None:
        self.engine, self.url, self._server = engine, url, server

    @property
    def connections(self) -> int:
        """That are open."""
        return len(self._server.server_state.connections)

    @property
    def buffered(self) -> int:
        """Bytes of answers that wait in the server to be taken."""
        return sum(each.transport.get_write_buffer_size() for each in self._server.server_state.connections)

    @property
    def idle(self) -> bool:
        """No request waits or runs, none holds anything, and all observers know."""
        return not self.engine.scheduler.jobs and not self.engine.stepper.requests

    def get_busy(self) -> None:
        """Wait until it has a request."""
        while self.idle:
            time.sleep(0.001)

    def settle(self) -> None:
        """Wait until it is idle."""
        while not self.idle:
            time.sleep(0.01)


@contextmanager
def running(
    model: LanguageModel | None = None,
    speculation: SpeculationParams = LOOKUP,
    scheduling: SchedulerParams | None = None,
    observers: Sequence[Observer] = (),
    patience: float = PATIENCE,
    template_variables: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Running]:
    metrics = Metrics()
    engine = Engine(
        model or target(),
        speculation,
        observers=[metrics, *observers],
        scheduling=scheduling or SchedulerParams(prefixes=2),
        template_variables=template_variables,
    )
    chosen = replace(ServerSettings(name=NAME, speculation=speculation), **settings)
    app, http = Server(EngineLoop(lambda: engine), chosen, metrics).app, patient(patience)
    config = uvicorn.Config(app, port=0, http=http, ws="none", log_level="error", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Running(engine, f"http://127.0.0.1:{port}", server)
    finally:
        server.should_exit = True
        thread.join()


def posted(served: Running, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Status and JSON of a request; ``body`` is sent as it is if it is bytes, else with the model's name."""
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
    try:
        content = body if isinstance(body, bytes) else json.dumps({"model": NAME, **body}).encode()
        connection.request("POST", path, content, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def streamed(served: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, without the last, [DONE]."""
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
    try:
        content = json.dumps({"model": NAME, "stream": True, **body})
        connection.request("POST", path, content, {"Content-Type": "application/json"})
        *events, done, rest = connection.getresponse().read().decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]
    finally:
        connection.close()


def fetched(served: Running, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
    try:
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
