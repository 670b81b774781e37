"""Numbers that options cannot take: each is one line with the option and the value, before any work is done."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from draftree.cli.main import app, run

Captured = pytest.CaptureFixture[str]

_NOWHERE = "./nowhere"
_BASES = {
    "generate": "generate cat --target {model}",
    "chat": "chat {model}",
    "batch": "batch suite.jsonl out.jsonl --target {model}",
    "serve": "serve {model}",
    "bench": "bench --suite suite.jsonl --out b --methods chain --target {model}",
    "info": "info {model}",
    "profile": "profile {model}",
    "calibrate": "calibrate --prompts text --out c --drafter lookup --target {model}",
    "train head": "train head --prompts text --out h {model}",
    "heads check": "heads check smollm2 --target {model}",
    "train classifier": "train classifier --prompts text --out k --drafter lookup --target {model}",
}
"""The other commands have no numbers."""
_VALUES = ("nan", "inf", "-inf", "-1", "0", "1e99", "")
_NEVER = ("nan", "inf", "-inf", "")
_WITH = {"--beams": ["--beams", "2"]}
"""What an option goes with."""


def _commands(found: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if not hasattr(found, "commands"):
        yield " ".join(path), found
        return
    for name, inner in found.commands.items():
        yield from _commands(inner, (*path, name))


def _numeric() -> Iterator[tuple[str, str]]:
    """Every command and option that takes a number, or several."""
    for command, found in _commands(typer.main.get_command(app)):
        for option in found.params:
            kind = getattr(getattr(option, "type_descriptor", None), "annotation", None)
            several = re.fullmatch(r"(?:N,)+(?:N,)?\.\.\.|T,\.\.\.", option.metavar or "")
            if option.param_type_name == "option" and (kind in (int, float) or several):
                yield command, next((name for name in option.opts if name.startswith("--")), option.opts[0])


NUMERIC = list(_numeric())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("".join(f"the cat {i}\n" for i in range(30)))
    Path("suite.jsonl").write_text('{"prompt": "the cat"}\n')
    return tmp_path


def _line(command: str, option: str, value: str, model: str) -> list[str]:
    more = ["--beams", "2"] if option in _BEAMS and command == "generate" else _WITH.get(option, [])
    assigned = [option, value] if not option.startswith("--") else [f"{option}={value}"]
    return [*_BASES[command].format(model=model).split(), *more, *assigned]


_BEAMS = ("--draft-beams", "--depth", "--width-threshold", "--min-beams", "--length-penalty", "-n")


def _shows(complaint: str, option: str, value: str) -> bool:
    """A complaint has the option, by its own name or in words, and the value, as it was written or as it was read."""
    names = {option, option.lstrip("-"), option.lstrip("-").replace("-", "_"), option.lstrip("-").replace("-", " ")}
    values = {repr(value)} if value == "" else {value, str(float(value))}
    return any(name in complaint for name in names) and any(each in complaint for each in values)


def test_every_command_with_numbers_is_tried() -> None:
    assert {command for command, _ in NUMERIC} == set(_BASES)
    assert len(NUMERIC) > 80


@pytest.mark.parametrize(("command", "option"), NUMERIC)
def test_a_number_that_does_not_do_is_named_with_its_option(
    command: str, option: str, place: Path, capsys: Captured
) -> None:
    """What is taken fails at the model, or the program that measures servers, which are not there."""
    for value in _VALUES:
        assert run(_line(command, option, value, _NOWHERE)) == 2
        complaint = capsys.readouterr().err.strip()
        taken = _NOWHERE in complaint and value not in _NEVER
        assert complaint.count("\n") == 0
        assert taken or _shows(complaint, option, value), complaint


@pytest.mark.parametrize("option", [option for command, option in NUMERIC if command == "generate"])
def test_a_number_that_is_taken_works(option: str, place: Path, model: str, capsys: Captured) -> None:
    for value in ("-1", "0", "1e99"):
        line = _line("generate", option, value, model)
        code = run(line if option == "--max-tokens" else [*line, "--max-tokens", "2", "--raw"])
        complaint = capsys.readouterr().err
        assert code == 0 or (code == 2 and _shows(complaint, option, value)), complaint


@pytest.mark.parametrize("origin", ["x", "", "example.com", "https://example.com/page", "https://"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str, place: Path, capsys: Captured) -> None:
    assert run(["serve", _NOWHERE, "--origin", origin]) == 2
    assert f"--origin is {origin!r}" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["info {}", "report {}", "profile {}", "generate cat --drafter {}", "batch {} out"])
def test_an_empty_name_is_named(line: str, place: Path, capsys: Captured) -> None:
    """It stood for the folder that the command ran in."""
    assert run(["" if word == "{}" else word for word in line.split()]) == 2
    assert "''" in capsys.readouterr().err
