"""``/v1/responses``, without state: what clients send, the response, and its events (Open Responses, 2026-04-24)."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StrictStr

from ..config import MOST_LOGPROBS
from ..errors import FieldError
from ..request import Chunk, Request
from ..text import Prompt
from .answers import named_logprobs, speculative_decoding
from .engine_loop import Answer
from .schema import Body, Message, Part, ResponseFormat, Sampled, Tokens, text_of

ENDS = {"eos": None, "stop": None, "criteria": None, "length": "max_output_tokens"}
"""Why a request ended -> what made the response incomplete."""


class InputItem(Body):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | list[Part]


class TextOptions(Body):
    """What the text must look like."""

    format: ResponseFormat = ResponseFormat()


class ResponsesRequest(Sampled):
    """``/v1/responses``."""

    input: StrictStr | Annotated[list[InputItem], Field(min_length=1)]
    instructions: StrictStr | None = None
    max_output_tokens: Tokens | None = None
    text: TextOptions = TextOptions()
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MOST_LOGPROBS)] | None = None
    previous_response_id: None = None
    background: Literal[False] | None = None
    metadata: dict[str, str] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return self.top_logprobs or None

    @property
    def format(self) -> tuple[str, ResponseFormat | None]:
        return "text.format", self.text.format

    def refuse(self) -> None:
        super().refuse()
        if self.traced:
            raise FieldError("stream_options.include_trace", "a response has no trace: ask for a chat or a completion")
        if self.n != 1:
            raise FieldError("n", "a response has one output: leave n out")

    def conversation(self) -> list[dict[str, str]]:
        """The instructions and the input as chat templates take them."""
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        turns = [Message(role=item.role, content=text_of(item.content, f"input[{i}]")) for i, item in enumerate(items)]
        if self.instructions:
            turns.insert(0, Message(role="system", content=self.instructions))
        return [turn.plain(at) for at, turn in enumerate(turns)]

    def prompts(self) -> Sequence[Prompt]:
        return [self.conversation()]


class ResponseShape:
    """The bodies of one response.

    Args:
        key: its id.
        model: its name in the answer.
        spell: the text of a token.
    """

    def __init__(self, key: str, body: ResponsesRequest, model: str, spell: Callable[[int], str]) -> None:
        self._body, self._model, self._spell = body, model, spell
        self._id, self._item = key, f"msg_{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._number = 0

    def whole(self, request: Request) -> dict[str, Any]:
        """The response when the request has ended."""
        reason = ENDS.get(request.finish_reason or "", request.finish_reason)
        status = "completed" if reason is None else "incomplete"
        stats, prompt = request.stats, request.prompt_length
        return {
            **self._begun(status),
            "completed_at": int(time.time()),
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": [self._message(status, [self._part(request.text, request.chunks)])],
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": stats.reused},
                "output_tokens": stats.tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + stats.tokens,
            },
            "metrics": {"speculative_decoding": speculative_decoding([stats])},
        }

    async def events(self, answer: Answer) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream, in their order."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._begun("in_progress"))
        place = {"output_index": 0}
        yield self._event("response.output_item.added", **place, item=self._message("in_progress", []))
        place |= {"content_index": 0}
        inside: dict[str, Any] = {**place, "item_id": self._item}
        yield self._event("response.content_part.added", **inside, part=self._part("", []))
        async for chunk in answer.chunks():
            if chunk.text or chunk.logprobs is not None:
                told = named_logprobs([chunk], self._spell)
                yield self._event("response.output_text.delta", **inside, delta=chunk.text, logprobs=told)
        request = answer.handle.request
        part = self._part(request.text, request.chunks)
        yield self._event("response.output_text.done", **inside, text=part["text"], logprobs=part["logprobs"])
        yield self._event("response.content_part.done", **inside, part=part)
        response = self.whole(request)
        yield self._event("response.output_item.done", output_index=0, item=response["output"][0])
        yield self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._item, "status": status, "role": "assistant", "content": content}

    def _part(self, text: str, chunks: list[Chunk]) -> dict[str, Any]:
        told = named_logprobs(chunks, self._spell)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": told}

    def _begun(self, status: str) -> dict[str, Any]:
        """The response before its output."""
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [],
            "instructions": body.instructions,
            "previous_response_id": None,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "max_tool_calls": None,
            "truncation": "disabled",
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_unset=True) or {"type": "text"}},
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "top_logprobs": body.top_logprobs or 0,
            "reasoning": None,
            "usage": None,
            "max_output_tokens": body.max_output_tokens,
            "store": False,
            "background": False,
            "service_tier": "default",
            "metadata": body.metadata or {},
            "safety_identifier": None,
            "prompt_cache_key": None,
        }
