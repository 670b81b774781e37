"""The documentation site: it builds with every link right, has every command's help, and fetches nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from draftree.cli.main import app

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)  # noqa: S603
    assert built.returncode == 0, built.stderr
    return folder


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{path} {name}")


def test_a_page_has_every_command_with_every_option(site: Path) -> None:
    page = unescape(re.sub(r"<[^>]+>", "", (site / "commands.html").read_text()))
    found = dict(_commands(get_command(app), "draftree"))
    assert len(found) >= 13
    for path, command in found.items():
        help_text = page.split(f"Usage: {path} ")[1].split("Usage: ")[0]
        options = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
        assert {name for name in options if name not in help_text} == set()


def test_every_document_is_a_page(site: Path) -> None:
    names = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"index", "commands", "CONTRIBUTING", "CHANGELOG"}
    assert names <= {path.stem for path in site.glob("*.html")}


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    fetching = re.compile(r"<(?:link|script|img|iframe)\b[^>]*\b(?:href|src)=[\"']?(?:https?:)?//[^\s>]*")
    assert [found for page in site.glob("*.html") for found in fetching.findall(page.read_text())] == []
    styles = [path.read_text() for path in site.rglob("*.css")]
    assert styles and not any(re.search(r"(url\(|@import )[\"']?(https?:)?//", style) for style in styles)
