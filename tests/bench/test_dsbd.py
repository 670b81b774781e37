"""The report on sampled beams: which contestants it knows, its fronts, and what it says without a meter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from draftree.bench.contestants import Entry, entries
from draftree.bench.report.dsbd import Point, kind, one_cache, pareto, sections
from draftree.bench.report.page import Section
from draftree.bench.report.source import load_runs
from draftree.bench.results import Parts, Turn

from .runs import record, save

METHODS = (
    "chain,static:verify=multi-round-replacement,beams:width=2:drafter=none,beams:width=4:drafter=none,"
    "beams:width=2:drafter=self,beams:width=4:drafter=self,beams:width=4:single=yes:drafter=self"
)


def answer(entry: Entry, seconds: float, layers: int = 10, drafted: int | None = 6) -> Turn:
    """Ten tokens in nine passes; those that have a drafter drafted so many layers."""
    parts = Parts(seconds, 0.0, 0.0, seconds, 0.0)
    wide = None if entry.beams is None else layers
    return Turn(5, list(range(10)), "x", "eos", parts, 9, layers=wide, drafted_layers=drafted if entry.drafter else 0)


def reported(folder: Path, suite: str, joules: float | None, drafted: int = 6) -> list[Section]:
    """The sections of a run whose contestants are each a little faster and better than those before."""
    made = entries(METHODS.split(","), ["lookup"], [1.0], 8)
    measure = "execution" if suite == "spider" else "exact"
    records = [
        record(
            entry,
            prompt,
            answer(entry, 10 / (number + 1), drafted=drafted),
            score={measure: number / 10},
            joules=None if joules is None else joules * 10,
        )
        for prompt in range(3)
        for number, entry in enumerate(made)
    ]
    return sections(load_runs(save(folder / suite, made, records, suite)))


def titles(found: Sequence[Section]) -> list[str]:
    return [s.title.partition(":")[0] for s in found]


def test_contestants_have_the_papers_names() -> None:
    made = entries([*METHODS.split(","), "peer:hf-beam-search"], ["lookup"], [1.0], 8)
    assert [kind(e, [record(e, 0, answer(e, 1.0))]) for e in made] == [
        "multinomial",
        "speculative",
        "SpecInfer",
        *["beam sampling"] * 2,
        *["DSBD"] * 3,
        None,
    ]
    assert [one_cache(e) for e in made[:-1]] == [True, True, True, False, False, False, False, True]
    assert kind(entries(["beams"], ["lookup"], [0.0], 8)[1], []) is None


@pytest.mark.parametrize(
    ("layers", "drafted", "name"),
    [(10, 0, "beam sampling"), (10, 2, "DSBD"), (10, None, "beam sampling"), (14, None, "DSBD")],
)
def test_beams_that_drafted_no_layer_are_beam_sampling(layers: int, drafted: int | None, name: str) -> None:
    """Costs had chosen to draft nothing, MAL was 1.00, and the points were drawn as DSBD's. Runs from before drafted
    layers were recorded show them where passes gave more than one layer each."""
    (_, entry) = entries(["beams:drafter=self"], ["lookup"], [1.0], 8)
    assert kind(entry, [record(entry, 0, answer(entry, 1.0, layers, drafted))]) == name


def test_without_drafted_layers_there_is_no_figure_of_dsbd(tmp_path: Path) -> None:
    """Neither points, nor rows of the tables."""
    assert reported(tmp_path, "squad", joules=1.0, drafted=0) == []
    assert reported(tmp_path, "mt-bench", joules=1.0, drafted=0) == []


def test_a_front_has_no_point_that_another_beats() -> None:
    points = [Point(1, 5), Point(2, 4), Point(2, 3), Point(3, 4), Point(4, 1), Point(0.5, 5)]
    assert pareto(points) == [Point(1, 5), Point(3, 4), Point(4, 1)]


@pytest.mark.parametrize(("suite", "figure"), [("squad", "DSBD, Figure 4"), ("spider", "DSBD, Figure 5")])
def test_a_scored_run_has_its_front_and_table(suite: str, figure: str, tmp_path: Path) -> None:
    front, table = reported(tmp_path, suite, joules=2.0)
    assert titles([front, table]) == [figure, "DSBD, Table 2"]
    assert front.figure is not None and front.grid is not None and table.grid is not None
    assert len(front.grid.rows) == 8
    assert {row[-1] for row in front.grid.rows} == {"2"}
    assert [row[0] for row in table.grid.rows] == [
        f"{suite}: {what}" for what in ("multinomial", "speculative", "SpecInfer", "DSBD")
    ]


def test_without_a_meter_the_column_says_so(tmp_path: Path) -> None:
    front, _ = reported(tmp_path, "squad", joules=None)
    assert front.grid is not None
    assert {row[-1] for row in front.grid.rows} == {"no meter"}


def test_mt_bench_has_table_1_alone(tmp_path: Path) -> None:
    assert titles(reported(tmp_path, "mt-bench", joules=1.0)) == ["DSBD, Table 1"]


def test_runs_without_sampled_beams_have_none_of_this(tmp_path: Path) -> None:
    made = entries(["chain"], ["lookup"], [1.0], 8)
    records = [record(e, 0, Turn(5, [1, 2], "x", "eos", Parts(1.0), 1), score={"exact": 1.0}) for e in made]
    assert sections(load_runs(save(tmp_path / "run", made, records, "squad"))) == []
