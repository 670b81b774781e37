"""Pages of the documentation site that do not lie in this folder: those of the root, and the commands' own help."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.main import get_command

from draftree.cli.main import app

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add them; links of the root's files into this folder are links between pages."""
    names = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
    pages = {name: (ROOT / name).read_text().replace("](docs/", "](") for name in names}
    pages["commands.md"] = "# Commands\n\n" + "\n".join(_helps(get_command(app), "draftree"))
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def _helps(command: Any, path: str) -> Iterator[str]:
    """What ``--help`` prints, of a command and of those below it."""
    context = command.context_class(command, info_name=path, terminal_width=100)
    yield f"## {path}\n\n```text\n{command.get_help(context)}\n```\n"
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _helps(inner, f"{path} {name}")
