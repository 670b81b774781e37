"""The lines of a trace as typed records, and their JSON. Knows no files and no engine.

A record's fields are the keys of its line, beside ``kind``; ``docs/traces.md`` is the schema. Numbers have 9
significant digits, so that a float32 comes back exactly; what JSON has no number for is "Infinity", "-Infinity" or
"NaN".
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from .request import Level, Seconds, Stats
from .tree import ROOT, DraftTree

FORMAT = "draftree-trace"
VERSION = 1
"""Rises when a key changes its meaning or goes; new keys alone do not raise it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The first line: what decoded.

    Attributes:
        format, version: of the file.
        draftree, torch: versions.
        date: when the engine was built, ISO 8601, UTC.
        threads: CPU threads of torch.
        target: the target's name, architecture, parameters, dtype, numerics, device, attention, max_length, vocab_size,
            eos_ids.
        drafter: its class and settings, among them its policy's class and settings.
        nodes: node budget of one request's tree at one step.
        verification: how target logits turned into accepted tokens.
        candidates: how tokens came out of the draft distribution: "coupled", "plain" or "drawn"; None: not recorded.
        labels: the drafter's name, and what the caller calls things, such as the method.
    """

    format: str = FORMAT
    version: int = VERSION
    draftree: str
    torch: str
    date: str
    threads: int
    target: Mapping[str, Any]
    drafter: Mapping[str, Any]
    nodes: int
    verification: str
    candidates: str | None = None
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request begins.

    Attributes:
        request: its number, from 0 in order of opening.
        prompt_length: tokens of the prompt.
        prompt: their ids.
        seed: the seed in use.
        limit: most tokens to generate.
        params: values of its ``SamplingParams``; processors and criteria by their names.
        first: the token that the prefill gave.
        prefill: seconds of the prefill, drafter included.
    """

    request: int
    prompt_length: int
    prompt: tuple[int, ...]
    seed: int
    limit: int
    params: Mapping[str, Any]
    first: int
    prefill: float


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Wall-clock seconds of one step, shared by its requests.

    Attributes:
        draft: proposing trees.
        verify: the target's pass, the draws and their transfer to the host.
        other: commits, text, bookkeeping.
        learn: the drafter's learning of the outcome (``Stats`` books it as drafting).
    """

    draft: float
    verify: float
    other: float
    learn: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of one request.

    Attributes:
        request: its number.
        step: the step's number within the request, from 1.
        length: tokens before the step, prompt included: the root's position is ``length - 1``.
        root: token id of the root.
        tree: the tree that was verified.
        expected: its expected acceptance length, root counted as 1.
        path: accepted nodes in order, by number.
        tokens: what the verification gave: the accepted tokens and the target's own.
        taken: how many of them the request took before it ended.
        batch: requests in the step.
        draft_passes: drafter model passes of the step, for all its requests.
        seconds: of the step, for all its requests.

    Raises:
        ValueError: the path is not one of the tree, or the counts do not fit it.
    """

    request: int
    step: int
    length: int
    root: int
    tree: DraftTree
    expected: float
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    taken: int
    batch: int
    draft_passes: int
    seconds: StepSeconds

    def __post_init__(self) -> None:
        above = (ROOT, *self.path[:-1]) if self.path else ()
        inside = all(0 <= n < len(self.tree) for n in self.path)
        if not inside or tuple(self.tree.parents[list(self.path)].tolist()) != above:
            raise ValueError(f"path {list(self.path)} does not lead down the tree")
        if not 1 <= self.taken <= len(self.tokens) == len(self.path) + 1:
            raise ValueError(f"{self.taken} taken of {len(self.tokens)} tokens after a path of {len(self.path)} nodes")

    @property
    def accepted(self) -> Tensor:
        """[N] bool: the node is on the accepted path."""
        mask = torch.zeros(len(self.tree), dtype=torch.bool)
        mask[list(self.path)] = True
        return mask

    @property
    def reached(self) -> Tensor:
        """[N] bool: the node's parent is the root or was accepted, so the target judged the node itself."""
        return torch.cat([self.accepted, torch.tensor([True])])[self.tree.parents]  # ROOT reads the last


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """A request ends.

    Attributes:
        request: its number.
        finish_reason: "eos", "stop", "length" or "criteria"; None: it was left early.
        stats: what was measured.
    """

    request: int
    finish_reason: str | None
    stats: Stats


Record = RunRecord | RequestRecord | StepRecord | EndRecord
KINDS: dict[str, type[Record]] = {
    "run": RunRecord,
    "request": RequestRecord,
    "step": StepRecord,
    "end": EndRecord,
}
_NAMES = {record: kind for kind, record in KINDS.items()}
_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def encode(record: Record) -> bytes:
    """The record's line, newline included."""
    return _JSON.encode({"kind": _NAMES[type(record)], **plain(record)}).encode() + b"\n"


def plain(value: Any) -> Any:
    """What JSON can hold of a value: dataclasses by their public fields, functions and other objects by their name."""
    if isinstance(value, float):
        return _number(value)
    if value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, Tensor):
        return [_number(x) for x in value.tolist()] if value.is_floating_point() else value.tolist()
    if isinstance(value, (tuple, list)):
        return [plain(x) for x in value]
    if isinstance(value, Mapping):
        return {str(k): plain(x) for k, x in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.repr}
    return name_of(value)


def name_of(value: object) -> str:
    """A function's name, or that of an object's class."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _number(x: float) -> float | str:
    if math.isfinite(x):
        return float(f"{x:.9g}")
    return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"


def decode(line: Mapping[str, Any]) -> Record:
    """The record of a parsed line; keys that it does not know are left out.

    Raises:
        ValueError: it is not one.
    """
    kind = line.get("kind")
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: expected one of {', '.join(KINDS)}")
    try:
        record: Record = _known(
            KINDS[kind], {key: _READ[key](value) if key in _READ else value for key, value in line.items()}
        )
    except KeyError as error:
        raise ValueError(f"{kind} without {error}") from None
    except (TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{kind}: {error}") from None
    return record


def _known(record: type[Any], values: Mapping[str, Any]) -> Any:
    names = {f.name for f in fields(record)}
    return record(**{key: value for key, value in values.items() if key in names})


def _ids(values: list[int]) -> tuple[int, ...]:
    return tuple(map(operator.index, values))


def _tree(columns: Mapping[str, Any]) -> DraftTree:
    tokens, parents, depths = (torch.tensor(columns[key], dtype=torch.int64) for key in ("tokens", "parents", "depths"))
    paths, entropies = (torch.tensor([float(x) for x in columns[key]]) for key in ("path_logprobs", "entropies"))
    found = columns.get("origins")
    origins = None if found is None else torch.tensor(found, dtype=torch.int64)
    return DraftTree(tokens, parents, depths, paths, entropies, origins=origins)


def _stats(values: Mapping[str, Any]) -> Stats:
    entropies = {key: [float(x) for x in values[key]] for key in ("accepted_entropies", "rejected_entropies")}
    stats: Stats = _known(Stats, {**values, **entropies, "expected": float(values["expected"])})
    stats.seconds = _known(Seconds, values["seconds"])
    stats.levels = [_known(Level, level) for level in values.get("levels", [])]
    return stats


def _seconds(values: Mapping[str, float]) -> StepSeconds:
    seconds: StepSeconds = _known(StepSeconds, values)
    return seconds


_READ: dict[str, Callable[[Any], Any]] = {
    "prompt": _ids,
    "path": _ids,
    "tokens": _ids,
    "tree": _tree,
    "expected": float,
    "prefill": float,
    "seconds": _seconds,
    "stats": _stats,
}
"""How the value of each key is read, where it is not taken as it is."""
