"""Tables as Markdown, for terminals and reports alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .stats import Interval
from .summary import ALL, EQUAL, Figures, Table

NO_METER = "no meter"
"""In place of energy where nothing measures it."""
Rows = list[list[str]]
HEADER = [
    "method",
    "tokens/s",
    "over plain",
    "prefill left out",
    "MAL",
    "nodes/token",
    "nodes/step",
    "depth",
    "accepted at depth 1, 2, ...",
    "draft/verify/other",
    "peak MiB",
    "J/token",
    "ids equal plain's",
]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns line up as text too; the first column is flush left, the others right."""
    cells = [[c.replace("|", "\\|") for c in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    lines = [
        "| "
        + " | ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def overview(table: Table, category: str = ALL) -> Rows:
    """A row for each method, for ``HEADER``."""
    return [_row(method, found[category]) for method, found in table.items() if category in found]


def _row(method: str, f: Figures) -> list[str]:
    shares = "" if f.share is None else "/".join(f"{100 * x:.0f}%" for x in f.share.values())
    depths = "" if f.acceptance_by_depth is None else " ".join(f"{x:.2f}" for x in f.acceptance_by_depth[:4])
    return [
        method,
        f"{f.tokens_per_second:.1f}",
        ratio_text(f.speedup),
        ratio_text(f.speedup_decode),
        number(f.mal),
        number(f.nodes_per_token),
        number(f.nodes_per_step),
        number(f.depth_per_step),
        depths,
        shares,
        "" if f.peak_memory is None else f"{f.peak_memory / 2**20:.0f}",
        NO_METER if f.joules_per_token is None else f"{f.joules_per_token:.3g}",
        verdict_text(f.verdicts, f.ids_equal),
    ]


def ratio_text(found: Interval | None) -> str:
    """A ratio with its interval; nothing where there is none."""
    return "" if found is None else found.text()


def number(value: float | None) -> str:
    """Two decimals; nothing where there is none."""
    return "" if value is None else f"{value:.2f}"


def verdict_text(verdicts: Mapping[str, int], equal: float | None) -> str:
    """The share of equal answers, and what the others are."""
    if equal is None:
        return ""
    others = [f"{count} {verdict}" for verdict, count in verdicts.items() if verdict != EQUAL]
    return ", ".join([f"{100 * equal:.0f}%", *others])
