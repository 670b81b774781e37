"""The load that a server gets is answered, in small, and its figures are printed."""

from __future__ import annotations

import re
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from benchmarks import server_load

from .conftest import Printed


def test_a_soak_has_all_figures(roomy: Path, printed: Printed) -> None:
    out = printed(server_load, f"soak --target {roomy} --minutes 0.03 --requests 12 --tokens 4 --concurrency 6")
    table = dict(line.split("  ", 1) for line in out.splitlines())
    figures = {name: [float(n) for n in re.findall(r"\d+(?:\.\d+)?", figure)] for name, figure in table.items()}
    requests, ended = figures["requests"][0], figures["ended, left by their clients"]
    assert requests >= 6 and sum(ended) == requests and ended[0] > 0
    assert figures["texts unlike the request alone"] == figures["tokens and requests in rows that are left"] == [0]
    assert figures["tokens a second"][0] > 0
    for name in ("first token", "between events"):
        half, most = figures[f"{name}, 50th and 99th percentile"][-2:]
        assert 0 <= half <= most
    assert len(figures["MiB resident at each tenth"]) >= 2
    assert len(figures["MiB a minute beside the cache"]) == 2


def samples(growth: float) -> list[tuple[float, float, float]]:
    """Of ten minutes: memory comes in the first two; from then on tokens of the cache, and the growth, explain it."""
    tokens = [1000.0 * (5 + i % 7) for i in range(100)]
    return [(6.0 * i, min(i, 20) * 30 + 0.02 * t + growth * i / 10, t) for i, t in enumerate(tokens)]


@pytest.mark.parametrize("growth", [0.0, 15.2])
def test_memory_that_grows_is_told_from_what_the_cache_takes(growth: float) -> None:
    found, error = server_load.Memory(psutil.Process(), samples=samples(growth)).slope
    assert found == pytest.approx(growth, abs=0.01) and error < 0.01
