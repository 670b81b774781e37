"""How long idle OpenMP threads spin before they sleep: must be set before torch loads its OpenMP library.

By default GNU OpenMP spins for milliseconds at the end of each parallel loop. Where another process wants the same
processors, each of the hundreds of loops of a forward pass waits for a thread that was descheduled while others spin.
"""

from __future__ import annotations

import os
import sys

SPIN_COUNT = 3000
"""Iterations of spinning, microseconds: nearly always longer than the gap between two loops of a pass, far shorter than
a time slice of the scheduler. ``docs/measurements.md``, "Busy machines", has the figures."""
_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning() -> str:
    """Set the spin count, unless the user has set how threads wait or torch is loaded already.

    Returns:
        what is in force, for people.
    """
    chosen = [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    if chosen:
        return f"{' '.join(chosen)} (from the environment)"
    if not sys.platform.startswith("linux"):
        return "the OpenMP library's default"
    if "torch" in sys.modules:
        return f"the OpenMP library's default: torch was loaded before draftree; set GOMP_SPINCOUNT={SPIN_COUNT}"
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    return f"GOMP_SPINCOUNT={SPIN_COUNT}"


WAITING = limit_spinning()
"""What is in force in this process."""
