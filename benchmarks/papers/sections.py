"""A chapter a paper, each of sections, and its Markdown. Knows no figures."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from draftree.bench.entries import Entry
from draftree.bench.results import read_summary
from draftree.bench.summary import LoadedRun, MethodFigures, markdown, number, ratio_text
from draftree.errors import unknown_name

from ..commands import without_folders
from .plan import FILES
from .planned_runs import CODER

Runs = Mapping[str, LoadedRun]
"""Name of a folder -> its run: a figure is drawn from the run that it names, and from no other."""
ENOUGH = 30
"""Prompts of a run; a page names those of its runs that have fewer."""
_WIDTH = 100
"""Columns of a line of prose."""


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


def correlation(own: Sequence[float], other: Sequence[float]) -> str:
    """Pearson's, of two columns."""
    try:
        return f"{statistics.correlation(own, other):.2f}"
    except statistics.StatisticsError:
        return "none, since one is constant"


_FILES = ("tree", "classifier")


def shown(entry: Entry) -> str:
    """A contestant's method with its node budget and settings, files left out."""
    nodes = [f"nodes={entry.nodes}"] * (":nodes=" in entry.label)
    return ":".join([entry.method, *nodes, *(f"{key}={x}" for key, x in entry.settings.items() if key not in _FILES)])


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


class Verdict(StrEnum):
    """Whether a paper's claim holds here."""

    HOLDS = "holds"
    PARTLY = "partly"
    NOT_HERE = "does not hold here"

    @classmethod
    def of(cls, shown: Sequence[bool]) -> Verdict | None:
        """Of what the claim says, each part shown here or not; None: nothing was looked at."""
        if not shown:
            return None
        return cls.HOLDS if all(shown) else cls.PARTLY if any(shown) else cls.NOT_HERE


@dataclass(frozen=True, slots=True)
class Chapter:
    """One paper.

    Attributes:
        name: by which it can be selected.
        claim, why: paragraphs: what the paper claims, and why what we find differs.
        found: what we find, in a sentence; None: none of the runs that show it is there.
        verdict: whether the claim holds here; None where ``found`` is.
        parts: its tables and figures; without any the chapter is left out.
    """

    name: str
    title: str
    claim: str
    found: Callable[[Runs], str | None]
    verdict: Callable[[Runs], Verdict | None]
    why: str
    parts: Sequence[Part]

    @property
    def names(self) -> list[str]:
        """Of itself, and of each part."""
        return [self.name, *(f"{self.name}/{part.name}" for part in self.parts)]


def select(chapters: Sequence[Chapter], names: Sequence[str]) -> list[Chapter]:
    """The chapters and parts of these names; ``WHOLE`` are none of them.

    Raises:
        UnknownNameError: there is no such paper, table or figure.
    """
    known = [*WHOLE, *(name for chapter in chapters for name in chapter.names)]
    for name in names:
        if name not in known:
            raise unknown_name("paper, table or figure", name, known)
    found = []
    for chapter in chapters:
        parts = [p for p in chapter.parts if {chapter.name, f"{chapter.name}/{p.name}"} & {*names}]
        found += [replace(chapter, parts=parts)] * bool(parts)
    return found


def of(runs: Runs, names: Sequence[str]) -> list[LoadedRun]:
    """Those of the named runs that are there."""
    return [runs[name] for name in names if name in runs]


PAGE, SYSTEMS, EXACTNESS = WHOLE = ("results", "systems", "exactness")
"""The pages of results, of other systems' speeds and of their texts, among the names of chapters."""
FIGURES = "figures"
"""Folder of the figures, beside the chapters."""


OPENING = "This page repeats the paper's tables and figures with two small models on two CPU cores."
OWN_OPENING = "This page repeats the paper's tables and figures with your models."
MODELS = (
    "**smollm2** is SmolLM2-135M-Instruct (Q4_1), **coder** is Qwen2.5-Coder-1.5B-Instruct (Q4_K_M). Both run on the "
    "native engine with the draft heads that ship; in some runs Qwen2.5-Coder-0.5B-Instruct is the coder's draft model."
)
OWN_MODELS = "**coder** stands for `{target}`, drafts by `{draft}`."


def to_markdown(chapter: Chapter, runs: Runs) -> tuple[str, dict[str, str]] | None:
    """A chapter, and the figures in it: name -> SVG. None where none of its runs is there."""
    sections = [made for part in chapter.parts if (made := part.make(runs)) is not None]
    if not sections:
        return None
    used = {name for part in chapter.parts for name in part.runs}
    own = [run for name, run in runs.items() if name in used]
    drawn, verdict = dict[str, str](), chapter.verdict(runs)
    of_user = any(map(_is_own, own))
    parts = [f"# {chapter.title}", OWN_OPENING if of_user else OPENING]
    if verdict:
        parts.append(f"**Verdict: {verdict}.** {chapter.found(runs)}")
    parts += ["## The claim", chapter.claim, *about(own)]
    for made in sections:
        parts += [f"## {made.title}", *made.text]
        if made.grid:
            parts.append(markdown(made.grid.header, made.grid.rows))
        if made.figure:
            drawn[made.figure[0]] = made.figure[1]
            parts.append(f"![{made.title}]({FIGURES}/{made.figure[0]}.svg)")
        if unnamed := [run for run in made.runs if run.path.name not in _shown_text(made)]:
            parts.append(sources(unnamed))
    parts += [*([] if of_user else ["## Why it differs", chapter.why]), *made_of(own)]
    return document(parts), drawn


def verdict_in(text: str) -> str | None:
    """The verdict that a chapter's text begins with; None: it has none."""
    found = re.search(r"\*\*Verdict: (.*?)\.\*\*", text)
    return found[1] if found else None


def document(parts: Sequence[str]) -> str:
    """Paragraphs, lists, tables, headings and commands as one text, whose prose is wrapped."""
    return "\n\n".join(part if re.match(r"[#|!>]|    ", part) else wrapped(part) for part in parts) + "\n"


def wrapped(text: str) -> str:
    """Prose in lines of ``_WIDTH`` columns, a list's items each for itself; code, links and intervals stay whole."""
    whole = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)|\S+ \[[\d., -]+\]", lambda found: found[0].replace(" ", "\0"), text)
    lines = [
        textwrap.fill(
            line,
            _WIDTH,
            subsequent_indent="  " if line.startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in whole.splitlines()
    ]
    return "\n".join(lines).replace("\0", " ")


def _shown_text(made: Section) -> str:
    """What a section shows, but for its figure."""
    return "\n".join((*made.text, *(cell for row in (made.grid.rows if made.grid else ()) for cell in row)))


def _is_own(run: LoadedRun) -> bool:
    """Its models are a user's."""
    return run.path.name.endswith(CODER) and Path(run.config["target"]).name != FILES["target"]


def about(runs: Sequence[LoadedRun]) -> list[str]:
    """The models of runs, and which runs have few prompts."""
    own = dict.fromkeys(
        OWN_MODELS.format(target=Path(run.config["target"]).name, draft=Path(run.config["drafters"][-1]).name)
        for run in runs
        if _is_own(run)
    )
    few = [f"{run.prompts} in `{run.path.name}`" for run in runs if run.prompts < ENOUGH]
    return [*(own or [MODELS]), *([f"Runs of few prompts, whose figures are rough: {', '.join(few)}."] if few else [])]


def made_of(runs: Sequence[LoadedRun]) -> list[str]:
    """Machine, versions and commands of the runs."""
    if not runs:
        return []
    parts = [
        "## The runs",
        "All contestants decode each prompt in turn. `make results` makes missing runs.",
    ]
    for where in dict.fromkeys(map(_where, runs)):
        parts.append(f"{where}:")
        there = [run for run in runs if _where(run) == where]
        for commit in dict.fromkeys(run.config.get("commit") for run in there):
            commands = [run.config["command"] for run in there if run.config.get("commit") == commit]
            parts += [f"Commit {commit}:", "\n".join(f"    {without_folders(command)}" for command in commands)]
    return parts


def _where(run: LoadedRun) -> str:
    """Machine and versions of a run."""
    machine, versions = run.config["machine"], run.config["versions"].items()
    ran = read_summary(run.path).get("ran")
    engine = [f"{ran['threads']} threads", ran["engine"], ran["tier"]] if ran else []
    computer = ", ".join([machine["processor"], f"{machine['cores']} cores", *engine])
    return f"{computer}; {', '.join(f'{n} {v}' for n, v in versions)}"


def sources(runs: Sequence[LoadedRun]) -> str:
    """Which runs a section is from."""
    return f"From {', '.join(f'`{run.path.name}`' for run in runs)}."
