"""The papers' tables and figures from stored runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.papers import agreement, headlines
from benchmarks.papers.__main__ import build, main
from benchmarks.papers.dsbd import Point, kind, one_cache, pareto, sections
from benchmarks.papers.gunjur import saving, wasted
from benchmarks.papers.sections import Section
from benchmarks.quality.answers import FILE, Scored
from draftree.bench.contestants import Entry, entries
from draftree.bench.results import Parts, Turn
from draftree.bench.summary import Interval, load_runs

from ..bench.runs import full_run, record, save, turn

BEAMS = (
    "chain,static:verify=multi-round-replacement,beams:width=2:drafter=none,beams:width=4:drafter=none,"
    "beams:width=2:drafter=self,beams:width=4:drafter=self,beams:width=4:single=yes:drafter=self"
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_run(tmp_path_factory.mktemp("runs") / "one")


@pytest.fixture(scope="module")
def built(stored: Path) -> list[Section]:
    return build(load_runs(stored))


def save_scores(folder: Path, scores: Sequence[Scored]) -> None:
    (folder / FILE).write_text("".join(json.dumps(asdict(one)) + "\n" for one in scores))


def answer(entry: Entry, seconds: float, layers: int = 10, drafted: int | None = 6) -> Turn:
    """Ten tokens in nine passes; those that have a drafter drafted so many layers."""
    parts = Parts(seconds, 0.0, 0.0, seconds, 0.0)
    wide = None if entry.beams is None else layers
    return Turn(5, list(range(10)), "x", "eos", parts, 9, layers=wide, drafted_layers=drafted if entry.drafter else 0)


def reported(folder: Path, suite: str, joules: float | None, drafted: int = 6) -> list[Section]:
    """The sections of a run whose contestants are each a little faster and better than those before."""
    made = entries(BEAMS.split(","), ["lookup"], [1.0], 8)
    measure = "execution" if suite == "spider" else "exact"
    records = [
        record(
            entry,
            prompt,
            answer(entry, 10 / (number + 1), drafted=drafted),
            joules=None if joules is None else joules * 10,
        )
        for prompt in range(3)
        for number, entry in enumerate(made)
    ]
    scores = [Scored(r.prompt, 0, r.method, {measure: n % len(made) / 10}) for n, r in enumerate(records)]
    save_scores(save(folder / suite, made, records, suite), scores)
    return sections(load_runs(folder / suite))


def titles(found: Sequence[Section]) -> list[str]:
    return [s.title.partition(":")[0] for s in found]


def test_contestants_have_the_papers_names() -> None:
    made = entries([*BEAMS.split(","), "peer:hf-beam-search"], ["lookup"], [1.0], 8)
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
    records = [record(e, 0, Turn(5, [1, 2], "x", "eos", Parts(1.0), 1)) for e in made]
    assert sections(load_runs(save(tmp_path / "run", made, records, "squad"))) == []


def test_a_report_has_every_figure_that_the_runs_have(built: list[Section]) -> None:
    titles = [s.title for s in built]
    for figure in (1, 2, 5, 6):
        assert any(t.startswith(f"Gunjur & Waitz, Figure {figure}:") for t in titles), figure
    for name in ("Table 1", "Table 3", *(f"Figure {n}" for n in (5, 6, 7, 8, 9, 10, 11))):
        assert any(t.startswith(f"OPT-Tree, {name}:") for t in titles), name


def test_auto_is_held_against_the_best_fixed_method_and_ar_decoding(tmp_path: Path) -> None:
    made = entries(["auto", "chain", "opt-tree"], ["lookup"], [0.0], 8)
    seconds = {"ar": 2.0, "auto": 1.0, "chain": 1.25, "opt-tree": 1.5}
    records = [
        record(e, prompt, turn([1] * 12, seconds[e.method] * (2.5 if (e.method, prompt % 2) == ("auto", 1) else 1.0)))
        for prompt in range(4)
        for e in made
    ]
    grid = headlines.sections(load_runs(save(tmp_path / "run", made, records)))[0].grid
    assert grid is not None
    rows = {row[0]: row[3] for row in grid.rows}
    ratio = rows["speed without the prefill, auto over the best of 2 fixed methods (chain)"]
    assert ratio.startswith(f"{(1.25 * 0.5) ** 0.5:.2f} [")
    under = rows["categories in which auto is under 0.98 of AR decoding, without the prefill"]
    assert under == "1 of 2; lowest 0.80 (b)"


def test_every_figure_has_the_command_that_made_it(built: list[Section]) -> None:
    for section in built:
        if section.figure:
            assert section.commands == ["draftree bench --suite humaneval"], section.title
            assert section.figure[1].startswith("<svg")


def test_markdown_has_its_figures_beside_it(stored: Path, tmp_path: Path) -> None:
    main([str(stored), "--markdown", str(tmp_path / "results.md")])
    text = (tmp_path / "results.md").read_text()
    shown = re.findall(r"!\[.*\]\((.*)\)", text)
    assert len(shown) > 7
    assert all((tmp_path / name).read_text().startswith("<svg") for name in shown)


def test_time_saved_and_layers_wasted() -> None:
    own, base = entries(["chain"], ["lookup"], [0.0], 8)
    slow = [record(base, i, turn([2, 2], 4.0)) for i in range(3)]
    fast = [record(own, i, turn([2, 2], 3.0)) for i in range(3)]
    assert saving(fast, slow) == pytest.approx((0.25, 0.25, 0.25))
    assert wasted(slow[0]) == 2  # two layers drafted in each step, one accepted


def test_gsm8k_shows_the_entropy_of_right_and_wrong_answers(tmp_path: Path) -> None:
    plain, chain = entries(["chain"], ["lookup"], [0.0], 8)
    records, scores = [], []
    for prompt in range(4):
        records += [record(plain, prompt, turn([1, 1], 1.0, drafts=False)), record(chain, prompt, turn([2], 1.0))]
        scores.append(Scored(f"p{prompt}", 0, "ar", {"exact": float(prompt < 2)}, [0.2 + 0.1 * prompt]))
        scores.append(Scored(f"p{prompt}", 0, "chain", {"exact": 1.0}))
    save_scores(save(tmp_path / "one", [plain, chain], records, suite="gsm8k"), scores)
    (loaded,) = load_runs(tmp_path / "one")
    section = next(s for s in build([loaded]) if "Figure 3" in s.title)
    assert "0.25 nats over 2 right answers, 0.45 over 2 wrong ones" in section.text[0]
    table = next(s for s in build([loaded]) if s.title == "Scores of the answers")
    assert table.grid is not None and table.grid.rows == [
        ["ar", "0.50 [0.00, 1.00]"],
        ["chain", "1.00 [1.00, 1.00]"],
    ]


def test_a_folder_of_runs_is_one_report_and_says_whether_they_agree(tmp_path: Path) -> None:
    for name in ("b", "a"):
        full_run(tmp_path / name, [0.0])
    runs = load_runs(tmp_path)
    assert [r.path.name for r in runs] == ["a", "b"]
    (section,) = agreement.sections(runs)
    assert section.text[0].startswith("26 of 26 ratios agree")
    assert "1.00 to 1.00" in section.text[0]


def test_runs_agree_where_each_mean_lies_in_the_others_interval() -> None:
    wide = Interval(1.2, 1.0, 1.4)
    assert agreement.agree(wide, Interval(1.1, 1.05, 1.25))
    assert not agreement.agree(wide, Interval(1.1, 1.05, 1.15))
    assert not agreement.agree(Interval(1.1, 1.05, 1.15), wide)


def test_without_matplotlib_it_says_what_to_install(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"draftree\[plots\]"):
        main([str(stored)])
