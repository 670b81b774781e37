"""The papers' claims beside what is found here: decode what is missing of the runs, then write the report.

    python -m benchmarks.papers RUNS --measure [--pair DIR] [--quick] --markdown docs/results.md

RUNS is the folder of the runs; without --measure the report is made of those that are there. It prints beforehand how
many runs are missing and about how long they take, and goes on where it was stopped. Each figure is drawn from the run
that it names (``plan.py``), and from no other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from draftree.artifacts import user_path, write_whole
from draftree.bench.summary import load_runs
from draftree.errors import ConfigError, DraftreeError

from . import claims, confidence, dsbd, gunjur, hsddw, opt_tree
from .plan import Plan
from .plots import check_plots
from .sections import Runs, to_markdown, write_figures

CHAPTERS = (gunjur.CHAPTER, opt_tree.CHAPTER, confidence.CHAPTER, hsddw.CHAPTER, dsbd.CHAPTER)
"""A chapter for each paper."""


def build(runs: Runs, figures: str) -> tuple[str, dict[str, str]]:
    """The report, and its figures: name -> SVG, in the folder ``figures`` beside it."""
    chapters, drawn = to_markdown(CHAPTERS, runs, figures)
    parts = ["# draftree: results", *claims.first_table(runs), *chapters, *claims.every(runs)]
    return "\n\n".join([*parts, *claims.made_of(list(runs.values()))]) + "\n", drawn


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", metavar="RUNS", help="folder of the runs")
    parser.add_argument("--measure", action="store_true", help="decode what is missing first")
    parser.add_argument("--pair", metavar="DIR", help="folder of Qwen2.5-Coder's two GGUF files; else without them")
    parser.add_argument("--quick", action="store_true", help="three prompts a run")
    parser.add_argument("--markdown", metavar="FILE", help="where the report goes; RUNS/papers.md by default")
    args = parser.parse_args(argv)
    try:
        check_plots()
        text = user_path(args.markdown) if args.markdown else user_path(args.runs) / "papers.md"
        if args.markdown and not text.parent.is_dir():
            raise ConfigError(f"folder {text.parent} is not there: make it, or name another place")
        if args.measure:
            Plan(args.runs, args.pair, quick=args.quick).measure()
        made, drawn = build({run.path.name: run for run in load_runs(args.runs)}, f"{text.stem}-figures")
        write_figures(text.parent / f"{text.stem}-figures", drawn)
        write_whole(text, made)
    except (DraftreeError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on from there")
    print(text)


if __name__ == "__main__":
    main()
