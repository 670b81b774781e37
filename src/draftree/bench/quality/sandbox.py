"""Runs Python that a model has written, in a process of its own with limits: time, memory, files, processes.

What holds: limits on processor time, wall-clock time, memory and the size of files; an empty environment and a folder
of its own, removed afterwards; and, by an audit hook that cannot be taken off, no new processes, no network, no foreign
libraries, and no file opened for writing or changed outside that folder. That stops programs that go wrong. It is no
wall against one that is written to break out: for models that you do not trust use a container or another machine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_RUNNER = Path(__file__).with_name("jail.py")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: of processor time.
        clock: seconds by the clock; more, for a busy machine is not the program's fault.
        memory: bytes of address space.
        file_size: bytes of a file it writes.
    """

    seconds: int = 5
    clock: int = 30
    memory: int = 1 << 30
    file_size: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a program ended.

    Attributes:
        passed: it ran to its end.
        why: else the last line that it said, or which limit it broke.
    """

    passed: bool
    why: str = ""


def run_python(program: str, limits: Limits | None = None) -> Verdict:
    """Run a program to its end, or to a limit's.

    Only where processes can be limited (not on Windows).

    Args:
        program: Python source; it passes when no exception leaves it.
        limits: what it may use.
    """
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="draftree-") as folder:
        (Path(folder) / "program.py").write_text(program, encoding="utf-8", errors="replace")
        mark = secrets.token_hex(16)
        numbers = [str(x) for x in (limits.seconds, limits.memory, limits.file_size)]
        command = [sys.executable, "-I", "-S", "-B", str(_RUNNER), folder, mark, *numbers]
        with tempfile.TemporaryFile(dir=folder) as output:  # a file, whose size has a limit; nobody can remove it
            process = subprocess.Popen(  # noqa: S603 - our own runner, in isolated mode, which sets limits first
                command,
                cwd=folder,
                env={"PATH": ""},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                process.wait(timeout=limits.clock)
            except subprocess.TimeoutExpired:
                _kill(process)
                return Verdict(False, f"more than {limits.clock} seconds by the clock")
            except BaseException:
                _kill(process)
                raise
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
    if process.returncode == 0 and lines and lines[-1] == mark:
        return Verdict(True)
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Verdict(False, f"more than {limits.seconds} seconds of processor time, or killed")
    return Verdict(False, lines[-1][:200] if lines else f"ended with code {process.returncode}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The program with all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
