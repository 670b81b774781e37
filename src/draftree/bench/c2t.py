"""How many nodes does a classifier save at equal acceptance length, beside EAGLE-2 and OPT-Tree?

    python -m draftree.bench.c2t [--suites spec-bench,gsm8k,humaneval] [--limit 13] [--max-tokens 64]
                                 [--classifiers smollm2-head,FILE,...] [--beta-only] [--tops 15,20,25,30,none]
                                 [--clock [--repeats 3]] [--cache DIR] [--plot FILE.svg]
                                 [--chains | --widths | --calibration]

The target answers each prompt plainly, and what the drafter says from every token of the answers is recorded once
(``recorded.py``). Then each policy grows its trees of those laws, and match verification accepts what the text follows:
MAL (bonus token included) and verified nodes are those of decoding. "joint" is the classifiers' policy with the path's
own draft probability as the score. ``--widths`` holds learned widths against B(H) as published, over the budget.
``--tops`` holds second top-K's of a layer against one another (the paper's Figure 5) within 256 nodes.

Curves: tau is MAL, gamma the nodes verified for each generated token. "At equal MAL" reads each curve at the MAL of
EAGLE-2 with 8, 16 and 32 nodes, between its points by straight lines; ratios have 95% bootstrap intervals over prompts.
``--clock`` then decodes the prompts for real, taking turns: EAGLE-2 at these points, and each curve with the setting,
between its points, that has the same MAL. It prints time a token over EAGLE-2's (geometric mean of ratios by prompt,
prefill left out): run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import track
from torch import Tensor

from ..config import SamplingParams
from ..drafters.base import TreeDrafter
from ..drafters.registry import check_made_for, load_drafter, provenance
from ..models.load import DEFAULT_MODEL, load
from ..policies.base import Frontier, GrowthPolicy
from ..policies.best_paths import Eagle2Tree, OptTree
from ..policies.c2t import TOP, ClassifierTree, LearnedWidth, Score
from ..policies.classifier import DEFAULT, DEFAULT_WIDTH, Classifier, read_classifier
from ..policies.entropy import BranchingSteps, EntropyFunction, EntropyTree
from ..policies.fixed import StaticTree
from ..text import encode, user
from ..train.replay import Replay
from .c2t_clock import Contestant, decoded, of_mal, print_clock
from .c2t_plots import calibration, check_plot, plot_calibration, plot_curves, print_calibration
from .recorded import BEAM, DEPTH, KnownText, RecordedSource, record
from .suites import choose, load_suite

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
BETAS = (0.5, 0.3, 0.2, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005)
LENGTHS = range(1, 9)
AT = (8, 16, 32)
CHAIN_AT = (2, 3, 4)
WIDTH_BETAS = (0.1, 0.05, 0.02)
WIDTH_SIZES = (1, 2, 4, 6, 8, 12, 16)
WIDTH_AT = (2, 4, 8)
TOP_NODES = 256
"""Budget where top-K's are compared: few trees reach it, so that K decides."""
_DRAWS = 1000
_NOTED = 0.01


class Point(NamedTuple):
    """One policy with one setting: [prompts] verified nodes, steps and tokens gained."""

    label: str
    nodes: Tensor
    steps: Tensor
    tokens: Tensor


Curve = list[Point]


def joint(frontier: Frontier) -> Tensor:
    """The draft's own probability of each path: EAGLE-2's confidence in a classifier's place."""
    return frontier.scores.exp()


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


def top_ks(classifiers: dict[str, Classifier], tops: Sequence[int | None]) -> dict[str, list[Contestant]]:
    """Curves over beta with each second top-K; None: without one."""
    curves: dict[str, list[Contestant]] = {"eagle2, N": [(f"N={n}", Eagle2Tree(10, DEPTH), n) for n in SIZES]}
    for name, net in classifiers.items():
        for top in tops:
            key = f"{name}, K={'none' if top is None else top}"
            curves[key] = [(f"beta={b:g}", _tree(net, b, top=top), TOP_NODES) for b in BETAS]
    return curves


def chains(scores: dict[str, Score]) -> dict[str, list[Contestant]]:
    """Curves of chains: of fixed length, and ended by a score."""
    curves: dict[str, list[Contestant]] = {
        "fixed length": [(f"length={n}", StaticTree(width=1, depth=n), n) for n in LENGTHS]
    }
    for name, score in scores.items():
        curves[f"{name}, beta"] = [(f"beta={b:g}", _tree(score, b, width=1), DEPTH) for b in BETAS]
    return curves


def widths(classifiers: dict[str, Classifier]) -> dict[str, list[Contestant]]:
    """Curves over the budget: B(H) as published, and what classifiers of entropy and rank give in its place."""
    functions: dict[str, EntropyFunction] = {"published B(H)": BranchingSteps()}
    functions |= {f"{name}, {b:g}": LearnedWidth(net, b) for name, net in classifiers.items() for b in WIDTH_BETAS}
    return {name: [(f"N={n}", EntropyTree(function), n) for n in WIDTH_SIZES] for name, function in functions.items()}


def _tree(score: Score, beta: float, width: int = 15, top: int | None = TOP) -> GrowthPolicy:
    given = isinstance(score, Classifier) and score.given_parent
    return ClassifierTree(score, beta, width, top, DEPTH, given)


def held_against(contestant: Contestant, texts: Sequence[KnownText]) -> tuple[Point, float]:
    """One policy along all texts, and the share of nodes asked about that nothing was recorded for."""
    label, policy, budget = contestant
    rows, asked, missing = [], 0, 0
    for known in texts:
        source, nodes, steps, gained = RecordedSource(known), 0, 0, 0
        with Replay(TreeDrafter(policy, source), known.prompt, known.text, SamplingParams()) as replay:
            while replay.left:
                tree, tokens = replay.step(budget)
                nodes, steps, gained = nodes + len(tree), steps + 1, gained + tokens
        rows.append((nodes, steps, gained))
        asked, missing = asked + source.asked, missing + source.missing
    return Point(label, *torch.tensor(rows, dtype=torch.float64).T), missing / max(1, asked)


def measured(contestants: dict[str, list[Contestant]], texts: Sequence[KnownText]) -> dict[str, Curve]:
    """All curves."""
    curves = {}
    for name, own in contestants.items():
        points = [held_against(c, texts) for c in track(own, name, transient=True)]
        curves[name] = [point for point, _ in points]
        if (worst := max(missing for _, missing in points)) > _NOTED:
            print(f"  {name}: nothing was recorded for up to {worst:.1%} of the nodes that it asked about")
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


def _weighted(curve: Curve, weights: Tensor) -> tuple[Tensor, Tensor]:
    """[D, points] MAL and nodes a token, with [D, prompts] weights of the prompts."""
    nodes, steps, tokens = (torch.stack([p[i] for p in curve], 1) for i in (1, 2, 3))  # type: ignore[misc]
    return (weights @ tokens) / (weights @ steps), (weights @ nodes) / (weights @ tokens)


def _nodes_at(mal: Tensor, curve: Curve, weights: Tensor) -> Tensor:
    """[D] nodes a token of a curve where its MAL is ``mal`` [D]; nan beyond its ends."""
    x, y = _weighted(curve, weights)
    found = torch.full_like(mal, float("nan"))
    for i in range(x.shape[1] - 1):
        below, above = (x[:, i], y[:, i]), (x[:, i + 1], y[:, i + 1])
        share = (mal - below[0]) / (above[0] - below[0]).clamp(min=1e-9)
        inside = (share >= 0) & (share <= 1) & ~(found <= below[1])  # where noise lets MAL fall, the cheaper
        found = torch.where(inside, below[1] + share * (above[1] - below[1]), found)
    return found


def report(curves: dict[str, Curve], base: str, at: Sequence[str]) -> None:
    """Print the points of the curves, and nodes at equal MAL over those of ``base``."""
    prompts = len(curves[base][0].nodes)
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(prompts, (_DRAWS, prompts), generator=generator)
    weights = torch.zeros(_DRAWS, prompts, dtype=torch.float64).scatter_add_(1, draws, torch.ones_like(draws).double())
    whole = torch.ones(1, prompts, dtype=torch.float64)
    for name, curve in curves.items():
        mals, gammas = _weighted(curve, whole)
        points = (f"{p.label} {m:.3f} {g:.2f}" for p, m, g in zip(curve, mals[0], gammas[0], strict=True))
        print(f"  {name} (tau, gamma): {'; '.join(points)}")
    labels = [p.label for p in curves[base]]
    print(f"  {'nodes at equal MAL, over ' + base:44}" + "".join(f"{f'MAL of {label}':>24}" for label in at))
    for name, curve in curves.items():
        cells = []
        for label in at:
            i = labels.index(label)
            ratios = []
            for w in (whole, weights):
                mal, own = (column[:, i] for column in _weighted(curves[base], w))
                ratios.append(_nodes_at(mal, curve, w) / own)
            ends = ratios[1][~ratios[1].isnan()].sort().values
            low, high = (float(ends[int(q * (len(ends) - 1))]) if len(ends) else float("nan") for q in (0.025, 0.975))
            cells.append(f"{float(ratios[0]):.3f} [{low:.3f}, {high:.3f}]")
        print(f"  {name:44}" + "".join(f"{cell:>24}" for cell in cells), flush=True)


def equal_mal(
    contestants: dict[str, list[Contestant]], curves: dict[str, Curve], base: str, at: Sequence[str]
) -> tuple[dict[str, Contestant], list[tuple[str, str]]]:
    """The base's points ``at``, and of every other curve the settings that have their MAL.

    Returns:
        contestants by name, and which of them have equal MAL: (base, other).
    """
    whole = torch.ones(1, len(curves[base][0].nodes)).double()
    mals = {name: _weighted(curve, whole)[0][0].tolist() for name, curve in curves.items()}
    points: dict[str, Contestant] = {}
    pairs = []
    for mal, one in zip(mals[base], contestants[base], strict=True):
        if one[0] not in at:
            continue
        points[own := f"{base}: {one[0]}"] = one
        for name in curves:
            if name != base:
                other = of_mal(mal, contestants[name], mals[name])
                points[label := f"{name}: {other[0]}"] = other
                pairs.append((own, label))
    return points, pairs


def _tops(text: str) -> list[int | None]:
    found = [None if part == "none" else int(part) for part in text.split(",")]
    if any(top is not None and top < 1 for top in found):
        raise ValueError
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m draftree.bench.c2t", description=__doc__)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="head", help="one that does not learn as it drafts")
    parser.add_argument("--suites", default="spec-bench,gsm8k,humaneval")
    parser.add_argument("--limit", type=int, default=13, help="prompts of each suite, from its categories in turn")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--classifiers", help=f"names or files, with commas ({DEFAULT}; {DEFAULT_WIDTH} for --widths)")
    parser.add_argument("--beta-only", action="store_true", help="leave out scores' curves over the budget")
    parser.add_argument("--beam", type=int, default=BEAM, help="nodes of each layer whose laws are recorded")
    parser.add_argument("--clock", action="store_true", help="decode at equal MAL and compare time a token")
    parser.add_argument("--repeats", type=int, default=3, help="decodes of each prompt by the clock")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--chains", action="store_true", help="chains instead of trees")
    kinds.add_argument("--tops", type=_tops, help="second top-K's to compare, with commas, none among them")
    kinds.add_argument("--widths", action="store_true", help="learned widths instead of trees")
    kinds.add_argument("--calibration", action="store_true", help="the draft's probabilities instead of policies")
    parser.add_argument("--plot", type=Path, help="draw the curves, or the calibration, of all prompts (.svg)")
    parser.add_argument("--cache", type=Path, help="folder for recorded laws, for several runs")
    args = parser.parse_args()
    if args.repeats < 1 or args.beam < 1 or (args.clock and args.calibration):
        parser.error("use --repeats and --beam of at least 1, and --clock without --calibration")
    names = (args.classifiers or (DEFAULT_WIDTH if args.widths else DEFAULT)).split(",")
    files = {Path(name).stem: read_classifier(name) for name in names}
    nets = {name: file.classifier for name, file in files.items()}
    scores: dict[str, Score] = {"joint": joint, **nets}
    if args.plot and (wrong := check_plot(args.plot)):
        parser.error(wrong)
    base, at, over = "eagle2, N", AT, "N"
    if args.tops:
        contestants = top_ks(nets, args.tops)
    elif args.widths:
        contestants, base, at, over = widths(nets), "published B(H)", WIDTH_AT, "N"
    elif args.chains:
        contestants, base, at, over = chains(scores), "fixed length", CHAIN_AT, "length"
    else:
        contestants = trees(scores, sizes=not args.beta_only)
    labels = [f"{over}={n}" for n in at]
    target = load(args.target)
    drafter = load_drafter(args.drafter, target, Eagle2Tree(args.beam, DEPTH))
    if not isinstance(drafter, TreeDrafter) or drafter.learns:
        parser.error(f"--drafter {args.drafter} learns as it drafts, or drafts nothing: use a head, a model or lookup")
    for file in files.values():
        check_made_for(file.made_for, provenance(target, drafter.source, drafter.name))
    every: list[KnownText] = []
    found: list[dict[str, Curve]] = []
    suites = args.suites.split(",")
    for suite in suites:
        items = choose(load_suite(suite), limit=args.limit)
        prompts = [encode(target.tokenizer, user(item.prompt)) for item in items]
        size = f"{args.limit}-{args.max_tokens}-{args.beam}x{DEPTH}"
        kept = args.cache and args.cache / f"{args.drafter}-{suite}-{size}.safetensors"
        laws = record(target, drafter.source, prompts, args.max_tokens, kept, (args.beam, DEPTH))
        texts = list(track(laws, f"recording {suite}", len(prompts), transient=True))
        every += texts
        print(f"{suite}: {len(texts)} prompts, up to {args.max_tokens} tokens, drafter {args.drafter}")
        if args.calibration:
            print_calibration(calibration(texts))
        else:
            found.append(measured(contestants, texts))
            report(found[-1], base, labels)
    if len(suites) > 1:
        print(f"all: {len(every)} prompts")
        if args.calibration:
            print_calibration(calibration(every))
        else:
            report(joined(found), base, labels)
    if args.clock:
        points, pairs = equal_mal(contestants, joined(found), base, labels)
        prompts = [known.prompt for known in every]
        print_clock(decoded(target, args.drafter, points, prompts, args.max_tokens, args.repeats), pairs)
    if args.plot and args.calibration:
        plot_calibration(calibration(every), args.plot)
    elif args.plot:
        whole = {name: _weighted(c, torch.ones(1, len(every)).double()) for name, c in joined(found).items()}
        plot_curves({name: (tau[0].tolist(), gamma[0].tolist()) for name, (tau, gamma) in whole.items()}, args.plot)


if __name__ == "__main__":
    main()
