"""Ctrl-C: one line and exit code 130, at any moment.

What a command has done is in its files before Ctrl-C comes, as it is before a kill. So the handler raises nothing: an
exception that may come anywhere in any library ends in a traceback, in an abort, or is lost. Loads at once.
"""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

INTERRUPTED = 130
"""Exit code of a process that Ctrl-C has ended, by the convention of shells."""
GO_ON = "the same command goes on from there"
_lines: list[Callable[[], str | None]] = [lambda: "interrupted"]


class InterruptError(Exception):
    """Ctrl-C has ended a command where it raises KeyboardInterrupt: among several processes, and under ``run``."""


@contextmanager
def on_interrupt(line: Callable[[], str | None]) -> Iterator[None]:
    """Meanwhile Ctrl-C ends the process with this line, or with none where it returns None: what runs goes on."""
    _lines.append(line)
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptError(line() or "interrupted") from None
    finally:
        _lines.pop()


def exit_on_interrupt() -> None:
    """Take Ctrl-C from now on, unless whoever started the process has it ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    line = _lines[-1]()
    if line is None:
        return
    before = "\x1b[?25h\n" if os.isatty(2) else ""  # a bar hides the cursor, and stands on the line
    try:
        os.write(2, f"{before}draftree: {line}\n".encode())
    finally:
        os._exit(INTERRUPTED)
