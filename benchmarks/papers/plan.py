"""The runs that the report is made of, by name: what each decodes, and about how long that takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from draftree.artifacts import user_path, write_whole
from draftree.bench.entries import split_names
from draftree.bench.results import read_summary
from draftree.bench.suites import data_folder
from draftree.errors import ConfigError, RunError
from draftree.models.model_files import DEFAULT_MODEL
from draftree.progress import err

from ..quality.answers import FILE as SCORES

SMOLLM2, CODER = "smollm2", "coder"
"""SmolLM2-135M-Instruct with its head; Qwen2.5-Coder-1.5B-Instruct with the 0.5B."""
FILES = {"target": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "draft": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"}
"""Of the pair, in the folder that the user names."""

DYNAMIC = "chain,static,early-stop,naive-width,dynamic-width,dynamic-width-budget,dynamic-width-depth"
MOVED = ("sure=0.1", "sure=0.3", "unsure=0.5", "unsure=2", "slope=2", "slope=6")
"""Settings of B(H), one moved at a time."""
STEPS = ",".join(("dynamic-width-budget", *(f"dynamic-width-budget:{setting}" for setting in MOVED)))
TREES = "binary:nodes=25,eagle:nodes=25,sequoia:tree={sequoia}:nodes=25,opt-tree:nodes=25,eagle2:nodes=25"
OTHERS = "chain,static,dynamic-width-budget,eagle2:nodes=60,c2t:classifier={classifier},dynamic-window,auto"
SIZES = ",".join(f"opt-tree:nodes={nodes}" for nodes in (8, 16, 32, 64, 128, 256, 500))
DELTAS = ",".join(f"opt-tree:nodes=25:delta={delta}" for delta in (0.05, 0.1, 0.2, 0.4, 0.8))
WINDOWS = ",".join(f"chain:depth={depth}" for depth in (2, 4, 7, 10, 20))
TOPS = (15, 20, 25, 30, "none")
CONFIDENCE = ",".join(
    (
        *(f"eagle2:nodes={nodes}" for nodes in (8, 16, 32, 64)),
        *(f"c2t:classifier={{classifier}}:nodes=64:beta={beta}" for beta in (0.3, 0.1, 0.05, 0.02, 0.01)),
        *(f"c2t:classifier={{other}}:nodes=64:beta={beta}" for beta in (0.3, 0.1, 0.05, 0.02, 0.01)),
        *(f"c2t:classifier={{classifier}}:nodes=256:beta=0.01:top={top}" for top in TOPS),
    )
)
"""Of C2T's: the other pair's classifier, and the second top-K."""
LEVELS = "lookup>{draft},lookup>{draft}:pending=1"
FOREST = ",".join(
    (
        "beams:width=4:drafter=none,beams:width=2:drafter=none",
        *(
            f"beams:width={w}:drafter={{beams}}:depth=3:{s}"
            for w, s in ((4, "threshold=0.9"), (4, "threshold=0.7:least=2"))
        ),
        "beams:width=2:drafter={beams}:depth=3:threshold=0.9",
        "beams:width=4:drafter={beams}:depth=3:single=yes",
        "chain:depth=3:verify=multi-round,static:depth=3:verify=multi-round-replacement",
    )
)
"""Sampled beams with and without a drafter, and what the paper sets beside them: gamma is 3."""
GRID = ",".join(
    (
        *(f"beams:width={w}:drafter=none" for w in (2, 4, 6)),
        *(
            f"beams:width={w}:draft={w}:drafter={{beams}}:depth=3:threshold={t}:least={least}"
            for w in (2, 4, 6)
            for t in (0.7, 0.9)
            for least in (1, 2, 3)
            if least <= w
        ),
    )
)
"""The paper's settings of a dynamic width: W_S, t and W_min."""
EVERY = (
    "auto,chain,early-stop,naive-width,static,binary,eagle,sequoia:tree={sequoia}:nodes=25,dynamic-width,"
    "dynamic-width-budget,dynamic-width-depth,opt-tree,eagle2,dynamic-window,hsddw,c2t"
)
SCHEMES = (
    "chain,static,chain:verify=multi-round,static:verify=multi-round,static:verify=multi-round-replacement,"
    "static:verify=top1-residual,static:verify=relaxed"
)
_PROMPTS = 40
"""Of Self-Instruct, for trees and classifiers."""
DRAFTERS = "lookup,recycle,head,lookup+head,lookup+recycle+head,lookup>head"


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of ``draftree bench``.

    Attributes:
        models: ``SMOLLM2`` or ``CODER``.
        limit, tokens: prompts of the suite, and most tokens of an answer.
        methods, drafters: as ``draftree bench`` takes them; names in braces are those of ``Plan.names``.
        options: more of its arguments.
        replay: trees and acceptance along AR decoding's answers; else all of it is decoded, by the clock.
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
    drafters: str = "{draft}"
    temperature: str = "0"
    options: tuple[str, ...] = ()
    replay: bool = True
    scored: bool = False

    def quick(self) -> PlannedRun:
        """The same run, small."""
        limit, tokens = min(self.limit, 3), min(self.tokens, 24)
        share = limit / self.limit * tokens / self.tokens
        return replace(self, limit=limit, tokens=tokens, minutes=self.minutes * share)


def _both(
    name: str,
    suite: str,
    methods: str,
    minutes: tuple[float, float],
    *,
    prompts: int = 20,
    tokens: tuple[int, int] = (32, 64),
    **more: object,
) -> list[PlannedRun]:
    """A run of each pair of models, with minutes and tokens of the coder and of SmolLM2, which has 32 prompts."""
    sizes = ((CODER, prompts, tokens[0], minutes[0]), (SMOLLM2, 32, tokens[1], minutes[1]))
    return [PlannedRun(f"{name}-{m}", m, suite, n, most, methods, each, **more) for m, n, most, each in sizes]  # type: ignore[arg-type]


CODE = (128, 128)
"""Tokens of answers to HumanEval: they begin with a copy of the prompt, which every drafter has right."""
FIRST, PLAIN = ("--turns", "1"), ("--candidates", "plain")
RUNS: Sequence[PlannedRun] = (
    *_both("widths", "humaneval", DYNAMIC, (16, 9), tokens=CODE, temperature="0.4", options=PLAIN),
    *_both("trees", "mt-bench", f"{TREES},{OTHERS}", (40, 9), temperature="0,1", options=FIRST),
    *_both("gsm8k", "gsm8k", f"{TREES},{OTHERS}", (14, 5)),
    *_both("humaneval", "humaneval", f"{TREES},chain,dynamic-width-budget,auto", (14, 5), tokens=CODE),
    *_both("levels", "mt-bench", "hsddw:nodes=60", (4, 2), drafters=LEVELS, options=FIRST),
    *_both("gsm8k-levels", "gsm8k", "hsddw:nodes=60", (4, 2), drafters=LEVELS),
    *_both("windows", "mt-bench", f"{WINDOWS},hsddw", (5, 2), options=FIRST),
    *_both("confidence", "mt-bench", CONFIDENCE, (14, 8), prompts=10, options=FIRST),
    *_both("sizes", "mt-bench", SIZES, (12, 5), prompts=8, options=FIRST),
    *_both("clock", "mt-bench", "auto,chain:depth=2", (4, 2), prompts=10, options=FIRST, replay=False),
    *_both("gsm8k-clock", "gsm8k", "auto,chain:depth=2", (4, 2), prompts=10, replay=False),
    *_both("humaneval-clock", "humaneval", "auto,chain:depth=2", (4, 2), prompts=10, replay=False),
    PlannedRun("squad-beams-coder", CODER, "squad", 8, 32, FOREST, 10, temperature="0.7", replay=False, scored=True),
    PlannedRun("answers-coder", CODER, "gsm8k", 40, 320, "auto", 16, "lookup", replay=False, scored=True),
    *_both("gsm8k-sampled", "gsm8k", f"{TREES},{OTHERS}", (14, 5), temperature="1"),
    *_both("humaneval-sampled", "humaneval", f"{TREES},{OTHERS}", (20, 6), tokens=CODE, temperature="1"),
    *_both("steps", "mt-bench", STEPS, (6, 2), temperature="0.4", options=(*FIRST, *PLAIN)),
    *_both("plain", "mt-bench", TREES, (6, 2), temperature="1", options=(*FIRST, *PLAIN)),
    *_both("deltas", "mt-bench", DELTAS, (4, 2), options=FIRST),
    *_both("temperatures", "mt-bench", "opt-tree:nodes=25", (4, 2), temperature="0,0.25,0.5,0.75,1", options=FIRST),
    PlannedRun("spider-beams-coder", CODER, "spider", 8, 32, FOREST, 10, temperature="0.7", replay=False, scored=True),
    PlannedRun(
        "mt-bench-beams-coder", CODER, "mt-bench", 8, 32, FOREST, 10, temperature="0.7", options=FIRST, replay=False
    ),
    PlannedRun("squad-grid-coder", CODER, "squad", 8, 32, GRID, 20, temperature="0.7", replay=False, scored=True),
    PlannedRun("every-smollm2", SMOLLM2, "spec-bench", 26, 32, EVERY, 4, options=FIRST),
    PlannedRun(
        "schemes-smollm2", SMOLLM2, "spec-bench", 13, 32, SCHEMES, 2, temperature="1", options=FIRST, replay=False
    ),
    PlannedRun(
        "drafters-smollm2",
        SMOLLM2,
        "spec-bench",
        26,
        32,
        "auto,opt-tree:nodes=8",
        3,
        DRAFTERS,
        options=FIRST,
        replay=False,
    ),
)
"""In the order of measuring: those of a paper's main claim come first."""


class Plan:
    """The runs of a folder.

    Args:
        folder: of the runs.
        pair: folder of the pair's files; None: runs of the pair are left out.
        quick: small runs.
        only: names of runs; None: all.

    Raises:
        ConfigError: a file of the pair is not there.
    """

    def __init__(
        self, folder: str | Path, pair: str | Path | None, *, quick: bool, only: Collection[str] | None = None
    ) -> None:
        self.folder, self._pair = user_path(folder), pair
        if pair is not None:
            for file in FILES.values():
                if not (user_path(pair) / file).is_file():
                    raise ConfigError(f"{user_path(pair) / file} is not there: name the folder that has both files")
        able = [run for run in RUNS if pair is not None or run.models != CODER]
        self.runs = [run.quick() if quick else run for run in able if only is None or run.name in only]

    def names(self, models: str) -> dict[str, str]:
        """What the names in braces stand for."""
        made, shipped = self.folder / "made", "smollm2-head"
        own = str(made / "c2t-coder.json")
        found = {"sequoia": str(made / f"sequoia-{models}.json"), "target": DEFAULT_MODEL, "draft": "head"}
        if models == CODER:
            found |= {key: f"{self._pair}/{file}" for key, file in FILES.items()}
            return {**found, "beams": found["draft"], "classifier": own, "other": shipped}
        return {**found, "beams": "head", "classifier": shipped, "other": own if self._pair else shipped}

    def artifacts(self) -> Iterable[tuple[Path, list[str]]]:
        """Files that runs read, and the commands that make them, of prompts that no suite has."""
        prompts = str(self.folder / "made" / "prompts.jsonl")
        read = " ".join(word for run in self.runs for word in self.command(run))
        for models in (SMOLLM2, CODER) if self._pair is not None else (SMOLLM2,):
            names = self.names(models)
            own = ["--target", names["target"], "--drafter", names["draft"], "--prompts", prompts, "--max-tokens", "32"]
            if names["sequoia"] in read:
                yield Path(names["sequoia"]), ["calibrate", *own, "--nodes", "25", "--out", names["sequoia"]]
            if models == CODER and names["classifier"] in read:
                fit = ["train", "classifier", *own, "--samples", "40000", "--batch", "256", "--learning-rate", "0.005"]
                yield Path(names["classifier"]), [*fit, "--out", names["classifier"]]

    def command(self, run: PlannedRun) -> list[str]:
        """Arguments of ``draftree`` for a run."""
        names = self.names(run.models)
        methods = ",".join(dict.fromkeys(split_names(run.methods.format(**names))))  # without the pair some are one
        return [
            *("bench", "--suite", run.suite, "--limit", str(run.limit), "--max-tokens", str(run.tokens)),
            *("--methods", methods, "--drafters", run.drafters.format(**names)),
            *("--temperature", run.temperature, "--target", names["target"], *run.options, *["--replay"] * run.replay),
            *("--out", str(self.folder / run.name)),
        ]

    def missing(self) -> list[PlannedRun]:
        """Runs that are not finished."""

        def done(run: PlannedRun) -> bool:
            folder = self.folder / run.name
            return bool(read_summary(folder).get("complete")) and (not run.scored or (folder / SCORES).is_file())

        return [run for run in self.runs if not done(run)]

    def measure(self) -> None:
        """Decode what is missing; the same call goes on where it was stopped.

        Raises:
            RunError: a command failed.
        """
        missing = self.missing()
        err.print(f"{len(missing)} of {len(self.runs)} runs to go, about {sum(r.minutes for r in missing):.0f} minutes")
        if missing:
            self._prepare()
        for number, run in enumerate(missing, start=1):
            err.print(f"run {number} of {len(missing)}: {run.name}, about {run.minutes:.0f} minutes")
            _call("draftree", self.command(run))
            if run.scored:
                _call("benchmarks.quality", [str(self.folder / run.name), "--entropy"])

    def _prepare(self) -> None:
        """Make the artifacts that are not there."""
        missing = [(made, command) for made, command in self.artifacts() if not made.is_file()]
        if missing:
            file = self.folder / "made" / "prompts.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            tasks = (data_folder() / "self_instruct" / "seed_tasks.jsonl").read_text().splitlines(keepends=True)
            write_whole(file, "".join(tasks[:_PROMPTS]))
        for made, command in missing:
            err.print(f"making {made}")
            _call("draftree", command)


def _call(module: str, arguments: Sequence[str]) -> None:
    if subprocess.run([sys.executable, "-m", module, *arguments]).returncode:  # noqa: S603
        raise RunError(f"python -m {module} {' '.join(arguments)} failed: mend what it says, then go on the same way")
