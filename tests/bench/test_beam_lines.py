"""A comparison of beams that was stopped goes on from its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftree.bench.beam_lines import Line, Lines
from draftree.errors import ConfigError, RunError

SETTINGS = {"limit": 3, "max_tokens": 8}


def line(prompt: int, decoder: str = "none", width: int = 2) -> Line:
    return Line(width, decoder, prompt, [([1, 2, 3], -0.5), ([4], -1.25)], 1.5, 3, 2, 0.5)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines = Lines(tmp_path / "out.jsonl", SETTINGS)
    for prompt in (1, 0):
        lines.add(line(prompt))
    return tmp_path / "out.jsonl"


def test_what_was_kept_is_there_again(file: Path) -> None:
    again = Lines(file, SETTINGS)
    assert list(again.of(2, "none")) == [line(0), line(1)], "in the prompts' order"
    assert (2, "none", 1) in again
    assert (2, "head", 1) not in again and (3, "none", 1) not in again


def test_a_line_that_a_kill_has_torn_is_cut_off(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])
    again = Lines(file, SETTINGS)
    assert list(again.of(2, "none")) == [line(1)]
    again.add(line(0))
    assert file.read_bytes() == whole


def test_other_settings_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="has other settings"):
        Lines(file, {**SETTINGS, "max_tokens": 9})


def test_a_corrupt_line_is_named(file: Path) -> None:
    with file.open("a") as out:
        out.write("{}\n")
    with pytest.raises(ConfigError, match="line 4 is corrupt: take it out"):
        Lines(file, SETTINGS)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot write"):
        Lines(tmp_path, SETTINGS)


def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = Lines(None, SETTINGS)
    lines.add(line(0))
    assert list(lines.of(2, "none")) == [line(0)]
    assert not list(tmp_path.iterdir())
