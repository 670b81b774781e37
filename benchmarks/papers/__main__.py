"""The papers' claims beside what is found here: decode what is missing of the runs, then write the report.

    python -m benchmarks.papers RUNS --measure [--only NAME]... [--pair DIR] [--quick] --docs docs
    python -m benchmarks.papers RUNS --measure --only NAME --methods MINE,... --target X --draft Y

RUNS is the folder of the runs; without --measure the report is made of those that are there: the page of results, a
chapter for each paper, and the runs' figures as JSON lines. It prints beforehand how many runs are missing and about
how long they take, and goes on where it was stopped. Each figure is drawn from the run that it names (``plan.py``), and
from no other. --only takes one paper, table or figure, or a page, and its runs alone: opt-tree, gunjur/figure-2,
results, systems, ... Verdicts on the page of results are those of the chapters that are new or in the docs. The
pages systems and exactness are made of RUNS/rivals and RUNS/exactness, which the commands of these names fill.
--methods adds contestants of your own to all runs, and to the tables that have a row for each contestant. With --target
and --draft the runs called coder are of your models.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from draftree.artifacts import user_path, write_whole
from draftree.bench.entries import split_names
from draftree.bench.results import CONFIG
from draftree.bench.summary import LoadedRun, load_runs
from draftree.errors import ConfigError
from draftree.progress import err

from ..commands import command_parser, one_line_errors
from ..quality.answers import FILE as SCORES
from ..rival_jobs import Row, read
from . import confidence, dsbd, gunjur, hsddw, opt_tree, page, systems
from .plan import Pair, Plan
from .planned_runs import RUNS
from .plots import check_plots
from .sections import FIGURES, PAGE, Chapter, Runs, select, to_markdown, verdict_in

DIGESTS = f"{page.PAGES}/runs.jsonl"
CHAPTERS = (gunjur.CHAPTER, opt_tree.CHAPTER, confidence.CHAPTER, hsddw.CHAPTER, dsbd.CHAPTER)
"""A chapter for each paper."""


def build(
    runs: Runs, only: Sequence[str] = (), docs: Path | None = None, others: Mapping[str, Sequence[Row]] | None = None
) -> dict[str, str]:
    """The files of the report by their names: the pages, the chapters, their figures as SVG, and the runs' digests.

    Args:
        only: names of the chapters, tables and figures that are wanted, and of pages; by default all.
        docs: folder of chapters that are not made anew, whose verdicts the page of results has too.
        others: page of other systems -> its lines.

    Raises:
        UnknownNameError: there is no such paper, table or figure.
    """
    if only:
        runs = {name: runs[name] for name in runs if name in needed(only)}
    files = {DIGESTS: page.digests(runs)} if runs else {}
    for chapter in select(CHAPTERS, only) if only else CHAPTERS:
        if (made := to_markdown(chapter, runs)) is not None:
            files[_file(chapter)] = made[0]
            files |= {f"{page.PAGES}/{FIGURES}/{name}.svg": svg for name, svg in made[1].items()}
    if PAGE in only or not only:
        texts = [files.get(_file(chapter)) or _text(docs, _file(chapter)) for chapter in CHAPTERS]
        files["results.md"] = page.page(zip(CHAPTERS, map(verdict_in, texts), strict=True), runs)
    for name, rows in (others or {}).items():
        if rows and (name in only or not only):
            files[f"{name}.md"] = systems.PAGES[name][1](rows)
    return files


def _file(chapter: Chapter) -> str:
    return f"{page.PAGES}/{chapter.name}.md"


def _text(docs: Path | None, name: str) -> str:
    """Of a file, if it is there."""
    return (docs / name).read_text() if docs is not None and (docs / name).is_file() else ""


def merged(digests: str, newer: str) -> str:
    """The digests of all planned runs, those of a run that is in both from the newer ones."""
    lines = {json.loads(line)["run"]: line for line in (*digests.splitlines(), *newer.splitlines())}
    return "".join(f"{lines[name]}\n" for name in sorted(lines.keys() & {run.name for run in RUNS}))


def needed(only: Sequence[str]) -> set[str]:
    """Names of the runs that the page, chapters, tables and figures are made from."""
    own = {name for chapter in select(CHAPTERS, only) for part in chapter.parts for name in part.runs}
    return own | ({*page.RUNS} if PAGE in only else set())


def runs_of(folder: str) -> dict[str, LoadedRun]:
    """The planned runs that a folder has, by name; one that is not finished is left out, with a line."""
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
    return found


def pair_of(args: argparse.Namespace) -> Pair | None:
    """The models of the coder's runs; None: none are named.

    Raises:
        ConfigError: a file is missing, or one of two options.
    """
    if args.target is None and args.draft is None:
        return None if args.pair is None else Pair.of_folder(args.pair)
    if args.pair is not None or args.target is None or args.draft is None:
        raise ConfigError("--target and --draft go together, and without --pair")
    return Pair.of_user(args.target, args.draft)


@one_line_errors(resumable=True)
def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = command_parser("benchmarks.papers", __doc__)
    parser.add_argument("runs", metavar="RUNS", help="folder of the runs")
    parser.add_argument("--measure", action="store_true", help="decode what is missing first")
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        default=[],
        help="a page, a paper, or PAPER/TABLE; may be repeated",
    )
    parser.add_argument("--pair", metavar="DIR", help="folder of Qwen2.5-Coder's two GGUF files; else without them")
    parser.add_argument("--target", metavar="MODEL", help="in place of the pair's")
    parser.add_argument("--draft", metavar="MODEL", help="its draft model, of the same vocabulary")
    parser.add_argument("--methods", default="", metavar="METHOD,...", help="that take part too")
    parser.add_argument("--quick", action="store_true", help="three prompts a run")
    parser.add_argument("--docs", metavar="DIR", help="where the report goes; RUNS/report by default")
    args = parser.parse_args(argv)
    check_plots()
    wanted = needed(args.only) if args.only else None
    docs = user_path(args.docs) if args.docs else user_path(args.runs) / "report"
    if args.docs and not docs.is_dir():
        raise ConfigError(f"folder {docs} is not there: make it, or name another place")
    if args.docs and (part := next((name for name in args.only if "/" in name), None)):
        raise ConfigError(f"--only {part} would leave a chapter of {docs} with that alone: leave out --docs")
    if args.measure:
        methods = split_names(args.methods)
        Plan(args.runs, pair_of(args), quick=args.quick, only=wanted, methods=methods).measure()
    folders = {name: user_path(args.runs) / Path(file).stem for name, (file, _) in systems.PAGES.items()}
    others = {name: read(folder / systems.PAGES[name][0]) for name, folder in folders.items()}
    if not (runs := runs_of(args.runs)) and ({*args.only} - {*others} or not args.only):
        raise ConfigError(f"no finished run in {args.runs}: decode what is missing with --measure")
    if lacks := next((name for name in args.only if name in others and not others[name]), None):
        module = f"benchmarks.{folders[lacks].name}"
        raise ConfigError(f"{folders[lacks]} has no lines: make them by python -m {module} first")
    files = build(runs, args.only, docs, others)
    if not args.only:
        for old in (docs / page.PAGES / FIGURES).glob("*.svg"):
            old.unlink()
    elif DIGESTS in files and (docs / DIGESTS).is_file():
        files[DIGESTS] = merged((docs / DIGESTS).read_text(), files[DIGESTS])
    for name, text in files.items():
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(docs / name, text)
    print(docs)


if __name__ == "__main__":
    main()
