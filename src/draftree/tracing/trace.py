"""An observer that writes a line for every step, and the reader of such a trace."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from ..artifacts import new_file, read_lines, user_path
from ..config import typed
from ..engine.speculation import EngineRequest, Observer, Setup
from ..errors import ConfigError, DraftreeWarning, TraceError
from ..request import Outcome, Request
from .records import (
    FORMAT,
    VERSION,
    EndRecord,
    Record,
    RequestRecord,
    RunRecord,
    StepRecord,
    StepSeconds,
    decode,
    encode,
    name_of,
    plain,
)


class Trace(Observer):
    """Writes what an engine does to a file: ``Engine(..., observers=[trace])``.

    The file is made when the first request has been opened, and every step is flushed, so that an interrupted run
    leaves whole lines. When writing fails (a full disk), tracing stops with one warning and decoding goes on.

    Args:
        path: the file.
        force: overwrite a trace that exists.
        labels: what the caller calls things, kept in the first line beside the drafter's name.
        warn: takes the warning; ``warnings.warn`` by default.

    Raises:
        ConfigError: the file exists, and is no trace or ``force`` is not given, or cannot be written; found at once.
    """

    @typed
    def __init__(
        self,
        path: str | Path,
        *,
        force: bool = False,
        labels: Mapping[str, str] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.path = new_file(path, "trace", _owns, force=force)
        self._labels = dict(labels or {})
        self._warn = warn or partial(warnings.warn, category=DraftreeWarning, stacklevel=2)
        self._file: IO[bytes] | None = None
        self._run = b""
        self._numbers: dict[Request, int] = {}
        self._count = itertools.count()
        self._stopped = False

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the trace; what the engine does from now on is not traced."""
        self._stop(None)

    def begin(self, setup: Setup) -> None:
        """Describe the run.

        Raises:
            ConfigError: the trace is another engine's already.
        """
        if self._run:
            raise ConfigError(f"trace '{self.path}' belongs to another engine: make a Trace for each")
        self._run = encode(run_record(setup, self._labels))

    def opened(self, request: EngineRequest) -> None:
        """Write where a request begins."""
        self._numbers[request] = next(self._count)
        self._write([request_record(request, self._numbers[request])])

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        """Write one line for each request."""
        self._write(step_record(outcome, self._numbers[outcome.request]) for outcome in outcomes)

    def closed(self, request: EngineRequest) -> None:
        """Write how a request ended."""
        number = self._numbers.pop(request, None)
        if number is not None:
            self._write([end_record(request, number)])

    def _write(self, records: Iterable[Record]) -> None:
        if self._stopped:
            return
        lines = b"".join(map(encode, records))
        try:
            if self._file is None:
                self._file = self.path.open("wb")
                lines = self._run + lines
            self._file.write(lines)
            self._file.flush()
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError | None) -> None:
        if self._stopped:
            return
        self._stopped = True
        try:
            if self._file is not None:
                self._file.close()  # after a failed write it tries again what it still holds, and fails again
        except OSError as late:
            error = error or late
        if error is not None:
            self._warn(f"cannot write trace '{self.path}' any further ({error.strerror or error}): decoding goes on")


@typed
def read_trace(path: str | Path) -> Iterator[Record]:
    """Read a trace, line by line.

    The last line may be torn, where the writer was interrupted: it is left out with one warning.

    Yields:
        first a RunRecord; then, for each request, a RequestRecord, its StepRecords and, unless it was interrupted, an
        EndRecord. The lines of requests that ran together alternate.

    Raises:
        TraceError: at the first record: no such file, no trace, or one of another version; later: a corrupt line.
    """
    path = user_path(path)
    lengths: dict[int, int] = {}
    try:
        lines = read_lines(path)
        yield _read_run(path, next(lines, b""))
        for number, line in enumerate(lines, start=2):
            try:
                record = decode(line)
                _follow(record, lengths)
            except ValueError as error:
                if line.endswith(b"\n"):
                    raise _corrupt(path, number, error) from None
                torn = f"{path}, line {number}: torn, as the writer was interrupted: left out"
                warnings.warn(torn, DraftreeWarning, stacklevel=2)
                return
            yield record
    except OSError as error:
        raise TraceError(f"cannot read trace '{path}': {error.strerror}: name a file that --trace wrote") from None


def _read_run(path: Path, line: bytes) -> Record:
    version = _version_of(line)
    if version is None:
        raise TraceError(f"'{path}' is not a draftree trace: name a file that --trace wrote")
    if version != VERSION:
        raise TraceError(f"'{path}' is a trace of version {version} and this draftree reads {VERSION}: record it again")
    try:
        return decode(line)
    except ValueError as error:
        raise _corrupt(path, 1, error) from None


def _version_of(line: bytes) -> int | None:
    """The version of the trace whose first line this is; None: of no trace."""
    try:
        parsed = json.loads(line)
        found = parsed["version"] if (parsed["kind"], parsed["format"]) == ("run", FORMAT) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, int) else None


def _owns(path: Path) -> bool:
    """A file is a trace, or empty."""
    try:
        with path.open("rb") as file:
            line = file.readline(_LONGEST_RUN)
    except OSError:
        return False
    return not line or _version_of(line) is not None


_LONGEST_RUN = 1 << 20
"""Bytes of a first line."""


def _follow(record: Record, lengths: dict[int, int]) -> None:
    """Check that a record follows those before it; ``lengths`` has the tokens of every request that runs."""
    if isinstance(record, RunRecord):
        raise ValueError("a second run: a trace has one")
    if isinstance(record, RequestRecord):
        lengths[record.request] = record.prompt_length + 1
        return
    if record.request not in lengths:
        raise ValueError(f"request {record.request} is not running")
    if isinstance(record, EndRecord):
        del lengths[record.request]
        return
    if record.length != lengths[record.request]:
        raise ValueError(f"length {record.length} after {lengths[record.request]} tokens")
    lengths[record.request] += record.taken


def _corrupt(path: Path, number: int, why: ValueError) -> TraceError:
    return TraceError(
        f"'{path}', line {number} is corrupt ({why}): trace the run again, or cut the file before that line"
    )


def run_record(setup: Setup, labels: Mapping[str, str]) -> RunRecord:
    """The first line of an engine's trace; ``labels``: what the caller calls things."""
    can, made = setup.target.capabilities, setup.speculation
    return RunRecord(
        draftree=version("draftree"),
        date=setup.date,
        threads=can.threads,
        target={
            "name": can.name,
            "architecture": can.architecture,
            "parameters": can.parameters,
            "dtype": can.dtype,
            "weight_format": can.weight_format,
            "device": can.device,
            "engine": can.engine,
            "attention": can.attention,
            "max_length": can.max_length,
            "vocab_size": can.vocab_size,
            "eos_ids": sorted(can.eos_ids),
        },
        drafter=_describe(made.drafter),
        nodes=made.nodes,
        verification=made.scheme.name,
        candidates=made.scheme.candidates,
        labels={"drafter": made.drafter.name} | dict(labels),
    )


def request_record(request: EngineRequest, number: int) -> RequestRecord:
    """The line of a request that has been opened."""
    speculation = request.speculation
    return RequestRecord(
        request=number,
        prompt_length=request.prompt_length,
        prompt=tuple(request.ids[: request.prompt_length]),
        seed=request.seed,
        limit=request.limit,
        params=plain(request.params),
        drafter=speculation.drafter.name,
        nodes=speculation.nodes,
        verification=speculation.scheme.name,
        candidates=speculation.scheme.candidates,
        first=request.ids[request.prompt_length],
        prefill=request.stats.seconds.prefill,
    )


def step_record(outcome: Outcome, number: int) -> StepRecord:
    """The line of a step."""
    request, cost = outcome.request, outcome.step
    length = len(request.ids) - outcome.taken
    return StepRecord(
        request=number,
        step=request.stats.steps,
        length=length,
        root=request.ids[length - 1],
        tree=outcome.tree,
        expected=outcome.tree.expected_acceptance_length,
        path=tuple(outcome.path),
        tokens=tuple(outcome.tokens),
        taken=outcome.taken,
        batch=cost.batch,
        draft_passes=cost.draft_passes,
        seconds=StepSeconds(cost.draft, cost.verify, cost.other),
    )


def end_record(request: Request, number: int) -> EndRecord:
    """The line of a request that has been closed."""
    return EndRecord(request=number, finish_reason=request.finish_reason, stats=request.stats)


def _describe(thing: object) -> dict[str, Any]:
    """Class and settings of a drafter or policy; models by their names."""
    settings = [f.name for f in fields(thing) if f.repr] if is_dataclass(thing) else []
    return {"class": name_of(thing), **{name: _setting(getattr(thing, name)) for name in settings}}


def _setting(value: object) -> Any:
    can = getattr(value, "capabilities", None)
    if can is not None:
        return can.name
    if isinstance(value, tuple):
        return [_setting(x) for x in value]
    return _describe(value) if is_dataclass(value) else plain(value)
