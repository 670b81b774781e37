"""What every run found: the table of all methods, by category, and where ids part from plain decoding's."""

from __future__ import annotations

from collections.abc import Sequence

from ..results import read_summary
from ..summary import ALL, HEADER, number, overview, ratio_text
from .page import Grid, Section
from .source import LoadedRun

READING = (
    "Speed-ups are geometric means of ratios paired by prompt, with 95% bootstrap intervals. MAL is tokens for each "
    "target pass, the bonus token included. Acceptance at a depth is accepted over drafted nodes. Draft, verify and "
    "other are shares of the time after the prefill. Memory is that of the whole process, the models of all "
    "contestants included."
)


def sections(runs: Sequence[LoadedRun]) -> list[Section]:
    """The sections of all runs."""
    how = Section("How to read the tables", [READING])
    return [how, *(section for run in runs for section in _of(run))]


def _of(run: LoadedRun) -> list[Section]:
    found = [
        Section(f"Run {run.path.name}", _described(run), Grid(HEADER, overview(run.table)), commands=[run.command])
    ]
    categories = [c for c in next(iter(run.table.values())) if c != ALL]
    if len(categories) > 1:
        rows = [
            [method, *(ratio_text(rows[c].speedup) if c in rows else "" for c in categories)]
            for method, rows in run.table.items()
        ]
        found.append(
            Section("Speed-up over plain decoding by category", grid=Grid(["method", *categories], rows), level=4)
        )
    if scored := _scores(run):
        found.append(Section("What the answers are worth", grid=scored, level=4))
    if partings := read_summary(run.path).get("partings"):
        rows = [
            [p["method"], p["prompt"], str(p["index"]), "" if p["gap"] is None else f"{p['gap']:.2g}", p["verdict"]]
            for p in partings
        ]
        header = ["method", "prompt", "token", "gap in logits", "verdict"]
        found.append(Section("Where answers part from plain decoding's", grid=Grid(header, rows[:40]), level=4))
    return found


def _described(run: LoadedRun) -> list[str]:
    c, machine = run.config, run.config["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in c["versions"].items())
    answers = len({(r.prompt, r.repeat) for r in run.records})
    return [
        f"{c['prompts']} prompts of {run.suite}, {answers} answers of each contestant of up to {c['max_tokens']} "
        f"tokens; target {c['target']} in {c['numerics']}, drafters {', '.join(c['drafters'])}, node budget "
        f"{c['nodes'] or 'the default'} where nothing else is said. {machine['processor']}, {machine['cores']} cores, "
        f"{machine['threads']} threads{', ' + machine['accelerator'] if machine['accelerator'] else ''}; {versions}; "
        f"{c['date'][:10]}.",
    ]


def _scores(run: LoadedRun) -> Grid | None:
    scores = {method: rows[ALL].score for method, rows in run.table.items()}
    names = sorted({name for score in scores.values() if score for name in score})
    if not names:
        return None
    rows = [[method, *(number(score.get(name)) for name in names)] for method, score in scores.items() if score]
    return Grid(["method", *names], rows)
