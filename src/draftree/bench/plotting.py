"""A plot of runs: how fast each method is, and what a pass of the target gives it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from .summary import ALL, Interval, LoadedRun

_ROW, _MARGIN = 0.3, 1.2
"""Inches of a method, and of what stands around those of a run."""


def draw(runs: Sequence[LoadedRun], file: Path) -> None:
    """Draw a row of two panels for each run: speed over AR decoding with its interval, and MAL.

    Args:
        file: .png, .svg or .pdf.
    """
    from matplotlib.figure import Figure

    heights = [_MARGIN + _ROW * len(run.table) for run in runs]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    panels = figure.subplots(len(runs), 2, squeeze=False, sharey="row", height_ratios=heights)
    for run, (speeds, lengths) in zip(runs, panels, strict=True):
        found = [rows[ALL] for rows in run.table.values()]
        at = range(len(found))
        ratios = [f.speedup or Interval(math.nan, math.nan, math.nan) for f in found]
        means = [ratio.mean for ratio in ratios]
        ends = [[r.mean - r.low for r in ratios], [r.high - r.mean for r in ratios]]
        speeds.errorbar(means, at, xerr=ends, fmt="o", capsize=3)
        speeds.axvline(1, color="black", linewidth=0.8, linestyle="--")
        speeds.set(title=run.path.name, xlabel="tokens/s over AR decoding, 95% interval")
        speeds.set_yticks(at, list(run.table))
        speeds.invert_yaxis()
        lengths.barh(at, [f.mal or 0.0 for f in found], height=0.6)
        lengths.set(xlabel="MAL: tokens a target pass, bonus included")
    figure.savefig(file, dpi=150)
