"""The figures of "Dynamic Tree Speculative Decoding" (Gunjur & Waitz): programs at T = 0.4, over a chain of 4."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from draftree.bench.entries import Entry
from draftree.bench.results import AnswerRecord
from draftree.bench.summary import ALL, Interval, LoadedRun, interval, paired, ratio_text
from draftree.config import MAX_NODES

from ..quality.answers import read_scores
from .planned_runs import MOVED
from .plots import bar_style, line_style, plot
from .sections import SPEEDS, Chapter, Grid, Part, Runs, Section, Verdict, correlation, of, shown, speeds

RUNS = ("widths-smollm2", "programs-coder")
STEPS = ("steps-smollm2",)
ANSWERS = ("answers-coder",)
BASELINE = "chain"
PUBLISHED: Mapping[str, tuple[str, float | None]] = {
    "chain": ("chain of 4", 1.0),
    "static": ("static tree", 1.02),
    "early-stop:nodes=4": ("simple cutoff, 4 tokens", 1.05),
    "early-stop": ("simple cutoff, 31 tokens", 1.05),
    "naive-width:depth=4:nodes=7": ("naive width", None),
    f"dynamic-width-depth:nodes={MAX_NODES}": ("dynamic width and depth", 1.07),
    f"dynamic-width:nodes={MAX_NODES}": ("dynamic width", 1.08),
}
"""Contestant -> (the paper's name, its speed over the chain's there: 1 over the share of time that is left); others are
ours, or the user's."""
_FIG5 = ("early-stop", "naive-width", "dynamic-width", "dynamic-width-depth")


def plain(run: LoadedRun, method: str) -> Entry | None:
    """The contestant of a method without settings, or else its first one."""
    return min(run.named(method), key=lambda e: bool(e.settings), default=None)


def _figure1(runs: Runs) -> Section | None:
    found, text = of(runs, RUNS), list[str]()
    if not found:
        return None
    with plot("gunjur-1", 3.4 * len(found), 3.2) as made:
        panels = made.figure.subplots(1, len(found), squeeze=False)[0]
        for run, axes in zip(found, panels, strict=True):
            steps = [t.steps for r in run.by_method[BASELINE] for t in r.turns if t.steps]
            matched = [x for s in steps for x in s.accepted_entropies]
            missed = [x for s in steps for x in s.rejected_entropies]
            edges = [0.25 * i for i in range(25)]
            axes.hist(matched, bins=edges, label="matched", histtype="bar", **bar_style(0))
            style: dict[str, Any] = {"histtype": "step", "color": "black", "linestyle": "--", "linewidth": 1.5}
            axes.hist(missed, bins=edges, label="mismatched", **style)
            axes.set(
                title=run.path.name,
                xlabel="entropy of the draft distribution, nats",
                ylabel="drafted tokens",
                yscale="log",
            )
            axes.legend()
            above = sum(x > 1 for x in missed) / max(1, sum(x > 1 for x in (*matched, *missed)))
            text.append(
                f"`{run.path.name}`: {len(matched)} matched tokens, mean entropy {statistics.mean(matched):.2f} nats, "
                f"{len(missed)} mismatched of {statistics.mean(missed):.2f}; above 1 nat {above:.0%} are mismatched "
                "(the paper: more than half)."
            )
    return Section("Figure 1: entropy and mismatch", text, figure=("gunjur-1", made.svg), runs=found)


def pairs(own: Sequence[AnswerRecord], base: Sequence[AnswerRecord]) -> list[tuple[AnswerRecord, AnswerRecord]]:
    """Answers of both to the same prompts."""
    other = {r.prompt: r for r in base}
    return [(r, other[r.prompt]) for r in own if r.prompt in other]


def over(run: LoadedRun, method: str, base: str) -> Interval | None:
    """Speed of a method over another's after the prompt, paired by prompt; None where one is not there."""
    own, other = plain(run, method), plain(run, base)
    if own is None or other is None:
        return None
    return _faster(run, own, other)


def _faster(run: LoadedRun, entry: Entry, base: Entry) -> Interval | None:
    return paired(run.by_method[entry.label], run.by_method[base.label], lambda r: r.decode_rate)


def _figure2(runs: Runs) -> Section | None:
    found, rows = of(runs, RUNS), list[list[str]]()
    for run in found:
        base = plain(run, BASELINE)
        for entry in run.of(lambda e: e.drafter is not None):
            f, (name, paper) = run.table[entry.label][ALL], PUBLISHED.get(shown(entry), ("", None))
            faster = None if base is None else _faster(run, entry, base)
            theirs, depth = "" if paper is None else f"{paper:.2f}", f"{f.depth_per_step or 0:.1f}"
            label = f"{shown(entry)} ({name})" if name else shown(entry)
            rows.append([f"{run.path.name}: {label}", theirs, ratio_text(faster), *speeds(f), depth])
    header = ["run: method", "the paper, over the chain", "over the chain", *SPEEDS, "depth"]
    text = (
        f"Speed after the prompt, paired by prompt. `nodes={MAX_NODES}` is no budget, as in the paper; without `nodes` "
        "it is 31. How long early stopping's chains may be the paper does not say: as long as the chain, or 31. Naive "
        "width is three tokens and four leaves at most. Rows without a figure of the paper are ours. Prompts are "
        "MBPP's test tasks. In `programs-coder` they demand an explanation first, since answers to the paper's "
        "HumanEval begin with a copy of the prompt."
    )
    return Section("Figure 2: speed over a chain of 4", [text], Grid(header, rows), runs=found) if found else None


def _thresholds(runs: Runs) -> Section | None:
    found, rows = of(runs, STEPS), list[list[str]]()
    for run in found:
        base = plain(run, "dynamic-width-budget")
        moved = [e for e in run.named("dynamic-width-budget") if e.settings]
        for entry in [base, *moved] if base else ():
            label = entry.label.partition(":")[2] or "as published"
            rows.append([f"{run.path.name}: {label}", *speeds(run.table[entry.label][ALL])])
    text = (
        f"The paper leaves this for later: B(H) with one of its numbers changed ({', '.join(MOVED)}), within 31 nodes. "
        "As published B is 1 below 0.02 nats, 2 below 1, then 4 H up to 7."
    )
    grid = Grid(["run: B(H)", *SPEEDS], rows)
    return Section("The thresholds of B(H)", [text], grid, runs=found) if rows else None


def _figure3(runs: Runs) -> Section | None:
    text, found = list[str](), of(runs, ANSWERS)
    for run in found:
        scores = [(h, s.score["exact"]) for s in read_scores(run.path) if "exact" in s.score for h in s.entropy or ()]
        right, wrong = ([h for h, score in scores if (score == 1) is sign] for sign in (True, False))
        if min(len(right), len(wrong)) < 10:
            text.append(
                f"`{run.path.name}`: {len(right)} right answers and {len(wrong)} wrong ones: too few for a figure."
            )
            continue
        with plot("gunjur-3") as made:
            axes = made.figure.subplots()
            edges = [0.02 * i for i in range(31)]
            axes.hist(right, bins=edges, density=True, label=f"right ({len(right)})", **bar_style(2))
            style: dict[str, Any] = {"histtype": "step", "color": "black", "linestyle": "--"}
            axes.hist(wrong, bins=edges, density=True, label=f"wrong ({len(wrong)})", **style)
            axes.set(xlabel="mean entropy of the target's distributions over the answer, nats", ylabel="density")
            axes.legend()
        of_right, of_wrong = interval(right), interval(wrong)
        apart = of_right.high < of_wrong.low
        text.append(
            f"`{run.path.name}`: {of_right.text()} nats over {len(right)} right answers, {of_wrong.text()} over "
            f"{len(wrong)} wrong ones (the paper: wrong ones have more). "
            f"{'So it is here.' if apart else 'The intervals overlap: a null result.'}"
        )
        return Section("Figure 3: entropy of right and wrong answers", text, figure=("gunjur-3", made.svg), runs=found)
    return Section("Figure 3: entropy of right and wrong answers", text, runs=found) if text else None


def wasted(record: AnswerRecord) -> int:
    """Drafted layers that were thrown away: depth of the tree less the accepted nodes, over all steps."""
    return sum(d - a for t in record.turns if t.steps for d, a in zip(t.steps.depth, t.steps.accepted, strict=True))


def steps(run: LoadedRun, methods: Sequence[str]) -> int:
    """Steps that the answers of these methods took."""
    entries = [entry for method in methods if (entry := plain(run, method))]
    return sum(len(t.steps.gained) for e in entries for r in run.by_method[e.label] for t in r.turns if t.steps)


def _figure5(runs: Runs) -> Section | None:
    return _scattered(runs, "Figure 5: time saved against wasted passes saved", "gunjur-5", BASELINE, _FIG5)


def _figure6(runs: Runs) -> Section | None:
    return _scattered(runs, "Figure 6: dynamic width over a static tree", "gunjur-6", "static", ("dynamic-width",))


def _scattered(runs: Runs, title: str, name: str, base: str, methods: Sequence[str]) -> Section | None:
    """Prompts by layers that were not thrown away for nothing, and by seconds saved; a row of panels a run."""
    found = of(runs, RUNS)
    if not found or any(plain(run, method) is None for run in found for method in (base, *methods)):
        return None
    with plot(name, 1.2 + 2.2 * len(methods), 2.6 * len(found)) as made:
        grid = made.figure.subplots(len(found), len(methods), squeeze=False)
        for run, panels in zip(found, grid, strict=True):
            for number, (method, axes) in enumerate(zip(methods, panels, strict=True)):
                labels = [entry.label for m in (method, base) if (entry := plain(run, m))]
                both = pairs(*(run.by_method[label] for label in labels))
                seconds = [b.seconds - a.seconds for a, b in both]
                style = {**line_style(number), "linestyle": "", "markersize": 3}
                axes.plot([wasted(b) - wasted(a) for a, b in both], seconds, **style)
                axes.axhline(0, color="black", linewidth=0.8)
                axes.axvline(0, color="black", linewidth=0.8)
                axes.axhline(statistics.mean(seconds), color="black", linestyle="--", linewidth=1)
                axes.set_title(f"{run.path.name}\n{_shown(run, method)}", fontsize=7)
        made.figure.supxlabel(f"wasted layers saved over {base}")
        made.figure.supylabel("seconds saved")
    text = [
        f"Each point is a prompt: seconds saved over `{base}`, by drafted layers that were wasted less. Above and "
        "right of the lines is better; the dashed line is the mean. They rest on "
        f"{' and '.join(f'{steps(run, (base, *methods)):,} steps in `{run.path.name}`' for run in found)}.",
        "\n".join(_saved(run, base, method) for run in found for method in methods),
    ]
    return Section(title, text, figure=(name, made.svg), runs=found)


def _shown(run: LoadedRun, method: str) -> str:
    """The contestant of a method without settings, with its node budget."""
    entry = plain(run, method)
    return method if entry is None else shown(entry)


def _saved(run: LoadedRun, base: str, method: str) -> str:
    """What the points of a panel say, in words."""
    both = pairs(*(run.by_method[entry.label] for m in (method, base) if (entry := plain(run, m))))
    share = interval([a.seconds / b.seconds for a, b in both])
    layers, seconds = [float(wasted(b) - wasted(a)) for a, b in both], [b.seconds - a.seconds for a, b in both]
    fewer = statistics.fmean(layers) >= 0
    wasted_less = interval(layers if fewer else [-each for each in layers]).text(".1f")
    return (
        f"- `{run.path.name}`: `{_shown(run, method)}` takes {share.text()} of the time of `{base}` and wastes "
        f"{wasted_less} {'fewer' if fewer else 'more'} layers a prompt; the two have a correlation of "
        f"{correlation(layers, seconds)}."
    )


def _gains(runs: Runs) -> list[Interval]:
    """Dynamic width over the chain, and over the static tree, of each run."""
    return [x for run in of(runs, RUNS) for base in (BASELINE, "static") if (x := over(run, "dynamic-width", base))]


def _verdict(runs: Runs) -> Verdict | None:
    return Verdict.of([found.low > 1 for found in _gains(runs)])


def _found(runs: Runs) -> str | None:
    parts = [
        f"{ratio_text(over(run, 'dynamic-width', BASELINE))} of the chain's speed and "
        f"{ratio_text(over(run, 'dynamic-width', 'static'))} of the static tree's in `{run.path.name}`"
        for run in of(runs, RUNS)
    ]
    if not parts:
        return None
    small = " and ".join(
        f"{ratio_text(_faster(run, entry, base))} in `{run.path.name}`"
        for run in of(runs, RUNS)
        for entry in run.named("dynamic-width")
        if entry.nodes == 4 and (base := plain(run, BASELINE))
    )
    return (
        f"Without a node budget dynamic width has {', and '.join(parts)}. With 4 nodes, as many as the chain has, its "
        f"speed over the chain's is {small}."
    )


CHAPTER = Chapter(
    "gunjur",
    "Dynamic Tree Speculative Decoding (Gunjur & Waitz)",
    "Trees whose width follows the draft's entropy save 7.16% of the time of a chain of 4 tokens, and 4.9% of a "
    "static tree's: 1.08 and 1.05 times their speed (Figure 2; GPT-2 large with GPT-2, HumanEval, T = 0.4).",
    _found,
    _verdict,
    "B(H) follows entropy and ignores what a node costs. On two cores a pass over a tree of 40 nodes takes several "
    "passes over one token ([OPT-Tree, Figure 3](opt-tree.md)); on the paper's GPU it takes about one. So the cheap "
    "chain of 4 beats wide trees here, and is beaten by dynamic width within 4 nodes. Their chain also recomputes the "
    "drafter's context at every step, which makes it slower than ours. Layers that are not wasted save little time "
    "(Figure 5): what is scarce here is nodes. `dynamic-width-depth` follows a rule of ours, since the paper gives "
    "none ([trees](../how-it-works/trees.md)).",
    (
        Part("figure-1", RUNS, _figure1),
        Part("figure-2", RUNS, _figure2),
        Part("thresholds", STEPS, _thresholds),
        Part("figure-3", ANSWERS, _figure3),
        Part("figure-5", RUNS, _figure5),
        Part("figure-6", RUNS, _figure6),
    ),
)
