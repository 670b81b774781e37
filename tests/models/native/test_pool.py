"""The threads of a pass: tasks are run whole, and a thread whose CPU another process holds is left out for a while."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.models.native import sanitizer


def test_tasks_are_run_whole_and_only_a_thread_that_is_late_for_long_is_left_out(tmp_path: Path) -> None:
    program = sanitizer.link(tmp_path / "check", files=("platform.c", "check/check_pool.c"))
    ended = subprocess.run([str(program)], check=False, capture_output=True, text=True)  # noqa: S603
    assert (ended.returncode, ended.stdout) == (0, "0 errors\n"), ended.stderr
