"""Every command of ``benchmarks`` says in one line what is wrong."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

import benchmarks
from draftree.errors import ConfigError

from ..cli.messages import Captured

FOLDER = Path(benchmarks.__file__).parent
COMMANDS = sorted(
    ".".join(["benchmarks", *file.relative_to(FOLDER).with_suffix("").parts])
    for file in FOLDER.rglob("*.py")
    if '__name__ == "__main__"' in file.read_text() and file.name != "rival_process.py"
)
"""But the processes of ``rival_jobs``, which read what to do from there."""


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (ConfigError("no suite 'x'"), "error: no suite 'x'"),
        (FileNotFoundError(2, "No such file", "p.jsonl"), "error: [Errno 2] No such file: 'p.jsonl'"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_what_is_wrong_is_one_line(name: str, wrong: BaseException, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise wrong

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", failing)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert str(ended.value.code).startswith(line) and "\n" not in str(ended.value.code)


@pytest.mark.parametrize("name", COMMANDS)
def test_usage_is_the_command_that_was_given(name: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr("sys.argv", ["x", "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.split()[:4] == ["usage:", "python", "-m", name.removesuffix(".__main__")]
