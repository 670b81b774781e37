"""How many nodes does a classifier (C2T) save at equal acceptance length, beside EAGLE-2 and OPT-Tree?

    python -m benchmarks.c2t [--suites spec-bench,gsm8k,humaneval] [--limit 13] [--max-tokens 64]
                             [--classifiers smollm2-head,FILE,...] [--beta-only]
                             [--cache DIR] [--plot FILE.svg] [--chains | --calibration]

What the drafter drafts from every token of the target's greedy answers is recorded once (``recorded.py``). Then each
policy grows its trees of it, and match verification accepts what the text follows: MAL (bonus token included) and
verified nodes are those of decoding. "joint" is the classifiers' policy with the path's own draft probability as the
score. ``--calibration`` shows draft probability beside acceptance by entropy and rank (Figure 2).

Curves: tau is MAL, gamma the nodes verified for each generated token. "At equal MAL" reads each curve at the MAL of
EAGLE-2 with 8, 16 and 32 nodes, between its points by straight lines; ratios have 95% bootstrap intervals over prompts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import track
from torch import Tensor

from draftree.artifacts import write_whole
from draftree.config import SamplingParams
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.provenance import check_made_for, provenance
from draftree.engine.replay import Replay
from draftree.papers.c2t import DEFAULT, ClassifierFile, ClassifierTree, Score, read_classifier
from draftree.papers.opt_tree import OptTree
from draftree.policies.base import Frontier, GrowthPolicy
from draftree.policies.best_paths import Eagle2Tree
from draftree.policies.fixed import StaticTree

from .commands import command_parser, one_line_errors
from .curves import Curve, Point, every_prompt, over_at_equal_mal, weighted
from .papers.plots import check_plots, line_style, plot
from .recorded import DEPTH, KnownText, RecordedSource, Recording, add_options, recorded

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
BETAS = (0.5, 0.3, 0.2, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005)
LENGTHS = range(1, 9)
AT = (8, 16, 32)
CHAIN_AT = (2, 3, 4)
_NOTED = 0.01
Contestant = tuple[str, GrowthPolicy, int]
"""Label, policy and node budget."""
ENTROPIES = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
"""Bounds of the bins, nats."""
BINS = [f"{low:g}-{high:g}" for low, high in zip((0.0, *ENTROPIES), (*ENTROPIES, float("inf")), strict=True)]
RANKS = 8
_FEWEST = 100
"""Distributions that a bin of the plot must have."""


def joint(frontier: Frontier) -> list[list[float]]:
    """The draft's own probability of each path: EAGLE-2's confidence in a classifier's place."""
    return [[*map(math.exp, own)] for own in frontier.scores]


def trees(scores: dict[str, Score], *, sizes: bool) -> dict[str, list[Contestant]]:
    """Curves of trees: over the budget for rivals, over beta for scores, and with ``sizes`` over the budget too."""
    curves: dict[str, list[Contestant]] = {
        "eagle2, N": [(f"N={n}", Eagle2Tree(10, DEPTH), n) for n in SIZES],
        "opt-tree, N": [(f"N={n}", OptTree(0.001, DEPTH), n) for n in SIZES],
    }
    for name, score in scores.items():
        curves[f"{name}, beta"] = [(f"beta={b:g}", _tree(score, b), SIZES[-1]) for b in BETAS]
        if sizes:
            curves[f"{name}, N"] = [(f"N={n}", _tree(score, 0.002), n) for n in SIZES]
    return curves


def chains(scores: dict[str, Score]) -> dict[str, list[Contestant]]:
    """Curves of chains: of fixed length, and ended by a score."""
    curves: dict[str, list[Contestant]] = {
        "fixed length": [(f"length={n}", StaticTree(width=1, depth=n), n) for n in LENGTHS]
    }
    for name, score in scores.items():
        curves[f"{name}, beta"] = [(f"beta={b:g}", _tree(score, b, width=1), DEPTH) for b in BETAS]
    return curves


def _tree(score: Score, beta: float, width: int = 15) -> GrowthPolicy:
    return ClassifierTree(score, beta, width, top=15, depth=DEPTH)


def held_against(contestant: Contestant, texts: Sequence[KnownText]) -> tuple[Point, float]:
    """One policy along all texts, and the share of scored nodes that nothing was recorded for."""
    label, policy, budget = contestant
    rows, scored, missing = [], 0, 0
    for known in texts:
        source, nodes, steps, gained = RecordedSource(known), 0, 0, 0
        with Replay(TreeDrafter(policy, source), known.prompt, known.text, SamplingParams()) as replay:
            while replay.left:
                tree, path = replay.step(budget)
                nodes, steps, gained = nodes + len(tree), steps + 1, gained + len(path) + 1
        rows.append((nodes, steps, gained))
        scored, missing = scored + source.scored, missing + source.missing
    return Point(label, *torch.tensor(rows, dtype=torch.float64).T), missing / max(1, scored)


def measured(contestants: dict[str, list[Contestant]], texts: Sequence[KnownText]) -> dict[str, Curve]:
    """All curves."""
    curves = {}
    for name, own in contestants.items():
        points = [held_against(c, texts) for c in track(own, name, transient=True)]
        curves[name] = [point for point, _ in points]
        if (worst := max(missing for _, missing in points)) > _NOTED:
            print(f"  {name}: nothing was recorded for up to {worst:.1%} of the nodes that it scored")
    return curves


def joined(parts: Sequence[dict[str, Curve]]) -> dict[str, Curve]:
    """The same curves along all texts."""
    return {
        name: [
            Point(points[0].label, *(torch.cat(columns) for columns in zip(*(p[1:] for p in points), strict=True)))
            for points in zip(*(part[name] for part in parts), strict=True)
        ]
        for name in parts[0]
    }


def report(curves: dict[str, Curve], base: str, at: Sequence[str]) -> None:
    """Print the points of the curves, and nodes at equal MAL over those of ``base``."""
    for name, curve in curves.items():
        mals, gammas = weighted(curve, every_prompt(curve))
        points = (f"{p.label} {m:.3f} {g:.2f}" for p, m, g in zip(curve, mals[0], gammas[0], strict=True))
        print(f"  {name} (tau, gamma): {'; '.join(points)}")
    labels = [p.label for p in curves[base]]
    print(f"  {'nodes at equal MAL, over ' + base:44}" + "".join(f"{f'MAL of {label}':>24}" for label in at))
    for name, curve in curves.items():
        cells = []
        for label in at:
            found = over_at_equal_mal(curve, curves[base], labels.index(label))
            cells.append(found.text(".3f") if found else "not reached")
        print(f"  {name:44}" + "".join(f"{cell:>24}" for cell in cells), flush=True)


class Calibration(NamedTuple):
    """Draft probability and acceptance, by entropy [E + 1] and rank [RANKS].

    Attributes:
        counts: [E + 1] distributions.
        drafted: [E + 1, RANKS] mean draft probability.
        accepted: [E + 1, RANKS] share that the target generated.
    """

    counts: Tensor
    drafted: Tensor
    accepted: Tensor


def calibration(texts: Sequence[KnownText]) -> Calibration:
    """Count every recorded distribution on the path that a text takes, once."""
    bins = len(ENTROPIES) + 1
    p, hits, trials = torch.zeros(bins, RANKS), torch.zeros(bins, RANKS), torch.zeros(bins)
    for known in texts:
        for at, drafts in enumerate(known.drafts, start=1):
            for depth in range(min(DEPTH, len(known.text) - at)):
                number = drafts.numbers.get(tuple(known.text[at : at + depth]))
                if number is None:
                    break
                row = int(torch.bucketize(drafts.entropies[number], torch.tensor(ENTROPIES)))
                trials[row] += 1
                p[row] += drafts.logprobs[number, :RANKS].exp()
                hits[row] += drafts.tokens[number, :RANKS] == known.text[at + depth]
    each = trials.clamp(min=1)[:, None]
    return Calibration(trials, p / each, hits / each)


def report_calibration(found: Calibration, file: Path | None) -> None:
    """Print it, and draw it where a file is named."""
    print(f"  entropy  count  probability / acceptance at rank 0 to {RANKS - 1}")
    for name, n, drafted, accepted in zip(BINS, *found, strict=True):
        cells = (f"{a:.3f}/{b:.3f}" for a, b in zip(drafted.tolist(), accepted.tolist(), strict=True))
        print(f"  {name:7} {int(n):6}  {' '.join(cells)}")
    if file:
        plot_calibration(found, file)


def plot_calibration(found: Calibration, file: Path) -> None:
    """C2T's Figure 2: on the diagonal the draft's probability is that of acceptance."""
    with plot("c2t-calibration", 6.4, 5.0) as made:
        axes = made.figure.subplots()
        axes.plot([1e-3, 1], [1e-3, 1], color="black", linewidth=0.8, label="equal")
        for i, (name, n, drafted, accepted) in enumerate(zip(BINS, *found, strict=True)):
            if n >= _FEWEST:
                x, y = drafted.tolist(), accepted.clamp(min=1e-3).tolist()
                axes.plot(x, y, **line_style(i), linewidth=0.8, label=f"{name} nats, {int(n)} distributions")
        axes.set(xscale="log", yscale="log", xlim=(1e-3, 1.1), ylim=(9e-4, 1.1))
        axes.set(xlabel=f"mean draft probability, ranks 0 (right) to {RANKS - 1}", ylabel="accepted share")
        axes.legend()
    write_whole(file, made.svg + "\n")


def plot_curves(curves: Mapping[str, Curve], file: Path) -> None:
    """Plot verified nodes for each generated token (gamma) against MAL (tau)."""
    with plot("c2t-curves", 6.4, 4.4) as made:
        axes = made.figure.subplots()
        for i, (name, curve) in enumerate(curves.items()):
            taus, gammas = (x[0].tolist() for x in weighted(curve, every_prompt(curve)))
            axes.plot(gammas, taus, **line_style(i), linewidth=1, label=name)
        axes.set(xscale="log", xlabel="verified nodes for each generated token", ylabel="MAL, bonus token included")
        axes.legend()
    write_whole(file, made.svg + "\n")


def _parsed(argv: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, ClassifierFile], Recording]:
    """The options, the classifiers by their names, and the recorded texts."""
    parser = command_parser("benchmarks.c2t", __doc__)
    add_options(parser)
    parser.add_argument("--classifiers", default=DEFAULT, help="names or files, with commas")
    parser.add_argument("--beta-only", action="store_true", help="leave out scores' curves over the budget")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--chains", action="store_true", help="chains instead of trees")
    kinds.add_argument("--calibration", action="store_true", help="the draft's probabilities instead of policies")
    parser.add_argument("--plot", type=Path, help="draw the curves, or the calibration, of all prompts (.svg)")
    args = parser.parse_args(argv)
    if args.plot and not (args.plot.suffix == ".svg" and args.plot.parent.is_dir()):
        parser.error(f"--plot {args.plot}: name a .svg file in a folder that exists")
    if args.plot:
        check_plots()
    files = {Path(name).stem: read_classifier(name) for name in args.classifiers.split(",")}
    texts = recorded(args)
    for file in files.values():
        check_made_for(file.made_for, provenance(texts.target, texts.source, texts.source.name))
    return args, files, texts


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    args, files, found = _parsed(argv)
    if args.calibration:
        return report_calibration(calibration(found.texts), args.plot)
    scores: dict[str, Score] = {"joint": joint, **{name: file.classifier for name, file in files.items()}}
    base, at, over = ("fixed length", CHAIN_AT, "length") if args.chains else ("eagle2, N", AT, "N")
    contestants = chains(scores) if args.chains else trees(scores, sizes=not args.beta_only)
    labels = [f"{over}={n}" for n in at]
    parts = []
    for suite, texts in found.suites.items():
        print(suite)
        parts.append(measured(contestants, texts))
        report(parts[-1], base, labels)
    curves = joined(parts)
    if len(parts) > 1:
        print(f"all: {len(found.texts)} prompts")
        report(curves, base, labels)
    if args.plot:
        plot_curves(curves, args.plot)


if __name__ == "__main__":
    main()
