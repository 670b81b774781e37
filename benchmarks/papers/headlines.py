"""The papers' headlines beside what our runs reach, whatever it is."""

from __future__ import annotations

from collections.abc import Sequence

from draftree.bench.contestants import Entry
from draftree.bench.results import AnswerRecord
from draftree.bench.summary import ALL, LoadedRun, paired, ratio_text
from draftree.policies.methods import DEFAULT_METHOD, METHODS

from .gunjur import saving
from .sections import Grid, Section

WHY = (
    "Why ours differ. The models are others: a target of 135 million parameters, whose drafters are a layer of its "
    "own kind and lookup, where the papers pair a large model with a smaller one, so that drafting and verifying cost "
    "in other proportions. The hardware is another: on a CPU a pass over a tree costs visibly more than a pass over "
    "one token, where on their GPUs it costs about the same, so that wide trees are dearer here. The baselines are "
    "others: Gunjur & Waitz decode their chain without a KV cache for the drafter, which makes every drafted token "
    "dear and every saved one worth more; and ours, AR decoding by the same engine, is faster than transformers' "
    "generate, which OPT-Tree's speed-ups are over."
)

_NO_SLOWER = 0.98
"""As fast as AR decoding, but for noise."""


def sections(runs: Sequence[LoadedRun]) -> list[Section]:
    """One table over all runs."""
    rows = [row for run in runs for row in _rows(run)]
    if not rows:
        return []
    return [Section("The papers' headlines and ours", [WHY], Grid(["ratio", "run", "the papers", "ours"], rows))]


def _mal(record: AnswerRecord) -> float | None:
    return record.gained / record.passes if record.passes else None


def _rows(run: LoadedRun) -> list[list[str]]:
    rows = []
    for name, own, base, paper in (
        ("time saved, dynamic width over a chain of 4", "dynamic-width", "chain", "7.16%"),
        ("time saved, dynamic width over a static tree", "dynamic-width", "static", "4.9%"),
    ):
        for a, b in _both(run, own, base):
            found = saving(run.by_method[a.label], run.by_method[b.label])
            ours = f"{100 * found.mean:.1f}% [{100 * found.low:.1f}, {100 * found.high:.1f}]"
            rows.append([f"{name}{_drafter(run, a)}", run.path.name, paper, ours])
    for name, own, base, paper in (
        ("MAL, OPT-Tree over EAGLE's tree", "opt-tree", "eagle", "1.04 to 1.56"),
        ("MAL, OPT-Tree over a binary tree", "opt-tree", "binary", "1.20 to 1.60"),
    ):
        for a, b in _both(run, own, base):
            ratio = paired(run.by_method[a.label], run.by_method[b.label], _mal)
            rows.append([f"{name}{_drafter(run, a)}", run.path.name, paper, ratio_text(ratio)])
    for temperature in dict.fromkeys(e.temperature for e in run.entries):
        rows += _best(run, temperature)
    for entry in run.named(DEFAULT_METHOD):
        rows += _auto(run, entry)
    return rows


def _both(run: LoadedRun, own: str, base: str) -> list[tuple[Entry, Entry]]:
    """Contestants of both methods with the same drafter and temperature."""
    found = [
        (a, b)
        for a in run.named(own)
        for b in run.named(base)
        if (a.drafter, a.temperature) == (b.drafter, b.temperature) and not a.settings and not b.settings
    ]
    return found[:1] if found and len({a.drafter for a, _ in found}) == 1 else found


def _best(run: LoadedRun, temperature: float) -> list[list[str]]:
    """The fastest of ours without loss against AR decoding and against the fastest peer."""

    def rate(entry: Entry) -> float:
        f = run.table[entry.label][ALL].speedup
        return f.mean if f else 0.0

    ours = [e for m in METHODS for e in run.named(m) if e.temperature == temperature]
    peers = run.of(lambda e: e.is_peer and e.temperature == temperature)
    if not ours:
        return []
    best = max(ours, key=rate)
    ar = run.ar(temperature)
    rows = [
        [
            f"speed, best method ({best.label}) over AR",
            run.path.name,
            "1.69 to 3.2",
            ratio_text(paired(run.by_method[best.label], ar, _rate)),
        ]
    ]
    if peers:
        rival = max(peers, key=rate)
        ratio = paired(run.by_method[best.label], run.by_method[rival.label], _rate)
        rows.append(
            [f"speed, best method ({best.label}) over best peer ({rival.label})", run.path.name, "", ratio_text(ratio)]
        )
    return rows


def _auto(run: LoadedRun, auto: Entry) -> list[list[str]]:
    """Against the fixed method that has turned out best with the same drafter, and against AR decoding by category;
    the prefill, which is the same for all, is left out."""

    def speed(entry: Entry) -> float:
        f = run.table[entry.label][ALL].speedup_decode
        return f.mean if f else 0.0

    same = (auto.drafter, auto.temperature)
    fixed = [e for m in METHODS for e in run.named(m) if e.method != auto.method]
    fixed = [e for e in fixed if (e.drafter, e.temperature) == same]
    rows = []
    if fixed:
        best = max(fixed, key=speed)
        ratio = paired(run.by_method[auto.label], run.by_method[best.label], lambda r: r.decode_rate)
        rows.append(
            [
                f"speed without the prefill, {auto.label} over the best of {len(fixed)} fixed methods ({best.label})",
                run.path.name,
                "",
                ratio_text(ratio),
            ]
        )
    speedups = {c: f.speedup_decode for c, f in run.table[auto.label].items() if c != ALL}
    means = {c: f.mean for c, f in speedups.items() if f}
    if means:
        worst = min(means, key=means.__getitem__)
        under = sum(mean < _NO_SLOWER for mean in means.values())
        rows.append(
            [
                f"categories in which {auto.label} is under {_NO_SLOWER} of AR decoding, without the prefill",
                run.path.name,
                "",
                f"{under} of {len(means)}; lowest {means[worst]:.2f} ({worst})",
            ]
        )
    return rows


def _rate(record: AnswerRecord) -> float:
    return record.rate


def _drafter(run: LoadedRun, entry: Entry) -> str:
    return f", {entry.drafter}" if len(run.config["drafters"]) > 1 else ""
