"""Files that are written in one piece or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import RunError


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file; until it is complete, what was there stays there.

    Raises:
        RunError: the file cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            part.write_bytes(content.encode() if isinstance(content, str) else content)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}: choose another place") from None
