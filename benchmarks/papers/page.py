"""The one page of results: what to use, the papers' verdicts, every method, scheme and drafter on real prompts."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable

from draftree.bench.entries import AR, LLAMA_CPP, PEER, Entry
from draftree.bench.summary import ALL, Interval, LoadedRun, MethodFigures, markdown, number, paired, ratio_text

from ..commands import without_folders
from .planned_runs import CODER, SMALL, SMOLLM2
from .sections import SPEEDS, Chapter, Runs, about, document, made_of, of, shown, sources, speeds

TEXTS = {"who": "all kinds (Spec-Bench)", "who-humaneval": "code (HumanEval)", "who-gsm8k": "sums (GSM8K)"}
TEXTS["who-edits"] = "edits of a given text"
WHO = tuple(f"{name}-{models}" for models in (SMOLLM2, CODER) for name in TEXTS)
PAYING = {models: (f"small-{models}", f"small-gsm8k-{models}") for models in (SMOLLM2, CODER)}
RIVALS = (("opt-tree", "eagle2"), ("opt-tree", "sequoia"), ("opt-tree", "dynamic-width"), ("c2t", "eagle2"))
"""Methods whose speeds are compared with one another."""
OTHERS = ("schemes-smollm2", "drafters-smollm2")
RUNS = (*WHO, *itertools.chain(*PAYING.values()), *OTHERS)
OPENING = (
    "This page has the speed of draftree's default on two models and four kinds of text, beside AR decoding and the "
    "papers' methods. It also has the verdict on each paper's claim, and one run of every verification scheme and kind "
    "of drafter."
)
PAGES = "papers"
"""Folder of the chapters, beside the page."""


def _named(run: LoadedRun, method: str) -> Entry | None:
    return next(iter(run.of(lambda e: e.method == method)), None)


def _over(run: LoadedRun, method: str, base: str) -> str:
    """Speed of one contestant over another's after the prompt, paired by prompt."""
    own, other = _named(run, method), _named(run, base)
    return "" if own is None or other is None else ratio_text(_faster(run, own, other))


def _rate(figures: MethodFigures) -> float:
    """Tokens a second after the prompt."""
    after = (figures.seconds["total"] or 0.0) - (figures.seconds["prefill"] or 0.0)
    return (figures.tokens - figures.prompts) / after if after else 0.0


def who(runs: Runs) -> list[str]:
    """Which model on which text is how fast, by what."""
    found, rates = of(runs, WHO), list[list[str]]()
    for run in found:
        name, _, models = run.path.name.rpartition("-")
        label, auto = f"{models}, {TEXTS[name]}", _named(run, "auto")
        shown_rates = [
            f"{_rate(run.table[e.label][ALL]):.0f}" if (e := _named(run, m)) else ""
            for m in (PEER + LLAMA_CPP, AR, "auto")
        ]
        whole = ratio_text(run.table[auto.label][ALL].speedup) if auto else ""
        rates.append([label, *shown_rates, _over(run, "auto", AR), whole, _over(run, "auto", PEER + LLAMA_CPP)])
    if not rates:
        return []
    header = ["model, text", "llama.cpp", "AR", "`auto`", "over AR", "with the prompt", "over llama.cpp"]
    return [
        "## What to use",
        "Tokens a second of greedy decoding after the prompt, and the speed of `auto`, the default, over AR decoding "
        "and over llama.cpp; one column counts the prompt too. Ratios are geometric means paired by prompt, with 95% "
        "intervals over prompts.",
        markdown(header, rates),
        sources(found),
    ]


def paying(runs: Runs) -> list[str]:
    """Every method at the sizes that pay, and which differences are none."""
    parts = [
        "## Every method at the sizes that pay",
        f"Trees of {' and '.join(map(str, SMALL))} nodes, greedy, with the draft head of the target alone. So `auto` "
        "is not the default here, which has `lookup` too. *Over the chain*: over that of as many tokens. EAGLE's tree "
        "of 4 nodes has one level, as the static one; the static one of 8 has 6 nodes.",
    ]
    for models, names in PAYING.items():
        if not (found := of(runs, names)):
            continue
        rows, columns = list[list[str]](), (*SPEEDS, "over the chain")
        for entry in found[0].of(lambda e: not e.is_peer):
            cells = ([*speeds(run.table[entry.label][ALL]), _over_chain(run, entry)] for run in found)
            rows.append([shown(entry), *itertools.chain(*cells)])
        header = [f"{run.suite}: {cell}" if cell == SPEEDS[0] else cell for run in found for cell in columns]
        sizes = ", ".join(f"{run.prompts} prompts of {run.suite}" for run in found)
        parts += [f"{models}, {sizes}:", markdown(["contestant", *header], rows)]
        parts += [f"No difference in `{run.path.name}`: {_no_difference(run)}." for run in found]
    return parts if len(parts) > 2 else []


def _size(entry: Entry) -> int:
    """Most nodes of a contestant's trees."""
    setting = {"chain": "depth", "hsddw": "cap"}.get(entry.method, "")
    return int(entry.settings.get(setting, entry.nodes))


def _faster(run: LoadedRun, own: Entry, other: Entry) -> Interval | None:
    """Speed of one contestant over another's after the prompt, paired by prompt."""
    return paired(run.by_method[own.label], run.by_method[other.label], lambda r: r.decode_rate)


def _over_chain(run: LoadedRun, entry: Entry) -> str:
    """Speed over the chain of as many tokens."""
    chain = next((e for e in run.named("chain") if _size(e) == _size(entry)), None)
    return ratio_text(_faster(run, entry, chain)) if chain and entry.drafter and ":" in shown(entry) else ""


def _no_difference(run: LoadedRun) -> str:
    """Contestants whose speed over that of ``auto``, and of rivals of as many nodes, has an interval with 1 in it."""
    auto, names = _named(run, "auto"), list[str]()
    others = [(e, auto) for e in run.of(lambda e: e.drafter is not None) if auto and e != auto]
    for method, rival in RIVALS:
        others += [(a, b) for a in run.named(method) for b in run.named(rival) if a.nodes == b.nodes]
    for own, other in others:
        over = _faster(run, own, other)
        if over is not None and over.low <= 1 <= over.high:
            names.append(f"`{shown(own)}` and `{shown(other)}`")
    return ", ".join(names) or "none"


ELSEWHERE = (
    "[Models without a head](how-it-works/drafters.md#a-model-of-another-vocabulary), [other systems](systems.md), "
    "[an NVIDIA H100](scale.md#gpus) and [the server beside llama.cpp's](measurements.md#the-server) are measured "
    "elsewhere."
)


def verdicts(chapters: Iterable[tuple[Chapter, str | None]]) -> list[str]:
    """Each paper's verdict, if it has one; its chapter has the figures."""
    found = [f"- [{chapter.title}]({PAGES}/{chapter.name}.md): **{said}**" for chapter, said in chapters if said]
    return ["## The papers' claims", "\n".join(found)] if found else []


def every(runs: Runs) -> list[str]:
    """Each scheme and kind of drafter on real prompts."""
    parts, titles = list[str](), ("Every verification scheme, at temperature 1", "Every kind of drafter")
    for name, title in zip(OTHERS, titles, strict=True):
        if (run := runs.get(name)) is not None:
            rows = []
            for entry in run.of(lambda e: True):
                f = run.table[entry.label][ALL]
                equal = "" if f.ids_equal is None else number(f.ids_equal)
                label = entry.label if len(run.config["drafters"]) > 1 or ":verify" in entry.label else shown(entry)
                rows.append([label, *speeds(f), equal])
            header = ["contestant", *SPEEDS, "share of ids equal to AR's"]
            parts += [f"## {title}", markdown(header, rows), sources([run])]
    return parts


def page(chapters: Iterable[tuple[Chapter, str | None]], runs: Runs) -> str:
    """The page of results, of chapters with their verdicts."""
    own = of(runs, RUNS)
    parts = [
        "# Results",
        OPENING,
        *about(own),
        *who(runs),
        ELSEWHERE,
        *verdicts(chapters),
        *paying(runs),
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
