"""Structured outputs over HTTP: valid, and the text of AR decoding under the same grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.text.encoding import user

from .running import NAME, TEXT, Running, ending_target, posted, running

SCHEMA = {"enum": ["the cat", 7, "on and on", True]}
PATTERN = "(in|on) the (cat|hat)[0-9]{2}"


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(ending_target()) as found:
        yield found


@pytest.fixture(scope="module")
def alone() -> Engine:
    return Engine(ending_target())


def _as_ar(alone: Engine, prompt: Any, constraint: Any, seed: int) -> str:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=seed, constraint=constraint)
    return alone.generate([prompt], params)[0].text


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_with_a_schema_is_valid_and_as_ar_decoding(
    client: openai.OpenAI, alone: Engine, seed: int, stream: bool
) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    asked: Any = {"model": NAME, "messages": user(TEXT), "seed": seed, "max_tokens": 40, "response_format": wanted}
    if stream:
        pieces = list(client.chat.completions.create(**asked, stream=True))
        text = "".join(choice.delta.content or "" for piece in pieces for choice in piece.choices)
        assert pieces[-1].choices[0].finish_reason == "stop"
    else:
        text = client.chat.completions.create(**asked).choices[0].message.content or ""
    jsonschema.validate(json.loads(text), SCHEMA)
    assert text == _as_ar(alone, user(TEXT), alone.grammars.json_schema(SCHEMA), seed)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("drafter", ["lookup", "none"])
def test_a_completion_with_a_pattern_matches_it(client: openai.OpenAI, alone: Engine, seed: int, drafter: str) -> None:
    body = {"structured_outputs": {"regex": PATTERN}, "draftree": {"drafter": drafter}}
    found = client.completions.create(model=NAME, prompt=TEXT, seed=seed, max_tokens=40, n=2, extra_body=body)
    for number, choice in enumerate(found.choices):
        assert re.fullmatch(PATTERN, choice.text) and choice.finish_reason == "stop"
        assert choice.text == _as_ar(alone, TEXT, alone.grammars.regex(PATTERN), seed + number)


def test_a_response_has_its_format(client: openai.OpenAI) -> None:
    wanted: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    found = client.responses.create(model=NAME, input=TEXT, text=wanted)
    jsonschema.validate(json.loads(found.output_text), SCHEMA)
    assert found.text is not None and found.text.format is not None and found.text.format.type == "json_schema"


def test_an_object_may_have_its_schema_beside_the_type(served: Running) -> None:
    """As clients of llama.cpp's server and of hosted models send it; the answer was any object."""
    wanted = {"type": "json_object", "schema": SCHEMA}
    asked: dict[str, Any] = {"prompt": TEXT, "response_format": wanted}
    texts = [posted(served, "/v1/completions", asked)[1]["choices"][0]["text"]]
    asked = {"messages": user(TEXT), "response_format": wanted}
    texts.append(posted(served, "/v1/chat/completions", asked)[1]["choices"][0]["message"]["content"])
    asked = {"input": TEXT, "text": {"format": wanted}}
    texts.append(posted(served, "/v1/responses", asked)[1]["output"][0]["content"][0]["text"])
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    "wanted", [{"choice": ["yes", "no"]}, {"grammar": 'start: "yes" | "no"'}, {"json": {"enum": [1]}}]
)
def test_all_kinds_are_taken(served: Running, wanted: dict[str, Any]) -> None:
    status, found = posted(served, "/v1/completions", {"prompt": TEXT, "structured_outputs": wanted})
    assert status == 200 and found["choices"][0]["text"] in ("yes", "no", "1")


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "has no schema"),
        ({"response_format": {"type": "yaml"}}, "response_format", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format",
            "not",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "give one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "has 2 of"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"choice": ["a"]}, "ignore_eos": True}, "ignore_eos", "exclude each other"),
        (
            {"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "exclude each other",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    served: Running, fields: dict[str, Any], field: str, message: str
) -> None:
    status, found = posted(served, "/v1/chat/completions", {"messages": user(TEXT), **fields})
    assert status == 400 and field in found["error"]["param"] and message in found["error"]["message"]
    assert posted(served, "/v1/completions", {"prompt": TEXT, "max_tokens": 1})[0] == 200


def test_a_grammar_that_fails_on_the_way_is_the_clients(served: Running) -> None:
    body = {"prompt": TEXT, "structured_outputs": {"regex": "aaB"}}  # the vocabulary has no capitals
    status, found = posted(served, "/v1/completions", body)
    assert status == 400 and "no token of the model's vocabulary fits" in found["error"]["message"]
