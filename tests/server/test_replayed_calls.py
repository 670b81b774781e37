"""Calls of earlier answers come back as clients got them, those included that the limit of tokens has cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .running import Running, bytes_target, posted, running

CHAT, RESPONSE = "/v1/chat/completions", "/v1/responses"
ASKED: list[Any] = [{"role": "user", "content": "how?"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["oslo"]}, "days": {"enum": [1]}}, "required": ["city"]}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
TOOL: Any = {"type": "function", "name": "look", "parameters": SCHEMA}
ODD = [
    "[]",
    "null",
    '"x"',
    "5",
    "",
    "  ",
    "{",
    '{"a": "b',
    '{"a": 1',
    "x",
    "[" * 3000,
    '{"a": ' * 400 + "1" + "}" * 400,
]
"""Arguments that a call may have come to have."""


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(bytes_target(tags=False)) as found:
        yield found


def answered(served: Running, path: str, body: dict[str, Any]) -> Any:
    status, found = posted(served, path, body)
    assert status == 200, found
    return found


def test_a_call_of_a_chat_that_was_cut_anywhere_can_be_replayed(served: Running) -> None:
    """Its arguments were refused, being no JSON, and with them every further turn of the conversation."""
    body = {"messages": ASKED, "tools": [CHAT_TOOL], "tool_choice": "required", "seed": 1}
    whole = answered(served, CHAT, body)["usage"]["completion_tokens"]
    cuts = set[str]()
    for most in range(1, whole + 1):
        message = answered(served, CHAT, {**body, "max_tokens": most})["choices"][0]["message"]
        calls = message.get("tool_calls", ())
        cuts |= {call["function"]["arguments"] for call in calls}
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "cut off"} for call in calls]
        history = [*ASKED, message, *results, *ASKED]
        answered(served, CHAT, {"messages": history, "tools": [CHAT_TOOL], "max_tokens": 1})
    assert len(cuts) > 10


def test_a_call_of_a_response_that_was_cut_anywhere_can_be_replayed(served: Running) -> None:
    body = {"input": ASKED, "tools": [TOOL], "tool_choice": "required", "seed": 1}
    whole = answered(served, RESPONSE, body)["usage"]["output_tokens"]
    cuts = set[str]()
    for most in range(1, whole + 1):
        output = answered(served, RESPONSE, {**body, "max_output_tokens": most})["output"]
        calls = [item for item in output if item["type"] == "function_call"]
        cuts |= {call["arguments"] for call in calls}
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "cut off"} for call in calls]
        items = [*ASKED, *output, *results, *ASKED]
        answered(served, RESPONSE, {"input": items, "tools": [TOOL], "max_output_tokens": 1})
    assert len(cuts) > 10


@pytest.mark.parametrize("arguments", ODD, ids=lambda text: text[:12])
def test_arguments_that_are_no_object_are_text_of_the_call(served: Running, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    chat = {"messages": [*ASKED, answer, {"role": "tool", "tool_call_id": "1", "content": "no"}]}
    item = {"type": "function_call", "call_id": "1", "name": "look", "arguments": arguments}
    items = {"input": [*ASKED, item, {"type": "function_call_output", "call_id": "1", "output": "no"}]}
    for path, body, most in ((CHAT, chat, "max_tokens"), (RESPONSE, items, "max_output_tokens")):
        status, found = posted(served, path, {**body, most: 1})
        assert status == 200 or found["error"]["code"] == "context_length_exceeded", found
    ids = posted(served, "/tokenize", chat)[1]["tokens"]
    text = posted(served, "/detokenize", {"tokens": ids})[1]["prompt"]
    written = arguments.strip() and json.dumps(arguments)
    assert f'{{"name": "look", "arguments": {written or "{}"}}}' in text or '"arguments": {"a": {"a"' in text
