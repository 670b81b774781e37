"""What the inspector reads: traces beside tokens, the cost profile, and the files of its page."""

from __future__ import annotations

import gc
import http.client
import json
import re
import socket
import threading
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import draftree.page
from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.engine.speculation import SpeculationParams
from draftree.engine.trace import RequestTrace, Trace, plain
from draftree.models.cost_profile import profile_of
from draftree.models.huggingface.hf_model import HFModel

from ..tiny import tiny, tiny_tokenizer
from .running import NAME, TEXT, Running, fetched, posted, running, slow_target, streamed, until

ENSEMBLE = SpeculationParams(drafter="lookup+self", method="static", nodes=8)
TRACED = {"include_trace": True}
FOLDER = Path(draftree.page.__file__).parent


def _records(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for event in events for record in event.get("trace", [])]


def _tokens(records: list[dict[str, Any]], request: int) -> list[int]:
    own = [record for record in records if record.get("request") == request]
    (first,) = [record["first"] for record in own if record["kind"] == "request"]
    steps = [record for record in own if record["kind"] == "step"]
    return [first, *(token for step in steps for token in step["tokens"][: step["taken"]])]


def _live() -> list[object]:
    """Live traces that anybody holds."""
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is RequestTrace]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_carries_the_lines_that_a_trace_file_has(path: str, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    with (
        Trace(file, labels={"method": "static"}) as trace,
        running(speculation=ENSEMBLE, observers=[trace]) as served,
    ):
        asked = {"prompt": TEXT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": TEXT}]}
        events = streamed(served, path, {**asked, "max_tokens": 24, "temperature": 0, "stream_options": TRACED})
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    records = _records(events)
    server_started, engine_built = (datetime.fromisoformat(run.pop("date")) for run in (records[0], lines[0]))
    assert records == lines and server_started >= engine_built
    assert [line["kind"] for line in lines[:3]] == ["run", "request", "step"] and lines[-1]["kind"] == "end"
    assert any(line["path"] for line in lines if line["kind"] == "step")


def test_with_a_trace_each_token_has_a_piece_of_its_own(served: Running, alone: Engine) -> None:
    """Also the first half of a character, whose text is empty: so pieces and the tokens of the records go together."""
    halves = {str(token): 20 for token in alone.inputs.encode("é")}
    body = {"prompt": TEXT, "max_tokens": 16, "temperature": 0, "logit_bias": halves}
    events = streamed(served, "/v1/completions", {**body, "stream_options": TRACED})
    texts = [choice["text"] for e in events for choice in e["choices"] if choice["finish_reason"] is None]
    tokens = _tokens(_records(events), 0)
    assert len(texts) == len(tokens) == 16 and "" in texts
    assert "".join(texts) == posted(served, "/v1/completions", body)[1]["choices"][0]["text"]


def test_a_stream_without_one_has_no_trace(served: Running) -> None:
    body = {"prompt": TEXT, "max_tokens": 8, "temperature": 0}
    for options in (None, {"include_usage": True}):
        assert _records(streamed(served, "/v1/completions", {**body, "stream_options": options})) == []
    assert not _live()


def test_requests_that_run_together_get_their_own_records(served: Running, alone: Engine) -> None:
    found: dict[int, list[dict[str, Any]]] = {}

    def ask(i: int) -> None:
        body = {"prompt": TEXT[: 6 + i], "max_tokens": 12 + i, "seed": i, "n": 2, "stream_options": TRACED}
        found[i] = streamed(served, "/v1/completions", body)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, events in found.items():
        for choice in (0, 1):
            params = SamplingParams(max_tokens=12 + i, temperature=1.0, seed=i + choice)
            assert _tokens(_records(events), choice) == alone.generate([TEXT[: 6 + i]], params)[0].token_ids
        assert sum(record["kind"] == "end" for record in _records(events)) == 2


def test_nothing_is_kept_of_a_client_that_leaves() -> None:
    with running(slow_target(), ENSEMBLE) as served:
        host, port = served.url.removeprefix("http://").split(":")
        asked = {"model": NAME, "prompt": TEXT, "max_tokens": 100, "stream": True, "stream_options": TRACED}
        body = json.dumps({**asked, "ignore_eos": True}).encode()
        with socket.create_connection((host, int(port))) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert b"200 OK" in connection.recv(4096)
            served.get_busy()
        served.settle()
        until(lambda: not _live())  # the stream's tasks end a moment later
        assert posted(served, "/v1/completions", {"prompt": TEXT, "max_tokens": 2})[0] == 200


def test_a_response_refuses_a_trace(served: Running) -> None:
    status, found = posted(served, "/v1/responses", {"input": TEXT, "stream": True, "stream_options": TRACED})
    assert status == 400 and found["error"]["param"] == "stream_options.include_trace"


def test_about_has_the_profile_that_auto_looks_at() -> None:
    with running(speculation=SpeculationParams(drafter="lookup", method="auto")) as served:
        about = json.loads(fetched(served, "/draftree/about")[1])
        points = profile_of(served.engine.target).points
        assert about["cost"] == plain([asdict(point) for point in points])
        assert (about["model"], about["drafter"], about["method"]) == (NAME, "lookup", "auto")
        (run,) = [r for r in _records(streamed(served, "/v1/completions", _short())) if r["kind"] == "run"]
        assert about["run"] == run and {"auto", "static"} <= set(about["methods"])


def test_an_idle_server_measures_what_it_started_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("draftree.models.cost_profile.profile_folder", lambda: tmp_path)
    monkeypatch.setattr("draftree.engine.engine._IDLE_SECONDS", 0.01)
    draft = HFModel(tiny(), tiny_tokenizer(), name="draft", self_test=False)
    with running(speculation=SpeculationParams(drafter=draft, method="auto")) as served:
        assert streamed(served, "/v1/completions", _short())
        while not all(list(tmp_path.glob(f"{name}-*.json")) for name in (NAME, "draft")):
            time.sleep(0.01)


def test_without_auto_there_is_no_profile(served: Running) -> None:
    about = json.loads(fetched(served, "/draftree/about")[1])
    assert about["cost"] is None and about["method"] == "chain"


def _short() -> dict[str, Any]:
    return {"prompt": TEXT, "max_tokens": 2, "stream_options": TRACED}


def test_the_page_needs_no_key_and_what_it_asks_does() -> None:
    with running(keys=("secret",)) as served:
        assert fetched(served, "/")[0] == fetched(served, "/page/inspector.js")[0] == 200
        assert fetched(served, "/draftree/about")[0] == 401
        assert posted(served, "/v1/completions", {**_short(), "stream": True})[0] == 401
        key = {"Authorization": "Bearer secret"}
        assert fetched(served, "/draftree/about", key)[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/page/nothing.js",
        "/page/",
        "/page/../inspector.py",
        "/page/..%2finspector.py",
        "/page/%2e%2e/app.py",
        "/page//etc/passwd",
        "/page/./inspector.js",
        "/page/show.py",
        "/page/inspector.js%00",
        "/inspector.js",
    ],
)
def test_no_other_file_can_be_read(served: Running, path: str) -> None:
    assert fetched(served, path)[0] == 404


def test_a_page_file_trick_opens_nothing_without_a_key() -> None:
    with running(keys=("secret",)) as served:
        for path in ("/page/../v1/models", "/page/..%2fv1%2fmodels", "/page/%2e%2e/draftree/about"):
            assert fetched(served, path)[0] in (401, 404)


def test_the_page_runs_its_own_scripts_alone(served: Running) -> None:
    for path in ("/", *(f"/page/{file.name}" for file in FOLDER.iterdir() if file.suffix not in (".py", ""))):
        connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        policy = answer.headers["Content-Security-Policy"]
        connection.close()
        assert answer.status == 200 and policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy and answer.headers["X-Content-Type-Options"] == "nosniff"
        assert set(re.findall(r"https?://[^\"'\s]+", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"<script>|\son\w+=|\sstyle=|innerHTML|eval\(", text)
