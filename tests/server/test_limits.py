"""Keys, full queues, long bodies, deadlines and pages of other origins."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Sequence
from typing import Any

import httpx2 as httpx
import openai
import pytest

from draftree.engine.engine import Engine
from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import EngineRequest, Observer, SpeculationParams
from draftree.openai.reasoning import ThoughtParser
from draftree.request import Chunk, Outcome
from draftree.text.encoding import user

from ..scripted import PLAIN, THINKING, ScriptedModel, thinking_tokenizer
from .running import HEAD, NAME, TEXT, Running, fetched, posted, running, slow_target, until

JSON = {"Content-Type": "application/json"}


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


class CuttingOff(Observer):
    """Cancels requests that have so many tokens, as a server does that ends."""

    engine: Engine
    tokens = 0

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        for job in self.engine.scheduler.running:
            job.cancelled = len(job.request.chunks) >= self.tokens


def sent_events(served: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream of any endpoint."""
    content = json.dumps({"model": NAME, "stream": True, **body})
    lines = httpx.post(f"{served.url}{path}", content=content, headers=JSON, timeout=None).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def all_text(found: Any) -> tuple[str, str]:
    """What was thought and what was said, of an answer or an event of any endpoint."""
    thought = said = ""
    for choice in found.get("choices", ()):
        part = choice.get("message") or choice.get("delta") or {}
        thought += part.get("reasoning_content") or ""
        said += choice.get("text") or part.get("content") or ""
    for block in [*found.get("content", ()), *(part for item in found.get("output", ()) for part in item["content"])]:
        thought += block.get("thinking") or (block["text"] if block["type"] == "reasoning_text" else "")
        said += block["text"] if block["type"] in ("text", "output_text") else ""
    if (kind := found.get("type")) == "response.reasoning_text.delta":
        thought += found["delta"]
    elif kind == "response.output_text.delta":
        said += found["delta"]
    elif kind == "content_block_delta":
        thought, said = (found["delta"].get(name, "") for name in ("thinking", "text"))
    return thought, said


@pytest.mark.parametrize("script", ["a < </cod é€ <</co", "<think>\na </co €\n</thi</think>\n\n€ </cod"])
def test_an_answer_that_is_cut_off_has_the_text_of_all_its_tokens(script: str) -> None:
    """What was held back was in no answer, and its tokens were counted."""
    observer, thinks = CuttingOff(), script.startswith("<think>")
    tokenizer = thinking_tokenizer(THINKING if thinks else PLAIN)
    model, ids = ScriptedModel(script, tokenizer), tokenizer.encode(script, add_special_tokens=False)
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 99, "stop": ["</code>", "€ <a"]}
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": user("hi"), **options},
        "/v1/completions": {"prompt": "hi", **options},
        "/v1/messages": {"messages": user("hi"), "temperature": 0, "max_tokens": 99, "stop_sequences": options["stop"]},
        "/v1/responses": {"input": "hi", "temperature": 0, "stop": options["stop"]},
    }
    with running(model, SpeculationParams(drafter="none"), observers=[observer]) as served:
        observer.engine = served.engine
        for observer.tokens in range(2, len(ids), 3 if thinks else 1):
            text = str(tokenizer.decode(ids[: observer.tokens]))
            parser = ThoughtParser({}, inside=False, inner=None)
            parts = [*parser.push(Chunk(0, text, False, 0)), *parser.end("")]
            for path, body in asked.items():
                expected = tuple("".join(p.text for p in parts if p.thought == thought) for thought in (True, False))
                if path == "/v1/completions" or not thinks:
                    expected = ("", text)
                status, whole = posted(served, path, body)
                assert status == 200 and all_text(whole) == expected, path
                events = sent_events(served, path, body)
                thoughts, texts = zip(*(all_text(event) for event in events), strict=True)
                assert ("".join(thoughts), "".join(texts)) == expected, path


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
