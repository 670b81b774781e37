"""Calls of functions in ``/v1/responses``: items and their events, and what comes back in the input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from draftree.openai.responses_api import ResponsesRequest

from .running import NAME, Running, bytes_target, posted, running
from .test_tools import ASKED, SCHEMAS, TAG_BIAS, check

TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": schema, "strict": False} for name, schema in SCHEMAS.items()
]


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(bytes_target(tags=False)) as found:
        yield found


def test_a_forced_call_is_an_item(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "name": "get_weather"}
    found: Any = client.responses.create(model=NAME, input=ASKED, tools=TOOLS, tool_choice=choice)
    (item,) = found.output
    assert (item.type, item.name) == ("function_call", "get_weather")
    assert item.status == found.status == "completed"
    assert item.call_id.startswith("call_") and item.id.startswith("fc_")
    check(item.name, item.arguments)
    assert [tool.name for tool in found.tools] == list(SCHEMAS) and found.tool_choice.name == "get_weather"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_events_add_up_to_the_items(client: openai.OpenAI, served: Running, choice: str, seed: int) -> None:
    assert served.engine.inputs.tokenizer is not None
    tag = served.engine.inputs.tokenizer.get_vocab()["<tool_call>"]
    more = {"seed": seed, "logit_bias": {} if choice == "required" else {str(tag): TAG_BIAS}}
    asked: Any = {"model": NAME, "input": ASKED, "tools": TOOLS, "tool_choice": choice, "extra_body": more}
    asked |= {"max_output_tokens": 200, "top_logprobs": 1, "parallel_tool_calls": True}
    whole: Any = client.responses.create(**asked)
    events: Any = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    output = events[-1].response.output
    assert events[-1].type == f"response.{whole.status}"
    made = [(item.type, getattr(item, "arguments", None)) for item in output]
    assert made == [(item.type, getattr(item, "arguments", None)) for item in whole.output]
    for index, item in enumerate(output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        kinds = [event.type.removeprefix("response.") for event in own]
        if item.type == "message":
            assert kinds[:2] == ["output_item.added", "content_part.added"]
            assert kinds[-3:] == ["output_text.done", "content_part.done", "output_item.done"]
            assert set(kinds[2:-3]) <= {"output_text.delta"}
            assert "".join(event.delta for event in own[2:-3]) == item.content[0].text == own[-3].text
            told = [one for event in own[2:-3] for one in event.logprobs]
            assert len(told) == len(item.content[0].logprobs)
        else:
            assert kinds[0] == "output_item.added" and own[0].item.arguments == ""
            assert kinds[-2:] == ["function_call_arguments.done", "output_item.done"]
            assert set(kinds[1:-2]) == {"function_call_arguments.delta"}
            assert "".join(event.delta for event in own[1:-2]) == item.arguments == own[-2].arguments
            assert own[0].item.call_id == item.call_id and own[-1].item.status == item.status
            if item.status == "completed":
                check(item.name, item.arguments)
        assert {event.item_id for event in own if hasattr(event, "item_id")} == {item.id}
        assert all(one.status == "completed" for one in output[:index])
    assert choice == "auto" or output[0].type == "function_call"


def test_calls_and_results_of_the_input_are_turns(client: openai.OpenAI) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "how?"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "wait"}]},
        {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": '{"city": "oslo"}', "id": "fc_1"},
        {"type": "function_call", "call_id": "2", "name": "clock.now", "arguments": ""},
        {"type": "function_call_output", "call_id": "1", "output": "4"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    (prompt,) = ResponsesRequest(model=NAME, input=items, tools=TOOLS).prompts()  # type: ignore[arg-type]
    messages = prompt.messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["content"] == "wait"
    assert [call["function"] for call in messages[1]["tool_calls"]] == [
        {"name": "get_weather", "arguments": {"city": "oslo"}},
        {"name": "clock.now", "arguments": {}},
    ]
    assert [message["content"] for message in messages[2:]] == ["4", "noon"]
    given: Any = items
    found: Any = client.responses.create(model=NAME, input=given, tools=TOOLS, max_output_tokens=4, temperature=0)
    assert found.status == "incomplete"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": {"not": {}}, "strict": True}]},
            "tools[0].parameters",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
    ],
)
def test_what_cannot_be_called_is_refused_by_name(served: Running, more: dict[str, Any], field: str) -> None:
    status, found = posted(served, "/v1/responses", {"input": "x", **more})
    assert status == 400 and found["error"]["param"].startswith(field), found
