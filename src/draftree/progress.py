"""Consoles, and progress of long work: a bar with the time left in a terminal, a line at times in a log.

What files, servers and users supply reaches a terminal with its control characters made visible.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from .errors import shortened

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def visible(text: str) -> str:
    """A text as a terminal may get it: of control characters, which it would obey, ends of lines and tabs alone."""
    return text.replace("\r\n", "\n").translate(_CONTROLS)


class SafeConsole(Console):
    """A console that shows the control characters of what it is given, and takes no text for markup or emoji."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(visible(each) if isinstance(each, str) else each for each in objects), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As ``Console.render``, of tables and whatever else texts are in."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def console(stderr: bool = False) -> SafeConsole:
    """Make a console of the terminal's size; ``COLUMNS`` and ``LINES`` count only where they are positive numbers.

    Rich takes them as they are: at 0 columns it prints nothing, and superscript digits raise ValueError.
    """
    given = "COLUMNS" in os.environ or "LINES" in os.environ
    width, height = shutil.get_terminal_size() if given else (None, None)
    return SafeConsole(
        stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True, width=width, height=height
    )


out, err = console(), console(stderr=True)


def complain(message: str) -> None:
    """Print one line to standard error."""
    err.print(f"draftree: {shortened(' '.join(message.split()))}", style="red")


def write(text: str, style: str = "") -> None:
    """Write a text to standard output as it is, unless that is a terminal (``visible``).

    FORCE_COLOR, which makes a console a terminal, changes no answer that a program reads.
    """
    if out.file.isatty():
        out.print(Text(visible(text), style=style), end="")
    else:  # a console would expand tabs
        out.file.write(text)
        out.file.flush()


_EVERY = 60.0
"""Seconds between lines."""


class ProgressReport(Protocol):
    """Shows that so many units are done; ``note`` is shown behind the name of the stage."""

    def __call__(self, done: int, /, note: str = "") -> None: ...


@contextmanager
def progress_reporter(what: str, total: int, done: int = 0) -> Iterator[ProgressReport]:
    """Show a stage of ``total`` units, ``done`` of them before."""
    if err.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=err) as bar:
            task = bar.add_task(what, total=total, completed=done)
            yield lambda now, note="": bar.update(task, completed=now, description=what + note)
        return
    began = last = time.monotonic()

    def report(now: int, /, note: str = "") -> None:
        nonlocal last
        at = time.monotonic()
        if at - last >= _EVERY:
            last = at
            left = (at - began) * (total - now) / max(1, now - done) / 60
            err.print(f"{what}{note}: {now} of {total}, {max(0.0, left):.0f} minutes left")

    yield report


_LARGE = 1 << 29
"""Bytes of a model from which on the progress of loading is shown: about a second's."""


@contextmanager
def loading_reporter(path: Path, size: int) -> Iterator[Callable[[float], None]]:
    """Show how a model of ``size`` bytes is loaded, if it is large; yields the function to call with 0 to 1."""
    if size < _LARGE:
        yield lambda done: None
        return
    with progress_reporter(f"Loading {path.name}", 100) as report:
        yield lambda done: report(int(100 * done))


class StoppableProgress:
    """Progress of a function of C, which exceptions do not pass through: Ctrl-C, or whatever ``progress`` raises, stops
    it and is raised behind it.

    Attributes:
        report: the callback, which returns whether to go on. It is a generator's ``send``: Ctrl-C that came while C ran
            is raised as soon as Python runs, and in a function that would be before its ``try``.
    """

    def __init__(self, progress: Callable[[float], None]) -> None:
        self._raised: BaseException | None = None
        reports = self._reports(progress)
        next(reports)
        self.report = reports.send

    def _reports(self, progress: Callable[[float], None]) -> Generator[bool, float, None]:
        while True:
            try:
                progress((yield self._raised is None))
            except GeneratorExit:
                return
            except BaseException as error:  # noqa: BLE001 - raised by ``check``
                self._raised = self._raised or error

    def check(self) -> None:
        """Raise what has stopped the function of C, if anything has."""
        if self._raised is not None:
            raise self._raised
