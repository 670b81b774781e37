"""Does a system's greedy text change with the drafts, the requests at once, the threads and the instruction set?

    python -m benchmarks.exactness OUT --target smollm2|FILE.gguf [--draft FILE.gguf] [--suite spec-bench] [--limit 100]
        [--max-tokens 96] [--systems NAME,...] [--tiers NAME,...] [--openvino PYTHON] [--vllm PYTHON] [--report]

Each system is compared with its own plain decoding: one request at a time, no drafts, all threads. One factor changes
at a time; "again" changes none. Prompts, processes, interpreters and weights are those of ``benchmarks.rivals``, and
each answer is a line of OUT/exactness.jsonl. Drafts have at most so many tokens a pass: those of draftree are trees
(``opt-tree``), all others chains. A table follows, of what OUT has; with --report it is all that is done.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from draftree.bench.summary import markdown
from draftree.engine.replay import shared_length
from draftree.errors import UnknownNameError
from draftree.models.cpu_threads import default_threads
from draftree.models.native.binding import tiers

from .commands import one_line_errors
from .rival_jobs import DRAFTS, Row, Variant, command_line, rows_of, system

LOOKUPS = {
    "draftree": "-prompt-lookup",
    "draftree+llama.cpp": "-prompt-lookup",
    "llama.cpp": "-ngram-map-k",
    "transformers": "-prompt-lookup",
    "openvino": "-prompt-lookup",
    "vllm": "-prompt-lookup",
}
"""System -> how its way of drafting by n-grams ends the name of a rival; the second is this project's own backend."""
PLAIN = "plain"
WIDTHS, REQUESTS = (2, 4, 8), (4, 16)
HEADER = ("system", "version", "factor", "other texts", "first other token", "note")
FILE = "exactness.jsonl"


def variants(name: str, draft: bool, threads: int, sets: Sequence[str]) -> list[Variant]:
    """Plain decoding by a system, and what differs from it in one thing.

    Args:
        draft: there is a draft model.
        threads: of plain decoding.
        sets: instruction sets beside the best one of this CPU, by the native engine's names.
    """
    plain = f"{name}-ar" if name.startswith("draftree") else name
    made = [_variant(plain, PLAIN), _variant(plain, "again")]
    for what, way in [("draft model", DRAFTS)] * draft + [("n-grams", LOOKUPS[name])]:
        made += [_variant(name + way, f"{what}, {width} tokens", drafted=width) for width in WIDTHS]
    made += [_variant(plain, f"{count} requests", requests=count) for count in REQUESTS]
    if threads > 1:
        made.append(_variant(plain, "1 thread", threads=1))
    chosen = {"draftree": sets, "transformers": [each for each in sets if each == "avx2"]}
    return made + [_variant(plain, each, tier=each) for each in chosen.get(name, ())]


def _variant(rival: str, factor: str, **changes: int | str) -> Variant:
    return Variant(rival, {"factor": factor}, changes)


def tables(rows: Iterable[Row]) -> dict[str, list[list[str]]]:
    """What was decoded -> cells under ``HEADER`` for each system and factor, in the order of their lines."""
    groups: dict[tuple[str, str, int], dict[tuple[str, str, str], list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        of = groups[row["model"], row["suite"], row["max_tokens"]]
        of[system(row["rival"]), row["factor"], row["draft"]].append(row)
    return {
        f"{model}, {suite}, {most} tokens": [_cells(*key, own, of) for key, own in of.items() if key[1] != PLAIN]
        for (model, suite, most), of in groups.items()
    }


def _cells(
    name: str, factor: str, draft: str, own: Sequence[Row], of: dict[tuple[str, str, str], list[Row]]
) -> list[str]:
    answers = [row for row in own if "error" not in row]
    plain = {row["prompt"]: row for row in of.get((name, PLAIN, ""), []) if "error" not in row}
    pairs = [(row, plain[row["prompt"]]) for row in answers if row["prompt"] in plain]
    firsts = [shared_length(row["ids"], known["ids"]) + 1 for row, known in pairs if row["text"] != known["text"]]
    version = answers[-1]["version"] if answers else ""
    share = f"{len(firsts)} of {len(pairs)}" if pairs else ""
    first = f"{statistics.median_low(firsts)} ({min(firsts)})" if firsts else ""
    return [name, version, f"{factor} ({draft})" if draft else factor, share, first, own[-1].get("error", "")]


def chosen(names: str | None) -> list[str]:
    """The systems of these names; by default all.

    Raises:
        UnknownNameError: there is no such system.
    """
    found = [*LOOKUPS] if names is None else names.split(",")
    if wrong := next((name for name in found if name not in LOOKUPS), None):
        raise UnknownNameError(f"no system {wrong!r}: choose from {', '.join(LOOKUPS)}")
    return found


@one_line_errors(resumable=True)
def main(argv: Sequence[str] | None = None) -> None:
    """Decode what is missing, and print the tables."""
    parser = command_line("benchmarks.exactness", __doc__, limit=100, max_tokens=96)
    parser.add_argument("--systems", metavar="NAME,...", help=f"of {', '.join(LOOKUPS)}; all by default")
    parser.add_argument("--tiers", metavar="NAME,...", help="instruction sets; all by default, of which base is slow")
    args = parser.parse_args(argv)
    sets = tiers()[-2::-1] if args.tiers is None else args.tiers.split(",")
    asked = [v for name in chosen(args.systems) for v in variants(name, bool(args.draft), default_threads(), sets)]
    for title, cells in tables(rows_of(args, FILE, asked)).items():
        print(f"{title}; first other token: median, and the least in brackets\n\n{markdown(HEADER, cells)}\n")


if __name__ == "__main__":
    main()
