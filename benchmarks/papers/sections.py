"""A report as sections, and the sections as Markdown. Knows no figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftree.bench.summary import LoadedRun, markdown


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of a section."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report.

    Attributes:
        title: its heading.
        text: paragraphs in Markdown.
        grid: a table below them.
        figure: (name of its file, SVG) below that.
        commands: what made it.
        level: of the heading.
    """

    title: str
    text: Sequence[str] = ()
    grid: Grid | None = None
    figure: tuple[str, str] | None = None
    commands: Sequence[str] = ()
    level: int = 3


def to_markdown(title: str, sections: Sequence[Section], figures: str) -> str:
    """The report; its figures lie in the folder ``figures`` beside it."""
    parts = [f"# {title}"]
    for s in sections:
        parts.append(f"{'#' * s.level} {s.title}")
        parts += s.text
        if s.grid:
            parts.append(markdown(s.grid.header, s.grid.rows))
        if s.figure:
            parts.append(f"![{s.title}]({figures}/{s.figure[0]}.svg)")
        if s.commands:
            parts.append("\n".join(f"    {command}" for command in dict.fromkeys(s.commands)))
    return "\n\n".join(parts) + "\n"


def write_figures(folder: Path, sections: Sequence[Section]) -> None:
    """Write the figures of the Markdown as files."""
    folder.mkdir(parents=True, exist_ok=True)
    for s in sections:
        if s.figure:
            (folder / f"{s.figure[0]}.svg").write_text(s.figure[1])


def first(runs: Sequence[LoadedRun], wanted: Callable[[LoadedRun], bool]) -> LoadedRun | None:
    """The first run that is wanted."""
    return next((run for run in runs if wanted(run)), None)
