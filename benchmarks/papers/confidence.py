"""C2T's claims: nodes and time at the acceptance of EAGLE-2, the second top-K, and a classifier of other models.

What ``benchmarks.c2t`` found with SmolLM2's head stands in ``c2t_head.md``, which becomes a section.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from draftree.bench.entries import Entry
from draftree.bench.results import AnswerRecord
from draftree.bench.summary import ALL, Interval, LoadedRun, number, ratio_text

from ..curves import Curve, Point, every_prompt, over_at_equal_mal, weighted
from .plan import SAMPLES
from .plots import line_style, plot
from .sections import Chapter, Grid, Part, Runs, Section, Verdict, of

RUNS = ("confidence-smollm2", "confidence-coder")
OWN = {"confidence-coder": "c2t-coder", "confidence-smollm2": "smollm2-head"}
"""Run -> in the name of the classifier that was made for its models."""
BASE, OWN_CURVE, OTHER_CURVE = "EAGLE-2", "C2T", "C2T, the other pair's classifier"
NAMES = {"eagle2": BASE, "opt-tree": "OPT-Tree"}
"""Method -> its curve; others are called as their method."""
AT = (8, 16, 32, 64)
HEAD = Path(__file__).with_name("c2t_head.md")


def _name(run: LoadedRun, entry: Entry) -> str:
    """The curve that a contestant is on."""
    if entry.method != "c2t":
        return NAMES.get(entry.method, entry.method)
    return OWN_CURVE if OWN[run.path.name] in entry.settings.get("classifier", "") else OTHER_CURVE


def curves(run: LoadedRun) -> dict[str, list[Entry]]:
    """Those of a run by name, EAGLE-2's first; the points of each by how much they accept."""
    found: dict[str, list[Entry]] = {BASE: []}
    for entry in run.of(lambda e: e.drafter is not None and "top" not in e.settings):
        found.setdefault(_name(run, entry), []).append(entry)
    return {name: sorted(own, key=lambda e: run.table[e.label][ALL].mal or 0.0) for name, own in found.items() if own}


def nodes_of(record: AnswerRecord) -> float:
    """Verified nodes of an answer."""
    return sum(sum(t.steps.nodes) for t in record.turns if t.steps)


def seconds_of(record: AnswerRecord) -> float:
    """Of an answer, without the prompt."""
    return record.seconds - sum(t.seconds.prefill or 0.0 for t in record.turns)


Taken = Callable[[AnswerRecord], float]
_KINDS: tuple[Taken, ...] = (nodes_of, seconds_of)


def points(run: LoadedRun, entries: list[Entry], taken: Taken) -> Curve:
    """What the answers of contestants take, steps and tokens, for ``benchmarks.c2t``."""
    made = list[Point]()
    for entry in entries:
        records = sorted(run.by_method[entry.label], key=lambda r: r.prompt)
        rows = [(taken(r), r.passes or 0, r.gained) for r in records]
        made.append(Point(entry.label, *torch.tensor(rows, dtype=torch.float64).T))
    return made


def over_base(run: LoadedRun, name: str, nodes: int, taken: Taken) -> Interval | None:
    """What a curve takes at the acceptance of EAGLE-2 with so many nodes, over what that takes; None: not reached."""
    own = curves(run)
    at = next((i for i, e in enumerate(own.get(BASE, ())) if e.nodes == nodes), None)
    if at is None or name not in own:
        return None
    return over_at_equal_mal(points(run, own[name], taken), points(run, own[BASE], taken), at)


def _equal(runs: Runs) -> Section | None:
    found, rows = of(runs, RUNS), list[list[str]]()
    if not found:
        return None
    with plot("c2t-curves", 4.2 * len(found), 3.4) as made:
        panels = made.figure.subplots(1, len(found), squeeze=False)[0]
        for run, axes in zip(found, panels, strict=True):
            for at, (name, entries) in enumerate(curves(run).items()):
                curve = points(run, entries, nodes_of)
                mal, nodes = (column[0].tolist() for column in weighted(curve, every_prompt(curve)))
                axes.plot(nodes, mal, label=name, **line_style(at))
                if name != BASE:
                    cells = [over_base(run, name, n, taken) for taken in _KINDS for n in AT]
                    rows.append([f"{run.path.name}: {name}", *(ratio_text(x) if x else "not reached" for x in cells)])
            axes.set(title=run.path.name, xlabel="verified nodes a token", ylabel="MAL, bonus included", xscale="log")
            axes.legend()
    header = ["run: curve", *(f"nodes, N = {n}" for n in AT), *(f"time, N = {n}" for n in AT)]
    text = (
        "Verified nodes and time of a token, over EAGLE-2's with N nodes at the same MAL (linear between the points), "
        "with 95% bootstrap intervals over prompts. EAGLE-2 and C2T go ten levels deep; OPT-Tree has delta 0.001. The "
        "paper: 0.75 of the nodes, 0.82 of the time. *Not reached*: the curve accepts less, or begins above, or so it "
        f"is in more than 3% of the draws. The coder's classifier has learned from most of {SAMPLES:,} nodes."
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


def _verdict(runs: Runs) -> Verdict | None:
    shares = [over_base(run, OWN_CURVE, n, taken) for run in of(runs, RUNS) for taken in _KINDS for n in AT]
    return Verdict.of([share is not None and share.high < 1 for share in shares])


def _found(runs: Runs) -> str | None:
    parts = list[str]()
    for run in of(runs, RUNS):
        by_size = {n: [over_base(run, OWN_CURVE, n, taken) for taken in _KINDS] for n in AT}
        cells = [f"{' and '.join(map(ratio_text, own))} with N = {n}" for n, own in by_size.items() if None not in own]
        others = [str(n) for n, own in by_size.items() if None in own]
        beyond = f" (N = {', '.join(others)} it does not reach)" if others else ""
        parts.append(f"{', '.join(cells) or 'of no N'} in `{run.path.name}`{beyond}")
    if not parts:
        return None
    return (
        f"At the acceptance of EAGLE-2 with N nodes, C2T takes these shares of its nodes and time: {'; '.join(parts)}."
    )


CHAPTER = Chapter(
    "c2t",
    "C2T",
    "A classifier of the path probability, the entropy and the depth takes 0.75 of EAGLE-2's nodes at equal "
    "acceptance, and 0.82 of the time (Table 1; [how it works](../how-it-works/trees.md)).",
    _found,
    _verdict,
    "The coder's classifier learned from answers to Self-Instruct's prompts, which its head has not seen; SmolLM2's "
    "head has learned from all prompts of its classifier. That may be why the latter has little to correct. Time is "
    "saved where no layer is drafted in vain, by OPT-Tree too. "
    "The coder's classifier is made by `draftree train classifier --target FILE --drafter head "
    "--prompts FILE --max-tokens 48 --samples N --batch 256 --learning-rate 0.005`. "
    "Larger models of one family were not tried.",
    (Part("nodes", RUNS, _equal), Part("figure-5", RUNS, _tops), Part("head", RUNS[:1], _head)),
)
