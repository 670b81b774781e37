"""Do two runs of the same configuration agree?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from draftree.bench.contestants import AR
from draftree.bench.summary import ALL, Interval, LoadedRun, ratio_text

from .sections import Grid, Section

_SAME = ("suite", "prompts_sha256", "entries", "max_tokens", "repeats", "seed", "target", "weight_format", "machine")


def sections(runs: Sequence[LoadedRun]) -> list[Section]:
    """One for each pair of runs that differ in nothing."""
    pairs = [(a, b) for a, b in combinations(runs, 2) if all(a.config.get(k) == b.config.get(k) for k in _SAME)]
    return [_compared(a, b) for a, b in pairs]


def agree(one: Interval, other: Interval) -> bool:
    """Each mean lies within the other's interval."""
    return other.low <= one.mean <= other.high and one.low <= other.mean <= one.high


def _compared(a: LoadedRun, b: LoadedRun) -> Section:
    rows, apart, count = list[list[str]](), list[str](), 0
    for method, found in a.table.items():
        if method.split()[0] == AR:
            continue  # what all others are over
        row = [method]
        for name in ("speedup", "speedup_decode"):
            one, other = getattr(found[ALL], name), getattr(b.table[method][ALL], name)
            row += [ratio_text(one), ratio_text(other)]
            if one and other:
                count += 1
                if not agree(one, other):
                    apart.append(f"{method} ({name.replace('_', ' ')})")
        rows.append(row)
    text = (
        f"{count - len(apart)} of {count} ratios agree: each mean lies within the other run's interval."
        + (f" Not: {', '.join(apart)}." if apart else "")
        + f" The second run decoded {_steadiness(a, b)} times as fast as the first, from method to method."
    )
    header = ["method", "over AR", "again", "prefill left out", "again"]
    title = f"Runs {a.path.name} and {b.path.name} beside each other"
    return Section(title, [text], Grid(header, rows), commands=[a.command, b.command])


def _steadiness(a: LoadedRun, b: LoadedRun) -> str:
    speeds = [b.table[m][ALL].tokens_per_second / a.table[m][ALL].tokens_per_second for m in a.table]
    return f"{min(speeds):.2f} to {max(speeds):.2f}"
