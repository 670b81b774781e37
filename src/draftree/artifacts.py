"""Paths that users name, JSON that is not trusted, and files that are written in one piece or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any, NoReturn

from .errors import ConfigError, RunError


def user_path(name: str | Path) -> Path:
    """The path that a user names, ``~`` expanded.

    Raises:
        ConfigError: no file can have this name, or its folder cannot be looked into.
    """
    try:
        path = Path(name).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise ConfigError(f"{str(name)[:_SHOWN]!r} cannot be a path ({why}): give another one") from None
    return path


def is_path(name: str) -> bool:
    """Something is at the path that a text names, if it names one."""
    try:
        return user_path(name).exists()
    except ConfigError:
        return False


_SHOWN = 200
"""Characters of a bad path that a message repeats."""


def parse_json(text: str | bytes) -> Any:
    """JSON whose numbers are all finite.

    Raises:
        ValueError: it is not.
        RecursionError: it is nested too deep.
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no finite number")


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
