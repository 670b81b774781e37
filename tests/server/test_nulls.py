"""null for an optional field is as if it were left out: every field of every body, on every route."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from draftree.engine.engine import Engine
from draftree.openai.batches import Answering, BatchLine
from draftree.openai.chat_api import ChatRequest, TokenizeRequest
from draftree.openai.responses_api import ResponsesRequest
from draftree.openai.schema import CompletionRequest, DetokenizeRequest
from draftree.text.encoding import user

from .running import LOOKUP, NAME, TEXT, Running, bytes_target, posted, running

FUNCTION: dict[str, Any] = {"name": "f", "description": "it", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": {**FUNCTION, "strict": True}}
OTHERS: list[dict[str, Any]] = [
    {"type": "namespace", "name": "many", "tools": [{"type": "function", **FUNCTION}]},
    {"type": "web_search"},
]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": "b", "tool_calls": [CALL]},
    {"role": "tool", "content": "c", "tool_call_id": "1"},
    {"role": "assistant", "tool_calls": [{"id": "2", "type": "custom", "custom": {"name": "g", "input": "x"}}]},
    {"role": "tool", "content": "d", "tool_call_id": "2"},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1]}}}
DRAWN: dict[str, Any] = {"seed": 1, "temperature": 0, "max_tokens": 3}
"""What nothing is drawn with, whichever of both is left out."""
ASKED: dict[str, Any] = {"seed": 1, "temperature": 0, "max_output_tokens": 3, "input": "a"}
CHAT = {**DRAWN, "messages": user(TEXT)}
DRAFTING = {"method": "static", "settings": {"width": 2}, "nodes": 4, "drafter": "lookup", "verification": "match"}
COMMON: dict[str, Any] = {"stream_options": {"include_usage": True}, "draftree": DRAFTING}
BODIES: dict[str, tuple[type[BaseModel], list[dict[str, Any]]]] = {
    "/v1/chat/completions": (
        ChatRequest,
        [
            {
                **CHAT,
                "messages": TURNS,
                "tools": [TOOL, {"type": "function", **FUNCTION, "name": "g"}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            {**CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
            {**CHAT, "tools": OTHERS},
            {**CHAT, "response_format": FORMAT, **COMMON},
            {**CHAT, "structured_outputs": {"choice": ["a"]}},
            {**CHAT, "prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]}},
        ],
    ),
    "/v1/completions": (
        CompletionRequest,
        [
            {**DRAWN, "prompt": TEXT, "structured_outputs": {"choice": ["a"], "json_object": False}},
            {**DRAWN, "prompt": TEXT, "structured_outputs": {"json": {"enum": [1]}}},
            {**DRAWN, "prompt": TEXT, **COMMON, "response_format": FORMAT},
        ],
    ),
    "/v1/responses": (
        ResponsesRequest,
        [
            {
                **ASKED,
                "input": [
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "1", "output": "a"},
                    {"type": "additional_tools", "tools": [{"type": "function", **FUNCTION, "name": "later"}]},
                    {"type": "web_search_call", "id": "2"},
                ],
                "tools": [{"type": "function", **FUNCTION}, *OTHERS],
            },
            {**ASKED, "text": {"format": FORMAT}, **COMMON},
            {**ASKED, "text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": [1]}}}},
            {**ASKED, "structured_outputs": {"choice": ["a"]}, "reasoning": {"effort": "low"}},
            {**ASKED, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ],
    ),
    "/tokenize": (
        TokenizeRequest,
        [{"prompt": "a", "add_special_tokens": False}, {"messages": TURNS, "tools": [TOOL, *OTHERS]}],
    ),
    "/detokenize": (DetokenizeRequest, [{"tokens": [5]}]),
}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(bytes_target()) as found:
        yield found


def models(kind: object) -> Iterator[type[BaseModel]]:
    """The models that an annotation names, and those in their fields."""
    for inner in get_args(kind):
        yield from models(inner)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
        for field in kind.model_fields.values():
            yield from models(field.annotation)


def holders(found: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], BaseModel]]:
    """The models in a body that was read, and where they are in what was sent."""
    if isinstance(found, list):
        for at, each in enumerate(found):
            yield from holders(each, (*path, at))
    if isinstance(found, BaseModel):
        yield path, found
        for name in found.model_fields_set & type(found).model_fields.keys():
            yield from holders(getattr(found, name), (*path, type(found).model_fields[name].alias or name))


def optional(kind: type[BaseModel], bodies: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """For each optional field of each model in the bodies: a body with null there, and one without the field."""
    for body in bodies:
        for path, model in holders(kind.model_validate({"model": NAME, **body})):
            for name, field in type(model).model_fields.items():
                if not field.is_required():
                    nulled, without = copy.deepcopy(body), copy.deepcopy(body)
                    inner, other = nulled, without
                    for step in path:
                        inner, other = inner[step], other[step]
                    inner[field.alias or name] = None
                    other.pop(field.alias or name, None)
                    yield nulled, without


def told(answer: Any) -> Any:
    """An answer without what differs from one to the next."""
    if isinstance(answer, (list, tuple)):
        return [told(each) for each in answer]
    if isinstance(answer, dict):
        differ = ("id", "created", "created_at", "completed_at", "call_id", "request_id", "metrics", "cached_tokens")
        return {name: told(value) for name, value in answer.items() if name not in differ}
    return answer


@pytest.mark.parametrize("path", BODIES)
def test_the_bodies_have_all_models(path: str) -> None:
    kind, bodies = BODIES[path]
    reached = {type(model) for body in bodies for _, model in holders(kind.model_validate({"model": NAME, **body}))}
    assert reached == set(models(kind))


@pytest.mark.parametrize("path", BODIES)
def test_null_is_as_if_the_field_were_left_out(served: Running, path: str) -> None:
    """``n``, ``stream``, ``ignore_eos``, ``echo``, ``text`` and fields of inner objects were refused."""
    answers = dict[str, Any]()  # most fields are in few bodies: without others a body is the same
    for nulled, without in optional(*BODIES[path]):
        if (sent := json.dumps(without)) not in answers:
            answers[sent] = told(posted(served, path, without))
        assert told(posted(served, path, nulled)) == answers[sent], nulled


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {**CHAT, "messages": None}, "messages"),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": None, "content": "a"}]}, "messages[0].role"),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": None}]}, "tools[0].type"),
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {"prompt": TEXT, "model": None}, "model"),
        ("/v1/responses", {"input": None}, "input"),
        ("/detokenize", {"tokens": None}, "tokens"),
    ],
)
def test_null_for_a_required_field_is_an_error(served: Running, path: str, body: dict[str, Any], field: str) -> None:
    status, found = posted(served, path, body)
    assert (status, found["error"]["param"]) == (400, field)


def test_a_completion_with_null_tokens_has_those_of_one_without(served: Running) -> None:
    """It had as many as the context leaves, where OpenAI's has 16."""
    found = posted(served, "/v1/completions", {"prompt": TEXT, "max_tokens": None, "seed": 1, "ignore_eos": True})[1]
    assert found["usage"]["completion_tokens"] == 16


def test_lines_of_a_batch_take_null() -> None:
    answering = Answering(Engine(bytes_target(), LOOKUP), LOOKUP, NAME, 2)
    body = {"prompt": TEXT, "max_tokens": 3, "seed": 1}
    full = {"custom_id": "1", "url": "/v1/completions", "body": {"model": NAME, **body, "n": None}, "method": None}
    short = {**body, "custom_id": None, "temperature": None, "model": None}
    for nulled in (full, short):
        without = {name: value for name, value in nulled.items() if value is not None}
        (first,), (second,) = (
            [told(record) for record in answering.records([BatchLine(1, json.dumps(line).encode())])]
            for line in (nulled, without)
        )
        assert first == second and first["error"] is None and first["response"]["status_code"] == 200
