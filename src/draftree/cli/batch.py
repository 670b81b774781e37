"""The command ``draftree batch``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any

import typer

from ..artifacts import file_path, locked, user_path
from ..batch.answering import Answering, scheduled
from ..batch.batch_files import BatchInput, BatchOutput, Record
from ..config import Count, check_fields, option
from ..engine.engine import Engine
from ..engine.observer import Observer
from ..engine.scheduler import SchedulerParams
from ..errors import ConfigError, RunError
from ..models.model_files import DEFAULT_MODEL
from ..models.protocols import tokenizer_of
from ..progress import err, progress_reporter
from .interrupt import GO_ON, on_interrupt
from .options import ComputeOptions, SpeculationOptions, Target, TraceOptions, with_options


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """What answers a batch."""

    name: str | None = option("What bodies call the model; its own name by default.")
    ray: bool = option("Answer on a Ray cluster, that of RAY_ADDRESS or else this machine.", False)
    replicas: Count | None = option("Engines on the cluster; 1 by default.", metavar="N")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.replicas is not None and not self.ray:
            raise ConfigError(f"--replicas {self.replicas} is of --ray: give that too, or neither")
        if self.ray and importlib.util.find_spec("ray") is None:
            raise ConfigError("--ray needs Ray: pip install 'draftree[ray]'")


@partial(with_options, without=("queue",))
def batch(
    *,
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="IN.jsonl", help="Requests, one a line.")],
    out: Annotated[str, typer.Argument(metavar="OUT.jsonl", help="Where the answers go.")],
    target: Target = DEFAULT_MODEL,
    options: BatchOptions,
    speculation: SpeculationOptions,
    scheduling: SchedulerParams,
    trace: TraceOptions,
    compute: ComputeOptions,
) -> None:
    """Answer a file of requests, many at a time: OpenAI's batch format, or lines of {"prompt": "..."}.

    Answers are appended as they come, in any order. The same command again goes on where the last one ended. A line
    that cannot be answered has a record that says why, and the exit code is 1.
    """
    lines = BatchInput(user_path(source))
    context.with_resource(locked(file_path(out, "output"), "output", folder=False))
    output = BatchOutput(out, lines)
    total, before = sum(1 for _ in lines.lines()), len(output.done)
    waiting = (line for line in lines.lines() if line.id not in output.done)
    if before < total:
        observers = trace.observers(context, str(speculation.method))
        make = partial(_load, target, options.name, compute, scheduling)
        records: Iterator[Record]
        if options.ray:
            if observers or speculation.corpus is not None:
                raise ConfigError("--ray goes without --trace and --corpus: leave them out, or leave --ray out")
            from ..batch.ray_data import answered_on_ray

            sent = partial(_load_named, make, _given(speculation))
            accelerators = compute.device != "cpu"
            records = answered_on_ray(list(waiting), sent, replicas=options.replicas or 1, accelerators=accelerators)
        else:
            records = make(speculation, observers).records(waiting)
        with on_interrupt(lambda: f"interrupted after {len(output.done)} of {total} lines: {GO_ON}"):
            with progress_reporter("batch", total, before) as progress:
                for record in records:
                    output.append(record)
                    progress(len(output.done))
    kept = f", {before} of them before" if before else ""
    if output.errors:
        raise RunError(f"{out}: {output.errors} of {total} lines could not be answered{kept}: their records have why")
    err.print(f"{out}: {total} lines answered{kept}", markup=False)


def _load(
    target: str,
    name: str | None,
    compute: ComputeOptions,
    scheduling: SchedulerParams,
    speculation: SpeculationOptions,
    observers: list[Observer],
) -> Answering:
    model = compute.load(target)
    if tokenizer_of(model) is None:
        raise ConfigError(f"{target} has no tokenizer: a batch is answered in text")
    engine = Engine(model, speculation, observers=observers, scheduling=scheduled(scheduling))
    return Answering(engine, speculation, name or model.capabilities.name, scheduling.rows)


def _given(speculation: SpeculationOptions) -> dict[str, Any]:
    """What it was made of, to be made again elsewhere."""
    return {f.name: getattr(speculation, f.name) for f in fields(speculation) if f.init}


def _load_named(make: Any, speculation: dict[str, Any]) -> Answering:
    made: Answering = make(SpeculationOptions(**speculation), [])
    return made
