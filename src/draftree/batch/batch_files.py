"""The files of a batch: lines with requests, and records of answers that a second call goes on from.

Both are JSON lines in OpenAI's batch format. A line has ``custom_id``, ``method`` ("POST"), ``url`` and ``body``, or in
short ``prompt`` beside fields of a chat's body. A record has ``id``, ``custom_id``, and either a ``response`` with
``status_code``, ``request_id`` and ``body``, or an ``error``. A record's id is a digest of its line's number and text,
so that a file tells which lines have been answered, and that they are these lines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifacts import read_lines, user_path
from ..errors import ConfigError, RunError

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
        """Of its record."""
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
        """All of them, in order."""
        try:
            for number, line in enumerate(read_lines(self.path), start=1):
                if text := line.strip():
                    yield BatchLine(number, text)
        except OSError as error:
            raise ConfigError(f"batch {self.path} cannot be read: {error.strerror}: give a .jsonl file") from None


class BatchOutput:
    """The records of answered lines; they are appended as they come.

    Attributes:
        path: of the file, which may be missing.
        done: ids of the lines that have a record.

    Raises:
        ConfigError: it cannot be read, or has a record that is none of these lines'.
    """

    def __init__(self, name: str, lines: BatchInput) -> None:
        self.path = path = user_path(name)
        if path.is_dir() or not path.parent.is_dir():
            why = "is a folder" if path.is_dir() else f"is in {path.parent}, which is not there"
            raise ConfigError(f"output {name} {why}: name a file")
        if path.exists() and path.samefile(lines.path):
            raise ConfigError(f"output {name} is the batch itself: name another file")
        self.done: set[str] = set()
        self._fingerprint: str | None = None  # of what answered
        self._whole = 0  # bytes up to the end of the last whole record
        if path.exists():
            self._read({line.id for line in lines.lines()})

    def _read(self, ids: set[str]) -> None:
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise ConfigError(f"output {self.path} cannot be read: {error.strerror}: name another file") from None
        lines = content.split(b"\n")
        for number, line in enumerate(lines, start=1):
            record = _object(line)
            if number == len(lines) or (record is None and number == len(lines) - 1):
                return  # what was being written when a call ended: it is cut off
            if record is None or record.get("id") not in ids:
                raise ConfigError(
                    f"output {self.path} line {number} answers no line of this batch, which may have been changed: "
                    "name another file"
                )
            self.done.add(record["id"])
            self._fingerprint = fingerprint_of(record) or self._fingerprint
            self._whole += len(line) + 1

    @contextmanager
    def appending(self) -> Iterator[Callable[[Record], None]]:
        """Open the file, without what was left of a broken record; yields what appends a record and flushes it.

        Raises:
            RunError: it cannot be written.
            ConfigError: a record is of another model, or release, than those before.
        """
        try:
            with self.path.open("ab") as file:
                file.truncate(self._whole)

                def write(record: Record) -> None:
                    own = fingerprint_of(record)
                    if None is not self._fingerprint != own is not None:
                        raise ConfigError(
                            f"output {self.path} has answers of {self._fingerprint}, and this is {own}: give the same "
                            "model as before, or name another file"
                        )
                    self._fingerprint = own or self._fingerprint
                    file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
                    file.flush()
                    self.done.add(record["id"])

                yield write
        except OSError as error:
            raise RunError(
                f"cannot write {self.path}: {error.strerror}: free some space, and give the same command again"
            ) from None


def fingerprint_of(record: Record) -> str | None:
    """The system fingerprint of an answer; None: it has none."""
    body = (record.get("response") or {}).get("body") or {}
    return body.get("system_fingerprint")


def is_error(record: Record) -> bool:
    """A line that could not be answered."""
    response = record["response"]
    return response is None or response["status_code"] != 200


def _object(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None: it is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
