"""``draftree profile``, and what ``generate`` does with costs, through the entry point."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from draftree.cli.main import run
from draftree.errors import RunError
from draftree.models import cost_profile
from draftree.models.measuring import Grid

from .messages import Captured, complaint

SMALL = Grid((1, 2, 4), (4, 8), (1, 2), 1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Profiles of each test go to a folder of its own."""
    place = tmp_path / "profiles"
    monkeypatch.setattr(cost_profile, "profile_folder", lambda: place)
    monkeypatch.setattr("draftree.cli.info.FULL", SMALL)
    return place


def test_profile_prints_a_table_and_keeps_the_profile(model: str, folder: Path, capsys: Captured) -> None:
    assert run(["profile", model]) == 0
    out = capsys.readouterr().out
    for words in ("context 4", "context 8", "batch 1", "batch 2", "milliseconds a pass"):
        assert words in out
    kept = list(folder.iterdir())
    assert len(kept) == 1
    assert str(kept[0]) in out
    points = json.loads(kept[0].read_text())["points"]
    assert [(p["batch"], p["context"], p["sizes"]) for p in points] == [
        (b, c, [1, 2, 4]) for b in (1, 2) for c in (4, 8)
    ]


@pytest.mark.parametrize("before", [False, True])
def test_a_profile_is_not_said_to_be_kept_where_it_is_not(
    before: bool, model: str, folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file of an earlier one is at its place."""

    def full(path: Path, content: str) -> None:
        raise RunError(f"cannot write {path}: No space left on device: make room there")

    if before:
        assert run(["profile", model]) == 0
        (kept,) = folder.iterdir()
        other = json.loads(kept.read_text())
        other["points"][0]["seconds"][-1] *= 2
        kept.write_text(json.dumps(other))
        capsys.readouterr()
    monkeypatch.setattr("draftree.artifacts.write_whole", full)
    assert run(["profile", model]) == 0
    printed = capsys.readouterr()
    assert "milliseconds a pass" in printed.out and str(folder) not in printed.out
    assert "the profile is not kept" in printed.err


def test_generate_measures_nothing_and_explains_itself(model: str, folder: Path, capsys: Captured) -> None:
    assert run(["generate", "a b a b a b a b", "--target", model, "--max-tokens", "24", "--explain"]) == 0
    first = capsys.readouterr().err
    assert "measuring passes" not in first
    for words in ("auto: ", "tokens a step", "passes of AR decoding", "steps drafted", "drafter lookup, now "):
        assert words in first
    assert not folder.exists()


def test_info_prints_the_engine_and_where_costs_come_from(model: str, folder: Path, capsys: Captured) -> None:
    engine = f"transformers {transformers.__version__}, torch {torch.__version__}, 1 thread"
    assert run(["info", model]) == 0
    out = capsys.readouterr().out
    assert engine in out
    assert "by the table of torch that ships" in out
    assert "milliseconds a pass" not in out
    assert run(["profile", model]) == 0
    assert engine in capsys.readouterr().out
    assert run(["info", model]) == 0
    printed = capsys.readouterr().out
    assert f"measured, kept as {next(folder.iterdir())}" in printed
    assert "milliseconds a pass" in printed and "drafter auto      lookup" in printed


def test_the_explanation_is_in_the_json_object(model: str, capsys: Captured) -> None:
    assert run(["generate", "a b", "--target", model, "--max-tokens", "8", "--explain", "--json"]) == 0
    assert "passes of AR decoding" in json.loads(capsys.readouterr().out)["explanation"]


def test_a_corrupt_profile_is_one_line_and_the_text_comes(model: str, folder: Path, capsys: Captured) -> None:
    assert run(["profile", model]) == 0
    next(folder.iterdir()).write_text("{")
    capsys.readouterr()
    assert run(["generate", "a b", "--target", model, "--max-tokens", "8"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert sum("cannot be read" in line and line.startswith("draftree: ") for line in lines) == 1


@pytest.mark.parametrize("other", [["--method", "static"], ["--drafter", "none"]])
def test_only_auto_explains(other: list[str], model: str, capsys: Captured) -> None:
    capsys.readouterr()
    assert run(["generate", "a", "--target", model, "--explain", *other]) == 2
    assert "--explain" in complaint(capsys)
