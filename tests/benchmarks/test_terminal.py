"""The recorded terminal shows what its commands print, and the answers that documents open with are right."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.terminal import COMMANDS, printed
from draftree.cli.main import run

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "terminal.svg"
README, QUICKSTART, MAKEFILE = ((ROOT / name).read_text() for name in ("README.md", "docs/quickstart.md", "Makefile"))
IS_EVEN = "Write a Python function is_even(n)."
RIGHT = {"Name the capital of France.": "Paris", IS_EVEN: "def is_even(n):\n    return n % 2 == 0\n```\n"}
"""Prompts that documents give the default model, and what its answers have."""


def _plain(text: str) -> str:
    """Without colours, white space and what differs from machine to machine: seconds and speeds."""
    text = "".join(re.sub(r"\x1b\[[\d;]*m", "", text).split())
    return re.sub(r"\d+\.\d\d(?=s\b)|\d+\.\d(?=tokens/s)", "_", text)


def _shown(picture: str) -> str:
    """The text of the terminal; that of its title is left out."""
    root = ElementTree.fromstring(picture)  # noqa: S314 - our own file
    return _plain("".join("".join(text.itertext()) for text in root.iterfind(".//{*}text[@textLength]")))


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """What each command of the picture prints today."""
    return {command: printed(command) for command in COMMANDS}


def test_the_picture_is_small_and_fetches_nothing() -> None:
    picture = PICTURE.read_text()
    assert len(picture) < 60_000
    assert "@import" not in picture and "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    assert "](docs/terminal.svg)" in README


@pytest.mark.real
def test_the_picture_shows_what_its_commands_print(outputs: dict[str, str]) -> None:
    text = "\n".join(f"$ {command}\n{output}" for command, output in outputs.items())
    assert _shown(PICTURE.read_text()) == _plain(text)
    assert "The capital of France is Paris." in text and _plain("return n % 2 == 0") in _plain(text)


@pytest.mark.real
def test_the_readme_has_its_figures(outputs: dict[str, str]) -> None:
    found = re.search(r"(\d+)tokensin.*?(\d+)targetpasses", _plain(outputs[COMMANDS[1]]))
    assert found is not None
    assert "{} tokens in {} passes".format(*found.groups()) in " ".join(README.split())


def _asked(document: str) -> list[list[str]]:
    """Commands that give the default model a prompt and no file, as words."""
    lines = re.findall(r"^draftree (generate .*)", document, re.MULTILINE)
    commands = [shlex.split(line, comments=True) for line in dict.fromkeys(lines)]
    return [words for words in commands if not {"--target", "--json-schema"} & {*words}]


@pytest.mark.real
@pytest.mark.parametrize("words", _asked(README + QUICKSTART), ids=" ".join)
def test_first_answers_are_right(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents opened with "Count to ten", to which the model answered that it was sorry for any misglamour."""
    monkeypatch.chdir(tmp_path)
    assert run(words) == 0
    shown = capsys.readouterr()
    assert RIGHT[words[1]] in shown.out
    assert "--compare" not in words or "the same text" in shown.err


def test_both_documents_open_with_answers() -> None:
    assert len(_asked(README)) >= 2 and len(_asked(QUICKSTART)) >= 6


@pytest.mark.real
def test_the_demo_shows_a_right_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """It once showed a function that called itself without an end."""
    prompt = re.findall(r"^DEMO_PROMPT \?= (.*)$", MAKEFILE, re.MULTILINE)
    recipe = re.findall(r'^\t\$\(VENV\)/bin/draftree (generate "\$\$DEMO_PROMPT".*)$', MAKEFILE, re.MULTILINE)
    assert prompt == [IS_EVEN] and len(recipe) == 2
    trees, compared = (shlex.split(line.replace("$$DEMO_PROMPT", IS_EVEN)) for line in recipe)
    assert run(trees) == 0
    assert "return" in capsys.readouterr().out
    assert compared == [*next(words for words in _asked(README) if "--compare" in words), "--max-tokens", "160"]
