"""Paths that users name, JSON whose numbers are finite."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draftree.artifacts import JsonFormat, append_line, is_path, locked, user_path, write_whole
from draftree.cli.main import run
from draftree.drafters.registry import load_drafter
from draftree.engine.trace import Trace
from draftree.errors import ConfigError, InputError, RunError
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.loading import load
from draftree.policies.methods import find_policy

from .tiny import tiny

NO_PATHS = {
    "NUL": "a\0b",
    "NUL in a folder": "/a\0/b",
    "too long": "x" * 5000,
    "no such user": "~nobody-of-this-name/x",
    "no UTF-8": "a\ud800b",
}


@pytest.mark.parametrize("case", NO_PATHS)
def test_what_cannot_be_a_path_is_refused(case: str) -> None:
    """NUL bytes and unknown users ended in tracebacks of pathlib."""
    with pytest.raises(ConfigError) as caught:
        user_path(NO_PATHS[case])
    assert "\n" not in str(caught.value)
    assert not is_path(NO_PATHS[case])


@pytest.mark.parametrize("number", sorted(errno.errorcode), ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("write", [write_whole, lambda path, data: append_line(path, data, 1)], ids=["whole", "line"])
def test_room_is_wanted_where_a_disk_is_full_and_nowhere_else(
    write: Callable[[Path, bytes], None], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that nobody may write was answered with "free some space"."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, "why")

    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(RunError) as caught:
        write(tmp_path / "out", b"{}\n")
    full, short = (errno.ENOSPC, errno.EDQUOT), (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    advice = "make room" if number in full else "end other" if number in short else "choose another"
    given = [words for words in ("make room", "free some", "end other", "choose another") if words in str(caught.value)]
    assert given == [advice] and "why: " in str(caught.value)


@pytest.mark.parametrize("folder", [False, True])
def test_what_a_process_writes_no_other_writes(folder: bool, tmp_path: Path) -> None:
    """Two batches into one file at once cut off each other's records. A killed process holds nothing."""
    path = tmp_path / "out"
    with_lock = f"with locked(Path({str(path)!r}), 'it', folder={folder}): print(flush=True); time.sleep(600)"
    script = f"import time\nfrom pathlib import Path\nfrom draftree.artifacts import locked\n{with_lock}"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as other:  # noqa: S603 - this test's
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(ConfigError, match="out .*another process"), locked(path, "it", folder=folder):
            pass
        other.kill()
    with locked(path, "it", folder=folder):
        pass
    assert [*tmp_path.rglob("*")] == ([path] if folder else [])


def test_what_a_killed_process_was_writing_is_removed_by_the_next_one(tmp_path: Path) -> None:
    lost = tmp_path / "folder" / "work" / f".file.{2**22}.part"
    lost.parent.mkdir(parents=True)
    lost.touch()
    write_whole(lost.parent / "file", "whole")
    with locked(tmp_path / "folder", "it", folder=True):
        assert [*lost.parent.iterdir()] == [lost.parent / "file"]


def test_a_path_need_not_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    assert user_path("~/file") == tmp_path / "file"
    assert user_path(tmp_path / "file" / "below") == tmp_path / "file" / "below"
    assert (is_path("~/file"), is_path("~/other")) == (True, False)


def test_a_path_that_goes_in_circles_is_refused(tmp_path: Path) -> None:
    os.symlink(tmp_path / "circle", tmp_path / "circle")
    with pytest.raises(ConfigError):
        user_path(tmp_path / "circle" / "file")


COMMANDS = (
    "generate a --target BAD",
    "generate a --target MODEL --drafter BAD",
    "generate a --target MODEL --drafter lookup+BAD",
    "generate a --target MODEL --drafter lookup>BAD",
    "generate a --target MODEL --beams 2 --drafter BAD",
    "generate a --target MODEL --drafter lookup --method sequoia --set tree=BAD",
    "generate a --target MODEL --drafter lookup --method c2t --set classifier=BAD",
    "generate a --target MODEL --drafter lookup --trace BAD",
    "chat BAD",
    "info BAD",
    "profile BAD",
    "calibrate --target MODEL --drafter lookup --prompts BAD --out OUT",
    "calibrate --target MODEL --drafter lookup --prompts PROMPTS --out BAD",
    "train head MODEL --prompts BAD --out OUT",
    "train head MODEL --prompts PROMPTS --out BAD",
    "train head MODEL --prompts PROMPTS --out OUT --init BAD",
    "train classifier --target MODEL --drafter lookup --prompts BAD --out OUT",
    "train classifier --target MODEL --drafter lookup --prompts PROMPTS --out BAD",
    "train classifier --target MODEL --drafter lookup --prompts PROMPTS --out OUT --data BAD",
    "train classifier --target MODEL --drafter lookup --prompts PROMPTS --out OUT --fine-tune BAD",
    "bench --target MODEL --suite BAD --out OUT",
    "bench --target MODEL --suite SUITE --out BAD",
    "bench --target MODEL --suite mt-bench --data BAD --out OUT",
    "bench --target BAD --suite SUITE --out OUT",
    "bench --target MODEL --suite SUITE --out OUT --drafters BAD",
    "report BAD",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_nul_byte_in_any_path_is_one_line(
    command: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"MODEL": model, "OUT": str(tmp_path / "out")}
    for place, content in (("PROMPTS", "".join(f"a {i}\n" for i in range(40))), ("SUITE", json.dumps({"prompt": "a"}))):
        (tmp_path / place).write_text(content)
        places[place] = str(tmp_path / place)
    words = [places.get(word, word.replace("BAD", "a\0b")) for word in command.split()]
    capsys.readouterr()
    assert run(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.strip().splitlines()) == 1, printed.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["PROMPTS", "SUITE"]


@pytest.mark.parametrize("path", NO_PATHS.values(), ids=NO_PATHS)
def test_the_library_refuses_them_too(path: str) -> None:
    target = HFModel(tiny(), self_test=False)
    policy = find_policy("chain")
    with pytest.raises(InputError):
        load(path)
    with pytest.raises(InputError):
        load_drafter(path, target, policy)
    with pytest.raises(InputError):
        Trace(path)


@dataclass(frozen=True)
class Shape:
    rows: tuple[tuple[int, ...], ...]
    scale: float = 1.0


@dataclass(frozen=True)
class Drawing:
    name: str
    shape: Shape


DRAWINGS = JsonFormat("drawing", 1, "drawing", "draw another", Drawing)
DRAWING = Drawing("a", Shape(((1, 2), (3,)), 0.1))


def test_a_versioned_file_comes_back(tmp_path: Path) -> None:
    DRAWINGS.write(tmp_path / "x", DRAWING)
    assert DRAWINGS.read(tmp_path / "x") == DRAWING
    assert list(json.loads((tmp_path / "x").read_text())) == ["format", "version", "name", "rows", "scale"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 2}, "version 2"),
        ({"version": None}, "version None"),
        ({"format": "other"}, "no drawing"),
        ({"name": None}, "name"),
        ({"rows": [[1.5]]}, "shape.rows.0.0"),
        ({"scale": "1"}, "shape.scale"),
    ],
)
def test_a_versioned_file_that_is_wrong_names_the_key(change: dict[str, object], named: str, tmp_path: Path) -> None:
    DRAWINGS.write(tmp_path / "x", DRAWING)
    (tmp_path / "x").write_text(json.dumps(json.loads((tmp_path / "x").read_text()) | change))
    with pytest.raises(ConfigError, match=named) as found:
        DRAWINGS.read(tmp_path / "x")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "not JSON"),
        (b'{"format": "draftree dra', "not JSON"),
        (b"\x80\x04\x95\x1f\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no drawing"),
        (b" " * (1 << 21), "more than"),
        (None, "be read"),
    ],
)
def test_what_is_no_versioned_file_is_refused(content: bytes | None, named: str, tmp_path: Path) -> None:
    """Whatever it has, or where it is a folder, to which nothing is written either."""
    path = tmp_path / "x"
    if content is None:
        path.mkdir()
        with pytest.raises(RunError):
            DRAWINGS.write(path, DRAWING)
        assert [*tmp_path.iterdir()] == [path]
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{named}.*draw another$"):
        DRAWINGS.read(path)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "-1e999", "1" + 400 * "0"])
def test_a_number_that_is_not_finite_is_refused(number: str, tmp_path: Path) -> None:
    DRAWINGS.write(tmp_path / "x", DRAWING)
    text = (tmp_path / "x").read_text()
    (tmp_path / "x").write_text(text.replace("0.1", number))
    with pytest.raises(ConfigError, match="finite number"):
        DRAWINGS.read(tmp_path / "x")


def test_bytes_of_a_name_that_are_no_utf8_are_written_as_json_has_them(tmp_path: Path) -> None:
    """``draftree bench --backend`` with such a name ended in a traceback when its settings were written."""
    path = tmp_path / "settings.json"
    write_whole(path, json.dumps({"name": "m\udcff ü"}, ensure_ascii=False))
    assert json.loads(path.read_text()) == {"name": "m\udcff ü"}
    assert "ü" in path.read_text()
