"""Seconds of forward passes on this machine: measured and kept in a file, or by a table that ships (``costs/``)."""

from __future__ import annotations

import hashlib
import platform
import re
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Protocol

from annotated_types import MinLen

from ..artifacts import JsonFormat
from ..config import MAX_NODES, Count, Positive
from ..errors import ConfigError, DraftreeWarning, RunError
from .base import Capabilities
from .cost_table import shipped_table


class Costed(Protocol):
    """What passes cost is known of: a model, loaded or not (``UnloadedModel``)."""

    @property
    def capabilities(self) -> Capabilities: ...


@dataclass(frozen=True, slots=True)
class Identity:
    """What a profile depends on (``Capabilities``); ``device`` is the name of what computes."""

    model: str
    architecture: str
    parameters: int
    weight_format: str
    dtype: str
    attention: str
    runner: str
    device: str
    engine: str
    tier: str
    threads: int

    @classmethod
    def of(cls, model: Costed) -> Identity:
        can = model.capabilities
        here: dict[str, Any] = {"model": can.name, "device": can.accelerator or processor()}
        return cls(**{each.name: here.get(each.name) or getattr(can, each.name) for each in fields(cls)})

    @property
    def file_name(self) -> str:
        digest = hashlib.sha256("\n".join(map(str, astuple(self))).encode()).hexdigest()[:10]
        return f"{re.sub(r'[^A-Za-z0-9.-]+', '-', self.model)[-60:]}-{digest}.json"

    @property
    def path(self) -> Path:
        """Of the file that the profile is kept in."""
        return profile_folder() / self.file_name


@cache
def processor() -> str:
    try:
        model_line = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model_line = None
    return model_line[1].strip() if model_line else platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class Point:
    """One measured curve: ``seconds[i]`` is the fastest of passes over ``sizes[i]`` nodes in each of ``batch`` rows.

    Raises:
        ValueError: the sizes do not ascend from 1, or are not as many as the seconds.
    """

    batch: Count
    context: Count
    sizes: tuple[int, ...]
    seconds: tuple[Positive, ...]

    def __post_init__(self) -> None:
        ascend = self.sizes[:1] == (1,) and list(self.sizes) == sorted(set(self.sizes))
        if len(self.sizes) != len(self.seconds) or not ascend:
            raise ValueError(f"{len(self.seconds)} times of sizes {self.sizes}")

    def at(self, tokens: float) -> float:
        """Seconds over ``tokens`` nodes: linear between the measured sizes, and beyond them as from 1 to the last."""
        sizes, seconds = self.sizes, self.seconds
        slope = (seconds[-1] - seconds[0]) / max(1, sizes[-1] - sizes[0])
        return _interpolated(tokens, sizes, seconds) + max(0.0, slope) * max(0.0, tokens - sizes[-1])


def _interpolated(x: float, places: Sequence[float], values: Sequence[float]) -> float:
    """The value at x: linear between the places, and beyond them that of the nearest; ``np.interp`` takes longer."""
    above = bisect_left(places, x)
    if above in (0, len(places)):
        return values[above and -1]
    (low, high), (first, last) = places[above - 1 : above + 1], values[above - 1 : above + 1]
    return first + (last - first) * (x - low) / (high - low)


def _between(curves: Sequence[Point], tokens: float, context: int) -> float:
    """Seconds over so many nodes a row behind a context, by the curves of one batch size in the order of theirs."""
    return _interpolated(context, [curve.context for curve in curves], [curve.at(tokens) for curve in curves])


@dataclass(frozen=True, slots=True)
class Profile:
    """Pass times of one model on one machine: curves over nodes, one for each batch size and context."""

    identity: Identity
    points: Annotated[tuple[Point, ...], MinLen(1)]

    def seconds(self, nodes: float, context: int, batch: int = 1) -> float:
        """Seconds of a pass over ``nodes`` nodes in each of ``batch`` rows behind ``context`` tokens.

        Linear in the context between the measured ones. Rows of a batch size that was not measured count as more nodes
        of the next smaller one, and each reads its own keys and values: what a pass over one token takes more behind
        the context than behind the shortest one.
        """
        size = max((p.batch for p in self.points if p.batch <= batch), default=min(p.batch for p in self.points))
        curves = sorted((p for p in self.points if p.batch == size), key=lambda p: p.context)
        seconds = _between(curves, nodes * batch / size, context)
        if batch > size:
            reading = _between(curves, 1, context) - curves[0].at(1)
            seconds += (batch / size - 1) * max(0.0, reading)
        return seconds

    def most_nodes(self, times: float) -> int:
        """Most nodes, up to ``MAX_NODES``, whose pass takes at most so many times one without them; at least 1."""
        return max(1, bisect_right(range(MAX_NODES), times * self.seconds(1, 1), key=lambda n: self.seconds(2 + n, 1)))

    def save(self) -> None:
        """Keep it in the cache directory for later starts, with a warning where it cannot be written."""
        self.write(self.identity.path)

    def write(self, path: Path) -> None:
        """As ``save``, into a file of this name."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            PROFILES.write(path, self)
        except (OSError, RunError) as error:
            _warn(f"the profile is not kept: {error}: set XDG_CACHE_HOME")


PROFILES = JsonFormat("draftree-profile", 6, "profile", "measure it again with 'draftree profile'", content=Profile)


def profile_folder() -> Path:
    """Where measured profiles are kept."""
    import platformdirs

    return platformdirs.user_cache_path("draftree") / "profiles"


def load_profile(model: Costed) -> Profile | None:
    """The kept profile of a model; None: there is none, or, with a warning, none that can be read."""
    path = Identity.of(model).path
    try:
        return PROFILES.read(path)
    except FileNotFoundError:
        return None
    except ConfigError as error:
        _warn(f"the profile {path} cannot be read: {error}")
        return None


@cache
def _warn(message: str) -> None:
    """Warn of measured times that are not used or not kept, once: a profile is read for several choices."""
    warnings.warn(message, DraftreeWarning, stacklevel=3)


ESTIMATED: set[Identity] = set()
"""Of models that this process has no measured profile of and wanted one."""


def profile_of(model: Costed) -> Profile:
    """The kept profile of a model or, where none can be read, that of its tier's table: nobody waits for a measurement.

    ``measuring.measure_missing`` measures in idle time.
    """
    if (profile := load_profile(model)) is not None:
        return profile
    ESTIMATED.add(Identity.of(model))
    return estimated(model)


def estimated(model: Costed) -> Profile:
    """What the table of its tier gives for a model."""
    can = model.capabilities
    table, sizes = shipped_table(can.tier), (*range(1, 18), 20, 24, 28, 32, 40, 48, 64, MAX_NODES)
    points = (
        Point(1, context, sizes, tuple(table.seconds(can, n, context) for n in sizes))
        for context in sorted({1, can.max_length})  # between them it is linear, as the table
    )
    return Profile(Identity.of(model), tuple(points))
