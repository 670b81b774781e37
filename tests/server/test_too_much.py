"""Requests that would take long, or break a library: refused before any work, by their parts or size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from draftree.sandbox import workers

from .running import NAME, TEXT, Running, bytes_target, posted, running

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.fixture(scope="module")
def spelling() -> Iterator[Running]:
    with running(bytes_target()) as found:
        yield found


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
    assert body["error"]["param"] in {"messages", "prompt", "input", "tools", "prediction"}
    assert sum(read) < 10_000


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
DEEP = "\n".join(["start: r0", *(f'r{i}: "a" r{i + 1}' for i in range(9000)), 'r9000: "b"'])


@pytest.mark.parametrize("text", [*HOSTILE, DEEP])
def test_no_grammar_is_an_error_of_the_server(spelling: Running, text: str) -> None:
    """Exceptions of llguidance, and its panics, were answered with 500, or ended the server."""
    for path, fields in _places(text):
        limit = "max_output_tokens" if path == RESPONSE else "max_tokens"
        status, body = posted(spelling, path, {"model": NAME, limit: 2, **fields})
        assert status in (200, 400), body
        if status == 400:
            assert body["error"]["param"].split(".")[0].split("[")[0] in fields
            assert "Traceback" not in body["error"]["message"] and len(body["error"]["message"]) < 700
    spelling.settle()
