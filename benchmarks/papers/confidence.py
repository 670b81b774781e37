"""C2T's claims: nodes and time at the acceptance of EAGLE-2, the second top-K, and a classifier of other models.

What ``benchmarks.c2t`` found with SmolLM2's head stands in ``c2t_head.md``, which becomes a section.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from draftree.bench.entries import Entry
from draftree.bench.summary import ALL, LoadedRun, MethodFigures, number

from .plots import line_style, plot
from .sections import Chapter, Grid, Part, Runs, Section, Verdict, of

RUNS = ("confidence-smollm2", "confidence-coder")
OWN = {"confidence-coder": "c2t-coder", "confidence-smollm2": "smollm2-head"}
"""Run -> in the name of the classifier that was made for its models."""
BASE, OWN_CURVE, OTHER_CURVE = "EAGLE-2", "C2T", "C2T, the other pair's classifier"
CURVES = (BASE, OWN_CURVE, OTHER_CURVE)
AT = (16, 32, 64)
HEAD = Path(__file__).with_name("c2t_head.md")


def _curve(run: LoadedRun, name: str) -> list[Entry]:
    """Its points, by how much they accept."""

    def wanted(entry: Entry) -> bool:
        if entry.method == "eagle2":
            return name == BASE
        own = OWN[run.path.name] in entry.settings.get("classifier", "")
        return "top" not in entry.settings and name == (OWN_CURVE if own else OTHER_CURVE)

    return sorted(run.of(lambda e: e.drafter is not None and wanted(e)), key=lambda e: _mal(run, e))


def _mal(run: LoadedRun, entry: Entry) -> float:
    return run.table[entry.label][ALL].mal or 0.0


def seconds_a_token(figures: MethodFigures) -> float:
    """Seconds of a token after the prefill."""
    return ((figures.seconds["total"] or 0.0) - (figures.seconds["prefill"] or 0.0)) / max(
        1, figures.tokens - figures.prompts
    )


def nodes_a_token(figures: MethodFigures) -> float:
    return figures.nodes_per_token or 0.0


def at_mal(points: Sequence[tuple[float, float]], mal: float) -> float | None:
    """The second figure of a curve where the first is ``mal``, between its points; None beyond its ends."""
    for (low, before), (high, after) in zip(points, points[1:], strict=False):
        if low <= mal <= high:
            return before + (after - before) * (mal - low) / max(high - low, 1e-9)
    return None


def over_base(run: LoadedRun, name: str, nodes: int, what: Callable[[MethodFigures], float]) -> float | None:
    """What a curve takes at the acceptance of EAGLE-2 with so many nodes, over what that takes."""
    base = next((e for e in _curve(run, BASE) if e.nodes == nodes), None)
    if base is None:
        return None
    points = [(_mal(run, e), what(run.table[e.label][ALL])) for e in _curve(run, name)]
    found = at_mal(points, _mal(run, base))
    return None if found is None else found / what(run.table[base.label][ALL])


def _equal(runs: Runs) -> Section | None:
    found, rows = of(runs, RUNS), list[list[str]]()
    if not found:
        return None
    with plot("c2t-curves", 4.2 * len(found), 3.4) as made:
        panels = made.figure.subplots(1, len(found), squeeze=False)[0]
        for run, axes in zip(found, panels, strict=True):
            curves = [name for name in CURVES if _curve(run, name)]
            for at, name in enumerate(curves):
                figures = [run.table[e.label][ALL] for e in _curve(run, name)]
                xs, ys = [nodes_a_token(f) for f in figures], [f.mal or 0.0 for f in figures]
                axes.plot(xs, ys, label=name, **line_style(at))
            axes.set(title=run.path.name, xlabel="verified nodes a token", ylabel="MAL, bonus included", xscale="log")
            axes.legend()
            for name in curves[1:]:
                pairs = [(what, n) for what in (nodes_a_token, seconds_a_token) for n in AT]
                cells = [number(over_base(run, name, n, what)) or "not reached" for what, n in pairs]
                rows.append([f"{run.path.name}: {name}", *cells])
    header = ["run: curve", *(f"nodes, N = {n}" for n in AT), *(f"time, N = {n}" for n in AT)]
    text = (
        "Verified nodes and time of a token, over EAGLE-2's with N nodes at the same MAL (linear between the points). "
        "Both go ten levels deep. The paper: 0.75 of the nodes, 0.82 of the time. *Not reached*: beta ends at 0.01 in "
        "these runs, and C2T accepts less there."
    )
    return Section(
        "Nodes and time at equal acceptance", [text], Grid(header, rows), ("c2t-curves", made.svg), runs=found
    )


def _tops(runs: Runs) -> Section | None:
    found, rows = of(runs, RUNS), list[list[str]]()
    for run in found:
        for entry in run.of(lambda e: "top" in e.settings):
            f = run.table[entry.label][ALL]
            rows.append([f"{run.path.name}: {entry.settings['top']}", number(f.mal), number(f.nodes_per_token)])
    text = "Beta 0.01, within 256 nodes. The paper's Figure 5: K hardly matters, and 15 does as well as none."
    grid = Grid(["run: K", "MAL", "nodes/token"], rows)
    return Section("The second top-K", [text], grid, runs=found) if rows else None


def _head(runs: Runs) -> Section | None:
    """What stands in a file: figures of another benchmark, in the report that has the run of the same models."""
    if RUNS[0] not in runs:
        return None
    return Section("With SmolLM2's head", HEAD.read_text().strip().split("\n\n"))


_KINDS = (nodes_a_token, seconds_a_token)


def _shares(run: LoadedRun) -> list[tuple[int, list[float]]]:
    """N and C2T's nodes and time over EAGLE-2's, where C2T reaches its acceptance."""
    found = [(n, [over_base(run, OWN_CURVE, n, what) for what in _KINDS]) for n in AT]
    return [(n, [share for share in shares if share is not None]) for n, shares in found if None not in shares]


def _verdict(runs: Runs) -> Verdict | None:
    shares = [over_base(run, OWN_CURVE, n, what) for run in of(runs, RUNS) for what in _KINDS for n in AT]
    return Verdict.of([share is not None and share <= 0.85 for share in shares])


def _found(runs: Runs) -> str | None:
    found, parts = of(runs, RUNS), list[str]()
    for run in found:
        cells = [f"{number(nodes)} and {number(time)} with N = {n}" for n, (nodes, time) in _shares(run)]
        parts.append(f"{', '.join(cells) or 'no N that it reaches'} in `{run.path.name}`")
    if not found:
        return None
    return (
        f"At the acceptance of EAGLE-2 with N nodes, C2T takes these shares of its nodes and time: {'; '.join(parts)}. "
        f"Of N = {', '.join(map(str, AT))} it does not reach the others."
    )


CHAPTER = Chapter(
    "c2t",
    "C2T",
    "A classifier of the path probability, the entropy and the depth takes 0.75 of EAGLE-2's nodes at equal "
    "acceptance, and 0.82 of the time (Table 1; [how it works](../how-it-works/trees.md)).",
    _found,
    _verdict,
    "A drafter that was trained on the target's output gives probabilities close to those of acceptance, so a "
    "classifier has little to correct. What time it saves is that of layers that EAGLE-2 drafts in vain; `opt-tree` "
    "saves as much. The coder's figures are weak: 6 prompts, and a classifier from 40 prompts of Self-Instruct "
    "(`draftree train classifier --drafter head --prompts FILE --max-tokens 32 --samples 8000 --batch 256 "
    "--learning-rate 0.005`).",
    (Part("nodes", RUNS, _equal), Part("figure-5", RUNS, _tops), Part("head", RUNS[:1], _head)),
)
