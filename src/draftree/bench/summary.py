"""Figures of a run with bootstrap intervals, and their tables in Markdown."""

from __future__ import annotations

import math
import statistics
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from ..artifacts import user_path
from ..errors import ConfigError, DraftreeWarning
from ..models.loading import ModelOptions
from ..verify.schemes import DEFAULT_SCHEME
from .entries import AR, Entry
from .results import CONFIG, AnswerRecord, StepColumns, read_config, read_results, read_summary
from .run import EQUAL, Key, RunPlan, compare, read_differences

DRAWS = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the ends of its 95% bootstrap interval."""

    mean: float
    low: float
    high: float

    def text(self, form: str = ".2f") -> str:
        """The mean with its interval in brackets."""
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"


def interval(values: Sequence[float], draws: int = DRAWS) -> Interval:
    """Arithmetic mean of ``values``, one for each prompt and at least one, and its percentile interval; repeatable."""
    n = len(values)
    chosen = np.random.default_rng(0).integers(n, size=(draws, n))
    means = np.sort(np.asarray(values, np.float64)[chosen].mean(1))
    return Interval(sum(values) / n, float(means[draws // 40]), float(means[-draws // 40]))


def ratio(values: Sequence[float], base: Sequence[float]) -> Interval:
    """Geometric mean of the ratios own / base, paired by prompt, and its interval.

    Raises:
        ValueError: there are not as many of both.
    """
    log_ratio = interval([math.log(a / b) for a, b in zip(values, base, strict=True)])
    return Interval(math.exp(log_ratio.mean), math.exp(log_ratio.low), math.exp(log_ratio.high))


ALL = "all"
"""The category of everything."""


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns line up as text too; the first column is flush left, the others right."""
    cells = [[c.replace("|", "\\|") for c in row] for row in (header, *rows)]
    left, *right = (max(3, *map(len, column)) for column in zip(*cells, strict=True))
    lines = [f"| {' | '.join([first.ljust(left), *map(str.rjust, further, right)])} |" for first, *further in cells]
    rule = "|".join(["-" * (left + 2), *("-" * (width + 1) + ":" for width in right)])
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def overview(table: Table) -> str:
    """A row for each method, in Markdown."""
    rows = [[method, *(cell(figures[ALL]) for cell in _COLUMNS.values())] for method, figures in table.items()]
    return markdown(["method", *_COLUMNS], rows)


def ratio_text(value: Interval | None) -> str:
    """A ratio with its interval; nothing where there is none."""
    return "" if value is None else value.text()


def number(value: float | None) -> str:
    """Two decimals; nothing where there is none."""
    return "" if value is None else f"{value:.2f}"


def _verdict_text(f: MethodFigures) -> str:
    if f.ids_equal is None:
        return ""
    verdicts = [f"{count} {verdict}" for verdict, count in f.verdicts.items() if verdict != EQUAL]
    return ", ".join([f"{100 * f.ids_equal:.0f}%", *verdicts])


_COLUMNS: Mapping[str, Callable[[MethodFigures], str]] = {
    "tokens/s": lambda f: f"{f.tokens_per_second:.1f}",
    "over AR": lambda f: ratio_text(f.speedup),
    "prefill left out": lambda f: ratio_text(f.speedup_decode),
    "MAL": lambda f: number(f.mal),
    "nodes/token": lambda f: number(f.nodes_per_token),
    "nodes/step": lambda f: number(f.nodes_per_step),
    "depth": lambda f: number(f.depth_per_step),
    "accepted at depth 1, 2, ...": lambda f: " ".join(f"{x:.2f}" for x in (f.acceptance_by_depth or [])[:4]),
    "draft/verify/other": lambda f: "/".join(f"{100 * x:.0f}%" for x in (f.share or {}).values()),
    "ids equal AR's": _verdict_text,
}


@dataclass(frozen=True, slots=True)
class MethodFigures:
    """One method on the prompts of one category.

    Attributes:
        prompts: each counted once.
        tokens_per_second: all tokens over all seconds, prefill included.
        speedup: over AR decoding, prefill included.
        speedup_decode: the same with the prefill left out; None where it is not known.
        mal: mean acceptance length, tokens gained per target pass, bonus included; None where passes are not known.
        nodes_per_token: nodes verified per generated token; None for peers.
        nodes_per_step, depth_per_step: mean nodes and mean depth of the trees verified, empty ones included; None for
            peers, and where there was no step.
        acceptance_by_depth: [d] accepted over drafted nodes at depth d + 1; None for peers.
        seconds: prefill, draft, verify, other and total.
        share: of draft, verify and other in the time after the prefill; None for peers.
        ids_equal: share of answers whose ids equal AR decoding's; None: there is none to compare with.
        verdicts: verdict -> answers.
    """

    prompts: int
    tokens: int
    tokens_per_second: float
    speedup: Interval | None
    speedup_decode: Interval | None
    mal: float | None
    nodes_per_token: float | None
    nodes_per_step: float | None
    depth_per_step: float | None
    acceptance_by_depth: list[float] | None
    seconds: dict[str, float | None]
    share: dict[str, float] | None
    ids_equal: float | None
    verdicts: dict[str, int]


def figures(records: Sequence[AnswerRecord], ar: Sequence[AnswerRecord], verdicts: Mapping[Key, str]) -> MethodFigures:
    """Figures of one method's records beside AR decoding's of the same prompts, paired where AR has them."""
    tokens, seconds = sum(r.tokens for r in records), sum(r.seconds for r in records)
    passes = [r.passes for r in records if r.passes is not None]
    mal = sum(r.gained for r in records) / sum(passes) if sum(passes) else 1.0
    steps = [t.steps for r in records for t in r.turns if t.steps is not None]
    ours = len(steps) == sum(len(r.turns) for r in records)
    counts = Counter(verdicts[r.key] for r in records if r.key in verdicts)
    parts = _parts(records)
    after = seconds - (parts["prefill"] or 0.0)
    return MethodFigures(
        prompts=len({r.prompt for r in records}),
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        speedup=paired(records, ar, lambda r: r.rate),
        speedup_decode=paired(records, ar, lambda r: r.decode_rate),
        mal=mal if len(passes) == len(records) else None,
        nodes_per_token=sum(sum(s.nodes) for s in steps) / tokens if ours else None,
        nodes_per_step=_mean(s.nodes for s in steps) if ours else None,
        depth_per_step=_mean(s.depth for s in steps) if ours else None,
        acceptance_by_depth=_acceptance(steps) if ours else None,
        seconds=parts,
        share={k: (parts[k] or 0.0) / after for k in ("draft", "verify", "other")} if ours and after > 0 else None,
        ids_equal=counts[EQUAL] / counts.total() if counts else None,
        verdicts=dict(counts),
    )


def paired(
    records: Sequence[AnswerRecord], base: Sequence[AnswerRecord], of: Callable[[AnswerRecord], float | None]
) -> Interval | None:
    """Ratio of two contestants' figures, paired by prompt; None where no pair has both."""
    base_figures = {r.prompt: of(r) for r in base}
    pairs = [(of(r), base_figures.get(r.prompt)) for r in records]
    complete = [(a, b) for a, b in pairs if a and b]
    return ratio(*zip(*complete, strict=True)) if complete else None


def _parts(records: Sequence[AnswerRecord]) -> dict[str, float | None]:
    sums: dict[str, float | None] = {}
    for name in ("prefill", "draft", "verify", "other", "total"):
        values = [getattr(t.seconds, name) for r in records for t in r.turns]
        sums[name] = None if None in values else sum(values)
    return sums


def _mean(columns: Iterable[Sequence[int]]) -> float | None:
    values = [value for column in columns for value in column]
    return statistics.fmean(values) if values else None


def _acceptance(steps: Sequence[StepColumns]) -> list[float]:
    drafted = map(sum, zip_longest(*(s.drafted_by_depth for s in steps), fillvalue=0))
    accepted = map(sum, zip_longest(*(s.accepted_by_depth for s in steps), fillvalue=0))
    return [a / d if d else 0.0 for a, d in zip_longest(accepted, drafted, fillvalue=0)]


Table = dict[str, dict[str, MethodFigures]]
"""Method -> category, ``ALL`` first -> figures."""


def tabulate(records: Sequence[AnswerRecord], entries: Sequence[Entry], verdicts: Mapping[Key, str]) -> Table:
    """Figures of every method in every category, methods in the order of their first record."""
    plain = {e.label for e in entries if e.method == AR}
    table: Table = {}
    for method, rows in _by_method(records).items():
        ar = [r for r in records if r.method in plain and r.temperature == rows[0].temperature]
        categories = [ALL, *dict.fromkeys(r.category for r in rows)]
        table[method] = {
            c: figures([r for r in rows if c in (ALL, r.category)], [r for r in ar if c in (ALL, r.category)], verdicts)
            for c in categories
        }
    return table


def _by_method(records: Iterable[AnswerRecord]) -> dict[str, list[AnswerRecord]]:
    groups: dict[str, list[AnswerRecord]] = defaultdict(list)
    for record in records:
        groups[record.method].append(record)
    return dict(groups)


@dataclass(frozen=True)
class LoadedRun:
    """A run as its folder has it; read without models."""

    path: Path
    config: dict[str, Any]
    entries: tuple[Entry, ...]
    records: tuple[AnswerRecord, ...]
    table: Table

    @property
    def suite(self) -> str:
        """The suite's name, or the name of its file."""
        return Path(self.config["suite"]).name

    @property
    def prompts(self) -> int:
        """That have an answer; some of the suite may not fit the model."""
        return len({record.prompt for record in self.records})

    @property
    def left(self) -> int:
        """Answers that the run lacks; one that has a summary lacks none."""
        return 0 if read_summary(self.path) else self.config["prompts"] * len(self.entries) - len(self.records)

    @cached_property
    def by_method(self) -> dict[str, list[AnswerRecord]]:
        return _by_method(self.records)

    def of(self, wanted: Callable[[Entry], bool]) -> list[Entry]:
        """The contestants that are wanted and have answers."""
        return [e for e in self.entries if e.label in self.by_method and wanted(e)]

    def named(self, method: str) -> list[Entry]:
        """The contestants of a method, verified by the default scheme."""
        return self.of(lambda e: e.method == method and e.verify == DEFAULT_SCHEME)


def load_runs(*names: str | Path) -> list[LoadedRun]:
    """The runs of folders, or those of the folders in them, by name.

    One without answers is left out, with a warning; so is one within a folder that cannot be read, such as another
    version's.

    Raises:
        ConfigError: there is no run, or a named one cannot be read, or none has answers.
    """
    runs, left_out = list[LoadedRun](), list[str]()
    named = {user_path(name) for name in names}
    for path in (path for name in names for path in _run_folders(name)):
        try:
            config, records = read_config(path), read_results(path)
        except ConfigError as error:
            if path in named:
                raise
            left_out.append(str(error))
            continue
        if records:
            runs.append(_loaded(path, config, records))
        else:
            left_out.append(f"{path} has no answers yet: give its command again: {config['command']}")
    if not runs:
        raise ConfigError(left_out[0])
    for why in left_out:
        warnings.warn(f"left out: {why}", DraftreeWarning, stacklevel=2)
    return runs


def _run_folders(name: str | Path) -> list[Path]:
    folder = user_path(name)
    folders = [path.parent for path in (*folder.glob(CONFIG), *sorted(folder.glob(f"*/{CONFIG}")))]
    if not folders:
        raise ConfigError(f"no run in {name}: name a folder that 'draftree bench --out' wrote, or one that holds some")
    return folders


def _loaded(path: Path, config: dict[str, Any], records: Sequence[AnswerRecord]) -> LoadedRun:
    entries = tuple(Entry(**values) for values in config["entries"])
    verdicts, _ = compare(records, RunPlan([], entries, config["max_tokens"]), read_differences(path), None)
    return LoadedRun(path, config, entries, tuple(records), tabulate(records, entries, verdicts))


READING = (
    "Speed-ups are geometric means of ratios paired by prompt, with 95% bootstrap intervals, which are too narrow for "
    "fewer than ten prompts. MAL is tokens for each target pass, the bonus token included. Acceptance at a depth is "
    "accepted over drafted nodes. Draft, verify and other are shares of the time after the prefill."
)
_MOST_DIFFERENCES = 40
_MOST_CATEGORIES = 16
"""Columns of a table; Spider and SQuAD have a category for each database and text."""


def report(run: LoadedRun, level: int = 2) -> str:
    """A run in Markdown, its heading at this level: what it was made of and on, figures, answers unlike AR's."""
    parts = [f"{'#' * level} Run {run.path.name}", _described(run), overview(run.table)]
    if run.left:
        parts.insert(1, f"**Not finished**: {run.left} answers are left; the command below goes on with them.")
    deeper = "#" * (level + 1)
    categories = [c for c in next(iter(run.table.values())) if c != ALL]
    if 1 < len(categories) <= _MOST_CATEGORIES:
        for title, of in (("", "speedup"), (", prefill left out", "speedup_decode")):
            rows = [
                [method, *(ratio_text(getattr(figures[c], of)) if c in figures else "" for c in categories)]
                for method, figures in run.table.items()
            ]
            parts += [f"{deeper} Speed-up over AR decoding by category{title}", markdown(["method", *categories], rows)]
    if differences := read_differences(run.path):
        rows = [
            [d.method, d.prompt, str(d.index), "" if d.gap is None else f"{d.gap:.2g}", d.verdict]
            for d in differences[:_MOST_DIFFERENCES]
        ]
        header = ["method", "prompt", "token", "gap in logits", "verdict"]
        shown = f" (first {len(rows)} of {len(differences)})" if len(differences) > len(rows) else ""
        parts += [f"{deeper} Where answers differ from AR decoding's{shown}", markdown(header, rows)]
    return "\n\n".join([*parts, f"    {run.config['command']}"])


def _described(run: LoadedRun) -> str:
    c, machine = run.config, run.config["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in c["versions"].items())
    options = [f"{name}={c[name]}" for name in ModelOptions.__annotations__ if c.get(name) is not None]
    ran = read_summary(run.path).get("ran") or {}
    threads = "" if not ran or ran["accelerator"] else f"{ran['threads']} threads"
    parts = [threads, ran["engine"], ran["tier"], ran["accelerator"]] if ran else []
    engine = "".join(f", {part}" for part in parts if part)
    return (
        f"{run.prompts} of {c['prompts']} prompts of {run.suite}, answers of up to {c['max_tokens']} tokens; "
        f"target {' '.join([c['target'], *options])}, drafters {', '.join(c['drafters'])}, node budget "
        f"{c['nodes'] or 'the default'} unless the method sets one. {machine['processor']}, {machine['cores']} cores"
        f"{engine}; {versions}, commit {c.get('commit') or 'unknown'}; "
        f"{c['date'][:10]}."
    )
