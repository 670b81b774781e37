"""The first screen of the report: what the papers claim, what is found here, on what."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftree.bench.entries import Entry
from draftree.bench.summary import ALL, LoadedRun, markdown, number, ratio_text

from . import confidence, dsbd, gunjur, hsddw, opt_tree
from .confidence import nodes_a_token
from .plan import CODER, SMOLLM2
from .sections import SPEEDS, Runs, of, sources, speeds

MODELS = (CODER, SMOLLM2)
CLOCK = tuple(f"{suite}clock-{models}" for models in MODELS for suite in ("", "gsm8k-", "humaneval-"))


def _speed(run: LoadedRun, entry: Entry | None) -> str:
    return "" if entry is None else ratio_text(run.table[entry.label][ALL].speedup_decode)


def _each(runs: Runs, name: str, of_run: Callable[[LoadedRun], str]) -> list[str]:
    """A figure of a run for each pair of models; empty where it is not there."""
    return [of_run(runs[f"{name}-{m}"]) if f"{name}-{m}" in runs else "" for m in MODELS]


def _hsddw(run: LoadedRun) -> str:
    return _speed(run, next(iter(run.named("hsddw")), None))


def _strongest(run: LoadedRun) -> str:
    return f"{max(run.table[e.label][ALL].mal or 0.0 for e in run.named('opt-tree')):.2f}"


def _auto(runs: Runs) -> list[str]:
    """Suites in which ``auto`` is slower than AR decoding."""
    cells = []
    for models in MODELS:
        found = of(runs, [name for name in CLOCK if name.endswith(models)])
        speeds = [f.mean for run in found for e in run.named("auto") if (f := run.table[e.label][ALL].speedup_decode)]
        cells.append(f"{min(speeds):.2f} to {max(speeds):.2f}" if speeds else "")
    return cells


def first_table(runs: Runs) -> list[str]:
    """One table of a dozen rows, and where it is from."""

    def width(base: str) -> list[str]:
        return _each(runs, "widths", lambda r: gunjur.saved(runs, r.path.name, "dynamic-width", base))

    def accepted(base: str) -> list[str]:
        return _each(runs, "trees", lambda r: opt_tree.mal_ratio(r, "opt-tree", base))

    speed = _each(runs, "trees", lambda r: _speed(r, opt_tree.tree(r, "opt-tree")))
    nodes = _each(
        runs, "confidence", lambda r: number(confidence.over_base(r, confidence.OWN_CURVE, 32, nodes_a_token))
    )
    window = _each(runs, "windows", lambda r: hsddw.best_window(r).partition(" of")[0])
    rows = [
        ["Gunjur & Waitz: width by entropy saves time over a chain of 4", "7.2%", *width(gunjur.BASELINE)],
        ["the same over a static tree", "4.9%", *width("static")],
        ["OPT-Tree: tokens a pass, over EAGLE's tree of 25 nodes", "1.04 to 1.56", *accepted("eagle")],
        ["the same over a binary tree", "1.20 to 1.60", *accepted("binary")],
        ["its speed over AR decoding", "0.96 to 3.21", *speed],
        ["tokens a pass of large trees, strong drafter", "10", *_each(runs, "sizes", _strongest)],
        ["C2T: nodes at the acceptance of EAGLE-2's 32", "0.75", *nodes],
        ["HSDDW: speed over AR decoding, MT-Bench", "2.91", *_each(runs, "levels", _hsddw)],
        ["its window over the best fixed one", "as fast", *window],
        ["DSBD: speed over beam sampling, SQuAD, prompts included", "1.5 to 1.9", dsbd.speedup(runs, "squad"), ""],
        ["ours, `auto`: speed over AR decoding by the clock, worst and best of three suites", "", *_auto(runs)],
    ]
    rows = [row for row in rows if any(row[2:])]
    if not rows:
        return []
    text = (
        "Ratios with 95% intervals over prompts; speed is that after the prefill. **coder**: Qwen2.5-Coder-1.5B, "
        "drafted for by its 0.5B, both Q4_K_M. **SmolLM2**: SmolLM2-135M-Instruct, Q4_1, with its draft head. Both run "
        "over llama.cpp on a CPU, where a pass over n tokens costs half of n passes or more: trees accept what "
        "the papers say, and gain less time or lose some."
    )
    return [markdown(["claim", "the paper", "coder", "SmolLM2"], rows), text]


def by_clock(runs: Runs) -> list[str]:
    """``auto`` beside a chain, with the drafter that each pair of models has, all of it decoded."""
    found, rows = of(runs, CLOCK), list[list[str]]()
    for run in found:
        for entry in run.of(lambda e: e.drafter is not None):
            rows.append([f"{run.path.name}: {entry.label}", *speeds(run.table[entry.label][ALL])])
    if not rows:
        return []
    text = "With the pair's draft model, or SmolLM2's head; what `auto` drafts with by default is in measurements.md."
    grid = markdown(["run: method", *SPEEDS], rows)
    return ["### By the clock", text, grid, sources(found)]


def every(runs: Runs) -> list[str]:
    """Each method, scheme and kind of drafter on real prompts."""
    parts = by_clock(runs)
    for name, title in (
        ("every-smollm2", "Every method"),
        ("schemes-smollm2", "Every verification scheme, at T = 1"),
        ("drafters-smollm2", "Every kind of drafter"),
    ):
        if name in runs:
            run = runs[name]
            rows = []
            for entry in run.of(lambda e: True):
                f = run.table[entry.label][ALL]
                equal = "" if f.ids_equal is None else f"{f.ids_equal:.0%}"
                rows.append([entry.label, *speeds(f), equal])
            header = ["contestant", *SPEEDS, "ids equal AR's"]
            parts += [f"### {title}", markdown(header, rows), sources([run])]
    return ["## All of it on real prompts", *parts] if parts else []


def made_of(runs: Sequence[LoadedRun]) -> list[str]:
    """Machine, versions and commands of the runs."""
    if not runs:
        return []
    text = (
        "Runs with `--replay` decode each prompt once and draft along the answer: trees and acceptance are those of "
        "decoding, drafting is timed (a draft model's reading of the prompt with it), and a pass of the target takes "
        "what its measured cost profile says; all others are by the clock. `make results` makes what is missing of "
        "them."
    )
    parts = ["## The runs", text]
    for where in dict.fromkeys(map(_where, runs)):
        parts += [f"{where}:", "\n".join(f"    {run.command}" for run in runs if _where(run) == where)]
    return parts


def _where(run: LoadedRun) -> str:
    """Machine, versions and commit of a run."""
    machine, versions = run.config["machine"], run.config["versions"].items()
    computer = f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads"
    return f"{computer}; {', '.join(f'{n} {v}' for n, v in versions)}; commit {run.config.get('commit')}"
