"""HSDDW's claims: speed with two levels of drafters, and no window to be tuned."""

from __future__ import annotations

from collections.abc import Sequence

from draftree.bench.entries import Entry
from draftree.bench.summary import ALL, LoadedRun, paired, ratio_text

from .sections import SPEEDS, Chapter, Grid, Part, Runs, Section, of, speeds

LEVELS = ("levels-coder", "levels-smollm2", "gsm8k-levels-coder", "gsm8k-levels-smollm2")
WINDOWS = ("windows-coder", "windows-smollm2")


def _loops(entry: Entry) -> bool:
    """It drafts on below what its upper level has confirmed."""
    return "pending=1" not in (entry.drafter or "")


def _levels(runs: Runs) -> Section | None:
    found, rows = of(runs, LEVELS), list[list[str]]()
    for run in found:
        looping = next(e for e in run.named("hsddw") if _loops(e))
        for entry in run.named("hsddw"):
            over = paired(run.by_method[entry.label], run.by_method[looping.label], lambda r: r.decode_rate)
            label = f"{run.path.name}: {'loop-back' if _loops(entry) else 'no loop-back'}"
            beside = ratio_text(over) if entry is not looping else ""
            rows.append([label, *speeds(run.table[entry.label][ALL]), beside])
    text = (
        "Three levels: n-gram lookup proposes, the draft model or head verifies and corrects, the target verifies. The "
        "paper: 2.91 times AR decoding on MT-Bench; on GSM8K no loop-back was faster."
    )
    header = ["run: variant", *SPEEDS, "over loop-back"]
    return Section("Speed, and loop-back or not", [text], Grid(header, rows), runs=found) if rows else None


def _windows(runs: Runs) -> Section | None:
    found, rows = of(runs, WINDOWS), list[list[str]]()
    for run in found:
        for entry in run.of(lambda e: e.drafter is not None):
            rows.append([f"{run.path.name}: {entry.label}", *speeds(run.table[entry.label][ALL])])
    text = (
        "Chains of a fixed window, and one whose window follows the entropy of rejected tokens (`hsddw`, one level). "
        "The paper: plain speculative decoding is best at 7 and falls from there; the dynamic window is flat."
    )
    header = ["run: window", *SPEEDS]
    return Section("The window", [text], Grid(header, rows), runs=found) if rows else None


def best_window(run: LoadedRun) -> str:
    """The dynamic window over the fixed one that has turned out best."""
    fixed: Sequence[Entry] = run.named("chain")

    def speed(entry: Entry) -> float:
        f = run.table[entry.label][ALL].speedup_decode
        return f.mean if f else 0.0

    best, own = max(fixed, key=speed), run.named("hsddw")[0]
    ratio = paired(run.by_method[own.label], run.by_method[best.label], lambda r: r.decode_rate)
    return f"{ratio_text(ratio)} of the best of {len(fixed)} fixed windows ({best.settings['depth']})"


def _found(runs: Runs) -> str | None:
    def speed(run: LoadedRun) -> str:
        looping = next(e for e in run.named("hsddw") if _loops(e))
        return ratio_text(run.table[looping.label][ALL].speedup_decode)

    speeds = [f"{speed(run)} in `{run.path.name}`" for run in of(runs, LEVELS)]
    windows = [f"{best_window(run)} in `{run.path.name}`" for run in of(runs, WINDOWS)]
    parts = [f"it makes {', '.join(speeds)} of AR decoding"] * bool(speeds)
    parts += [f"a dynamic window makes {', '.join(windows)}"] * bool(windows)
    return f"We find that {', and that '.join(parts)}." if parts else None


CHAPTER = Chapter(
    "hsddw",
    "Hierarchical drafting with dynamic windows (HSDDW, Syu & Lee)",
    "The paper claims 2.91 times the speed of AR decoding on MT-Bench and 2.99 times on Alpaca, with Llama of 68M, 7B "
    "and 70B, and a speed that does not depend on the window.",
    _found,
    "With three models of 68M, 7B and 70B each level costs a tenth of the next, where the 0.5B costs two thirds of the "
    "1.5B on this processor; Alpaca's prompts may not be used by us.",
    (Part("speed", LEVELS, _levels), Part("window", WINDOWS, _windows)),
)
