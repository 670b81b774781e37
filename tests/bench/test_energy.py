"""Meters of energy: counters of NVML and RAPL, and machines without."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from draftree.bench.run import find_meter

CPU, CUDA = "cpu", "cuda:1"


def zone(folder: Path, name: str, microjoules: int) -> Path:
    made = folder / name
    made.mkdir(parents=True)
    (made / "max_energy_range_uj").write_text("1000000000")
    (made / "energy_uj").write_text(f"{microjoules}\n")
    return made


def test_rapl_adds_up_the_packages_and_leaves_out_their_parts(tmp_path: Path) -> None:
    packages = [zone(tmp_path, f"intel-rapl:{i}", 5_000_000) for i in range(2)]
    part = zone(tmp_path, "intel-rapl:0:0", 0)
    meter = find_meter(CPU, tmp_path)
    assert meter is not None
    meter.start()
    for place, now in zip((*packages, part), (7_500_000, 6_000_000, 9_000_000), strict=True):
        (place / "energy_uj").write_text(str(now))
    assert meter.read() == 3.5


def test_rapl_counts_on_past_the_end_of_its_range(tmp_path: Path) -> None:
    place = zone(tmp_path, "intel-rapl:0", 999_000_000)
    meter = find_meter(CPU, tmp_path)
    assert meter is not None
    (place / "energy_uj").write_text("500000")
    assert meter.read() == 1.5


def test_a_counter_that_cannot_be_read_is_no_meter(tmp_path: Path) -> None:
    (zone(tmp_path, "intel-rapl:0", 0) / "energy_uj").unlink()
    assert find_meter(CPU, tmp_path) is None


def test_a_machine_without_counters_has_no_meter(tmp_path: Path) -> None:
    assert find_meter(CPU, tmp_path) is None


class Nvml(ModuleType):
    """``pynvml`` of a machine with two devices, the second of which counts."""

    class NVMLError(Exception):
        pass

    def __init__(self, first_joules: list[float]) -> None:
        super().__init__("pynvml")
        self.joules = first_joules

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return ["GPU-aa", "GPU-bb"].index(uuid)

    def nvmlDeviceGetTotalEnergyConsumption(self, device: int) -> int:  # noqa: N802
        if device == 0:
            raise self.NVMLError
        return int(1000 * self.joules.pop(0))


def test_an_accelerator_is_asked_for_its_own_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML's numbers are not those of a process that may see one device of two."""
    monkeypatch.setitem(sys.modules, "pynvml", Nvml([1.0, 2.0, 9.5]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="bb"))
    meter = find_meter(CUDA)
    assert meter is not None
    meter.start()
    assert meter.read() == 7.5


@pytest.mark.parametrize("module", [Nvml([]), None])
def test_an_accelerator_without_a_counter_or_library_has_no_meter(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="aa"))
    assert find_meter("cuda:0") is None
