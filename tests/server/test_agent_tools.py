"""Functions as agents send them: no key of a schema stands in the way of a chat, and the log names what is not held."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from draftree.sampling.json_schemas import weakened
from draftree.text.encoding import user

from .agent_tools import AGENT_TOOLS, AgentTool
from .running import Running, bytes_target, posted, running

SHORT = (
    "{% for tool in tools or [] %}{{ tool.function.description }}{% endfor %}"
    "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}{% for call in turn.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
)
"""A chat template whose prompts have room for the answer: it leaves the schemas out."""


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    target = bytes_target(True)
    assert target.tokenizer is not None
    target.tokenizer.chat_template = SHORT
    with running(target) as found:
        yield found


CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
CLOSING: dict[str, float] = {str(byte): 6.0 for byte in b'"}]'}
"""With it a model that knows nothing ends what it has begun."""


def sent(tool: AgentTool, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters, **more}}


def asked(path: str, tools: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    if path == CHAT:
        return {"messages": user("hi"), "tools": tools, "max_tokens": 4, **more}
    return {
        "input": "hi",
        "tools": [{"type": "function", **tool["function"]} for tool in tools],
        "max_output_tokens": 4,
        **more,
    }


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_an_agent_with_all_of_them_is_answered(served: Running, caplog: pytest.LogCaptureFixture, path: str) -> None:
    """One key that the grammar could not enforce refused the whole chat, a plain "hi" too."""
    with caplog.at_level(logging.WARNING, "draftree"):
        status, found = posted(served, path, asked(path, [sent(tool) for tool in AGENT_TOOLS]))
    assert status == 200, found
    (line,) = [record.getMessage() for record in caplog.records]
    field = "function.parameters" if path == CHAT else "parameters"
    for at, tool in enumerate(AGENT_TOOLS):
        assert (f"tools[{at}].{field}:" in line) is bool(tool.left_out)
        assert all(place in line for place in tool.left_out)


@pytest.mark.parametrize("tool", AGENT_TOOLS, ids=lambda tool: tool.name)
def test_a_call_is_held_to_the_rest(served: Running, tool: AgentTool) -> None:
    choice = {"type": "function", "function": {"name": tool.name}}
    body = asked(CHAT, [sent(tool)], tool_choice=choice, seed=1, max_tokens=400, logit_bias=CLOSING)
    status, found = posted(served, CHAT, body)
    assert status == 200, found
    (answer,) = found["choices"]
    assert answer["finish_reason"] in ("tool_calls", "length")
    if answer["finish_reason"] == "tool_calls":
        arguments = json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"])
        jsonschema.validate(arguments, {"type": "object", **weakened(tool.parameters).schema})
    assert sorted(weakened(tool.parameters).left_out) == sorted(tool.left_out)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("tool", [tool for tool in AGENT_TOOLS if tool.left_out], ids=lambda tool: tool.name)
def test_strict_functions_are_refused_by_keyword(served: Running, tool: AgentTool, path: str) -> None:
    plain = AgentTool("plain", {"type": "object", "properties": {}})
    status, found = posted(served, path, asked(path, [sent(plain), sent(tool, strict=True)]))
    field = "tools[1].function.parameters" if path == CHAT else "tools[1].parameters"
    assert (status, found["error"]["param"]) == (400, field)
    assert tool.left_out[0] in found["error"]["message"]


@pytest.mark.parametrize("tool", [tool for tool in AGENT_TOOLS if not tool.left_out], ids=lambda tool: tool.name)
def test_strict_functions_that_can_be_enforced_are_taken(served: Running, tool: AgentTool) -> None:
    status, found = posted(served, CHAT, asked(CHAT, [sent(tool, strict=True)]))
    assert status == 200, found
