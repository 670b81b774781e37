"""Command lines that cannot work, and odd ones that can: what people mistype, and what scripts pass on by accident.

Each runs through the real entry. A bad line ends with exit code 1 or 2, says so in at most three short lines, and
prints nothing where text is expected; nothing is a traceback, and nothing hangs.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftree.cli.main import run

from ..bench import runs
from ..tiny import save_tiny

Captured = pytest.CaptureFixture[str]

_SECONDS = 8
"""After which a line is said to hang; each takes milliseconds."""
_LONGEST = 3000
"""Characters of a complaint, at most."""
_WORDS = {
    "{nul}": "a\0b",
    "{bytes}": "a\udcff\udcfeb",
    "{long}": "x" * 5000,
    "{long_words}": "x " * 4000,
    "{huge}": str(10**30),
    "{digits}": "9" * 5000,
    "{empty}": "",
    "{blank}": " \t ",
}

_BASES = {
    "generate": "generate {line} --target {model}",
    "others": "{line}",
    "bench": "bench --suite {suite} --out {out}/b --methods chain --drafters self --target {model} {line}",
    "calibrate": "calibrate --prompts {text} --out {out}/c --drafter self --target {model} {line}",
    "head": "train head --prompts {text} --out {out}/h {model} {line}",
    "classifier": "train classifier --prompts {text} --out {out}/c --drafter self --target {model} {line}",
}
_LINES = Path(__file__).parent / "bad_command_lines"
BAD = [(kind, line) for kind in _BASES for line in (_LINES / f"{kind}.txt").read_text().splitlines()]

ODD = """
--help
generate --help
train head --help
methods
generate cat --max-tokens 2 --target {model} --temperature 1e9 --seed 0
generate cat --max-tokens 2 --target {model} --stop {bytes}
generate {nul} --max-tokens 2 --target {model}
generate cat --max-tokens 2 --target {model} --temperature 0.0001 --seed 9223372036854775807
generate cat --max-tokens 2 --target {model} --nodes 1024 --method binary --drafter self
generate cat --max-tokens 2 --target {model} --drafter self+lookup
generate cat --max-tokens 2 --target {model} --drafter lookup>self:pending=1
generate cat --max-tokens 2 --target {model} --method hsddw --drafter self
generate cat --max-tokens 2 --target {model} --set width=2 --set width=3
generate cat --max-tokens 2 --target {model} --json --compare --explain
generate cat --max-tokens 2 --target {model} --stop {long}
generate cat --max-tokens 4 --target {model} --min-tokens 4 --ignore-eos --bad-word the --bad-word caterpillar
generate cat --max-tokens 4 --target {model} --repetition-penalty 1.2 --frequency-penalty -1 --beams 2
generate --max-tokens 2 --target {model} -- --raw
generate 猫 --max-tokens 2 --target {model}
report {run}
bench --suite {suite} --out {out}/new --methods ar, --limit 1000000 --target {model} --max-tokens 2 --temperature 0,
""".strip().splitlines()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands in braces in a line: words that no shell would pass on well, files and folders."""
    place = tmp_path_factory.mktemp("places")
    for folder in ("folder/inner", "out", "empty_folder"):
        (place / folder).mkdir(parents=True)
    save_tiny(place / "model")
    runs.full_run(place / "run")
    files = {
        "text": b"the cat\nthe hat\nin the cat\n",
        "binary": b"\xff\xfe\x00 no text",
        "zero": b"",
        "zero.gz": b"",
        "array": b"[1, 2]\n",
        "deep.jsonl": b"[" * 100_000 + b"\n",
        "strange.jsonl": b'{"colour": "red"}\n',
        "table.csv": b"colour\nred\n",
        "text.gguf": b"text",
        "suite.jsonl": b'{"prompt": "the cat"}\n',
    }
    for name, content in files.items():
        (place / name).write_bytes(content)
    found = {f"{{{p.stem}}}": str(p) for p in sorted(place.iterdir()) if p.suffix not in (".gz", ".gguf")}
    return {**_WORDS, **found, "{missing}": str(place / "missing")}


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Fails what takes longer than ``_SECONDS``."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"still running after {_SECONDS} s"))
    signal.alarm(_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _arguments(line: str, places: dict[str, str]) -> list[str]:
    words = shlex.split(line.replace(">", "\\>"))
    for name, value in places.items():
        words = [word.replace(name, value) for word in words]
    return words


@pytest.mark.parametrize(("kind", "line"), BAD)
def test_a_bad_command_line_is_a_short_complaint(
    kind: str, line: str, places: dict[str, str], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    arguments = _arguments(_BASES[kind].replace("{line}", line), places)
    capsys.readouterr()
    assert run(arguments) in (1, 2)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert 1 <= len(printed.err.strip().splitlines()) <= 3
    assert len(printed.err) <= _LONGEST


PROCESSES = [
    ("others", "nonsense"),
    ("others", "--nonsense"),
    ("others", "generate --target {model}"),
    ("others", "chat {model} extra"),
    ("others", "chat ./nowhere"),
    ("others", "info {empty}"),
    ("others", "info {text}.gguf"),
    ("generate", "cat --nodes 0"),
    ("generate", "cat --nodes ten"),
    ("generate", "cat --temperature nan"),
    ("generate", "cat --seed {long}"),
    ("generate", "cat --max-tokens 0"),
    ("generate", "cat --top-k {huge}"),
    ("generate", "cat --method dynamic-widht"),
]
"""Of different kinds, of commands that need no torch; each has a process, forked where modules are loaded."""
_FORK = """
import json, os, sys
from draftree import __main__
from draftree.cli import generate, info
for number, arguments in enumerate(json.loads(sys.argv[1])):
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, flush=True)
        continue
    for stream, name in ((0, os.devnull), (1, f"{number}.out"), (2, f"{number}.err")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), stream)
    sys.argv = ["draftree", *arguments]
    __main__.main()
    break
"""


def test_a_process_with_a_bad_command_line_ends_with_one_line(places: dict[str, str], tmp_path: Path) -> None:
    signal.alarm(0)  # modules load in their time
    assert set(PROCESSES) <= set(BAD)
    lines = [_arguments(_BASES[kind].replace("{line}", line), places) for kind, line in PROCESSES]
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORK, json.dumps(lines)]
    env = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)  # noqa: S603 - our own program
    assert done.returncode == 0, done.stderr
    codes = dict(zip(PROCESSES, map(int, done.stdout.split()), strict=True))
    complaints = {line: (tmp_path / f"{number}.err").read_text() for number, line in enumerate(PROCESSES)}
    assert {line: code for line, code in codes.items() if code not in (1, 2)} == {}
    wrong = [c for c in complaints.values() if not c.startswith("draftree: ") or len(c.splitlines()) != 1]
    assert wrong == []
    assert [(tmp_path / f"{number}.out").read_text() for number in range(len(lines))] == [""] * len(lines)


@pytest.mark.parametrize("line", ODD)
def test_an_odd_command_line_works(line: str, places: dict[str, str], capsys: Captured) -> None:
    assert run(_arguments(line, places)) == 0
    assert "Traceback" not in capsys.readouterr().err
