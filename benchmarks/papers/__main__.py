"""Draw the papers' tables and figures from runs of ``draftree bench``: a Markdown file and a folder of SVG beside it.

A figure is drawn from the first run (by name) that has what it needs; docs/bench.md lists it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from draftree.artifacts import user_path, write_whole
from draftree.bench.summary import READING, LoadedRun, load_runs
from draftree.bench.summary import report as run_tables
from draftree.errors import ConfigError, DraftreeError

from ..quality.answers import read_scores, score_table
from . import agreement, dsbd, gunjur, headlines, opt_tree, sweeps
from .plots import check_plots
from .sections import Grid, Section, to_markdown, write_figures


def run_sections(runs: Sequence[LoadedRun]) -> list[Section]:
    """The tables of each run, and the scores of its answers."""
    found = [Section("How to read the tables", [READING])]
    for run in runs:
        tables = run_tables(run, level=3).split("\n\n", 1)
        found.append(Section(tables[0].removeprefix("### "), [tables[1]]))
        if scores := read_scores(run.path):
            command = f"python -m benchmarks.quality {run.path}"
            found.append(Section("Scores of the answers", grid=Grid(*score_table(scores)), commands=[command], level=4))
    return found


CHAPTERS: dict[str, Sequence[Callable[[Sequence[LoadedRun]], list[Section]]]] = {
    "Headlines": (headlines.sections,),
    "Runs": (run_sections, agreement.sections),
    "Dynamic Tree Speculative Decoding (Gunjur & Waitz)": (gunjur.sections,),
    "Dynamic-Width Speculative Beam Decoding (DSBD)": (dsbd.sections,),
    "OPT-Tree": (opt_tree.sections, sweeps.sections),
}
"""A chapter for each paper; one whose runs are not there is left out."""


def build(runs: Sequence[LoadedRun]) -> list[Section]:
    """All sections that the runs have, chapter by chapter."""
    sections: list[Section] = []
    for title, makers in CHAPTERS.items():
        if own := [section for make in makers for section in make(runs)]:
            sections += [Section(title, level=2), *own]
    return sections


def main(argv: Sequence[str] | None = None) -> None:
    """Draw and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__)
    parser.add_argument("runs", metavar="RUNS", help="folder of runs, or of one run")
    parser.add_argument("--markdown", metavar="FILE", help="where the Markdown goes; RUNS/papers.md by default")
    args = parser.parse_args(argv)
    try:
        check_plots()
        text = user_path(args.markdown) if args.markdown else user_path(args.runs) / "papers.md"
        if not text.parent.is_dir():
            raise ConfigError(f"folder {text.parent} is not there: make it, or name another place")
        sections = build(load_runs(args.runs))
        figures = f"{text.stem}-figures"
        write_figures(text.parent / figures, sections)
        write_whole(text, to_markdown("draftree: results", sections, figures))
    except (DraftreeError, OSError) as error:
        sys.exit(f"error: {error}")
    print(text)


if __name__ == "__main__":
    main()
