"""The command ``draftree report``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from ..artifacts import user_path, write_whole
from ..bench.report import agreement, dsbd, gunjur, headlines, opt_tree, overview, sweeps
from ..bench.report.page import FIGURES, Section, to_html, to_markdown, write_figures
from ..bench.report.plots import check_plots
from ..bench.report.source import LoadedRun, load_runs
from ..errors import ConfigError, RunError
from ..progress import out

CHAPTERS: dict[str, Sequence[Callable[[Sequence[LoadedRun]], list[Section]]]] = {
    "Headlines": (headlines.sections,),
    "Runs": (overview.sections, agreement.sections),
    "Dynamic Tree Speculative Decoding (Gunjur & Waitz)": (gunjur.sections,),
    "Dynamic-Width Speculative Beam Decoding (DSBD)": (dsbd.sections,),
    "OPT-Tree": (opt_tree.sections, sweeps.sections),
}
"""A chapter for each paper; one whose runs are not there is left out."""
TITLE = "draftree: results"


def report(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A run of 'draftree bench', or a folder of runs.")],
    markdown: Annotated[
        str | None, typer.Option(metavar="FILE", help="Where the Markdown goes; DIR/report.md by default.")
    ] = None,
) -> None:
    """Draw the tables and figures of the papers from runs: DIR/report.md and DIR/report.html."""
    check_plots()
    place = user_path(folder)
    text = place / "report.md" if markdown is None else user_path(markdown)
    if not place.is_dir():
        raise ConfigError(f"no folder {folder}: name one that 'draftree bench --out' wrote, or one that holds some")
    if not text.parent.is_dir():
        raise ConfigError(f"folder {text.parent} is not there: make it, or give --markdown another place")
    sections = build(load_runs(place))
    figures = FIGURES if markdown is None else f"{text.stem}-{FIGURES}"
    try:
        write_figures(text.parent / figures, sections)
    except OSError as error:
        raise RunError(f"cannot write {text.parent}: {error.strerror}: make room, or choose another place") from None
    write_whole(text, to_markdown(TITLE, sections, figures))
    write_whole(place / "report.html", to_html(TITLE, sections))
    out.print(f"{text}\n{place / 'report.html'}", markup=False)


def build(runs: Sequence[LoadedRun]) -> list[Section]:
    """All sections that the runs have, chapter by chapter."""
    sections: list[Section] = []
    for title, makers in CHAPTERS.items():
        if own := [section for make in makers for section in make(runs)]:
            sections += [Section(title, level=2), *own]
    return sections
