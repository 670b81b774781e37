"""Joules that the machine takes while something decodes, where it has a meter: NVML's counters, or RAPL.

NVML (through ``nvidia-ml-py``, extra "energy") counts for whole accelerators, RAPL for whole processor packages: what
else runs there is counted in. RAPL's counters are read where the system lets this user read them.
"""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

import torch

from .run import Meter

_RAPL = Path("/sys/class/powercap")


class NvmlMeter:
    """One accelerator's own counter (NVIDIA, from Volta on).

    Args:
        nvml: the module ``pynvml``.
        uuid: of the device; its number among those that this process may see is not NVML's.

    Raises:
        the module's ``NVMLError``: the device has none.
    """

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._before = self._count()

    def _count(self) -> int:
        """Millijoules since the driver was loaded."""
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device))

    def start(self) -> None:
        self._before = self._count()

    def read(self) -> float:
        return (self._count() - self._before) / 1e3


class RaplMeter:
    """The processor packages' counters, in microjoules, which begin again at their ranges' ends.

    Args:
        zones: their folders, with ``energy_uj`` and ``max_energy_range_uj``.

    Raises:
        OSError: one cannot be read.
    """

    def __init__(self, zones: list[Path]) -> None:
        self._zones = zones
        self._ranges = [int((zone / "max_energy_range_uj").read_text()) for zone in zones]
        self._before = self._counts()

    def _counts(self) -> list[int]:
        return [int((zone / "energy_uj").read_text()) for zone in self._zones]

    def start(self) -> None:
        self._before = self._counts()

    def read(self) -> float:
        pairs = zip(self._counts(), self._before, self._ranges, strict=True)
        return sum((now - before) % most for now, before, most in pairs) / 1e6


def find_meter(device: torch.device, folder: Path = _RAPL) -> Meter | None:
    """The meter of what a model on this device takes; None: the machine has none that this user may read.

    Args:
        device: where the target computes.
        folder: of the system's RAPL zones.
    """
    if device.type == "cuda":
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
        with contextlib.suppress(nvml.NVMLError):
            return NvmlMeter(nvml, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return None
    packages = sorted(p for p in folder.glob("intel-rapl:*") if p.name.count(":") == 1)
    if packages:
        with contextlib.suppress(OSError, ValueError):
            return RaplMeter(packages)
    return None
