"""Measures what the report is made of: runs, and the files that they read."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from draftree.artifacts import user_path, write_whole
from draftree.bench.entries import split_names
from draftree.bench.results import read_config, read_summary
from draftree.bench.suites import data_folder
from draftree.bench.summary import ALL, load_runs
from draftree.errors import ConfigError, RunError
from draftree.models.model_files import DEFAULT_MODEL
from draftree.policies.fixed import TREE_FILE, best_tree, expected_acceptance_length, read_tree
from draftree.progress import err

from ..commands import without_folders
from ..quality.answers import FILE as SCORES
from .planned_runs import CODER, DELTAS, EDITS, LEVELS, PROGRAMS, RUNS, SMOLLM2, THREE, TREE_SIZES, PlannedRun

FILES = {"target": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "draft": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"}
"""Of the pair, in the folder that the user names."""
_PROMPTS = 40
"""Of Self-Instruct, for trees and the threshold; classifiers take all."""
_APART = 12
"""Of them, for the threshold."""
PROMPTS, TASKS = "prompts.jsonl", "tasks.jsonl"
"""Files of them."""
SAMPLES = 100_000
"""Of the coder's classifier."""
_MINUTES = {SMOLLM2: 1.0, CODER: 3.0, TASKS: 5.0}
"""About, for a tree or a threshold of these models, and for the coder's classifier."""
_ASKED = (
    "{} Explain the idea step by step first; then give the whole function with type hints and a docstring, and say "
    "what it costs in time and memory."
)
MBPP_TESTS = range(11, 511)
"""Numbers of MBPP's test tasks."""


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
            if "{sequoia}" in read:
                file = Path(f"{names['sequoia']}.json")
                options = ["--prompts", str(folder / PROMPTS), "--max-tokens", "32", "--nodes", str(TREE_SIZES[-1])]
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
        beside = () if run.name.startswith("made/") else self._methods  # what is made is the paper's own
        every = (*split_names(run.methods.format(**names)), *beside)
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
        for models in dict.fromkeys(run.models for run in missing if "{sequoia}" in run.methods):
            write_trees(self.names(models)["sequoia"])
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
            _call("benchmarks.edits", [str(made / f"{EDITS}.jsonl"), "--limit", "6"])

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


def write_trees(name: str) -> None:
    """Sequoia's trees of all sizes, of one calibration: what is counted does not depend on their size."""
    counted = read_tree(f"{name}.json")
    acceptance = counted.counts.acceptance
    for nodes in TREE_SIZES:
        if not (file := Path(f"{name}-{nodes}.json")).is_file():
            tree = best_tree(acceptance, nodes)
            expected = expected_acceptance_length(acceptance, tree)
            TREE_FILE.write(file, replace(counted, tree=tree, expected_acceptance_length=expected))


def _call(module: str, arguments: Sequence[str]) -> None:
    if subprocess.run([sys.executable, "-m", module, *arguments]).returncode:  # noqa: S603
        raise RunError(f"python -m {module} {' '.join(arguments)} failed: mend what it says, then go on the same way")
