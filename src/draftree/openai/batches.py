"""Files of a batch: lines with requests, and records of answers by one engine that decodes many at once.

Both are JSON lines in OpenAI's batch format. A line has ``custom_id``, ``method`` ("POST"), ``url`` and ``body``, or in
short ``prompt`` beside fields of a chat's body. A record has ``id``, ``custom_id``, and either a ``response`` with
``status_code``, ``request_id`` and ``body``, or an ``error``. A record's id is a digest of its line's number and text,
so that a file tells which lines have been answered, and that they are these lines.

A body means what it means to the server (``schema.py``, ``answers.py``), and its text is that of the same
request alone. A line that cannot be answered gives a record that says why.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from ..artifacts import append_line, file_path, read_lines
from ..engine.engine import Engine, Handle
from ..engine.speculation import SpeculationParams
from ..errors import ConfigError, FieldError, InputError
from ..text.encoding import user
from .bad_bodies import body_error, check_model, failure
from .chat_api import ChatRequest
from .choices import Choices
from .messages_api import answer_builder
from .responses_api import ResponsesRequest
from .schema import CompletionRequest, Fields, Sampled

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of a batch.

    Attributes:
        number: from 1; empty lines count.
        text: as it is in the file.
    """

    number: int
    text: bytes

    @property
    def id(self) -> str:
        return f"batch_req_{hashlib.sha256(b'%d ' % self.number + self.text).hexdigest()[:24]}"


def batch_lines(path: Path) -> list[BatchLine]:
    """Read the lines of a file that are not empty.

    Raises:
        ConfigError: it cannot be read, or has none.
    """
    lines = [BatchLine(number, text) for number, line in _numbered(path, "batch") if (text := line.strip())]
    if not lines:
        raise ConfigError(f"batch {path} is empty: write a request a line")
    return lines


def _numbered(path: Path, what: str) -> Iterator[tuple[int, bytes]]:
    try:
        yield from enumerate(read_lines(path), start=1)
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}: name another file") from None


class BatchOutput:
    """The records of answered lines; they are appended as they come.

    A file is a batch's own if its first line is a whole record of one of these lines; the first record is written whole
    or not at all, so that no killed run leaves another kind of file. Behind whole records a torn line is cut off.

    Attributes:
        path: of the file, which may be missing.
        done: ids of the lines that have a record.
        errors: how many of them could not be answered.

    Raises:
        ConfigError: it cannot be read or written, or has a record that is none of these lines'.
    """

    def __init__(self, name: str, lines: Iterable[BatchLine]) -> None:
        self.path = file_path(name, "output")
        self.done: set[str] = set()
        self.errors = 0
        self._fingerprint: str | None = None  # of what answered
        self._whole = 0  # bytes up to the end of the last whole record
        if self.path.exists():
            self._read({line.id for line in lines})

    def _read(self, ids: set[str]) -> None:
        for number, line in _numbered(self.path, "output"):
            if self._whole and not line.endswith(b"\n"):
                return  # what was being written when a call ended: it is cut off
            try:
                if not line.endswith(b"\n") or (record := json.loads(line))["id"] not in ids:
                    raise ValueError("of no line")
                self._count(record)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise ConfigError(
                    f"output {self.path} line {number} answers no line of this batch: if the batch has been "
                    "changed, or the file is another one, name another output"
                ) from None
            self._whole += len(line)

    def _count(self, record: Record) -> None:
        self.done.add(record["id"])
        self.errors += is_error(record)
        self._fingerprint = fingerprint_of(record) or self._fingerprint

    def append(self, record: Record) -> None:
        """Write a record.

        Raises:
            RunError: it cannot be written.
            ConfigError: it is of another model, or release, than those before.
        """
        fingerprint = fingerprint_of(record)
        if None is not self._fingerprint != fingerprint is not None:
            raise ConfigError(
                f"output {self.path} has answers of {self._fingerprint}, and this is {fingerprint}: give the same "
                "model as before, or name another file"
            )
        line = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        append_line(self.path, line, self._whole)
        self._whole += len(line)
        self._count(record)


def fingerprint_of(record: Record) -> str | None:
    """Return the system fingerprint of an answer, or None."""
    body = (record.get("response") or {}).get("body") or {}
    return body.get("system_fingerprint")


def is_error(record: Record) -> bool:
    """Test whether a record is that of a line that could not be answered."""
    response = record["response"]
    return response is None or response["status_code"] != 200


Url = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
CHAT, COMPLETIONS, RESPONSES = get_args(Url)
BODIES: Mapping[str, type[Sampled]] = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest, RESPONSES: ResponsesRequest}
"""URL of a line -> what its body is."""
QUEUE = 1 << 20
"""Most requests that wait (``SchedulerParams.queue``): a body may have many prompts, and nobody else does."""
_AHEAD = 2
"""Requests in the engine for each row: what comes next is encoded while rows are still in use."""


class LineError(InputError):
    """A line that is no request."""


class BatchRequest(Fields):
    """A line in OpenAI's batch format."""

    custom_id: str
    method: Literal["POST"] = "POST"
    url: Url
    body: dict[str, Any]


@dataclass(slots=True, eq=False)
class _Line:
    """A line that is being answered.

    Attributes:
        custom_id: the caller's name of it, once it is read.
        sent: its body.
        error: what is wrong with it; its requests were not submitted then.
    """

    line: BatchLine
    custom_id: str | None = None
    sent: object = None
    choices: Choices | None = None
    handles: list[Handle] = field(default_factory=list)
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return all(handle.done for handle in self.handles)

    @property
    def where(self) -> str:
        """The beginning of error messages about the line."""
        return f"line {self.line.number}: "

    def read(self, model: str) -> Sampled:
        """Parse the line's body. A line in short is a greedy chat, unless it sets the temperature.

        Args:
            model: the name for lines in short, which name none.

        Raises:
            LineError: it is no request.
            ValidationError: its body is none.
        """
        try:
            given = json.loads(self.line.text)
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            raise LineError(f"{self.where}it is no JSON object, write one a line")
        given = {name: value for name, value in given.items() if value is not None}
        if "prompt" in given and "body" not in given:
            named = given.pop("custom_id", f"line-{self.line.number}")
            messages = user(given.pop("prompt"))
            body = {"model": model, "temperature": 0, **given, "messages": messages}
            given = {"custom_id": named, "url": CHAT, "body": body}
        if isinstance(named := given.get("custom_id"), str):
            self.custom_id = named
        try:
            request = BatchRequest.model_validate(given)
        except ValidationError as error:
            raise LineError(body_error(error.errors(), given, self.where)["error"]["message"]) from None
        self.sent = request.body
        return BODIES[request.url].model_validate(request.body)

    def cancel(self) -> None:
        for handle in self.handles:
            handle.cancel()


class Answering:
    """Answers lines, several at a time.

    Args:
        engine: nobody else works with it meanwhile; its queue holds ``QUEUE``.
        speculation: how lines are drafted for that do not say.
        model: the name that bodies must give.
        rows: requests that the engine decodes at once.
    """

    def __init__(self, engine: Engine, speculation: SpeculationParams, model: str, rows: int) -> None:
        self._engine, self._speculation, self.model = engine, speculation, model
        self._most = _AHEAD * rows

    def records(self, lines: Iterable[BatchLine]) -> Iterator[Record]:
        """Yield the record of each line as it ends. Leaving early cancels the others."""
        under = list[_Line]()
        try:
            for line in lines:
                under.append(self._begun(line))
                while sum(max(1, len(entry.handles)) for entry in under) >= self._most:
                    yield from self._ended(under)
            while under:
                yield from self._ended(under)
        finally:
            for entry in under:
                entry.cancel()

    def _ended(self, under: list[_Line]) -> Iterator[Record]:
        """Wait until lines have ended; remove them and yield their records."""
        self._engine.wait(lambda: any(entry.done for entry in under))
        for entry in [entry for entry in under if entry.done]:
            under.remove(entry)
            yield self._record(entry)

    def _begun(self, line: BatchLine) -> _Line:
        started = _Line(line)
        try:
            body = started.read(self.model)
            check_model(body.model, self.model)
            if body.stream:
                raise FieldError("stream", "stream is not for batches: leave it out")
            with body.named():
                started.choices = choices = Choices(body, self._engine, self._speculation)
                requests = choices.requests()
                started.handles = self._engine.enqueue(requests, body.priority, body.timeout)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a line, the others are answered
            started.error = error
        return started

    def _record(self, entry: _Line) -> Record:
        record = {"id": entry.line.id, "custom_id": entry.custom_id}
        requests = [handle.request for handle in entry.handles]
        try:
            if error := entry.error or next((request.error for request in requests if request.error), None):
                raise error
            assert entry.choices is not None  # noqa: S101 - nothing is wrong with it
            key = entry.choices.body.prefix + entry.line.id.removeprefix("batch_req_")
            status, body = 200, answer_builder(key, self.model, entry.choices, requests).whole()
        except LineError as error:
            return {**record, "response": None, "error": {"code": "invalid_line", "message": str(error)}}
        except ValidationError as error:
            status, body = 400, body_error(error.errors(), entry.sent, entry.where)
        except Exception as error:  # noqa: BLE001
            status, body = failure(error, entry.where)
        response = {"status_code": status, "request_id": entry.line.id, "body": body}
        return {**record, "response": response, "error": None}
