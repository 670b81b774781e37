"""HSDDW's claims: speed with two levels of drafters, and no window to be tuned."""

from __future__ import annotations

from draftree.bench.entries import Entry
from draftree.bench.summary import ALL, Interval, LoadedRun, paired, ratio_text

from .sections import SPEEDS, Chapter, Grid, Part, Runs, Section, Verdict, of, shown, speeds

HEAD = "head"
LEVELS = ("levels-smollm2", "levels-coder", "gsm8k-levels-smollm2", "gsm8k-levels-coder")
WINDOWS = ("windows-smollm2", "windows-coder")
ONCE, ON = "pending=1", "rejected=on"


def _variant(entry: Entry) -> str:
    """How the paper calls it."""
    first, _, upper = (entry.drafter or "").partition(">")
    if not upper:
        return f"{HEAD if first == HEAD else 'draft model'} alone"
    rule = "no loop-back" if upper.endswith(ONCE) else "goes on" if upper.endswith(ON) else "as published"
    return f"{first}, {rule}"


def _levels(runs: Runs) -> Section | None:
    found, rows = of(runs, LEVELS), list[list[str]]()
    for run in found:
        rows += [[f"{run.path.name}: {_variant(e)}", *speeds(run.table[e.label][ALL])] for e in run.named("hsddw")]
    text = (
        "Three levels: `lookup` or the target's head proposes, the coder's 0.5B or SmolLM2's head verifies and "
        "corrects, and the target verifies. *As published* a run ends with a token that the middle level gives in "
        "place of another; in ours it *goes on* below it. *No loop-back* is one round a proposal. Two levels: a model "
        "*alone* drafts chains with the dynamic window. The paper: 2.91 times AR decoding on MT-Bench; on GSM8K no "
        "loop-back was faster."
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


def dynamic_over_fixed(run: LoadedRun) -> Interval | None:
    """The dynamic window with the paper's cap of 10 over the fixed one that has turned out best."""
    own = next(entry for entry in run.named("hsddw") if entry.settings.get("cap") == "10")
    fixed = max(run.named("chain"), key=lambda entry: _speed(run, entry))
    return paired(run.by_method[own.label], run.by_method[fixed.label], lambda r: r.decode_rate)


def three_over_two(run: LoadedRun) -> dict[str, Interval]:
    """First level -> three levels as published over two: over the faster of their models alone."""
    found = dict[str, Interval]()
    for published in run.named("hsddw"):
        first, _, middle = (published.drafter or "").partition(">")
        if middle and _variant(published) == f"{first}, as published":
            alone = max((e for e in run.named("hsddw") if e.drafter in (first, middle)), key=lambda e: _speed(run, e))
            over = paired(run.by_method[published.label], run.by_method[alone.label], lambda r: r.decode_rate)
            found |= {first: over} if over else {}
    return found


def flatness(run: LoadedRun, method: str) -> float:
    """The slowest speed of a method over its windows of more than 2 tokens, of its fastest."""
    speeds = [_speed(run, entry) for entry in run.named(method) if entry.settings.get("depth") != "2"]
    return min(speeds) / max(speeds)


def _verdict(runs: Runs) -> Verdict | None:
    shown = [gain.low > 1 for run in of(runs, LEVELS) for gain in three_over_two(run).values()]
    for run in of(runs, WINDOWS):
        over = dynamic_over_fixed(run)
        shown += [over is not None and over.high > 1, flatness(run, "hsddw") > flatness(run, "chain")]
    return Verdict.of(shown)


def _found(runs: Runs) -> str | None:
    levels, windows = of(runs, LEVELS), of(runs, WINDOWS)
    gains = ", ".join(
        f"{ratio_text(gain)} with `{first}` first in `{run.path.name}`"
        for run in levels
        for first, gain in three_over_two(run).items()
    )
    dynamic = ", ".join(f"{ratio_text(dynamic_over_fixed(run))} in `{run.path.name}`" for run in windows)
    parts = [
        f"Of the speed of the faster of their two models alone, three levels as published have {gains}; with 1 in its "
        "interval the third level gains nothing."
    ] * bool(levels)
    flat, steep = (", ".join(f"{flatness(run, method):.2f}" for run in windows) for method in ("hsddw", "chain"))
    parts += [
        f"The dynamic window has {dynamic} of the fastest fixed one's speed. The slowest of its caps (5 to 20 tokens) "
        f"has {flat} of the speed of its fastest, the slowest fixed window of 4 to 20 has {steep} of that of the "
        "fastest."
    ] * bool(windows)
    return " ".join(parts) or None


CHAPTER = Chapter(
    "hsddw",
    "Hierarchical drafting with dynamic windows (HSDDW, Syu & Lee)",
    "2.91 times the speed of AR decoding on MT-Bench and 2.99 times on Alpaca, with Llama of 68M, 7B and 70B, and a "
    "speed that does not depend on the window ([how it works](../how-it-works/cascades.md)).",
    _found,
    _verdict,
    "In the paper each level costs about a tenth of the next; on this processor a pass of the 0.5B takes a third of "
    "one of the 1.5B. *Goes on* spends passes of the middle level on few tokens. A threshold on entropy ignores costs, "
    "and the fastest fixed window, which was chosen afterwards, is short. Alpaca's prompts were not used, for their "
    "licence.",
    (Part("speed", LEVELS, _levels), Part("window", WINDOWS, _windows)),
)
