"""Standard output and standard error as consoles, and the one-line message of an error. Knows nothing of models."""

from __future__ import annotations

import os
import shutil

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
