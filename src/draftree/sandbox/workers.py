"""The wall around programs and grammars of strangers: each job has a process of its own, with limits on what it takes.

Libraries that run or read them raise what they like, panic, overflow the stack, or never end. In a worker nothing of it
holds the engine or another request up.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..errors import DraftreeError
from . import jobs

CPU_SECONDS, SECONDS = 5, 20
"""Of the processor for one job, which takes milliseconds mostly, and of the clock, for busy machines."""
_LARGEST = 1 << 25
"""Bytes of what a job gives."""
_KEPT = 1 << 27
"""Bytes of memory that a worker may keep from one job to the next; it starts with a fifth of that."""
_IDLE = 4
"""Most workers that wait for work."""


class JobError(DraftreeError):
    """A job failed; callers name the value that it was about."""


class JobRaisedError(JobError):
    """A job raised an exception, within its limits."""


_idle: list[subprocess.Popen[bytes]] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # two processes must not share a worker


def _waiting() -> subprocess.Popen[bytes] | None:
    """Take a worker that waits; None: none does. Those that died while they waited are left out."""
    with contextlib.suppress(IndexError):  # none waits
        while (worker := _idle.pop()).poll() is not None:
            worker.communicate()  # closes its pipes
        return worker
    return None


def run(name: str, *arguments: Any) -> Any:
    """Run a job of ``jobs`` in a worker of its own and return its result.

    Raises:
        JobRaisedError: it raised an exception.
        JobError: it took too much, or could not be started.
    """
    job = json.dumps([CPU_SECONDS, SECONDS, _KEPT, name, arguments], default=str).encode() + b"\n"
    command, pipe = [sys.executable, "-P", str(Path(jobs.__file__))], subprocess.PIPE
    try:
        started = _waiting()
        worker = started or subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)  # noqa: S603
    except OSError as error:
        raise JobError(f"no process for it can be started ({error.strerror})") from None
    assert worker.stdin is not None and worker.stdout is not None  # noqa: S101 - both are pipes
    line = b""
    try:
        worker.stdin.write(job)
        worker.stdin.flush()
        line = worker.stdout.readline(_LARGEST)
    except OSError:
        pass  # it has ended
    finally:
        answer = json.loads(line) if line.endswith(b"\n") else {}
        if answer and not answer.pop("last") and len(_idle) < _IDLE:
            _idle.append(worker)
        else:
            worker.kill()
            worker.communicate()
    if not answer:
        raise JobError(f"it is nested too deep, or takes more than {CPU_SECONDS} s, or too much memory or text")
    if "error" in answer:
        raise JobRaisedError(answer["error"])
    return answer["result"]
