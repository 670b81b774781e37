"""C2T's figures as plots: probability against acceptance by entropy and rank (Figure 2), and nodes against MAL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..artifacts import write_whole
from .recorded import DEPTH, KnownText
from .report.plots import check_plots, line_style, plot

ENTROPIES = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
"""Bounds of the bins, nats."""
RANKS = 8
_FEWEST = 100
"""Laws that a bin of the plot must have."""


class Calibration(NamedTuple):
    """What the draft says and what the target then said, by entropy [E + 1] and rank [RANKS].

    Attributes:
        laws: [E + 1] how many.
        said: [E + 1, RANKS] mean draft probability.
        accepted: [E + 1, RANKS] share that the target said.
    """

    laws: Tensor
    said: Tensor
    accepted: Tensor


def calibration(texts: Sequence[KnownText]) -> Calibration:
    """Every recorded law on the path that a text takes, once."""
    bins = len(ENTROPIES) + 1
    p, hits, trials = torch.zeros(bins, RANKS), torch.zeros(bins, RANKS), torch.zeros(bins)
    for known in texts:
        for at, laws in enumerate(known.laws, start=1):
            for depth in range(min(DEPTH, len(known.text) - at)):
                number = laws.places.get(tuple(known.text[at : at + depth]))
                if number is None:
                    break
                row = int(torch.bucketize(laws.entropies[number], torch.tensor(ENTROPIES)))
                trials[row] += 1
                p[row] += laws.logprobs[number, :RANKS].exp()
                hits[row] += laws.tokens[number, :RANKS] == known.text[at + depth]
    each = trials.clamp(min=1)[:, None]
    return Calibration(trials, p / each, hits / each)


def bin_names() -> list[str]:
    """Of the bins of entropy."""
    edges = ("0", *(f"{e:g}" for e in ENTROPIES), "")
    return [f"{low}-{high}" for low, high in zip(edges, edges[1:], strict=False)]


def print_calibration(found: Calibration) -> None:
    """As a table."""
    print(f"  entropy  laws   probability / acceptance at rank 0 to {RANKS - 1}")
    for name, n, said, accepted in zip(bin_names(), *found, strict=True):
        cells = (f"{a:.3f}/{b:.3f}" for a, b in zip(said.tolist(), accepted.tolist(), strict=True))
        print(f"  {name:7} {int(n):6}  {' '.join(cells)}")


def check_plot(file: Path) -> str:
    """What keeps a plot from going to ``file``; nothing where it can.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    check_plots()
    fine = file.suffix == ".svg" and file.parent.is_dir()
    return "" if fine else f"--plot {file}: name a .svg file in a folder that exists"


def plot_calibration(found: Calibration, file: Path) -> None:
    """C2T's Figure 2: on the diagonal the draft's probability is that of acceptance. Bins of few laws are left out."""
    with plot("c2t-calibration", 6.4, 5.0) as made:
        axes = made.figure.subplots()
        axes.plot([1e-3, 1], [1e-3, 1], color="black", linewidth=0.8, label="equal")
        for i, (name, n, said, accepted) in enumerate(zip(bin_names(), *found, strict=True)):
            if n >= _FEWEST:
                x, y = said.tolist(), accepted.clamp(min=1e-3).tolist()
                axes.plot(x, y, **line_style(i), linewidth=0.8, label=f"{name} nats, {int(n)} laws")
        axes.set(xscale="log", yscale="log", xlim=(1e-3, 1.1), ylim=(9e-4, 1.1))
        axes.set(xlabel=f"mean draft probability, ranks 0 (right) to {RANKS - 1}", ylabel="share that the target said")
        axes.legend()
    write_whole(file, made.svg + "\n")


def plot_curves(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], file: Path) -> None:
    """Verified nodes for each generated token (gamma) against MAL (tau).

    Args:
        curves: name -> (tau, gamma) of its points.
    """
    with plot("c2t-curves", 6.4, 4.4) as made:
        axes = made.figure.subplots()
        for i, (name, (taus, gammas)) in enumerate(curves.items()):
            axes.plot(gammas, taus, **line_style(i), linewidth=1, label=name)
        axes.set(xscale="log", xlabel="verified nodes for each generated token", ylabel="MAL, bonus token included")
        axes.legend()
    write_whole(file, made.svg + "\n")
