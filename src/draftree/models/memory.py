"""Memory that this process may take, and whether weights fit into it."""

from __future__ import annotations

from pathlib import Path

from ..errors import CacheFullError, RunError
from .cpu_threads import control_groups

_SYSTEM = Path("/")
_SHARE = 8
"""Weights need one of so many parts of themselves beside them: for keys and values of some 2,000 tokens, and passes."""


def free_memory(system: Path = _SYSTEM) -> int:
    """Bytes that nobody uses, of the machine and of the control groups of this process.

    Args:
        system: where /proc and /sys are.
    """
    import psutil  # type: ignore[import-untyped]

    return max(0, min([int(psutil.virtual_memory().available), *map(_left_of, control_groups(system))]))


def _left_of(folder: Path) -> int:
    """Bytes that a control group may still take: the pages of files that it counts are dropped for others."""
    try:
        most, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
        counted = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return most - used + sum(int(counted.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
    except (OSError, ValueError):  # "max"
        return 1 << 62


def largest_weights(free: int) -> int:
    """Bytes of weights that fit into so much memory."""
    return free * _SHARE // (_SHARE + 1)


_SMALLER = "take a smaller quantisation"


def check_fits(path: Path, weights: int, advice: str = _SMALLER) -> None:
    """Raise RunError if weights of so many bytes do not fit into the free memory (``too_large``)."""
    if weights > largest_weights(free := free_memory()):
        raise too_large(path, weights, free, advice)


def too_large(path: Path, weights: int, free: int, advice: str = _SMALLER) -> RunError:
    """The error of weights that do not fit.

    Args:
        advice: what to do, beside ending other programs.
    """
    needed = (weights + weights / _SHARE) / 1e9
    return RunError(
        f"{path} needs {needed:.3g} GB of memory, and {free / 1e9:.3g} GB are free: {advice}, or end other programs"
    )


def cache_full(needs: str, size: int, most: int) -> CacheFullError:
    """The error of a cache that would need ``size`` bytes of the ``most`` that it may use."""
    return CacheFullError(
        f"{needs} {size} bytes of cache, but {most} may be used: use shorter prompts, or fewer requests at a time"
    )
