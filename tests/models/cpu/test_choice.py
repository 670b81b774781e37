"""Which kernel is chosen from measured times, when rows are filled up, and what is kept of the times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from draftree.errors import DraftreeWarning
from draftree.models.cpu import quantization as choice
from draftree.models.cpu.kernels import Int8, Prepacked, Stock
from draftree.models.cpu.quantization import SIZES, Times, choose, measure, padded


def times(**of: float) -> tuple[float, ...]:
    """A millisecond for every size but those named, such as n3=2."""
    return tuple(of.get(f"n{n}", 1.0) * 1e-3 for n in SIZES)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "draftree" / "kernels"
    monkeypatch.setattr(choice, "kernels_folder", lambda: place)
    return place


def test_the_kernel_with_the_least_geometric_mean_is_chosen() -> None:
    found = choose({Stock: times(n1=4.0), Int8: times(n1=2.0, n16=1.9), Prepacked: times(n1=5.0)})
    assert found.kernel is Int8
    assert found.seconds == pytest.approx((2.0 * 1.9) ** (1 / len(SIZES)) * 1e-3)


def test_rows_are_filled_up_to_a_number_that_is_cheaper() -> None:
    rows = padded(times(n2=2.0, n3=1.5, n4=0.8))
    assert rows[:6] == (0, 4, 4, 4, 4, 5)
    assert len(rows) == SIZES[-1] + 1


def test_rows_are_not_filled_up_for_a_small_gain() -> None:
    assert padded(times(n4=0.95)) == tuple(range(SIZES[-1] + 1))


def test_rows_are_not_filled_up_where_that_takes_longer_than_it_saves() -> None:
    assert padded(tuple(s * 1e-3 for s in times(n2=3.0))) == tuple(range(SIZES[-1] + 1))


def test_the_least_time_of_a_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seen = [0.0], []

    class Slow(Stock):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.shape[0])
            clock[0] += 10.0 if len(seen) < 3 else x.shape[0]
            return super().forward(x)

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert measure(Slow, [nn.Linear(4, 4), nn.Linear(4, 4)]) == pytest.approx(SIZES)


class Counting(Stock):
    """Knows how often it was made, which is how often it was measured."""

    made = 0

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        Counting.made += 1


def measured(inputs: int, outputs: int) -> int:
    """How many layers are measured in a new start, which keeps what it finds."""
    before, known = Counting.made, Times()
    known.of([Counting], [nn.Linear(inputs, outputs)])
    known.keep()
    return Counting.made - before


def test_a_shape_is_measured_once_and_kept() -> None:
    assert measured(8, 4) == 1
    assert measured(8, 4) == 0
    assert measured(4, 8) == 1


def test_times_of_other_threads_are_other_times(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(8, 4) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert measured(8, 4) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "other", "version": 1}',
        '{"format": "draftree-kernels", "version": 1, "sizes": [1]}',
        json.dumps({"format": "draftree-kernels", "version": 1, "sizes": SIZES, "shapes": {"8x4": {"stock": [1.0]}}}),
        json.dumps(
            {
                "format": "draftree-kernels",
                "version": 1,
                "sizes": SIZES,
                "shapes": {"8x4": {"stock": [-1.0] * len(SIZES)}},
            }
        ),
    ],
)
def test_times_that_cannot_be_read_are_measured_again_and_it_says_so(folder: Path, text: str) -> None:
    measured(8, 4)
    kept = next(folder.iterdir())
    kept.write_text(text)
    with pytest.warns(DraftreeWarning, match="cannot be read .*: measuring again"):
        assert measured(8, 4) == 1
    assert measured(8, 4) == 0


def test_a_folder_that_cannot_be_written_costs_a_warning_only(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file in the way")
    known = pytest.warns(DraftreeWarning, match="cannot be read")
    with known, pytest.warns(DraftreeWarning, match="are not kept: .*: set XDG_CACHE_HOME"):
        measured(8, 4)
