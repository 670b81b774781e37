"""Traces: an observer that writes what every step did, as lines of JSON; ``docs/traces.md`` is their schema.

Numbers have 9 significant digits, so that a float32 comes back exactly; what JSON has no number for is "Infinity",
"-Infinity" or "NaN".
"""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from ..artifacts import new_file
from ..config import typed
from ..errors import ConfigError, DraftreeWarning
from ..models.base import LanguageModel
from ..request import Outcome, Request
from ..text.encoding import Tokenizer
from .speculation import EngineRequest, Observer, Speculation

FORMAT = "draftree-trace"
VERSION = 4
"""Rises when a key changes its meaning or goes; new keys alone do not raise it."""

Record = Mapping[str, Any]
"""A line by its keys; ``plain`` gives the values that JSON can hold."""


class RequestTrace(Observer):
    """Records of the request that it is an observer of, until they are taken.

    Made in the engine's thread, taken in any; nobody else holds it, so it goes with its request.

    Args:
        number: of the request, in its records.
        tokenizer: spells tokens; None: they have no texts.
        first: records before those.
    """

    def __init__(self, number: int, tokenizer: Tokenizer | None, first: Sequence[Record] = ()) -> None:
        self._number, self._records = number, deque(first)
        self._decode = tokenizer and partial(
            tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        self._spelled = set[int]()
        self._opened = False

    def opened(self, request: EngineRequest) -> None:
        speculation, read, self._opened = request.speculation, request.prompt_length, True
        self._add(
            "request",
            prompt_length=read,
            prompt=request.ids[:read],
            seed=request.seed,
            limit=request.limit,
            params=request.params,
            drafter=speculation.drafter.name,
            nodes=speculation.nodes,
            verification=speculation.scheme.name,
            candidates=speculation.scheme.candidates,
            first=request.ids[read],
            prefill=request.stats.seconds.prefill,
            texts=self._texts(request.ids),
        )

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            request, tree, cost = outcome.request, outcome.tree, outcome.step
            length = len(request.ids) - outcome.taken
            self._add(
                "step",
                step=request.stats.steps,
                length=length,
                root=request.ids[length - 1],
                tree=tree,
                expected=tree.expected_acceptance_length,
                path=outcome.path,
                tokens=outcome.tokens,
                taken=outcome.taken,
                batch=cost.batch,
                draft_passes=cost.draft_passes,
                seconds={"draft": cost.draft, "verify": cost.verify, "other": cost.other},
                texts=self._texts([*tree.tokens, *outcome.tokens]),
            )

    def closed(self, request: EngineRequest) -> None:
        if self._opened:
            self._add("end", finish_reason=request.finish_reason, stats=request.stats)

    def _add(self, kind: str, **record: Any) -> None:
        self._records.append({"kind": kind, "request": self._number, **record})

    def _texts(self, tokens: Sequence[int]) -> dict[int, Any]:
        """Of tokens that no record before has."""
        new = sorted(set(tokens) - self._spelled)
        self._spelled.update(new)
        return {token: self._decode([token]) for token in new} if self._decode else {}

    def take(self) -> list[dict[str, Any]]:
        """The records since the last call, as JSON has them."""
        return [plain(self._records.popleft()) for _ in range(len(self._records))]


class Trace(Observer, AbstractContextManager["Trace"]):
    """Writes what an engine does to a file: ``Engine(..., observers=[trace])``.

    The file is made when the first request has been opened, and every step is flushed, so that an interrupted run
    leaves whole lines. When writing fails (a full disk), tracing stops with one warning and decoding goes on.

    Args:
        path: the file.
        labels: what the caller calls things, kept in the first line beside the drafter's name.

    Raises:
        ConfigError: the file exists or cannot be written; found at once.
    """

    @typed
    def __init__(self, path: str | Path, *, labels: Mapping[str, str] | None = None) -> None:
        self.path = new_file(path, "trace")
        self._labels = dict(labels or {})
        self._file: IO[bytes] | None = None
        self._run = ""
        self._tokenizer: Tokenizer | None = None
        self._open: dict[Request, RequestTrace] = {}
        self._count = itertools.count()
        self._stopped = False

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the trace; what the engine does from now on is not traced."""
        self._stopped = True
        if self._file is not None:
            with suppress(OSError):  # after a failed write it tries again what it still holds, and fails again
                self._file.close()

    def built(self, target: LanguageModel, speculation: Speculation) -> None:
        """Describe the run.

        Raises:
            ConfigError: the trace is another engine's already.
        """
        if self._run:
            raise ConfigError(f"trace '{self.path}' belongs to another engine: make a Trace for each")
        self._run = trace_line(plain(run_record(target, speculation, self._labels)))
        self._tokenizer = target.tokenizer

    def opened(self, request: EngineRequest) -> None:
        self._open[request] = trace = RequestTrace(next(self._count), self._tokenizer)
        trace.opened(request)
        self._write(trace.take())

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._open[outcome.request].stepped([outcome])
        self._write(record for outcome in outcomes for record in self._open[outcome.request].take())

    def closed(self, request: EngineRequest) -> None:
        if trace := self._open.pop(request, None):
            trace.closed(request)
            self._write(trace.take())

    def _write(self, records: Iterable[dict[str, Any]]) -> None:
        lines = "".join(map(trace_line, records)).encode()
        if self._stopped:
            return
        try:
            if self._file is None:
                self._file = self.path.open("wb")
                lines = self._run.encode() + lines
            self._file.write(lines)
            self._file.flush()
        except OSError as error:
            self.close()
            why = f"cannot write trace '{self.path}' any further ({error.strerror or error})"
            warnings.warn(f"{why}: decoding goes on", DraftreeWarning, stacklevel=2)


def trace_version(line: bytes | str) -> int | None:
    """The version of the trace that begins with this line; None: it begins no trace."""
    try:
        run = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_trace = isinstance(run, dict) and (run.get("kind"), run.get("format")) == ("run", FORMAT)
    return int(run["version"]) if is_trace and isinstance(run.get("version"), int) else None


def run_record(target: LanguageModel, speculation: Speculation, labels: Mapping[str, str]) -> Record:
    """The first line of an engine's trace; ``labels``: what the caller calls things."""
    drafter, scheme = speculation.drafter, speculation.scheme
    return {
        "kind": "run",
        "format": FORMAT,
        "version": VERSION,
        "draftree": version("draftree"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": target.capabilities,
        "drafter": _described(drafter),
        "nodes": speculation.nodes,
        "verification": scheme.name,
        "candidates": scheme.candidates,
        "labels": {"drafter": drafter.name, **labels},
    }


def trace_line(record: Record) -> str:
    """The line of a record that JSON can hold."""
    return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"


def plain(value: Any) -> Any:
    """What JSON can hold of a value: dataclasses by their public fields; what has none, and functions, by name."""
    if isinstance(value, float):
        return _number(value)
    if value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, (tuple, list)):
        return [plain(x) for x in value]
    if isinstance(value, Mapping):
        return {str(k): plain(x) for k, x in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        public = [f.name for f in fields(value) if f.repr and not f.name.startswith("_")]
        if public:
            return {name: plain(getattr(value, name)) for name in public}
    return _name_of(value)


def _number(x: float) -> float | str:
    if math.isfinite(x):
        return float(f"{x:.9g}")
    return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"


def _name_of(value: object) -> str:
    """A function's name, or that of an object's class."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _described(thing: object) -> dict[str, Any]:
    """Class and settings of a drafter or policy; models by their names."""
    settings = [f.name for f in fields(thing) if f.repr] if is_dataclass(thing) else []
    return {"class": _name_of(thing), **{name: _setting(getattr(thing, name)) for name in settings}}


def _setting(value: object) -> Any:
    can = getattr(value, "capabilities", None)
    if can is not None:
        return can.name
    if isinstance(value, tuple):
        return [_setting(x) for x in value]
    return _described(value) if is_dataclass(value) else value
