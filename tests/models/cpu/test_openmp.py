"""How idle threads wait: set before torch loads, and never over the user's head."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from draftree.models.cpu.openmp import SPIN_COUNT, limit_spinning


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)


def test_threads_spin_briefly_when_torch_loads() -> None:
    """Beside one busy process the default drafter fell from 31 to 8 tokens/s: threads spun for each other."""
    script = (
        "import os, sys\n"
        "class Torch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            print(os.environ.get('GOMP_SPINCOUNT'))\n"
        "            sys.exit()\n"
        "sys.meta_path.insert(0, Torch())\n"
        "import draftree\n"
        "draftree.load_engine\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.strip() == (str(SPIN_COUNT) if sys.platform.startswith("linux") else "None")


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    monkeypatch.setenv(name, "active")
    assert f"{name}=active" in limit_spinning()
    assert dict(os.environ) == before | {name: "active"}


def test_it_is_too_late_once_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert "torch was loaded before" in limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
