"""Documents that could go stale: their code runs, their files are there, and every public name is explained."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import draftree
from draftree.cli.main import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.real
def test_the_code_of_the_python_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)  # noqa: S102 - our own guide
    assert len(blocks) >= 9
    assert capsys.readouterr().out


def test_the_python_guide_has_every_public_name() -> None:
    guide = (ROOT / "docs" / "python.md").read_text()
    missing = [name for name in draftree.__all__ if not re.search(rf"\b{name}\b", guide)]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    gone = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert gone == []


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md", ROOT / "Makefile"], ids=lambda path: path.name)
def test_modules_that_are_run_are_there(document: Path) -> None:
    named = re.findall(r"python -m ((?:benchmarks|draftree)[\w.]*)", document.read_text())
    assert [name for name in named if importlib.util.find_spec(name) is None] == []


def _commands(text: str) -> list[list[str]]:
    """Command lines of ``draftree`` in blocks of code, as words."""
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    lines = re.findall(r"^(?:    |\t)?\$? ?(draftree [a-z].*)$", fenced, re.MULTILINE)
    lines += re.findall(r"^    (draftree [a-z].*)$", text, re.MULTILINE)
    return [shlex.split(line.removesuffix("\\"), comments=True) for line in lines]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_parse(document: Path) -> None:
    for _, *words in _commands(document.read_text()):
        command: Any = get_command(app)
        while hasattr(command, "commands"):
            name, *words = words
            command = command.commands[name]
        with command.make_context(command.name, list(words)):
            pass


def test_the_commands_of_documents_are_found() -> None:
    found = {document.name: len(_commands(document.read_text())) for document in DOCUMENTS}
    least = {"quickstart.md": 15, "choosing.md": 8, "README.md": 3, "results.md": 5}
    assert all(found[name] >= count for name, count in least.items()), found


def test_the_readme_fits_a_terminal() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line for line in lines if len(line) > 100] == []


def test_the_readme_has_every_room_and_none_that_is_gone() -> None:
    tree = (ROOT / "README.md").read_text().split("## Where things are\n\n```\n")[1].split("```")[0]
    rooms = {path.parent.name for path in (ROOT / "src" / "draftree").glob("*/**/__init__.py")}
    named = set(re.findall(r"\b([a-z_]+)/", tree)) - {
        "src",
        "draftree",
        "packages",
        "native",
        "benchmarks",
        "tests",
        "docs",
        "examples",
    }
    assert named == rooms - {"native", "heads"} | {"heads"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_modules_that_documents_name_are_there(document: Path) -> None:
    there = {path.name for top in ("src", "benchmarks", "examples", "tests") for path in (ROOT / top).rglob("*.py")}
    named = re.findall(r"`[a-z/]*?([a-z0-9_]+\.py)`", document.read_text())
    assert sorted(set(named) - there) == []
