"""What the command line does with the terminal and the standard streams that it is started with."""

from __future__ import annotations

import io
import os
import pty
import re
import runpy
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from draftree import progress
from draftree.cli.console import run as print_answer
from draftree.cli.main import main, run
from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.errors import ConfigError, shortened
from draftree.progress import console

from .. import tiny_gguf
from ..scripted import ScriptedModel
from ..tiny import bytes_tokenizer

Captured = pytest.CaptureFixture[str]


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["draftree", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("columns", ["0", "-1", "²", "many", ""])
@pytest.mark.parametrize("name", ["COLUMNS", "LINES"])
def test_a_terminal_size_that_is_none_hides_nothing(
    name: str, columns: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``COLUMNS=0``, which some schedulers set, every command printed nothing and ended with exit code 0."""
    monkeypatch.setenv(name, columns)
    console().print("the cat")
    assert capsys.readouterr().out == "the cat\n"


@pytest.mark.parametrize("stream", [True, False])
def test_all_that_was_generated_is_printed_where_a_request_is_cancelled(stream: bool, capsys: Captured) -> None:
    """A stop string could begin with the end of it."""

    def leave(ids: NDArray[np.int64]) -> None:
        if len(ids) == 1 + len(tokenizer.encode("a </cod", add_special_tokens=False)):
            handle.cancel()

    tokenizer = bytes_tokenizer()
    engine = Engine(ScriptedModel("a </cod b", tokenizer))
    handle = engine.submit([5], SamplingParams(stop=("</code>",), criteria=(leave,)))
    print_answer(handle, stream=stream)
    assert capsys.readouterr().out == "a </cod\n"


def test_the_module_is_the_command(model: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m draftree`` said that the package cannot be run."""
    monkeypatch.setattr(sys, "argv", ["draftree", "info", model])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("draftree", run_name="__main__")
    assert ended.value.code == 0
    assert "architecture" in capsys.readouterr().out


def test_closed_standard_input_is_empty(model: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``<&-``, as of a daemon, reading the prompt or a line of a chat was a traceback."""
    for arguments, code in ((["generate", "-", "--target", model], 2), (["chat", model], 0)):
        monkeypatch.setattr(sys, "stdin", None)
        assert _main(monkeypatch, *arguments) == code
        sys.stdin.close()
    assert capsys.readouterr().out == ""


def test_closed_standard_output_is_refused(model: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``>&-`` the model was loaded and the first token was a traceback."""
    monkeypatch.setattr(sys, "stdout", None)
    assert _main(monkeypatch, "generate", "the cat", "--target", model) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_closed_standard_error_costs_no_text(model: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["generate", "the cat", "--target", model, "--max-tokens", "5", "--drafter", "lookup"]
    assert run(asked) == 0
    want = capsys.readouterr().out
    monkeypatch.setattr(sys, "stderr", None)
    assert _main(monkeypatch, *asked) == 0
    sys.stderr.close()
    assert capsys.readouterr().out == want


def test_a_line_of_a_chat_that_is_no_text_costs_only_itself(
    model: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invalid byte lost all lines that had been read with it; where the locale lets bytes through, the chat template
    was blamed for it."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat\n\xff\xfe\nthe hat\n"), "utf-8"))
    assert _main(monkeypatch, "chat", model, "--max-tokens", "3", "--drafter", "none") == 0
    said = capsys.readouterr().err
    assert said.count("3 tokens in") == 2
    assert [line for line in said.splitlines() if line.startswith("draftree:")] == [
        "draftree: the line is not valid UTF-8: convert it, for example with iconv"
    ]


def test_a_long_name_is_not_repeated_in_full() -> None:
    """A pasted text in place of a path came back as screens of text, with the way out beyond them."""
    for name in ("x" * 100_000, "x " * 50_000):
        message = str(ConfigError(f"no such folder {name!r}: give another one"))
        assert len(message) <= 1300
        assert message.startswith("no such folder 'x")
        assert message.endswith(": give another one")
    assert shortened(f"short {'y' * 200} names stay") == f"short {'y' * 200} names stay"


def test_more_work_than_can_be_done_is_refused(model: str, tmp_path: Path, capsys: Captured) -> None:
    """It looked like a hang."""
    prompts = tmp_path / "prompts"
    prompts.write_text("the cat\n")
    head = ["train", "head", model, "--prompts", str(prompts), "--out", str(tmp_path / "head")]
    assert run([*head, "--rows", "1000000000"]) == 2
    assert "1000" in capsys.readouterr().err
    assert not (tmp_path / "head").exists()


class Terminal(io.BytesIO):
    """What it shows, or what is typed."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_pipes_are_utf8_on_every_system_and_a_terminal_is_what_it_is(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, where they had a country's encoding and two characters at the end of each line."""

    def echo() -> int:
        progress.write(sys.stdin.read())
        return 0

    monkeypatch.setattr("draftree.cli.main.run", echo)
    for kind, text in ((io.BytesIO, "né €\n"), (Terminal, "ne\n")):
        shown = kind()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(kind(text.encode()), encoding))
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding, newline="\r\n"))
        assert _main(monkeypatch) == 0
        assert shown.getvalue() == (text.replace("\n", "\r\n") if kind is Terminal else text).encode()
        assert {sys.stdin.encoding, sys.stdout.encoding} == {encoding if kind is Terminal else "utf-8"}


def test_a_pipe_gets_answers_as_they_are_under_force_color(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(progress, "out", console())
    progress.write("a\tb\r\nx\x1b[0m", "green")
    assert capsys.readouterr().out == "a\tb\r\nx\x1b[0m"


@pytest.mark.parametrize(
    "words", ["methods", "--help", "--version", "info MODEL", "generate cat --target MODEL --json"]
)
def test_a_full_disk_behind_standard_output_is_one_line(words: str, tmp_path: Path) -> None:
    """The interpreter flushed once more at its end: exit code 120, and lines of its own."""
    file = str(tiny_gguf.write(tmp_path / "tiny.gguf", layers=1))
    command = [sys.executable, "-m", "draftree", *(file if word == "MODEL" else word for word in words.split())]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=buffered, text=True, check=False)  # noqa: S603
    assert done.stderr.splitlines() == ["draftree: failed while running: [Errno 28] No space left on device"]
    assert done.returncode == 1


def test_a_line_of_a_chat_in_a_terminal_may_be_longer_than_the_terminal_holds(tmp_path: Path) -> None:
    """It was cut at 4095 bytes without a word: the terminal's own editing keeps no more of a line."""
    file = str(tiny_gguf.write(tmp_path / "tiny.gguf", layers=1))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "draftree", "chat", file]
    kept = os.environ | {"TERM": "dumb"}
    shown = bytearray()

    def watch() -> None:
        with suppress(OSError):  # EIO: the other end is closed
            while said := os.read(ours, 1 << 16):
                shown.extend(said)

    watcher = threading.Thread(target=watch)
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=kept) as process:  # noqa: S603
        os.close(theirs)
        watcher.start()
        while b"> " not in shown and process.poll() is None:
            time.sleep(0.02)
        for _ in range(50):
            os.write(ours, b"x" * 100)
            time.sleep(0.01)
        os.write(ours, b"\n")
        while not (found := re.search(rb"has (\d+) (?:characters|tokens)", shown)) and process.poll() is None:
            time.sleep(0.02)
        os.write(ours, b"/exit\n")
        assert process.wait() == 0
    watcher.join()
    os.close(ours)
    assert found and int(found[1]) >= 5000, bytes(shown[-1000:])
