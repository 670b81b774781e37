"""The tables of costs that ship, made anew on this machine: one for each tier of an engine that it can run.

    python -m benchmarks.cost_tables [--tiers avx2,llama.cpp,...] [--models smollm2,FILE] [--repeats 30]

For each tier the passes of all models are measured (fastest of so many) and a ``CostTable`` is fitted to them; its
largest errors are printed, and the table is written into the package's ``costs/``. Tables of instruction sets that this
machine has not are derived from AVX2's, if that was measured; torch-cuda has to be named. Nothing else should run
meanwhile. Models: one that fits the caches and one that does not; torch and base take the first alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from draftree.models.base import Capabilities, LanguageModel
from draftree.models.cost_profile import processor
from draftree.models.cost_table import FOLDER, TABLES, CostTable
from draftree.models.loading import load
from draftree.models.measuring import Grid, measure
from draftree.models.model_files import DEFAULT_MODEL, gguf_path
from draftree.models.native.binding import tiers
from draftree.models.native.native_model import NativeModel

from .commands import command_parser, one_line_errors

SIZES, CONTEXTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32), (64, 900)
OVERLAPS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""``CostTable.overlap`` that are tried."""
OTHERS: dict[str, Callable[[str], LanguageModel]] = {
    "llama.cpp": lambda name: load(name, backend="llama.cpp"),
    "torch": lambda name: load(name, backend="transformers", device="cpu"),
    "torch-cuda": lambda name: load(name, backend="transformers", device="cuda"),
}
DERIVED = {"avx-vnni": 1.08, "neon": 1.0}
"""Products a cycle and core over AVX2's, at 8 tokens: 37 to 42 over 35 to 38; NEON was counted, not run."""


class Measured(NamedTuple):
    """Passes of one model over ``tokens`` tokens behind ``context`` others."""

    can: Capabilities
    tokens: int
    context: int
    seconds: float


def passes(model: LanguageModel, repeats: int) -> list[Measured]:
    """Of all sizes and contexts."""
    found = measure(model, Grid(SIZES, CONTEXTS, (1,), repeats, patience=2.0))
    return [
        Measured(model.capabilities, tokens, point.context, seconds)
        for point in found.points
        for tokens, seconds in zip(point.sizes, point.seconds, strict=True)
    ]


def fit(source: str, measured: Sequence[Measured]) -> CostTable:
    """The table whose logarithms of seconds are nearest (Gauss-Newton with damped steps, for each overlap)."""
    want = np.log([each.seconds for each in measured])

    def table(rates: np.ndarray, overlap: float, digits: int = 17) -> CostTable:
        reading, products, *cached = (float(f"{rate:.{digits}g}") for rate in np.exp(rates))
        return CostTable(source, reading, products, overlap, *cached)

    def residuals(rates: np.ndarray, overlap: float) -> np.ndarray:
        own = table(rates, overlap)
        return np.log([own.seconds(each.can, each.tokens, each.context) for each in measured]) - want

    best = min(((_least(residuals, overlap), overlap) for overlap in OVERLAPS), key=lambda found: found[0][0])
    return table(best[0][1], best[1], digits=3)


_RANGE = 18.0, 36.0
"""Logarithms of rates: of what no context needs much, the fit would run off."""


def _least(residuals: Callable[[np.ndarray, float], np.ndarray], overlap: float) -> tuple[float, np.ndarray]:
    """Sum of squares, and where it is least."""
    rates, damping = np.log([3e10, 1e11, 2e10, 1e11]), 1.0
    found = residuals(rates, overlap)
    for _ in range(200):
        slopes = np.stack([(residuals(rates + step, overlap) - found) / 1e-4 for step in 1e-4 * np.eye(4)], axis=1)
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(4), -slopes.T @ found)
        tried = residuals(np.clip(rates + step, *_RANGE), overlap)
        better = float(tried @ tried) < float(found @ found)
        rates, found = (np.clip(rates + step, *_RANGE), tried) if better else (rates, found)
        damping *= 0.3 if better else 4.0
    return float(found @ found), rates


def shown(tier: str, table: CostTable, measured: Sequence[Measured]) -> str:
    """How far the table is from what was measured, in percent: in the middle, and at most."""
    errors = [table.seconds(each.can, each.tokens, each.context) / each.seconds - 1 for each in measured]
    worst = max(range(len(errors)), key=lambda i: abs(errors[i]))
    where = f"{measured[worst].can.name}, {measured[worst].tokens} tokens behind {measured[worst].context}"
    middle = 100 * np.median(np.abs(errors))
    return f"{tier}: {table}\n  error {middle:.0f}%, at most {100 * errors[worst]:.0f}% ({where})"


@one_line_errors()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = command_parser("benchmarks.cost_tables", __doc__)
    parser.add_argument("--tiers", default=",".join([*tiers(), "llama.cpp", "torch"]))
    parser.add_argument("--models", default=DEFAULT_MODEL)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args(arguments)
    names = args.models.split(",")
    for tier in args.tiers.split(","):
        measured = list[Measured]()
        for name in names[:1] if tier in ("base", "torch") else names:
            model = OTHERS[tier](name) if tier in OTHERS else NativeModel(gguf_path(name) or name, name=name, tier=tier)
            measured += passes(model, args.repeats if tier != "base" else 3)
            del model
        can = measured[0].can
        models = dict.fromkeys(Path(each.can.name).stem for each in measured)
        where = can.accelerator or f"{processor()}, {can.threads} threads"
        table = fit(f"measured: {where}, {', '.join(models)}", measured)
        print(shown(tier, table, measured), flush=True)
        TABLES.write(FOLDER / f"{tier}.json", table)
        for other, times in DERIVED.items() if tier == "avx2" else ():
            source = f"not measured: derived from avx2's, with {times:g} times its products"
            products = float(f"{times * table.products:.3g}")
            TABLES.write(FOLDER / f"{other}.json", replace(table, source=source, products=products))


if __name__ == "__main__":
    main()
