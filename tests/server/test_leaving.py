"""Clients that leave: nothing of their requests is left in memory, wherever they were."""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from draftree.engine.engine import Handle
from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import EngineRequest
from draftree.models.base import Row
from draftree.openai.choices import Choices
from draftree.openai.schema import Sampled
from draftree.server.engine_loop import Submission

from .running import HEAD, NAME, TEXT, Running, posted, running, slow_target, until

KINDS = (EngineRequest, Handle, Submission, Choices, Sampled, Row)
ASKED = {"prompt": TEXT, "max_tokens": 60, "ignore_eos": True, "draftree": {"drafter": "none"}}
KEPT = 2
"""Rows of ended requests."""


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    with running(slow_target(), scheduling=SchedulerParams(rows=2, queue=6, prefixes=KEPT)) as found:
        assert posted(found, "/v1/completions", {**ASKED, "max_tokens": 2})[0] == 200
        yield found


def alive() -> dict[str, int]:
    """How many objects of each kind there are."""
    gc.collect()
    types = [type(each) for each in gc.get_objects()]
    return {kind.__name__: sum(issubclass(each, kind) for each in types) for kind in KINDS}


def connected(served: Running, body: dict[str, Any]) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    content = json.dumps({"model": NAME, **body}).encode()
    connection = socket.create_connection((host, int(port)))
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content)
    return connection


BODIES: list[dict[str, Any]] = [{}, {"stream": True}, {"n": 2}, {"stream": True, "logprobs": 2}]


def leave(served: Running, body: dict[str, Any], when: str) -> None:
    """Four clients ask, and leave at once, in the queue, with a row, or after the first token of one of them."""
    scheduler = served.engine.scheduler
    clients = [connected(served, {**ASKED, **body}) for _ in range(4)]
    if when == "queued":
        until(lambda: len(scheduler.waiting) > 0)
    elif when == "running":
        until(lambda: len(scheduler.running) > 0)
    elif when == "answering":
        until(lambda: any(job.request.chunks for job in scheduler.running))
    for client in clients:
        client.close()
    until(lambda: not served.connections and served.idle)


def test_nothing_is_left_of_requests_whose_clients_have_left(slow: Running) -> None:
    before = alive()
    for body in BODIES:
        for when in ("at once", "queued", "running", "answering"):
            leave(slow, body, when)
            assert len(slow.engine.stepper.prefixes.lengths) <= KEPT
    until(lambda: all(count <= before[kind] + (kind == "Row") * KEPT for kind, count in alive().items()))


def test_rows_of_those_who_left_are_free_for_others(slow: Running) -> None:
    """Each of them would run for 60 passes, two at a time; the next client waits for none of them."""
    clients = [connected(slow, {**ASKED, "stream": bool(i % 2)}) for i in range(8)]
    until(lambda: len(slow.engine.scheduler.jobs) == 8)
    requests = [job.request for job in slow.engine.scheduler.jobs]
    for client in clients:
        client.close()
    until(lambda: slow.idle and all(request.row is None for request in requests))
    assert {request.finish_reason for request in requests} == {"cancelled"}
    assert all(len(request.output_ids) < 60 for request in requests)
    assert posted(slow, "/v1/completions", {**ASKED, "max_tokens": 1})[0] == 200
