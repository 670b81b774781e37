"""Seconds of forward passes on this machine: measured and kept in a file, or by a table that ships (``costs/``)."""

from __future__ import annotations

import hashlib
import math
import platform
import re
import time
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Annotated, Any, Protocol

from annotated_types import Ge, MinLen

from ..artifacts import JsonFormat
from ..config import MAX_NODES, Count, Positive
from ..errors import ConfigError, DraftreeWarning, RunError
from ..tree import ROOT
from .base import Capabilities, LanguageModel, Nodes, Row, prefill


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
        """That of a model on this machine."""
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
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


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
        path = profile_folder() / self.identity.file_name
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
        repeats: passes of each kind, after one to warm up; the fastest counts, for other work only adds.
        patience: seconds; sizes whose pass takes longer are left out, but the first, and so are contexts, but the
            first, that take ``_READING`` times as long to read.
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
            room = 2 * (self.repeats + 1)
            contexts = tuple(sorted({max(1, min(context, can.max_length - room)) for context in self.contexts}))
            return replace(self, sizes=(1,), contexts=contexts)
        longest = can.max_length
        sizes = tuple(size for size in self.sizes if size == 1 or size <= longest // 2)
        return replace(self, sizes=sizes, contexts=tuple(sorted({min(c, longest - sizes[-1]) for c in self.contexts})))

    @property
    def passes(self) -> int:
        """How many passes are timed, those to warm up included."""
        return len(self.contexts) * len(self.batches) * len(self.sizes) * (self.repeats + 1)


_READING = 10
"""A context is measured while reading it takes at most the time of so many of the longest passes."""

SHORT = Grid((1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32), (64, 512), (1,), 4, patience=0.5)
"""What is measured in idle time: some 120 passes."""
FULL = Grid((*range(1, 18), 20, 24, 28, 32, 33, 40, 48, 64), (64, 512, 1536), (1, 4), 9)
"""What ``draftree profile`` measures."""


def measure(model: LanguageModel, grid: Grid, progress: Callable[[int], None] = lambda done: None) -> Profile:
    """Measure a model's passes. It must have no open rows.

    Passes of all sizes take turns, so that a slow moment of the machine falls on all of them, each time in another
    order: what a pass leaves in the processor's caches is no size's own cost. A pass over one token comes right behind
    another, as in AR decoding: behind one of another size llama.cpp builds its graph anew.

    Args:
        grid: as far as the model's longest sequence allows.
        progress: called after each timed pass with how many have been made.
    """
    can, done, shuffled = model.capabilities, 0, Random(0)  # noqa: S311 - an order, not a secret
    points, pace, grid = list[Point](), 0.0, grid.fitting(can)
    tokens = [(5 * i + 3) % can.vocab_size for i in range(grid.sizes[-1])]
    # Children of the last committed token: what any model takes in one pass, a draft head too.
    fans = {size: Nodes.of(tokens[:size], [ROOT] * size) for size in grid.sizes}
    for batch in grid.batches:
        model.reserve(batch, grid.contexts[-1] + grid.sizes[-1])
        for context in grid.contexts:
            if context > grid.contexts[0] and context * pace > _READING * grid.patience:
                break
            rows: list[Row] = []
            times: dict[int, list[float]] = {size: [] for size in grid.sizes}
            try:
                for b in range(batch):
                    rows.append(prefill(model, [(7 * i + b) % can.vocab_size for i in range(context)]))
                for turn in range(grid.repeats + 1):
                    for size in shuffled.sample(list(times), len(times)):
                        seconds = [_timed(model, rows, fans[size]) for _ in range(2 if size == 1 else 1)]
                        times[size].append(seconds[-1])
                        done += 1
                        progress(done)
                    if turn == 0:
                        pace = min(each[0] / size for size, each in times.items())
                        times = {n: each for n, each in times.items() if n == 1 or each[0] <= grid.patience}
            finally:
                for row in reversed(rows):
                    model.close(row)
            points.append(Point(batch, context, tuple(times), tuple(min(each[1:]) for each in times.values())))
    return Profile(Identity.of(model), tuple(points))


def _timed(model: LanguageModel, rows: Sequence[Row], fan: Nodes) -> float:
    """Seconds of a pass over the same nodes for each row, of which nothing is kept where rows branch."""
    began = time.perf_counter()
    model.extend(rows, [fan] * len(rows)).argmax([0])  # a score is there when the pass is over, on a GPU too
    seconds = time.perf_counter() - began
    for row in rows:
        model.commit(row, [0] if model.capabilities.no_trees else [])
    return seconds


FOLDER = Path(__file__).parents[1] / "costs"


@dataclass(frozen=True, slots=True)
class CostTable:
    """Rates of a tier of an engine, which know no model: what passes cost as long as nobody has measured them.

    A pass over n tokens behind c others reads its W bytes of weights and makes n products with each of its P weights;
    how far the two overlap is a power k:

        seconds = ((W / reading)^k + (n P / products)^k)^(1/k) + c S (1 / cache_reading + n / cache_products)

    with S bytes of keys and values a token. It is within a fifth of the passes of models of 135M and 1.5B weights that
    it was fitted to (``python -m benchmarks.cost_tables``); on another machine the level may be off, the shape less so.

    Attributes:
        source: where the numbers come from.
        reading: bytes of weights a second.
        products: weights times tokens a second, of one thread.
        overlap: the power k: at 1 reading and products follow each other, above they overlap.
        cache_reading: bytes of keys and values a second.
        cache_products: these bytes times tokens a second, of one thread.
    """

    source: str
    reading: Positive
    products: Positive
    overlap: Annotated[float, Ge(1)]
    cache_reading: Positive
    cache_products: Positive

    def seconds(self, can: Capabilities, tokens: float, context: float) -> float:
        """Seconds of a model's pass over so many tokens behind ``context`` others."""
        reading = can.weight_bytes / self.reading
        computing = tokens * can.weights / (self.products * can.threads)
        cached, overlap = context * can.slot_bytes, self.overlap
        attention = cached / self.cache_reading + tokens * cached / (self.cache_products * can.threads)
        return float((reading**overlap + computing**overlap) ** (1 / overlap)) + attention


TABLES = JsonFormat(
    "draftree-costs", 1, "cost table", "make it anew with python -m benchmarks.cost_tables", content=CostTable
)


@cache
def shipped_table(tier: str) -> CostTable:
    """The table of a tier (``JsonFormat.read``)."""
    return TABLES.read(FOLDER / f"{tier}.json")


_ESTIMATED: set[Identity] = set()
"""Of models that this process has no measured profile of and wanted one."""


def profile_of(model: Costed) -> Profile:
    """The kept profile of a model or, where none can be read, that of its tier's table: nobody waits for a measurement.

    ``measure_missing`` measures in idle time.
    """
    if (kept := load_profile(model)) is not None:
        return kept
    _ESTIMATED.add(Identity.of(model))
    return estimated(model)


def estimated(model: Costed) -> Profile:
    """What the table of its tier gives for a model."""
    can = model.capabilities
    table, sizes = shipped_table(can.tier), (*FULL.sizes, MAX_NODES)
    points = (
        Point(1, context, sizes, tuple(table.seconds(can, n, context) for n in sizes))
        for context in sorted({1, can.max_length})  # between them it is linear, as the table
    )
    return Profile(Identity.of(model), tuple(points))


def measure_and_keep(model: LanguageModel, grid: Grid) -> Profile:
    """A new profile, measured with a progress bar and kept for later starts."""
    from ..progress import progress_reporter

    passes = grid.fitting(model.capabilities).passes
    with progress_reporter(f"measuring passes of {model.capabilities.name}", passes) as report:
        profile = measure(model, grid, report)
    profile.save()
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
            _ESTIMATED.discard(Identity.of(model))
