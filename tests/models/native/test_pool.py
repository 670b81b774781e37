"""The threads of a pass: tasks are run whole, a thread whose CPU another process holds is left out for a while, and a
process that is forked does without those of the other one."""

from __future__ import annotations

import multiprocessing
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from draftree.models.base import prefill_scored
from draftree.models.native.native_model import NativeModel
from tests import tiny_gguf
from tests.models.native import sanitizer


def test_tasks_are_run_whole_and_only_a_thread_that_is_late_for_long_is_left_out(tmp_path: Path) -> None:
    program = sanitizer.link(tmp_path / "check", files=("platform.c", "check/check_pool.c"))
    ended = subprocess.run([str(program)], check=False, capture_output=True, text=True)  # noqa: S603
    assert (ended.returncode, ended.stdout) == (0, "0 errors\n"), ended.stderr


def logits(model: NativeModel) -> NDArray[np.float32]:
    return prefill_scored(model, [i * 7 % 90 for i in range(100)])[1].logits([0])


def make_passes(path: Path, model: NativeModel, expected: NDArray[np.float32]) -> None:
    """By a model of the other process, by one of this one, and by the first on the threads of the second."""
    own = NativeModel(path, threads=2)
    assert (logits(model) == expected).all() and (logits(own) == expected).all()
    model.share_threads(own)
    assert (logits(model) == expected).all()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_is_forked_makes_passes(tmp_path: Path) -> None:
    """It waited for ever for threads that only the other one has."""
    path = tiny_gguf.write(tmp_path / "model.gguf", weights="Q8_0", context=256)
    model = NativeModel(path, threads=2)
    expected = logits(model)
    child = multiprocessing.get_context("fork").Process(target=make_passes, args=(path, model, expected))
    child.start()
    child.join(60)
    child.kill()
    child.join()
    assert child.exitcode == 0
    assert (logits(model) == expected).all()
