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
    return max(1, int(min(allowed, _quota(system))))


def _cores(cpus: Iterable[int], system: Path) -> int:
    """Different cores among CPUs; all of them where the system does not tell."""
    found = set()
    for cpu in cpus:
        siblings = system / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            found.add(siblings.read_text().strip())
        except OSError:
            found.add(str(cpu))
    return len(found)


def _quota(system: Path) -> float:
    """CPUs whose time the control groups of this process allow it, those above included; infinite: no limit."""
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return float("inf")
    quotas = [float("inf")]
    mounted = system / "sys/fs/cgroup"
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = mounted / "cpu" if controllers else mounted
        folder = top / group.lstrip("/")
        quotas += [_quota_of(each) for each in (folder, *folder.parents) if each.is_relative_to(top)]
    return min(quotas)


def _quota_of(folder: Path) -> float:
    """Of one control group: version 2 has cpu.max, version 1 two files."""
    try:
        if (limit := folder / "cpu.max").exists():
            quota, period = limit.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        share = float(quota) / float(period)
    except (OSError, ValueError):  # "max": no limit
        return float("inf")
    return share if share > 0 else float("inf")
