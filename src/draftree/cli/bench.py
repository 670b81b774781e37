"""The commands ``draftree bench`` and ``draftree report``."""

from __future__ import annotations

import gc
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ..artifacts import locked, own_folder, user_path
from ..bench.contestants import Models
from ..bench.entries import Entry, entries, split_names
from ..bench.exactness import HEADER, ExactnessCheck, has_threads, one_thread, ways
from ..bench.results import CONFIG, RunFolder, folder_of, read_summary
from ..bench.run import RunPlan, compare, decode, encode_turns, fitting, read_differences
from ..bench.suites import STARTER, SUITES, Item, choose, load_suite
from ..bench.summary import READING, load_runs, markdown, overview, tabulate
from ..bench.summary import report as of_run
from ..config import Checked, Count, NodeCount, SamplingParams, Seed, TopP, Whole, option
from ..drafters.spec import DEFAULT_DRAFTER
from ..errors import ConfigError, RunError
from ..models.cost_profile import processor
from ..models.loading import ModelOptions
from ..models.model_files import DEFAULT_MODEL
from ..policies.methods import DEFAULT_METHOD
from ..progress import err, out, progress_reporter
from .interrupt import GO_ON, on_interrupt
from .options import ComputeOptions, Target, with_options


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(Checked):
    """Which prompts are answered, by whom, and how."""

    limit: Count | None = option("Most prompts, taken from the categories in turn.", metavar="N")
    turns: Count | None = option("Most turns of a conversation; all by default.", metavar="N")
    methods: str = option(
        "With commas: METHOD, METHOD:KEY=VALUE (nodes, verify, candidates, settings), MODULE:POLICY, or peer:NAME.",
        DEFAULT_METHOD,
    )
    drafters: str = option("With commas, named as for generate; each method runs with each.", DEFAULT_DRAFTER)
    temperature: str = option("One or more, with commas; 0 is greedy.", "0", metavar="T")
    max_tokens: Count = option("Most tokens of an answer.", 128, metavar="N")
    seed: Seed = option("Of sampled answers.", 11, metavar="S")
    top_k: Whole = option("Sample among the k most probable tokens; 0 is off.", 0, metavar="K")
    top_p: TopP = option("Sample within this much probability; 1 is off.", 1.0, metavar="P")
    nodes: NodeCount | None = option("Node budget of methods that name none; each has its own by default.", metavar="N")
    candidates: str | None = option("Of methods that name none (see generate).", metavar="KIND")
    data: str | None = option("Folder of prompt sets; else DRAFTREE_DATA.", metavar="DIR")
    check_exact: bool = option(
        "Only count greedy answers that are not AR decoding's, with trees of several sizes, requests at once, and one "
        "thread; exit code 1 where rounding does not explain one.",
        False,
    )


_FULL = "opt-tree:delta=0.001"
"""The method of ``--check-exact`` in place of auto, which may draft nothing: it fills its node budget."""


@with_options
def bench(
    *,
    context: typer.Context,
    suite: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help=f"Prompts: {STARTER} (20 that come with draftree), {', '.join(SUITES)}, or JSON lines.",
        ),
    ] = STARTER,
    out_folder: Annotated[
        str | None,
        typer.Option("--out", metavar="DIR", help="Folder of the run; the same goes on there. By default one in runs."),
    ] = None,
    options: BenchOptions,
    target: Target = DEFAULT_MODEL,
    compute: ComputeOptions,
) -> None:
    """Measure methods beside AR decoding and rival systems on the same prompts.

    Every contestant answers every prompt, in an order that changes from prompt to prompt; DIR/results.jsonl gets a line
    for each answer. The same command goes on where it was stopped, by Ctrl-C or otherwise. Without options it compares
    the default method with AR decoding on 20 prompts, and takes a minute with the default model.
    """
    try:
        temperatures = [float(t) for t in options.temperature.removesuffix(",").split(",")]
    except ValueError:
        raise ConfigError(f"--temperature is {options.temperature!r}: use numbers with commas, such as 0,0.8") from None
    drafters, methods = split_names(options.drafters), split_names(options.methods)
    if options.check_exact:
        if out_folder is not None or options.nodes is not None:
            raise ConfigError("--check-exact writes no folder and sets node budgets: leave out --out and --nodes")
        methods = [re.sub(rf"^{DEFAULT_METHOD}(?=:|$)", _FULL, method) for method in methods]
    contestants = entries(methods, drafters, temperatures, options.nodes, options.candidates)
    chosen = choose(load_suite(suite, data=options.data), limit=options.limit)
    if options.check_exact:
        _check_exact(partial(Models, target), compute.options, contestants, chosen, options.max_tokens)
        return
    items = [replace(item, turns=item.turns[: options.turns]) for item in chosen]
    config = {
        "suite": suite,
        "prompts": len(items),
        "prompts_sha256": _digest(items),
        "entries": [asdict(e) for e in contestants],
        "drafters": drafters,
        **{name: getattr(options, name) for name in ("max_tokens", "seed", "nodes", "top_k", "top_p")},
        "files": _files([target, *drafters, *(name for e in contestants for name in e.files)]),
        "target": target,
        **asdict(compute),
        "machine": machine(),
        "commit": commit(),
        "code": code_digest(Path(__file__).parents[1]),
        "versions": {name: version(name) for name in ("draftree", "torch", "transformers") if find_spec(name)},
        "command": shlex.join(["draftree", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    sampling = SamplingParams(seed=options.seed, top_k=options.top_k, top_p=options.top_p)
    plan = RunPlan(items, contestants, options.max_tokens, sampling)
    path = own_folder(folder_of(config) if out_folder is None else out_folder, "--out", CONFIG)
    context.with_resource(locked(path, "--out", folder=True))
    folder = RunFolder(path, config, items)
    ran, before = read_summary(folder.path).get("ran"), len(folder.records)
    models = cache(partial(Models, target, **compute.options))
    with on_interrupt(lambda: f"interrupted after {len(folder.records)} of {plan.answers} answers: {GO_ON}"):
        if len(folder.records) < plan.answers:
            plan = replace(plan, items=fitting(models().target, plan.items))
            with progress_reporter("decoding", plan.answers, len(folder.records)) as notify:
                decode(plan, models(), folder, notify)
            can = models().target.capabilities
            ran = {name: getattr(can, name) for name in ("engine", "tier", "threads", "accelerator")}
        verdicts, differences = compare(folder.records, plan, read_differences(folder.path), lambda: models().target)
        table = tabulate(folder.records, plan.entries, verdicts)
        folder.write_summary(
            {
                "ran": ran,
                "methods": {name: {of: asdict(cell) for of, cell in rows.items()} for name, rows in table.items()},
                "differences": [asdict(difference) for difference in differences],
            }
        )
    out.print(overview(table))
    earlier = " was finished earlier, and nothing was decoded now" if before == len(folder.records) else ""
    err.print(f"{folder.path}{earlier}: 'draftree report {folder.path}' prints its tables")


def _check_exact(
    load: Callable[..., Models], options: ModelOptions, contestants: Sequence[Entry], items: Sequence[Item], most: int
) -> None:
    """Print how many answers to the items' first turns, of at most so many tokens, are not those of AR decoding.

    Raises:
        RunError: there are some that rounding does not explain.
    """
    drafting = contestants[1:]
    if any(entry.temperature for entry in drafting):
        raise ConfigError("--check-exact compares greedy answers: leave out --temperature")
    if wrong := next((e.label for e in drafting if e.is_peer or e.beams or ":nodes=" in e.label), None):
        raise ConfigError(
            f"--check-exact does not go with {wrong!r}: name methods that draft for greedy answers, without nodes"
        )
    models = load(**options)
    can, items = models.target.capabilities, fitting(models.target, items)
    prompts = [encode_turns(models.target, item.turns[:1]) for item in items]
    with progress_reporter("decoding", ways(drafting, can) * len(prompts)) as notify:
        check = ExactnessCheck(prompts, most, notify)
        findings = list(check.compare(models, drafting))
        del models
        gc.collect()  # its memory may be that of the next one
        try:
            if has_threads(can):
                with one_thread(options, can) as changed:
                    findings.append(check.compare_ar(load(**changed).target))
        finally:
            out.print(markdown(HEADER, [finding.cells for finding in findings]))
    out.print(f"\ndraft trees of {can.name} on {can.engine}: {can.trees or can.no_trees}")
    if unexplained := sum(finding.unexplained for finding in findings):
        raise RunError(f"{unexplained} answers differ from AR decoding's by more than rounding")


def _files(names: Iterable[str]) -> dict[str, str]:
    """Size and time of the files, and of the folders' files, that are among the names or parts of them."""
    digests = {}
    for name in sorted({part for named in names for part in (named, *filter(None, re.split(r"[+>]", named)))}):
        path = user_path(name)
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
        if stats:
            digests[name] = _digest(stats)
    return digests


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def machine() -> dict[str, Any]:
    """What decodes: processor, cores that this process may use, system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": processor(),
        "cores": cores,
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
        result = subprocess.run([git, "-C", root, *words, "--", "src"], capture_output=True, text=True)  # noqa: S603
        return result.stdout.strip()

    changed = "-dirty" if output("status", "--porcelain") else ""
    return output("log", "-1", "--format=%h") + changed or None


def code_digest(package: Path) -> str:
    """Of a package's Python files and libraries: answers of two versions of a method are two runs, committed or not."""
    files = sorted(file for file in package.rglob("*") if file.suffix in (".py", ".so", ".dylib", ".dll"))
    return _digest([(file.relative_to(package).as_posix(), file.read_bytes()) for file in files])


def report(
    folders: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Runs of 'draftree bench', or folders that hold some.")
    ],
) -> None:
    """Print the tables of runs in Markdown, with what they were made of and measured on; finished or not."""
    out.print("\n\n".join([READING, *map(of_run, load_runs(*folders))]))
