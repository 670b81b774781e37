"""The papers' claims beside what is found here: decode what is missing of the runs, then write the report.

    python -m benchmarks.papers RUNS --measure [--only NAME]... [--pair DIR] [--quick] --docs docs

RUNS is the folder of the runs; without --measure the report is made of those that are there: the page of results, a
chapter for each paper, and the runs' figures as JSON lines. It prints beforehand how many runs are missing and about
how long they take, and goes on where it was stopped. Each figure is drawn from the run that it names (``plan.py``), and
from no other. --only takes one paper, table or figure, and its runs alone: opt-tree, gunjur/figure-2, ...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from draftree.artifacts import user_path, write_whole
from draftree.bench.results import CONFIG
from draftree.bench.summary import LoadedRun, load_runs
from draftree.errors import ConfigError, DraftreeError
from draftree.progress import err

from ..quality.answers import FILE as SCORES
from ..rival_jobs import read
from ..rivals import FILE, table
from . import confidence, dsbd, gunjur, hsddw, opt_tree, page
from .plan import RUNS, Plan
from .plots import check_plots
from .sections import FIGURES, Runs, select, to_markdown

RIVALS = "rivals"
"""Folder of what ``benchmarks.rivals`` measured, among the runs."""
CHAPTERS = (gunjur.CHAPTER, opt_tree.CHAPTER, confidence.CHAPTER, hsddw.CHAPTER, dsbd.CHAPTER)
"""A chapter for each paper."""


def build(runs: Runs, only: Sequence[str] = (), rivals: Sequence[Sequence[str]] = ()) -> dict[str, str]:
    """The files of the report by their names: the page, the chapters, their figures as SVG, and the runs' figures.

    Args:
        only: names of the chapters, tables and figures that are wanted, without the page; by default all.
        rivals: rows of ``benchmarks.rivals.table``, for the page.

    Raises:
        UnknownNameError: there is no such paper, table or figure.
    """
    if only:
        runs = {name: runs[name] for name in runs if name in needed(only)}
    chapters = select(CHAPTERS, only) if only else CHAPTERS
    files = (
        {}
        if only
        else {"results.md": page.page(CHAPTERS, runs, rivals), f"{page.PAGES}/runs.jsonl": page.digests(runs)}
    )
    for chapter in chapters:
        if (made := to_markdown(chapter, runs)) is not None:
            files[f"{page.PAGES}/{chapter.name}.md"] = made[0]
            files |= {f"{page.PAGES}/{FIGURES}/{name}.svg": svg for name, svg in made[1].items()}
    return files


def needed(only: Sequence[str]) -> set[str]:
    """Names of the runs that chapters, tables and figures are made from."""
    return {name for chapter in select(CHAPTERS, only) for part in chapter.parts for name in part.runs}


def runs_of(folder: str) -> dict[str, LoadedRun]:
    """The planned runs that a folder has, by name; one that is not finished is left out, with a line.

    Raises:
        ConfigError: none is finished.
    """
    found: dict[str, LoadedRun] = {}
    planned = {run.name: run for run in RUNS}
    for config in sorted(user_path(folder).glob(f"*/{CONFIG}")):
        if (name := config.parent.name) not in planned:
            continue
        try:
            (run,) = load_runs(config.parent)
            why = f"{run.left} answers are left" if run.left else ""
            if not why and planned[name].scored and not (run.path / SCORES).is_file():
                why = "its answers are not scored"
        except ConfigError as error:
            why = str(error)
        if why:
            err.print(f"{name} is left out: {why}", markup=False)
        else:
            found[name] = run
    if not found:
        raise ConfigError(f"no finished run in {folder}: decode what is missing with --measure")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", metavar="RUNS", help="folder of the runs")
    parser.add_argument("--measure", action="store_true", help="decode what is missing first")
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="a paper, or PAPER/TABLE; may be repeated"
    )
    parser.add_argument("--pair", metavar="DIR", help="folder of Qwen2.5-Coder's two GGUF files; else without them")
    parser.add_argument("--quick", action="store_true", help="three prompts a run")
    parser.add_argument("--docs", metavar="DIR", help="where the report goes; RUNS/report by default")
    args = parser.parse_args(argv)
    try:
        check_plots()
        wanted = needed(args.only) if args.only else None
        docs = user_path(args.docs) if args.docs else user_path(args.runs) / "report"
        if args.docs and not docs.is_dir():
            raise ConfigError(f"folder {docs} is not there: make it, or name another place")
        if args.measure:
            Plan(args.runs, args.pair, quick=args.quick, only=wanted).measure()
        files = build(runs_of(args.runs), args.only, table(read(user_path(args.runs) / RIVALS / FILE)))
        if not args.only:
            for old in (docs / page.PAGES / FIGURES).glob("*.svg"):
                old.unlink()
        for name, text in files.items():
            (docs / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(docs / name, text)
    except (DraftreeError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on from there")
    print(docs)


if __name__ == "__main__":
    main()
