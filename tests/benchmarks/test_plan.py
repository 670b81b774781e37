"""What is measured for the report on the papers: the commands, and the files that they read."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.papers import plan
from benchmarks.papers.__main__ import main
from benchmarks.papers.plan import FILES, Pair, Plan, write_trees
from benchmarks.papers.planned_runs import CODER, EDITS, PROGRAMS, RUNS, TREE_SIZES, PlannedRun
from draftree.cli.main import run as draftree
from draftree.papers.c2t import DEFAULT, SHIPPED
from draftree.policies.fixed import best_tree, expected_acceptance_length, read_tree

from ..pairs import save_tree


def the_run(name: str) -> PlannedRun:
    return next(run for run in RUNS if run.name == name)


def test_plans_are_commands_that_parse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is run up to its prompts, which an empty folder of prompt sets does not have."""
    for file in FILES.values():
        (tmp_path / file).write_bytes(b"GGUF")
    made = Plan(tmp_path / "runs", Pair.of_folder(str(tmp_path)), quick=False)
    monkeypatch.setenv("DRAFTREE_DATA", str(tmp_path))
    (tmp_path / "runs" / "made").mkdir(parents=True)
    for models in ("coder", "smollm2"):
        for size in ("", *(f"-{nodes}" for nodes in TREE_SIZES)):
            save_tree(Path(f"{made.names(models)['sequoia']}{size}.json"), "target", "drafter")
    shutil.copy(SHIPPED / f"{DEFAULT}.json", made.names(CODER)["classifier"])
    for planned in made.runs:
        assert draftree([*made.command(planned), "--data", str(tmp_path)]) == 2
        complaint = capsys.readouterr().err
        files = {"humaneval": "HumanEval", EDITS: "edits.jsonl", PROGRAMS: "programs.jsonl"}
        name = files.get(planned.suite, planned.suite.replace("-", "_"))
        assert name in complaint and str(tmp_path) in complaint, (planned.name, complaint)
    assert not made.artifacts(made.runs)
    for made_file in (tmp_path / "runs" / "made").iterdir():
        made_file.unlink()
    missing = made.artifacts(made.runs)
    assert len(missing) == 3
    for command, _ in missing.values():
        assert draftree(command) == 2, command
        assert re.search("prompts.jsonl|tasks.jsonl", capsys.readouterr().err)


def test_a_run_makes_only_what_it_reads(tmp_path: Path) -> None:
    """A run of chains decoded 72 answers first, to choose a threshold that it has no use for."""
    made = Plan(tmp_path, Pair("target.gguf", "draft.gguf"), quick=False)
    read = {
        run: ({file.stem for file in made.artifacts([the_run(run)])}, made.thresholds([the_run(run)]))
        for run in ("windows-coder", "trees-coder", "small-coder", "confidence-smollm2")
    }
    assert read == {
        "windows-coder": (set(), []),
        "trees-coder": ({"sequoia-coder"}, [CODER]),
        "small-coder": ({"sequoia-coder", "c2t-coder"}, []),
        "confidence-smollm2": ({"c2t-coder"}, []),
    }


def test_one_calibration_gives_the_trees_of_all_sizes(tmp_path: Path) -> None:
    """They are those of a calibration for each size."""
    name = str(tmp_path / "sequoia")
    save_tree(Path(f"{name}.json"), "target", "drafter")
    (tmp_path / "sequoia-4.json").write_text("is kept: a run that goes on has read it")
    write_trees(name)
    counted, small = read_tree(f"{name}.json"), read_tree(f"{name}-8.json")
    acceptance = counted.counts.acceptance
    assert small == replace(
        counted, tree=best_tree(acceptance, 8), expected_acceptance_length=small.expected_acceptance_length
    )
    assert small.expected_acceptance_length == pytest.approx(expected_acceptance_length(acceptance, small.tree))
    assert (tmp_path / "sequoia-4.json").read_text().startswith("is kept")
    assert len(list(tmp_path.iterdir())) == 1 + len(TREE_SIZES)


@pytest.mark.parametrize(("name", "reads"), [("windows-coder", False), ("trees-coder", True)])
def test_a_run_needs_no_prompts_that_it_does_not_read(
    name: str, reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = list[Sequence[str]]()
    monkeypatch.setenv("DRAFTREE_DATA", str(tmp_path))
    monkeypatch.setattr(plan, "_call", lambda module, arguments: called.append(arguments))
    made = Plan(tmp_path / "runs", Pair("target.gguf", "draft.gguf"), quick=False, only=[name])
    with pytest.raises(FileNotFoundError, match="seed_tasks") if reads else nullcontext():
        made.measure()
    assert len(called) == (not reads)


def test_a_pair_and_methods_of_ones_own_take_part(tmp_path: Path) -> None:
    own = "my_module:MyPolicy:width=3"
    made = Plan(tmp_path, Pair.of_user("mine.gguf", "small.gguf"), quick=False, methods=[own])
    assert {run.models for run in made.runs} == {CODER}
    for run in made.runs:
        options = dict(itertools.pairwise(made.command(run)))
        assert options["--target"] == "mine.gguf" and "head" not in re.split("[,>]", options["--drafters"])
        assert options["--methods"].endswith(f",{own}")
    chosen = PlannedRun("made/deltas-coder", CODER, "mt-bench", 5, 48, "opt-tree:nodes=25:delta=0.1", 1)
    assert own not in made.command(chosen)
    assert dict(itertools.pairwise(made.command(chosen)))["--methods"] == chosen.methods


@pytest.mark.parametrize(
    "options", [["--target", "x"], ["--draft", "y"], ["--target", "x", "--draft", "y", "--pair", "z"]]
)
def test_half_a_pair_is_refused(options: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--target and --draft go together"):
        main([str(tmp_path), "--measure", *options])
