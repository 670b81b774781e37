"""Figures of stored runs, their intervals, and ``draftree report``."""

from __future__ import annotations

import json
import math
import random
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from draftree.bench.entries import entries
from draftree.bench.results import CONFIG, RunFolder, read_results
from draftree.bench.summary import Interval, interval, load_runs, ratio
from draftree.cli.main import run
from draftree.errors import ConfigError, DraftreeWarning

from .runs import full_run, record, save, turn

Captured = pytest.CaptureFixture[str]


def test_equal_values_have_no_interval() -> None:
    assert interval([2.5] * 7) == Interval(2.5, 2.5, 2.5)


def test_the_interval_is_that_of_the_normal_distribution() -> None:
    """For many values the bootstrap interval of a mean is mean +- 1.96 s / sqrt(n)."""
    dice = random.Random(5)
    values = [dice.gauss(10, 3) for _ in range(400)]
    found = interval(values)
    mean = sum(values) / len(values)
    half = 1.96 * math.sqrt(sum((x - mean) ** 2 for x in values) / len(values)) / math.sqrt(len(values))
    assert found.mean == pytest.approx(mean)
    assert found.high - found.mean == pytest.approx(half, rel=0.1)
    assert found.mean - found.low == pytest.approx(half, rel=0.1)


def test_the_interval_covers_as_often_as_it_says() -> None:
    dice = random.Random(1)
    hits = 0
    for _ in range(200):
        found = interval([dice.gauss(0, 1) for _ in range(40)], draws=400)
        hits += found.low <= 0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_ratios_are_paired_and_their_mean_is_geometric() -> None:
    assert ratio([2.0, 8.0, 40.0], [1.0, 2.0, 5.0]).mean == pytest.approx(4.0)
    assert astuple(ratio([3.0, 30.0], [1.0, 10.0])) == pytest.approx((3.0, 3.0, 3.0))
    with pytest.raises(ValueError):
        ratio([1.0, 2.0], [1.0])


def test_figures_are_those_of_the_records(tmp_path: Path) -> None:
    """AR decoding takes 2 s for 13 tokens where drafting takes 1 s in 5 steps."""
    (loaded,) = load_runs(full_run(tmp_path / "one"))
    ar, chain = loaded.table["ar T=0"]["all"], loaded.table["chain T=0"]["all"]
    assert ar.tokens_per_second == pytest.approx(13 / (2 * 1.15))
    assert chain.speedup and astuple(chain.speedup) == pytest.approx((2, 2, 2))
    assert chain.speedup_decode and astuple(chain.speedup_decode) == pytest.approx((2, 2, 2))
    assert chain.mal == pytest.approx(12 / 5)
    assert chain.nodes_per_token == pytest.approx(5 * 8 / 13)
    assert chain.nodes_per_step == 8
    assert chain.depth_per_step == pytest.approx((2 + 2 + 2 + 3 + 2) / 5)
    assert (ar.nodes_per_step, ar.depth_per_step) == (0, 0)
    assert chain.acceptance_by_depth == [0.7, 0.0]
    assert chain.share == pytest.approx({"draft": 2 / 9, "verify": 6 / 9, "other": 1 / 9})
    assert (chain.ids_equal, chain.verdicts) == (1.0, {"equal": 4})
    peer = loaded.table["peer:hf-generate T=0"]["all"]
    assert (peer.mal, peer.nodes_per_step, peer.depth_per_step) == (1.0, None, None)
    assert peer.speedup and astuple(peer.speedup) == pytest.approx((0.5, 0.5, 0.5))


def test_the_report_has_the_tables_of_all_runs_and_where_they_were_measured(tmp_path: Path, capsys: Captured) -> None:
    for name in ("b", "a"):
        full_run(tmp_path / name, [0.0])
    assert run(["report", str(tmp_path), str(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("## ")] == ["## Run a", "## Run b", "## Run a"]
    assert printed.count("abacus, 2 cores; draftree 0, commit 0abc; 2026-01-01") == 3
    assert "\n| opt-tree:delta=0.2 " in printed


@pytest.mark.parametrize(("categories", "shown"), [(1, False), (2, True), (16, True), (17, False)])
def test_the_report_has_a_column_for_each_of_a_few_categories(
    categories: int, shown: bool, tmp_path: Path, capsys: Captured
) -> None:
    made = entries(["chain"], ["lookup"], [0.0], 8)
    answers = [record(e, n, turn([3, 2], 1.0)) for n in range(categories) for e in made]
    save(tmp_path, made, [replace(r, category=r.prompt) for r in answers])
    assert run(["report", str(tmp_path)]) == 0
    assert ("by category" in capsys.readouterr().out) is shown


def test_a_run_without_answers_is_one_line_and_one_that_goes_on_is_reported(tmp_path: Path, capsys: Captured) -> None:
    assert run(["report", str(tmp_path)]) == 2
    assert "no run in" in capsys.readouterr().err
    plain, chain = entries(["chain"], ["lookup"], [0.0], 8)
    save(tmp_path / "empty", [plain, chain], [])
    assert run(["report", str(tmp_path / "empty")]) == 2
    assert "has no answers yet" in capsys.readouterr().err
    other = turn([2, 1], 1.0)
    other.ids[-1] = 99  # nobody has asked the target yet whether that is a near-tie
    records = [record(plain, 0, turn([1, 1, 1], 1.0)), record(chain, 0, other)]
    save(tmp_path / "torn", [plain, chain], records)
    assert run(["report", str(tmp_path / "torn")]) == 0
    printed = capsys.readouterr().out
    assert "not-compared" in printed and "Not finished" not in printed
    save(tmp_path / "half", [plain, chain], [*records, record(plain, 1, turn([1, 1, 1], 1.0))])
    assert run(["report", str(tmp_path / "half")]) == 0
    assert "**Not finished**: 1 answers are left" in capsys.readouterr().out


def test_a_run_reports_what_it_has_written(tmp_path: Path) -> None:
    """Seconds are written with six digits: a figure at the edge of its rounding was another one when read again."""
    folder = RunFolder(tmp_path / "run", {}, [])
    folder.append(record(entries(["chain"], ["lookup"], [0.0], 8)[0], 0, turn([2, 1, 2], 1.23456789)))
    assert folder.records == read_results(tmp_path / "run")


@pytest.mark.parametrize("names", [["."], ["empty", "done"]])
def test_a_run_without_answers_costs_no_report_of_others(names: list[str], tmp_path: Path, capsys: Captured) -> None:
    save(tmp_path / "empty", entries(["chain"], ["lookup"], [0.0], 8), [])
    full_run(tmp_path / "done", [0.0])
    assert run(["report", *(str(tmp_path / name) for name in names)]) == 0
    printed = capsys.readouterr()
    assert [line for line in printed.out.splitlines() if line.startswith("## ")] == ["## Run done"]
    (line,) = printed.err.splitlines()
    assert str(tmp_path / "empty") in line and "give its command again: draftree bench --suite humaneval" in line


def test_a_folder_of_another_kind_does_not_hide_the_runs_beside_it(tmp_path: Path) -> None:
    """A run of another version, or a model's folder with a config.json of its own, stopped the report of all."""
    full_run(tmp_path / "one")
    for name, config in (("older", {"format": "draftree-bench", "version": 1}), ("model", {"architectures": []})):
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG).write_text(json.dumps(config))
    with pytest.warns(DraftreeWarning, match="left out") as warned:
        (loaded,) = load_runs(tmp_path)
    assert loaded.path == tmp_path / "one"
    assert [name in str(each.message) for each, name in zip(warned, ("model", "older"), strict=True)] == [True, True]
    for names in ([tmp_path / "one", tmp_path / "older"], [tmp_path / "older"]):
        with pytest.raises(ConfigError, match="older"):
            load_runs(*names)
