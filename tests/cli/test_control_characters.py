"""What files and users supply does not command the terminal: control characters are shown, not obeyed."""

from __future__ import annotations

import io
import json
import logging.config
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from uvicorn.config import LOGGING_CONFIG

from draftree import progress
from draftree.cli.main import run
from draftree.cli.serve import _log
from draftree.progress import SafeConsole, visible

from ..models.gguf.retyped import Rewriter, text
from ..tiny_gguf import write

Captured = pytest.CaptureFixture[str]
_CLEARS = "\x1b[2J\x9b31m\x07\x7f"
"""Clears a screen and makes it red."""


def _obeyed(printed: str) -> list[str]:
    """What a terminal would obey, or somebody would look for in vain, of what commands print."""
    return [c for c in printed if c not in "\n\t" and not c.isprintable()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model") / "tiny.gguf", layers=1)


class Terminal(io.StringIO):
    """What it shows."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Standard output as a terminal without colours."""
    shown = Terminal()
    made = SafeConsole(file=shown, force_terminal=True, color_system=None, soft_wrap=True, width=200)
    monkeypatch.setattr(progress, "out", made)
    return shown


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "cat", "--target", f"./{_CLEARS}.gguf"],
        ["generate", "cat", "--target", f"./{_CLEARS}"],
        ["generate", "cat", "--drafter", _CLEARS],
        ["generate", "cat", "--method", _CLEARS],
        ["generate", "cat", "--method", "static", "--set", f"{_CLEARS}=1"],
        ["generate", "cat", "--set", _CLEARS],
        ["generate", "cat", f"--{_CLEARS}"],
        ["generate", "cat", "--temperature", _CLEARS],
        ["generate", "cat", "--json-schema", _CLEARS],
        ["generate", "cat", "--target", "{model}", "--regex", f"({_CLEARS}"],
        ["batch", _CLEARS, "out"],
        ["bench", "--suite", _CLEARS, "--out", "out"],
        ["methods", _CLEARS],
        ["show", _CLEARS],
        ["report", _CLEARS],
        ["serve", "--api-key-file", _CLEARS],
        [_CLEARS],
    ],
)
def test_a_complaint_shows_what_was_written(words: Sequence[str], model: Path, capsys: Captured) -> None:
    assert run([str(model) if word == "{model}" else word for word in words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and _obeyed(printed.err) == []
    assert "\\x1b[2J" in printed.err or "\\x1b" not in repr(words)


@pytest.mark.parametrize("backend", ["native", "llama.cpp"])
@pytest.mark.parametrize(
    ("key", "code"),
    [
        ("general.architecture", 2),
        ("tokenizer.ggml.model", 2),
        ("tokenizer.ggml.pre", 2),
        ("llama.rope.scaling.type", 2),
        (f"llama.{_CLEARS}", None),
        ("general.type", None),
        ("general.name", 0),
    ],
)
def test_a_complaint_shows_what_a_file_holds(
    key: str, code: int | None, backend: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Keys, names of tensors and texts of a file went to the terminal as they were: one could clear it, or write over
    what was there."""
    Rewriter(model).copy(tmp_path / "tiny.gguf", key, text(_CLEARS.encode()))
    ended = run(["info", "--backend", backend, str(tmp_path / "tiny.gguf")])
    printed = capfd.readouterr()
    assert code in (None, ended) and ended in (0, 2)
    assert _obeyed(printed.out + printed.err) == []


def test_a_complaint_shows_the_name_of_a_tensor(model: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "tiny.gguf").write_bytes(model.read_bytes())
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf", "r+")
    reader.tensors[0].field.parts[1][:6] = list(b"\x1b[31m\x07")
    reader.data.flush()
    assert run(["info", "--backend", "native", str(tmp_path / "tiny.gguf")]) == 2
    assert _obeyed(capsys.readouterr().err) == []


def test_a_complaint_shows_what_a_template_raises(tmp_path: Path, capsys: Captured) -> None:
    template = "{{ raise_exception('" + _CLEARS + "') }}"
    path = write(tmp_path / "tiny.gguf", layers=1, template=template)
    assert run(["generate", "cat", "--target", str(path)]) == 2
    printed = capsys.readouterr().err
    assert _obeyed(printed) == [] and "\\x1b[2J" in printed


def test_a_name_is_no_markup(model: Path, tmp_path: Path, capsys: Captured) -> None:
    """``draftree info '[/red].gguf'`` was a traceback, and ``[red]`` left the name out."""
    path = tmp_path / "[red]a[/bold] :cat:.gguf"
    path.parent.mkdir()
    path.write_bytes(model.read_bytes())
    assert run(["info", str(path)]) == 0
    assert f"{path}\n" in capsys.readouterr().out


def _asked(model: Path, *more: str) -> list[str]:
    pattern = _CLEARS.replace("[", r"\[") + "\r\n\tcat"
    return ["generate", "cat", "--raw", "--regex", pattern, "--target", str(model), "--drafter", "none", *more]


@pytest.mark.parametrize("more", [[], ["--show-trees"]])
def test_a_terminal_shows_the_control_characters_of_an_answer(
    more: list[str], model: Path, terminal: io.StringIO, capsys: Captured
) -> None:
    assert run(_asked(model, *more)) == 0
    assert "\\x1b[2J\\x9b31m\\x07\\x7f\n" in terminal.getvalue()
    assert _obeyed(terminal.getvalue()) == []


def test_a_pipe_gets_an_answer_as_it_is(model: Path, capsys: Captured) -> None:
    for more in ([], ["--show-trees"]):
        assert run(_asked(model, *more)) == 0
        assert f"{_CLEARS}\r\n\tcat\n" in capsys.readouterr().out
    assert run(_asked(model, "--json")) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["text"] == f"{_CLEARS}\r\n\tcat"


@pytest.mark.parametrize("as_json", [False, True])
def test_the_log_of_a_server_shows_what_clients_send(as_json: bool, capsys: Captured) -> None:
    made = _log(LOGGING_CONFIG, as_json=as_json)
    logging.config.dictConfig({**made, "loggers": {"draftree": made["loggers"]["draftree"]}})
    log = logging.getLogger("draftree.server")
    try:
        raise ValueError(_CLEARS)
    except ValueError as error:
        log.exception("a request failed: %s", error)
    finally:
        logging.getLogger("draftree").handlers.clear()
        logging.getLogger("draftree").setLevel(logging.NOTSET)
    printed = capsys.readouterr().err
    assert "a request failed" in printed and "ValueError" in printed and "[2J" in printed
    assert _obeyed(printed) == []


def test_every_control_character_but_ends_of_lines_and_tabs_is_made_visible() -> None:
    assert visible("a\r\nb\tc") == "a\nb\tc"
    for code in (*range(9), *range(11, 32), *range(127, 160)):
        assert _obeyed(visible(f"a{chr(code)}b")) == [] and visible(f"a{chr(code)}b") == f"a\\x{code:02x}b"
    assert visible("é€😀") == "é€😀"


@pytest.mark.parametrize("backend", ["native", "llama.cpp"])
def test_a_file_whose_name_is_no_utf8_is_a_model(model: Path, tmp_path: Path, backend: str, capsys: Captured) -> None:
    """Its name could not be handed to llama.cpp, nor written into a trace or a profile's name."""
    path = tmp_path / "m\udcff.gguf"
    path.symlink_to(model)
    trace = tmp_path / "t\udcff.jsonl"
    chosen = ["--backend", backend]
    assert run(["info", str(path), *chosen]) == 0
    words = ["generate", "cat", "--raw", "--target", str(path), "--max-tokens", "2", "--trace", str(trace), *chosen]
    assert run(words) == 0
    assert "m\\udcff.gguf" in capsys.readouterr().out and "m\\\\udcff.gguf" in trace.read_text()
