"""How many threads share a pass: the CPUs that this process may use, one a core."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_SYSTEM = Path("/")


def default_threads(system: Path = _SYSTEM) -> int:
    """As many as there are cores for this process, by its affinity and its control groups' quota.

    Two threads of one core share its multipliers; of a single core both are taken.

    Args:
        system: where /proc and /sys are.
    """
    if not hasattr(os, "sched_getaffinity"):  # macOS, Windows
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    cores = _cores(cpus, system)
    allowed = len(cpus) if cores == 1 else cores
    return max(1, int(min([allowed, *map(_quota, control_groups(system))])))


def _cores(cpus: Iterable[int], system: Path) -> int:
    """Different cores among CPUs; all of them where the system does not tell."""
    cores = set()
    for cpu in cpus:
        siblings = system / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def control_groups(system: Path = _SYSTEM) -> list[Path]:
    """Folders of the control groups (version 2) of this process, those above included; none where there are none."""
    try:
        group = (system / "proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
    except OSError:
        return []
    folder = system / "sys/fs/cgroup" / group
    return [folder, *folder.parents]


def _quota(folder: Path) -> float:
    """CPUs whose time a control group allows this process; infinite: no limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return float(quota) / float(period)
    except (OSError, ValueError):  # "max"
        return float("inf")
