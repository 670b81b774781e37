"""Decodes prompts by jobs of ``benchmarks.rival_process``: what a folder lacks, one process after another.

Each answer is a line of a file of the folder, and what a process printed is in RIVAL.log there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from draftree.artifacts import locked, make_folder, read_lines, user_path
from draftree.bench.run import encode_turns, fitting
from draftree.bench.suites import choose, load_suite
from draftree.cli.bench import commit, machine
from draftree.errors import ConfigError, DraftreeError, first_line
from draftree.models.cpu_threads import default_threads
from draftree.models.loading import load
from draftree.models.model_files import gguf_path
from draftree.progress import err

from . import rival_process
from .commands import command_parser
from .rival_process import FAILED, Job

DRAFTS = "-draft-model"
"""Ends the name of a rival that drafts by a model."""
_LONGEST_REASON = 200
Row = dict[str, Any]
"""A line: model, suite, max_tokens, rival, draft ("": none), a variant's labels, machine and commit; of an answer also
version, prompt and ``Answer``'s fields; of a process that gave up "error"."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How a rival decodes all prompts once.

    Attributes:
        rival: SYSTEM, or SYSTEM-WAY of drafting.
        labels: what its lines have that those of its other variants have not.
        changes: fields of ``Job`` that are not as they are by default.
    """

    rival: str
    labels: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join([self.rival, *(f"{name} {value}" for name, value in self.labels.items())])


def read(file: Path) -> list[Row]:
    """Its lines; none where there is no file.

    Raises:
        ConfigError: a line is no JSON object.
    """
    rows: list[Row] = []
    if file.is_file():
        for number, line in enumerate(read_lines(file), 1):
            try:
                rows.append(dict(json.loads(line)))
            except (ValueError, TypeError):
                raise ConfigError(f"line {number} of {file} is damaged: delete it") from None
    return rows


def append(file: Path, row: Row) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


def system(rival: str) -> str:
    return rival.partition("-")[0]


class Measurement:
    """Decodes what a file lacks.

    Args:
        file: of the lines.
        target, draft: as a user names them; no draft model: "".
        pythons: system -> interpreter, of the systems with an environment of their own.
    """

    def __init__(self, file: Path, target: str, draft: str, pythons: Mapping[str, str | None]) -> None:
        self._file, self._pythons = file.absolute(), pythons
        self._target, self._draft = self._gguf(target), self._gguf(draft) if draft else None

    def _gguf(self, name: str) -> Path:
        path = gguf_path(name)
        if path is None:
            raise ConfigError(f"{name!r} is no GGUF file, which all rivals can read: name one")
        return path.absolute()

    def decode(self, suite: str, limit: int, max_tokens: int, variants: Iterable[Variant]) -> None:
        """The first prompts of a suite, by one variant after another.

        Raises:
            InputError: the suite or the target cannot be read.
        """
        target = load(str(self._target))
        items = fitting(target, choose(load_suite(suite), limit=limit))
        prompts = {item.id: encode_turns(target, item.turns[:1]) for item in items}
        warm, ends = encode_turns(target, ["Hello"]), sorted(target.capabilities.eos_ids)
        del target  # its memory and threads are the rivals'
        shared = {"model": self._target.stem, "suite": Path(suite).stem, "max_tokens": max_tokens}
        for variant in variants:
            drafting = self._draft if variant.rival.endswith(DRAFTS) else None
            row = {**shared, "rival": variant.rival, "draft": drafting.stem if drafting else "", **variant.labels}
            done = {had.get("prompt") for had in read(self._file) if row.items() <= had.items()}
            if left := {prompt: ids for prompt, ids in prompts.items() if prompt not in done}:
                err.print(f"{variant}: {len(left)} prompts", markup=False)
                row |= {"machine": "{processor}, {cores} cores".format(**machine()), "commit": commit()}
                job = Job(variant.rival, "", "", default_threads(), max_tokens, ends, left, warm, row, str(self._file))
                if why := self._run(replace(job, **variant.changes), drafting):
                    err.print(f"  {why}", markup=False)
                    append(self._file, {**row, "error": why})

    def _run(self, job: Job, draft: Path | None) -> str:
        """Why a process gave up; "": it did not."""
        owner = system(job.rival)
        python = self._pythons.get(owner, sys.executable)
        if python is None:
            return f"--{owner} names no interpreter"
        if not shutil.which(python):
            return f"{python} is no interpreter"
        try:
            job = replace(job, target=self._form(owner, python, self._target, drafts=False))
            if draft is not None:
                job = replace(job, draft=self._form(owner, python, draft, drafts=True))
        except (DraftreeError, OSError, subprocess.CalledProcessError) as error:
            return _shortened(first_line(error))
        log = self._file.parent / f"{job.rival}.log"
        with log.open("w", encoding="utf-8") as file:
            ended = subprocess.run(  # noqa: S603 - the user names the interpreter
                [python, rival_process.__file__],
                input=json.dumps(asdict(job)).encode(),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=_environment(python, job.threads),
            )
        if not ended.returncode:
            return ""
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        why = next((line for line in reversed(lines) if line.startswith(FAILED)), (lines or [""])[-1])
        return _shortened(why.removeprefix(FAILED) or f"ended with status {ended.returncode}")

    def _form(self, owner: str, python: str, gguf: Path, *, drafts: bool) -> str:
        """A model in the form that a system loads."""
        if owner != "vllm" and not (owner == "openvino" and drafts):
            return str(gguf)
        from draftree.models.huggingface.hf_loading import convert

        folder = convert(gguf)
        if owner == "vllm":
            return str(folder)
        exported, program = self._file.parent / f"openvino-{gguf.stem}", Path(python).parent / "optimum-cli"
        if not exported.is_dir():
            if not program.is_file():
                raise ConfigError(f"no {program.name} beside {python}, which writes draft models for OpenVINO")
            part = exported.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            kind = ("--task", "text-generation-with-past", "--weight-format", "int8")
            command = [str(program), "export", "openvino", "--model", str(folder), *kind, str(part)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
            part.rename(exported)
        return str(exported)


def _shortened(reason: str) -> str:
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."


def _environment(python: str, threads: int) -> dict[str, str]:
    """Of a process: so many threads, no module of this folder by accident; elsewhere none of this project."""
    known = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONSAFEPATH": "1"}
    if python != sys.executable:
        known.pop("PYTHONPATH", None)
        runtime = Path(python).absolute().parents[1] / "lib" / "libiomp5.so"
        if runtime.is_file():  # vLLM drafts slowly without it
            known.setdefault("LD_PRELOAD", str(runtime))
    return known


def command_line(name: str, description: str | None, limit: int, max_tokens: int) -> ArgumentParser:
    """What commands that run jobs have in common."""
    parser = command_parser(name, description)
    parser.add_argument("out", metavar="OUT", help="folder of the lines")
    parser.add_argument("--target", default="smollm2", metavar="FILE")
    parser.add_argument("--draft", default="", metavar="FILE", help="draft model")
    parser.add_argument("--suite", default="spec-bench")
    parser.add_argument("--limit", type=int, default=limit, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=max_tokens)
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--report", action="store_true", help="print the table of what is there, and decode nothing")
    return parser


def rows_of(args: Namespace, name: str, variants: Iterable[Variant]) -> list[Row]:
    """The lines of a file of OUT; those that are missing are decoded first, unless a report is all that is wanted."""
    file = user_path(args.out) / name
    if not args.report:
        make_folder(file.parent)
        pythons = {system: getattr(args, system) for system in ("openvino", "vllm")}
        with locked(file.parent, "the folder", folder=True):
            measurement = Measurement(file, args.target, args.draft, pythons)
            measurement.decode(args.suite, args.limit, args.max_tokens, variants)
    return read(file)
