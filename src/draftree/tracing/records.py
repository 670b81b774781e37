"""The lines of a trace as typed records, and their JSON. Knows no files and no engine.

A record's fields are the keys of its line; ``docs/traces.md`` is the schema. Numbers have 9 significant digits, so
that a float32 comes back exactly; what JSON has no number for is "Infinity", "-Infinity" or "NaN".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, GetCoreSchemaHandler, GetPydanticSchema, Strict, TypeAdapter, ValidationError
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_after_validator_function

from ..artifacts import first_error
from ..request import Stats
from ..tree import ROOT, DraftTree

FORMAT = "draftree-trace"
VERSION = 3
"""Rises when a key changes its meaning or goes; new keys alone do not raise it."""


Whole = Annotated[int, Strict(), Field(ge=-(2**63), lt=2**63)]
"""A JSON integer of 64 bits; text and fractions are errors."""


@dataclass(frozen=True, slots=True)
class _Columns:
    """A draft tree as it is written."""

    tokens: list[Whole]
    parents: list[Whole]
    depths: list[Whole]
    path_logprobs: list[float]
    entropies: list[float]
    part: Whole = 0


def _tree(columns: _Columns) -> DraftTree:
    c = columns
    return DraftTree.of(c.tokens, c.parents, c.depths, c.path_logprobs, c.entropies, None, c.part)


def _tree_schema(_: object, schema_of: GetCoreSchemaHandler) -> CoreSchema:
    return no_info_after_validator_function(_tree, schema_of(_Columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The first line: what decoded.

    Attributes:
        draftree: its version.
        date: when the engine was built, ISO 8601, UTC.
        target: the target's name, architecture, parameters, dtype, weight format, device, engine, attention,
            max_length, vocab_size, eos_ids.
        drafter: its class and settings, among them its policy's class and settings.
        nodes: node budget of one request's tree at one step.
        candidates: how tokens came out of the draft distribution: "coupled", "plain" or "drawn"; None: not recorded.
        labels: the drafter's name, and what the caller calls things, such as the method.
    """

    kind: Literal["run"] = "run"
    format: str = FORMAT
    version: Whole = VERSION
    draftree: str
    date: str
    threads: Whole
    target: Mapping[str, Any]
    drafter: Mapping[str, Any]
    nodes: Whole
    verification: str
    candidates: str | None = None
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request begins.

    Attributes:
        request: its number, from 0 in order of opening.
        prompt: token ids.
        limit: most tokens to generate.
        params: values of its ``SamplingParams``; processors and criteria by their names.
        drafter, nodes, verification, candidates: its own, by name; None: not recorded.
        first: the token that the prefill gave.
        prefill: seconds of the prefill, drafter included.
    """

    kind: Literal["request"] = "request"
    request: Whole
    prompt_length: Whole
    prompt: tuple[Whole, ...]
    seed: Whole
    limit: Whole
    params: Mapping[str, Any]
    drafter: str | None = None
    nodes: Whole | None = None
    verification: str | None = None
    candidates: str | None = None
    first: Whole
    prefill: float


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Wall-clock seconds of one step, as in ``StepCost``."""

    draft: float
    verify: float
    other: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of one request.

    Attributes:
        step: the step's number within the request, from 1.
        length: tokens before the step, prompt included: the root's position is ``length - 1``.
        root: token id of the root.
        expected: the tree's expected acceptance length, root counted as 1.
        path, tokens, taken: as in ``Outcome``.
        batch: requests in the step.
        draft_passes, seconds: of the step, for all its requests.

    Raises:
        ValueError: the path is not one of the tree, or the counts do not fit it.
    """

    kind: Literal["step"] = "step"
    request: Whole
    step: Whole
    length: Whole
    root: Whole
    tree: Annotated[DraftTree, GetPydanticSchema(_tree_schema)]
    expected: float
    path: tuple[Whole, ...]
    tokens: tuple[Whole, ...]
    taken: Whole
    batch: Whole
    draft_passes: Whole
    seconds: StepSeconds

    def __post_init__(self) -> None:
        above = (ROOT, *self.path[:-1]) if self.path else ()
        inside = all(0 <= n < len(self.tree) for n in self.path)
        if not inside or tuple(self.tree.parents[list(self.path)].tolist()) != above:
            raise ValueError(f"path {list(self.path)} does not lead down the tree")
        if not 1 <= self.taken <= len(self.tokens) == len(self.path) + 1:
            raise ValueError(f"{self.taken} taken of {len(self.tokens)} tokens after a path of {len(self.path)} nodes")

    @property
    def accepted(self) -> NDArray[np.bool_]:
        """[N] bool: the node is on the accepted path."""
        mask = np.zeros(len(self.tree), np.bool_)
        mask[list(self.path)] = True
        return mask

    @property
    def reached(self) -> NDArray[np.bool_]:
        """[N] bool: the node's parent is the root or was accepted, so the target judged the node itself."""
        reached: NDArray[np.bool_] = np.append(self.accepted, True)[self.tree.parents]
        return reached  # ROOT reads the last


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """A request ends; ``finish_reason`` is as in ``Request``, or None when it was left early."""

    kind: Literal["end"] = "end"
    request: Whole
    finish_reason: str | None
    stats: Stats


Record = RunRecord | RequestRecord | StepRecord | EndRecord
_RECORD: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])
_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def encode(record: Record) -> bytes:
    """The record's line, newline included."""
    return _JSON.encode(plain(record)).encode() + b"\n"


def decode(line: bytes) -> Record:
    """The record of a line; keys that it does not know are left out.

    Raises:
        ValueError: it is not one; the message names the key.
    """
    try:
        return _RECORD.validate_json(line)
    except ValidationError as error:
        raise ValueError(first_error(error)) from None


def plain(value: Any) -> Any:
    """What JSON can hold of a value: dataclasses by their public fields, functions and other objects by their name."""
    if isinstance(value, float):
        return _number(value)
    if value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
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
