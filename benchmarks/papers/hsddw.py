"""HSDDW's claims: speed with two levels of drafters, and no window to be tuned."""

from __future__ import annotations

from draftree.bench.entries import Entry
from draftree.bench.summary import ALL, Interval, LoadedRun, paired, ratio_text

from .sections import SPEEDS, Chapter, Grid, Part, Runs, Section, Verdict, of, shown, speeds

LEVELS = ("levels-smollm2", "levels-coder", "gsm8k-levels-smollm2", "gsm8k-levels-coder")
WINDOWS = ("windows-smollm2", "windows-coder")
ONCE, ENDING = "pending=1", "rejected=end"


def _variant(entry: Entry) -> str:
    """How the paper calls it."""
    drafter = entry.drafter or ""
    first = "head" if drafter.startswith("head>") else "lookup"
    rule = "no loop-back" if ONCE in drafter else "ends, as published" if ENDING in drafter else "goes on"
    return f"{first}, {rule}"


def _levels(runs: Runs) -> Section | None:
    found, rows = of(runs, LEVELS), list[list[str]]()
    for run in found:
        rows += [[f"{run.path.name}: {_variant(e)}", *speeds(run.table[e.label][ALL])] for e in run.named("hsddw")]
    text = (
        "Three levels: `lookup` or the target's head proposes, the coder's 0.5B or SmolLM2's head verifies and "
        "corrects, and the target verifies. After a token that the middle level rejects the run *goes on* below its "
        "correction (ours, the default) or *ends* there (as published). *No loop-back* is one round a proposal. The "
        "paper: 2.91 times AR decoding on MT-Bench; on GSM8K no loop-back was faster."
    )
    grid = Grid(["run: first level, rule", *SPEEDS], rows)
    return Section("Speed, and loop-back or not", [text], grid, runs=found) if rows else None


def _windows(runs: Runs) -> Section | None:
    found, rows = of(runs, WINDOWS), list[list[str]]()
    for run in found:
        for entry in run.of(lambda e: e.drafter is not None):
            rows.append([f"{run.path.name}: {shown(entry)}", *speeds(run.table[entry.label][ALL])])
    text = (
        "Two levels: chains of a fixed window, and chains whose window follows the entropy of rejected tokens up to a "
        "cap (`hsddw`). The paper: a fixed window is best at 7 and slower beyond; the dynamic one is flat."
    )
    header = ["run: window", *SPEEDS]
    return Section("The window", [text], Grid(header, rows), runs=found) if rows else None


def _speed(run: LoadedRun, entry: Entry) -> float:
    over = run.table[entry.label][ALL].speedup_decode
    return over.mean if over else 0.0


def best(run: LoadedRun, method: str = "") -> Entry:
    """The fastest contestant that drafts, of a method or of all."""
    return max(
        run.named(method) if method else run.of(lambda e: e.drafter is not None), key=lambda entry: _speed(run, entry)
    )


def dynamic_over_fixed(run: LoadedRun) -> Interval | None:
    """The dynamic window with the paper's cap of 10 over the fixed one that has turned out best."""
    own = next(entry for entry in run.named("hsddw") if entry.settings.get("cap") == "10")
    fixed = best(run, "chain")
    return paired(run.by_method[own.label], run.by_method[fixed.label], lambda r: r.decode_rate)


def _verdict(runs: Runs) -> Verdict | None:
    shown = [_speed(run, best(run, "hsddw")) > 1 for run in of(runs, LEVELS)]
    shown += [x.high > 0.95 for run in of(runs, WINDOWS) if (x := dynamic_over_fixed(run))]
    return Verdict.of(shown)


def _found(runs: Runs) -> str | None:
    speeds = [
        f"{ratio_text(run.table[best(run, 'hsddw').label][ALL].speedup_decode)} in `{run.path.name}`"
        for run in of(runs, LEVELS)
    ]
    chains = [
        f"{ratio_text(run.table[best(run).label][ALL].speedup_decode)} in `{run.path.name}`"
        for run in of(runs, WINDOWS)
    ]
    windows = [f"{ratio_text(dynamic_over_fixed(run))} in `{run.path.name}`" for run in of(runs, WINDOWS)]
    parts = [f"Of AR decoding's speed, the fastest variant of three levels has {', '.join(speeds)}."] * bool(speeds)
    parts += [f"The fastest two levels have {', '.join(chains)}."] * bool(chains)
    parts += [f"The dynamic window has {', '.join(windows)} of the fastest fixed one's speed."] * bool(windows)
    return " ".join(parts) or None


CHAPTER = Chapter(
    "hsddw",
    "Hierarchical drafting with dynamic windows (HSDDW, Syu & Lee)",
    "2.91 times the speed of AR decoding on MT-Bench and 2.99 times on Alpaca, with Llama of 68M, 7B and 70B, and a "
    "speed that does not depend on the window ([how it works](../how-it-works/cascades.md)).",
    _found,
    _verdict,
    "A third level is a null result here: on MT-Bench two levels are as fast, and GSM8K has no rival of two levels. "
    "In the paper each level costs about a tenth of the next; on this processor a pass of the 0.5B takes a third of "
    "one of the 1.5B. *Goes on* is the slowest rule, since it spends passes of the middle level on few tokens. The "
    "dynamic window depends on its cap far less than a fixed one on its length, but a threshold on entropy ignores "
    "costs, and the fastest fixed window is short. All fastest variants were chosen afterwards. Alpaca's prompts "
    "were not used, for their licence.",
    (Part("speed", LEVELS, _levels), Part("window", WINDOWS, _windows)),
)
