"""The files of a batch: lines with requests, and records of answers that a second call goes on from.

Both are JSON lines in OpenAI's batch format. A line has ``custom_id``, ``method`` ("POST"), ``url`` and ``body``, or in
short ``prompt`` beside fields of a chat's body. A record has ``id``, ``custom_id``, and either a ``response`` with
``status_code``, ``request_id`` and ``body``, or an ``error``. A record's id is a digest of its line's number and text,
so that a file tells which lines have been answered, and that they are these lines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifacts import append_line, file_path, read_lines
from ..errors import ConfigError

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


@dataclass(frozen=True, slots=True)
class BatchInput:
    """The lines of a file that are not empty; the file is read as they are wanted.

    Raises:
        ConfigError: it cannot be read, or has none.
    """

    path: Path

    def __post_init__(self) -> None:
        if not any(True for _ in self.lines()):
            raise ConfigError(f"batch {self.path} is empty: write a request a line")

    def lines(self) -> Iterator[BatchLine]:
        try:
            for number, line in enumerate(read_lines(self.path), start=1):
                if text := line.strip():
                    yield BatchLine(number, text)
        except OSError as error:
            raise ConfigError(f"batch {self.path} cannot be read: {error.strerror}: give a .jsonl file") from None


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

    def __init__(self, name: str, lines: BatchInput) -> None:
        self.path = path = file_path(name, "output")
        if path.exists() and path.samefile(lines.path):
            raise ConfigError(f"output {name} is the batch itself: name another file")
        self.done: set[str] = set()
        self.errors = 0
        self._fingerprint: str | None = None  # of what answered
        self._whole = 0  # bytes up to the end of the last whole record
        if path.exists():
            self._read({line.id for line in lines.lines()})

    def _read(self, ids: set[str]) -> None:
        try:
            for number, line in enumerate(read_lines(self.path), start=1):
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
        except OSError as error:
            raise ConfigError(f"output {self.path} cannot be read: {error.strerror}: name another file") from None

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
        own = fingerprint_of(record)
        if None is not self._fingerprint != own is not None:
            raise ConfigError(
                f"output {self.path} has answers of {self._fingerprint}, and this is {own}: give the same model as "
                "before, or name another file"
            )
        line = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        append_line(self.path, line, self._whole)
        self._whole += len(line)
        self._count(record)


def fingerprint_of(record: Record) -> str | None:
    """The system fingerprint of an answer; None: it has none."""
    body = (record.get("response") or {}).get("body") or {}
    return body.get("system_fingerprint")


def is_error(record: Record) -> bool:
    """A line that could not be answered."""
    response = record["response"]
    return response is None or response["status_code"] != 200
