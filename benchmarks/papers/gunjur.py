"""The figures of "Dynamic Tree Speculative Decoding" (Gunjur & Waitz) from our runs.

A run has them when it has the paper's baseline, a chain of 4 drafted tokens (``chain``).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from draftree.bench.contestants import Entry
from draftree.bench.results import AnswerRecord
from draftree.bench.summary import Interval, LoadedRun, interval

from ..quality.answers import read_scores
from .plots import bar_style, line_style, plot
from .sections import Grid, Section, first

PAPER = "Gunjur & Waitz"
BASELINE = "chain"
VARIANTS = {
    "static": ("static tree", 2.3, 10.351),
    "early-stop": ("simple cutoff", 4.43, 10.556),
    "naive-width": ("naive width", None, None),
    "dynamic-width-depth": ("dynamic width and depth", 6.65, 10.83),
    "dynamic-width": ("dynamic width", 7.16, 10.88),
}
"""Method -> (the paper's name, per cent of time that it saves there, tokens a second there)."""
_FIG5 = ("early-stop", "naive-width", "dynamic-width", "dynamic-width-depth")


def sections(runs: Sequence[LoadedRun]) -> list[Section]:
    """Those that the runs have."""
    made = [_figure1(runs), _figure2(runs), _figure3(runs), _figure5(runs), _figure6(runs)]
    return [section for section in made if section is not None]


def _compared(runs: Sequence[LoadedRun]) -> LoadedRun | None:
    return first(runs, lambda run: bool(run.named(BASELINE)) and any(run.named(m) for m in VARIANTS))


def baseline(run: LoadedRun) -> Entry:
    """The chain."""
    return run.named(BASELINE)[0]


def _figure1(runs: Sequence[LoadedRun]) -> Section | None:
    run = first(runs, lambda run: bool(run.named(BASELINE)))
    if run is None:
        return None
    steps = [t.steps for r in run.by_method[baseline(run).label] for t in r.turns if t.steps]
    matched = [x for s in steps for x in s.accepted_entropies]
    missed = [x for s in steps for x in s.rejected_entropies]
    if not matched or not missed:
        return None
    edges = [0.25 * i for i in range(25)]
    with plot("gunjur-1") as made:
        axes = made.figure.subplots()
        axes.hist(matched, bins=edges, label="matched", histtype="bar", **bar_style(0))
        axes.hist(missed, bins=edges, label="mismatched", histtype="step", color="black", linestyle="--", linewidth=1.5)
        axes.set(xlabel="entropy of the draft distribution, nats", ylabel="drafted tokens")
        axes.legend()
    over = [x for x in [*matched, *missed] if x > 1]
    text = (
        f"{len(matched)} matched and {len(missed)} mismatched tokens of {baseline(run).label}: mean entropy "
        f"{statistics.mean(matched):.2f} and {statistics.mean(missed):.2f} nats. Above 1 nat, where the paper stops, "
        f"{sum(x > 1 for x in missed) / max(1, len(over)):.0%} are mismatched."
    )
    return Section(
        f"{PAPER}, Figure 1: entropy and mismatch", [text], figure=("gunjur-1", made.svg), commands=[run.command]
    )


def pairs(own: Sequence[AnswerRecord], base: Sequence[AnswerRecord]) -> list[tuple[AnswerRecord, AnswerRecord]]:
    """Answers of both to the same prompts."""
    other = {(r.prompt, r.repeat): r for r in base}
    return [(r, other[r.prompt, r.repeat]) for r in own if (r.prompt, r.repeat) in other]


def saving(own: Sequence[AnswerRecord], base: Sequence[AnswerRecord]) -> Interval:
    """Share of the time for a token that is saved, mean over prompts."""
    shares: dict[str, list[float]] = {}
    for a, b in pairs(own, base):
        shares.setdefault(a.prompt, []).append(1 - b.rate / a.rate)
    return interval([statistics.mean(x) for x in shares.values()])


def _figure2(runs: Sequence[LoadedRun]) -> Section | None:
    run = _compared(runs)
    if run is None:
        return None
    base = baseline(run)
    rate = run.table[base.label]["all"].tokens_per_second
    rows = [[base.label, "0%", f"{rate:.2f}", "0%", "10.08"]]
    for method, (name, saved, paper_rate) in VARIANTS.items():
        for entry in run.named(method):
            found = saving(run.by_method[entry.label], run.by_method[base.label])
            rows.append(
                [
                    f"{entry.label} ({name})",
                    f"{100 * found.mean:.1f}% [{100 * found.low:.1f}, {100 * found.high:.1f}]",
                    f"{run.table[entry.label]['all'].tokens_per_second:.2f}",
                    "" if saved is None else f"{saved}%",
                    "" if paper_rate is None else f"{paper_rate:.2f}",
                ]
            )
    return Section(
        f"{PAPER}, Figure 2: time saved over a chain of 4",
        [
            "Time for a token against the chain's, mean over prompts and its interval. The paper: GPT-2 large with "
            "GPT-2, HumanEval, T = 0.4."
        ],
        Grid(["method", "time saved", "tokens/s", "the paper: saved", "tokens/s"], rows),
        commands=[run.command],
    )


def _figure3(runs: Sequence[LoadedRun]) -> Section | None:
    def scored(run: LoadedRun) -> list[tuple[float, float]]:
        return [(h, s.score["exact"]) for s in read_scores(run.path) if "exact" in s.score for h in s.entropy or ()]

    run = first(runs, lambda run: run.suite == "gsm8k" and bool(scored(run)))
    if run is None:
        return None
    right = [h for h, score in scored(run) if score == 1]
    wrong = [h for h, score in scored(run) if score != 1]
    if not right or not wrong:
        return None
    with plot("gunjur-3") as made:
        axes = made.figure.subplots()
        edges = [0.05 * i for i in range(31)]
        axes.hist(right, bins=edges, density=True, label=f"right ({len(right)})", **bar_style(2))
        axes.hist(
            wrong,
            bins=edges,
            density=True,
            label=f"wrong ({len(wrong)})",
            histtype="step",
            color="black",
            linestyle="--",
        )
        axes.set(xlabel="mean entropy of the target's distributions over the answer, nats", ylabel="density")
        axes.legend()
    text = (
        f"Mean entropy of the target's distributions: {statistics.mean(right):.2f} nats over {len(right)} right "
        f"answers, {statistics.mean(wrong):.2f} over {len(wrong)} wrong ones. The paper: Llama 3.2 1B."
    )
    return Section(
        f"{PAPER}, Figure 3: entropy of right and wrong answers",
        [text],
        figure=("gunjur-3", made.svg),
        commands=[run.command],
    )


def wasted(record: AnswerRecord) -> int:
    """Drafted layers that were thrown away: depth of the tree less the accepted nodes, over all steps."""
    return sum(d - a for t in record.turns if t.steps for d, a in zip(t.steps.depth, t.steps.accepted, strict=True))


def _figure5(runs: Sequence[LoadedRun]) -> Section | None:
    run = _compared(runs)
    methods = [e for m in _FIG5 for e in run.named(m)] if run else []
    if run is None or not methods:
        return None
    svg = _scatter("gunjur-5", run, baseline(run), methods)
    text = (
        "Each point is a prompt: seconds saved over the chain, against drafted layers that were thrown away less than "
        "by the chain. Above and right of the lines is better; the dashed line is the mean."
    )
    return Section(
        f"{PAPER}, Figure 5: time saved against wasted passes saved",
        [text],
        figure=("gunjur-5", svg),
        commands=[run.command],
    )


def _figure6(runs: Sequence[LoadedRun]) -> Section | None:
    run = first(runs, lambda run: bool(run.named("static") and run.named("dynamic-width")))
    if run is None:
        return None
    base, own = run.named("static")[0], run.named("dynamic-width")[0]
    found = saving(run.by_method[own.label], run.by_method[base.label])
    text = (
        f"{own.label} saves {100 * found.mean:.1f}% [{100 * found.low:.1f}, {100 * found.high:.1f}] of {base.label}'s "
        "time for a token; the paper's boosts time savings by 4.9%."
    )
    svg = _scatter("gunjur-6", run, base, [own])
    return Section(
        f"{PAPER}, Figure 6: dynamic width over a static tree", [text], figure=("gunjur-6", svg), commands=[run.command]
    )


def _scatter(name: str, run: LoadedRun, base: Entry, methods: Sequence[Entry]) -> str:
    columns = min(2, len(methods))
    lines = -(-len(methods) // columns)
    with plot(name, 3.4 * columns, 2.8 * lines) as made:
        grid = made.figure.subplots(lines, columns, squeeze=False)
        for axes in grid.flat[len(methods) :]:
            axes.set_visible(False)
        for number, (entry, axes) in enumerate(zip(methods, grid.flat, strict=False)):
            both = pairs(run.by_method[entry.label], run.by_method[base.label])
            saved = [b.seconds - a.seconds for a, b in both]
            style = {**line_style(number), "linestyle": ""}
            axes.plot([wasted(b) - wasted(a) for a, b in both], saved, **style)
            axes.axhline(0, color="black", linewidth=0.8)
            axes.axvline(0, color="black", linewidth=0.8)
            axes.axhline(statistics.mean(saved), color="black", linestyle="--", linewidth=1)
            axes.set(title=f"{entry.label} over {base.label}", xlabel="wasted layers saved", ylabel="seconds saved")
    return made.svg
