"""Lines of results and the folder of a run."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PlainSerializer, TypeAdapter, ValidationError

from ..artifacts import append_line, first_error, make_folder, own_folder, read_bytes, read_lines, write_whole
from ..errors import ConfigError, DraftreeWarning
from .suites import Item

BINS = 20
"""Of draft probabilities, from 0 to 1."""
Short = Annotated[float, PlainSerializer(lambda value: float(f"{value:.6g}"))]
"""Written with 6 significant digits."""


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

    total: Annotated[Short, Field(gt=0)]
    prefill: Short | None = None
    draft: Short | None = None
    verify: Short | None = None
    other: Short | None = None


@dataclass(frozen=True, slots=True)
class StepColumns:
    """What each step of a turn did: columns of one length, and sums over them.

    Attributes:
        gained: tokens taken.
        accepted: nodes on the accepted path.
        nodes, depth: of the tree that was verified.
        expected: E(A) of the tree, root counted as 1.
        drafted_by_depth, accepted_by_depth: [d] nodes at depth d + 1 that were drafted, and accepted.
        accepted_entropies, rejected_entropies: nats, as in ``Stats``.
        reached_by_probability, accepted_by_probability: [BINS] nodes whose parent was accepted, by their draft
            probability, and those accepted of them.
        target_seconds, drafter_seconds: inside the passes of the target and of draft models and heads.
    """

    gained: list[int]
    accepted: list[int]
    nodes: list[int]
    depth: list[int]
    expected: list[Short]
    drafted_by_depth: list[int]
    accepted_by_depth: list[int]
    accepted_entropies: list[Short]
    rejected_entropies: list[Short]
    reached_by_probability: list[int]
    accepted_by_probability: list[int]
    target_seconds: Short
    drafter_seconds: Short


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer.

    Attributes:
        ids: its tokens, end-of-sequence included.
        finish: why it ended; None where a peer does not report it.
        passes: target passes after the prefill; a peer that drafts before its prefill has that pass in it; None: not
            known.
        steps: None for peers.
        drafted: for each token whether it was drafted and accepted; None for peers.
        pieces: the text that became final with each token; None for peers.
        first: tokens that were there when the prefill ended: more than one where the first draft is in it.
        layers: of beams, which the passes gave; None: they gave the answer's tokens.
        drafted_layers: of beams, which were drafted in all steps together; None: no beams, or not recorded.
        accepted_widths: of sampled beams: drafted ones that were accepted, in each verified layer; None: as above.
        cpu: seconds of processor time, of all threads of the process; None: not recorded.
    """

    prompt_tokens: int
    ids: Annotated[list[int], Field(min_length=1)]
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
    accepted_widths: list[int] | None = None
    cpu: Short | None = None


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One line: one contestant, one prompt.

    Attributes:
        prompt, category: the item's id and category.
        method: the contestant's label (``Entry.label``).
    """

    prompt: str
    category: str
    method: str
    drafter: str | None
    temperature: float
    seed: int
    turns: Annotated[list[Turn], Field(min_length=1)]

    @property
    def key(self) -> tuple[str, str]:
        """No other record of a run has it."""
        return self.prompt, self.method

    @property
    def tokens(self) -> int:
        return sum(len(t.ids) for t in self.turns)

    @property
    def seconds(self) -> float:
        return sum(t.seconds.total for t in self.turns)

    @property
    def rate(self) -> float:
        """Tokens a second, prefill included."""
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the prefill; None where the prefill's time is unknown, or nothing came after it."""
        prefills = [t.seconds.prefill for t in self.turns if t.seconds.prefill is not None]
        tokens, seconds = self.tokens - sum(t.first for t in self.turns), self.seconds - sum(prefills)
        return tokens / seconds if len(prefills) == len(self.turns) and tokens > 0 and seconds > 0 else None

    @property
    def passes(self) -> int | None:
        counts = [t.passes for t in self.turns]
        return None if None in counts else sum(c for c in counts if c is not None)

    @property
    def gained(self) -> int:
        """Tokens, or layers of beams, that these passes gave: our prefill gives one more."""
        return sum((t.layers or len(t.ids)) - (t.seconds.draft is not None) for t in self.turns)


RECORD_LINE: TypeAdapter[AnswerRecord] = TypeAdapter(AnswerRecord)
ITEM_LINE: TypeAdapter[Item] = TypeAdapter(Item)
"""A record, or an item, and its line of JSON; unknown keys are left out."""


CONFIG, PROMPTS, RESULTS, SUMMARY = "config.json", "prompts.jsonl", "results.jsonl", "summary.json"
FORMAT = "draftree-bench"
VERSION = 2
_MODELS = "models"
"""Of the configuration: contestant -> the models behind its answers, once they are loaded."""
_UNCOMPARED = ("command", "date", _MODELS)
"""What a run that goes on may have otherwise, or does not know yet."""


def folder_of(config: Mapping[str, Any]) -> Path:
    """Where a run is kept for which no folder is named: the same command finds it again, another has another one."""
    digest = hashlib.sha256(json.dumps(_compared(config), sort_keys=True).encode()).hexdigest()[:8]
    return Path("runs", f"{Path(config['suite']).stem}-{digest}")


def _compared(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _UNCOMPARED}


class RunFolder:
    """A run's folder, made if it is not there; its records are in the order of writing.

    Where there are none yet, the configuration that is there gives way.

    Args:
        config: what the run is made of, as JSON can hold it.
        items: its prompts, which are kept beside the answers.

    Raises:
        ConfigError: the folder holds answers of a run of another configuration, or something else.
        RunError: it cannot be written.
    """

    def __init__(self, path: str | Path, config: Mapping[str, Any], items: Sequence[Item]) -> None:
        self.path = own_folder(path, "--out", CONFIG)
        self._whole = 0  # bytes of the lines of its records
        self._config = {"format": FORMAT, "version": VERSION, **json.loads(json.dumps(config))}
        make_folder(self.path)
        stored = read_config(self.path) if (self.path / CONFIG).exists() else self._config
        self.records = read_results(self.path)
        if self.records:
            _check_same(self.path, _compared(stored), _compared(self._config))
            self._config = stored
            self._whole = sum(len(line) for line in read_lines(self.path / RESULTS) if line.endswith(b"\n"))
        else:
            _write_json(self.path / CONFIG, self._config)
        write_whole(self.path / PROMPTS, b"".join(ITEM_LINE.dump_json(item) + b"\n" for item in items))

    def use_models(self, used: Mapping[str, str]) -> None:
        """Keep which models are behind the answers to come, by contestant.

        Raises:
            ConfigError: answers that are there have others behind them.
        """
        known = self._config.get(_MODELS, {})
        if self.records:
            _check_same(self.path, {_MODELS: known}, {_MODELS: {**known, **used}})
        self._config[_MODELS] = {**known, **used}
        _write_json(self.path / CONFIG, self._config)

    def append(self, record: AnswerRecord) -> None:
        """Write one line.

        Raises:
            RunError: it cannot be written; the lines before it are kept.
        """
        line = RECORD_LINE.dump_json(record) + b"\n"
        append_line(self.path / RESULTS, line, self._whole)
        self._whole += len(line)
        self.records.append(RECORD_LINE.validate_json(line))  # with the digits that a later report reads

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json`` in one piece, or raise RunError."""
        _write_json(self.path / SUMMARY, summary)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def _check_same(path: Path, stored: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Check that two configurations of a run are one.

    Raises:
        ConfigError: they are not.
    """
    before, now = _flat(stored), _flat(config)
    for key in {**now, **before}:
        old, new = before.get(key), now.get(key)
        if old != new:
            raise ConfigError(
                f"{path} holds a run with {key} {old} and this one has {new}: "
                "give --out another folder, or take that run's models and settings"
            )


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= {f"{key} {inner}": x for inner, x in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def read_config(path: Path) -> dict[str, Any]:
    """What a run is made of.

    Raises:
        ConfigError: there is no run, or one of another version.
    """
    try:
        config = json.loads(read_bytes(path / CONFIG))
        if (config["format"], config["version"]) != (FORMAT, VERSION):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(
            f"no run in {path}: name a folder that 'draftree bench --out' of this version wrote"
        ) from None
    return dict(config)


def read_results(path: Path) -> list[AnswerRecord]:
    """The records of a run; a torn last line behind whole ones is left out.

    Raises:
        ConfigError: another line is corrupt.
    """
    file = path / RESULTS
    if not file.exists():
        return []
    records: list[AnswerRecord] = []
    for number, line in enumerate(read_lines(file), start=1):
        if records and not line.endswith(b"\n"):
            warnings.warn(f"{file}, line {number}: torn by an interruption: left out", DraftreeWarning, stacklevel=2)
            break
        try:
            records.append(RECORD_LINE.validate_json(line))
        except ValidationError as error:
            raise ConfigError(f"{file}, line {number} is corrupt ({first_error(error)}): take that line out") from None
    return records


def read_summary(path: Path) -> dict[str, Any]:
    """``summary.json``; empty where there is none yet."""
    try:
        return dict(json.loads(read_bytes(path / SUMMARY)))
    except (OSError, ValueError):
        return {}
