"""The runs that the report is made of, by name: what each decodes, and about how long that takes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftree.artifacts import user_path, write_whole
from draftree.bench.entries import split_names
from draftree.bench.results import read_config, read_summary
from draftree.bench.suites import data_folder
from draftree.bench.summary import ALL, load_runs
from draftree.config import MAX_NODES
from draftree.errors import ConfigError, RunError
from draftree.models.model_files import DEFAULT_MODEL
from draftree.progress import err

from ..commands import without_folders
from ..quality.answers import FILE as SCORES

SMOLLM2, CODER = "smollm2", "coder"
"""SmolLM2-135M-Instruct with its head; Qwen2.5-Coder-1.5B-Instruct with the 0.5B."""
FILES = {"target": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "draft": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"}
"""Of the pair, in the folder that the user names."""

WHO = "auto,peer:llama.cpp"
"""What users choose from."""
DYNAMIC = (
    f"chain,static,early-stop:nodes=4,early-stop,naive-width:depth=4:nodes=7,dynamic-width:nodes={MAX_NODES},"
    f"dynamic-width-budget,dynamic-width-depth:nodes={MAX_NODES},dynamic-width:nodes=4"
)
"""The paper's methods, and ours. Its chain has 4 tokens; of the length of its other chains it says nothing, so they are
within 4 levels here (naive width: three tokens and four leaves), and early stopping is also within 31. Two methods have
no node budget, as there."""
MOVED = ("sure=0.1", "sure=0.3", "unsure=0.5", "unsure=2", "slope=2", "slope=6")
"""Settings of B(H), one moved at a time."""
STEPS = ",".join(("dynamic-width-budget", *(f"dynamic-width-budget:{setting}" for setting in MOVED)))
BEST = "opt-tree:nodes=25:delta={delta}"
"""OPT-Tree with the threshold that was fastest on prompts kept apart."""
SEQUOIAS = (8, 16, 32, 64, 128, 256)
SMALL = (4, 8)
"""Node budgets that pay on two cores."""
TREES = f"eagle:nodes=25,{BEST}," + ",".join(
    f"binary:nodes={n},sequoia:tree={{sequoia}}-{n}.json:nodes={n},eagle2:nodes={n}"
    + f",opt-tree:nodes={n}:delta={{delta}}" * (n in SMALL)
    for n in (25, *SMALL)
)
"""EAGLE's own tree has 25 nodes. The paper chooses the others' number for speed, of 25, 50 and 60: here it is small."""
PAYING = ",".join(
    (
        "auto,static:nodes=4:width=4:depth=1,static:nodes=8:width=2:depth=2",
        "eagle2:nodes=4:width=2:depth=3,eagle2:nodes=8:width=3:depth=4",
        *(
            f"chain:depth={n},early-stop:nodes={n},binary:nodes={n},eagle:nodes={n},"
            f"sequoia:tree={{sequoia}}-{n}.json:nodes={n},opt-tree:nodes={n},dynamic-width:nodes={n},"
            f"c2t:classifier={{classifier}}:nodes={n},hsddw:cap={n}"
            for n in SMALL
        ),
    )
)
"""Every method at these sizes."""
SIZES = ",".join(
    (
        *(f"opt-tree:nodes={nodes}:delta={{delta}}" for nodes in (8, 16, 32, 64, 128, 256)),
        *(f"sequoia:tree={{sequoia}}-{nodes}.json:nodes={nodes}" for nodes in SEQUOIAS),
    )
)
TREE_SIZES = sorted({25, *SMALL, *SEQUOIAS})
"""Of Sequoia's trees."""
DELTAS = ",".join(f"opt-tree:nodes=25:delta={delta}" for delta in (0.05, 0.1, 0.2, 0.4, 0.8))
BY_COSTS = "opt-tree:nodes=25"
"""With the threshold that its own figures choose, the default."""
WINDOWS = ",".join(
    (*(f"chain:depth={depth}" for depth in (2, 4, 7, 10, 20)), *(f"hsddw:cap={cap}" for cap in (5, 10, 20)))
)
TOPS = (15, 20, 25, 30, "none")
BETAS = (0.3, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005)
CONFIDENCE = ",".join(
    (
        *(f"eagle2:nodes={nodes}:depth=10" for nodes in (4, 8, 16, 32, 64)),
        *(f"opt-tree:nodes={nodes}:delta=0.001" for nodes in (4, 8, 16, 32, 64, 96, 128)),
        *(f"c2t:classifier={{{net}}}:nodes=256:beta={beta}" for net in ("classifier", "other") for beta in BETAS),
        *(f"c2t:classifier={{classifier}}:nodes=256:beta=0.01:top={top}" for top in TOPS),
    )
)
"""Of C2T's: EAGLE-2 at C2T's depth, OPT-Tree, for SmolLM2 the coder's classifier too, and the second top-K."""
LEVELS = "lookup>{upper},lookup>{upper}:pending=1,lookup>{upper}:rejected=on,{upper}"
THREE = f"head>{{upper}},head,{LEVELS}"
"""Of drafters: as published, their ablation and ours, and each middle or lower model alone."""
FOREST = ",".join(
    (
        "beams:width=5:drafter=none,beams:width=2:drafter=none",
        *(f"beams:width=5:drafter={{draft}}:depth=3:{s}" for s in ("threshold=0.9", "threshold=0.7:least=2")),
        "beams:width=2:drafter={draft}:depth=3:threshold=0.9",
        "beams:width=5:drafter={draft}:depth=3:single=yes",
        "chain:depth=3:verify=multi-round,static:depth=3:verify=multi-round-replacement",
    )
)
"""Sampled beams with and without a drafter, and what the paper sets beside them: W is 5, gamma 3."""
GRID = ",".join(
    (
        *(f"beams:width={w}:drafter=none" for w in (3, 5)),
        *(
            f"beams:width={w}:draft={w}:drafter={{draft}}:depth=3:threshold={t}:least={least}"
            for w in (3, 5)
            for t in (0.7, 0.9)
            for least in (1, 3)
        ),
    )
)
"""The paper's settings of a dynamic width: W_S, t and W_min."""
QUALITY = ",".join(
    (
        "chain:depth=3:verify=relaxed,chain:depth=3:verify=multi-round",
        "static:depth=3:verify=multi-round-replacement",
        "beams:width=5:drafter=none",
        *(f"beams:width={w}:draft={w}:drafter={{draft}}:depth=3:threshold=0.9" for w in (3, 5)),
    )
)
"""What may change answers, or keep better ones: the lossy scheme, beam sampling, and DSBD with W_S 3 and 5; beside
them what the paper compares with."""
SCHEMES = (
    "chain,static,chain:verify=multi-round,static:verify=multi-round,static:verify=multi-round-replacement,"
    "static:verify=top1-residual,static:verify=relaxed"
)
_PROMPTS = 40
"""Of Self-Instruct, for trees and the threshold; classifiers take all."""
_APART = 12
"""Of them, for the threshold."""
PROMPTS, TASKS = "prompts.jsonl", "tasks.jsonl"
"""Files of them."""
SAMPLES = 100_000
"""Of the coder's classifier."""
_MINUTES = {SMOLLM2: 1.0, CODER: 3.0, TASKS: 60.0}
"""About, for a tree or a threshold of these models, and for the coder's classifier."""
DRAFTERS = "lookup,head,lookup+head,lookup>head"
"""Kinds of drafters."""
UNIVERSAL = f"lookup,lookup+{DEFAULT_MODEL}"
"""What drafts where there is no head."""
EDITS = "edits"
"""The suite that ``benchmarks.edits`` writes."""
PROGRAMS = "programs"
"""Tasks of MBPP's test part, whose answers begin with prose and not with a copy of the prompt."""
_ASKED = (
    "{} Explain the idea step by step first; then give the whole function with type hints and a docstring, and say "
    "what it costs in time and memory."
)
MBPP_TESTS = range(11, 511)
"""Numbers of MBPP's test tasks."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of ``draftree bench``.

    Attributes:
        models: ``SMOLLM2`` or ``CODER``.
        suite: a published one, or ``EDITS``.
        limit, tokens: prompts of the suite, and most tokens of an answer.
        methods, drafters: as ``draftree bench`` takes them; names in braces are those of ``Plan.names``.
        options: more of its arguments.
        scored: answers are scored, and the target's entropy along them is measured.
        minutes: about, on 2 cores.
    """

    name: str
    models: str
    suite: str
    limit: int
    tokens: int
    methods: str
    minutes: float
    drafters: str = "{head}"
    temperature: str = "0"
    options: tuple[str, ...] = ()
    scored: bool = False

    def quick(self) -> PlannedRun:
        """The same run, small."""
        limit, tokens = min(self.limit, 3), min(self.tokens, 24)
        share = limit / self.limit * tokens / self.tokens
        return replace(self, limit=limit, tokens=tokens, minutes=self.minutes * share)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft model.

    Attributes:
        target, draft: files, folders or names.
        head: drafts where a run has the target's head.
    """

    target: str
    draft: str
    head: str = "head"

    @classmethod
    def of_folder(cls, folder: str) -> Pair:
        """Qwen2.5-Coder's.

        Raises:
            ConfigError: a file is not there.
        """
        for file in FILES.values():
            if not (user_path(folder) / file).is_file():
                raise ConfigError(f"{user_path(folder) / file} is not there: name the folder that has both files")
        return cls(*(f"{folder}/{file}" for file in FILES.values()))

    @classmethod
    def of_user(cls, target: str, draft: str) -> Pair:
        """A user's own, of which no head is known: its runs are those of Qwen2.5-Coder's, with these models."""
        return cls(target, draft, draft)


Size = tuple[int, int, float]
"""Prompts, tokens of an answer, minutes."""


def _both(name: str, suite: str, methods: str, smollm2: Size, coder: Size, **more: object) -> list[PlannedRun]:
    """A run of each pair of models."""
    sizes = ((SMOLLM2, smollm2), (CODER, coder))
    return [PlannedRun(f"{name}-{m}", m, suite, n, most, methods, each, **more) for m, (n, most, each) in sizes]  # type: ignore[arg-type]


FIRST, PLAIN = ("--turns", "1"), ("--candidates", "plain")
TOP_K, TOP_P = ("--top-k", "10"), ("--top-p", "0.9")
_BEAMS: Mapping[str, Any] = {"drafters": "{draft}", "temperature": "0.7"}
RUNS: Sequence[PlannedRun] = (
    *_both("who", "spec-bench", WHO, (39, 80, 3), (13, 80, 4), drafters="auto", options=FIRST),
    *_both("who-humaneval", "humaneval", WHO, (10, 96, 1), (10, 96, 3), drafters="auto"),
    *_both("who-gsm8k", "gsm8k", WHO, (10, 96, 1), (10, 96, 3), drafters="auto"),
    *_both("who-edits", EDITS, WHO, (12, 150, 1), (12, 150, 4), drafters="auto", options=FIRST),
    PlannedRun("universal-coder", CODER, "spec-bench", 39, 80, "auto", 6, UNIVERSAL, options=FIRST),
    PlannedRun("universal-gsm8k-coder", CODER, "gsm8k", 20, 96, "auto", 4, UNIVERSAL),
    PlannedRun("universal-humaneval-coder", CODER, "humaneval", 20, 96, "auto", 4, UNIVERSAL),
    *_both("small", "spec-bench", PAYING, (40, 80, 4), (40, 80, 32), options=FIRST),
    *_both("small-gsm8k", "gsm8k", PAYING, (40, 80, 4), (40, 80, 32)),
    PlannedRun("widths-smollm2", SMOLLM2, "mbpp", 45, 64, DYNAMIC, 9, temperature="0.4", options=PLAIN),
    PlannedRun("programs-coder", CODER, PROGRAMS, 45, 128, DYNAMIC, 28, "{draft}", "0.4", PLAIN),
    *_both("trees", "mt-bench", TREES, (32, 128, 7), (12, 64, 8), options=FIRST),
    *_both("gsm8k", "gsm8k", TREES, (32, 64, 4), (10, 64, 5)),
    *_both("levels", "mt-bench", "hsddw:nodes=60", (32, 64, 2), (16, 64, 4), drafters="{levels}", options=FIRST),
    *_both("gsm8k-levels", "gsm8k", "hsddw:nodes=60", (32, 64, 2), (16, 64, 4), drafters="{levels}"),
    *_both("windows", "mt-bench", WINDOWS, (32, 64, 2), (16, 64, 5), drafters="{draft}", options=FIRST),
    *_both("confidence", "mt-bench", CONFIDENCE, (24, 64, 14), (16, 48, 35), options=FIRST),
    PlannedRun("spider-beams-coder", CODER, "spider", 60, 48, FOREST, 45, scored=True, **_BEAMS),
    PlannedRun("squad-beams-coder", CODER, "squad", 60, 32, FOREST, 15, scored=True, **_BEAMS),
    *_both("sizes", "mt-bench", SIZES, (12, 64, 4), (5, 48, 6), options=FIRST),
    PlannedRun("spider-widths-coder", CODER, "spider", 24, 64, GRID, 6, scored=True, **_BEAMS),
    PlannedRun("spider-quality-coder", CODER, "spider", 16, 64, QUALITY, 2, scored=True, **_BEAMS),
    PlannedRun("spider-top-k-coder", CODER, "spider", 16, 64, QUALITY, 2, options=TOP_K, scored=True, **_BEAMS),
    PlannedRun("spider-top-p-coder", CODER, "spider", 16, 64, QUALITY, 2, options=TOP_P, scored=True, **_BEAMS),
    PlannedRun("humaneval-quality-coder", CODER, "humaneval", 20, 256, QUALITY, 10, scored=True, **_BEAMS),
    PlannedRun("gsm8k-quality-coder", CODER, "gsm8k", 12, 320, QUALITY, 9, scored=True, **_BEAMS),
    PlannedRun("mt-bench-beams-coder", CODER, "mt-bench", 12, 128, FOREST, 8, options=FIRST, **_BEAMS),
    PlannedRun("answers-coder", CODER, "gsm8k", 200, 320, "ar", 27, "lookup", scored=True),
    *_both("plain", "mt-bench", TREES, (32, 64, 4), (12, 48, 4), temperature="1", options=(*FIRST, *PLAIN)),
    *_both("deltas", "mt-bench", f"{DELTAS},{BY_COSTS}", (12, 64, 1), (5, 48, 1), options=FIRST),
    *_both(
        "temperatures",
        "mt-bench",
        BEST,
        (12, 64, 1),
        (5, 48, 1),
        temperature="0,0.25,0.5,0.75,1",
        options=(*FIRST, *PLAIN),
    ),
    PlannedRun("steps-smollm2", SMOLLM2, "mt-bench", 16, 64, STEPS, 2, temperature="0.4", options=(*FIRST, *PLAIN)),
    PlannedRun("schemes-smollm2", SMOLLM2, "spec-bench", 13, 48, SCHEMES, 1, temperature="1", options=FIRST),
    PlannedRun("drafters-smollm2", SMOLLM2, "spec-bench", 13, 64, "auto,opt-tree:nodes=8", 2, DRAFTERS, options=FIRST),
)
"""In the order of measuring: those of a paper's main claim come first."""


class Plan:
    """The runs of a folder.

    Args:
        folder: of the runs.
        pair: decodes the coder's runs; None: they are left out. With a user's own those of SmolLM2 are left out.
        quick: small runs.
        only: names of runs; None: all.
        methods: contestants that take part in all runs beside the planned ones.
    """

    def __init__(
        self,
        folder: str | Path,
        pair: Pair | None,
        *,
        quick: bool,
        only: Collection[str] | None = None,
        methods: Sequence[str] = (),
    ) -> None:
        self.folder, self._pair, self._methods = user_path(folder).absolute(), pair, methods
        self._own = pair is not None and pair.head != "head"
        able = [run for run in RUNS if (run.models == SMOLLM2 and not self._own) or (run.models == CODER and pair)]
        self.runs = [run.quick() if quick else run for run in able if only is None or run.name in only]

    def names(self, models: str) -> dict[str, str]:
        """What the names in braces stand for."""
        made, shipped = self.folder / "made", "smollm2-head"
        own, delta = str(made / "c2t-coder.json"), self._delta(models)
        found = {
            "sequoia": str(made / f"sequoia-{models}"),
            "delta": delta.read_text() if delta.is_file() else "auto",
            **{suite: str(made / f"{suite}.jsonl") for suite in (EDITS, PROGRAMS)},
        }
        if models == CODER and self._pair:
            found |= asdict(self._pair) | {"upper": self._pair.draft, "levels": LEVELS if self._own else THREE}
            return {**found, "classifier": own, "other": own}
        alone = dict.fromkeys(("draft", "upper", "head"), "head")
        alone |= {"target": DEFAULT_MODEL, "levels": LEVELS, "classifier": shipped}
        return {**found, **alone, "other": own if self._pair else shipped}

    def artifacts(self, runs: Sequence[PlannedRun]) -> dict[Path, tuple[list[str], float]]:
        """Files that runs read: the commands that make them, of prompts that no suite has, and about how many minutes
        they take. The coder's classifier is for SmolLM2's curves too."""
        found, folder = dict[Path, tuple[list[str], float]](), self.folder / "made"
        for models in dict.fromkeys(run.models for run in runs):
            names, read = self.names(models), "".join(run.methods for run in runs if run.models == models)
            made_for, minutes = ["--target", names["target"], "--drafter", names["head"]], _MINUTES[models]
            for nodes in TREE_SIZES:
                if f"{{sequoia}}-{nodes}." in read:
                    file = Path(f"{names['sequoia']}-{nodes}.json")
                    options = ["--prompts", str(folder / PROMPTS), "--max-tokens", "32", "--nodes", str(nodes)]
                    found[file] = ["calibrate", *made_for, *options, "--out", str(file)], minutes
        nets = {CODER: "{classifier}", SMOLLM2: "{other}"}
        if self._pair and any(nets[run.models] in run.methods for run in runs):
            names = self.names(CODER)
            made_for = ["--target", names["target"], "--drafter", names["head"], "--prompts", str(folder / TASKS)]
            options = ["--max-tokens", "48", "--samples", str(SAMPLES), "--batch", "256", "--learning-rate", "0.005"]
            file = Path(names["classifier"])
            found[file] = ["train", "classifier", *made_for, *options, "--out", str(file)], _MINUTES[TASKS]
        return {file: made for file, made in found.items() if not file.is_file()}

    def command(self, run: PlannedRun) -> list[str]:
        """Arguments of ``draftree`` for a run."""
        names = self.names(run.models)
        every = (*split_names(run.methods.format(**names)), *self._methods)
        methods = ",".join(dict.fromkeys(every))  # without the pair some are one
        drafters = run.drafters.format(**names).format(**names)
        return [
            *("bench", "--suite", names.get(run.suite, run.suite), "--limit", str(run.limit)),
            *("--max-tokens", str(run.tokens), "--methods", methods, "--drafters", drafters),
            *("--temperature", run.temperature, "--target", names["target"], *run.options),
            *("--out", str(self.folder / run.name)),
        ]

    def missing(self) -> list[PlannedRun]:
        """Runs that are not finished.

        Raises:
            ConfigError: one was decoded by another command.
        """

        def done(run: PlannedRun) -> bool:
            folder, command = self.folder / run.name, shlex.join(["draftree", *self.command(run)])
            if not read_summary(folder):
                return False
            if without_folders(read_config(folder)["command"]) != without_folders(command):
                raise ConfigError(
                    f"{folder} was made by another command than is planned now: remove it, or name another folder"
                )
            return not run.scored or (folder / SCORES).is_file()

        return [run for run in self.runs if not done(run)]

    def measure(self) -> None:
        """Decode what is missing; the same call goes on where it was stopped.

        Raises:
            RunError: a command failed.
        """
        missing = self.missing()
        artifacts, thresholds = self.artifacts(missing), self.thresholds(missing)
        minutes = sum(run.minutes for run in missing) + sum(own for _, own in artifacts.values())
        minutes += sum(map(_MINUTES.__getitem__, thresholds))
        err.print(f"{len(missing)} of {len(self.runs)} runs to go, about {minutes:.0f} minutes")
        (self.folder / "made").mkdir(parents=True, exist_ok=True)
        if artifacts or thresholds:
            self._write_tasks()
        self._write_suites(missing)
        for file, (command, own) in artifacts.items():
            err.print(f"making {file}, about {own:.0f} minutes")
            _call("draftree", command)
        for models in thresholds:
            self._choose_delta(models)
        for number, run in enumerate(missing, start=1):
            err.print(f"run {number} of {len(missing)}: {run.name}, about {run.minutes:.0f} minutes")
            _call("draftree", self.command(run))
            if run.scored:
                _call("benchmarks.quality", [str(self.folder / run.name), "--entropy"])

    def _write_tasks(self) -> None:
        """Prompts that no suite has, for what is made."""
        made = self.folder / "made"
        tasks = (data_folder() / "self_instruct" / "seed_tasks.jsonl").read_text().splitlines()
        instructions = [json.loads(task)["instruction"] for task in tasks]
        _write(made / TASKS, instructions)
        _write(made / PROMPTS, instructions[:_PROMPTS])

    def _write_suites(self, runs: Collection[PlannedRun]) -> None:
        """Suites of our own that runs decode."""
        made = self.folder / "made"
        if any(run.suite == PROGRAMS for run in runs):
            rows = map(json.loads, (data_folder() / "mbpp" / "mbpp.jsonl").read_text().splitlines())
            asked = [_ASKED.format(row["text"]) for row in rows if row["task_id"] in MBPP_TESTS]
            _write(made / f"{PROGRAMS}.jsonl", asked)
        if any(run.suite == EDITS for run in runs) and not (made / f"{EDITS}.jsonl").is_file():
            _call("benchmarks.edits", ["suite", str(made / f"{EDITS}.jsonl"), "--limit", "6"])

    def thresholds(self, runs: Collection[PlannedRun]) -> list[str]:
        """The models whose threshold of OPT-Tree is still to be chosen."""
        read = dict.fromkeys(run.models for run in runs if "{delta}" in run.methods)
        return [models for models in read if not self._delta(models).is_file()]

    def _delta(self, models: str) -> Path:
        return self.folder / "made" / f"delta-{models}.txt"

    def _choose_delta(self, models: str) -> None:
        """The threshold of OPT-Tree that is fastest on prompts kept apart."""
        prompts = str(self.folder / "made" / PROMPTS)
        run = PlannedRun(f"made/deltas-{models}", models, prompts, _APART, 48, DELTAS, _MINUTES[models])
        _call("draftree", self.command(run))
        (found,) = load_runs(self.folder / run.name)
        speeds = [
            (over.mean, e.settings["delta"])
            for e in found.named("opt-tree")
            if (over := found.table[e.label][ALL].speedup_decode)
        ]
        write_whole(self._delta(models), max(speeds)[1])


def _write(file: Path, prompts: Iterable[str]) -> None:
    """A suite of these prompts, unless it is there."""
    if not file.is_file():
        write_whole(file, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def _call(module: str, arguments: Sequence[str]) -> None:
    if subprocess.run([sys.executable, "-m", module, *arguments]).returncode:  # noqa: S603
        raise RunError(f"python -m {module} {' '.join(arguments)} failed: mend what it says, then go on the same way")
