"""What agents send by their own defaults, in turns: each is answered, and its events are those that agents read.

``requests`` has bodies of Codex CLI 0.171.0, recorded on loopback in a scripted session, with short texts in place of
its own: its first turn, one behind calls of many kinds, the one in which it has its history summarized, one with a
schema for the answer, and one in its "code mode", which it has for models of OpenAI's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from ..strict_templates import STRICT
from .running import NAME, Running, bytes_target, posted, running

REQUESTS = Path(__file__).parent / "requests"
CODEX = sorted(path.stem for path in REQUESTS.glob("codex_*.json"))
TWENTY: list[dict[str, Any]] = json.loads((REQUESTS / "twenty_tools.json").read_text())
SCHEMAS = {tool["name"]: tool["parameters"] for tool in TWENTY}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """A model of bytes whose context holds such prompts."""
    with running(bytes_target(tags=False, context=1 << 14)) as found:
        yield found


def body_of(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((REQUESTS / f"{name}.json").read_text())
    return body


def streamed(client: openai.OpenAI, body: dict[str, Any]) -> Any:
    """The response of a stream, which its events have to add up to."""
    events: list[Any] = list(client.responses.create(stream=True, extra_body=body))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    response = events[-1].response
    assert events[-1].type == f"response.{response.status}"
    assert [event.item for event in events if event.type == "response.output_item.done"] == response.output
    return response


def test_no_request_is_missing() -> None:
    assert CODEX == ["codex_calls", "codex_code_mode", "codex_first_turn", "codex_output_schema", "codex_summary"]


@pytest.mark.parametrize("name", CODEX)
def test_what_codex_sends_is_answered(client: openai.OpenAI, name: str) -> None:
    body = body_of(name)
    response = streamed(client, {**body, "max_output_tokens": 6, "seed": 1})
    assert response.usage.input_tokens > 500 and response.prompt_cache_key == body["prompt_cache_key"]


@pytest.mark.parametrize("name", ["codex_first_turn", "codex_code_mode"])
def test_codex_goes_on_in_turns(client: openai.OpenAI, name: str) -> None:
    """A function of a namespace is called as one: by its own name, with the namespace beside it."""
    body = body_of(name)
    offered = [*body.get("tools", ()), *(tool for item in body["input"] for tool in item.get("tools", ()))]
    spaces = {tool["name"]: {inner["name"] for inner in tool["tools"]} for tool in offered if "tools" in tool}
    spaces[None] = {tool["name"] for tool in offered if tool["type"] == "function"}
    space = next(name for name, inner in spaces.items() if "wait_agent" in inner)
    for choice in ("required", {"type": "function", "name": f"{space}.wait_agent"}, "required", "required"):
        output = streamed(client, {**body, "tool_choice": choice, "max_output_tokens": 60, "seed": 2}).output
        assert output and all(item.type == "function_call" for item in output)
        for item in output:
            namespace = getattr(item, "namespace", None)
            assert item.name in spaces[namespace] and (choice == "required" or namespace == space)
            result = {"type": "function_call_output", "call_id": item.call_id, "output": "Exit code: 0"}
            body["input"] += [item.to_dict(), result]


@pytest.mark.parametrize("template", STRICT)
def test_a_model_with_a_strict_template_answers_agents(template: str) -> None:
    """Two turns of the developer, or two of the user, were refused."""
    target = bytes_target(tags=False, context=1 << 14)
    assert target.tokenizer is not None
    target.tokenizer.chat_template = template
    system, developer, user = ({"role": role, "content": "hi"} for role in ("system", "developer", "user"))
    with running(target) as served:
        codex = {**body_of("codex_first_turn"), "stream": False, "max_output_tokens": 1}
        for path, body in (
            ("/v1/responses", codex),
            ("/v1/chat/completions", {"messages": [system, developer, user], "max_tokens": 1}),
            ("/v1/messages", {"system": "be brief", "messages": [user, system, user], "max_tokens": 1}),
        ):
            status, found = posted(served, path, body)
            assert status == 200, found


@pytest.mark.parametrize("several", [True, False])
def test_an_agent_with_twenty_tools_is_answered_over_responses(
    client: openai.OpenAI, served: Running, several: bool
) -> None:
    items: list[Any] = [{"role": "user", "content": "tidy the project up"}]
    for seed in range(3):
        body = {"model": NAME, "input": items, "tools": TWENTY, "tool_choice": "required", "max_output_tokens": 150}
        body |= {"parallel_tool_calls": several, "seed": seed}
        whole: Any = client.responses.create(extra_body=body)
        calls = streamed(client, {**body, "stream": True}).output
        assert [(c.name, c.arguments) for c in calls] == [(c.name, c.arguments) for c in whole.output]
        assert calls and (several or len(calls) == 1)
        for call in calls:
            if call.status == "completed":
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
            items += [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "done"}]
    assert posted(served, "/v1/responses", {"input": items, "tools": TWENTY, "max_output_tokens": 4})[0] == 200


@pytest.mark.parametrize("several", [True, False])
def test_an_agent_with_twenty_tools_is_answered_over_chats(client: openai.OpenAI, several: bool) -> None:
    messages: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "tidy it up"}]
    tools: Any = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TWENTY]
    for seed in range(3):
        body: dict[str, Any] = {"model": NAME, "messages": messages, "tools": tools, "tool_choice": "required"}
        body |= {"max_tokens": 150, "parallel_tool_calls": several, "seed": seed}
        whole = client.chat.completions.create(**body).choices[0]
        with client.chat.completions.stream(**body) as stream:
            for _ in stream:
                pass
            (final,) = stream.current_completion_snapshot.choices
        calls = final.message.tool_calls or []
        made = [(call.function.name, call.function.arguments) for call in calls]
        assert made == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
        assert calls and (several or len(calls) == 1) and final.finish_reason == whole.finish_reason
        for name, arguments in made if final.finish_reason == "tool_calls" else made[:-1]:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        messages.append(whole.message.to_dict())
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in whole.message.tool_calls]
    body = {"model": NAME, "messages": messages, "tools": tools, "max_tokens": 4}
    assert client.chat.completions.create(**body).choices
