"""Keys, full queues, long bodies, deadlines and pages of other origins."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import EngineRequest, Observer
from draftree.request import Outcome

from .running import HEAD, NAME, TEXT, fetched, posted, running, slow_target, until


def test_keys_open_all_but_health_and_metrics() -> None:
    with running(keys=("secret", "other")) as served:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Bearer other"}, 200),
        ):
            assert posted(served, "/v1/completions", {"prompt": TEXT, "max_tokens": 2}, headers)[0] == status
        assert fetched(served, "/v1/models")[0] == 401
        assert fetched(served, "/health")[0] == fetched(served, "/metrics")[0] == 200
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        client.close()


def test_a_full_queue_says_when_to_come_back() -> None:
    with running(slow_target(), scheduling=SchedulerParams(rows=1, queue=1)) as served:
        body = {"prompt": TEXT, "max_tokens": 20, "ignore_eos": True, "draftree": {"drafter": "none"}}
        statuses: list[int] = []

        def ask() -> None:
            statuses.append(posted(served, "/v1/completions", body)[0])

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200, 429}
        assert "draftree:admission_rejections_total" in fetched(served, "/metrics")[1]


def test_a_client_that_leaves_the_queue_is_counted() -> None:
    """Its request has never run."""
    with running(slow_target(), scheduling=SchedulerParams(rows=1)) as served:
        host, port = served.url.removeprefix("http://").split(":")
        asked = {"model": NAME, "prompt": TEXT, "max_tokens": 100, "ignore_eos": True, "draftree": {"drafter": "none"}}
        body = json.dumps(asked).encode()
        request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        with socket.create_connection((host, int(port))) as first:
            first.sendall(request)
            scheduler = served.engine.scheduler
            until(lambda: len(scheduler.running) == 1)  # before that it is the first one that waits
            with socket.create_connection((host, int(port))) as second:
                second.sendall(request)
                until(lambda: len(scheduler.waiting) == 1)
            until(lambda: not scheduler.waiting)
            assert len(scheduler.running) == 1
            counted = 'draftree:requests_total{finish_reason="cancelled"} 1.0'
            until(lambda: counted in fetched(served, "/metrics")[1])


def test_a_long_body_is_refused_before_it_is_read() -> None:
    with running(most_body=1000) as served:
        status, found = posted(served, "/v1/completions", {"prompt": "x" * 2000})
        assert status == 413 and "1000 bytes" in found["error"]["message"]
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:  # no length: it is counted as it comes
            connection.sendall(
                HEAD
                + b"Transfer-Encoding: chunked\r\n\r\n"
                + b"".join(b"190\r\n" + b" " * 400 + b"\r\n" for _ in range(4))
                + b"0\r\n\r\n"
            )
            assert b" 413 " in connection.recv(4096)
        assert posted(served, "/v1/completions", {"prompt": "a b", "max_tokens": 2})[0] == 200


def test_a_deadline_ends_an_answer_with_what_it_has() -> None:
    with running(slow_target(), timeout=0.4, scheduling=SchedulerParams(rows=1)) as served:
        body = {"prompt": TEXT, "max_tokens": 100, "ignore_eos": True, "draftree": {"drafter": "none"}}
        status, found = posted(served, "/v1/completions", body)
        assert status == 200 and found["choices"][0]["finish_reason"] == "deadline"
        assert found["usage"]["completion_tokens"] < 100


def test_pages_of_chosen_origins_may_ask() -> None:
    with running(origins=("http://page",)) as served:
        connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
        connection.request("GET", "/v1/models", headers={"Origin": "http://page"})
        assert connection.getresponse().headers["Access-Control-Allow-Origin"] == "http://page"
        connection.close()
    with running() as served:
        connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
        connection.request("GET", "/v1/models", headers={"Origin": "http://page"})
        assert "Access-Control-Allow-Origin" not in connection.getresponse().headers
        connection.close()


class Budgets(Observer):
    """Keeps the node budgets of requests, and the sizes of their trees."""

    def __init__(self) -> None:
        self.seen, self.sizes = list[int](), list[int]()

    def opened(self, request: EngineRequest) -> None:
        self.seen.append(request.speculation.nodes)

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        self.sizes += [len(outcome.tree) for outcome in outcomes]


def test_a_tree_that_holds_up_others_is_refused_by_name_and_one_without_a_bound_gets_it() -> None:
    """A neighbour's twelve tokens took 88.7 s beside a request of 1,024 nodes a step, and 0.2 s alone."""
    budgets = Budgets()
    with running(observers=[budgets], most_nodes=10) as served:

        def answered(**chosen: object) -> tuple[int, Any]:
            return posted(served, "/v1/completions", {"prompt": TEXT, "max_tokens": 8, "draftree": chosen})

        for nodes in (11, 64, 4096):
            status, found = answered(method="static", nodes=nodes)
            assert (status, found["error"]["param"]) == (400, "draftree.nodes")
            assert "--nodes-limit" in found["error"]["message"]
        assert answered(method="static", nodes=10)[0] == answered(nodes=3)[0] == 200
        assert answered(method="dynamic-width")[0] == answered(method="binary")[0] == 200
    assert budgets.seen == [10, 3, 10, 10]
    assert max(budgets.sizes) <= 10
