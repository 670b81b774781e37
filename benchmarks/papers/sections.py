"""A report as chapters of sections, and the chapters as Markdown. Knows no figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from draftree.bench.summary import LoadedRun, MethodFigures, markdown, number, ratio_text
from draftree.errors import unknown_name

Runs = Mapping[str, LoadedRun]
"""Name of a folder -> its run: a figure is drawn from the run that it names, and from no other."""
ENOUGH = 30
"""Cases; a figure from fewer says so."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of a section."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a chapter.

    Attributes:
        title: its heading.
        text: paragraphs in Markdown.
        grid: a table below them.
        figure: (name of its file, SVG) below that.
        runs: what it was made from.
    """

    title: str
    text: Sequence[str] = ()
    grid: Grid | None = None
    figure: tuple[str, str] | None = None
    runs: Sequence[LoadedRun] = ()


SPEEDS = ("MAL", "nodes/step", "over AR")
"""What ``speeds`` gives."""


def speeds(figures: MethodFigures) -> list[str]:
    """MAL, mean nodes of a step, and speed over AR decoding with the prefill left out."""
    return [number(figures.mal), f"{figures.nodes_per_step or 0:.1f}", ratio_text(figures.speedup_decode)]


@dataclass(frozen=True, slots=True)
class Part:
    """A table or a figure.

    Attributes:
        name: by which it can be selected, behind its chapter's.
        runs: that it is made from.
        make: the section; None: none of them is there.
    """

    name: str
    runs: Sequence[str]
    make: Callable[[Runs], Section | None]


@dataclass(frozen=True, slots=True)
class Chapter:
    """One paper.

    Attributes:
        name: by which it can be selected.
        claim, why: sentences: what the paper claims, and why what we find differs.
        found: what we find; None: none of the runs that show it is there.
        parts: its tables and figures; without any the chapter is left out.
    """

    name: str
    title: str
    claim: str
    found: Callable[[Runs], str | None]
    why: str
    parts: Sequence[Part]

    @property
    def names(self) -> list[str]:
        """Of itself, and of each part."""
        return [self.name, *(f"{self.name}/{part.name}" for part in self.parts)]


def select(chapters: Sequence[Chapter], names: Sequence[str]) -> list[Chapter]:
    """The chapters and parts of these names.

    Raises:
        UnknownNameError: there is no such paper, table or figure.
    """
    for name in names:
        if not any(name in chapter.names for chapter in chapters):
            raise unknown_name("paper, table or figure", name, [x for chapter in chapters for x in chapter.names])
    found = []
    for chapter in chapters:
        parts = [p for p in chapter.parts if {chapter.name, f"{chapter.name}/{p.name}"} & {*names}]
        found += [replace(chapter, parts=parts)] * bool(parts)
    return found


def of(runs: Runs, names: Sequence[str]) -> list[LoadedRun]:
    """Those of the named runs that are there."""
    return [runs[name] for name in names if name in runs]


def to_markdown(chapters: Sequence[Chapter], runs: Runs, figures: str) -> tuple[list[str], dict[str, str]]:
    """Blocks of Markdown, and the figures in them: name -> SVG, in the folder ``figures`` beside the text."""
    parts, drawn = list[str](), dict[str, str]()
    for chapter in chapters:
        sections = [made for part in chapter.parts if (made := part.make(runs)) is not None]
        if not sections:
            continue
        sentences = (chapter.claim, chapter.found(runs), chapter.why)
        parts += [f"## {chapter.title}", " ".join(filter(None, sentences))]
        for made in sections:
            parts += [f"### {made.title}", *made.text]
            if made.grid:
                parts.append(markdown(made.grid.header, made.grid.rows))
            if made.figure:
                drawn[made.figure[0]] = made.figure[1]
                parts.append(f"![{made.title}]({figures}/{made.figure[0]}.svg)")
            parts.append(sources(made.runs))
    return parts, drawn


def sources(runs: Sequence[LoadedRun]) -> str:
    """Which runs a section is from, and whether they have few cases."""
    named = ", ".join(f"`{run.path.name}`" for run in runs)
    few = [f"{run.config['prompts']} in `{run.path.name}`" for run in runs if run.config["prompts"] < ENOUGH]
    text = f"From {named}."
    return f"{text} Few prompts: {', '.join(few)}." if few else text


def write_figures(folder: Path, drawn: Mapping[str, str]) -> None:
    """Write figures as files; those of reports before this one go."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        if old.stem not in drawn:
            old.unlink()
    for name, svg in drawn.items():
        (folder / f"{name}.svg").write_text(svg)
