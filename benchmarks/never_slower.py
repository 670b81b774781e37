"""Is drafting ever slower than AR decoding?

    python -m benchmarks.never_slower OUT.jsonl [--target MODEL] [--drafters lookup,head] [--temperatures 0,0.8,1.2]
        [--kinds chat,code] [--requests 1,2,4,8] [--limit 20] [--tokens 128]

A cell is a drafter, a temperature, a kind of text and a number of requests. Its pairs decode as many other prompts
together, by AR decoding and by the drafter with ``auto``, each first in turn, both in a new engine that has decoded
nothing before; the reading of prompts counts, and a column leaves it out. What a process does once, such as taking
memory, does not count. They come from the prompt sets (``docs/bench.md``). A cell whose interval ends below 0.98 is
decoded again on other prompts of its kind; where that one does too, the command ends with 1.
Each pair is a line of OUT.jsonl; the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from draftree.artifacts import append_line, file_path, locked, read_lines
from draftree.bench.entries import split_names
from draftree.bench.run import encode_turns
from draftree.bench.suites import Item, choose, load_suite
from draftree.bench.summary import Interval, markdown, ratio
from draftree.config import SamplingParams
from draftree.drafters.spec import NONE
from draftree.engine.engine import Engine
from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import SpeculationParams
from draftree.errors import ConfigError, UnknownNameError
from draftree.models.base import LanguageModel
from draftree.models.loading import load
from draftree.models.model_files import DEFAULT_MODEL
from draftree.progress import err, progress_reporter

from . import edits
from .commands import command_parser, one_line_errors

LEAST = 0.98
"""No cell's interval may end below it on both sets of prompts."""
DRAFTERS = ("lookup", "head", f"lookup+{DEFAULT_MODEL}")
_EDITS = 100
"""Of code, and as many of prose."""


def _of_spec_bench(*categories: str) -> list[Item]:
    return [item for item in load_suite("spec-bench") if item.category in categories]


def _languages() -> list[Item]:
    """Translations, and instructions in other languages."""
    return [*_of_spec_bench("translation"), *load_suite(str(Path(__file__).with_name("languages.jsonl")))]


def _edits() -> list[Item]:
    return [Item(e.id, e.category, (e.prompt,)) for e in (*edits.code(_EDITS), *edits.prose(_EDITS))]


KINDS: Mapping[str, Callable[[], list[Item]]] = {
    "chat": lambda: _of_spec_bench("writing", "roleplay", "humanities", "stem", "qa"),
    "code": lambda: load_suite("humaneval"),
    "maths": lambda: load_suite("gsm8k"),
    "summaries": lambda: _of_spec_bench("summarization"),
    "languages": _languages,
    "edits": _edits,
}
"""Kind of text -> its prompts."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is compared with AR decoding.

    Attributes:
        requests: that are decoded together.
    """

    drafter: str
    temperature: float
    kind: str
    requests: int


@dataclass(frozen=True, slots=True)
class Timed:
    """How long requests took that were decoded together.

    Attributes:
        tokens: that were generated.
        seconds: from the prompts to the last token.
        later: tokens behind the first of each request.
        prefill: seconds of the longest reading of a prompt.
    """

    tokens: int
    seconds: float
    later: int
    prefill: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the prompts were read; 0 where there are none."""
        return self.later and self.later / (self.seconds - self.prefill)


@dataclass(frozen=True, slots=True)
class Pair:
    """A line: the same prompts by AR decoding and by a drafter.

    Attributes:
        most: tokens of an answer, at most.
        half: 0, or 1: of the prompts that are taken where the first half's interval ends below ``LEAST``.
        number: of the pair in its half.
    """

    target: str
    most: int
    cell: Cell
    half: int
    number: int
    ar: Timed
    drafted: Timed


_LINE: TypeAdapter[Pair] = TypeAdapter(Pair)
Decode = Callable[[Cell, Sequence[Sequence[int]], bool], Timed]
"""(cell, prompts, whether drafts are made) -> how long that took."""


class Pairs:
    """The lines of a file; those of other targets and lengths stay there and are not read.

    Raises:
        ConfigError: a line is damaged.
    """

    def __init__(self, path: Path, target: str, most: int) -> None:
        self._path, self._target, self._most = path, target, most
        self._whole = 0  # bytes of whole lines
        self._pairs: dict[tuple[Cell, int, int], Pair] = {}
        for number, line in enumerate(read_lines(path) if path.is_file() else (), start=1):
            if not line.endswith(b"\n"):
                break  # torn by an interruption
            try:
                pair = _LINE.validate_json(line)
            except ValidationError:
                raise ConfigError(f"line {number} of {path} is damaged: take that line out") from None
            self._whole += len(line)
            if (pair.target, pair.most) == (target, most):
                self._pairs[pair.cell, pair.half, pair.number] = pair

    def __contains__(self, key: tuple[Cell, int, int]) -> bool:
        return key in self._pairs

    def add(self, cell: Cell, half: int, number: int, ar: Timed, drafted: Timed) -> None:
        """Write a line."""
        pair = Pair(self._target, self._most, cell, half, number, ar, drafted)
        line = _LINE.dump_json(pair) + b"\n"
        append_line(self._path, line, self._whole)
        self._whole += len(line)
        self._pairs[cell, half, number] = pair

    def ratio(self, cell: Cell, half: int, of: Callable[[Timed], float] = attrgetter("rate")) -> Interval | None:
        """A rate over that of AR decoding; None where nothing was decoded that has one."""
        pairs = [p for (own, which, _), p in self._pairs.items() if (own, which) == (cell, half)]
        both = [each for p in pairs if all(each := (of(p.drafted), of(p.ar)))]
        return ratio(*map(list, zip(*both, strict=True))) if both else None


def batches(prompts: Sequence[list[int]], requests: int, half: int, limit: int) -> list[Sequence[list[int]]]:
    """Up to ``limit`` groups of so many prompts, of every other one; no prompt is in both halves."""
    own = prompts[half::2]
    return [own[at : at + requests] for at in range(0, len(own) - requests + 1, requests)][:limit]


def measure(
    pairs: Pairs, cell: Cell, half: int, groups: Sequence[Sequence[list[int]]], decode: Decode, done: Callable[[], None]
) -> Interval:
    """The ratio of a cell on half of its prompts, of which what is missing is decoded; ``done`` is called a pair."""
    missing = [number for number in range(len(groups)) if (cell, half, number) not in pairs]
    if missing:
        decode(cell, groups[missing[0]], False)  # not counted: the first one touches the memory of so many rows
    for number, prompts in enumerate(groups):
        if number in missing:
            first = number % 2 == 1
            found = {drafts: decode(cell, prompts, drafts) for drafts in (first, not first)}
            pairs.add(cell, half, number, found[False], found[True])
        done()
    found_ratio = pairs.ratio(cell, half)
    assert found_ratio is not None  # noqa: S101 - there are groups
    return found_ratio


def decoder(target: LanguageModel, tokens: int) -> Decode:
    """Decodes on a target, each time in an engine of its own."""

    def decode(cell: Cell, prompts: Sequence[Sequence[int]], drafts: bool) -> Timed:
        speculation = SpeculationParams(drafter=cell.drafter if drafts else NONE)
        engine = Engine(target, speculation, scheduling=SchedulerParams(rows=cell.requests))
        params = [
            SamplingParams(max_tokens=tokens, temperature=cell.temperature, seed=11 + number)
            for number in range(len(prompts))
        ]
        began = time.perf_counter()
        answers = engine.generate(prompts, params)
        seconds = time.perf_counter() - began
        count, prefill = sum(len(a.token_ids) for a in answers), max(a.stats.seconds.prefill for a in answers)
        return Timed(count, seconds, count - len(answers), prefill)

    return decode


HEADER = ("drafter", "T", "text", "requests", "over AR", "after the prompt", "on other prompts", "")


def row(cell: Cell, found: Interval, later: Interval | None, again: Interval | None) -> list[str]:
    """Cells under ``HEADER``."""
    slower = "slower" if again and again.high < LEAST else ""
    known = [cell.drafter, f"{cell.temperature:g}", cell.kind, str(cell.requests)]
    return [*known, *(each.text() if each else "" for each in (found, later, again)), slower]


def compare(
    cells: Iterable[Cell],
    prompts: Mapping[str, Sequence[list[int]]],
    pairs: Pairs,
    decode: Decode,
    limit: int,
) -> list[list[str]]:
    """Rows of all cells; what the file lacks is decoded.

    Args:
        prompts: of each kind.

    Raises:
        ConfigError: a kind has too few prompts for as many requests.
    """
    groups = {(c, half): batches(prompts[c.kind], c.requests, half, limit) for c in cells for half in (0, 1)}
    if few := next((cell for (cell, _), found in groups.items() if len(found) < 2), None):
        raise ConfigError(f"too few prompts of {few.kind} fit for {few.requests} requests: give fewer, or --tokens")
    total, made, rows = sum(len(found) for (_, half), found in groups.items() if not half), count(1), list[list[str]]()
    with progress_reporter("pairs", total) as report:
        for cell in dict.fromkeys(cell for cell, _ in groups):
            found, again = measure(pairs, cell, 0, groups[cell, 0], decode, lambda: report(next(made))), None
            later = pairs.ratio(cell, 0, attrgetter("decode_rate"))
            if found.high < LEAST:
                err.print(f"{' '.join(row(cell, found, later, None)[:5])}: again, on other prompts")
                again = measure(pairs, cell, 1, groups[cell, 1], decode, lambda: None)
            rows.append(row(cell, found, later, again))
    return rows


def fitting(target: LanguageModel, items: Iterable[Item], tokens: int) -> list[list[int]]:
    """Ids of the prompts behind which the target has room for so many tokens."""
    prompts = (encode_turns(target, item.turns[:1]) for item in items)
    return [ids for ids in prompts if len(ids) + tokens <= target.capabilities.max_length]


Number = TypeVar("Number", int, float)


def numbers(args: argparse.Namespace, name: str, read: Callable[[str], Number], least: Number) -> list[Number]:
    """The numbers of an option, with commas between them.

    Raises:
        ConfigError: one is none, or below ``least``.
    """
    text = getattr(args, name)
    try:
        found = [read(each) for each in split_names(text)]
    except ValueError:
        found = []
    if not found or not min(found) >= least:
        raise ConfigError(f"--{name} is {text!r}: give numbers from {least:g} on, with commas between them")
    return found


@one_line_errors(resumable=True)
def main(argv: Sequence[str] | None = None) -> None:
    """Decode what is missing, print the table, and end with 1 where a cell is slower."""
    parser = command_parser("benchmarks.never_slower", __doc__)
    parser.add_argument("out", metavar="OUT.jsonl", help="file of the lines")
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafters", help=f"{', '.join(DRAFTERS)} by default, but none that is the target")
    parser.add_argument("--temperatures", default="0,0.8,1.2")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--requests", default="1,2,4,8", help="that are decoded together")
    parser.add_argument("--limit", default="20", help="pairs of a cell, at most: as far as there are prompts")
    parser.add_argument("--tokens", default="128", help="of an answer, at most")
    args = parser.parse_args(argv)
    own = [name for name in DRAFTERS if args.target not in name.split("+")]
    drafters = split_names(args.drafters) if args.drafters else own
    kinds = split_names(args.kinds)
    for kind in kinds:
        if kind not in KINDS:
            raise UnknownNameError(f"no kind of text {kind!r}: choose from {', '.join(KINDS)}")
    temperatures, sizes = numbers(args, "temperatures", float, 0.0), numbers(args, "requests", int, 1)
    (limit,), (tokens,) = numbers(args, "limit", int, 2), numbers(args, "tokens", int, 1)
    path = file_path(args.out, "the file")
    items, target = {kind: choose(KINDS[kind]()) for kind in kinds}, load(args.target)
    # one that cannot be loaded is found before anything is decoded; none is loaded again while these are there
    kept = [Engine(target, SpeculationParams(drafter=drafter)) for drafter in drafters]
    prompts = {kind: fitting(target, found, tokens) for kind, found in items.items()}
    cells = [Cell(*each) for each in product(drafters, temperatures, kinds, sizes)]
    with locked(path, "the file", folder=False):
        pairs = Pairs(path, args.target, tokens)
        rows = compare(cells, prompts, pairs, decoder(target, tokens), limit)
    del kept
    print(markdown(HEADER, rows))
    if slower := sum(bool(each[-1]) for each in rows):
        sys.exit(f"{slower} of {len(rows)} are slower than {LEAST} of AR decoding on both sets of prompts")


if __name__ == "__main__":
    main()
