"""Lines to records: each text equals the same request alone, bodies mean what they mean to the server, bad lines say
why."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import SpeculationParams
from draftree.openai.batches import CHAT, COMPLETIONS, QUEUE, RESPONSES, Answering, BatchLine, Record, is_error
from draftree.text.encoding import Prompt, user

from .running import LOOKUP, NAME, TEXT, posted, running, target

MODEL = {"model": NAME}
MESSAGES = [{"role": "user", "content": TEXT}]


def answering(speculation: SpeculationParams = LOOKUP, rows: int = 3) -> Answering:
    engine = Engine(target(), speculation, scheduling=SchedulerParams(rows=rows, queue=QUEUE))
    return Answering(engine, speculation, NAME, rows)


def lines_of(*requests: Any) -> list[BatchLine]:
    texts = [each if isinstance(each, str) else json.dumps(each) for each in requests]
    return [BatchLine(number, text.encode()) for number, text in enumerate(texts, start=1)]


def answered(*requests: Any) -> list[Record]:
    """The records, in the order of their lines."""
    lines = lines_of(*requests)
    found = {record["id"]: record for record in answering().records(lines)}
    assert len(found) == len(lines)
    return [found[line.id] for line in lines]


def in_full(url: str, name: str = "a", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": MODEL | body}


def alone(prompt: Prompt, **params: Any) -> str:
    return Engine(target()).generate([prompt], SamplingParams(**params))[0].text


def text_of(record: Record) -> str:
    choice = record["response"]["body"]["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def test_each_text_equals_the_same_request_alone() -> None:
    """Seven requests share three rows, greedy and sampled, of different lengths."""
    asked = [(f"{TEXT} {'xyz'[i % 3]}{i}", 5 + 7 * (i % 3), (i % 2) * 0.8) for i in range(7)]
    records = answered(
        *(
            in_full(COMPLETIONS, str(i), prompt=text, max_tokens=tokens, temperature=temperature, seed=i)
            for i, (text, tokens, temperature) in enumerate(asked)
        )
    )
    for i, (record, (text, tokens, temperature)) in enumerate(zip(records, asked, strict=True)):
        assert record["custom_id"] == str(i) and record["response"]["status_code"] == 200
        assert text_of(record) == alone(text, max_tokens=tokens, temperature=temperature, seed=i)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, {"messages": MESSAGES, "max_tokens": 9, "n": 2, "temperature": 0.7, "seed": 5, "logprobs": True}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 9, "prediction": {"type": "content", "content": TEXT}}),
        (COMPLETIONS, {"prompt": [TEXT, "b"], "max_tokens": 6, "temperature": 0, "echo": True, "logprobs": 1}),
        (COMPLETIONS, {"prompt": TEXT, "max_tokens": 1, "echo": True, "logprobs": 0}),
        (RESPONSES, {"input": TEXT, "max_output_tokens": 7, "temperature": 0}),
    ],
)
def test_a_body_means_what_it_means_to_the_server(url: str, body: dict[str, Any]) -> None:
    body = {"seed": 3, **body}
    (record,) = answered(in_full(url, **body))
    with running(target()) as server:
        status, expected = posted(server, url, body)
    assert status == record["response"]["status_code"] == 200
    assert _same(record["response"]["body"], expected), (record["response"]["body"], expected)


_OWN = {"id", "created", "created_at", "completed_at", "metrics", "prompt_tokens_details"}
"""What two answers to one body need not share: names, times, and figures of drafts, which learn."""


def _same(one: Any, two: Any) -> bool:
    """Two answers are equal, log-probabilities up to the rounding of passes of other shapes."""
    if isinstance(one, dict):
        keys = one.keys() - _OWN
        return keys == two.keys() - _OWN and all(_same(one[key], two[key]) for key in keys)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(_same, one, two))
    return math.isclose(one, two, abs_tol=1e-4) if isinstance(one, float) else bool(one == two)


def test_a_line_in_short_is_a_greedy_chat() -> None:
    plain, sampled, named = answered(
        {"prompt": TEXT, "max_tokens": 8},
        {"prompt": TEXT, "max_tokens": 8, "temperature": 1, "seed": 4},
        {"prompt": TEXT, "max_tokens": 8, "custom_id": "mine"},
    )
    assert plain["custom_id"] == "line-1" and named["custom_id"] == "mine"
    assert text_of(plain) == text_of(named) == alone(user(TEXT), max_tokens=8)
    assert text_of(sampled) == alone(user(TEXT), max_tokens=8, temperature=1, seed=4)


@pytest.mark.parametrize(
    ("line", "named", "message"),
    [
        ("{not json", None, "line 2: it is no JSON object"),
        ("[1]", None, "line 2: it is no JSON object"),
        ({"url": CHAT, "body": {}}, None, "line 2: custom_id is missing"),
        ({"custom_id": "x", "url": CHAT}, "x", "line 2: body is missing"),
        ({"custom_id": 5, "prompt": "a"}, None, "line 2: custom_id is 5"),
        (in_full("/v1/embeddings", "x"), "x", 'line 2: url is "/v1/embeddings"'),
        (in_full(CHAT, "x", messages=MESSAGES) | {"method": "GET"}, "x", 'line 2: method is "GET"'),
        ({"custom_id": "x", "url": [1], "body": {}}, "x", "line 2: url is wrong"),
    ],
)
def test_a_line_that_is_no_request_is_named_and_the_others_are_answered(
    line: Any, named: str | None, message: str
) -> None:
    good = {"prompt": TEXT, "max_tokens": 4}
    first, record, last = answered(good, line, good)
    assert record["response"] is None and record["error"]["code"] == "invalid_line"
    assert record["error"]["message"].startswith(message) and record["custom_id"] == named
    assert text_of(first) == text_of(last) == alone(user(TEXT), max_tokens=4)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
        ({"messages": MESSAGES, "model": "other"}, 404, "model"),
        ({"messages": MESSAGES, "stream": True}, 400, "stream"),
        ({"messages": MESSAGES, "functions": [{"name": "f"}]}, 400, "functions"),
        ({"messages": MESSAGES, "max_tokens": 5000}, 400, "max_tokens"),
        ({"messages": MESSAGES, "draftree": {"method": "magic"}}, 400, "draftree"),
    ],
)
def test_a_body_that_does_not_do_is_refused_as_the_server_does(
    body: dict[str, Any], status: int, field: str | None
) -> None:
    record, good = answered(in_full(CHAT, **body), {"prompt": TEXT, "max_tokens": 4})
    assert is_error(record) and record["response"]["status_code"] == status
    assert record["response"]["body"]["error"]["param"] == field
    assert not is_error(good)


FORMATS: list[dict[str, Any]] = [
    *({"structured_outputs": {"grammar": text}} for text in ("", "# c", "a ::= b", "\ud800", "start: /(/")),
    *({"structured_outputs": {"regex": text}} for text in ("\ud800", "(", "a{99999999}")),
    {"structured_outputs": {"json": {"$ref": "#/nowhere"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "what"}}}},
]


@pytest.mark.parametrize("body", FORMATS)
def test_a_grammar_that_does_not_do_costs_its_line_alone(body: dict[str, Any]) -> None:
    """A lone surrogate in a regex, or an empty grammar, ended the whole batch with a traceback."""
    good = {"prompt": TEXT, "max_tokens": 4}
    first, record, last = answered(good, good | body, good)
    assert is_error(record) and record["response"]["body"]["error"]["message"].startswith("line 2: ")
    assert text_of(first) == text_of(last) == alone(user(TEXT), max_tokens=4)


@pytest.mark.parametrize("place", ["Choices", "Engine.enqueue", "answer_builder", "_Line.read"])
def test_whatever_is_raised_for_a_line_costs_that_line_alone(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "draftree.openai.batches"
    owner: Any = importlib.import_module(module)
    *path, name = place.split(".")
    for part in path:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), 0

    def failing(*given: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise LookupError("of a library\nwith a traceback")
        return real(*given, **options)

    monkeypatch.setattr(owner, name, failing)
    good = {"prompt": TEXT, "max_tokens": 4}
    records = answered(good, good, good)
    failed = [record for record in records if is_error(record)]
    assert len(failed) == 1
    assert failed[0]["response"]["status_code"] == 500
    assert failed[0]["response"]["body"]["error"]["message"].endswith("LookupError: of a library with a traceback")
    assert {text_of(r) for r in records if r not in failed} == {alone(user(TEXT), max_tokens=4)}


def test_leaving_early_frees_all_rows() -> None:
    made = answering()
    lines = lines_of(*({"prompt": f"{TEXT} {i}", "max_tokens": 6 + i} for i in range(6)))
    records = made.records(lines)
    next(records)
    records.close()  # type: ignore[attr-defined]
    assert not made._engine.scheduler.jobs and not made._engine.target.rows  # type: ignore[attr-defined]


def ids_of(lines: Sequence[BatchLine]) -> set[str]:
    return {line.id for line in lines}


def test_ids_tell_lines_apart_by_place_and_text() -> None:
    one, two = lines_of("a", "a")
    assert len(ids_of([one, two, BatchLine(1, b"b")])) == 3 and BatchLine(1, b"a").id == one.id
