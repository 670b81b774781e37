"""Paths that users name, versioned JSON files, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from .errors import ConfigError, RunError

T = TypeVar("T")


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
        raise ConfigError(f"{str(name)!r} cannot be a path ({why}): give another one") from None
    return path


def is_path(name: str) -> bool:
    """Something is at the path that a text names, if it names one."""
    try:
        return user_path(name).exists()
    except ConfigError:
        return False


LARGEST_DATA = 1 << 28
"""Bytes of a file of prompts, texts or results that is read at once."""
_LARGEST, _LARGEST_JSON = 1 << 24, 1 << 20
"""Bytes of another file that is read at once, and of a line of any; a JSON file of ours has some thousand."""


def read_bytes(path: Path, most: int = _LARGEST, opened: Callable[..., Any] = Path.open) -> bytes:
    """The content of a file that a user names; of a device without an end no more is read than that.

    Args:
        opened: called with the path and "rb"; what it unpacks counts.

    Raises:
        OSError: it cannot be read, or has more than ``most`` bytes.
    """
    with opened(path, "rb") as file:
        content: bytes = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes")
    return content


def read_text(path: Path, most: int = _LARGEST) -> str:
    """The text of a file (``read_bytes``), without a byte order mark, and with \\n at the ends of lines.

    Raises:
        OSError: it cannot be read, or has more than ``most`` bytes.
        UnicodeDecodeError: it is not UTF-8.
    """
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, most)), encoding="utf-8-sig").read()


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, one after another, with what ends them; the file may have any size.

    Raises:
        OSError: it cannot be read, or a line has more bytes than a file that is read at once may have.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_LARGEST + 1):
            number += 1
            if len(line) > _LARGEST:
                raise OSError(errno.EFBIG, f"line {number} has more than {_LARGEST} bytes")
            yield line


_ELSEWHERE = "choose another place"


def make_folder(folder: Path, way_out: str = _ELSEWHERE) -> None:
    """Make a folder, and those above it, where they are missing.

    Raises:
        RunError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder {folder}: {error.strerror}: {way_out}") from None


def check_disk(folder: Path, needed: int, what: str, way_out: str) -> None:
    """Make sure that the disk of a folder, which may be missing, has so many bytes left.

    Raises:
        ConfigError: it has fewer.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ConfigError(f"{what} need {needed} bytes on disk and {folder.parent} has {free} free: {way_out}")


def write_whole(path: Path, content: str | bytes | memoryview, way_out: str = _ELSEWHERE) -> None:
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
        raise RunError(f"cannot write {path}: {error.strerror}: {way_out}") from None


def first_error(error: ValidationError) -> str:
    """The first thing that pydantic finds wrong, on one line: where, and what."""
    found = error.errors(include_url=False)[0]
    where = ".".join(map(str, found["loc"]))
    return f"{where}: {found['msg']}" if where else found["msg"]


@dataclass(frozen=True, slots=True)
class JsonFormat(Generic[T]):
    """A kind of JSON file: an object with "format", "version" and the fields of a dataclass.

    Attributes:
        name: value of "format".
        version: value of "version"; files of other versions are not read.
        what: the file in messages.
        way_out: ends messages of files that cannot be read.
        content: the dataclass; fields that are dataclasses are written as objects, or beside the others where ``flat``.
    """

    name: str
    version: int
    what: str
    way_out: str
    content: type[T]
    flat: bool = False

    def write(self, path: Path, content: T) -> None:
        """Write a file, one line a field and one line a row of a table.

        Raises:
            RunError: it cannot be written.
        """
        own = {"format": self.name, "version": self.version}
        for key, value in _fields(content).items():
            own |= _fields(value) if self.flat and is_dataclass(value) else {key: value}
        lines = ",\n".join(f"  {json.dumps(key)}: {_lines(value)}" for key, value in own.items())
        write_whole(path, f"{{\n{lines}\n}}\n")

    def read(self, path: Path) -> T:
        """Read a file.

        Raises:
            FileNotFoundError: there is none.
            ConfigError: it cannot be read, is of another format or version, or a key is missing, unknown or has a
                value of a wrong type.
        """

        def wrong(why: str) -> ConfigError:
            return ConfigError(f"{self.what} {path} {why}: {self.way_out}")

        try:
            content = read_bytes(path, _LARGEST_JSON)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ConfigError(f"cannot read {self.what} {path}: {error.strerror}: {self.way_out}") from None
        try:
            document = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise wrong(f"is not JSON ({error})") from None
        if not isinstance(document, dict) or document.get("format") != self.name:
            raise ConfigError(f"{path} is JSON but no {self.what}: {self.way_out}")
        if document.get("version") != self.version:
            raise wrong(f"has version {document.get('version')}, not {self.version}")
        kinds = get_type_hints(self.content)
        nested = {name: kinds[name] for name in kinds if self.flat and is_dataclass(kinds[name])}
        known = {"format", "version", *kinds, *(f.name for kind in nested.values() for f in fields(kind))}
        if unknown := sorted(document.keys() - known):
            raise wrong(f"is corrupt: no key {unknown[0]!r} is known")
        try:
            text = json.dumps(document | dict.fromkeys(nested, document), allow_nan=False)
            return TypeAdapter(self.content).validate_json(text, strict=True)
        except ValidationError as error:
            raise wrong(f"is corrupt: {first_error(error)}") from None
        except ValueError:
            raise wrong("is corrupt: it has a value that is no finite number") from None


_WIDTH = 160
"""Characters of a table that is written on one line."""


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value) if f.init}


def _lines(value: Any) -> str:
    text = json.dumps(value, default=_fields)
    if len(text) <= _WIDTH or not isinstance(value, (list, tuple)):
        return text
    rows = ",\n".join(f"    {json.dumps(row, default=_fields)}" for row in value)
    return f"[\n{rows}\n  ]"
