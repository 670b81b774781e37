"""What holds for every test."""

from __future__ import annotations

import errno
import io
import os
import random
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers loads: no test needs a download, and a refusal takes no time
os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # before torch: threads that spin for long hold up a busy machine

from draftree.models import cost_profile, measuring
from draftree.models.base import LanguageModel, Nodes, Row
from draftree.models.heads import own_heads
from draftree.models.llama import llama_model
from draftree.models.native import native_model

settings.register_profile("untimed", deadline=None)  # a busy machine is slow, and no test is wrong for it
settings.load_profile("untimed")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Heads and measured costs of models go to folders of the test run, never to the user's; costs after few passes.

    Passes are made, and take what a quiet machine's would: what the clock says of a tiny model on a busy machine is not
    steady, and what is not steady is not kept.
    """

    def timed(model: LanguageModel, rows: Sequence[Row], fan: Nodes) -> float:
        time_pass(model, rows, fan)
        return 1e-3 * (1 + 0.1 * len(rows) * len(fan.tokens))

    folder, data, time_pass = tmp_path_factory.mktemp("profiles"), tmp_path_factory.mktemp("heads"), measuring._timed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_profile, "profile_folder", lambda: folder)
        patch.setattr(own_heads, "heads_folder", lambda: data)
        patch.setattr(measuring, "SHORT", measuring.Grid((1, 2, 4, 16), (64,), (1,), 1))
        patch.setattr(measuring, "_timed", timed)
        yield


@pytest.fixture(scope="session", autouse=True)
def threads() -> Iterator[None]:
    """A model has one thread where a test names no number: others would wait in loops for passes of a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (native_model, llama_model):
            patch.setattr(module, "default_threads", lambda: 1)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Hugging Face model, which tests leave as it is."""
    from .tiny import save_tiny  # torch is slow to load, and many tests need none

    return str(save_tiny(tmp_path_factory.mktemp("models") / "tiny"))


def build_distribution(kind: str, folder: Path, project: Path = ROOT, **environment: str) -> Path:
    """A project's wheel or sdist, made in a folder.

    Args:
        kind: "wheel" or "sdist".
    """
    before = set(folder.iterdir())
    script = f"import hatchling.build, sys; hatchling.build.build_{kind}(sys.argv[1])"
    command, env = [sys.executable, "-c", script, str(folder)], {**os.environ, **environment}
    subprocess.run(command, cwd=project, check=True, capture_output=True, text=True, env=env)  # noqa: S603 - our own build
    (made,) = set(folder.iterdir()) - before
    return made


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that a C compiler makes."""
    return build_distribution("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(autouse=True)
def seeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test asks for without a seed, in this process, is drawn alike in each run of the suite."""
    monkeypatch.setattr(secrets, "randbits", random.Random(request.node.nodeid).getrandbits)


@pytest.fixture(autouse=True)
def interrupts() -> None:
    """Ctrl-C does what it does in a terminal, also in the background, or where a command in this process has ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Full(io.BytesIO):
    """A disk with room for so many bytes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are opened to be written whole find no room."""
    opened: Any = Path.open

    def find_no_room(path: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        return Full(0) if mode in ("xb", "wb") else opened(path, mode, *more, **options)

    monkeypatch.setattr(Path, "open", find_no_room)
