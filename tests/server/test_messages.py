"""``/v1/messages`` under Anthropic's client: the text of chats, whole and as events, with tools and thoughts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.openai.bad_bodies import logged
from draftree.openai.messages_api import MessagesRequest

from ..scripted import THINKING, ScriptedModel, thinking_tokenizer
from .running import NAME, TEXT, Running, bytes_target, posted, running
from .test_reasoning import ANSWER, THOUGHT
from .test_tools import SCHEMAS, WEATHER

TOOLS: list[Any] = [
    {"name": name.replace(".", "_"), "description": f"{name} it", "input_schema": schema}
    for name, schema in SCHEMAS.items()
]

GREEDY = {"temperature": 0}
"""Older clients send it; the newest has no name for it."""


def function_of(tool: Any) -> dict[str, Any]:
    """A tool as chats have it."""
    return {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}


def client_of(served: Running, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def claude(served: Running) -> Iterator[anthropic.Anthropic]:
    with client_of(served) as client:
        yield client


BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=0aaa9;"
"""Claude Code's first system text, another with each request; a user may speak of it."""
ASKED: list[tuple[dict[str, Any], list[dict[str, str]]]] = [
    ({"messages": [{"role": "user", "content": TEXT}]}, [{"role": "user", "content": TEXT}]),
    (
        {
            "system": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "c d"},
                {"role": "user", "content": [{"type": "text", "text": "e", "cache_control": {"type": "ephemeral"}}]},
            ],
        },
        [
            {"role": "system", "content": "be\n\nbrief"},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "c d"},
            {"role": "user", "content": "e"},
        ],
    ),
    *(
        (
            {"system": system, "messages": [{"role": "user", "content": BILLING}]},
            [{"role": "system", "content": "be brief"}, {"role": "user", "content": BILLING}],
        )
        for system in (f"{BILLING}\nbe brief", [{"type": "text", "text": text} for text in (BILLING, "be brief")])
    ),
]


@pytest.mark.parametrize(("asked", "conversation"), ASKED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_message_has_the_text_of_the_engine(
    claude: anthropic.Anthropic,
    alone: Engine,
    asked: dict[str, Any],
    conversation: list[dict[str, str]],
    temperature: float,
) -> None:
    expected = alone.generate([conversation], SamplingParams(max_tokens=20, temperature=temperature, seed=6))[0]
    options: Any = {"model": NAME, "max_tokens": 20, "extra_body": {"seed": 6, "temperature": temperature}, **asked}
    message: Any = claude.messages.create(**options)
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == expected.text
    assert message.stop_reason == ("max_tokens" if expected.finish_reason == "length" else "end_turn")
    prompt = alone.inputs.encode(conversation)
    used = message.usage
    assert used.input_tokens + (used.cache_read_input_tokens or 0) == len(prompt)
    assert used.output_tokens == len(expected.token_ids)
    counted = {name: asked[name] for name in asked}
    assert claude.messages.count_tokens(model=NAME, **counted).input_tokens == len(prompt)

    with claude.messages.stream(**options) as stream:
        kinds = [event.type for event in stream]
        streamed: Any = stream.get_final_message()
    assert [block.text for block in streamed.content] == [expected.text] and streamed.stop_reason == message.stop_reason
    assert streamed.usage.output_tokens == used.output_tokens
    raw = [kind for kind in kinds if kind != "text"]
    assert raw[:2] == ["message_start", "content_block_start"]
    assert raw[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_message_ends_where_the_context_does(claude: anthropic.Anthropic, alone: Engine, streams: bool) -> None:
    """Agents ask for as many tokens every turn: they were refused as soon as the prompt left fewer."""
    messages: list[Any] = [{"role": "user", "content": TEXT}]
    room = alone.target.capabilities.max_length - len(alone.inputs.encode(messages))

    def ended(max_tokens: int) -> tuple[str | None, int]:
        extra = {"ignore_eos": True, **GREEDY}
        options: Any = {"model": NAME, "max_tokens": max_tokens, "messages": messages, "extra_body": extra}
        if not streams:
            message: Any = claude.messages.create(**options)
            return message.stop_reason, message.usage.output_tokens
        with claude.messages.stream(**options) as stream:
            message = stream.get_final_message()
        return message.stop_reason, message.usage.output_tokens

    assert [ended(room + more) for more in (-1, 0)] == [("max_tokens", room - 1), ("max_tokens", room)]
    assert [ended(most) for most in (room + 1, 10 * room)] == [("model_context_window_exceeded", room)] * 2
    messages[0]["content"] = f"{TEXT} " * room
    with pytest.raises(anthropic.BadRequestError):
        ended(5)


def test_a_stop_sequence_is_named(claude: anthropic.Anthropic, alone: Engine) -> None:
    text = alone.generate([[{"role": "user", "content": TEXT}]], SamplingParams(max_tokens=20))[0].text
    stop = text[5:8]
    message: Any = claude.messages.create(
        model=NAME,
        max_tokens=20,
        messages=[{"role": "user", "content": TEXT}],
        stop_sequences=["never", stop],
        extra_body=GREEDY,
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]


def test_an_answer_goes_on_with_the_last_turn(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    turns: Any = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "the cat"}]
    message: Any = claude.messages.create(model=NAME, max_tokens=8, messages=turns, extra_body=GREEDY)
    chat = client.chat.completions.create(
        model=NAME,
        max_tokens=8,
        temperature=0,
        messages=turns,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert message.content[0].text == chat.choices[0].message.content


@pytest.fixture(scope="module")
def calling() -> Iterator[Running]:
    with running(bytes_target(True)) as server:
        yield server


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_tools_are_used_as_in_a_chat(calling: Running, seed: int, choice: Any) -> None:
    asked: Any = {
        "model": NAME,
        "max_tokens": 120,
        "messages": [{"role": "user", "content": "how is it in oslo?"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "extra_body": {"seed": seed},
    }
    with client_of(calling) as claude:
        message: Any = claude.messages.create(**asked)
        with claude.messages.stream(**asked) as stream:
            streamed: Any = stream.get_final_message()
    chosen = {"any": "required"}.get(choice["type"]) or {"type": "function", "function": {"name": choice["name"]}}
    chat = posted(
        calling,
        "/v1/chat/completions",
        {
            "model": NAME,
            "max_tokens": 120,
            "seed": seed,
            "messages": asked["messages"],
            "tools": [
                {
                    "type": "function",
                    "function": {"name": t["name"], "description": t["description"], "parameters": t["input_schema"]},
                }
                for t in TOOLS
            ],
            "tool_choice": chosen,
        },
    )[1]["choices"][0]
    calls = chat["message"].get("tool_calls", [])
    uses = [block for block in message.content if block.type == "tool_use"]
    assert uses and [use.name for use in uses] == [call["function"]["name"] for call in calls]
    if chat["finish_reason"] == "tool_calls":
        assert message.stop_reason == "tool_use"
        assert [use.input for use in uses] == [json.loads(call["function"]["arguments"]) for call in calls]
        for use in uses:
            jsonschema.validate(use.input, {tool["name"]: tool["input_schema"] for tool in TOOLS}[use.name])
    else:
        assert message.stop_reason == "max_tokens"
    assert [(b.name, b.input) for b in streamed.content if b.type == "tool_use"] == [(u.name, u.input) for u in uses]


def test_a_conversation_with_tools_is_that_of_a_chat() -> None:
    """What a tool returned is a message of its own; what was thought stands beside what was said."""
    body = MessagesRequest.model_validate(
        {
            "model": NAME,
            "max_tokens": 8,
            "messages": [
                {"role": "user", "content": "how is it?"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "text", "text": "let me see"},
                        {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "oslo", "days": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "rain"}]},
                        {"type": "tool_result", "tool_use_id": "b", "content": [PICTURE]},
                        {"type": "text", "text": "well?"},
                    ],
                },
            ],
            "tools": [{"name": "get_weather", "input_schema": WEATHER}, {"type": "web_search_20250305", "name": "web"}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"},
        }
    )
    chat = body.chat()
    (conversation,) = chat.prompts()
    function = {"name": "get_weather", "arguments": {"city": "oslo", "days": 1}}
    assert list(conversation.messages) == [
        {"role": "user", "content": "how is it?"},
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "a"},
        {"role": "tool", "content": "[image: left out, as you read text alone]", "tool_call_id": "b"},
        {"role": "user", "content": "well?"},
    ]
    assert [tool["function"]["name"] for tool in conversation.tools] == ["get_weather"]
    assert conversation.variables == {"enable_thinking": False}
    assert not chat.several and not chat.forced


def test_what_is_left_out_may_have_any_form() -> None:
    """Anthropic's toolsets have no name, and what its tools return is an object where it is an error or a page."""
    pages = {"type": "web_fetch_tool_result", "tool_use_id": "s", "content": {"type": "web_fetch_result", "url": "x"}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [pages, {"type": "text", "text": "b"}]}]
    toolsets = [{"type": "browser_toolset_20260801"}, {"type": "mcp_toolset", "mcp_server_name": "x"}]
    back = {"type": "tool_result", "tool_use_id": "t", "content": {"rain": True}}
    for kind in ("enabled", "disabled", "adaptive", "between_tools"):
        body = MessagesRequest.model_validate(
            {
                "model": "m",
                "max_tokens": 4,
                "messages": [*turns, {"role": "user", "content": [back]}],
                "tools": toolsets,
                "thinking": {"type": kind},
            }
        )
        (conversation,) = body.chat().prompts()
        assert [message["content"] for message in conversation.messages] == ["a", "b", '{"rain": true}']
        assert not conversation.tools and conversation.variables == {"enable_thinking": kind != "disabled"}


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(claude: anthropic.Anthropic) -> None:
    """They shorten the conversation then."""
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model=NAME, max_tokens=4, messages=[{"role": "user", "content": TEXT * 100}])
    answer: Any = caught.value.body
    assert answer["error"]["message"].startswith("prompt is too long: ")


def test_a_thought_is_a_block_of_its_own() -> None:
    script = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
    with running(ScriptedModel(script, thinking_tokenizer(THINKING, False))) as served, client_of(served) as claude:
        asked: Any = {"model": NAME, "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
        message: Any = claude.messages.create(**asked, extra_body=GREEDY)
        with claude.messages.stream(**asked, extra_body=GREEDY) as stream:
            streamed: Any = stream.get_final_message()
    for whole in (message, streamed):
        assert [block.type for block in whole.content] == ["thinking", "text"]
        assert (whole.content[0].thinking, whole.content[1].text) == (THOUGHT, ANSWER)
        assert 0 < whole.usage.output_tokens_details.thinking_tokens < whole.usage.output_tokens


def test_a_text_fits_its_schema(calling: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    with client_of(calling) as claude:
        message: Any = claude.messages.create(
            model=NAME,
            max_tokens=40,
            messages=[{"role": "user", "content": "a"}],
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
    assert message.content[0].type == "text"
    jsonschema.validate(json.loads(message.content[0].text), schema)


PICTURE = {"type": "image", "source": {}}
WRONG: list[tuple[dict[str, Any], type[anthropic.APIStatusError], str]] = [
    (
        {"messages": [{"role": "user", "content": [PICTURE]}]},
        anthropic.BadRequestError,
        "image",
    ),
    ({"messages": []}, anthropic.BadRequestError, "messages"),
    ({"model": "another"}, anthropic.NotFoundError, "another"),
    ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
    ({"stop_sequences": ["x" * (1 << 15)]}, anthropic.BadRequestError, "stop_sequences"),
    ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, anthropic.BadRequestError, r"tools\[0\].name"),
    (
        {"tools": [{"name": "a", "input_schema": {"type": "array"}}]},
        anthropic.BadRequestError,
        r"tools\[0\].input_schema",
    ),
    ({"extra_body": {"seed": "x"}}, anthropic.BadRequestError, "seed"),
    ({"extra_body": {"draftree": {"nodes": 0}}}, anthropic.BadRequestError, r"draftree\.nodes"),
    ({"extra_body": {"top_k": -1}}, anthropic.BadRequestError, "top_k"),
    ({"messages": [{"role": "user", "content": []}]}, anthropic.BadRequestError, "messages"),
    ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "b"}, "tools": TOOLS}, anthropic.BadRequestError, "tool_choice"),
]


@pytest.mark.parametrize(("changed", "error", "named"), WRONG)
def test_a_wrong_body_is_named_in_anthropics_shape(
    claude: anthropic.Anthropic, changed: dict[str, Any], error: type[anthropic.APIStatusError], named: str
) -> None:
    body: Any = {"model": NAME, "max_tokens": 4, "messages": [{"role": "user", "content": "a"}], **changed}
    with pytest.raises(error, match=named) as caught:
        claude.messages.create(**body)
    answer: Any = caught.value.body
    assert answer["type"] == "error" and answer["error"]["type"].endswith("_error")


def test_a_request_that_fails_ends_its_stream_by_an_error(calling: Running) -> None:
    with client_of(calling) as claude, pytest.raises(anthropic.APIStatusError, match="token"):
        with claude.messages.stream(
            model=NAME,
            max_tokens=4,
            messages=[{"role": "user", "content": "a"}],
            extra_body={"allowed_token_ids": [5], "structured_outputs": {"regex": "zz"}},
        ) as stream:
            stream.get_final_message()


def test_a_key_may_come_in_anthropics_header() -> None:
    with running(bytes_target(), keys=("open",)) as served:
        asked: Any = {"model": NAME, "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
        with client_of(served, "open") as claude:
            assert claude.messages.create(**asked).usage.output_tokens
        with client_of(served, "wrong") as claude, pytest.raises(anthropic.AuthenticationError, match="key"):
            claude.messages.create(**asked)


def test_a_field_that_a_message_reads_is_not_named_as_left_out(caplog: pytest.LogCaptureFixture) -> None:
    logged.clear()
    body = {"model": NAME, "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
    MessagesRequest.model_validate({**body, "seed": 1, "timeout": 2.0, "unheard_of": 3}).chat()
    assert [record.getMessage().split()[1] for record in caplog.records] == ["unheard_of"]
