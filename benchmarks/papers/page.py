"""The one page of results: what to use, the papers' verdicts, every method, scheme and drafter on real prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from draftree.bench.entries import AR, LLAMA_CPP, PEER, Entry
from draftree.bench.summary import ALL, Interval, LoadedRun, MethodFigures, markdown, number, paired, ratio_text
from draftree.config import DEFAULT_NODES, MAX_NODES

from ..rivals import HEADER
from .plan import CODER, SMOLLM2
from .sections import SPEEDS, Chapter, Runs, about, document, made_of, of, shown, sources, speeds, without_folders

TEXTS = {"who": "all kinds (Spec-Bench)", "who-humaneval": "code (HumanEval)", "who-gsm8k": "sums (GSM8K)"}
TEXTS["who-edits"] = "edits of a given text"
WHO = tuple(f"{name}-{models}" for models in (SMOLLM2, CODER) for name in TEXTS)
OWN = ("auto", "opt-tree", "eagle2", "dynamic-width", "c2t")
UNBOUNDED = (
    f"`dynamic-width` and `dynamic-width-depth` had no node budget, as in the paper (`--nodes {MAX_NODES}`); "
    f"by default they have {DEFAULT_NODES}."
)
OPENING = (
    "This page has the speed of draftree's default on two models and four kinds of text, beside AR decoding, the "
    "papers' methods and other systems. It also has the verdict on each paper's claim, and one run of every method, "
    "verification scheme and kind of drafter."
)
PAGES = "papers"
"""Folder of the chapters, beside the page."""


def _named(run: LoadedRun, method: str) -> Entry | None:
    return next(iter(run.of(lambda e: e.method == method)), None)


def _over(run: LoadedRun, method: str, base: str) -> str:
    """Speed of one contestant over another's after the prompt, paired by prompt."""
    own, other = _named(run, method), _named(run, base)
    if own is None or other is None:
        return ""
    return ratio_text(paired(run.by_method[own.label], run.by_method[other.label], lambda r: r.decode_rate))


def _rate(figures: MethodFigures) -> float:
    """Tokens a second after the prompt."""
    after = (figures.seconds["total"] or 0.0) - (figures.seconds["prefill"] or 0.0)
    return (figures.tokens - figures.prompts) / after if after else 0.0


def who(runs: Runs) -> list[str]:
    """Which model on which text is how fast, by what."""
    found, rates, methods = of(runs, WHO), list[list[str]](), list[list[str]]()
    for run in found:
        name, _, models = run.path.name.rpartition("-")
        label, auto = f"{models}, {TEXTS[name]}", _named(run, "auto")
        shown_rates = [
            f"{_rate(run.table[e.label][ALL]):.0f}" if (e := _named(run, m)) else ""
            for m in (PEER + LLAMA_CPP, AR, "auto")
        ]
        whole = ratio_text(run.table[auto.label][ALL].speedup) if auto else ""
        rates.append([label, *shown_rates, _over(run, "auto", AR), whole, _over(run, "auto", PEER + LLAMA_CPP)])
        methods.append([label, *(_over(run, method, AR) for method in OWN)])
    if not rates:
        return []
    header = ["model, text", "llama.cpp", "AR", "`auto`", "over AR", "with the prompt", "over llama.cpp"]
    return [
        "## What to use",
        "Tokens a second of greedy decoding after the prompt, and the speed of `auto`, the default, over AR decoding "
        "and over llama.cpp; one column counts the prompt too. Ratios are geometric means paired by prompt, with 95% "
        "intervals over prompts.",
        markdown(header, rates),
        "Speed over AR decoding of `auto` and of the papers' methods with 4 nodes:",
        markdown(["model, text", *(f"`{method}`" for method in OWN)], methods),
        sources(found),
    ]


def systems(rows: Sequence[Sequence[str]]) -> list[str]:
    """Other systems on the same prompts and cores, a table for each model and suite."""
    if not rows:
        return []
    parts = [
        "## Beside other systems",
        "Tokens a second of greedy decoding after the prompt, each system in a process of its own on the same two "
        "cores (`python -m benchmarks.rivals`, [how](bench.md)). *Text as plain* counts the prompts whose text is "
        "that of the system's own decoding without drafts.",
    ]
    for model, suite in dict.fromkeys((row[0], row[1]) for row in rows):
        own = [row[2:] for row in rows if (row[0], row[1]) == (model, suite)]
        kept = [at for at, column in enumerate(zip(*own, strict=True)) if any(column)]
        header, *cells = ([row[at] for at in kept] for row in (HEADER[2:], *own))
        parts += [f"{model}, {suite} tokens:", markdown(header, cells)]
    return parts


ELSEWHERE = (
    "[An NVIDIA H100](scale.md#gpus) and [the server beside llama.cpp's](measurements.md#the-server) have pages of "
    "their own."
)


def verdicts(chapters: Sequence[Chapter], runs: Runs) -> list[str]:
    """Each paper's verdict; its chapter has the figures."""
    found = [
        f"- [{chapter.title}]({PAGES}/{chapter.name}.md): **{verdict}**"
        for chapter in chapters
        if (verdict := chapter.verdict(runs))
    ]
    return ["## The papers' claims", "\n".join(found)] if found else []


def every(runs: Runs) -> list[str]:
    """Each method, scheme and kind of drafter on real prompts."""
    parts = list[str]()
    for name, title, note in (
        ("every-smollm2", "Every method", UNBOUNDED),
        ("schemes-smollm2", "Every verification scheme, at T = 1", ""),
        ("drafters-smollm2", "Every kind of drafter", ""),
    ):
        if (run := runs.get(name)) is not None:
            rows = []
            for entry in run.of(lambda e: True):
                f = run.table[entry.label][ALL]
                equal = "" if f.ids_equal is None else number(f.ids_equal)
                label = entry.label if len(run.config["drafters"]) > 1 or ":verify" in entry.label else shown(entry)
                rows.append([label, *speeds(f), equal])
            header = ["contestant", *SPEEDS, "share of ids equal to AR's"]
            parts += filter(None, [f"## {title}", markdown(header, rows), note, sources([run])])
    return parts


def page(chapters: Sequence[Chapter], runs: Runs, rivals: Sequence[Sequence[str]] = ()) -> str:
    """The page.

    Args:
        rivals: rows of ``benchmarks.rivals.table``.
    """
    own = of(runs, (*WHO, "every-smollm2", "schemes-smollm2", "drafters-smollm2"))
    parts = [
        "# Results",
        OPENING,
        *about(own),
        *who(runs),
        *systems(rivals),
        ELSEWHERE,
        *verdicts(chapters, runs),
        *every(runs),
        *made_of(own),
    ]
    return document(parts)


def digests(runs: Runs) -> str:
    """A JSON line a run: its command, machine, commit and answers' digest, and each contestant's figures."""
    lines = []
    for name, run in runs.items():
        figures = {
            without_folders(label): {
                "tokens_per_second": round(f.tokens_per_second, 2),
                "over_ar": _interval(f.speedup_decode),
                "mal": f.mal and round(f.mal, 3),
                "nodes_per_step": f.nodes_per_step and round(f.nodes_per_step, 2),
            }
            for label, f in ((label, found[ALL]) for label, found in run.table.items())
        }
        answers = hashlib.sha256((run.path / "results.jsonl").read_bytes()).hexdigest()
        config = {key: run.config[key] for key in ("commit", "machine", "versions", "prompts", "date")}
        command = without_folders(run.config["command"])
        lines.append(
            json.dumps({"run": name, "command": command, **config, "results_sha256": answers, "figures": figures})
        )
    return "\n".join(lines) + "\n"


def _interval(found: Interval | None) -> list[float] | None:
    return None if found is None else [round(x, 3) for x in (found.mean, found.low, found.high)]
