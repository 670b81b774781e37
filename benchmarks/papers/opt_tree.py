"""The tables of "OPT-Tree" and what its trees look like, from our runs; its sweeps are in ``sweeps``."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from draftree.bench.contestants import Entry
from draftree.bench.results import BINS, StepColumns
from draftree.bench.summary import ALL, LoadedRun, number, ratio_text

from .plots import bar_style, line_style, plot
from .sections import Grid, Section, first

PAPER = "OPT-Tree"
TREES = ("binary", "eagle", "opt-tree")
"""What the paper compares."""
_CASE_TOKENS = 160


def sections(runs: Sequence[LoadedRun]) -> list[Section]:
    """Those that the runs have."""
    made = [
        _table(runs, greedy=True),
        _table(runs, greedy=False),
        _figure5(runs),
        _figure7(runs),
        _figure10(runs),
        _figure11(runs),
    ]
    return [section for section in made if section is not None]


def _opt_tree(runs: Sequence[LoadedRun]) -> tuple[LoadedRun, Entry] | None:
    """A run with OPT-Tree at its default, and that contestant; greedy if there is one."""
    for greedy in (True, False):
        for run in runs:
            found = [e for e in run.named("opt-tree") if (e.temperature == 0) == greedy]
            if found:
                return run, found[0]
    return None


def _steps(run: LoadedRun, entry: Entry) -> list[StepColumns]:
    return [t.steps for r in run.by_method[entry.label] for t in r.turns if t.steps]


def _table(runs: Sequence[LoadedRun], greedy: bool) -> Section | None:
    def fits(e: Entry) -> bool:
        return e.method in TREES and (e.temperature == 0) == greedy

    run = first(runs, lambda run: len({e.method for e in run.of(fits)}) > 1) or first(
        runs, lambda run: bool(run.of(fits))
    )
    if run is None:
        return None
    rows = []
    for entry in sorted(run.of(fits), key=lambda e: (e.drafter or "", TREES.index(e.method))):
        f = run.table[entry.label][ALL]
        rows.append(
            [
                entry.label,
                entry.drafter or "",
                str(entry.nodes),
                number(f.mal),
                f"{f.tokens_per_second:.2f}",
                ratio_text(f.speedup),
            ]
        )
    name = "Table 1: trees, greedy" if greedy else "Table 3: trees, sampled"
    paper = (
        "The paper on MT-Bench, LLaMA-2 7B with its 68M: MAL 2.12 binary, 2.47 EAGLE, 2.58 OPT-Tree; 70B with 7B: "
        "4.84, 4.97, 7.74; speed-up over transformers up to 3.2."
        if greedy
        else "The paper at T = 1: LLaMA-2 7B with its 68M: MAL 2.72, speed-up 1.71; with EAGLE's head 4.07 and 2.42."
    )
    return Section(
        f"{PAPER}, {name}",
        [paper],
        Grid(["tree", "drafter", "nodes", "MAL", "tokens/s", "over AR"], rows),
        commands=[run.command],
    )


def _figure5(runs: Sequence[LoadedRun]) -> Section | None:
    found = _opt_tree(runs)
    if found is None:
        return None
    run, entry = found
    pairs = [(e, g) for s in _steps(run, entry) for e, g in zip(s.expected, s.gained, strict=True)]
    if len(pairs) < 2:
        return None
    counts = Counter((min(15, round(e)), min(15, g)) for e, g in pairs)
    high = max(2, *(x for key in counts for x in key))
    cells = [[counts[x, y] for x in range(1, high + 1)] for y in range(1, high + 1)]
    with plot("opt-tree-5", 4.8, 4.2) as made:
        axes = made.figure.subplots()
        axes.imshow(
            [[c**0.5 for c in row] for row in cells],
            origin="lower",
            cmap="Greys",
            extent=(0.5, high + 0.5, 0.5, high + 0.5),
        )
        most = max(counts.values())
        for (x, y), count in counts.items():
            color = "white" if 4 * count > most else "black"
            axes.text(x, y, str(count), ha="center", va="center", fontsize=7, color=color)
        axes.set(xlabel="E(A), rounded", ylabel="acceptance length")
    expected, gained = [e for e, _ in pairs], [float(g) for _, g in pairs]
    means = statistics.mean(expected), statistics.mean(gained)
    text = f"{len(pairs)} steps of {entry.label}: mean E(A) {means[0]:.2f}, mean acceptance length {means[1]:.2f}"
    if len(set(expected)) > 1 and len(set(gained)) > 1:
        text += f", correlation {statistics.correlation(expected, gained):.2f}"
    return Section(
        f"{PAPER}, Figure 5: E(A) and acceptance length",
        [text + "."],
        figure=("opt-tree-5", made.svg),
        commands=[run.command],
    )


class _Split(NamedTuple):
    """Where a step's time goes: seconds of a step, and shares of it."""

    label: str
    seconds: float
    shares: tuple[float, float, float, float]


def _split(run: LoadedRun, entry: Entry) -> _Split | None:
    f = run.table[entry.label][ALL]
    steps = sum(t.passes or 0 for r in run.by_method[entry.label] for t in r.turns)
    if f.share is None or f.target_share is None or f.drafter_share is None or not steps:
        return None
    after = (f.seconds["total"] or 0.0) - (f.seconds["prefill"] or 0.0)
    trees = f.share["draft"] - f.drafter_share
    rest = 1 - f.share["draft"] - f.target_share
    return _Split(entry.label, after / steps, (f.drafter_share, trees, f.target_share, rest))


def _figure7(runs: Sequence[LoadedRun]) -> Section | None:
    found = _opt_tree(runs)
    if found is None:
        return None
    run, _ = found
    splits = [s for e in run.of(lambda e: not e.is_peer) if (s := _split(run, e)) is not None]
    with plot("opt-tree-7", 6.4, 1.2 + 0.32 * len(splits)) as made:
        axes = made.figure.subplots()
        left = [0.0] * len(splits)
        for part, name in enumerate(("drafter's passes", "trees, lookup", "target's passes", "everything else")):
            times = [1e3 * s.seconds * s.shares[part] for s in splits]
            axes.barh([s.label for s in splits], times, left=left, label=name, **bar_style(part))
            left = [a + b for a, b in zip(left, times, strict=True)]
        axes.invert_yaxis()
        axes.set(xlabel="milliseconds of a step")
        made.figure.legend(loc="outside upper center", ncols=4, frameon=False)
    grid = Grid(
        ["method", "drafter's passes", "trees, lookup", "target's passes", "else", "ms/step"],
        [[s.label, *(f"{100 * x:.1f}%" for x in s.shares), f"{1e3 * s.seconds:.1f}"] for s in splits],
    )
    text = (
        "Trees and lookup: growing trees, and sources without a model. The paper: tree operations take 6.3% of a step "
        "in its smallest setting."
    )
    return Section(
        f"{PAPER}, Figure 7: where a step's time goes",
        [text],
        grid,
        ("opt-tree-7", made.svg),
        commands=[run.command],
    )


def _figure10(runs: Sequence[LoadedRun]) -> Section | None:
    found = _opt_tree(runs)
    if found is None:
        return None
    run, entry = found
    record = max(run.by_method[entry.label], key=lambda r: r.gained / max(1, r.passes or 1))
    turn = record.turns[0]
    pieces = list(zip(turn.pieces or [], map(bool, turn.drafted or []), strict=True))[:_CASE_TOKENS]
    case = "".join(piece if drafted or not piece.strip() else f"[{piece}]" for piece, drafted in pieces)
    text = (
        f"Prompt {record.prompt} ({record.category}) by {entry.label}: the target's own tokens in brackets, the others "
        f"drafted; {record.gained / max(1, record.passes or 1):.2f} tokens a "
        "target pass. The best answer of the run, not a typical one."
    )
    return Section(
        f"{PAPER}, Figure 10: a case",
        [text, "\n".join(f"> {line}" for line in case.splitlines())],
        commands=[run.command],
    )


def _figure11(runs: Sequence[LoadedRun]) -> Section | None:
    found = _opt_tree(runs)
    if found is None:
        return None
    run, chosen = found
    shown = [e for e in run.named("opt-tree") if e.temperature == chosen.temperature and e.nodes == chosen.nodes][:4]
    with plot("opt-tree-11") as made:
        axes = made.figure.subplots()
        for at, entry in enumerate(shown):
            reached = _sum([s.reached_by_probability for s in _steps(run, entry)])
            accepted = _sum([s.accepted_by_probability for s in _steps(run, entry)])
            points = [((i + 0.5) / BINS, p / j) for i, (j, p) in enumerate(zip(reached, accepted, strict=True)) if j]
            axes.plot([x for x, _ in points], [y for _, y in points], label=entry.label, **line_style(at))
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.6)
        axes.set(xlabel="probability by the draft", ylabel="accepted share", xlim=(0, 1), ylim=(0, 1))
        axes.legend()
    text = "Nodes whose parent was accepted, by the draft's probability of them, and how many of them were accepted."
    return Section(
        f"{PAPER}, Figure 11: acceptance by draft probability",
        [text],
        figure=("opt-tree-11", made.svg),
        commands=[run.command],
    )


def _sum(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]
