"""What the tests of measurement commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from .. import tiny_gguf

Printed = Callable[[ModuleType, str], str]


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for many requests."""
    return tiny_gguf.write(tmp_path_factory.mktemp("model") / "tiny.gguf", context=16384)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """What a command prints that finds nothing wrong, by its module and arguments."""

    def run(command: ModuleType, arguments: str) -> str:
        monkeypatch.setattr("sys.argv", [command.__name__, *arguments.split()])
        with pytest.raises(SystemExit) as ended:
            command.main()
        out = capsys.readouterr().out
        assert ended.value.code == 0, out
        return out

    return run
