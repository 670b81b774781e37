"""Bodies of ``POST /v1/chat/completions`` and ``/tokenize``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..config import Count, LogprobCount
from ..errors import FieldError
from ..text.encoding import THOUGHTS, Conversation, check_variables
from .bad_bodies import UnsupportedError
from .schema import Body, Many, ResponseFormat, Sent
from .tools import AnyTool, NamedFunction, WithTools, check_tools, functions

TEXTS = ("text", "input_text", "output_text", "refusal")
"""Types of parts that are text."""


class Part(Body):
    """A part of a message's content. The model reads text alone."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(NamedFunction):
    """A called function and its arguments, as JSON."""

    arguments: str = ""


class CustomCall(NamedFunction):
    """A call of a custom tool, whose input is a text."""

    input: str = ""


class PastCall(Body):
    """A tool call of an earlier answer."""

    id: str = ""
    type: Literal["function", "custom"] = "function"
    function: CalledFunction = CalledFunction()
    custom: CustomCall | None = None

    @property
    def called(self) -> CalledFunction:
        if self.custom is None:
            return self.function
        return CalledFunction(name=self.custom.name, arguments=json.dumps({"input": self.custom.input}))


Thought = Annotated[str | None, BeforeValidator(lambda value: value if isinstance(value, str) else None)]
"""Of an assistant; other values are settings by the same name, which mean nothing in a message."""


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[Part] | None = None
    tool_calls: Many[PastCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Thought = None  # vLLM's and OpenRouter's name of it
    thinking: Thought = None  # Ollama's

    def plain(self, at: int) -> dict[str, Any]:
        """Convert the message to the form of chat templates.

        Raises:
            FieldError: a part is no text, or a call names no function.
        """
        between = "" if self.role == "assistant" else "\n"
        content = text_of(self.content or self.refusal or "", f"messages[{at}].content", between)
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.role == "assistant" and self.tool_calls:
            turn["tool_calls"] = [
                past_call(call.id, call.called, f"messages[{at}].tool_calls[{i}].{call.type}")
                for i, call in enumerate(self.tool_calls)
            ]
        if self.role == "assistant":
            turn |= {name: thought for name in THOUGHTS if (thought := getattr(self, name)) is not None}
        if self.role == "tool" and self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


def past_call(key: str, function: CalledFunction, field: str) -> dict[str, Any]:
    """Convert a call to the form of chat templates. Arguments that are no JSON object stay text, as of a call cut off.

    Raises:
        FieldError: it names no function.
    """
    if not function.name:
        raise FieldError(f"{field}.name", f"{field}.name is empty: name the function that was called")
    try:
        arguments = json.loads(function.arguments.strip() or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        arguments = function.arguments
    return {"id": key, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def text_of(content: str | list[Part], field: str, between: str = "\n") -> str:
    """Join text parts.

    Args:
        between: what stands between two; nothing where a model wrote them.

    Raises:
        FieldError: a part is no text.
    """
    if isinstance(content, str):
        return content
    if kind := next((part.type for part in content if part.type not in TEXTS), None):
        raise FieldError(field, f"a content part of type {kind!r}: give text")
    return between.join(part.text or part.refusal or "" for part in content)


class Prediction(Body):
    """A predicted output: text that the answer probably repeats. Drafts are taken from it."""

    type: Literal["content"]
    content: str | Many[Part]


TEMPLATE_WRITES = "a chat template writes its own, leave it out"
"""Why a conversation has no other special tokens."""


class ChatRequest(WithTools):
    """A conversation to answer: the body of ``POST /v1/chat/completions``."""

    prefix = "chatcmpl-"
    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    reasoning_effort: str | None = None

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort

    @property
    def begun(self) -> str:
        return text_of(self.messages[-1].content or "", "messages", "") if self._continued else ""

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def predicted(self) -> str:
        return "" if self.prediction is None else text_of(self.prediction.content, "prediction.content", "")

    def refuse(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs go with logprobs: set that to true")
        if self.add_special_tokens:
            raise UnsupportedError("add_special_tokens", TEMPLATE_WRITES)
        if self.add_generation_prompt is not None and self.add_generation_prompt == self._continued:
            names, both = "add_generation_prompt and continue_final_message", json.dumps(self._continued)
            raise FieldError("add_generation_prompt", f"{names} are both {both}: set one of them to true, not both")
        last = self.messages[-1]
        if self._continued and (last.role != "assistant" or last.tool_calls or not last.content):
            raise FieldError(
                "continue_final_message", "continue_final_message goes on with a text of the assistant: let it be last"
            )

    @property
    def format(self) -> tuple[str, ResponseFormat]:
        return "response_format", self.response_format or ResponseFormat()

    @property
    def _continued(self) -> bool:
        return bool(self.continue_final_message)

    def prompts(self) -> Sequence[Conversation]:
        return [Conversation(plain_messages(self.messages), self.templates(), self._continued, self.variables)]


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.plain(at) for at, message in enumerate(messages)]


class TokenizeRequest(Sent):
    """A text or a conversation to tokenize. A conversation gets the beginning of an answer."""

    prompt: str | None = None
    content: str | None = None  # llama.cpp's name of the prompt, whose special tokens are added if asked for
    add_special_tokens: bool | None = None  # of a prompt; not sent: as the model has it
    add_special: bool | None = None  # llama.cpp's name of that
    messages: Many[Message] | None = None
    tools: Many[AnyTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def conversation(self) -> Conversation:
        """Convert the messages to the form of chat templates."""
        variables = self.chat_template_kwargs or {}
        check_variables(variables, "chat_template_kwargs")
        tools = [tool.template() for tool in check_tools(functions(self.tools)).values()]
        return Conversation(plain_messages(self.messages or ()), tools, variables=variables)
