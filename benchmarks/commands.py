"""What the commands of this folder share: how their options are read, and how they end where something is wrong."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager

from draftree.errors import DraftreeError


def command_parser(module: str, description: str | None) -> ArgumentParser:
    """For ``python -m MODULE``."""
    return ArgumentParser(f"python -m {module}", description=description, formatter_class=RawDescriptionHelpFormatter)


@contextmanager
def one_line_errors(*, resumable: bool = False) -> Iterator[None]:
    """End the process with one line where a command fails or is interrupted.

    Args:
        resumable: the same command goes on from there.
    """
    try:
        yield
    except (DraftreeError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted" + ": the same command goes on from there" * resumable)


def without_folders(text: str) -> str:
    """A command or a label with the names of files in place of their absolute paths."""
    return re.sub(r"(?<![\w.~])/(?:[^\s,:=@>'/]+/)*([^\s,:=@>'/]+)", r"\1", text)
