"""The report on the papers: which run a figure is from, what it says, and what is measured for it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path

import pytest

from benchmarks.commands import without_folders
from benchmarks.papers import agreement, dsbd, hsddw, opt_tree, page
from benchmarks.papers.__main__ import CHAPTERS, DIGESTS, build, main, merged
from benchmarks.papers.dsbd import Point, kind, one_cache, pareto
from benchmarks.papers.gunjur import over, wasted
from benchmarks.papers.plan import Plan
from benchmarks.papers.planned_runs import RUNS, SMALL, PlannedRun
from benchmarks.papers.sections import OPENING, OWN_OPENING, Chapter, Part, Section, Verdict, shown, verdict_in
from benchmarks.quality.answers import FILE, Scored
from draftree.bench.entries import AR, Entry, entries
from draftree.bench.results import CONFIG, SUMMARY, Parts, Turn
from draftree.bench.summary import Interval, LoadedRun, load_runs
from draftree.errors import ConfigError

from ..bench.runs import full_run, record, save, turn

BEAMS = (
    "chain,static:verify=multi-round-replacement,beams:width=2:drafter=none,beams:width=4:drafter=none,"
    "beams:width=2:drafter=self,beams:width=4:drafter=self,beams:width=4:single=yes:drafter=self"
)
NAMES = {
    "draft": "self",
    "upper": "head",
    "head": "lookup",
    "levels": "lookup>head,lookup>head:pending=1,lookup>head:rejected=on,head",
    "classifier": "smollm2-head",
    "other": "smollm2-head",
    "sequoia": "FILE",
    "delta": "0.1",
}
"""What stands for the names of plans where nothing is loaded."""


def stored(folder: Path, planned: PlannedRun, slow: float = 1.0) -> LoadedRun:
    """A run as planned, of three prompts, that was never decoded; each contestant is faster than the one before."""
    methods = planned.methods.format(**NAMES).replace(":classifier=smollm2-head", "")
    methods = ",".join(method for method in methods.split(",") if not method.startswith("sequoia"))
    if planned.name.startswith("confidence"):
        methods = "eagle2:nodes=8,eagle2:nodes=32,c2t:nodes=8,c2t:nodes=16:beta=0.02,c2t:nodes=16:top=15"
    drafters = planned.drafters.format(**NAMES).split(",")
    temperatures = [float(t) for t in planned.temperature.split(",")]
    made = entries(methods.split(","), drafters, temperatures)
    records = []
    for prompt in range(3):
        for at, entry in enumerate(made):
            if any(e.beams is not None for e in made):
                own = answer(entry, slow * 10 / (at + 1))
            elif entry.method == AR:
                own = turn([1] * 12, 2 * slow, drafts=False)
            else:
                own = turn([3, 2, 1, 4, 2] if at % 2 else [2, 2, 2, 2, 2, 2], slow / (at + 1), nodes=entry.nodes)
            records.append(record(entry, prompt, own))
    path = save(folder / planned.name, made, records, planned.suite)
    if planned.scored:
        measure = dsbd.MEASURES[planned.suite]
        scores = [
            Scored(r.prompt, r.method, {measure: float(n % 2)}, [0.2 + n / 100] if r.method == AR else None)
            for n, r in enumerate(records)
        ]
        save_scores(path, scores)
    return load_runs(path)[0]


def save_scores(folder: Path, scores: Sequence[Scored]) -> None:
    (folder / FILE).write_text("".join(json.dumps(asdict(one)) + "\n" for one in scores))


def answer(entry: Entry, seconds: float, layers: int = 10, drafted: int | None = 6) -> Turn:
    """Ten tokens in nine passes; those that have a drafter drafted so many layers."""
    parts = Parts(seconds, 0.0, 0.0, seconds, 0.0)
    wide = None if entry.beams is None else layers
    made = Turn(5, list(range(10)), "x", "eos", parts, 9, layers=wide, drafted_layers=drafted if entry.drafter else 0)
    return replace(made, cpu=2 * seconds, accepted_widths=[0, 2, 3, 3] if entry.beams and entry.drafter else None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    for planned in RUNS:
        stored(made, planned)
    return made


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, str]:
    """Of all runs: its files."""
    return build({run.path.name: run for run in load_runs(folder)})


def test_a_report_of_all_runs_has_a_page_and_all_chapters_and_figures(report: dict[str, str]) -> None:
    page, lines = report["results.md"], report["papers/runs.jsonl"].splitlines()
    assert len(page.splitlines()) <= 200
    assert [json.loads(line)["run"] for line in lines] == sorted(run.name for run in RUNS)
    for chapter in CHAPTERS:
        text = report[f"papers/{chapter.name}.md"]
        assert text.startswith(f"# {chapter.title}") and re.search(
            r"\*\*Verdict: (holds|partly|does not hold here)", text
        )
        assert f"[{chapter.title}](papers/{chapter.name}.md)" in page
        assert {*re.findall(r"!\[.*\]\(figures/(.*).svg\)", text)} <= {Path(name).stem for name in report}
    figures = {Path(name).stem for name in report if name.endswith(".svg")}
    assert figures >= {"gunjur-1", "gunjur-5", "opt-tree-6", "opt-tree-8", "opt-tree-9", "c2t-curves", "dsbd-squad"}
    whole = "".join(report.values())
    assert all(f"`{planned.name}`" in whole for planned in RUNS)


def test_a_report_names_no_folder_of_the_machine() -> None:
    command = (
        "draftree bench --methods c2t:classifier=/a/b/own.json:beta=0.1,chain --drafters 'lookup>/a/x.gguf:pending=1'"
    )
    assert without_folders(f"{command} --out /runs/one --temperature 0/1") == (
        "draftree bench --methods c2t:classifier=own.json:beta=0.1,chain --drafters 'lookup>x.gguf:pending=1'"
        " --out one --temperature 0/1"
    )


def test_a_verdict_is_of_all_that_was_shown() -> None:
    assert Verdict.of([]) is None
    shown = {(True, True): Verdict.HOLDS, (True, False): Verdict.PARTLY, (False, False): Verdict.NOT_HERE}
    assert {each: Verdict.of(each) for each in shown} == shown


def test_a_figure_is_from_the_run_that_it_names(folder: Path, tmp_path: Path) -> None:
    """Another run that has all that it needs, and whose name sorts first, is not taken."""
    full_run(tmp_path / "0-first")
    (other,) = load_runs(tmp_path)
    assert build({other.path.name: other}).keys() == {"results.md", "papers/runs.jsonl"}
    runs = {run.path.name: run for run in load_runs(folder)}
    alone, both = (build(given, ["hsddw"]) for given in (runs, {other.path.name: other} | runs))
    assert both["papers/hsddw.md"] == alone["papers/hsddw.md"]


def part(chapter: Chapter, name: str) -> Part:
    return next(part for part in chapter.parts if part.name == name)


def rows_of(section: Section | None) -> dict[str, Sequence[str]]:
    """First cell -> the others."""
    assert section is not None and section.grid is not None
    return {row[0]: row[1:] for row in section.grid.rows}


def the_run(name: str) -> PlannedRun:
    return next(run for run in RUNS if run.name == name)


def test_scores_and_processor_time_are_in_one_table(tmp_path: Path) -> None:
    run = stored(tmp_path, the_run("humaneval-quality-coder"))
    save_scores(run.path, [Scored(r.prompt, r.method, {"pass@1": float(r.method == AR)}) for r in run.records])
    rows = rows_of(part(dsbd.CHAPTER, "quality").make({run.path.name: run}))
    assert [*rows] == [f"humaneval-quality-coder: {e.label}" for e in run.entries]
    ar, lossy, _, _, beams, *_ = rows.values()
    assert [row[0] for row in (ar, lossy, beams)] == ["1.00 [1.00, 1.00]", *["0.00 [0.00, 0.00]"] * 2]
    assert [row[4] for row in (ar, lossy, beams)] == ["2.000", "1.000", "0.400"]  # 20 / n seconds for ten tokens
    assert [row[5][:4] for row in (ar, lossy, beams)] == ["0.20", "0.40", "1.00"]


def test_accepted_widths_are_means_over_verified_layers(tmp_path: Path) -> None:
    run = stored(tmp_path, the_run("spider-widths-coder"))
    rows = rows_of(part(dsbd.CHAPTER, "widths").make({run.path.name: run}))
    assert {name.partition(": ")[2] for name in rows} == {e.label for e in run.entries if e.beams and e.drafter}
    assert {tuple(row) for row in rows.values()} == {("12", "2.00")}


def test_the_claim_is_looked_at_in_long_answers_too(tmp_path: Path) -> None:
    """The verdict was of answers of four to thirty tokens, where the prompt's second reading decides."""
    made = [stored(tmp_path, the_run(name)) for name in ("squad-beams-coder", "humaneval-quality-coder")]
    runs = {run.path.name: run for run in made}
    found = dsbd.speedup(runs, "humaneval-quality-coder")
    assert found is not None and found.mean == pytest.approx(7 / 5, rel=1e-5)  # the seventh contestant over the fifth
    assert "1.40 [1.40, 1.40] in `humaneval-quality-coder`" in str(dsbd.CHAPTER.found(runs))
    assert dsbd.CHAPTER.verdict(runs) is Verdict.HOLDS


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


def test_a_front_has_no_point_that_another_beats() -> None:
    points = [Point(1, 5), Point(2, 4), Point(2, 3), Point(3, 4), Point(4, 1), Point(0.5, 5)]
    assert pareto(points) == [Point(1, 5), Point(3, 4), Point(4, 1)]


def test_a_run_of_another_plan_is_not_taken(tmp_path: Path) -> None:
    """Methods of one's own in a folder that had runs already were not measured, and nothing was said."""
    planned = the_run("windows-smollm2")
    made = Plan(tmp_path, None, quick=False, only=[planned.name])
    path = stored(tmp_path, planned).path
    (path / SUMMARY).write_text("{}")
    config = json.loads((path / CONFIG).read_text())

    def missing(plan: Plan, command: list[str]) -> list[PlannedRun]:
        (path / CONFIG).write_text(json.dumps({**config, "command": shlex.join(["draftree", *command])}))
        (path / SUMMARY).write_text('{"methods": {}}')
        return plan.missing()

    own = made.command(planned)
    assert missing(made, own) == []
    assert missing(made, [word.replace(str(tmp_path), "/elsewhere") for word in own]) == []
    for other in (Plan(tmp_path, None, quick=False, only=[planned.name], methods=["mine:M"]), made):
        with pytest.raises(ConfigError, match="windows-smollm2"):
            missing(other, own if other is not made else [*own, "--seed", "2"])


def test_a_part_of_a_chapter_does_not_replace_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="hsddw/window"):
        main([str(tmp_path), "--only", "hsddw/window", "--docs", str(tmp_path)])


def test_an_own_pair_is_named_in_the_chapter(tmp_path: Path) -> None:
    run = stored(tmp_path, the_run("windows-coder"))
    text = build({run.path.name: run}, ["hsddw"])["papers/hsddw.md"]
    assert "**coder** stands for `tiny`" in text and OWN_OPENING in text
    assert OPENING not in text and "## Why it differs" not in text  # which are of our models


def test_digests_of_some_runs_leave_those_of_others(folder: Path) -> None:
    runs = {run.path.name: run for run in load_runs(folder)}
    every, some = build(runs)[DIGESTS], build(runs, ["hsddw"])[DIGESTS]
    old = every.replace('"commit": "0abc"', '"commit": "0def"')
    dropped = json.dumps({"run": "a-run-that-is-planned-no-more", "commit": "0def"})
    both = {line["run"]: line["commit"] for line in map(json.loads, merged(f"{old}{dropped}\n", some).splitlines())}
    assert both.keys() == runs.keys()
    assert {name for name in both if both[name] == "0abc"} == {*hsddw.LEVELS, *hsddw.WINDOWS}


def test_the_page_is_made_of_its_own_runs_and_of_verdicts_that_stand_in_the_docs(folder: Path, tmp_path: Path) -> None:
    runs = {run.path.name: run for run in load_runs(folder)}
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "dsbd.md").write_text("**Verdict: holds.** So it is.")
    made = build(runs, ["results", "hsddw"], docs=tmp_path)
    assert {name for name in made if name.endswith(".md")} == {"results.md", "papers/hsddw.md"}
    verdicts = re.findall(r"\(papers/(\w+)\.md\): \*\*(.*)\*\*", made["results.md"])
    assert verdicts == [("hsddw", verdict_in(made["papers/hsddw.md"])), ("dsbd", "holds")]
    assert "No difference in `small-coder`" in made["results.md"]


def test_rivals_of_as_many_nodes_are_compared(folder: Path) -> None:
    """Each contestant of these runs is faster than the one before, so all differ, and the chain of as many is known."""
    (run,) = load_runs(folder / "small-smollm2")
    text = "\n".join(page.paying({"small-smollm2": run}))
    assert "No difference in `small-smollm2`: none." in text
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| ")]
    over = {row[1]: row[5] for row in rows}
    assert over["chain:depth=8"] == "1.00 [1.00, 1.00]" and over["auto"] == over["ar"] == ""
    places = [shown(entry) for entry in run.entries]
    for label in over.keys() & {*places}:
        if rival := next((f"chain:depth={n}" for n in SMALL if re.search(f"(nodes|cap)={n}$", label)), None):
            ratio = (places.index(label) + 1) / (places.index(rival) + 1)
            assert float(over[label].split()[0]) == pytest.approx(ratio, rel=0.2), label


def test_a_figure_of_one_method_says_within_how_many_nodes_it_was(folder: Path) -> None:
    """Figure 5 has early stopping within 4 tokens, and Figure 2 beside it within 31 too."""
    runs = {run.path.name: run for run in load_runs(folder)}
    text = build(runs, ["gunjur"])["papers/gunjur.md"]
    assert "`early-stop:nodes=4` takes" in text and "`dynamic-width:nodes=4096` takes" in text


def test_a_verdict_on_opt_tree_is_of_all_its_tables(folder: Path) -> None:
    runs = {run.path.name: run for run in load_runs(folder) if run.path.name in opt_tree.TABLES}
    found = str(opt_tree.CHAPTER.found(runs))
    assert all(f"in `{name}`" in found for name in opt_tree.TABLES)
    best = opt_tree.fastest(runs["trees-coder"])
    assert best is not None and best.nodes == 8  # the last, and so the fastest, of its contestants


def test_pages_of_other_systems_are_each_of_one_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"model": "tiny", "suite": "own", "max_tokens": 8, "draft": "", "machine": "AMD, 2 cores", "commit": "0abc"}
    answer = {"version": "1", "prompt": "a", "ids": [1], "text": "x", "decode_tokens": 2, "decode_seconds": 1.0}
    speeds = [{**row, **answer, "rival": name, "round": 0} for name in ("llama.cpp", "draftree-ar")]
    texts = [
        {**row, **answer, "rival": name, "factor": factor, "text": factor if name == "llama.cpp" else "x"}
        for name in ("draftree-ar", "llama.cpp")
        for factor in ("plain", "4 requests")
    ]
    report = tmp_path / "report"
    for made, folder, rows in (("systems", "rivals", speeds), ("exactness", "exactness", texts)):
        with pytest.raises(SystemExit, match=f"{tmp_path}/{folder} .*benchmarks.{folder} "):
            main([str(tmp_path), "--only", made])
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        main([str(tmp_path), "--only", made])
        assert "AMD, 2 cores, commit 0abc" in " ".join((report / f"{made}.md").read_text().split())
    assert {file.name for file in report.iterdir()} == {"systems.md", "exactness.md"}
    cells = (report / "exactness.md").read_text().splitlines()[-3].split("|")[1:4]
    assert [cell.strip() for cell in cells] == ["4 requests", "0 of 1", "1 of 1"]
    with pytest.raises(SystemExit, match=f"{tmp_path}: "):
        main([str(tmp_path), "--only", "systems", "--only", "results"])


def test_three_levels_are_held_against_the_middle_one_alone(folder: Path) -> None:
    (run,) = load_runs(folder / "levels-smollm2")
    found = hsddw.three_over_two(run)  # a half of a second and a fifth of it
    assert found.keys() == {"lookup"} and astuple(found["lookup"]) == pytest.approx((0.4, 0.4, 0.4), rel=1e-5)


def test_speed_over_another_and_layers_wasted(folder: Path) -> None:
    (run,) = load_runs(folder / "widths-smollm2")
    found = over(run, "static", "chain")
    assert found is not None  # a second over 2, and over 3
    assert astuple(found) == pytest.approx((1.5, 1.5, 1.5), rel=1e-5)
    assert over(run, "static", "hsddw") is None
    base = entries(["chain"], ["lookup"], [0.0], 8)[1]
    slow = [record(base, i, turn([2, 2], 4.0)) for i in range(3)]
    assert wasted(slow[0]) == 2  # two layers drafted in each step, one accepted


def test_two_runs_of_one_command_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        full_run(tmp_path / name, [0.0])
    agreement.main([str(tmp_path / "a"), str(tmp_path / "b")])
    printed = capsys.readouterr().out
    assert printed.startswith("26 of 26 ratios agree") and "1.00 to 1.00" in printed
    full_run(tmp_path / "c", [1.0])
    with pytest.raises(SystemExit, match="another entries"):
        agreement.main([str(tmp_path / "a"), str(tmp_path / "c")])
    config = json.loads((tmp_path / "b" / CONFIG).read_text())
    for key in ("threads", "backend", "dtype", "device", "top_k", "top_p", "files"):
        (tmp_path / "b" / CONFIG).write_text(json.dumps({**config, key: "another"}))
        with pytest.raises(SystemExit, match=f"another {key}"):
            agreement.main([str(tmp_path / "a"), str(tmp_path / "b")])


def test_runs_agree_where_each_mean_lies_in_the_others_interval() -> None:
    wide = Interval(1.2, 1.0, 1.4)
    assert agreement.agree(wide, Interval(1.1, 1.05, 1.25))
    assert not agreement.agree(wide, Interval(1.1, 1.05, 1.15))
    assert not agreement.agree(Interval(1.1, 1.05, 1.15), wide)
