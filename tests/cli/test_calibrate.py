"""``draftree calibrate`` and what can be done with its file, through the entry point."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftree.bench.suites import STARTER_FILE
from draftree.cli import train as command
from draftree.cli.main import run
from draftree.policies.fixed import read_tree
from draftree.train import rank_acceptance
from draftree.train.rank_acceptance import measure
from draftree.train.responses import read_prompts

from ..pairs import save_tree
from ..tiny import MAX_LENGTH, save_tiny
from .messages import Captured, complaint

QUESTIONS = ["the cat in the hat", "a b a b a b", "is the hat in the cat?"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join([QUESTIONS[0], "", *QUESTIONS[1:], ""]))
    return path


def asked(model: str, prompts: Path, out: Path, *more: str) -> list[str]:
    given = ["calibrate", "--prompts", str(prompts), "--out", str(out), "--target", model, "--max-tokens", "14"]
    return [*given, "--depth", "4", "--nodes", "12", "--stride", "1", *more]


@pytest.mark.parametrize("drafter", ["lookup", "self", "MODEL"])
def test_calibrate_writes_a_tree_that_generate_drafts_with(
    drafter: str, model: str, prompts: Path, tmp_path: Path, capsys: Captured
) -> None:
    drafter = str(save_tiny(tmp_path / "small", seed=5)) if drafter == "MODEL" else drafter
    out = tmp_path / "tree.json"
    capsys.readouterr()
    assert run(asked(model, prompts, out, "--drafter", drafter)) == 0
    printed = capsys.readouterr()
    found = read_tree(str(out))
    assert f"{len(found.tree)} nodes" in printed.out
    assert printed.err == ""
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["prompts.txt", "tree.json"]
    assert (found.made_for.drafter, found.prompts) == (drafter, 3)

    question = ["generate", QUESTIONS[0], "--target", model, "--max-tokens", "24", "--json", "--drafter"]
    assert run([*question, "none"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert run([*question, drafter, "--method", "sequoia", "--set", f"tree={out}", "--nodes", "12"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["token_ids"] == plain["token_ids"]
    assert sum(report["stats"]["drafted"]) > 0 or drafter == "lookup"


def test_the_tree_of_a_drafter_that_is_always_right_is_a_chain(model: str, prompts: Path, tmp_path: Path) -> None:
    assert run(asked(model, prompts, tmp_path / "tree.json", "--drafter", "self")) == 0
    found = read_tree(str(tmp_path / "tree.json"))
    assert found.tree == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
    assert found.expected_acceptance_length == 5
    assert found.counts.acceptance.tolist() == [[1.0]] * 4


def _measure_one(*arguments: object) -> Iterator[int]:
    yield next(measure(*arguments))  # type: ignore[arg-type]
    raise KeyboardInterrupt


def test_what_an_interrupted_calibration_has_measured_is_kept(
    model: str, prompts: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out, sampled = tmp_path / "whole.json", tmp_path / "tree.json", ("--temperature", "1", "--drafter", "self")
    assert run(asked(model, prompts, whole, *sampled)) == 0

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(command, "measure", _measure_one)
        assert run(asked(model, prompts, out, *sampled)) == 130
    assert "interrupted after 1 of 3 prompts: the same command goes on from there" in complaint(capsys)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prompts.txt", "tree.json.part", "whole.json"]
    assert run(asked(model, prompts, out, *sampled, "--stride", "2")) == 2
    assert "of a calibration with other models, prompts or settings" in complaint(capsys)
    assert run(asked(model, prompts, out, *sampled)) == 0
    assert out.read_text() == whole.read_text()
    assert not (tmp_path / "tree.json.part").exists()


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_measurements_of_other_weights_are_refused(
    role: str, prompts: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names alone would have mixed the counts of two models that lay in the same folder one after the other."""
    folders = {"target": tmp_path / "target", "drafter": tmp_path / "drafter"}
    for folder in folders.values():
        save_tiny(folder)
    command_line = asked(str(folders["target"]), prompts, tmp_path / "tree.json", "--drafter", str(folders["drafter"]))
    with monkeypatch.context() as patch:
        patch.setattr(command, "measure", _measure_one)
        assert run(command_line) == 130
    save_tiny(folders[role], seed=5)
    capsys.readouterr()
    assert run(command_line) == 2
    assert "of a calibration with other models, prompts or settings" in complaint(capsys)
    save_tiny(folders[role])
    assert run(command_line) == 0


def _press(*arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("name", "pressed"), [("best_tree", _press), ("TREE_FILE", SimpleNamespace(write=_press))])
def test_measurements_are_kept_until_the_tree_is_written(
    name: str,
    pressed: object,
    model: str,
    prompts: Path,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were deleted first: Ctrl-C while the tree was made lost them all."""
    whole, out, drafter = tmp_path / "whole.json", tmp_path / "tree.json", ("--drafter", "self")
    assert run(asked(model, prompts, whole, *drafter)) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(command, name, pressed)
        assert run(asked(model, prompts, out, *drafter)) == 130
    assert "interrupted after 3 of 3 prompts: the same command goes on from there" in complaint(capsys)
    assert (tmp_path / "tree.json.part").exists() and not out.exists()
    with monkeypatch.context() as patch:
        patch.setattr(rank_acceptance, "ranks_along", None)  # nothing is measured again
        assert run(asked(model, prompts, out, *drafter)) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert not (tmp_path / "tree.json.part").exists()


def test_a_drafter_that_is_never_right_leaves_nothing_behind(model: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "prompts.txt").write_text("e")
    capsys.readouterr()
    assert run(asked(model, tmp_path / "prompts.txt", tmp_path / "tree.json", "--raw", "--max-tokens", "2")) == 1
    assert "lookup was never right in 1 trials: use more prompts" in complaint(capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.txt"]


BAD = {
    "no drafter": (["--drafter", "none"], "none drafts nothing"),
    "too deep": (["--depth", "65"], "--depth is 65: use at most 64"),
    "one token": (["--max-tokens", "1"], "--max-tokens is 1: use at least 2"),
    "no prompt file": (["--prompts", "nowhere.txt"], "no prompt file 'nowhere.txt'"),
    "no folder": (["--out", "nowhere/tree.json"], "folder nowhere"),
    "a folder": (["--out", "."], ". is a folder"),
}


def test_prompts_that_are_too_long_are_left_out(model: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "prompts.txt").write_text(f"the cat in the cat\n{'cat ' * MAX_LENGTH}")
    assert run(asked(model, tmp_path / "prompts.txt", tmp_path / "tree.json")) == 0
    assert read_tree(str(tmp_path / "tree.json")).prompts == 1


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused_before_any_work(case: str, prompts: Path, tmp_path: Path, capsys: Captured) -> None:
    arguments, named = BAD[case]
    assert run(asked("./nowhere", prompts, tmp_path / "tree.json", *arguments)) == 2
    assert named in complaint(capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.txt"]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.txt", b"\n \n", "a.txt has no prompts"),
        ("a.txt", b"caf\xe9", "a.txt: it is not valid UTF-8"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": ', "a.jsonl line 2 is not JSON"),
        ("a.jsonl", b'{"title": "x"}', "a.jsonl line 1 has no text under any of prompt, text, question, instruction"),
        ("a.jsonl", b'{"prompt": ["x"]}', "a.jsonl line 1 has no"),
        ("a.jsonl", b'{"prompt": " "}', "a.jsonl line 1 has no"),
        ("a.jsonl", b"[1]", "a.jsonl line 1 has no"),
        ("a.jsonl", b"", "a.jsonl has no prompts"),
    ],
)
def test_a_prompt_file_that_is_none_is_one_line(
    name: str, content: bytes, named: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / name).write_bytes(content)
    assert run(asked("./nowhere", tmp_path / name, tmp_path / "tree.json")) == 2
    assert named in complaint(capsys)


@pytest.mark.parametrize("what", ["generate", "chat"])
def test_a_tree_of_other_models_is_refused(what: str, model: str, tmp_path: Path, capsys: Captured) -> None:
    question = ["generate", "the cat", "--target", model] if what == "generate" else ["chat", model]
    question += ["--method", "sequoia"]
    tree = save_tree(tmp_path / "tree.json", "elsewhere/tiny", "self")
    capsys.readouterr()
    assert run([*question, "--set", f"tree={tree}", "--drafter", "lookup"]) == 2
    assert "made for drafter 'self', not 'lookup'" in complaint(capsys)
    save_tree(tree, "elsewhere/huge", "lookup")
    assert run([*question, "--set", f"tree={tree}", "--drafter", "lookup"]) == 2
    assert "made for target 'elsewhere/huge', not" in complaint(capsys)


def test_without_prompts_those_that_ship_are_measured(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()

    def read(name: str) -> tuple[list[str], str]:
        seen.append(name)
        return read_prompts(name)

    monkeypatch.setattr(command, "read_prompts", read)
    out = tmp_path / "tree.json"
    asked = ["calibrate", "--out", str(out), "--target", model, "--drafter", "self", "--max-tokens", "6", "--raw"]
    assert run([*asked, "--depth", "2", "--nodes", "4"]) == 0
    assert seen == [str(STARTER_FILE)] and len(read_prompts(seen[0])[0]) == 20
    assert read_tree(str(out)).prompts >= 1
