"""The sweeps of "OPT-Tree": size of the tree, threshold and temperature, from runs that have several of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftree.bench.contestants import Entry
from draftree.bench.summary import ALL, LoadedRun

from .plots import line_style, plot
from .sections import Grid, Section, first

PAPER = "OPT-Tree"
SIZED = ("opt-tree", "sequoia", "eagle2", "binary")
"""Methods whose tree takes any size."""

Line = tuple[str, list[tuple[float, Entry]]]
"""A name and its points: where on the sweep, and whose figures."""


def sections(runs: Sequence[LoadedRun]) -> list[Section]:
    """Those that the runs have."""
    made = [_sizes(runs), _thresholds(runs), _temperatures(runs)]
    return [section for section in made if section is not None]


def _lines(run: LoadedRun, methods: Sequence[str], position: Callable[[Entry], float | None]) -> list[Line]:
    """One line for each method and drafter, at one node budget unless that is swept, with two points or more."""
    lines: dict[str, list[tuple[float, Entry]]] = {}
    for entry in run.of(lambda e: e.method in methods):
        at = position(entry)
        if at is not None:
            nodes = "" if at == entry.nodes else f", {entry.nodes} nodes"
            lines.setdefault(f"{entry.method}, {entry.drafter}{nodes}", []).append((at, entry))
    return [
        (name, sorted(points, key=lambda p: p[0])) for name, points in lines.items() if len({p[0] for p in points}) > 1
    ]


def _sizes(runs: Sequence[LoadedRun]) -> Section | None:
    def position(entry: Entry) -> float | None:
        swept = set(entry.settings) <= {"tree"} and entry.temperature == 0
        return float(entry.nodes) if swept else None

    return _section(
        runs,
        "Figure 6: MAL by tree size",
        "The paper: OPT-Tree above Sequoia at every size; with a strong drafter it grows beyond 500 nodes.",
        ("opt-tree-6", "node budget", 2),
        lambda run: _lines(run, SIZED, position),
    )


def _thresholds(runs: Sequence[LoadedRun]) -> Section | None:
    def position(entry: Entry) -> float | None:
        delta = entry.settings.get("delta", "auto")
        return None if delta == "auto" or entry.temperature else float(delta)

    return _section(
        runs,
        "Figure 8: the threshold",
        "The paper: MAL falls as the threshold rises, and speed has its best between the share of a draft pass in a "
        "step and 1.",
        ("opt-tree-8", "threshold on the gain in E(A)", None),
        lambda run: _lines(run, ("opt-tree",), position),
    )


def _temperatures(runs: Sequence[LoadedRun]) -> Section | None:
    return _section(
        runs,
        "Figure 9: the temperature",
        "The paper: MAL and speed-up are slightly lower at T = 1.",
        ("opt-tree-9", "temperature", None),
        lambda run: _lines(run, ("opt-tree", "auto"), lambda entry: None if entry.settings else entry.temperature),
    )


def _section(
    runs: Sequence[LoadedRun],
    title: str,
    text: str,
    shape: tuple[str, str, int | None],
    lines_of: Callable[[LoadedRun], list[Line]],
) -> Section | None:
    run = first(runs, lambda run: bool(lines_of(run)))
    if run is None:
        return None
    name, label, base = shape
    lines, rows = lines_of(run), list[list[str]]()
    with plot(name, 7.2, 3.2) as made:
        left, right = made.figure.subplots(1, 2)
        for number, (line, points) in enumerate(lines):
            figures = [run.table[e.label][ALL] for _, e in points]
            positions = [at for at, _ in points]
            left.plot(positions, [f.mal or 0.0 for f in figures], label=line, **line_style(number))
            right.plot(positions, [f.tokens_per_second for f in figures], label=line, **line_style(number))
            rows += [
                [line, f"{at:g}", f"{f.mal or 0.0:.3f}", f"{f.tokens_per_second:.2f}"]
                for at, f in zip(positions, figures, strict=True)
            ]
        left.set(xlabel=label, ylabel="MAL, bonus included")
        right.set(xlabel=label, ylabel="tokens/s", ylim=(0, None))
        left.legend()
        if base:
            left.set_xscale("log", base=base)
            right.set_xscale("log", base=base)
    grid = Grid(["method, drafter", label, "MAL", "tokens/s"], rows)
    return Section(f"{PAPER}, {title}", [text], grid, (name, made.svg), commands=[run.command])
