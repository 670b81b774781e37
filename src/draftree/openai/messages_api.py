"""``/v1/messages`` in Anthropic's shape: a body, which becomes a chat, and the message that answers it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field

from ..config import Count, Probability, Temperature, TopP, Whole
from ..errors import FieldError
from ..request import Chunk, Request
from .answers import AnswerBuilder, CompletionBuilder, speculative_decoding, usage_of
from .bad_bodies import UnsupportedError, failure, left_out
from .chat_api import ChatRequest
from .choices import Choices
from .responses_api import ResponseBuilder, ResponsesRequest
from .schema import Body, Fields, Many, Sent, Texts
from .tools import Parsed

_BILLING = re.compile(r"\Ax-anthropic-billing-header:.*\n*")
"""Claude Code's first system text. It is another one with each request, so that no text behind it would be reused."""
_LEFT_OUT = ("image", "document", "search_result")
"""Types of blocks that a tool may return and a model that reads text alone cannot use."""
_OWN_FIELDS = (
    "seed draftree chat_template_kwargs structured_outputs min_p repetition_penalty presence_penalty "
    "frequency_penalty logit_bias ignore_eos min_tokens stop_token_ids bad_words allowed_token_ids "
    "skip_special_tokens priority timeout".split()
)
"""Fields of chats that a message may have beside Anthropic's."""


class Block(Body):
    """A part of a message: text, a thought, the use of a tool, or what it returned."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | Many[Block] | dict[str, Any] = ""


class MessageTurn(Body):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]

    def messages(self, place: str) -> list[dict[str, Any]]:
        """The turn as messages of a chat: what tools returned is a message each.

        Args:
            place: of the turn in the body.

        Raises:
            FieldError: a block is none that a model can read.
        """
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        if self.role == "assistant":
            return [_said(self.content, f"{place}.content")]
        messages = list[dict[str, Any]]()
        for at, block in enumerate(self.content):
            field = f"{place}.content[{at}]"
            if block.type == "tool_result":
                content = _returned(block.content)
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            elif messages and messages[-1]["role"] == self.role:
                messages[-1]["content"] += f"\n{_text(block, field)}"
            else:
                messages.append({"role": self.role, "content": _text(block, field)})
        return messages or [{"role": self.role, "content": ""}]


def _said(blocks: Sequence[Block], field: str) -> dict[str, Any]:
    """An assistant's turn: its text, what it thought, and the tools that it used."""
    text, thoughts, calls = "", "", list[dict[str, Any]]()
    for at, block in enumerate(blocks):
        if block.type == "thinking":
            thoughts += block.thinking
        elif block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "function": function})
        elif block.type == "text":
            text += block.text
        elif block.type == "redacted_thinking" or block.type.startswith(("server_tool_", "web_")):
            left_out(f"messages: blocks of type {block.type!r}", "the model cannot read them")
        else:
            raise _unreadable(block, f"{field}[{at}]")
    turn: dict[str, Any] = {"role": "assistant", "content": text}
    return turn | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thoughts} if thoughts else {})


def _text(block: Block, field: str) -> str:
    if block.type != "text":
        raise _unreadable(block, field)
    return block.text


def _unreadable(block: Block, field: str) -> FieldError:
    return FieldError(f"{field}.type", f"a block of type {block.type!r}: give text")


def _returned(content: str | Sequence[Block] | dict[str, Any]) -> str:
    """What a tool returned; of pictures and documents the model reads that they are missing."""
    if isinstance(content, (str, dict)):
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    texts = list[str]()
    for block in content:
        if block.type in _LEFT_OUT:
            left_out(f"tool_result: content of type {block.type!r}", "the model reads text alone")
            texts.append(f"[{block.type}: left out, as you read text alone]")
        else:
            texts.append(block.text)
    return "\n".join(texts)


class OfferedTool(Body):
    """A function that the client runs, or a tool of Anthropic's own, which no model here has."""

    type: str = "custom"
    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def function(self) -> dict[str, Any]:
        """The tool as chats have it."""
        if self.type != "custom":
            return {"type": self.type}
        sent = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", **sent, "strict": self.strict}


class ToolChoice(Fields):
    """Whether an answer uses tools: as it likes, none, any, or the named one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """Whether the model thinks before it answers; how much is up to the model."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(Body):
    """A JSON Schema that the text of the answer fits."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The format of the answer's text, and how much the model is to think."""

    format: OutputFormat | None = None
    effort: str | None = None


class MessageChat(ChatRequest):
    """A chat that was sent as a message."""

    prefix = "msg_"

    def limit(self, room: int) -> int | None:
        most = super().limit(room)
        return most if most is None or room < 1 else min(most, room)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Rename the fields of errors to those of messages."""
        try:
            yield
        except FieldError as error:
            field = error.field.removesuffix(".parameters")
            field = f"{field}.input_schema" if field != error.field else _MESSAGES.get(field, field)
            if not isinstance(error, UnsupportedError):
                error.rename(field)
            raise


_MESSAGES = {"prompt": "messages", "stop": "stop_sequences", "response_format": "output_config.format"}
"""A field of chats or of the engine -> that of messages."""


class Counted(Sent):
    """The body of ``POST /v1/messages/count_tokens``: a conversation whose tokens are counted."""

    model: str
    messages: Annotated[Many[MessageTurn], Field(min_length=1)]
    system: str | Many[Block] | None = None
    tools: Many[OfferedTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def chat(self) -> MessageChat:
        """The chat that it stands for.

        Raises:
            FieldError: a field has no counterpart.
        """
        turns = [message for at, turn in enumerate(self.messages) for message in turn.messages(f"messages[{at}]")]
        given = self.system or ""
        texts = [given] if isinstance(given, str) else [_text(b, f"system[{at}]") for at, b in enumerate(given)]
        system = "\n\n".join(filter(None, (_BILLING.sub("", text) for text in texts)))
        last, choice = turns[-1], self.tool_choice or ToolChoice(type="auto")
        chosen = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
        wanted, variables = self.output_config or OutputConfig(), dict[str, Any]()
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type != "disabled"
        chat: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "system", "content": system}, *turns] if system else turns,
            "tools": [tool.function() for tool in self.tools] if self.tools else None,
            "tool_choice": chosen or {"type": "function", "name": choice.name} if self.tool_choice else None,
            "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
            "chat_template_kwargs": variables,
            "reasoning_effort": wanted.effort,
            "continue_final_message": last["role"] == "assistant" and bool(last["content"]) or None,
        }
        if wanted.format is not None:
            schema = {"name": "answer", "schema": wanted.format.schema_}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        return MessageChat.model_validate(chat | self._drawn(variables))

    def _drawn(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """How the answer is drawn, in the fields of chats."""
        return {}


class MessagesRequest(Counted):
    """The body of ``POST /v1/messages``: a conversation to answer."""

    passed_on = _OWN_FIELDS
    max_tokens: Count
    stop_sequences: Texts | None = None
    stream: bool = False
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Whole | None = None
    min_p: Probability | None = None

    def _drawn(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k", "min_p")
        sent = self.model_extra or {}
        extra = {name: sent[name] for name in _OWN_FIELDS if name in sent}
        if isinstance(given := extra.get("chat_template_kwargs", {}), dict):
            extra["chat_template_kwargs"] = {**variables, **given}
        return {**{name: getattr(self, name) for name in names}, "stop": self.stop_sequences, **extra}


class MessageBuilder:
    """The bodies of one message.

    Args:
        key: its id.
        model: its name in the answer.
        requests: the one that makes it.
    """

    closing = ""

    def __init__(self, key: str, model: str, choices: Choices, requests: Sequence[Request]) -> None:
        (self._request,) = requests
        self._id, self._model, self._parser, self._most = key, model, choices.parser(0), choices.body.max_tokens or 0
        self._blocks = list[dict[str, Any]]()
        self._open = False  # the last block has not ended
        self._arguments = ""  # of the call that is under way

    def whole(self) -> dict[str, Any]:
        """The message when the request has ended, without events."""
        list(self.events(0, self._request.chunks))
        list(self.ended(0))
        return {**self._message(), **self._stop(), "usage": self._usage(), **self._metrics()}

    def first(self) -> Iterator[dict[str, Any]]:
        """The event that a stream begins with."""
        usage = {"input_tokens": self._request.prompt_length, "output_tokens": 0}
        stop = {"stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": {**self._message(), "content": [], **stop, "usage": usage}}

    def events(self, index: int, chunks: Sequence[Chunk]) -> Iterator[dict[str, Any]]:
        """The events of what the message has gained."""
        if self._parser is None:
            yield from self._grown("text", "text", "".join([chunk.text for chunk in chunks]))
        else:
            for chunk in chunks:
                yield from self._parsed(self._parser.push(chunk))

    def waiting(self) -> Iterator[dict[str, Any]]:
        """The event of a time in which nothing comes."""
        yield {"type": "ping"}

    def frames(self) -> Mapping[int, tuple[str, str]]:
        return {}  # a block begins with its first text

    def failed(self, error: Exception) -> dict[str, Any]:
        """The event that a stream ends with in place of the last: what went wrong."""
        status, body = failure(error)
        return message_error(status, body["error"])

    def ended(self, index: int) -> Iterator[dict[str, Any]]:
        """The events of the end of the last block.

        Raises:
            the exception that ended the request.
        """
        if self._request.error is not None:
            raise self._request.error
        rest = self._request.rest
        if self._parser is not None:
            yield from self._parsed(self._parser.end(rest))
        else:
            yield from self._grown("text", "text", rest)
        yield from self._close()

    def last(self) -> list[dict[str, Any]]:
        """The events that a stream ends with."""
        end = {"type": "message_delta", "delta": self._stop(), "usage": self._usage(), **self._metrics()}
        return [end, {"type": "message_stop"}]

    def _parsed(self, parts: Sequence[Parsed]) -> Iterator[dict[str, Any]]:
        for part in parts:
            if part.call is None:
                kind, field = ("thinking", "thinking") if part.thought else ("text", "text")
                yield from self._grown(kind, field, part.text)
            elif part.begins:
                self._arguments = ""
                yield from self._begin({"type": "tool_use", "id": part.call.key, "name": part.call.name, "input": {}})
            else:
                self._arguments += part.text
                if part.text:
                    yield self._delta({"type": "input_json_delta", "partial_json": part.text})
                if part.ends:
                    yield from self._close()

    def _grown(self, kind: str, field: str, text: str) -> Iterator[dict[str, Any]]:
        """The events of more text of a kind, which begins a block where the last one is of another kind."""
        if not text:
            return
        if not self._open or self._blocks[-1]["type"] != kind:
            yield from self._begin({"type": kind, field: "", **({"signature": ""} if kind == "thinking" else {})})
        self._blocks[-1][field] += text
        yield self._delta({"type": f"{kind}_delta", field: text})

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        yield {"type": "content_block_start", "index": len(self._blocks), "content_block": dict(block)}
        self._blocks.append(block)
        self._open = True

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self._open:
            return
        if self._blocks[-1]["type"] == "tool_use":
            self._blocks[-1]["input"] = _arguments(self._arguments)
        self._open = False
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks,
        }

    def _stop(self) -> dict[str, str | None]:
        """Why the message ended, and the stop sequence that ended it."""
        request = self._request
        reasons = {
            "length": "max_tokens",
            "eos": "end_turn",
            "stop": "stop_sequence" if request.stopped else "end_turn",
        }
        reason = reasons.get(request.finish_reason or "", "pause_turn")
        if reason == "max_tokens" and request.limit < self._most:
            reason = "model_context_window_exceeded"
        if reason != "max_tokens" and self._parser is not None and self._parser.called:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": request.stopped or None}

    def _usage(self) -> dict[str, Any]:
        usage = usage_of([self._request])
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        thoughts = None if self._parser is None else self._parser.tokens
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            **({} if thoughts is None else {"output_tokens_details": {"thinking_tokens": thoughts}}),
        }

    def _metrics(self) -> dict[str, Any]:
        return {"metrics": {"speculative_decoding": speculative_decoding([self._request.stats])}}


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; none where the answer was cut off within them."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Status -> type of an error; 500 is ``api_error``, all others ``invalid_request_error``."""


def message_error(status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """An error in Anthropic's shape.

    Args:
        error: in OpenAI's shape, without the object around it.
    """
    kind = "api_error" if status == 500 else _KINDS.get(status, "invalid_request_error")
    known = "prompt is too long: " * (error.get("code") == "context_length_exceeded")  # by which clients know it
    return {"type": "error", "error": {"type": kind, "message": known + error["message"]}}


def answer_builder(key: str, model: str, choices: Choices, requests: Sequence[Request]) -> AnswerBuilder:
    """The builder of an answer's bodies, by its endpoint."""
    if isinstance(choices.body, MessageChat):
        return MessageBuilder(key, model, choices, requests)
    kind = ResponseBuilder if isinstance(choices.body, ResponsesRequest) else CompletionBuilder
    return kind(key, model, choices, requests)
