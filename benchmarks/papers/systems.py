"""The pages of other systems: how fast they are, and whether their text changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from draftree.bench.summary import markdown

from .. import exactness, rivals
from ..rival_jobs import Row
from .sections import EXACTNESS, SYSTEMS, document

OPENING = (
    "This page compares other systems with draftree. Each system decodes in a process of its own, with the weights of "
    "the same file on the same cores."
)
EXACT_OPENING = (
    "Drafts, requests at once and threads should change the speed of a system, and not its text. This page counts how "
    "often the text changes."
)
SPEED = (
    "Tokens a second of greedy decoding after the prompt, each system on the same two cores (`python -m "
    "benchmarks.rivals OUT --target FILE --draft FILE --suite gsm8k --limit 5`). *Text as plain* counts the prompts "
    "whose text is that of the system's own decoding without drafts."
)
EXACT = (
    "Prompts whose greedy text is not that of the same system's plain decoding: one request at a time, no drafts, all "
    "threads. One thing changes at a time; *again* changes none. The instruction set is changed where a variable of "
    "the environment does so. Drafts have so many tokens a pass at most: trees in draftree, chains elsewhere (`python "
    "-m benchmarks.exactness OUT --target FILE --draft FILE`)."
)


def speed_page(rows: Sequence[Row]) -> str:
    """Of the lines of ``benchmarks.rivals``."""
    return document(["# Other systems", OPENING, SPEED, *_speeds(rows)])


def exactness_page(rows: Sequence[Row]) -> str:
    """Of the lines of ``benchmarks.exactness``."""
    return document(["# Does the text change?", EXACT_OPENING, EXACT, *_texts(rows)])


def _where(rows: Sequence[Row]) -> str:
    """Machines and commits."""
    return "; ".join(dict.fromkeys(f"{row['machine']}, commit {row['commit']}" for row in rows))


def _speeds(rows: Sequence[Row]) -> list[str]:
    """A table for each model and suite."""
    parts, cells = list[str](), rivals.table(rows)
    for model, suite in dict.fromkeys((row[0], row[1]) for row in cells):
        own = [row[2:] for row in cells if (row[0], row[1]) == (model, suite)]
        kept = [at for at, column in enumerate(zip(*own, strict=True)) if any(column)]
        header, *lines = ([row[at] for at in kept] for row in (rivals.HEADER[2:], *own))
        where = _where([row for row in rows if row["model"] == model])
        parts += [f"{model}, {suite} tokens; {where}:", markdown(header, lines)]
    return parts


def _texts(rows: Sequence[Row]) -> list[str]:
    """A table for each model: a row a factor, a column a system."""
    parts = list[str]()
    for title, cells in exactness.tables(rows).items():
        systems = dict.fromkeys(cell[0] for cell in cells)
        found = {(cell[0], cell[2]): cell[3] or "-" for cell in cells}
        lines = [
            [factor, *(found.get((system, factor), "") for system in systems)]
            for factor in dict.fromkeys(cell[2] for cell in cells)
        ]
        versions = ", ".join(dict.fromkeys(f"{cell[0]} {cell[1]}" for cell in cells if cell[1]))
        notes = dict.fromkeys(f"{cell[0]}, {cell[2]}: {cell[5]}" for cell in cells if cell[5])
        parts += [f"{title}; {_where(rows)}:", markdown(["factor", *systems], lines), f"Versions: {versions}."]
        parts += ["\n".join(f"- {note}" for note in notes)] * bool(notes)
    return parts


PAGES: Mapping[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    SYSTEMS: (rivals.FILE, speed_page),
    EXACTNESS: (exactness.FILE, exactness_page),
}
"""Page -> the file of its lines, in a folder of the same name within RUNS, and what is made of them."""
