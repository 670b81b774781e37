"""``draftree batch`` as a command: it answers, goes on after an interruption, and refuses what does not do."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from draftree.cli.main import run

from .. import tiny_gguf

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf.write(tmp_path_factory.mktemp("models") / "tiny.gguf"))


def write(path: Path, lines: int, tokens: int = 8) -> Path:
    requests = [{"custom_id": str(i), "prompt": f"a b a b {i}", "max_tokens": tokens} for i in range(lines)]
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def records_of(path: Path) -> dict[str, str]:
    """Text of each answer by its line's name; no line is answered twice."""
    records: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    found = {r["custom_id"]: r["response"]["body"]["choices"][0]["message"]["content"] for r in records}
    assert len(found) == len(records)
    return found


def test_a_second_call_goes_on_and_a_third_has_nothing_to_do(model: str, tmp_path: Path, capsys: Captured) -> None:
    source, whole, parts = write(tmp_path / "in.jsonl", 6), tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    options = ["--target", model, "--drafter", "lookup"]
    assert run(["batch", str(source), str(whole), *options]) == 0
    kept = whole.read_bytes().splitlines(keepends=True)
    parts.write_bytes(b"".join(kept[:2]) + kept[2][:20])
    assert run(["batch", str(source), str(parts), *options]) == 0
    assert "6 lines answered, 2 of them before" in capsys.readouterr().err
    assert records_of(parts) == records_of(whole) and parts.read_bytes().startswith(b"".join(kept[:2]))
    assert run(["batch", str(source), str(parts), "--target", "no-such-model"]) == 0
    assert "6 lines answered, 6 of them before" in capsys.readouterr().err


def test_an_interruption_keeps_what_has_ended(model: str, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", 400, tokens=60), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "draftree", "batch", str(source), str(out), "--target", model, "--rows", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
        while not (out.exists() and out.stat().st_size) and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        complaint = process.stderr.read()
    done = len(records_of(out))
    assert process.returncode == 130 and 0 < done < 400
    (line,) = (line for line in complaint.splitlines() if line.startswith("draftree: "))
    assert line == f"draftree: interrupted after {done} of 400 lines: the same command goes on from there"


def test_lines_that_cannot_be_answered_fail_the_command_also_when_it_goes_on(
    model: str, tmp_path: Path, capsys: Captured
) -> None:
    source, out = write(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    source.write_text(source.read_text() + '{broken\n{"prompt": "a", "max_tokens": 0}\n{"prompt": 5}\n')
    for before in ("", ", 5 of them before", ", 5 of them before"):
        assert run(["batch", str(source), str(out), "--target", model, "--name", "mine"]) == 1
        assert f"3 of 5 lines could not be answered{before}: their records have why" in capsys.readouterr().err
        assert len(out.read_text().splitlines()) == 5
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:3]))
    assert run(["batch", str(source), str(out), "--target", model, "--name", "mine"]) == 1
    assert "3 of 5 lines could not be answered, 3 of them before" in capsys.readouterr().err
    assert len({json.loads(line)["id"] for line in out.read_text().splitlines()}) == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "0"], "rows is 0: use at least 1"),
        (["--method", "magic"], "no method 'magic'"),
        (["--queue", "5"], "No such option: --queue"),
    ],
)
def test_bad_options_are_one_line(words: list[str], message: str, tmp_path: Path, capsys: Captured) -> None:
    source = write(tmp_path / "in.jsonl", 1)
    assert run(["batch", str(source), str(tmp_path / "out"), "--target", "no-model", *words]) == 2
    complaint = capsys.readouterr().err.strip()
    assert message in complaint and len(complaint.splitlines()) == 1
    assert not (tmp_path / "out").exists()
