"""A report as sections, and the sections as Markdown and as one HTML page that needs nothing else. Knows no runs."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..summary import markdown

FIGURES = "figures"
_STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 68em; margin: 2em auto; padding: 0 1em; color: #111; background: #fff }
table { border-collapse: collapse; margin: 1em 0; font-size: 14px }
th, td { border-bottom: 1px solid #bbb; padding: .25em .6em; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
pre { background: #f3f3f3; padding: .6em; overflow-x: auto; font-size: 13px }
img { max-width: 100% }
.case { white-space: pre-wrap; border: 1px solid #bbb; padding: .8em }
.drafted { background: #d7e6ff }
.own { background: #ffd9c7; font-weight: bold; text-decoration: underline }
"""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of a section."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Case:
    """A text whose parts are told apart: (text, drafted)."""

    pieces: Sequence[tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report.

    Attributes:
        title: its heading.
        text: paragraphs.
        grid: a table below them.
        figure: (name of its file, SVG) below that.
        case: a coloured text below that.
        commands: what made it.
        level: of the heading.
    """

    title: str
    text: Sequence[str] = ()
    grid: Grid | None = None
    figure: tuple[str, str] | None = None
    case: Case | None = None
    commands: Sequence[str] = ()
    level: int = 3


def to_markdown(title: str, sections: Sequence[Section], figures: str = FIGURES) -> str:
    """The report; figures lie in the folder ``figures`` beside it."""
    parts = [f"# {title}"]
    for s in sections:
        parts.append(f"{'#' * s.level} {s.title}")
        parts += s.text
        if s.grid:
            parts.append(markdown(s.grid.header, s.grid.rows))
        if s.figure:
            parts.append(f"![{s.title}]({figures}/{s.figure[0]}.svg)")
        if s.case:
            parts.append(_quoted("".join(t if drafted or not t.strip() else f"[{t}]" for t, drafted in s.case.pieces)))
        if s.commands:
            parts.append("\n".join(f"    {command}" for command in dict.fromkeys(s.commands)))
    return "\n\n".join(parts) + "\n"


def to_html(title: str, sections: Sequence[Section]) -> str:
    """The report as one page: style, figures and all."""
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{html.escape(title)}</h1>"
    ]
    for s in sections:
        parts.append(f"<h{s.level}>{html.escape(s.title)}</h{s.level}>")
        parts += [f"<p>{html.escape(text)}</p>" for text in s.text]
        if s.grid:
            parts.append(_table(s.grid))
        if s.figure:
            data = base64.b64encode(s.figure[1].encode()).decode()
            parts.append(f'<p><img alt="{html.escape(s.title)}" src="data:image/svg+xml;base64,{data}"></p>')
        if s.case:
            parts.append(_coloured(s.case))
        if s.commands:
            parts.append(f"<pre>{html.escape(chr(10).join(dict.fromkeys(s.commands)))}</pre>")
    return "\n".join([*parts, "</body></html>"]) + "\n"


def write_figures(folder: Path, sections: Sequence[Section]) -> None:
    """The figures as files for the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    for s in sections:
        if s.figure:
            (folder / f"{s.figure[0]}.svg").write_text(s.figure[1])


def _table(grid: Grid) -> str:
    head = "".join(f"<th>{html.escape(c)}</th>" for c in grid.header)
    rows = ["".join(f"<td>{html.escape(c)}</td>" for c in row) for row in grid.rows]
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _coloured(case: Case) -> str:
    spans = [f'<span class="{"drafted" if drafted else "own"}">{html.escape(t)}</span>' for t, drafted in case.pieces]
    return f'<div class="case">{"".join(spans)}</div>'


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines())
