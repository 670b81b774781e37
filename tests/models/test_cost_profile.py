"""Profiles: what is measured, how it is read between the points, when it is kept and when measured again."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from draftree.config import SamplingParams
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.errors import CacheFullError, DraftreeWarning
from draftree.models.base import Nodes, Row, prefill
from draftree.models.cost_profile import (
    Grid,
    Identity,
    Point,
    Profile,
    UnsteadyError,
    _timed,
    load_profile,
    measure,
    measure_and_keep,
    measure_missing,
    profile_of,
)
from draftree.models.native.native_model import NativeModel
from draftree.policies.auto import AutoTree
from draftree.scores import Scores

from .. import tiny_gguf
from ..toy import ToyModel

GRID = Grid(sizes=(1, 2, 4), contexts=(3, 9), batches=(1, 2), repeats=2)
ME = Identity("toy", "ToyModel", 1, "stock", "float32", "", "eager", "cpu", "toy 1", "torch", 1)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured in idle time takes none."""
    monkeypatch.setattr("draftree.models.cost_profile.SHORT", GRID)


Time = Callable[[Callable[[], float]], None]


@pytest.fixture
def clock_is(monkeypatch: pytest.MonkeyPatch) -> Time:
    """Passes take what this clock says."""

    def clock_is(clock: Callable[[], float]) -> None:
        monkeypatch.setattr("draftree.models.cost_profile._timed", _timed)
        monkeypatch.setattr("time.perf_counter", clock)

    return clock_is


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Profiles of these tests go to a folder of their own."""
    folder = tmp_path / "draftree" / "profiles"
    monkeypatch.setattr("draftree.models.cost_profile.profile_folder", lambda: folder)
    return folder


def test_every_batch_context_and_size_is_measured() -> None:
    seen: list[int] = []
    profile = measure(ToyModel(), GRID, seen.append)
    assert [(p.batch, p.context, p.sizes) for p in profile.points] == [
        (1, 3, (1, 2, 4)),
        (1, 9, (1, 2, 4)),
        (2, 3, (1, 2, 4)),
        (2, 9, (1, 2, 4)),
    ]
    assert seen == sorted(seen) and seen[-1] == GRID.all_work and len(set(seen)) > 30
    assert all(seconds > 0 for p in profile.points for seconds in p.seconds)


def test_the_fastest_pass_counts_and_the_first_is_not_among_them(
    monkeypatch: pytest.MonkeyPatch, clock_is: Time
) -> None:
    clock, model = [0.0], ToyModel()
    # The context, a pass to warm up, then two measurements of two: each behind another of one token, which does not
    # count.
    prices = iter([0.0, 0.5, 1.0, 0.5, 3.0, 0.5, 2.0, 0.5, 9.0, 0.5, 2.2])
    extend = model.extend

    def slow(*arguments: object) -> Scores:
        clock[0] += next(prices)
        return extend(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "extend", slow)
    clock_is(lambda: clock[0])
    assert measure(model, Grid((1,), (5,), (1,), 3)).points[0].seconds == (2.0,)


def test_contexts_that_do_not_fit_are_shortened() -> None:
    profile = measure(ToyModel(max_length=16), Grid((1, 4), (8, 100, 200), (1,), 1))
    assert [p.context for p in profile.points] == [8, 12]


def test_short_models_are_measured_with_fewer_tokens() -> None:
    grid = Grid((1, 4, 8, 12), (64,), (1,), 1)
    assert max(measure_and_keep(ToyModel(max_length=16), grid).points[0].sizes) == 8
    assert measure_and_keep(ToyModel(max_length=2, vocab=4), grid).points[0].sizes == (1,)


def test_no_rows_stay_open() -> None:
    model = ToyModel()
    measure(model, GRID)
    assert prefill(model, [1]).number == 0


def curve(batch: int, context: int, *seconds: float) -> Point:
    return Point(batch, context, (1, 2, 4), seconds)


Clock = Callable[[Callable[[int, int], float]], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets what a timed pass takes, by its number and its nodes."""

    def use(seconds: Callable[[int, int], float]) -> None:
        made = itertools.count()
        monkeypatch.setattr(
            "draftree.models.cost_profile._timed", lambda model, rows, fan: seconds(next(made), len(fan.tokens))
        )

    return use


ONE = replace(GRID, contexts=(3,), batches=(1,))


def test_a_slow_moment_is_measured_again(clock: Clock) -> None:
    """A turn is four passes, with one over one token twice: the first measurement is passes 4 to 7."""
    clock(lambda made, size: size * (3.0 if 4 <= made < 8 else 1.1 if made < 12 else 1.0))
    assert measure(ToyModel(), ONE).points[0].seconds == (1.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("seconds", "named"),
    [
        (lambda made, size: 2.0 ** (made // 4) * size, r"over 1 took .* and .* ms"),
        (lambda made, size: 1.0 if size < 4 else 0.8, r"over 2 took 1000\.0 ms, one over 4 800\.0 ms"),
    ],
)
def test_passes_that_are_not_steady_are_an_error_and_not_kept(
    clock: Clock, cache: Path, seconds: Callable[[int, int], float], named: str
) -> None:
    clock(seconds)
    model = ToyModel()
    with pytest.raises(UnsteadyError, match=f"toy.* 3 tokens .*{named}.* 4 measurements"):
        measure_and_keep(model, ONE)
    assert not cache.exists() and not model._rows


def test_a_size_that_takes_a_little_less_than_a_smaller_one_is_kept(clock: Clock) -> None:
    clock(lambda made, size: 1.0 if size < 4 else 0.9)
    assert measure(ToyModel(), ONE).points[0].seconds == (1.0, 1.0, 0.9)


def test_an_unsteady_machine_is_tried_again_in_a_later_idle_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.models.cost_profile.SHORT", ONE)
    model = ToyModel()
    profile_of(model)
    clock(lambda made, size: 2.0 ** (made // 4) * size)
    measure_missing([model], lambda: False)
    assert load_profile(model) is None
    clock(lambda made, size: size)
    measure_missing([model], lambda: False)
    assert load_profile(model) is not None


def test_a_measurement_that_was_interrupted_goes_on(clock: Clock, cache: Path) -> None:
    """It took minutes, and kept nothing."""
    model, grid = ToyModel(), replace(GRID, batches=(1,))

    def interrupted(made: int, size: int) -> float:
        if made == 15:  # three turns of four, and three passes of the next curve
            raise KeyboardInterrupt
        return float(size)

    clock(interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_and_keep(model, grid)
    assert load_profile(model) is None and [path.suffix for path in cache.iterdir()] == [".part"]
    clock(lambda made, size: 2.0 * size)
    assert [point.seconds for point in measure_and_keep(model, grid).points] == [(1, 2, 4), (2, 4, 8)]
    assert [path.suffix for path in cache.iterdir()] == [".json"]
    assert [point.seconds for point in measure_and_keep(model, grid).points] == [(2, 4, 8), (2, 4, 8)]


def test_seconds_are_linear_between_points() -> None:
    profile = Profile(ME, (curve(1, 100, 1.0, 3.0, 2.0), curve(1, 300, 2.0, 5.0, 4.0)))
    assert profile.seconds(1, 100) == 1.0
    assert profile.seconds(3, 100) == 2.5
    assert profile.seconds(2, 200) == 4.0
    assert profile.seconds(2, 50) == 3.0  # before the first context and behind the last: theirs
    assert profile.seconds(2, 900) == 5.0
    assert profile.seconds(7, 100) == pytest.approx(2.0 + 3 * (1.0 / 3))  # on with the mean slope
    assert [profile.seconds(n, 100) for n in (1, 2, 3, 4)] == [1.0, 3.0, 2.5, 2.0]


def test_rows_of_an_unmeasured_batch_count_as_more_nodes() -> None:
    profile = Profile(ME, (curve(1, 9, 1.0, 2.0, 4.0), curve(4, 9, 10.0, 20.0, 40.0)))
    assert profile.seconds(1, 9, batch=2) == 2.0
    assert profile.seconds(1, 9, batch=4) == 10.0
    assert profile.seconds(2, 9, batch=8) == 40.0


def test_each_row_of_an_unmeasured_batch_reads_its_own_context() -> None:
    """Eight rows behind 900 tokens took 4 ms more than a pass over eight nodes: no node seemed worth its cost."""
    profile = Profile(ME, (curve(1, 100, 1.0, 2.0, 4.0), curve(1, 900, 1.5, 3.0, 6.0)))
    assert profile.seconds(1, 900, batch=4) == 6.0 + 3 * 0.5
    assert profile.seconds(1, 500, batch=4) == 5.0 + 3 * 0.25
    assert profile.seconds(1, 50, batch=4) == 4.0


def test_a_falling_curve_is_not_carried_below_zero() -> None:
    assert Profile(ME, (curve(1, 9, 3.0, 2.0, 1.0),)).seconds(1000, 9) == 1.0


def test_a_profile_is_kept_and_read_again(cache: Path) -> None:
    model = ToyModel()
    first = measure_and_keep(model, GRID)
    assert [p.name for p in cache.iterdir()] == [first.identity.file_name]
    assert load_profile(model) == first


def changed(model: ToyModel, **values: object) -> ToyModel:
    """The same model, run by something else."""
    other = ToyModel()
    other.capabilities = replace(model.capabilities, **values)  # type: ignore[arg-type]
    return other


CHANGES: list[dict[str, object]] = [
    {"tier": "avx2"},
    {"threads": 2},
    {"runner": "graph"},
    {"accelerator": "GPU"},
    {"engine": "toy 0"},
]


@pytest.mark.parametrize("change", CHANGES)
def test_passes_by_another_tier_version_or_more_threads_have_a_profile_of_their_own(change: dict[str, object]) -> None:
    model = ToyModel()
    other = changed(model, **change)
    Profile(Identity.of(model), (curve(1, 9, 1.0, 2.0, 3.0),)).save()
    assert Identity.of(other).file_name != Identity.of(model).file_name
    assert load_profile(other) is None


class Counting(ToyModel):
    """Counts its passes."""

    passes = 0

    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        self.passes += 1
        return super().extend(rows, nodes)


def test_a_start_without_a_profile_makes_no_pass_and_keeps_nothing(cache: Path) -> None:
    """The first command that a user gave waited for seconds, on a busy machine for a minute."""
    model, auto = Counting(), AutoTree()
    engine = Engine(model, Speculation(TreeDrafter(auto, NgramSource()), 8))
    assert model.passes == 0
    assert auto.target == profile_of(model)
    made = engine.generate([[1, 2, 1, 2]], SamplingParams(max_tokens=6))[0]
    assert model.passes == made.stats.steps + 1
    assert not cache.exists()


@pytest.mark.usefixtures("short")
def test_what_is_measured_in_idle_time_is_kept_and_only_what_was_missed() -> None:
    model, other = Counting(), Counting(seed=1)
    other.capabilities = replace(other.capabilities, name="other")
    estimate = profile_of(model)
    measure_missing([model, other], lambda: True)  # somebody waits
    assert load_profile(model) is None
    assert not model._rows
    measure_missing([model, other], lambda: False)
    assert not other.passes
    assert (kept := load_profile(model)) is not None
    assert kept != estimate
    assert profile_of(model) == kept
    passes = model.passes
    measure_missing([model, other], lambda: False)
    assert model.passes == passes  # nothing is missing


class Failing(Counting):
    """A model whose passes fail."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        super().extend(rows, nodes)
        raise self._error


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("error", [CacheFullError("full"), RuntimeError("CUDA out of memory"), MemoryError()], ids=repr)
def test_a_model_that_cannot_be_measured_stays_with_its_table(error: Exception) -> None:
    """An idle server read 512 tokens into a cache of fewer: its engine ended, and with it all requests."""
    model, other = Failing(error), Counting(seed=1)
    other.capabilities = replace(other.capabilities, name="other")
    for each in (model, other):
        profile_of(each)
    for _ in range(2):
        measure_missing([model, other], lambda: False)
        assert model.passes == 1, "it is not tried again"
    assert load_profile(model) is None and not model._rows
    assert load_profile(other) is not None


def test_contexts_that_the_cache_does_not_hold_are_left_out() -> None:
    model = ToyModel()
    for most, contexts in ((13, [3, 9]), (12, [3]), (2, [3])):
        model.most_tokens = most
        assert [point.context for point in measure(model, replace(GRID, batches=(1,))).points] == contexts


@pytest.mark.parametrize(("tokens", "contexts"), [(800, [64, 512]), (400, [64]), (60, None)])
def test_a_small_cache_is_measured_as_far_as_it_goes(
    tokens: int, contexts: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftree.models.cost_profile.SHORT", Grid((1, 32), (64, 512), (1,), 1))
    model = NativeModel(tiny_gguf.write(tmp_path / "model.gguf"))
    profile_of(model)
    model.cache_bytes = tokens * model.capabilities.slot_bytes
    measure_missing([model], lambda: False)
    profile = load_profile(model)
    assert (profile and [point.context for point in profile.points]) == contexts
    assert not model.rows


@pytest.mark.usefixtures("short")
def test_an_idle_engine_measures_until_a_request_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ToyModel()
    profile_of(model)
    monkeypatch.setattr("draftree.engine.engine._IDLE_SECONDS", 0.01)
    engine, rested, ended = Engine(model), threading.Event(), threading.Event()

    def idle(is_wanted: Callable[[], bool]) -> None:
        measure_missing([model], is_wanted)
        rested.set()

    thread = threading.Thread(target=lambda: engine.wait(ended.is_set, idle=idle))
    thread.start()
    try:
        for _ in range(2):  # once after each time of work
            assert rested.wait(60)
            rested.clear()
            assert engine.submit([1, 2], SamplingParams(max_tokens=3)).result().token_ids
    finally:
        ended.set()
        engine.wake()
        thread.join()
    assert load_profile(model) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": "draftree-profile", "version": 99}',
        '{"format": "other", "version": 1}',
    ],
)
def test_a_corrupt_profile_is_not_used_and_says_so(cache: Path, text: str) -> None:
    model = ToyModel()
    cache.mkdir(parents=True)
    path = cache / Identity.of(model).file_name
    path.write_text(text)
    with pytest.warns(DraftreeWarning, match="be read"):
        assert load_profile(model) is None


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": [1.0, 2.0]},
        {"seconds": [1.0, 2.0, -1.0]},
        {"seconds": [1.0, 2.0, float("nan")]},
        {"sizes": [2, 3, 4]},
        {"batch": 0},
    ],
)
def test_points_that_cannot_be_are_corrupt(cache: Path, change: dict[str, object]) -> None:
    model = ToyModel()
    point = asdict(curve(1, 9, 1.0, 2.0, 3.0)) | change
    document = {"format": "draftree-profile", "version": 6, "identity": asdict(Identity.of(model)), "points": [point]}
    cache.mkdir(parents=True)
    (cache / Identity.of(model).file_name).write_text(json.dumps(document))
    with pytest.warns(DraftreeWarning, match="be read"):
        assert load_profile(model) is None


def test_a_folder_that_cannot_be_written_costs_warnings_only(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file in the way")
    with pytest.warns(DraftreeWarning, match="XDG_CACHE_HOME"):
        assert measure_and_keep(ToyModel(), GRID).points


def test_slow_models_are_measured_in_part(monkeypatch: pytest.MonkeyPatch, clock_is: Time) -> None:
    """A profile took minutes of a model whose passes take seconds: what it would hardly use is left out."""
    clock, model = [0.0], ToyModel()
    extend = model.extend

    def slow(rows: list[Row], nodes: list[Nodes]) -> Scores:
        clock[0] += len(nodes[0].tokens)
        return extend(rows, nodes)

    monkeypatch.setattr(model, "extend", slow)
    clock_is(lambda: clock[0])
    profile = measure(model, replace(GRID, batches=(1,), patience=3.0))
    assert [(p.context, p.sizes, p.seconds) for p in profile.points] == [(3, (1, 2), (1, 2)), (9, (1, 2), (1, 2))]
    profile = measure(model, replace(GRID, batches=(1,), patience=0.5))
    assert [(p.context, p.sizes, p.seconds) for p in profile.points] == [(3, (1,), (1,))]


@pytest.mark.parametrize(("token", "times", "nodes"), [(0.5, 3.0, 4), (0.1, 1.6, 6), (5.0, 2.0, 1), (1e-6, 8.0, 4096)])
def test_the_largest_tree_whose_pass_takes_at_most_so_many_times_one_without_it(
    token: float, times: float, nodes: int
) -> None:
    sizes = (1, 2, 4, 16, 64)
    profile = Profile(ME, (Point(1, 1, sizes, tuple(1.0 + token * (size - 1) for size in sizes)),))
    assert profile.most_nodes(times) == nodes
