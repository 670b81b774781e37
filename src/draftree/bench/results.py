"""Lines of results and the folder of a run."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ..artifacts import user_path, write_whole
from ..errors import ConfigError, DraftreeWarning, RunError
from .suites import Item

BINS = 20
"""Of draft probabilities, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of one turn; None where a peer does not report it.

    Attributes:
        total: from the prompt's token ids to the answer's.
        prefill: until the first token is there; with transformers' assisted decoding its first draft is in it.
        draft: proposing trees.
        verify: the target's passes, the draws and their transfer to the host.
        other: the rest of the total.
    """

    total: float
    prefill: float | None = None
    draft: float | None = None
    verify: float | None = None
    other: float | None = None


@dataclass(frozen=True, slots=True)
class StepColumns:
    """What each step of a turn did: columns of one length, and sums over them.

    Attributes:
        gained: tokens taken.
        accepted: nodes on the accepted path.
        nodes: nodes verified.
        depth: depth of the tree.
        expected: E(A) of the tree, root counted as 1.
        drafted_by_depth, accepted_by_depth: [d] nodes at depth d + 1 that were drafted, and accepted.
        accepted_entropies, rejected_entropies: nats, as in ``Stats``.
        reached_by_probability, accepted_by_probability: [BINS] nodes whose parent was accepted, by their draft
            probability, and those accepted of them.
        draft_passes: passes of a draft model.
        target_seconds, drafter_seconds: inside the passes of the target and of draft models and heads.
    """

    gained: list[int]
    accepted: list[int]
    nodes: list[int]
    depth: list[int]
    expected: list[float]
    drafted_by_depth: list[int]
    accepted_by_depth: list[int]
    accepted_entropies: list[float]
    rejected_entropies: list[float]
    reached_by_probability: list[int]
    accepted_by_probability: list[int]
    draft_passes: int
    target_seconds: float
    drafter_seconds: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer.

    Attributes:
        prompt_tokens: tokens before it.
        ids: its tokens, end-of-request included.
        text: its text.
        finish: why it ended; None where a peer does not report it.
        seconds: what it took.
        passes: target passes after the prefill; a peer that drafts before its prefill has that pass in it; None: not
            known.
        steps: None for peers.
        drafted: for each token whether it was drafted and accepted; None for peers.
        pieces: the text that became final with each token; None for peers.
        first: tokens that were there when the prefill ended: more than one where the first draft is in it.
        layers: of beams, which the passes gave; None: they gave the answer's tokens.
        drafted_layers: of beams, which were drafted in all steps together; None: no beams, or not recorded.
    """

    prompt_tokens: int
    ids: list[int]
    text: str
    finish: str | None
    seconds: Parts
    passes: int | None
    steps: StepColumns | None = None
    drafted: list[int] | None = None
    pieces: list[str] | None = None
    first: int = 1
    layers: int | None = None
    drafted_layers: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One line: one contestant, one prompt, one repeat.

    Attributes:
        prompt, category: the item's id and category.
        method: the contestant's label (``Entry.label``).
        drafter, temperature: its own.
        repeat: from 0.
        seed: of sampling.
        turns: the answers, in order.
        peak_memory: most bytes in use while it decoded: of the accelerator, or resident bytes of the whole process, the
            models of all contestants included; None where the system does not report it.
        joules: energy that the accelerator, or the processor packages, took while it decoded; None: no meter.
    """

    prompt: str
    category: str
    method: str
    drafter: str | None
    temperature: float
    repeat: int
    seed: int
    turns: list[Turn]
    peak_memory: int | None = None
    joules: float | None = None

    @property
    def key(self) -> tuple[str, int, str]:
        """No other record of a run has it."""
        return self.prompt, self.repeat, self.method

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(len(t.ids) for t in self.turns)

    @property
    def seconds(self) -> float:
        """All of the time."""
        return sum(t.seconds.total for t in self.turns)

    @property
    def rate(self) -> float:
        """Tokens a second, prefill included."""
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the prefill; None where the prefill's time is unknown, or nothing came after it."""
        prefills = [t.seconds.prefill for t in self.turns]
        if any(p is None for p in prefills):
            return None
        seconds = self.seconds - sum(p for p in prefills if p is not None)
        tokens = self.tokens - sum(t.first for t in self.turns)
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    @property
    def passes(self) -> int | None:
        """Target passes after the prefills."""
        counts = [t.passes for t in self.turns]
        return None if None in counts else sum(c for c in counts if c is not None)

    @property
    def gained(self) -> int:
        """Tokens, or layers of beams, that these passes gave: our prefill gives one more."""
        return sum((t.layers or len(t.ids)) - (t.seconds.draft is not None) for t in self.turns)

    @property
    def drafted_layers(self) -> int:
        """Layers of beams that were drafted, as far as it is recorded."""
        return sum(t.drafted_layers or 0 for t in self.turns)

    @property
    def ids(self) -> list[list[int]]:
        """Of every turn."""
        return [t.ids for t in self.turns]


def encode(record: AnswerRecord) -> bytes:
    """A line of the file; floats with 6 significant digits, but the temperature as it is: it is part of a name."""
    line = {**_short(asdict(record)), "temperature": record.temperature}
    return _line(line).encode() + b"\n"


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"))


def decode(line: Mapping[str, Any]) -> AnswerRecord:
    """The record of a parsed line; keys that it does not know are left out.

    Raises:
        ValueError: it is not one.
    """
    try:
        turns = [_turn(turn) for turn in line["turns"]]
        record: AnswerRecord = _known(AnswerRecord, {**line, "turns": turns})
        if not turns or not all(t.ids and t.seconds.total > 0 for t in turns):
            raise ValueError("no turns, or one without tokens or time")
    except KeyError as error:
        raise ValueError(f"no {error}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None
    return record


def _turn(values: Mapping[str, Any]) -> Turn:
    steps = values.get("steps")
    read = {"seconds": _known(Parts, values["seconds"]), "steps": None if steps is None else _known(StepColumns, steps)}
    turn: Turn = _known(Turn, {**values, **read})
    return turn


def _known(kind: type[Any], values: Mapping[str, Any]) -> Any:
    names = {f.name for f in fields(kind)}
    return kind(**{key: value for key, value in values.items() if key in names})


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(x) for key, x in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_short(x) for x in value]
    return value


CONFIG, PROMPTS, RESULTS, SUMMARY = "config.json", "prompts.jsonl", "results.jsonl", "summary.json"
FORMAT = "draftree-bench"
VERSION = 2
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
        items: its prompts, which are kept beside the answers.

    Raises:
        ConfigError: the folder holds a run of another configuration, or something else.
        RunError: it cannot be written.
    """

    def __init__(self, path: str | Path, config: Mapping[str, Any], items: Sequence[Item]) -> None:
        self.path, self._items = user_path(path), items
        self._config = {"format": FORMAT, "version": VERSION, **json.loads(json.dumps(config))}
        self._file: IO[bytes] | None = None
        self.records: list[AnswerRecord] = []
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
        """Write the configuration and the prompts, and open the results, cut behind the last whole line."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not (self.path / CONFIG).exists():
                write_whole(self.path / PROMPTS, "".join(f"{_line(asdict(item))}\n" for item in self._items))
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

    def append(self, record: AnswerRecord) -> None:
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
        ConfigError: there is no run, or one of another version.
    """
    try:
        config = json.loads((path / CONFIG).read_text())
        if config["format"] != FORMAT or not isinstance(config["version"], int):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"no run in {path}: name a folder that 'draftree bench --out' wrote") from None
    if config["version"] != VERSION:
        raise ConfigError(
            f"{path} is a run of version {config['version']} and this draftree reads {VERSION}: run it again"
        )
    return dict(config)


def read_items(path: Path) -> list[Item]:
    """The prompts of a run.

    Raises:
        ConfigError: they are not there, or are corrupt.
    """
    try:
        rows = [json.loads(line) for line in (path / PROMPTS).read_text().splitlines()]
        return [Item(**{**row, "turns": tuple(row["turns"])}) for row in rows]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"no prompts in {path}: name a folder that 'draftree bench --out' wrote") from None


def read_results(path: Path) -> list[AnswerRecord]:
    """The records of a run; a torn last line is left out.

    Raises:
        ConfigError: another line is corrupt, or two are about the same.
    """
    file = path / RESULTS
    if not file.exists():
        return []
    records: dict[tuple[str, int, str], AnswerRecord] = {}
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
