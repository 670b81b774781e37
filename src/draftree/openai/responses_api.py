"""``/v1/responses``, without state: what clients send, the response, and its events (Open Responses, 2026-04-24)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ..config import Count, LogprobCount
from ..errors import FieldError
from ..request import Chunk, Request
from ..text.encoding import Conversation
from .answers import named_logprobs, speculative_decoding, usage_of
from .bad_bodies import UnsupportedError, failure
from .choices import Choices
from .response_items import AdditionalTools, AnyItem, InputItem, turns_of
from .schema import Body, Few, Fields, Many, ResponseFormat
from .tools import Parsed, Tool, WithTools, functions


class ReasoningOptions(Fields):
    """How much the model thinks, if its chat template reads that. The response repeats all fields."""

    model_config = ConfigDict(extra="allow")

    effort: str | None = None


class TextOptions(Body):
    """Settings of the answer's text: its format."""

    format: ResponseFormat = ResponseFormat()


class ResponsesRequest(WithTools):
    """A conversation to answer, without stored state: the body of ``POST /v1/responses``."""

    prefix = "resp_"
    n: Literal[1] = 1
    input: str | Annotated[Many[AnyItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions | None = None
    top_logprobs: LogprobCount | None = None
    include: Many[str] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    metadata: Annotated[dict[str, str] | None, Few] = None

    @property
    def wanted_logprobs(self) -> int | None:
        return self.top_logprobs or (0 if "message.output_text.logprobs" in (self.include or ()) else None)

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def format(self) -> tuple[str, ResponseFormat]:
        return "text.format", self.text.format

    @property
    def items(self) -> list[AnyItem]:
        return [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def refuse(self) -> None:
        if self.traced:
            raise FieldError("stream_options.include_trace", "a response has no trace: ask for a chat or a completion")
        for field, way_out in _AWAY.items():
            if getattr(self, field):
                raise UnsupportedError(field, way_out)

    def functions(self) -> dict[str, Tool]:
        tools = super().functions()
        for at, item in enumerate(self.items):
            if isinstance(item, AdditionalTools):
                tools |= functions(item.tools, f"input[{at}].tools")
        return tools

    def prompts(self) -> Sequence[Conversation]:
        """Convert the instructions and the input to a conversation."""
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [Conversation([*instructions, *turns_of(self.items)], self.templates(), variables=self.variables)]


_AWAY = {
    "max_tokens": "use max_output_tokens",
    "background": "leave it out, and stream the answer",
    "previous_response_id": "send its input and output in input: nothing is stored here",
    "conversation": "send its items in input: nothing is stored here",
}
"""Unsupported fields -> the way out that the error names."""
_NULL = "completed_at error incomplete_details previous_response_id usage".split()
"""Fields of a response that are null before its end, or always."""
_SENT = ("max_tool_calls prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier user").split()
"""Fields of a request that a response repeats."""
_DRAWN = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
"""Fields of a response that come from ``SamplingParams``."""


class ResponseBuilder:
    """Builds the bodies of one response.

    Args:
        key: its id.
        model: its name in the answer.
        requests: the one that makes it.
    """

    closing = ""

    def __init__(self, key: str, model: str, choices: Choices, requests: Sequence[Request]) -> None:
        assert isinstance(choices.body, ResponsesRequest)  # noqa: S101 - what it is the builder of
        (self._request,) = requests
        self._body, self._model, self._spell = choices.body, model, choices.engine.inputs.token_bytes
        self._id = key
        self._created = int(time.time())
        self._number = 0
        self._parser = choices.parser(0)
        self._functions = {tool.described.name: tool for tool in choices.body.offered().values()}
        self._items: list[dict[str, Any]] = []  # the output, the last of them perhaps in progress
        self._unsaid: list[Chunk] = []  # whose text has not come, or is a call's

    def whole(self) -> dict[str, Any]:
        """Build the response of a request that has ended."""
        list(self.events(0, self._request.chunks))
        list(self.ended(0))
        return self._response()

    def first(self) -> Iterator[dict[str, Any]]:
        """Yield the events that begin a stream."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._begun("in_progress"))

    def events(self, index: int, chunks: Sequence[Chunk]) -> Iterator[dict[str, Any]]:
        """Yield the events of new tokens."""
        if self._parser is not None:
            for chunk in chunks:
                self._unsaid.append(chunk)
                parts = self._parser.push(chunk)
                if self._parser.thinking:
                    self._unsaid.clear()
                yield from self._parsed(parts)
            return
        self._unsaid += chunks
        if text := "".join([chunk.text for chunk in chunks]):
            yield from self._said(text)

    def waiting(self) -> Iterator[dict[str, Any]]:
        """Yield an event while no token comes: clients with a time limit do not count comments."""
        yield self._event("response.in_progress", response={**self._begun("in_progress"), "output": self._items})

    def frames(self) -> Mapping[int, tuple[str, str]]:
        return {}  # events are numbered

    def failed(self, error: Exception) -> dict[str, Any]:
        """The event that a stream ends with in place of the last: what went wrong."""
        body = failure(error)[1]["error"]
        why = {"code": body["code"] or body["type"], "message": body["message"]}
        response = {**self._begun("failed"), "output": self._items, "error": why}
        return self._event("response.failed", response=response)

    def last(self) -> list[dict[str, Any]]:
        """List the event that ends a stream."""
        response = self._response()
        return [self._event(f"response.{response['status']}", response=response)]

    def _response(self) -> dict[str, Any]:
        usage = usage_of([self._request])
        return {
            **self._begun("completed" if self._cut is None else "incomplete"),
            "completed_at": int(time.time()),
            "incomplete_details": None if self._cut is None else {"reason": self._cut},
            "output": self._items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0 if self._parser is None else self._parser.tokens or 0},
                "total_tokens": usage["total_tokens"],
            },
            "metrics": {"speculative_decoding": speculative_decoding([self._request.stats])},
        }

    @property
    def _cut(self) -> str | None:
        """Why the response is incomplete; None: it is complete."""
        reason = self._request.finish_reason or ""
        return {"eos": None, "stop": None, "length": "max_output_tokens"}.get(reason, reason)

    def ended(self, index: int) -> Iterator[dict[str, Any]]:
        """Yield the events that end the output.

        Raises:
            the exception that ended the request.
        """
        if self._request.error is not None:
            raise self._request.error
        if self._parser is not None:
            yield from self._parsed(self._parser.end(self._request.rest))
        elif self._request.rest:
            yield from self._said(self._request.rest)
        scored = any(chunk.logprobs is not None for chunk in self._unsaid)
        if not self._items or (scored and self._items[-1]["type"] == "message"):
            yield from self._said("")
        if self._items[-1]["status"] == "in_progress":
            yield from self._close("completed" if self._cut is None else "incomplete")

    def _parsed(self, parts: Sequence[Parsed]) -> Iterator[dict[str, Any]]:
        for part in parts:
            if part.thought:
                yield from self._thought(part.text)
            elif part.call is None:
                yield from self._said(part.text)
            elif part.begins:
                self._unsaid.clear()
                called = self._functions[part.call.name].called()
                call = {"type": "function_call", "call_id": part.call.key, **called, "arguments": ""}
                yield from self._open("fc", call)
            else:
                self._items[-1]["arguments"] += part.text
                if part.text:
                    yield self._within("response.function_call_arguments.delta", delta=part.text)
                if part.ends:
                    yield from self._close("completed")

    def _thought(self, text: str) -> Iterator[dict[str, Any]]:
        if not self._items or self._items[-1]["type"] != "reasoning":
            item = {"type": "reasoning", "summary": [], "content": []}
            yield from self._open("rs", item, {"type": "reasoning_text", "text": ""})
        self._items[-1]["content"][0]["text"] += text
        yield self._within("response.reasoning_text.delta", content_index=0, delta=text)

    def _said(self, text: str) -> Iterator[dict[str, Any]]:
        if not self._items or self._items[-1]["type"] != "message":
            item = {"type": "message", "role": "assistant", "content": []}
            yield from self._open("msg", item, {"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        (part,) = self._items[-1]["content"]
        scored = named_logprobs(self._unsaid, self._spell)
        self._unsaid.clear()
        part["text"] += text
        part["logprobs"] += scored
        if text or scored:
            yield self._within("response.output_text.delta", content_index=0, delta=text, logprobs=scored)

    def _open(self, kind: str, item: dict[str, Any], part: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Begin an item, with the part that its text goes to; end the item before it."""
        if self._items and self._items[-1]["status"] == "in_progress":
            yield from self._close("completed")
        begun = {"id": f"{kind}_{secrets.token_hex(16)}", "status": "in_progress", **item}
        yield self._event("response.output_item.added", output_index=len(self._items), item=begun)
        self._items.append(begun)
        if part is not None:
            yield self._within("response.content_part.added", content_index=0, part=part)
            begun["content"].append(part)

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            named = {name: item[name] for name in ("name", "arguments")}
            yield self._within("response.function_call_arguments.done", **named)
        else:
            (part,) = item["content"]
            fields = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._within(f"response.{part['type']}.done", content_index=0, **fields)
            yield self._within("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _within(self, kind: str, **fields: Any) -> dict[str, Any]:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _begun(self, status: str) -> dict[str, Any]:
        body = self._body
        chosen = body.tool_choice or "auto"
        sent = body.model_extra or {}
        format_ = body.text.format.model_dump(by_alias=True, exclude_unset=True) or {"type": "text"}
        return {
            **dict.fromkeys(_NULL),
            **{name: sent.get(name) for name in _SENT},
            "reasoning": body.reasoning and body.reasoning.model_dump(exclude_unset=True),
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": [],
            "instructions": body.instructions,
            "tools": [echo for tool in body.tools or () if (echo := tool.echoed())],
            "tool_choice": chosen if isinstance(chosen, str) else chosen.model_dump(exclude_unset=True),
            "parallel_tool_calls": body.several,
            "truncation": sent.get("truncation") or "disabled",
            "text": {**(body.text.model_extra or {}), "format": format_},
            **{name: getattr(self._request.params, name) for name in _DRAWN},
            "top_logprobs": body.top_logprobs or 0,
            "max_output_tokens": body.max_output_tokens,
            "store": False,
            "background": False,
            "service_tier": "default",
            "metadata": body.metadata or {},
        }
