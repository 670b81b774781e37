"""The folder of a run: ``config.json``, ``results.jsonl``, ``summary.json``. Written so that a killed run goes on.

A line is written in one piece and flushed before the next decoding begins. A line that a kill has torn is cut off when
the run goes on.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ..artifacts import user_path, write_whole
from ..errors import ConfigError, DraftreeWarning, RunError
from .record import Record, decode, encode

CONFIG, RESULTS, SUMMARY = "config.json", "results.jsonl", "summary.json"
FORMAT = "draftree-bench"
VERSION = 1
_UNCOMPARED = ("command", "date")
"""What a run that goes on may have otherwise."""


class RunFolder:
    """A run's folder, open for writing.

    Attributes:
        path: the folder.
        records: what is there, in the order of writing.

    Args:
        path: the folder; made if it is not there.
        config: what the run is made of, as JSON can hold it.

    Raises:
        ConfigError: the folder holds a run of another configuration, or something else.
        RunError: it cannot be written.
    """

    def __init__(self, path: str | Path, config: Mapping[str, Any]) -> None:
        self.path = user_path(path)
        self._config = {"format": FORMAT, "version": VERSION, **json.loads(json.dumps(config))}
        self._file: IO[bytes] | None = None
        self.records: list[Record] = []
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file: give --out a folder")
        kept = read_config(self.path) if (self.path / CONFIG).exists() else None
        if kept is not None:
            self._check_same(kept)
            self.records = read_results(self.path)
        elif self.path.exists() and any(self.path.iterdir()):
            raise ConfigError(f"{self.path} is not empty and holds no run: give --out a folder of its own")

    def _check_same(self, kept: Mapping[str, Any]) -> None:
        for key in [*self._config, *(k for k in kept if k not in self._config)]:
            old, new = kept.get(key), self._config.get(key)
            if key not in _UNCOMPARED and old != new:
                if isinstance(old, dict) and isinstance(new, dict):
                    key, old, new = next(
                        (f"{key} {k}", old.get(k), new.get(k)) for k in {**old, **new} if old.get(k) != new.get(k)
                    )
                raise ConfigError(
                    f"{self.path} holds a run with {key} {_shown(old)} and this one has {_shown(new)}: "
                    "give --out another folder, or take that run's settings"
                )

    def __enter__(self) -> RunFolder:
        """Write the configuration and open the results, cut behind the last whole line."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not (self.path / CONFIG).exists():
                write_whole(self.path / CONFIG, json.dumps(self._config, indent=1, ensure_ascii=False) + "\n")
            self._file = (self.path / RESULTS).open("ab")
            self._file.truncate(_whole(self.path / RESULTS))
        except OSError as error:
            raise self._unwritten(error) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as late:  # it tries again what it could not write
                if error is None:
                    raise self._unwritten(late) from None

    def append(self, record: Record) -> None:
        """Write one line.

        Raises:
            RunError: it cannot be written; the lines before it are kept.
        """
        if self._file is None:
            raise RunError(f"{self.path} is not open: use it in a with statement")
        try:
            self._file.write(encode(record))
            self._file.flush()
        except OSError as error:
            raise self._unwritten(error) from None
        self.records.append(record)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json`` in one piece.

        Raises:
            RunError: it cannot be written.
        """
        write_whole(self.path / SUMMARY, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")

    def _unwritten(self, error: OSError) -> RunError:
        return RunError(
            f"cannot write {self.path}: {os.strerror(error.errno) if error.errno else error}: what is done is kept; "
            "make room there, then give the same command again"
        )


def read_config(path: Path) -> dict[str, Any]:
    """What a run is made of.

    Raises:
        ConfigError: there is no run, or one of a newer version.
    """
    try:
        config = json.loads((path / CONFIG).read_text())
        if config["format"] != FORMAT or not isinstance(config["version"], int):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"no run in {path}: name a folder that 'draftree bench --out' wrote") from None
    if config["version"] > VERSION:
        raise ConfigError(
            f"{path} is a run of version {config['version']} and we read up to {VERSION}: upgrade draftree"
        )
    return dict(config)


def read_results(path: Path) -> list[Record]:
    """The records of a run; a torn last line is left out.

    Raises:
        ConfigError: another line is corrupt, or two are about the same.
    """
    file = path / RESULTS
    if not file.exists():
        return []
    records: dict[tuple[str, int, str], Record] = {}
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            warnings.warn(f"{file}, line {number}: torn by an interruption: left out", DraftreeWarning, stacklevel=2)
            break
        try:
            record = decode(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{file}, line {number} is corrupt ({error}): take that line out") from None
        if record.key in records:
            raise ConfigError(f"{file}, line {number} repeats prompt {record.prompt!r} of {record.method}: take it out")
        records[record.key] = record
    return list(records.values())


def read_summary(path: Path) -> dict[str, Any]:
    """``summary.json``; empty where there is none yet."""
    try:
        return dict(json.loads((path / SUMMARY).read_text()))
    except (OSError, ValueError):
        return {}


def _whole(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    return path.read_bytes().rfind(b"\n") + 1


def _shown(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
