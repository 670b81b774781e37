"""Consoles, and progress of long work: a bar with the time left in a terminal, a line at times in a log."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from .errors import shortened


def console(stderr: bool = False) -> Console:
    """Make a console of the terminal's size; ``COLUMNS`` and ``LINES`` count only where they are positive numbers.

    Rich takes them as they are: at 0 columns it prints nothing, and superscript digits raise ValueError.
    """
    given = "COLUMNS" in os.environ or "LINES" in os.environ
    width, height = shutil.get_terminal_size() if given else (None, None)
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=width, height=height)


out, err = console(), console(stderr=True)


def complain(message: str) -> None:
    """Print one line to standard error."""
    err.print(f"draftree: {shortened(' '.join(message.split()))}", style="red", markup=False)


_EVERY = 60.0
"""Seconds between lines."""


@contextmanager
def progress_reporter(what: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show a stage of ``total`` units, ``done`` of them before; yields the function to call with how many are done."""
    if err.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=err) as bar:
            task = bar.add_task(what, total=total, completed=done)
            yield lambda now: bar.update(task, completed=now)
        return
    began = last = time.monotonic()

    def report(now: int) -> None:
        nonlocal last
        at = time.monotonic()
        if at - last >= _EVERY:
            last = at
            left = (at - began) * (total - now) / max(1, now - done) / 60
            err.print(f"{what}: {now} of {total}, {max(0.0, left):.0f} minutes left")

    yield report
