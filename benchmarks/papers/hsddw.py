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
    rule = (
        "no loop-back" if ONCE in drafter else "ends at a rejection, as published" if ENDING in drafter else "goes on"
    )
    return f"{first}, {rule}"


def _levels(runs: Runs) -> Section | None:
    found, rows = of(runs, LEVELS), list[list[str]]()
    for run in found:
        rows += [[f"{run.path.name}: {_variant(e)}", *speeds(run.table[e.label][ALL])] for e in run.named("hsddw")]
    text = (
        "Three levels: n-gram lookup or the target's draft head proposes, the coder's 0.5B or SmolLM2's head verifies "
        "and corrects, the target verifies. Where the middle level rejects a token the run goes on below its "
        "correction, or ends there, as in the authors' code. The paper: 2.91 times AR decoding on MT-Bench; on GSM8K "
        "no loop-back was faster."
    )
    grid = Grid(["run: first level, rule", *SPEEDS], rows)
    return Section("Speed, and loop-back or not", [text], grid, runs=found) if rows else None


def _windows(runs: Runs) -> Section | None:
    found, rows = of(runs, WINDOWS), list[list[str]]()
    for run in found:
        for entry in run.of(lambda e: e.drafter is not None):
            rows.append([f"{run.path.name}: {shown(entry)}", *speeds(run.table[entry.label][ALL])])
    text = (
        "Chains of a fixed window, and one whose window follows the entropy of rejected tokens up to a cap (`hsddw`, "
        "one level). The paper: plain speculative decoding is best at 7 and falls from there; the dynamic window is "
        "flat."
    )
    header = ["run: window", *SPEEDS]
    return Section("The window", [text], Grid(header, rows), runs=found) if rows else None


def _speed(run: LoadedRun, entry: Entry) -> float:
    over = run.table[entry.label][ALL].speedup_decode
    return over.mean if over else 0.0


def best(run: LoadedRun, method: str) -> Entry:
    """The fastest contestant of a method."""
    return max(run.named(method), key=lambda entry: _speed(run, entry))


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
        f"{ratio_text(run.table[entry.label][ALL].speedup_decode)} in `{run.path.name}` ({_variant(entry)})"
        for run in of(runs, LEVELS)
        for entry in [best(run, "hsddw")]
    ]
    windows = [f"{ratio_text(dynamic_over_fixed(run))} in `{run.path.name}`" for run in of(runs, WINDOWS)]
    parts = [f"The best of three levels makes {', '.join(speeds)} of AR decoding."] * bool(speeds)
    parts += [f"A dynamic window makes {', '.join(windows)} of the best fixed one."] * bool(windows)
    return " ".join(parts) or None


CHAPTER = Chapter(
    "hsddw",
    "Hierarchical drafting with dynamic windows (HSDDW, Syu & Lee)",
    "2.91 times the speed of AR decoding on MT-Bench and 2.99 times on Alpaca, with Llama of 68M, 7B and 70B, and a "
    "speed that does not depend on the window.",
    _found,
    _verdict,
    "With models of 68M, 7B and 70B each level costs a tenth of the next, where a pass of the 0.5B takes a third of "
    "one of the 1.5B on this processor. To go on below a token that the middle level has put in place of a rejected "
    "one, which is ours, asks that level for more than its tokens are worth: as published, or without looping back, "
    "three levels gain. A window that follows entropy knows no costs; the best fixed one was chosen afterwards. "
    "Alpaca's prompts may not be used by us.",
    (Part("speed", LEVELS, _levels), Part("window", WINDOWS, _windows)),
)
