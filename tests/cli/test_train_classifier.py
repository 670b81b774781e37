"""``draftree train classifier`` and drafting with what it trained, through the entry point."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from draftree.cli.main import run
from draftree.papers.c2t import read_classifier
from draftree.train import c2t_samples as sample_store
from draftree.train.responses import respond

from ..tiny import save_tiny
from .messages import Captured, complaint

WORDS = ("the cat", "a hat", "one two", "is it", "where now")
QUESTIONS = [f"{a} {b}" for a in WORDS for b in WORDS]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(QUESTIONS))
    return path


def asked(model: str, prompts: Path, out: Path, *more: str) -> list[str]:
    given = ["train", "classifier", "--prompts", str(prompts), "--out", str(out), "--target", model, "--max-tokens"]
    return [*given, "6", "--drafter", "self", "--negatives", "0.5", "--epochs", "2", *more]


def test_it_trains_a_classifier_that_generate_drafts_with(
    model: str, prompts: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "net.json"
    capsys.readouterr()
    assert run(asked(model, prompts, out)) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "1 prompts kept apart" in printed.out
    assert "beta  precision  recall  positive rate" in printed.out
    assert "calibration error" in printed.out
    found = read_classifier(str(out))
    assert found.classifier.parameters == 289
    assert found.made_for.drafter == "self"
    assert found.trained_on["prompts"][0]["name"] == prompts.name
    assert found.trained_on["responses"] == len(QUESTIONS)
    assert found.trained_on["recipe"]["hidden"] == 48
    assert found.held_out["prompts"] == 1

    question = ["generate", QUESTIONS[0], "--target", model, "--max-tokens", "24", "--json"]
    assert run([*question, "--drafter", "none"]) == 0
    plain = json.loads(capsys.readouterr().out)
    chosen = ["--method", "c2t", "--set", f"classifier={out}", "--set", "beta=0.01"]
    for more in ([], ["--set", "width=1"], ["--set", "top=none"], ["--temperature", "0"]):
        assert run([*question, *chosen, *more]) == 0  # the drafter is the one that it was made for
        printed = capsys.readouterr()
        assert json.loads(printed.out)["token_ids"] == plain["token_ids"]
        assert printed.err == ""
    assert run([*question, *chosen, "--drafter", "lookup"]) == 0
    assert "the classifier learned from target" in complaint(capsys)


def test_a_second_fit_takes_the_same_samples(model: str, prompts: Path, tmp_path: Path, capsys: Captured) -> None:
    out, data = tmp_path / "net.json", ["--data", str(tmp_path / "data")]
    assert run(asked(model, prompts, out, *data)) == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "data").iterdir()}
    other, more = (
        tmp_path / "other.json",
        ("--feature", "probability", "--feature", "depth", "--hidden", "12", "--apart", "5"),
    )
    assert run(asked(model, prompts, other, *data, *more)) == 0
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "data").iterdir()} == before
    assert read_classifier(str(other)).classifier.features == ("probability", "depth")
    assert read_classifier(str(other)).held_out["prompts"] == len(QUESTIONS) // 5
    assert len(read_classifier(str(other)).classifier.hidden) == 12


def test_a_second_fit_of_fewer_samples_takes_the_first_ones(model: str, prompts: Path, tmp_path: Path) -> None:
    """It took all that another fit had drawn, so a folder could not show what more samples gain."""
    data, part = tmp_path / "data", tmp_path / "part"
    assert run(asked(model, prompts, tmp_path / "net.json", "--data", str(data))) == 0
    recipe, *files = sorted(data.iterdir())
    few = sum(len(load_file(file)["accepted"]) for file in files[:4])
    part.mkdir()
    for file in (recipe, *files[:4]):
        shutil.copy(file, part)
    made = list[Path]()
    for folder, samples in ((data, few), (data, few - 1), (part, few)):
        made.append(tmp_path / f"{len(made)}.json")
        more = ("--data", str(folder), "--samples", str(samples), "--apart", "3")
        assert run(asked(model, prompts, made[-1], *more)) == 0
    assert made[0].read_bytes() == made[1].read_bytes() == made[2].read_bytes()
    assert read_classifier(str(made[0])).trained_on["responses"] == 4
    assert len([*part.iterdir()]) == 5


def test_samples_of_a_target_of_other_weights_are_refused(prompts: Path, tmp_path: Path, capsys: Captured) -> None:
    """Names alone would have mixed the samples of two models that lay in the same folder one after the other."""
    folder, data = tmp_path / "tiny", ["--data", str(tmp_path / "data")]
    assert run(asked(str(save_tiny(folder)), prompts, tmp_path / "net.json", *data)) == 0
    assert run(asked(str(save_tiny(folder)), prompts, tmp_path / "again.json", *data)) == 0
    save_tiny(folder, seed=5)
    capsys.readouterr()
    assert run(asked(str(folder), prompts, tmp_path / "other.json", *data)) == 2
    assert "holds samples of other models, prompts or settings" in complaint(capsys)


def test_an_interrupted_training_goes_on_where_it_was(
    model: str, prompts: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole.json", tmp_path / "net.json"
    assert run(asked(model, prompts, whole)) == 0
    real = respond

    def interrupted(*arguments: object, **more: object) -> Iterator[object]:
        for count, response in enumerate(real(*arguments, **more)):  # type: ignore[arg-type]
            if count == 7:
                raise KeyboardInterrupt
            yield response

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(sample_store, "respond", interrupted)
        assert run(asked(model, prompts, out)) == 130
    assert "samples: the same command goes on from there" in complaint(capsys)
    assert not out.exists()
    assert run(asked(model, prompts, out)) == 0
    assert out.read_bytes() == whole.read_bytes()


def test_nothing_accepted_is_said(model: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join("abcdefghijklmnopqrstuvwxyz"))
    capsys.readouterr()
    assert run(asked(model, path, tmp_path / "net.json", "--raw", "--max-tokens", "2", "--drafter", "lookup")) == 1
    assert "nothing to learn from" in complaint(capsys)


BAD = {
    "one token": (["--max-tokens", "1"], "--max-tokens is 1"),
    "nothing left to learn from": (["--apart", "1"], "--apart is 1: use at least 2"),
    "no such feature": (["--feature", "colour"], "no feature 'colour': choose from probability"),
    "a feature twice": (["--feature", "depth", "--feature", "depth"], "each once"),
    "no drafter": (["--drafter", "none"], "drafter none drafts nothing"),
    "no folder": (["--out", "nowhere/net.json"], "folder nowhere"),
    "no prompt file": (["--prompts", "nowhere.txt"], "no prompt file 'nowhere.txt'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused_before_any_work(case: str, prompts: Path, tmp_path: Path, capsys: Captured) -> None:
    arguments, named = BAD[case]
    assert run(asked("./nowhere", prompts, tmp_path / "net.json", *arguments)) == 2
    assert named in complaint(capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.txt"]


def test_too_few_prompts_to_keep_one_apart_give_no_figures(
    model: str, prompts: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert run(asked(model, prompts, tmp_path / "net.json", "--apart", "26")) == 0
    assert "no figures; use larger --samples, or a smaller --apart" in capsys.readouterr().out
