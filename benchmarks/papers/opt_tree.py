"""The tables and figures of "OPT-Tree": MT-Bench and GSM8K, trees of 25 nodes, and sweeps."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product, zip_longest
from typing import NamedTuple

from draftree.bench.entries import Entry
from draftree.bench.results import BINS, AnswerRecord, StepColumns
from draftree.bench.summary import ALL, Interval, LoadedRun, MethodFigures, paired, ratio_text

from .plots import bar_style, line_style, plot
from .sections import SPEEDS, Chapter, Grid, Part, Runs, Section, Verdict, correlation, of, shown, speeds

TREES = ("binary", "eagle", "sequoia", "opt-tree", "eagle2")
MAIN = ("trees-smollm2", "trees-coder")
PLAIN = ("plain-smollm2", "plain-coder")
GSM8K = ("gsm8k-smollm2", "gsm8k-coder")
TABLES = {**dict.fromkeys((*MAIN, *GSM8K), 0.0), **dict.fromkeys(PLAIN, 1.0)}
"""Run -> its temperature."""
SWEEP = ("sizes-smollm2", "sizes-coder")
_CASE_TOKENS = 160


def tree(run: LoadedRun, method: str, temperature: float = 0.0) -> Entry | None:
    """The contestant with the paper's 25 nodes."""
    return next((e for e in run.named(method) if e.nodes == 25 and e.temperature == temperature), None)


def accepts(run: LoadedRun, method: str, base: str) -> Interval | None:
    """Acceptance length of a method's trees over that of another's of 25 nodes, paired by prompt; None without both."""
    a, b = (tree(run, name, TABLES[run.path.name]) for name in (method, base))
    return None if a is None or b is None else paired(run.by_method[a.label], run.by_method[b.label], mal)


def fastest(run: LoadedRun, method: str = "opt-tree") -> Entry | None:
    """The contestant of a method whose number of nodes is fastest, as the paper chooses it."""
    known = [(x.mean, e.label, e) for e in run.named(method) if (x := run.table[e.label][ALL].speedup_decode)]
    return max(known)[2] if known else None


def mal(record: AnswerRecord) -> float | None:
    """Tokens a pass of one answer."""
    return record.gained / record.passes if record.passes else None


def _table(name: str, names: Sequence[str], title: str, paper: str, temperature: float) -> Part:
    """Every contestant of the runs at one temperature."""

    def make(runs: Runs) -> Section | None:
        rows, found = list[list[str]](), of(runs, names)
        for run in found:
            for entry in run.of(lambda e: e.temperature == temperature and e.drafter is not None):
                rows.append([f"{run.path.name}: {shown(entry)}", *speeds(run.table[entry.label][ALL])])
        if not rows:
            return None
        return Section(title, [paper], Grid(["run: tree", *SPEEDS], rows), runs=found)

    return Part(name, names, make)


def _steps(run: LoadedRun, entry: Entry) -> list[StepColumns]:
    return [t.steps for r in run.by_method[entry.label] for t in r.turns if t.steps]


def _figure5(runs: Runs) -> Section | None:
    found, text = of(runs, MAIN), list[str]()
    if not found:
        return None
    with plot("opt-tree-5", 4.4 * len(found), 4.0) as made:
        panels = made.figure.subplots(1, len(found), squeeze=False)[0]
        for run, axes in zip(found, panels, strict=True):
            entry = tree(run, "opt-tree")
            steps = _steps(run, entry) if entry else []
            pairs = [(e, g) for s in steps for e, g in zip(s.expected, s.gained, strict=True)]
            if len(pairs) < 2:
                return None
            counts = Counter((min(15, round(e)), min(15, g)) for e, g in pairs)
            high = max(2, *(x for key in counts for x in key))
            cells = [[counts[x, y] ** 0.5 for x in range(1, high + 1)] for y in range(1, high + 1)]
            axes.imshow(cells, origin="lower", cmap="Greys", extent=(0.5, high + 0.5, 0.5, high + 0.5))
            most = max(counts.values())
            for (x, y), count in counts.items():
                color = "white" if 4 * count > most else "black"
                axes.text(x, y, str(count), ha="center", va="center", fontsize=6, color=color)
            axes.set(title=run.path.name, xlabel="E(A), rounded", ylabel="acceptance length")
            expected, gained = [e for e, _ in pairs], [float(g) for _, g in pairs]
            text.append(
                f"`{run.path.name}`: {len(pairs)} steps, mean E(A) by the drafter's own probabilities "
                f"{statistics.mean(expected):.2f}, mean acceptance length {statistics.mean(gained):.2f}, correlation "
                f"{correlation(expected, gained)}."
            )
    return Section("Figure 5: E(A) and acceptance length", text, figure=("opt-tree-5", made.svg), runs=found)


class _Split(NamedTuple):
    """Where a step's time goes: shares of it."""

    label: str
    shares: tuple[float, float, float, float]


def _split(run: LoadedRun, entry: Entry) -> _Split | None:
    f = run.table[entry.label][ALL]
    after, steps = (f.seconds["total"] or 0.0) - (f.seconds["prefill"] or 0.0), _steps(run, entry)
    if f.share is None or not after:
        return None
    drafter = sum(s.drafter_seconds for s in steps) / after
    target = sum(s.target_seconds for s in steps) / after
    trees, rest = f.share["draft"] - drafter, 1 - f.share["draft"] - target
    return _Split(f"{run.path.name}: {shown(entry)}", (drafter, trees, target, rest))


def _figure7(runs: Runs) -> Section | None:
    found = of(runs, MAIN)
    entries = [(run, e) for run in found for m in TREES if (e := tree(run, m))]
    splits = [s for run, e in entries if (s := _split(run, e)) is not None]
    if not splits:
        return None
    parts = ("drafter's passes", "trees", "target's passes", "everything else")
    with plot("opt-tree-7", 6.4, 1.2 + 0.32 * len(splits)) as made:
        axes = made.figure.subplots()
        left = [0.0] * len(splits)
        for part, name in enumerate(parts):
            times = [100 * s.shares[part] for s in splits]
            axes.barh([s.label for s in splits], times, left=left, label=name, **bar_style(part))
            left = [a + b for a, b in zip(left, times, strict=True)]
        axes.invert_yaxis()
        axes.set(xlabel="per cent of a step")
        made.figure.legend(loc="outside upper center", ncols=4, frameon=False)
    text = [
        f"Trees take {min(own):.1%} to {max(own):.1%} of a step in `{run.path.name}`."
        for run in found
        if (own := [s.shares[1] for s in splits if s.label.startswith(f"{run.path.name}: ")])
    ]
    text.append("The paper: 6.3% in its smallest setting.")
    return Section("Figure 7: where a step's time goes", [" ".join(text)], figure=("opt-tree-7", made.svg), runs=found)


def _figure10(runs: Runs) -> Section | None:
    found = of(runs, MAIN[:1]) or of(runs, MAIN[1:])
    entry = tree(found[0], "opt-tree") if found else None
    if entry is None:
        return None
    (run,) = found
    ordered = sorted(run.by_method[entry.label], key=lambda r: r.gained / max(1, r.passes or 1))
    record = ordered[len(ordered) // 2]
    turn = record.turns[0]
    pieces = list(zip(turn.pieces or [], map(bool, turn.drafted or []), strict=True))[:_CASE_TOKENS]
    case = "".join(piece if drafted or not piece.strip() else f"[{piece}]" for piece, drafted in pieces)
    text = (
        f"Prompt {record.prompt} ({record.category}), the median by acceptance, with "
        f"{record.gained / max(1, record.passes or 1):.2f} tokens a target pass. The target's own tokens are in "
        "brackets, the others were drafted."
    )
    return Section("Figure 10: a case", [text, "\n".join(f"> {line}" for line in case.splitlines())], runs=found)


def _figure11(runs: Runs) -> Section | None:
    found = of(runs, MAIN)
    if not found:
        return None
    with plot("opt-tree-11") as made:
        axes = made.figure.subplots()
        for at, run in enumerate(found):
            entry = tree(run, "opt-tree")
            steps = _steps(run, entry) if entry else []
            reached = _sum([s.reached_by_probability for s in steps])
            accepted = _sum([s.accepted_by_probability for s in steps])
            points = [((i + 0.5) / BINS, p / j) for i, (j, p) in enumerate(zip(reached, accepted, strict=True)) if j]
            axes.plot([x for x, _ in points], [y for _, y in points], label=run.path.name, **line_style(at))
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.6)
        axes.set(xlabel="probability by the draft", ylabel="accepted share", xlim=(0, 1), ylim=(0, 1))
        axes.legend()
    text = (
        "Share of accepted nodes among those whose parent was accepted, by the drafter's probability. The paper: the "
        "two go together."
    )
    return Section("Figure 11: acceptance by draft probability", [text], figure=("opt-tree-11", made.svg), runs=found)


def _sum(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def _layer(figures: MethodFigures) -> str:
    """Seconds of drafting a layer over those of verifying the tree: the paper's mu."""
    if figures.share is None or not figures.depth_per_step or not figures.share["verify"]:
        return ""
    return f"{figures.share['draft'] / figures.share['verify'] / figures.depth_per_step:.2f}"


def _sweep(
    names: Sequence[str],
    title: str,
    text: str,
    figure: str,
    axis: str,
    position: Callable[[Entry], float | None],
    base: int | None = None,
    methods: Sequence[str] = ("opt-tree",),
    *,
    table: bool = True,
) -> Part:
    """MAL and speed of methods along one of their settings, drawn and as a table."""

    def make(runs: Runs) -> Section | None:
        found, rows = of(runs, names), list[list[str]]()
        if not found:
            return None
        with plot(figure, 7.2, 3.2) as made:
            left, right = made.figure.subplots(1, 2)
            for at, (run, method) in enumerate(product(found, methods)):
                points = sorted(
                    (p, run.table[e.label][ALL]) for e in run.named(method) if (p := position(e)) is not None
                )
                name = f"{run.path.name}: {method}" if len(methods) > 1 else run.path.name
                xs = [x for x, _ in points]
                ratios = [f.speedup_decode.mean if f.speedup_decode else 0.0 for _, f in points]
                left.plot(xs, [f.mal or 0.0 for _, f in points], label=name, **line_style(at))
                right.plot(xs, ratios, label=name, **line_style(at))
                default = [("auto", run.table[e.label][ALL]) for e in run.named(method) if position(e) is None]
                for x, f in (*((f"{x:g}", f) for x, f in points), *default):
                    rows.append([f"{name}: {x}", *speeds(f), _layer(f)])
            left.set(xlabel=axis, ylabel="MAL, bonus included")
            right.set(xlabel=axis, ylabel="over AR", ylim=(0, None))
            left.legend()
            for axes in (left, right):
                if base:
                    axes.set_xscale("log", base=base)
        grid = Grid([f"run: {axis}", *SPEEDS, "a drafted layer"], rows) if table else None
        return Section(title, [text], grid, (figure, made.svg), runs=found)

    return Part(figure.replace("opt-tree", "figure"), names, make)


def _figure3(runs: Runs) -> Section | None:
    """What a pass takes by its tokens, of the trees that runs verified."""
    found, rows = of(runs, SWEEP), list[list[str]]()
    for run in found:
        points = [
            (f.nodes_per_step, sum(s.target_seconds for s in _steps(run, e)) / (f.tokens / f.mal))
            for e in run.of(lambda e: e.method == "opt-tree" or e.drafter is None)
            if (f := run.table[e.label][ALL]).mal and f.nodes_per_step is not None
        ]
        if points:
            points.sort()
            rows += [[f"{run.path.name}: {1 + n:.0f}", f"{1e3 * x:.1f}", f"{x / points[0][1]:.1f}"] for n, x in points]
    text = (
        "Mean time of a target pass, prompts included, by its mean number of tokens. The paper: a pass over 10 tokens "
        "takes as long as one over 200."
    )
    grid = Grid(["run: tokens of a pass", "ms", "passes over one"], rows)
    return Section("Figure 3: time by input length", [text], grid, runs=found) if rows else None


def _better(run: LoadedRun) -> list[str]:
    """The trees of 25 nodes that accept more than OPT-Tree, by how much, where the interval is above 1."""
    found = {name: accepts(run, name, "opt-tree") for name in TREES if name != "opt-tree"}
    return [f"`{name}` in `{run.path.name}` ({ratio_text(x)})" for name, x in found.items() if x and x.low > 1]


def _verdict(runs: Runs) -> Verdict | None:
    shown = list[bool]()
    for run in of(runs, tuple(TABLES)):
        accepted = [accepts(run, "opt-tree", base) for base in ("eagle", "binary")]
        if entry := fastest(run):
            shown += [x.low > 1 for x in (*accepted, run.table[entry.label][ALL].speedup_decode) if x]
    return Verdict.of(shown)


def _found(runs: Runs) -> str | None:
    parts = [
        f"{ratio_text(accepts(run, 'opt-tree', 'eagle'))} and {ratio_text(accepts(run, 'opt-tree', 'binary'))} at "
        f"{ratio_text(run.table[entry.label][ALL].speedup_decode)} of AR decoding's speed with 25 nodes, and "
        f"{ratio_text(run.table[best.label][ALL].speedup_decode)} with {best.nodes}, in `{run.path.name}`"
        for run in of(runs, tuple(TABLES))
        if (entry := tree(run, "opt-tree", TABLES[run.path.name])) and (best := fastest(run))
    ]
    if not parts:
        return None
    beaten = [name for run in of(runs, tuple(TABLES)) for name in _better(run)]
    more = f"Trees that accept more: {', '.join(beaten)}." if beaten else "No other tree is shown to accept more."
    return f"OPT-Tree accepts these multiples of EAGLE's tree and of a binary one: {'; '.join(parts)}. {more}"


CHAPTER = Chapter(
    "opt-tree",
    "OPT-Tree",
    "The most probable paths accept 1.04 to 1.56 times as much a step as EAGLE's fixed tree of as many nodes and 1.20 "
    "to 1.60 times as much as a binary one, at 0.96 to 3.21 times the speed of AR decoding (Tables 1 and 2; "
    "[how it works](../how-it-works/trees.md)).",
    _found,
    _verdict,
    "On two cores a pass over 26 tokens takes several passes over one (Figure 3), on the paper's GPUs about one. So "
    "small trees are fastest here. The paper chooses the number of nodes for speed, of 25, 50 and 60. Sequoia's trees "
    "are those of `draftree calibrate --drafter head --prompts FILE --max-tokens 32 --nodes N` with 40 prompts of "
    "Self-Instruct: up to 8 levels deep, where OPT-Tree has no bound. SmolLM2's head has learned from these prompts, "
    "so it is right more often there than elsewhere.",
    (
        _table(
            "table-1",
            MAIN,
            "Table 1: MT-Bench, greedy",
            "The paper, LLaMA-2 7B with 68M: MAL 2.12 binary, 2.47 EAGLE, 2.58 OPT-Tree; 70B with 7B: 4.84, 4.97, "
            "7.74.",
            0.0,
        ),
        _table(
            "table-2",
            GSM8K,
            "Table 2: GSM8K, greedy",
            "The paper: OPT-Tree accepts more than both fixed trees here too.",
            0.0,
        ),
        _table(
            "table-3",
            PLAIN,
            "Table 3: MT-Bench at T = 1, drafts ranked as the paper does",
            "The paper, LLaMA-2 7B: MAL 2.72 with the 68M, 4.07 with EAGLE's head.",
            1.0,
        ),
        Part("figure-3", SWEEP, _figure3),
        Part("figure-5", MAIN, _figure5),
        _sweep(
            SWEEP,
            "Figure 6: MAL by tree size",
            "The paper: MAL grows beyond 500 nodes, to 10 tokens a step with a strong drafter; Sequoia's grows less.",
            "opt-tree-6",
            "node budget",
            lambda e: float(e.nodes),
            2,
            ("opt-tree", "sequoia"),
        ),
        Part("figure-7", MAIN, _figure7),
        _sweep(
            ("deltas-smollm2", "deltas-coder"),
            "Figure 8: the threshold",
            "The paper: MAL falls as the threshold rises; speed is best between mu and 1. mu, the last column, is the "
            "time of drafting a layer over that of verifying the tree. `auto`, the default, takes it from live times.",
            "opt-tree-8",
            "threshold on the gain in E(A)",
            lambda e: float(e.settings["delta"]) if "delta" in e.settings else None,
        ),
        _sweep(
            ("temperatures-smollm2", "temperatures-coder"),
            "Figure 9: the temperature",
            "Drafts ranked as the paper does (`--candidates plain`). The paper: both are slightly lower at T = 1.",
            "opt-tree-9",
            "temperature",
            lambda e: e.temperature,
            table=False,
        ),
        Part("figure-10", MAIN, _figure10),
        Part("figure-11", MAIN, _figure11),
    ),
)
