"""Files without an end, and pipes that nobody writes to, for every option that names a file.

Each is a complaint in one line, before memory runs out, and nothing is waited for.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftree.artifacts import read_lines, read_text
from draftree.cli.main import run

from ..bench import runs
from ..tiny import save_tiny
from ..tiny_gguf import split, write

_MOST = 2 << 30
"""Bytes that a command may take beside those that are taken; most lines take some MB."""

LINES = """
generate cat --target {zero}
generate cat --target {model_of_zeros}
generate cat --target {zeros.gguf}
generate cat --target {zeros.gguf} --backend llama.cpp
generate cat --target {weights_of_zeros}
generate cat --target {tokenizer_of_zeros}
generate cat --target {tiny-00001-of-00002.gguf}
generate cat --target {model} --drafter {zeros.gguf}
generate cat --target {model} --drafter {weights_of_zeros}
generate cat --target {model} --drafter {zero}
generate cat --target {model} --drafter {model_of_zeros}
generate cat --target {model} --method sequoia --drafter self --set tree={zero}
generate cat --target {model} --method c2t --drafter self --set classifier={zero}
generate cat --target {model} --prediction {zero}
generate cat --target {model} --json-schema {zero}
generate - --target {model}
batch {zero} {out} --target {model}
batch {requests} {zero} --target {model}
batch {requests} /dev/full --target {model}
batch {requests} {zeros.jsonl} --target {model}
calibrate --prompts {text} --out {zeros.jsonl} --drafter self --target {model}
train classifier --prompts {text} --out {zeros.jsonl} --drafter self --target {model}
info {zero}
profile {zero}
report {zero}
report {run_of_zeros}
serve {model} --api-key-file {zero}
bench --suite {zero} --out {out} --methods chain --drafters self --target {model}
bench --suite {zeros.jsonl} --out {out} --methods chain --drafters self --target {model}
bench --suite {zeros.gz} --out {out} --methods chain --drafters self --target {model}
bench --suite {requests} --out {run_of_zeros} --methods chain --drafters self --target {model}
calibrate --prompts {zero} --out {out} --drafter self --target {model}
calibrate --prompts {zeros.jsonl} --out {out} --drafter self --target {model}
train head --prompts {zero} --out {out} {model}
train head --prompts {text} --out {out} --init {model_of_zeros} {model}
train classifier --prompts {zero} --out {out} --drafter self --target {model}
""".strip().splitlines()


_PATIENCE = 120
"""Seconds until a command counts as one that waits for ever."""


@pytest.fixture(scope="module", params=["endless", "silent"])
def places(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Devices without an end, or pipes that nobody writes to, at the same places."""
    place, endless = tmp_path_factory.mktemp(request.param), request.param == "endless"
    for folder in ("model", "weights_of_zeros", "tokenizer_of_zeros"):
        save_tiny(place / folder)
    parts = split(write(place / "whole.gguf"), place)
    runs.full_run(place / "run_of_zeros")
    (place / "model_of_zeros").mkdir()
    replaced = [place / "model_of_zeros" / "config.json", place / "zeros.jsonl", place / "zeros.gguf", parts[1]]
    replaced += [place / "weights_of_zeros" / "model.safetensors", place / "tokenizer_of_zeros" / "tokenizer.json"]
    replaced += [] if endless else [place / "zero", place / "zeros.gz"]
    for path in [*replaced, *(place / "run_of_zeros").iterdir()]:
        path.unlink(missing_ok=True)
        if endless:
            path.symlink_to("/dev/zero")
        else:
            os.mkfifo(path)
    (place / "requests").write_text(json.dumps({"prompt": "the cat"}) + "\n")
    (place / "text").write_text("the cat\n")
    if endless:
        (place / "zeros.gz").write_bytes(gzip.compress(bytes(64 << 20), 1) * 48)
    zero = "/dev/zero" if endless else str(place / "zero")
    return {f"{{{p.name}}}": str(p) for p in place.iterdir()} | {"{zero}": zero, "{out}": str(place / "out")}


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise AssertionError("it waits for ever")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MOST, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("line", LINES)
def test_a_file_without_an_end_or_a_beginning_is_a_complaint(
    line: str, places: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(line)
    for name, value in places.items():
        words = [word.replace(name, value) for word in words]
    with open("/dev/zero" if places["{zero}"] == "/dev/zero" else os.devnull) as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        assert run(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert 1 <= len(printed.err.strip().splitlines()) <= 3 and "Traceback" not in printed.err


def test_a_pipe_is_read_to_its_end_while_somebody_writes_to_it(tmp_path: Path) -> None:
    """As of ``--json-schema <(program)``, where the program takes its time."""
    for name in ("/dev/fd/{}", str(tmp_path / "pipe")):
        if named := "{}" not in name:
            os.mkfifo(name)
        for read in (read_text, lambda path: b"".join(read_lines(path)).decode()):
            ends = (os.open(name, os.O_RDWR), os.open(name, os.O_WRONLY)) if named else os.pipe()

            def feed(own: int = ends[1], other: int | None = ends[0] if named else None) -> None:
                time.sleep(0.1)
                os.write(own, b"the ")
                time.sleep(0.1)
                os.write(own, b"cat\n")
                os.close(own)
                if other is not None:
                    os.close(other)

            writer = threading.Thread(target=feed)
            writer.start()
            assert read(Path(name.format(ends[0]))) == "the cat\n"
            writer.join()
            if not named:
                os.close(ends[0])


def test_a_pipe_without_a_writer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert run(["generate", "cat", "--json-schema", str(tmp_path / "pipe")]) == 2
    assert "nobody writes to" in capsys.readouterr().err
