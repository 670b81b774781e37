"""Profiles: how they are read between the points, when they are kept, and when they are measured again."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from draftree.errors import DraftreeWarning
from draftree.models.cost_profile import Identity, Point, Profile, load_profile
from draftree.models.measuring import Grid, measure_and_keep

from ..toy import ToyModel

GRID = Grid(sizes=(1, 2, 4), contexts=(3,), batches=(1,), repeats=2)
ME = Identity("toy", "ToyModel", 1, "stock", "float32", "", "eager", "cpu", "toy 1", "torch", 1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Profiles of these tests go to a folder of their own."""
    folder = tmp_path / "draftree" / "profiles"
    monkeypatch.setattr("draftree.models.cost_profile.profile_folder", lambda: folder)
    return folder


def curve(batch: int, context: int, *seconds: float) -> Point:
    return Point(batch, context, (1, 2, 4), seconds)


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


@pytest.mark.parametrize(("token", "times", "nodes"), [(0.5, 3.0, 4), (0.1, 1.6, 6), (5.0, 2.0, 1), (1e-6, 8.0, 4096)])
def test_the_largest_tree_whose_pass_takes_at_most_so_many_times_one_without_it(
    token: float, times: float, nodes: int
) -> None:
    sizes = (1, 2, 4, 16, 64)
    profile = Profile(ME, (Point(1, 1, sizes, tuple(1.0 + token * (size - 1) for size in sizes)),))
    assert profile.most_nodes(times) == nodes
