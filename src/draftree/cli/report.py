"""The command ``draftree report``."""

from __future__ import annotations

from typing import Annotated

import typer

from ..bench.summary import READING, load_runs
from ..bench.summary import report as of_run
from ..progress import out


def report(
    folders: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Runs of 'draftree bench', or folders that hold some.")
    ],
) -> None:
    """Print the tables of runs in Markdown, with what they were made of and measured on."""
    runs = [run for folder in folders for run in load_runs(folder)]
    out.print("\n\n".join([READING, *(of_run(run) for run in runs)]), markup=False)
