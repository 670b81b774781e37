"""Memory and interruptions of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from draftree.bench.run import Interrupts

_PEAK = """
import torch
from draftree.bench.run import Peak

size = 1 << 27
peak = Peak(torch.device("cpu"))
peak.start()
block = bytearray(size)
block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])
most = peak.read()
del block
peak.start()
assert most - peak.read() > size // 2
"""


def test_the_peak_is_that_since_the_start() -> None:
    """In a process of its own: what other tests hold and free would be part of the figures."""
    subprocess.run([sys.executable, "-c", _PEAK], check=True)  # noqa: S603 (our own interpreter)


def test_the_first_ctrl_c_tells_and_the_second_stops() -> None:
    told: list[str] = []
    with Interrupts(lambda: told.append("once")) as pressed:
        assert not pressed.asked
        os.kill(os.getpid(), signal.SIGINT)
        assert (pressed.asked, told) == (True, ["once"])
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outside_the_main_thread_it_does_nothing() -> None:
    failed: list[BaseException] = []

    def enter() -> None:
        try:
            with Interrupts(lambda: None):
                pass
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert failed == []
