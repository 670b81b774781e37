"""Runs Python that a model has written: in a sandbox of bubblewrap's, or, with ``unsafe``, with limits alone.

What holds in the sandbox (Linux, the package bubblewrap 0.7 or newer):

- The program reads Python's standard library, the system's libraries and what lies beside them (``lib`` and ``lib64``
  of Python's prefix, of ``/usr`` and of ``/``), and nothing else: no home, no working folder, no ``/etc``, ``/proc`` or
  environment. It writes to an empty ``/tmp`` of its own, 16 MiB in memory, and nowhere else.
- It has no network, sees no other process, and can start no process or thread. If it could, they would end with the
  sandbox (a process namespace), and the sandbox with this process.
- Time, memory and the size of files are limited (``Limits``), and its output goes nowhere.
- Run by root, the sandbox runs as user 65534 (nobody), without capabilities.

The kernel is not guarded: no filter of system calls is set. For code that attacks it use a virtual machine.

What holds without the sandbox (``unsafe``): the limits, an empty environment, and a temporary folder as its working
folder. Limits hold for each process; the limit on processes counts all those of the user, and none of root's. At the
end its process group is killed; a process that has left the group stays. It reads, writes and sends whatever the user
may.

What a verdict is worth: a program passes when the check has run to its last line. The process of the program does not
have the check, or the token that proves the end of a part, before the program has run, and does not read the check's
token before the check has run. So ending early (with whatever exit code, in a function that the check calls too),
printing, ``atexit``, another ``AssertionError`` and replaced builtins do not pass. But program and check share a
process and a namespace, as the published checks of HumanEval and MBPP demand: a program that is *written* to cheat can,
by answering in the place of ``bootstrap``, by returning objects that equal everything, or by changing a module that the
check uses.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from draftree.errors import ConfigError

_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_NOBODY = 65534
_FOLDER = "/tmp"  # noqa: S108 - the sandbox's own
_FOLDER_SIZE = 16 << 20
"""Bytes; it lies in memory."""
_LONGEST = 1000
"""Bytes of an answer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: of processor time.
        clock: seconds by the clock; more, for a busy machine is not the program's fault.
        memory: bytes of address space.
        file_size: bytes of a file it writes.
        processes: processes and threads.
    """

    seconds: int = 5
    clock: int = 30
    memory: int = 1 << 30
    file_size: int = 1 << 20
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a program ended.

    Attributes:
        passed: it and its check ran to their ends.
        why: else the exception, or which limit it broke.
    """

    passed: bool
    why: str = ""


def run_python(program: str, check: str = "", *, unsafe: bool = False, limits: Limits | None = None) -> Verdict:
    """Run a program, then its check in the same namespace, to the end or to a limit's.

    Args:
        program: Python source; ``__name__`` is ``"program"`` in it.
        check: Python source; it passes when no exception leaves it.
        unsafe: run it without the sandbox, on any Unix.
        limits: what both may use together.

    Raises:
        ConfigError: there is no sandbox, and it is not to be unsafe.
    """
    limits = limits or Limits()
    if not unsafe:
        require_sandbox()
        return _run(_bubblewrap(), "/", [program, check], limits)
    with tempfile.TemporaryDirectory(prefix="draftree-", ignore_cleanup_errors=True) as folder:
        return _run([], folder, [program, check], limits)


def require_sandbox() -> None:
    """Try the sandbox, once in a process.

    Raises:
        ConfigError: it does not work here.
    """
    if (why := lack()) is not None:
        raise ConfigError(
            f"code that models write runs in a sandbox, but {why}: install the package bubblewrap, 0.7 or newer "
            "(docs/bench.md), or run the code with limits alone: --unsafe"
        )


@cache
def lack() -> str | None:
    """Why there is no sandbox here; None: there is one."""
    if shutil.which("bwrap") is None:
        return "there is no bwrap"
    verdict = _run(_bubblewrap(), "/", ["import json"], Limits())
    return None if verdict.passed else f"bwrap does not work here ({verdict.why})"


def interpreter() -> Path:
    """The interpreter behind that of a virtual environment."""
    return Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))


def _bubblewrap() -> list[str]:
    """The command that runs another one in the sandbox."""
    root, python = Path("/"), interpreter()
    libraries = {prefix / name for prefix in (root, root / "usr", python.parent.parent) for name in ("lib", "lib64")}
    readable = sorted([*libraries, python])
    above = sorted({folder for path in readable for folder in path.parents} - {root})
    return [
        str(shutil.which("bwrap")),
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        # The kernel limits the processes of all users but root, so root's sandbox becomes another one.
        *(("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID") if os.geteuid() == 0 else ()),
        *(word for folder in above for word in ("--dir", str(folder))),
        *(word for path in readable for word in ("--ro-bind-try", str(path), str(path))),
        *("--dir", "/dev", "--dev-bind", os.devnull, os.devnull),
        *("--perms", "1777", "--size", str(_FOLDER_SIZE), "--tmpfs", _FOLDER),
        *("--remount-ro", "/", "--chdir", _FOLDER, "--"),
    ]


def _run(sandbox: list[str], folder: str, parts: Sequence[str], limits: Limits) -> Verdict:
    """Run parts in a process of their own; each is sent when the one before it has run to its end."""
    until = time.monotonic() + limits.clock
    user = _NOBODY if sandbox and os.geteuid() == 0 else -1
    numbers = (limits.seconds, limits.memory, limits.file_size, limits.processes, user)
    python = [str(interpreter()), "-I", "-S", "-B", "-c", _BOOTSTRAP.read_text(encoding="utf-8"), *map(str, numbers)]
    environment: dict[str, str] = {}
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - our own source, which sets limits first
                [*sandbox, *python],
                cwd=folder,
                env=environment,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        try:
            answer = _converse(ours, parts, until)
            if not answer:
                process.wait(_left(until))
        except (TimeoutError, subprocess.TimeoutExpired):
            return Verdict(False, f"more than {limits.clock} seconds by the clock")
        finally:
            complaint = _end(process)
    if answer is None:
        return Verdict(True)
    if answer:
        return Verdict(False, answer[:200])
    if process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL, -signal.SIGXCPU):
        return Verdict(False, f"killed: more than {limits.seconds} seconds of processor time, or out of memory")
    return Verdict(False, complaint[:200] or f"ended with code {process.returncode}")


def _converse(channel: socket.socket, parts: Sequence[str], until: float) -> str | None:
    """Send parts and await their tokens; then the other end may leave.

    Returns:
        None when all parts have run to their ends, else what came instead of a token.

    Raises:
        TimeoutError: it is later than ``until``.
    """
    try:
        for part in parts:
            source, token = part.encode(errors="replace"), secrets.token_hex(16)
            channel.settimeout(_left(until))
            channel.sendall(b"%d\n%b%b\n" % (len(source), source, token.encode()))
            answer = b""
            while b"\n" not in answer and len(answer) < _LONGEST:
                channel.settimeout(_left(until))
                if not (received := channel.recv(_LONGEST)):
                    break
                answer += received
            if answer.strip() != token.encode():
                return answer.decode(errors="replace").strip().partition("\n")[0]
        channel.shutdown(socket.SHUT_WR)
    except ConnectionError:  # it has ended without reading all
        return ""
    return None


def _left(until: float) -> float:
    """Seconds, more than 0: a socket takes that for no time limit's."""
    return max(until - time.monotonic(), 0.001)


def _end(process: subprocess.Popen[bytes]) -> str:
    """Kill what is left of its process group; what the sandbox, or Python before the program, complained of last."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with process, process.stderr or contextlib.nullcontext() as errors:
        lines = errors.read().decode(errors="replace").strip().splitlines() if errors else []
    return lines[-1] if lines else ""
