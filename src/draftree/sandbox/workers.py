"""The wall around programs and grammars of strangers: each job has a process of its own, with limits on what it takes.

Libraries that run or read them raise what they like, panic, overflow the stack, or never end. In a worker nothing of it
holds the engine or another request up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from ..errors import DraftreeError
from . import jobs

CPU_SECONDS, _SECONDS = 5, 20
"""Of the processor for one job, which takes milliseconds mostly, and of the clock, for busy machines."""
_LARGEST = 1 << 25
"""Bytes of what a job gives."""
_IDLE = 4
"""Most workers that wait for work."""


class JobError(DraftreeError):
    """A job was not done; callers know which value of which field it was about."""


class Worker:
    """A process that does one job after another."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", str(Path(jobs.__file__))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)  # noqa: S603

    def do(self, name: str, *arguments: Any) -> Any:
        """Do a job.

        Raises:
            JobError: it failed, or took too much; the worker has ended then unless ``alive``.
        """
        work, given = self._process.stdin, self._process.stdout
        assert work is not None and given is not None  # noqa: S101 - both are pipes
        timer = threading.Timer(_SECONDS, self._process.kill)
        timer.start()
        try:
            work.write(json.dumps([CPU_SECONDS, name, arguments], default=str).encode() + b"\n")
            work.flush()
            line = given.readline(_LARGEST)
        except OSError:
            line = b""
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            self.end()
            if line:
                raise JobError(f"it makes more than {_LARGEST} bytes")
            raise JobError(f"it is nested too deep, or takes more than {CPU_SECONDS} s, or too much memory")
        answer = json.loads(line)
        if "error" in answer:
            raise JobError(answer["error"])
        return answer["result"]

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


_idle: list[Worker] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # two processes must not share a worker


def run(name: str, *arguments: Any) -> Any:
    """What a job of ``jobs`` gives, in a worker that nobody else uses meanwhile.

    Raises:
        JobError: it failed, or took too much.
    """
    try:
        worker = _idle.pop() if _idle else Worker()
    except OSError as error:
        raise JobError(f"no process for it can be started ({error.strerror})") from None
    try:
        return worker.do(name, *arguments)
    finally:
        if worker.alive and len(_idle) < _IDLE:
            _idle.append(worker)
        else:
            worker.end()
