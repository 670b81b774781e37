"""Most memory in use while something runs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

_RESET_PEAK = "5"
"""What /proc/self/clear_refs takes to let the peak of resident memory start anew (proc(5), Linux 4.0)."""


class Peak:
    """Measures from ``start`` to ``read``, on the device of a model.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """From now on."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):  # elsewhere the peak is that of the whole life of the process
                Path("/proc/self/clear_refs").write_text(_RESET_PEAK)

    def read(self) -> int | None:
        """Most bytes since ``start``: allocated on the accelerator, or resident of the process; None: nobody knows."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return 1024 * int(line.split()[1])
        try:
            import resource
        except ImportError:  # Windows
            return None
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most
