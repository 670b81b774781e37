"""Requests that would take long, or break a library: refused before any work, by their parts or size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from draftree.engine.input_processor import InputProcessor
from draftree.openai.answers import agreement
from draftree.openai.chat_api import ChatRequest
from draftree.openai.responses_api import ResponsesRequest
from draftree.openai.schema import CompletionRequest, Sampled
from draftree.sandbox import workers
from draftree.text.spelling import InnerSpelling

from .running import NAME, TEXT, Running, posted

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CPU_SECONDS", 1)


def _message(content: object = TEXT) -> dict[str, Any]:
    return {"role": "user", "content": content}


PARTS = [{"type": "text", "text": "a"}] * 20_000
CALLS = [{"function": {"name": "f", "arguments": "{}"}}] * 20_000
TOO_MUCH: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [_message()] * 20_000}),
    (CHAT, {"messages": [_message()] * 10_000}),
    (CHAT, {"messages": [_message(PARTS)]}),
    (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": CALLS}, _message()]}),
    (CHAT, {"messages": [_message("a" * 3_000_000)]}),
    (CHAT, {"messages": [_message()], "prediction": {"type": "content", "content": "a" * 3_000_000}}),
    (CHAT, {"messages": [_message()], "tools": [{"type": "function", "function": {"name": "f"}}] * 20_000}),
    (COMPLETION, {"prompt": "a" * 3_000_000}),
    (COMPLETION, {"prompt": [TEXT, "a" * 3_000_000]}),
    (COMPLETION, {"prompt": [1] * 500_000}),
    (COMPLETION, {"prompt": [[1], [1] * 500_000]}),
    (COMPLETION, {"prompt": [1] * 1_300_000}),
    (COMPLETION, {"prompt": ["a"] * 20_000}),
    (COMPLETION, {"prompt": ["a"] * 100_000}),
    (COMPLETION, {"prompt": [[1]] * 10_000}),
    (COMPLETION, {"prompt": [[1]] * 100_000}),
    (COMPLETION, {"prompt": [1] * 100_000 + ["a"]}),
    (COMPLETION, {"prompt": [None] * 100_000}),
    (CHAT, {"messages": [None] * 100_000}),
    (CHAT, {"messages": [_message([None] * 100_000)]}),
    (RESPONSE, {"input": [None] * 100_000}),
    ("/tokenize", {"messages": [None] * 100_000}),
    (RESPONSE, {"input": [_message()] * 20_000}),
    (RESPONSE, {"input": [_message()] * 10_000}),
    (RESPONSE, {"input": "a" * 3_000_000}),
    ("/tokenize", {"messages": [_message()] * 20_000}),
    ("/tokenize", {"messages": [_message()] * 10_000}),
    ("/tokenize", {"prompt": "a" * 3_000_000}),
]


@pytest.mark.parametrize(("path", "fields"), TOO_MUCH)
def test_what_could_not_fit_is_refused_before_it_is_read(
    spelling: Running, path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat of 20,000 messages took 22 s to be refused, and a small one beside it waited for 21 s."""
    read: list[int] = []
    tokenizer, encode = type(spelling.engine.inputs.tokenizer), type(spelling.engine.inputs.tokenizer).encode  # type: ignore[union-attr]

    def encoded(self: Any, text: str, **options: Any) -> Any:
        read.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(tokenizer, "encode", encoded)
    status, body = posted(spelling, path, {"model": NAME, **fields})
    assert status == 400, body
    assert body["error"]["param"].split("[")[0] in {"messages", "prompt", "input", "tools", "prediction"}
    assert sum(read) < 10_000


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt": ["a"] * 265}, "prompt"),
        ({"prompt": [[1]] * 265}, "prompt"),
        ({"prompt": ["a"] * 20_000, "n": 16}, "prompt"),
        ({"prompt": ["a"] * 17, "n": 16}, "n"),
    ],
)
def test_more_choices_than_run_and_wait_are_refused_by_name(
    spelling: Running, fields: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20,000 prompts were read, and rejected after 20 s by a queue that can never hold them."""
    monkeypatch.setattr(InputProcessor, "encode", None)
    status, body = posted(spelling, COMPLETION, {"model": NAME, **fields})
    assert status == 400 and body["error"]["param"] == name
    assert "264" in body["error"]["message"] and spelling.idle


def test_as_many_choices_as_run_and_wait_are_answered(spelling: Running) -> None:
    status, body = posted(spelling, COMPLETION, {"prompt": ["a"] * 88, "n": 3, "max_tokens": 1})
    assert status == 200 and len(body["choices"]) == 264


MANY = 50_000
WRONG: list[tuple[type[Sampled], str, Any]] = [
    (CompletionRequest, "prompt", [1] * MANY + ["a"]),
    (CompletionRequest, "prompt", [None] * MANY),
    (CompletionRequest, "prompt", [["a"]] * 10_000),
    (CompletionRequest, "stop", [1] * MANY),
    (CompletionRequest, "bad_words", [1] * 1000),
    (CompletionRequest, "allowed_token_ids", ["a"] * MANY),
    (CompletionRequest, "stop_token_ids", [-1] * MANY),
    (CompletionRequest, "logit_bias", {f"x{i}": 0 for i in range(MANY)}),
    (CompletionRequest, "draftree", {"settings": {f"x{i}": [] for i in range(MANY)}}),
    (CompletionRequest, "structured_outputs", {"choice": [1] * MANY}),
    (ChatRequest, "messages", [{}] * 10_000),
    (ChatRequest, "messages", [_message([None] * MANY)]),
    (ChatRequest, "messages", [{"role": "assistant", "tool_calls": [None] * MANY}]),
    (ChatRequest, "tools", [None] * 100),
    (ResponsesRequest, "input", [{"type": 5}] * 10_000),
    (ResponsesRequest, "input", [{"type": "message", "role": "user", "content": [None] * MANY}]),
    (ResponsesRequest, "metadata", {str(i): i for i in range(MANY)}),
    (ResponsesRequest, "note", [[]] * MANY),
]


@pytest.mark.parametrize(("kind", "name", "value"), WRONG)
def test_of_many_wrong_entries_few_are_reported(kind: type[Sampled], name: str, value: Any) -> None:
    """A list of two million numbers and a text gave four million errors, which took minutes and 3 GB."""
    with pytest.raises(ValidationError) as found:
        kind.model_validate({"model": NAME, "prompt": "a", "messages": [_message()], "input": "a"} | {name: value})
    assert any(name in error["loc"] or name in str(error["ctx"]) for error in found.value.errors())
    assert found.value.error_count() < 16


def test_a_body_of_very_many_fields_is_refused(spelling: Running) -> None:
    status, body = posted(spelling, COMPLETION, {"prompt": TEXT, **{f"f{i}": 1 for i in range(2000)}})
    assert status == 400 and body["error"]["param"].startswith("f")


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_texts_that_every_step_looks_for_are_short_in_all(spelling: Running, name: str) -> None:
    """A stop string of megabytes was compared with the end of the text at each token, while all others waited."""
    for value in (["a" * 20_000], ["a" * 17] * 1000):
        status, body = posted(spelling, COMPLETION, {"prompt": TEXT, "max_tokens": 1, name: value})
        assert status == 400 and body["error"]["param"] == name
    assert posted(spelling, COMPLETION, {"prompt": TEXT, "max_tokens": 1, name: ["a" * 9] * 1000})[0] == 200


def test_bad_words_are_read_once_for_all_choices(spelling: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    spelled = InnerSpelling.__call__

    def counted(self: InnerSpelling, text: str) -> list[int]:
        read.append(text)
        return spelled(self, text)

    monkeypatch.setattr(InnerSpelling, "__call__", counted)
    body = {"prompt": ["a"] * 8, "n": 16, "max_tokens": 1, "bad_words": ["once", "twice"]}
    assert posted(spelling, COMPLETION, body)[0] == 200
    assert len(read) == 4


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids"])
def test_a_list_with_more_ids_than_there_are_tokens_is_refused(spelling: Running, name: str) -> None:
    status, body = posted(spelling, COMPLETION, {"prompt": TEXT, "max_tokens": 1, name: [1] * 100_000})
    assert status == 400 and body["error"]["param"] == name and "100000" in body["error"]["message"]


def _longest_common(one: Sequence[int], other: Sequence[int]) -> int:
    lengths = [0] * (len(other) + 1)
    for token in one:
        before = 0
        for at, there in enumerate(other):
            before, lengths[at + 1] = (
                lengths[at + 1],
                before + 1 if token == there else max(lengths[at], lengths[at + 1]),
            )
    return lengths[-1]


@given(st.lists(st.integers(0, 4), max_size=80), st.lists(st.integers(0, 4), max_size=80))
def test_what_a_predicted_output_has_of_the_answer_is_their_longest_common_subsequence(
    one: list[int], other: list[int]
) -> None:
    assert agreement(one, other) == _longest_common(one, other)


def _places(text: str) -> list[tuple[str, dict[str, Any]]]:
    """A text in every place of every route that a grammar is compiled of."""
    schemas: list[dict[str, Any]] = [{"const": text}, {"pattern": text, "type": "string"}, {"$ref": text}]
    outputs: list[dict[str, Any]] = [{"grammar": text}, {"regex": text}, {"choice": [text]}]
    outputs += [{"json": schema} for schema in schemas]
    prompts: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [_message()]},
        COMPLETION: {"prompt": TEXT},
        RESPONSE: {"input": TEXT},
    }
    found = [(path, {**prompt, "structured_outputs": one}) for path, prompt in prompts.items() for one in outputs]
    for schema in schemas:
        named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
        function = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
        found.append((CHAT, {**prompts[CHAT], "response_format": named}))
        found.append((CHAT, {**prompts[CHAT], **function}))
        found.append((RESPONSE, {**prompts[RESPONSE], "text": {"format": {"type": "json_schema", "schema": schema}}}))
    return found


HOSTILE = ["", "# c", "a ::= b", "\ud800", "\0", "(" * 3000, "start: /", "root ::= root", "start: start"]
DEEP = "\n".join(["start: r0", *(f'r{i}: "a" r{i + 1}' for i in range(4000)), 'r4000: "b"'])


@pytest.mark.parametrize(("text", "stride"), [*((text, 1) for text in HOSTILE), (DEEP, 5)])
def test_no_grammar_is_an_error_of_the_server(spelling: Running, text: str, stride: int) -> None:
    """Exceptions of llguidance, and its panics, were answered with 500, or ended the server."""
    for path, fields in _places(text)[::stride]:
        limit = "max_output_tokens" if path == RESPONSE else "max_tokens"
        status, body = posted(spelling, path, {"model": NAME, limit: 2, **fields})
        assert status in (200, 400), body
        if status == 400:
            assert body["error"]["param"].split(".")[0].split("[")[0] in fields
            assert "Traceback" not in body["error"]["message"] and len(body["error"]["message"]) < 700
    spelling.settle()
