"""Measures cost profiles: when a user asks for one, and in idle time of models that have none."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from ..errors import CacheFullError, ConfigError, RunError
from ..tree import ROOT
from .base import Capabilities, LanguageModel, Nodes, Row
from .cost_profile import ESTIMATED, PROFILES, Identity, Point, Profile
from .protocols import DraftHead


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


@dataclass(slots=True)
class Begun:
    """What has been measured of a model until somebody wanted it.

    Attributes:
        points: its curves.
        turns: by batch and context, of the curve under way: seconds by size of each turn (``_Passes``).
    """

    points: list[Point] = field(default_factory=list)
    turns: dict[tuple[int, int], list[dict[int, float]]] = field(default_factory=dict)


class UnsteadyError(RunError):
    """No two measurements of a curve agree: the machine does other work."""


def measure(
    model: LanguageModel,
    grid: Grid,
    progress: Callable[[int], None] = lambda done: None,
    begun: Begun | None = None,
    keep: Callable[[Profile], None] = lambda profile: None,
) -> Profile:
    """Measure a model's passes.

    A curve, the passes of one batch and context, is measured twice, and again until two measurements agree in each size
    and no size takes less than a smaller one; the faster time of the two counts.

    Args:
        grid: as far as the model's longest sequence and its cache allow.
        progress: called after each timed pass, and after each portion of a context, with the ``Grid.work`` that is
            done, that of ``begun`` included. Where it raises, nothing stays open.
        begun: what was measured before, which is not measured again; gets what is measured now.
        keep: called after each curve with all curves so far.

    Raises:
        UnsteadyError: no two of ``_MOST_MEASUREMENTS`` measurements agree; those are not in ``begun``.
        CacheFullError: other rows leave no room for those that are measured.
    """
    can, shuffled = model.capabilities, Random(0)  # noqa: S311 - an order, not a secret
    points, grid, begun = list[Point](), grid.fitting(can), begun or Begun()
    known_points = {(point.batch, point.context): point for point in grid.among(begun.points)}
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
                rows, turns = list[Row](), begun.turns.setdefault((batch, context), [])
                passes = _Passes(model, rows, fans, shuffled, partial(_report, progress, done + batch * context), turns)
                try:
                    for b in range(batch):
                        rows.append(model.open())
                        text = [(7 * i + b) % can.vocab_size for i in range(context)]
                        _read(model, rows[b], text, partial(_report, progress, done + b * context))
                    times = passes.curve(grid, f"passes of {can.name} behind {context} tokens")
                finally:
                    for row in reversed(rows):
                        model.close(row)
                point = Point(batch, context, tuple(times), tuple(times.values()))
                begun.points.append(point)
                done += grid.work(batch, context)
                progress(done)
            pace = min(seconds / size for size, seconds in zip(point.sizes, point.seconds, strict=True))
            points.append(point)
            keep(Profile(Identity.of(model), tuple(points)))
    return Profile(Identity.of(model), tuple(points))


def _report(progress: Callable[[int], None], before: int, done: int) -> None:
    progress(before + done)


_PORTION = 16
"""Tokens of a context that are read at once: whoever comes waits for no longer pass than one that is measured."""


def _read(model: LanguageModel, row: Row, ids: Sequence[int], progress: Callable[[int], None]) -> None:
    """Let an empty row read a context in portions.

    A draft head reads it at once: tokens behind those that its row has read take what was predicted before them.
    """
    portion = len(ids) if isinstance(model, DraftHead) else _PORTION
    for start in range(0, len(ids), portion):
        part = ids[start : start + portion]
        model.extend([row], [Nodes.chain(part, wanted=1)])
        model.commit(row, range(len(part)))
        progress(start + len(part))


@dataclass
class _Passes:
    """The timed passes of one curve.

    Passes of all sizes take turns, so that a slow moment of the machine falls on all of them, each time in another
    order: what a pass leaves in the processor's caches is no size's own cost. A pass over one token comes right behind
    another, as in AR decoding: behind one of another size llama.cpp builds its graph anew.

    Attributes:
        turns: seconds by size of each so far; the last one may lack sizes.
    """

    model: LanguageModel
    rows: Sequence[Row]
    fans: Mapping[int, Nodes]
    order: Random
    progress: Callable[[int], None]
    turns: list[dict[int, float]]
    done: int = 0

    def curve(self, grid: Grid, what: str) -> dict[int, float]:
        """Seconds by size, by two measurements that agree (``measure``)."""
        warm = self._turn(0, grid.sizes)
        sizes = [size for size in grid.sizes if size == 1 or warm[size] <= grid.patience]
        measurements, fault = list[dict[int, float]](), ""
        for number in range(_MOST_MEASUREMENTS):
            first = 1 + number * grid.half
            turns = [self._turn(turn, sizes, counts=number < 2) for turn in range(first, first + grid.half)]
            fastest = {size: min(turn[size] for turn in turns) for size in sizes}
            for former in measurements:
                if not (fault := _disagreement(former, fastest)):
                    return {size: min(former[size], fastest[size]) for size in sizes}
            measurements.append(fastest)
        self.turns.clear()
        raise UnsteadyError(
            f"{what} are not steady: {fault}, in {len(measurements)} measurements no two agree within "
            f"{_AGREE - 1:.0%}: end what else runs on this machine, and measure again"
        )

    def _turn(self, number: int, sizes: Sequence[int], counts: bool = True) -> dict[int, float]:
        """A pass of each size of which the turn has none yet; ``counts``: they are among the ``Grid.work``."""
        if number == len(self.turns):
            self.turns.append({})
        seconds = self.turns[number]
        for size in self.order.sample(sizes, len(sizes)):
            self.done += counts * _work(len(self.rows), size)
            if size not in seconds:
                if size == 1:
                    _timed(self.model, self.rows, self.fans[size])
                seconds[size] = _timed(self.model, self.rows, self.fans[size])
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


def measure_and_keep(model: LanguageModel, grid: Grid) -> Profile:
    """A new profile, measured with a progress bar and kept for later starts.

    Curves are kept as they are made, in a file beside the profile: where this is interrupted the next call goes on.
    """
    from ..progress import progress_reporter

    grid, begun = grid.fitting(model.capabilities), Begun()
    part = Identity.of(model).path.with_suffix(".part")
    with suppress(OSError, ConfigError):
        begun.points += grid.among(PROFILES.read(part).points)
    done = sum(grid.work(point.batch, point.context) for point in begun.points)
    with progress_reporter(f"measuring passes of {model.capabilities.name}", grid.all_work, done) as report:
        profile = measure(model, grid, report, begun, lambda profile: profile.write(part))
    profile.save()
    with suppress(OSError):
        part.unlink()
    return profile


_BEGUN: dict[Identity, Begun] = {}
"""Of models that are measured in idle times."""


def measure_missing(models: Iterable[LanguageModel], is_wanted: Callable[[], bool]) -> None:
    """Measure those models that started by a table; the next start uses it. For idle time.

    Args:
        is_wanted: somebody waits for the models now: the next idle time goes on from what was measured so far.
    """

    def go_on(_: int) -> None:
        if is_wanted():
            raise InterruptedError

    for model in models:
        if (identity := Identity.of(model)) not in ESTIMATED:
            continue
        try:
            measure(model.measured, SHORT, go_on, _BEGUN.setdefault(identity, Begun())).save()
        except InterruptedError:
            return
        except (UnsteadyError, CacheFullError):
            continue  # a later idle time may be a quieter one, or one in which fewer rows are kept
        except (RuntimeError, MemoryError) as error:
            logging.getLogger("draftree.models").warning("passes are not measured: %s", error)
        ESTIMATED.discard(identity)
        _BEGUN.pop(identity, None)
