"""How profiles are measured: what counts, what is made again, and what goes on where it was interrupted."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from draftree.config import SamplingParams
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.models.base import Nodes, Row, prefill
from draftree.models.cost_profile import load_profile, profile_of
from draftree.models.measuring import Grid, UnsteadyError, _timed, measure, measure_and_keep, measure_missing
from draftree.models.native.native_model import NativeModel
from draftree.policies.auto import AutoTree
from draftree.scores import Scores

from .. import tiny_gguf
from ..toy import ToyModel

GRID = Grid(sizes=(1, 2, 4), contexts=(3, 9), batches=(1, 2), repeats=2)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured in idle time takes none."""
    monkeypatch.setattr("draftree.models.measuring.SHORT", GRID)


Time = Callable[[Callable[[], float]], None]


@pytest.fixture
def clock_is(monkeypatch: pytest.MonkeyPatch) -> Time:
    """Passes take what this clock says."""

    def clock_is(clock: Callable[[], float]) -> None:
        monkeypatch.setattr("draftree.models.measuring._timed", _timed)
        monkeypatch.setattr("time.perf_counter", clock)

    return clock_is


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Profiles of these tests go to a folder of their own."""
    folder = tmp_path / "draftree" / "profiles"
    monkeypatch.setattr("draftree.models.cost_profile.profile_folder", lambda: folder)
    monkeypatch.setattr("draftree.models.measuring._BEGUN", {})
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


Clock = Callable[[Callable[[int, int], float]], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets what a timed pass takes, by its number and its nodes."""

    def use(seconds: Callable[[int, int], float]) -> None:
        made = itertools.count()
        monkeypatch.setattr(
            "draftree.models.measuring._timed", lambda model, rows, fan: seconds(next(made), len(fan.tokens))
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
    monkeypatch.setattr("draftree.models.measuring.SHORT", ONE)
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


def after(calls: int) -> Callable[[], bool]:
    """Somebody comes after it was asked so often."""
    left = iter(range(calls))
    return lambda: next(left, None) is None


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("calls", [2, 5, 10])
def test_short_idle_times_measure_what_one_long_one_does(calls: int, clock: Clock) -> None:
    """What an idle time had measured was given up when a request came: between the turns of an agent all of it was."""
    made = list[int]()

    def timed(number: int, size: int) -> float:
        made.append(size)
        return float(size)

    clock(timed)
    model, whole, passes = ToyModel(), measure(ToyModel(), GRID), len(made)
    profile_of(model)
    made.clear()
    idle_times = 0
    while load_profile(model) is None:
        measure_missing([model], after(calls))
        assert not model._rows
        idle_times += 1
    assert load_profile(model) == whole
    assert idle_times > 4 and len(made) == passes, "nothing is measured twice"


def test_an_unsteady_curve_alone_is_measured_again(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.models.measuring.SHORT", replace(GRID, batches=(1,)))
    model = ToyModel()
    profile_of(model)
    clock(lambda made, size: float(size) if made < 12 else 2.0 ** (made // 4) * size)
    measure_missing([model], lambda: False)
    assert load_profile(model) is None
    clock(lambda made, size: 3.0 * size)
    measure_missing([model], lambda: False)
    profile = load_profile(model)
    assert profile and [point.seconds for point in profile.points] == [(1, 2, 4), (3, 6, 12)]


def test_a_context_is_read_in_portions_between_which_somebody_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever came waited until 512 tokens were read: seconds, where a model is large."""
    monkeypatch.setattr("draftree.models.measuring.SHORT", Grid((1, 2), (100,), (1,), 1))
    model, read = Counting(max_length=128), list[int]()
    extend = model.extend

    def noted(rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        read.append(len(nodes[0].tokens))
        return extend(rows, nodes)

    monkeypatch.setattr(model, "extend", noted)
    profile_of(model)
    measure_missing([model], lambda: len(read) == 3)
    assert read == [16] * 3 and not model._rows
    read.clear()
    measure_missing([model], lambda: False)
    assert load_profile(model) is not None
    assert read[:7] == [16] * 6 + [4] and max(read[7:]) == 2


def test_where_kept_rows_leave_no_room_a_later_idle_time_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftree.models.measuring.SHORT", Grid((1, 32), (64, 512), (1,), 1))
    model = NativeModel(tiny_gguf.write(tmp_path / "model.gguf"))
    profile_of(model)
    model.cache_bytes = 800 * model.capabilities.slot_bytes
    kept = prefill(model, [3 + i % 7 for i in range(400)])
    measure_missing([model], lambda: False)
    assert load_profile(model) is None and model.rows == 1
    model.close(kept)
    measure_missing([model], lambda: False)
    profile = load_profile(model)
    assert profile and [point.context for point in profile.points] == [64, 512]


class Failing(Counting):
    """A model whose passes fail."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        super().extend(rows, nodes)
        raise self._error


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), MemoryError()], ids=repr)
def test_a_model_that_cannot_be_measured_stays_with_its_table(error: Exception) -> None:
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
    monkeypatch.setattr("draftree.models.measuring.SHORT", Grid((1, 32), (64, 512), (1,), 1))
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
