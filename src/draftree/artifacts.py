"""Paths that users name, versioned JSON files, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from .errors import ConfigError, RunError

T = TypeVar("T")


def user_path(name: str | Path) -> Path:
    """The path that a user names, ``~`` expanded.

    Raises:
        ConfigError: no file can have this name, or its folder cannot be looked into.
    """
    try:
        if not str(name):
            raise ValueError("it is empty")
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


_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a directory"}


def check_regular(path: Path) -> Path:
    """The same path, of a file that libraries open or map by its name, such as weights.

    Raises:
        OSError: there is none, or something else that may have no end, or no content until somebody writes to it.
    """
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'a device')}, not a regular file", str(path))
    return path


def open_file(path: Path) -> BinaryIO:
    """Open a file to read it once from its beginning; a pipe (``<(...)``, ``/dev/stdin``) while somebody writes to it.

    Raises:
        OSError: it cannot be read, or is a pipe without content that nobody writes to: to open it would wait for ever.
    """
    file = open(path, "rb", opener=_opened_at_once)
    if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode) and not file.peek(1):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe that nobody writes to", str(path))
    return file


def _opened_at_once(name: str, flags: int) -> int:
    if not hasattr(os, "O_NONBLOCK"):  # Windows has no named pipes among its files
        return os.open(name, flags)
    descriptor = os.open(name, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


LARGEST_DATA = 1 << 28
"""Bytes of a file of prompts, texts or results that is read at once."""
_LARGEST, _LARGEST_JSON = 1 << 24, 1 << 20
"""Bytes of another file that is read at once, and of a line of any; a JSON file of ours has some thousand."""


def read_bytes(
    path: Path,
    most: int = _LARGEST,
    unpacked: Callable[[BinaryIO], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> bytes:
    """The content of a file that a user names; of a device without an end no more is read than that.

    Args:
        unpacked: of the open file, the one whose content counts.

    Raises:
        OSError: it cannot be read, or has more than ``most`` bytes.
    """
    with open_file(path) as file, unpacked(file) as inner:
        content: bytes = inner.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes")
    return content


def read_text(path: Path, most: int = _LARGEST) -> str:
    """The text of a file (``read_bytes``), without a byte order mark, and with \\n at the ends of lines.

    Raises:
        OSError: it cannot be read, or has more than ``most`` bytes.
        UnicodeDecodeError: it is not UTF-8.
    """
    return text_of(read_bytes(path, most))


def text_of(content: bytes) -> str:
    """The text of a file's content, as ``read_text`` gives it.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()


def reason(error: Exception) -> str:
    """Why a file cannot be read, in words."""
    if isinstance(error, UnicodeError):
        return "it is not valid UTF-8"
    return getattr(error, "strerror", None) or str(error)


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, one after another, with what ends them; the file may have any size.

    Raises:
        OSError: it cannot be read, or a line has more bytes than a file that is read at once may have.
    """
    with open_file(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LARGEST + 1), b""), start=1):
            if len(line) > _LARGEST:
                raise OSError(errno.EFBIG, f"line {number} has more than {_LARGEST} bytes")
            yield line


def file_path(name: str | Path, what: str) -> Path:
    """The path of a file to write, once it is clear that a file can be there.

    Args:
        what: it is, in messages.

    Raises:
        ConfigError: there is something that is no file, or no folder that can be written.
    """
    path = user_path(name)
    if path.exists() and not path.is_file():
        raise ConfigError(f"{what} {name} is {'a folder' if path.is_dir() else 'no regular file'}: name a file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{what} {name}: folder {path.parent} is not there or cannot be written: name another place")
    return path


def new_file(name: str | Path, what: str) -> Path:
    """The path of a file that a command writes anew; one that is there is never overwritten.

    Args:
        what: as in ``file_path``.

    Raises:
        ConfigError: it exists, or ``file_path`` refuses it.
    """
    path = file_path(name, what)
    if path.exists():
        raise ConfigError(f"{what} {name} exists: name another file, or remove it first")
    return path


_PART, LOCK = ".part", ".lock"
"""Suffixes of a file that is being written, and of a lock; their names begin with a dot."""


def is_bare(folder: Path) -> bool:
    """There is nothing in a folder, which may be missing, but what killed processes have left."""
    return not folder.exists() or all(p.name[0] == "." and p.name.endswith((_PART, LOCK)) for p in folder.iterdir())


@contextlib.contextmanager
def locked(path: Path, what: str, *, folder: bool) -> Iterator[None]:
    """Hold a file or a folder that a command goes on writing; a process that ends, in whatever way, holds nothing.

    Args:
        what: it is, in messages.
        folder: it is one, and is made where it is missing.

    Raises:
        ConfigError: another process holds it.
        RunError: the lock cannot be written.
    """
    if os.environ.get("RANK", "0") != "0":  # of torchrun: the first process writes, for all of them
        yield
        return
    if folder:
        make_folder(path)
    from filelock import FileLock, Timeout

    place = path / LOCK if folder else path.with_name(f".{path.name}{LOCK}")
    lock = FileLock(place, blocking=False)
    with _writing(place):
        try:
            lock.acquire()
        except Timeout:
            raise ConfigError(
                f"{what} {path} is being written by another process: wait for its end, or name another"
            ) from None
    try:
        if folder:
            with contextlib.suppress(OSError):
                for part in path.rglob(f".*{_PART}"):  # of a process that was killed: only who has the lock writes
                    part.unlink()
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows removes no open file
            place.unlink()
        lock.release()


def own_folder(name: str | Path, what: str, mark: str) -> Path:
    """The path of a folder that a command fills: it is missing, bare, or has what the command puts there first.

    Args:
        what: it is, in messages.
        mark: name of what is there first, or a pattern of such names.

    Raises:
        ConfigError: it is no folder, or one with files of somebody else.
    """
    folder = user_path(name)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{what} {name} is a file: name a folder")
    if not is_bare(folder) and not any(folder.glob(mark)):
        raise ConfigError(f"{what} {name} has files of something else: name a folder of its own")
    return folder


def way_out(error: OSError) -> str:
    """What to do where something cannot be written."""
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return "end other processes, then give the same command again"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room there, then give the same command again"
    return "choose another place"


@contextlib.contextmanager
def _writing(what: object) -> Iterator[None]:
    """Raise RunError, with the way out, for what cannot be written."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {what}: {error.strerror}: {way_out(error)}") from None


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, where they are missing.

    Raises:
        RunError: it cannot be made.
    """
    with _writing(f"the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)


def write_whole(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file; until it is complete, what was there stays there.

    Raises:
        RunError: the file cannot be written.
    """
    write_together({path: content})


def write_together(contents: Mapping[Path, str | bytes | memoryview]) -> None:
    """Write files that belong together; until all are complete, what was there stays there.

    Nobody reads a mixture of old and new ones who reads the last one first: if it changes, it is missing while the
    others take their places.

    Raises:
        RunError: a file cannot be written.
    """
    parts = {path: path.with_name(f".{path.name}.{os.getpid()}{_PART}") for path in contents}
    *others, last = contents
    try:
        for path, content in contents.items():
            with _writing(path):
                # bytes of a path that are no UTF-8 become escapes, as JSON writes them
                parts[path].write_bytes(
                    content.encode(errors="backslashreplace") if isinstance(content, str) else content
                )
        with _writing(last):
            if others and last.exists() and last.read_bytes() != parts[last].read_bytes():
                last.unlink()
            for path, part in parts.items():
                part.replace(path)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def append_line(path: Path, line: bytes, whole: int) -> None:
    """Append a line to the whole lines of a file, which take so many bytes: what is behind them is cut off.

    The first line is written whole or not at all: a file whose first line is torn is none that this has written.

    Raises:
        RunError: it cannot be written; the lines before it are kept.
    """
    if not whole:
        write_whole(path, line)
        return
    with _writing(path), path.open("ab") as file:
        file.truncate(whole)
        file.write(line)


def first_error(error: ValidationError) -> str:
    """The first thing that pydantic finds wrong, on one line: where, and what."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


@dataclass(frozen=True, slots=True)
class JsonFormat(Generic[T]):
    """A kind of JSON file: an object with "format", "version" and the fields of a dataclass.

    Attributes:
        name: value of "format".
        version: value of "version"; files of other versions are not read.
        what: the file in messages.
        way_out: ends messages of files that cannot be read.
        content: the dataclass; those of fields that are dataclasses are written beside the others.
    """

    name: str
    version: int
    what: str
    way_out: str
    content: type[T]

    def write(self, path: Path, content: T) -> None:
        """Write a file, one line a field.

        Raises:
            RunError: it cannot be written.
        """
        saved = {"format": self.name, "version": self.version}
        for key, value in _fields(content).items():
            saved |= _fields(value) if is_dataclass(value) else {key: value}
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value, default=_fields)}" for key, value in saved.items())
        write_whole(path, f"{{\n{lines}\n}}\n")

    def read(self, path: Path) -> T:
        """Read a file.

        Raises:
            FileNotFoundError: there is none.
            ConfigError: it cannot be read, is of another format or version, or a key is missing or has a value of a
                wrong type.
        """

        def wrong(why: str) -> ConfigError:
            return ConfigError(f"{self.what} {path} {why}: {self.way_out}")

        try:
            document = json.loads(read_bytes(path, _LARGEST_JSON), parse_int=_whole_number)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise wrong(f"cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise wrong(f"is not JSON ({error})") from None
        if not isinstance(document, dict) or document.get("format") != self.name:
            raise wrong(f"is JSON, but no {self.what}")
        if document.get("version") != self.version:
            raise wrong(f"has version {document.get('version')}, not {self.version}")
        nested = [name for name, kind in get_type_hints(self.content).items() if is_dataclass(kind)]
        try:
            text = json.dumps(document | dict.fromkeys(nested, document), allow_nan=False)
            return TypeAdapter(self.content).validate_json(text, strict=True)
        except ValidationError as error:
            raise wrong(f"is corrupt: {first_error(error)}") from None
        except ValueError:
            raise wrong("is corrupt: it has a value that is no finite number") from None


def _whole_number(digits: str) -> int | float:
    """A whole number; an infinite one where no float can hold it."""
    return int(digits) if math.isfinite(float(digits)) else float(digits)


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value) if f.init}
