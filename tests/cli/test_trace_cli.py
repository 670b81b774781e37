"""``--trace``: what is traced, and what is refused before any work."""

from __future__ import annotations

import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import draftree
from draftree.cli.main import run

Captured = pytest.CaptureFixture[str]


def _generate(model: str, trace: Path | str, *more: str) -> int:
    return run(["generate", "the cat", "--target", model, "--max-tokens", "8", "--trace", str(trace), *more])


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_generate_traces_what_it_prints(model: str, tmp_path: Path, capsys: Captured) -> None:
    assert _generate(model, tmp_path / "t.jsonl", "--json", "--compare", "--method", "chain", "--drafter", "self") == 0
    report = json.loads(capsys.readouterr().out)
    run, *records = _records(tmp_path / "t.jsonl")
    (begun,) = (r for r in records if r["kind"] == "request")  # AR decoding is not what --trace was asked for
    gained = [t for r in records if r["kind"] == "step" for t in r["tokens"][: r["taken"]]]
    assert [begun["first"], *gained] == report["token_ids"]
    assert (run["kind"], run["labels"]) == ("run", {"drafter": "self", "method": "chain"})


def test_show_prints_a_trace_as_a_page(model: str, tmp_path: Path, capsys: Captured) -> None:
    assert _generate(model, tmp_path / "t.jsonl") == 0
    capsys.readouterr()
    assert run(["show", str(tmp_path / "t.jsonl")]) == 0
    assert capsys.readouterr().out == draftree.show(tmp_path / "t.jsonl").html + "\n"


def test_chat_traces_each_answer(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\nthe hat"))
    assert run(["chat", model, "--max-tokens", "6", "--trace", str(tmp_path / "t.jsonl")]) == 0
    assert [r["kind"] for r in _records(tmp_path / "t.jsonl")].count("end") == 2


def test_an_existing_file_is_refused_in_one_line(model: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "t.jsonl"
    assert _generate(model, path) == 0
    kept = path.read_bytes()
    capsys.readouterr()
    assert _generate("./no-model-is-looked-for", path) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert str(path) in printed.err
    assert path.read_bytes() == kept


@pytest.mark.parametrize("where", ["nowhere/t.jsonl", ".", "a-file/t.jsonl"])
def test_a_path_that_cannot_be_written_is_refused_before_any_work(where: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "a-file").touch()
    assert _generate("./no-model-is-looked-for", tmp_path / where) == 2
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 1
    assert "trace" in printed.err and "name a" in printed.err


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_costs_one_line_on_the_command_line(model: str, tmp_path: Path, capsys: Captured) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _generate(model, tmp_path / "t.jsonl") == 0
    printed = capsys.readouterr()
    assert printed.out.strip()
    assert sum("decoding goes on" in line for line in printed.err.splitlines()) == 1
