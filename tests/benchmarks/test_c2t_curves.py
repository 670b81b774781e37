"""C2T's figures: calibration, and curves of nodes over MAL."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch

from benchmarks.c2t import calibration, main, report
from benchmarks.curves import Point, over_at_equal_mal, taken_at
from benchmarks.recorded import KnownText, record
from draftree.errors import DraftreeWarning

from ..pairs import source, target
from ..tiny import save_tiny

PROMPT = [3, 14, 15, 9, 2, 6, 14, 15]


def texts() -> list[KnownText]:
    model = target()
    return list(record(model, source("self", model), [PROMPT], 8))


def point(nodes: float, tokens: float) -> Point:
    return Point("p", *(torch.tensor([x, x], dtype=torch.float64) for x in (nodes, 10.0, tokens)))


def test_taken_at_equal_mal_are_read_between_points() -> None:
    # MAL 1 at 0 nodes, 2 at 20 / 20 = 1 node a token, 3 at 120 / 30 = 4; 2.5 lies half-way: 2.5 nodes a token.
    curve = [point(0, 10), point(20, 20), point(120, 30)]
    weights = torch.ones(1, 2, dtype=torch.float64)
    found = [float(taken_at(torch.tensor([x], dtype=torch.float64), curve, weights)) for x in (1.5, 2.5, 3.0, 3.5)]
    assert found[:3] == pytest.approx([0.5, 2.5, 4.0])
    assert math.isnan(found[3])


def test_a_curve_that_ends_where_it_is_compared_has_no_interval() -> None:
    """Draws that do not reach the MAL were left out, so the interval was too narrow."""

    def curve(tokens: list[float]) -> list[Point]:
        steps = torch.full((len(tokens),), 10.0, dtype=torch.float64)
        ends = torch.tensor([[10.0] * len(tokens), tokens], dtype=torch.float64)
        return [Point("p", 3 * each, steps, each) for each in ends]

    base = curve([18.0, 22.0] * 8)
    assert over_at_equal_mal(curve([30.0] * 16), base, 1) is not None
    assert over_at_equal_mal(curve([20.0] * 16), base, 1) is None  # half of the draws of the base accept more
    assert over_at_equal_mal(curve([19.0] * 16), base, 1) is None


def test_nodes_are_compared_at_equal_mal(capsys: pytest.CaptureFixture[str]) -> None:
    base = [Point(f"N={n}", *p[1:]) for n, p in ((1, point(10, 15)), (8, point(40, 20)))]
    half = [Point("beta=0.5", *p[1:]) for p in (point(5, 15), point(20, 20))]
    report({"eagle2, N": base, "net, beta": half}, "eagle2, N", ["N=8"])
    printed = capsys.readouterr().out
    assert "1.000 [1.000, 1.000]" in printed
    assert "0.500 [0.500, 0.500]" in printed


def test_each_distribution_on_the_text_is_counted_once() -> None:
    found = calibration(texts())
    assert int(found.counts.sum()) == sum(range(1, 7))  # 7 tokens follow the first: 6 distributions, then 5, ...
    assert found.accepted[found.counts > 0, 0].tolist() == [1.0] * int(
        (found.counts > 0).sum()
    )  # the target drafts itself
    assert float(found.accepted[:, 1:].sum()) == 0


@pytest.mark.parametrize("kind", ["--calibration", "--chains"])
def test_the_command_draws_what_it_prints(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, suite = save_tiny(tmp_path / "tiny"), tmp_path / "own.jsonl"
    suite.write_text('{"prompt": "the cat"}\n')
    shape = ["--target", str(model), "--drafter", "self", "--suites", str(suite), "--max-tokens", "8"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DraftreeWarning)  # the classifier is another drafter's
        main([*shape, kind, "--plot", str(tmp_path / "plot.svg"), "--beam", "15", "--layers", "3"])
    printed = capsys.readouterr().out
    assert ("probability / acceptance" in printed) == (kind == "--calibration")
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")
