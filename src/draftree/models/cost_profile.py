"""Seconds of forward passes on this machine: measured and kept in a file, or by a table that ships (``costs/``)."""

from __future__ import annotations

import hashlib
import logging
import math
import platform
import re
import time
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Annotated, Any, Protocol

from annotated_types import MinLen

from ..artifacts import JsonFormat
from ..config import MAX_NODES, Count, Positive
from ..errors import ConfigError, DraftreeWarning, RunError
from ..tree import ROOT
from .base import Capabilities, LanguageModel, Nodes, Row, prefill
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
        self.write(profile_folder() / self.identity.file_name)

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
    path = profile_folder() / Identity.of(model).file_name
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


@dataclass(frozen=True, slots=True)
class Grid:
    """What to measure.

    Attributes:
        sizes: nodes a row and pass, the root included; ascends from 1.
        contexts: tokens before them.
        batches: rows a pass.
        repeats: passes of each kind in the two measurements of a curve, after one to warm up; the fastest counts, for
            other work only adds.
        patience: seconds. Sizes whose pass takes longer are left out, and contexts that take ``_READING`` times as
            long to read. The first size and the first context are always measured.
    """

    sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    repeats: int
    patience: float = math.inf

    def fitting(self, can: Capabilities) -> Grid:
        """The grid without sizes above half of the longest sequence, and with contexts that leave room for a pass.

        Of a model without trees passes over one token are left, and contexts leave room for all of them.
        """
        if can.no_trees:
            room = 2 * (1 + _MOST_MEASUREMENTS * self.half)
            contexts = tuple(sorted({max(1, min(context, can.max_length - room)) for context in self.contexts}))
            return replace(self, sizes=(1,), contexts=contexts)
        longest = can.max_length
        sizes = tuple(size for size in self.sizes if size == 1 or size <= longest // 2)
        return replace(self, sizes=sizes, contexts=tuple(sorted({min(c, longest - sizes[-1]) for c in self.contexts})))

    @property
    def half(self) -> int:
        """Passes of each size in one measurement."""
        return (self.repeats + 1) // 2

    def work(self, batch: int, context: int) -> int:
        """What a curve takes if the first two measurements agree, in tokens: reading the contexts, then passes."""
        return batch * context + (1 + 2 * self.half) * sum(_work(batch, size) for size in self.sizes)

    @property
    def all_work(self) -> int:
        return sum(self.work(batch, context) for batch in self.batches for context in self.contexts)

    def among(self, points: Iterable[Point]) -> list[Point]:
        """The curves that are the grid's."""
        return [
            point
            for point in points
            if point.batch in self.batches and point.context in self.contexts and set(point.sizes) <= set(self.sizes)
        ]


def _work(batch: int, size: int) -> int:
    """What a pass takes, in tokens: reading the weights takes about as long as computing so many."""
    return 4 + batch * size


_READING = 10
"""A context is measured while reading it takes at most the time of so many of the longest passes."""
_AGREE = 1.15
"""Two measurements agree where no time is more than so many times the other one."""
_MOST_MEASUREMENTS = 4

SHORT = Grid((1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32), (64, 512), (1,), 4, patience=0.5)
"""What is measured in idle time: some 120 passes."""
FULL = Grid((*range(1, 10), 12, 16, 17, 24, 32, 33, 48), (64, 1024), (1,), 4)
"""What ``draftree profile`` measures: by calculation 35 to 54 s, where a pass over 1 token takes 40 ms, over 32 300."""


class UnsteadyError(RunError):
    """No two measurements of a curve agree: the machine does other work."""


def measure(
    model: LanguageModel,
    grid: Grid,
    progress: Callable[[int], None] = lambda done: None,
    known: Sequence[Point] = (),
    keep: Callable[[Profile], None] = lambda profile: None,
) -> Profile:
    """Measure a model's passes. It must have no open rows.

    A curve, the passes of one batch and context, is measured twice, and again until two measurements agree in each size
    and no size takes less than a smaller one; the faster time of the two counts.

    Args:
        grid: as far as the model's longest sequence and its cache allow.
        progress: called after each timed pass with the ``Grid.work`` that is done, that of ``known`` included.
        known: curves that were measured before; they are not measured again.
        keep: called after each curve with all curves so far.

    Raises:
        UnsteadyError: no two of ``_MOST_MEASUREMENTS`` measurements agree.
    """
    can, shuffled = model.capabilities, Random(0)  # noqa: S311 - an order, not a secret
    points, grid = list[Point](), grid.fitting(can)
    known_points = {(point.batch, point.context): point for point in grid.among(known)}
    done = sum(grid.work(*place) for place in known_points)
    tokens = [(5 * i + 3) % can.vocab_size for i in range(grid.sizes[-1])]
    # Children of the last committed token: what any model takes in one pass, a draft head too.
    fans = {size: Nodes(tokens[:size], [ROOT] * size) for size in grid.sizes}
    for batch in grid.batches:
        contexts = [c for c in grid.contexts if model.holds([c + grid.sizes[-1]] * batch)] or grid.contexts[:1]
        model.reserve(batch, contexts[-1] + grid.sizes[-1])
        pace = 0.0
        for context in contexts:
            if context * pace > _READING * grid.patience:
                break
            if (point := known_points.get((batch, context))) is None:
                rows: list[Row] = []
                passes = _Passes(model, rows, fans, shuffled, partial(_report, progress, done + batch * context))
                try:
                    for b in range(batch):
                        rows.append(prefill(model, [(7 * i + b) % can.vocab_size for i in range(context)]))
                    times = passes.curve(grid, f"passes of {can.name} behind {context} tokens")
                finally:
                    for row in reversed(rows):
                        model.close(row)
                point = Point(batch, context, tuple(times), tuple(times.values()))
                done += grid.work(batch, context)
                progress(done)
            pace = min(seconds / size for size, seconds in zip(point.sizes, point.seconds, strict=True))
            points.append(point)
            keep(Profile(Identity.of(model), tuple(points)))
    return Profile(Identity.of(model), tuple(points))


def _report(progress: Callable[[int], None], before: int, done: int) -> None:
    progress(before + done)


@dataclass
class _Passes:
    """The timed passes of one curve.

    Passes of all sizes take turns, so that a slow moment of the machine falls on all of them, each time in another
    order: what a pass leaves in the processor's caches is no size's own cost. A pass over one token comes right behind
    another, as in AR decoding: behind one of another size llama.cpp builds its graph anew.
    """

    model: LanguageModel
    rows: Sequence[Row]
    fans: Mapping[int, Nodes]
    order: Random
    progress: Callable[[int], None]
    done: int = 0

    def curve(self, grid: Grid, what: str) -> dict[int, float]:
        """Seconds by size, by two measurements that agree (``measure``)."""
        warm = self._turn(grid.sizes)
        sizes = [size for size in grid.sizes if size == 1 or warm[size] <= grid.patience]
        measurements, fault = list[dict[int, float]](), ""
        for _ in range(_MOST_MEASUREMENTS):
            turns = [self._turn(sizes, counts=len(measurements) < 2) for _ in range(grid.half)]
            fastest = {size: min(turn[size] for turn in turns) for size in sizes}
            for former in measurements:
                if not (fault := _disagreement(former, fastest)):
                    return {size: min(former[size], fastest[size]) for size in sizes}
            measurements.append(fastest)
        raise UnsteadyError(
            f"{what} are not steady: {fault}, in {len(measurements)} measurements no two agree within "
            f"{_AGREE - 1:.0%}: end what else runs on this machine, and measure again"
        )

    def _turn(self, sizes: Sequence[int], counts: bool = True) -> dict[int, float]:
        """A pass of each size; ``counts``: it is among the ``Grid.work``."""
        seconds = dict[int, float]()
        for size in self.order.sample(sizes, len(sizes)):
            for _ in range(2 if size == 1 else 1):
                seconds[size] = _timed(self.model, self.rows, self.fans[size])
            self.done += counts * _work(len(self.rows), size)
            self.progress(self.done)
        return seconds


def _disagreement(one: Mapping[int, float], another: Mapping[int, float]) -> str:
    """Where two measurements, by ascending size, do not agree, or a size takes less than a smaller one; "": nowhere."""
    highest = 0.0, 0
    for size in one:
        less, more = sorted([one[size], another[size]])
        if more > _AGREE * less:
            return f"one over {size} took {1e3 * less:.1f} and {1e3 * more:.1f} ms"
        if _AGREE * less < highest[0]:
            return f"one over {highest[1]} took {1e3 * highest[0]:.1f} ms, one over {size} {1e3 * less:.1f} ms"
        highest = max(highest, (less, size))
    return ""


def _timed(model: LanguageModel, rows: Sequence[Row], fan: Nodes) -> float:
    """Seconds of a pass over the same nodes for each row, of which nothing is kept where rows branch."""
    began = time.perf_counter()
    model.extend(rows, [fan] * len(rows)).argmax([0])  # a score is there when the pass is over, on a GPU too
    seconds = time.perf_counter() - began
    for row in rows:
        model.commit(row, [0] if model.capabilities.no_trees else [])
    return seconds


_ESTIMATED: set[Identity] = set()
"""Of models that this process has no measured profile of and wanted one."""


def profile_of(model: Costed) -> Profile:
    """The kept profile of a model or, where none can be read, that of its tier's table: nobody waits for a measurement.

    ``measure_missing`` measures in idle time.
    """
    if (profile := load_profile(model)) is not None:
        return profile
    _ESTIMATED.add(Identity.of(model))
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


def measure_and_keep(model: LanguageModel, grid: Grid) -> Profile:
    """A new profile, measured with a progress bar and kept for later starts.

    Curves are kept as they are made, in a file beside the profile: where this is interrupted the next call goes on.
    """
    from ..progress import progress_reporter

    grid, identity = grid.fitting(model.capabilities), Identity.of(model)
    part = (profile_folder() / identity.file_name).with_suffix(".part")
    known = list[Point]()
    with suppress(OSError, ConfigError):
        known = grid.among(PROFILES.read(part).points)
    done = sum(grid.work(point.batch, point.context) for point in known)
    with progress_reporter(f"measuring passes of {model.capabilities.name}", grid.all_work, done) as report:
        profile = measure(model, grid, report, known, lambda profile: profile.write(part))
    profile.save()
    with suppress(OSError):
        part.unlink()
    return profile


def measure_missing(models: Iterable[LanguageModel], is_wanted: Callable[[], bool]) -> None:
    """Measure those models that started by a table; the next start uses it. For idle time.

    Args:
        is_wanted: somebody waits for the models now: what was measured so far of one is given up.
    """

    def go_on(_: int) -> None:
        if is_wanted():
            raise InterruptedError

    for model in models:
        if Identity.of(model) in _ESTIMATED:
            try:
                measure(model.measured, SHORT, go_on).save()
            except InterruptedError:
                return
            except UnsteadyError:
                continue  # a later idle time may be a quieter one
            except (RuntimeError, MemoryError) as error:  # its cache is too small, or memory is wanting
                logging.getLogger("draftree.models").warning("passes are not measured: %s", error)
            _ESTIMATED.discard(Identity.of(model))
