"""The input of a response as turns of a conversation: what was said, calls of tools, and what these returned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

from ..errors import FieldError
from .bad_bodies import UnsupportedError, left_out
from .chat_api import TEXTS, CalledFunction, Part, past_call, text_of
from .schema import Body, Many
from .tools import AnyTool

_CALLS: Mapping[str, Sequence[str]] = {
    "apply_patch_call": ("operation",),
    "code_interpreter_call": ("code",),
    "computer_call": ("action", "actions"),
    "custom_tool_call": ("input",),
    "file_search_call": ("queries",),
    "image_generation_call": ("revised_prompt",),
    "local_shell_call": ("action",),
    "mcp_approval_request": ("arguments",),
    "mcp_call": ("arguments",),
    "program": ("code",),
    "shell_call": ("action",),
    "tool_search_call": ("arguments",),
    "web_search_call": ("action",),
}
"""Calls of tools that are no functions -> their arguments. The template writes them as it writes those of functions."""
_RESULTS: Mapping[str, Sequence[str]] = {
    "apply_patch_call_output": ("status", "output"),
    "code_interpreter_call": ("outputs",),
    "computer_call_output": ("output",),
    "custom_tool_call_output": ("output",),
    "file_search_call": ("results",),
    "local_shell_call_output": ("output",),
    "mcp_approval_response": ("approve", "reason"),
    "mcp_call": ("output", "error"),
    "program_output": ("result",),
    "shell_call_output": ("output",),
    "tool_search_output": ("tools",),
}
"""Items with what a tool returned -> the fields that have it; of a call the server's own tool has made it is inside."""
_SILENT: Mapping[str, str] = {
    "configuration_update": "how a model reasons is not set here",
    "mcp_list_tools": "the model is offered functions alone",
}
"""Items that a model does without -> what the log says."""
_AWAY: Mapping[str, str] = {
    "compaction": "send the turns that it stands for, or a summary as a message",
    "compaction_trigger": "leave it out, and send fewer turns",
    "item_reference": "send the item itself: nothing is stored here",
}
"""Items without which the conversation would be another one -> the way out."""


_PICTURES = ("computer_screenshot", "input_audio", "input_file", "input_image")
"""Content of what a tool returned that is no text; in what a user says it is refused."""


class InputItem(Body):
    """A message, a function call, or its result."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Many[Part] | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = ""
    output: str | Many[Any] | None = None

    def turns(self, where: str) -> Iterator[dict[str, Any]]:
        """Yield the turn of the item.

        Raises:
            FieldError: something is missing, or a part is no text.
        """
        if self.type == "function_call":
            yield _called(self.call_id, self.name, self.namespace, self.arguments, where)
            return
        field = "content" if self.type == "message" else "output"
        given: Any = getattr(self, field)
        if given is None or (self.type == "message" and self.role is None):
            missing = field if given is None else "role"
            raise FieldError(f"{where}.{missing}", f"{where}, a {self.type}, has no {missing}: give it one")
        if self.type == "function_call_output":
            yield _returned(self.call_id, {"output": given})
        else:
            role = "system" if self.role == "developer" else self.role
            yield {"role": role, "content": text_of(given, f"{where}.content", "" if role == "assistant" else "\n")}


class AdditionalTools(Body):
    """Tools that were added with a turn. The model may call them like those of ``tools``."""

    type: Literal["additional_tools"]
    tools: Many[AnyTool]

    def turns(self, where: str) -> Iterator[dict[str, Any]]:
        yield from ()


class OtherItem(BaseModel):
    """Another item of a conversation, such as a call of a tool that is no function, or its result."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str

    def turns(self, where: str) -> Iterator[dict[str, Any]]:
        """Yield the turns of the item: a call and its result, if the item has one.

        Raises:
            FieldError: it cannot be left out, or has no name.
        """
        sent = self.model_extra or {}
        key = str(sent.get("call_id") or sent.get("approval_request_id") or sent.get("id") or "")
        if self.type == "reasoning":
            if thought := _thought(sent):
                yield {"role": "assistant", "content": "", "reasoning_content": thought}
            else:
                left_out("input: type 'reasoning' without a text", "what was thought elsewhere cannot be read")
        elif self.type in _SILENT and "text" not in sent:
            left_out(f"input: type {self.type!r}", _SILENT[self.type])
        elif self.type not in _CALLS and self.type not in _RESULTS:
            raise UnsupportedError(f"{where}.type", f"{self.type!r}: {_AWAY.get(self.type, 'leave it out')}")
        if self.type in _CALLS:
            given = _of(sent, _CALLS[self.type])
            arguments = given.get("arguments", given)
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            name = str(sent.get("name") or self.type.removesuffix("_call"))
            yield _called(key, name, sent.get("namespace") or sent.get("server_label"), text, where)
        if result := _of(sent, _RESULTS.get(self.type, ())):
            yield _returned(key, result)


def _class_of(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind in (None, "message", "function_call", "function_call_output"):
        return "a turn"
    return "tools" if kind == "additional_tools" else "another"


AnyItem = Annotated[
    Annotated[InputItem, Tag("a turn")]
    | Annotated[AdditionalTools, Tag("tools")]
    | Annotated[OtherItem, Tag("another")],
    Discriminator(_class_of),
]


def turns_of(items: Sequence[AnyItem]) -> list[dict[str, Any]]:
    """The turns of items as chat templates take them; calls belong to the answer before them, thoughts to the next.

    Raises:
        FieldError: an item has no turn.
    """
    turns: list[dict[str, Any]] = []
    for at, item in enumerate(items):
        for turn in item.turns(f"input[{at}]"):
            before = turns[-1] if turns and turns[-1]["role"] == turn["role"] == "assistant" else {}
            if "tool_calls" in turn and before:
                before.setdefault("tool_calls", []).extend(turn["tool_calls"])
            elif before.keys() == {"role", "content", "reasoning_content"} and not before["content"]:
                thoughts = before["reasoning_content"] + turn.get("reasoning_content", "")
                before |= {**turn, "reasoning_content": thoughts}
            else:
                turns.append(turn)
    return turns


def _thought(sent: Mapping[str, Any]) -> str:
    """Return a thought, or else its summary."""
    lists = (each for name in ("content", "summary") if isinstance(each := sent.get(name), list))
    texts = ("".join(str(part.get("text") or "") for part in parts if isinstance(part, dict)) for parts in lists)
    return next(filter(None, texts), "")


def _of(sent: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: sent[name] for name in names if sent.get(name) is not None}


def _called(key: str, name: str, namespace: object, arguments: str, where: str) -> dict[str, Any]:
    function = CalledFunction(name=f"{namespace}.{name}" if namespace and name else name, arguments=arguments)
    return {"role": "assistant", "content": "", "tool_calls": [past_call(key, function, where)]}


def _returned(key: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a tool returned: text, or JSON of what is none; of content a model reads the text alone."""
    (value, *more) = given.values()
    parts = value if isinstance(value, list) else [value]
    if not more and all(isinstance(part, dict) and part.get("type") in (*TEXTS, *_PICTURES) for part in parts):
        value = "\n".join(map(_text, parts))
    text = value if isinstance(value, str) and not more else json.dumps(given, ensure_ascii=False)
    return {"role": "tool", "content": text, "tool_call_id": key}


def _text(part: Mapping[str, Any]) -> str:
    if part["type"] in TEXTS:
        return str(part.get("text") or "")
    left_out(f"input: output of type {part['type']!r}", "the model reads text alone")
    return f"[{part['type']}: left out, as you read text alone]"
