"""Calls of functions over HTTP: valid, forced or not, and the text of AR decoding under the same grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema
import openai
import pytest

from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.openai.tools import CallParser
from draftree.sampling.grammar import Function
from draftree.text.encoding import CALL_TAGS, Conversation

from .running import NAME, Running, bytes_target, posted, running, streamed

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["oslo", "new york"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
}
CLOCK: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"$ref": "#/$defs/zone"}, "exact": {"type": "boolean"}},
    "required": ["zone"],
    "$defs": {"zone": {"type": "string", "pattern": "^[a-z]{1,3}$"}},
}
SCHEMAS = {"get_weather": WEATHER, "clock.now": CLOCK}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"{name} it", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASKED: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how is it in oslo?"}]
NAMED: Any = {"type": "function", "function": {"name": "clock.now"}}
TAG_BIAS = 9.0
"""With it the model, which is random, opens a call after a few tokens where it may."""


@pytest.fixture(scope="module", params=[None, False, True], ids=["text", "token", "special"])
def tags(request: pytest.FixtureRequest) -> bool | None:
    """What the tags are to the tokenizer."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def served(tags: bool | None) -> Iterator[Running]:
    with running(bytes_target(tags)) as found:
        yield found


@pytest.fixture(scope="module")
def alone(tags: bool | None) -> Engine:
    return Engine(bytes_target(tags))


def bias(alone: Engine) -> dict[int, float]:
    assert alone.inputs.tokenizer is not None
    vocab = alone.inputs.tokenizer.get_vocab()
    return {vocab[CALL_TAGS[0]]: TAG_BIAS} if CALL_TAGS[0] in vocab else {}


class Expected(NamedTuple):
    """What was said, names and arguments of calls, and whether they are whole."""

    content: str
    calls: list[tuple[str, str]]
    called: bool


def as_ar(alone: Engine, seed: int, most: int = 120, **options: Any) -> tuple[list[int], Expected]:
    """Ids and calls of AR decoding without a server."""
    functions = [Function(name, {**schema, "additionalProperties": False}) for name, schema in SCHEMAS.items()]
    chosen = [f for f in functions if f.name in options.pop("names", SCHEMAS)]
    constraint = alone.grammars.calls(chosen, **{"forced": True, "several": True, **options})
    biases = None if options.get("forced", True) else bias(alone)
    params = SamplingParams(max_tokens=most, temperature=1.0, seed=seed, constraint=constraint, logit_bias=biases)
    found = alone.generate([Conversation(ASKED, TOOLS)], params)[0]
    parser = CallParser(alone.grammars.tags)
    parts = [*(part for chunk in found.chunks for part in parser.push(chunk)), *parser.end("")]
    content = "".join(part.text for part in parts if part.call is None)
    calls = [(call.name, "".join(part.text for part in parts if part.call is call)) for call in parser.calls]
    return found.token_ids, Expected(content, calls, parser.called)


def check(name: str, arguments: str) -> None:
    assert set(json.loads(arguments)) <= set(SCHEMAS[name]["properties"])
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize(("seed", "drafter"), [(1, "lookup"), (4, "none")])
def test_a_forced_call_is_valid_and_that_of_ar_decoding(
    client: openai.OpenAI, alone: Engine, choice: Any, seed: int, drafter: str
) -> None:
    options: Any = {} if choice == "required" else {"names": ["clock.now"], "several": False}
    ids, expected = as_ar(alone, seed, **options)
    found = client.chat.completions.create(
        model=NAME,
        messages=ASKED,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=True,
        seed=seed,
        max_tokens=120,
        extra_body={"draftree": {"drafter": drafter}},
    )
    (answer,), usage = found.choices, found.usage
    calls: list[Any] = list(answer.message.tool_calls or [])
    assert calls and answer.message.content is None
    assert [(c.function.name, c.function.arguments) for c in calls] == expected.calls
    assert usage is not None and usage.completion_tokens == len(ids)
    assert answer.finish_reason == ("tool_calls" if expected.called and len(ids) < 120 else "length")
    for call in calls if expected.called else calls[:-1]:
        check(call.function.name, call.function.arguments)
    if choice != "required":
        assert [c.function.name for c in calls] == ["clock.now"] and answer.finish_reason == "tool_calls"
    assert all(call.type == "function" and call.id.startswith("call_") for call in calls)


def test_text_comes_first_where_no_call_is_forced(served: Running, alone: Engine, tags: bool | None) -> None:
    """Free until the tag, and then held by the grammar; with several choices, each as it would be alone."""
    biases = {str(token): value for token, value in bias(alone).items()}
    body = {"messages": ASKED, "tools": TOOLS, "n": 4, "seed": 2, "max_tokens": 90, "logit_bias": biases}
    found = posted(served, "/v1/chat/completions", {**body, "draftree": {"method": "static"}})[1]["choices"]
    for number, choice in enumerate(found):
        ids, expected = as_ar(alone, 2 + number, 90, forced=False)
        calls = choice["message"].get("tool_calls", [])
        assert [(c["function"]["name"], c["function"]["arguments"]) for c in calls] == expected.calls
        assert (choice["message"]["content"] or "") == expected.content
        if choice["finish_reason"] == "tool_calls":
            check(calls[-1]["function"]["name"], calls[-1]["function"]["arguments"])
        else:
            assert choice["finish_reason"] == ("length" if len(ids) == 90 else "stop")
    told = [c["message"]["content"] for c in found if c["message"].get("tool_calls")]
    assert tags is None or (any(told) and any(c["finish_reason"] == "tool_calls" for c in found))


@pytest.mark.parametrize("forced", [True, False])
def test_a_stream_has_the_same_calls_piece_by_piece(
    client: openai.OpenAI, served: Running, alone: Engine, forced: bool
) -> None:
    biases: Any = {str(token): value for token, value in bias(alone).items()}
    asked: Any = {
        "model": NAME,
        "messages": ASKED,
        "tools": TOOLS,
        "tool_choice": "required" if forced else "auto",
        "parallel_tool_calls": True,
        "seed": 3,
        "n": 3,
        "max_tokens": 90,
        "logit_bias": {} if forced else biases,
        "logprobs": True,
    }
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**{name: value for name, value in asked.items() if name != "n"}) as stream:
        for _ in stream:
            pass
        (final,) = stream.current_completion_snapshot.choices
    first = whole.choices[0]
    assert (final.message.content, final.finish_reason) == (first.message.content, first.finish_reason)
    called = [[call.function for call in message.tool_calls or ()] for message in (final.message, first.message)]
    assert [(f.name, f.arguments) for f in called[0]] == [(f.name, f.arguments) for f in called[1]]
    each_token = {"stream_options": {"include_trace": True}}  # else tokens that came meanwhile are one event
    events = streamed(served, "/v1/chat/completions", {k: v for k, v in asked.items() if k != "model"} | each_token)
    for index, choice in enumerate(whole.choices):
        pieces = [e["choices"][0] for e in events if e["choices"] and e["choices"][0]["index"] == index]
        calls: dict[int, list[dict[str, Any]]] = {}
        for piece in pieces:
            for call in piece["delta"].get("tool_calls", ()):
                calls.setdefault(call["index"], []).append(call)
        for made, parts in zip(choice.message.tool_calls or (), calls.values(), strict=True):
            function: Any = made.function
            assert parts[0]["id"] and parts[0]["function"]["name"] == function.name
            assert not any("name" in part["function"] or "id" in part for part in parts[1:])
            assert "".join(part["function"]["arguments"] for part in parts) == function.arguments
        assert any(len(parts) > 3 for parts in calls.values()) or not calls
        text = "".join(piece["delta"].get("content") or "" for piece in pieces)
        assert text == (choice.message.content or "")
        assert pieces[-1]["finish_reason"] == choice.finish_reason
        told = [one for piece in pieces if piece["logprobs"] for one in piece["logprobs"]["content"]]
        assert choice.logprobs is not None
        expected = [one.logprob for one in choice.logprobs.content or ()]
        assert [one["logprob"] for one in told] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("more", [{"parallel_tool_calls": False}, {}])
def test_one_call_where_no_more_are_wanted(served: Running, more: dict[str, Any]) -> None:
    body = {"messages": ASKED, "tools": TOOLS, "tool_choice": "required", "n": 8, **more}
    for choice in posted(served, "/v1/chat/completions", {**body, "seed": 1})[1]["choices"]:
        assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"


def test_a_prediction_of_the_call_is_drafted_from(served: Running) -> None:
    body = {"messages": ASKED, "tools": TOOLS, "tool_choice": NAMED, "seed": 5}
    plain = posted(served, "/v1/chat/completions", body)[1]
    call = plain["choices"][0]["message"]["tool_calls"][0]["function"]
    text = f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}\n</tool_call>'
    found = posted(served, "/v1/chat/completions", {**body, "prediction": {"type": "content", "content": text}})[1]
    assert found["choices"][0]["message"]["tool_calls"][0]["function"] == call
    told = found["usage"]["completion_tokens_details"]
    assert told["accepted_prediction_tokens"] > 20
    steps = [answer["metrics"]["speculative_decoding"]["num_spec_steps"] for answer in (plain, found)]
    assert steps[1] < steps[0]


def test_without_a_call_an_answer_has_its_format(served: Running) -> None:
    """Tools and a response format go together: either calls, or a text of the format."""
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b", 7]}}}
    body = {"messages": ASKED, "tools": TOOLS, "response_format": wanted, "n": 8, "seed": 1, "max_tokens": 150}
    status, answer = posted(served, "/v1/chat/completions", body)
    assert status == 200, answer
    found = answer["choices"]
    texts = [choice["message"]["content"] for choice in found if "tool_calls" not in choice["message"]]
    assert texts and all(json.loads(text) in ("a", "b", 7) for text in texts)


def test_none_is_called_where_none_may_be(served: Running) -> None:
    bodies = [{"messages": ASKED, "seed": 3, "max_tokens": 20, **more} for more in ({}, {"tools": TOOLS})]
    bodies[1]["tool_choice"] = "none"
    plain, found = (posted(served, "/v1/chat/completions", body)[1] for body in bodies)
    assert found["choices"] == plain["choices"]
    assert found["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def nested(levels: int) -> dict[str, Any]:
    """A schema of an object in so many others."""
    return {"type": "object", "properties": {"a": nested(levels - 1) if levels else {"type": "null"}}}


def of_function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


@pytest.mark.parametrize(
    ("more", "field", "message"),
    [
        (of_function(name="a b"), "tools[0].function.name", "a b"),
        (of_function(name=""), "tools[0].function.name", "''"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "''"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name", "two functions"),
        ({"tools": [TOOLS[0]] * 129}, "tools", "128"),
        (of_function(parameters={"type": "array"}), "tools[0].function.parameters", "array"),
        (of_function(parameters={"type": "object", "not": {}}, strict=True), "tools[0].function.parameters", "#/not"),
        (
            {
                "tools": [
                    TOOLS[0],
                    *of_function(parameters={"properties": {"a": {"$ref": "#/$defs/b"}}}, strict=True)["tools"],
                ]
            },
            "tools[1].function.parameters",
            "#/properties/a/$ref",
        ),
        (of_function(parameters=nested(200), strict=True), "tools[0].function.parameters", "properties"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": NAMED}, "tool_choice", "clock.now"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "none"),
        ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos", "exclude each other"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs", "exclude each other"),
        (
            {"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
            "not",
        ),
        ({"messages": [{"role": "tool", "content": [{"type": "image"}]}]}, "messages[0].content", "image"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
            "messages[0].tool_calls[0].function.name",
            "name the function",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_by_name(
    served: Running, more: dict[str, Any], field: str, message: str
) -> None:
    status, found = posted(served, "/v1/chat/completions", {"messages": ASKED, **more})
    assert status == 400 and found["error"]["param"].startswith(field), found
    assert message in found["error"]["message"] and len(found["error"]["message"].splitlines()) == 1
    assert served.idle


def test_calls_and_results_of_the_past_are_part_of_the_prompt(served: Running, alone: Engine) -> None:
    made = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "oslo"}'}}
    history: list[Any] = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "4 degrees"}]},
    ]
    ids = posted(served, "/tokenize", {"messages": history, "tools": TOOLS})[1]["tokens"]
    text = posted(served, "/detokenize", {"tokens": ids})[1]["prompt"]
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "oslo"}}\n</tool_call>' in text
    assert "<tool_response>\n4 degrees\n</tool_response>" in text and '"name": "clock.now"' in text
    found = posted(served, "/v1/chat/completions", {"messages": history, "tools": TOOLS, "max_tokens": 4})[1]
    assert found["usage"]["prompt_tokens"] == len(ids)


def test_an_answer_that_was_begun_is_gone_on_with(served: Running, alone: Engine) -> None:
    begun: list[Any] = [*ASKED, {"role": "assistant", "content": "it is as "}]
    options: Any = {"max_tokens": 12, "temperature": 0, "continue_final_message": True, "add_generation_prompt": False}
    found = posted(served, "/v1/chat/completions", {"messages": begun, **options})[1]
    expected = alone.generate([Conversation(begun, continued=True)], SamplingParams(max_tokens=12))[0]
    assert found["choices"][0]["message"]["content"] == expected.text
    assert alone.inputs.tokenizer is not None
    prompt = alone.inputs.tokenizer.decode(alone.inputs.encode(Conversation(begun, continued=True)))
    assert isinstance(prompt, str) and prompt.endswith("assistant: it is as ")


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": "yes"}, "continue_final_message"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(served: Running, more: dict[str, Any], field: str) -> None:
    status, found = posted(served, "/v1/chat/completions", {"messages": ASKED, **more})
    assert status == 400 and found["error"]["param"] == field
