"""Lines of a batch to records of answers, by one engine that decodes many at once.

A body means what it means to the server (``openai/schema.py``, ``openai/request_mapping.py``), and its text is that of
the same request alone. A line that cannot be answered gives a record that says why.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from ..engine.engine import Engine, Handle
from ..engine.scheduler import SchedulerParams
from ..engine.speculation import SpeculationParams
from ..errors import FieldError, InputError, shortened
from ..openai import bad_bodies
from ..openai.answers import CompletionBuilder
from ..openai.bad_bodies import UnknownModelError, body_error, input_error
from ..openai.chat_api import ChatRequest
from ..openai.request_mapping import Choices, decoded, find_choices, system_fingerprint
from ..openai.responses_api import ResponseBuilder, ResponsesRequest
from ..openai.schema import CompletionRequest, Sampled
from .batch_files import BatchLine, Record

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: Mapping[str, type[Sampled]] = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    RESPONSES: ResponsesRequest,
}
"""URL of a line -> what its body is."""
_QUEUE = 1 << 20
"""Most requests that wait: a body may have many prompts, and nobody else does."""
_AHEAD = 2
"""Requests in the engine for each row: what comes next is encoded while rows are still in use."""


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """What a line asks.

    Attributes:
        custom_id: the caller's name of it.
        url: one of ``BODIES``.
    """

    custom_id: str
    url: str
    body: Sampled


class LineError(InputError):
    """A line that is no request.

    Attributes:
        custom_id: the line's, if it has one.
        refusal: of the body, where it is what does not do.
    """

    def __init__(self, message: str, custom_id: str | None = None, refusal: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.custom_id, self.refusal = custom_id, refusal


def parse(line: BatchLine, model: str) -> ParsedLine:
    """Read a line.

    Args:
        model: the name for lines in short, which name none.

    Raises:
        LineError: it is no request.
    """
    where = f"line {line.number}"
    try:
        given = json.loads(line.text)
    except (ValueError, RecursionError):
        raise LineError(f"{where} is not JSON: write one object a line") from None
    if not isinstance(given, dict):
        raise LineError(f"{where} is no object: write {{...}}")
    named = given.get("custom_id")
    custom_id = f"line-{line.number}" if named is None else named
    if not isinstance(custom_id, str):
        raise LineError(f"{where} has custom_id {custom_id!r}: write a string")
    url: Any = given.get("url")
    body: Any = given.get("body")
    if "prompt" in given and "body" not in given:
        url, body = CHAT, _in_full(given, model)
    else:
        if named is None or not isinstance(body, dict):
            lacking = "custom_id" if named is None else "body"
            raise LineError(f"{where} has no {lacking}: give it, or write {{'prompt': ...}}", named)
        known = isinstance(url, str) and url in BODIES
        if not known or given.get("method", "POST") != "POST":
            wrong = f"method {given['method']!r}" if known else f"url {url!r}"
            raise LineError(f"{where} has {wrong}: use POST, and one of {', '.join(BODIES)}", custom_id)
    try:
        return ParsedLine(custom_id, url, BODIES[url].model_validate(body))
    except ValidationError as error:
        refusal = body_error(error.errors(include_url=False), body, f"{where}: ")
        raise LineError(refusal["error"]["message"], custom_id, refusal) from None


def _in_full(given: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The chat of a line in short: the prompt as a user's message, greedy unless it says otherwise."""
    fields = {name: value for name, value in given.items() if name not in ("prompt", "custom_id")}
    message = {"role": "user", "content": given["prompt"]}
    return {"model": model, "temperature": 0, **fields, "messages": [message]}


@dataclass(frozen=True, slots=True, eq=False)
class _Under:
    """A line under way: its requests, and what they make together."""

    line: BatchLine
    parsed: ParsedLine
    choices: Choices
    handles: list[Handle]

    @property
    def done(self) -> bool:
        return all(handle.done for handle in self.handles)

    def cancel(self) -> None:
        for handle in self.handles:
            if not handle.done:
                handle.cancel()


class Answering:
    """Answers lines, several at a time.

    Args:
        engine: nobody else works with it meanwhile.
        speculation: how lines are drafted for that do not say.
        model: the name that bodies must give.
        rows: requests that the engine decodes at once.
    """

    def __init__(self, engine: Engine, speculation: SpeculationParams, model: str, rows: int) -> None:
        self._engine, self._speculation, self.model = engine, speculation, model
        self._most = _AHEAD * rows
        self.fingerprint = system_fingerprint(engine)

    def records(self, lines: Iterable[BatchLine]) -> Iterator[Record]:
        """The record of each line, in the order in which they end; leaving early cancels the others."""
        waiting, under = iter(lines), list[_Under]()
        more = True
        try:
            while more or under:
                while more and sum(len(each.handles) for each in under) < self._most:
                    if (line := next(waiting, None)) is None:
                        more = False
                    else:
                        begun = self._begin(line)
                        if isinstance(begun, _Under):
                            under.append(begun)
                        else:
                            yield begun
                if under:
                    self._engine.wait(lambda: any(each.done for each in under))
                for each in [each for each in under if each.done]:
                    under.remove(each)
                    try:
                        record = self._ended(each)
                    except Exception as error:  # noqa: BLE001
                        record = self._failed(each.line, each.parsed.custom_id, error)
                    yield record
        finally:
            for each in under:
                each.cancel()

    def _begin(self, line: BatchLine) -> _Under | Record:
        custom_id, handles = None, list[Handle]()
        try:
            parsed = parse(line, self.model)
            custom_id, body = parsed.custom_id, parsed.body
            if body.model != self.model:
                raise UnknownModelError(body.model, self.model)
            if body.stream:
                raise FieldError("stream", "stream is not for batches: leave it out")
            options: dict[str, Any] = {"prediction": body.predicted, "priority": body.priority, "timeout": body.timeout}
            with body.named():
                choices = find_choices(body, self._engine, self._speculation)
                for ids, params in choices.asked:
                    handles.append(self._engine.submit(ids, params, choices.speculation, **options))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a line, the others are answered
            for handle in handles:
                handle.cancel()
            return self._failed(line, custom_id, error)
        return _Under(line, parsed, choices, handles)

    def _failed(self, line: BatchLine, custom_id: str | None, error: Exception) -> Record:
        if isinstance(error, LineError):
            custom_id = error.custom_id
            if error.refusal is None:
                failure = {"code": "invalid_line", "message": str(error)}
                return {"id": line.id, "custom_id": custom_id, "response": None, "error": failure}
            return self._answered(line, custom_id, 400, error.refusal)
        if isinstance(error, InputError):
            status = 404 if isinstance(error, UnknownModelError) else 400
            return self._answered(line, custom_id, status, input_error(error, f"line {line.number}: "))
        why = shortened(f"line {line.number}: {type(error).__name__}: {' '.join(str(error).split())}")
        return self._answered(line, custom_id, 500, bad_bodies.error(why, "server_error"))

    def _ended(self, each: _Under) -> Record:
        requests = [handle.request for handle in each.handles]
        if failure := next((request.error for request in requests if request.error is not None), None):
            return self._failed(each.line, each.parsed.custom_id, failure)
        body, key, tags = each.parsed.body, each.line.id.removeprefix("batch_req_"), each.choices.tags
        if isinstance(body, ResponsesRequest):
            answer = ResponseBuilder(f"resp_{key}", body, self.model, self._spelled, tags).answered(requests[0])
        else:
            chat = isinstance(body, ChatRequest)
            name = f"{'chatcmpl' if chat else 'cmpl'}-{key}"
            offsets = each.choices.offsets(requests)
            builder = CompletionBuilder(
                name, self.model, self.fingerprint, self._spelled, chat=chat, tags=tags, offsets=offsets
            )
            answer = each.choices.whole(builder, requests, [handle.generation for handle in each.handles])
        return self._answered(each.line, each.parsed.custom_id, 200, answer)

    def _answered(self, line: BatchLine, custom_id: str | None, status: int, body: Mapping[str, Any]) -> Record:
        response = {"status_code": status, "request_id": line.id, "body": body}
        return {"id": line.id, "custom_id": custom_id, "response": response, "error": None}

    def _spelled(self, token: int) -> str:
        return decoded(self._engine, [token])


def scheduled(params: SchedulerParams) -> SchedulerParams:
    """The same with a queue that no body overflows."""
    return replace(params, queue=_QUEUE)
