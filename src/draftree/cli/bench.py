"""The commands ``draftree bench`` and ``draftree report``."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from ..artifacts import locked, own_folder, user_path
from ..bench.compare import ar_labels, compare, read_differences
from ..bench.contestants import Models, entries, split_names
from ..bench.replayed import ReplayedModels, check_replayed
from ..bench.results import CONFIG, RunFolder, read_summary
from ..bench.run import Run, RunPlan, check_lengths
from ..bench.suites import SUITES, Item, choose, load_suite
from ..bench.summary import READING, Table, load_runs, overview, tabulate
from ..bench.summary import as_json as table_as_json
from ..bench.summary import report as of_run
from ..config import DEFAULT_NODES, SamplingParams
from ..drafters.spec import DrafterSpec
from ..errors import ConfigError
from ..models.cost_profile import processor
from ..models.model_files import DEFAULT_MODEL
from ..policies.base import unbounded
from ..policies.methods import DEFAULT_METHOD
from ..progress import complain, err, out, progress_reporter
from .interrupt import GO_ON, on_interrupt
from .options import (
    Candidates,
    ComputeOptions,
    Nodes,
    Target,
    whole,
    with_options,
)

DEFAULT_DRAFTER = "lookup+head"
_MOST_REPEATS = 10_000
"""Each has a seed, and a line for each contestant and prompt: beyond them no plan fits the memory."""
_HASHED = 64 << 20
"""Bytes: of larger files not the content is compared but size and time."""


@with_options
def bench(
    *,
    context: typer.Context,
    suite: Annotated[str, typer.Option(metavar="NAME|FILE", help=f"Prompts: {', '.join(SUITES)}, or JSON lines.")],
    out_folder: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder of the run; the same goes on there.")],
    categories: Annotated[
        str | None, typer.Option(help="Categories of the suite, with commas; all by default.")
    ] = None,
    limit: Annotated[int | None, whole("N", "Most prompts, taken from the categories in turn.")] = None,
    turns: Annotated[int | None, whole("N", "Most turns of a conversation; all by default.")] = None,
    methods: Annotated[
        str,
        typer.Option(help="With commas: METHOD, METHOD:KEY=VALUE (nodes, verify, candidates, settings), or peer:NAME."),
    ] = DEFAULT_METHOD,
    drafters: Annotated[str, typer.Option(help="With commas; each method runs with each.")] = DEFAULT_DRAFTER,
    temperature: Annotated[str, typer.Option(metavar="T", help="One or more, with commas; 0 is greedy.")] = "0",
    max_tokens: Annotated[int, whole("N", "Most tokens of an answer.")] = 128,
    repeats: Annotated[int, whole("N", "Answers of each contestant to each prompt.")] = 1,
    seed: Annotated[int, whole("S", "Seed of the first repeat.")] = 11,
    nodes: Nodes = None,
    candidates: Candidates = None,
    data: Annotated[str | None, typer.Option(metavar="DIR", help="Folder of prompt sets; else DRAFTREE_DATA.")] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out lines and prompts that cannot be used.")
    ] = False,
    replay: Annotated[
        bool,
        typer.Option("--replay", help="Draft along AR decoding's answers; a pass takes what the cost profile says."),
    ] = False,
    target: Target = DEFAULT_MODEL,
    compute: ComputeOptions,
) -> None:
    """Measure methods beside AR decoding and rival systems on the same prompts.

    Every contestant answers every prompt, in an order that changes from prompt to prompt; DIR/results.jsonl gets a line
    for each answer. The same command goes on where it was stopped, by Ctrl-C or otherwise.

    With --replay each prompt is decoded once: trees, and what is accepted of them, are those of decoding, drafting is
    timed, and the target's passes over trees take the seconds of its cost profile ('draftree profile').
    """
    temperatures = _numbers(temperature)
    for t in temperatures:
        SamplingParams(max_tokens=max_tokens, temperature=t, seed=seed)
    if not 1 <= repeats <= _MOST_REPEATS:
        raise ConfigError(f"repeats are {repeats}: use 1 to {_MOST_REPEATS}")
    if turns is not None and turns < 1:
        raise ConfigError(f"turns are {turns}: use at least 1")
    SamplingParams(seed=seed + repeats - 1)
    named = [str(DrafterSpec.parse(name)) for name in _names(drafters)]
    contestants = entries(split_names(methods), named, temperatures, nodes, candidates)
    if replay:
        check_replayed(contestants)
    for entry in contestants:
        if note := unbounded(entry.label, entry.nodes, f"{entry.label}:nodes={DEFAULT_NODES}"):
            complain(note)
    chosen = choose(load_suite(suite, data=data, skip_bad=skip_bad), categories=_names(categories or ""), limit=limit)
    items = [replace(item, turns=item.turns[:turns]) for item in chosen]
    config = {
        "suite": suite,
        "prompts": len(items),
        "prompts_sha256": _digest(items),
        "methods": [e.label for e in contestants],
        "entries": [asdict(e) for e in contestants],
        "drafters": named,
        "temperatures": temperatures,
        "max_tokens": max_tokens,
        "repeats": repeats,
        "seed": seed,
        "nodes": nodes,
        "replay": replay,
        "files": _files([target, *named, *(v for e in contestants for v in e.settings.values())]),
        "target": target,
        **asdict(compute),
        "machine": machine(),
        "commit": commit(),
        "versions": {name: version(name) for name in ("draftree", "torch", "transformers")},
        "command": shlex.join(["draftree", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    plan = RunPlan(items, contestants, max_tokens, repeats, seed)
    context.with_resource(locked(own_folder(out_folder, "--out", CONFIG), "--out", folder=True))
    folder = RunFolder(out_folder, config, items)
    models = cache(partial(ReplayedModels if replay else Models, target, **compute.options))
    table = _run(plan, folder, models, skip_bad=skip_bad)
    out.print(overview(table), markup=False)
    err.print(f"{folder.path}: 'draftree report {folder.path}' prints its tables", markup=False)


def _run(plan: RunPlan, folder: RunFolder, models: Callable[[], Models], *, skip_bad: bool) -> Table:
    """Decode what is missing, then write the summary."""
    ran = read_summary(folder.path).get("ran")
    with on_interrupt(lambda: f"interrupted after {len(folder.records)} of {plan.answers} answers: {GO_ON}"):
        if len(folder.records) < plan.answers:
            plan = replace(plan, items=check_lengths(models().target, plan.items, skip_bad))
            with progress_reporter("decoding", plan.answers, len(folder.records)) as notify:
                harness = Run(plan, models(), folder).decode(notify)
            if not isinstance(models(), ReplayedModels):
                err.print(f"beside decoding the harness took {harness:.2%} of the time")
            can = models().target.capabilities
            ran = {"engine": can.engine, "tier": can.tier, "threads": can.threads}
        known = read_differences(folder.path)
        verdicts, differences = compare(folder.records, plan.entries, plan.items, known, lambda: models().target)
        table = tabulate(folder.records, ar_labels(plan.entries), verdicts)
        done = len(folder.records)
        folder.write_summary(
            {
                "complete": done == plan.answers,
                "answers": done,
                "of": plan.answers,
                "ran": ran,
                "methods": table_as_json(table),
                "differences": [asdict(found) for found in differences],
            }
        )
    return table


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[float]:
    try:
        found = [float(x) for x in _names(text)]
    except ValueError:
        raise ConfigError(f"temperature is {text!r}: use numbers with commas, such as 0,0.4,1") from None
    if not found:
        raise ConfigError("no temperature: use 0 for greedy decoding")
    return found


def _files(names: Iterable[str]) -> dict[str, str]:
    """Digests of the files that are among the names or parts of them: what a file holds, what a folder's files are."""
    found = {}
    for name in sorted({part for named in names for part in (named, *re.split(r"[+>]", named))}):
        path = user_path(name)
        if path.is_file():
            content = path.read_bytes() if path.stat().st_size < _HASHED else _stamp(path)
        elif path.is_dir():
            content = b"".join(sorted(_stamp(file) for file in path.iterdir() if file.is_file()))
        else:
            continue
        found[name] = hashlib.sha256(content).hexdigest()[:16]
    return found


def _stamp(path: Path) -> bytes:
    status = path.stat()
    return f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode()


def _digest(items: Sequence[Item]) -> str:
    """Tells prompt sets apart."""
    whole_set = json.dumps([[i.id, i.category, i.turns, i.reference] for i in items], ensure_ascii=False)
    return hashlib.sha256(whole_set.encode()).hexdigest()[:16]


def machine() -> dict[str, Any]:
    """What decodes: processor, cores that this process may use, threads, accelerator."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": processor(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }


def commit() -> str | None:
    """The last commit that changed the source this package runs from, marked if there are later changes.

    Returns:
        None outside a checkout.
    """
    root, git = Path(__file__).parents[3], shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None

    def output(*words: str) -> str:
        found = subprocess.run([git, "-C", root, *words, "--", "src"], capture_output=True, text=True)  # noqa: S603
        return found.stdout.strip()

    changed = "-dirty" if output("status", "--porcelain") else ""
    return output("log", "-1", "--format=%h") + changed or None


def report(
    folders: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Runs of 'draftree bench', or folders that hold some.")
    ],
) -> None:
    """Print the tables of runs in Markdown, with what they were made of and measured on; finished or not."""
    runs = [run for folder in folders for run in load_runs(folder)]
    out.print("\n\n".join([READING, *(of_run(run) for run in runs)]), markup=False)
