"""The command ``draftree batch``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from ..artifacts import file_path, locked, user_path
from ..engine.engine import Engine
from ..engine.scheduler import SchedulerParams
from ..errors import ConfigError, RunError
from ..models.model_files import DEFAULT_MODEL
from ..openai.batches import Answering, BatchInput, BatchOutput, scheduled
from ..progress import err, progress_reporter
from .interrupt import GO_ON, on_interrupt
from .options import ComputeOptions, SpeculationOptions, Target, TraceOptions, with_options


@partial(with_options, without=("queue",))
def batch(
    *,
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="IN.jsonl", help="Requests, one a line.")],
    out: Annotated[str, typer.Argument(metavar="OUT.jsonl", help="Where the answers go.")],
    target: Target = DEFAULT_MODEL,
    name: Annotated[str | None, typer.Option(help="What bodies call the model; its own name by default.")] = None,
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
    if before < total:
        observers = trace.observers(context, str(speculation.method))
        model = compute.load(target)
        if model.tokenizer is None:
            raise ConfigError(f"{target} has no tokenizer: a batch is answered in text")
        engine = Engine(model, speculation, observers=observers, scheduling=scheduled(scheduling))
        answering = Answering(engine, speculation, name or model.capabilities.name, scheduling.rows)
        waiting = (line for line in lines.lines() if line.id not in output.done)
        with on_interrupt(lambda: f"interrupted after {len(output.done)} of {total} lines: {GO_ON}"):
            with progress_reporter("batch", total, before) as progress:
                for record in answering.records(waiting):
                    output.append(record)
                    progress(len(output.done))
    kept = f", {before} of them before" if before else ""
    if output.errors:
        raise RunError(f"{out}: {output.errors} of {total} lines could not be answered{kept}: their records have why")
    err.print(f"{out}: {total} lines answered{kept}", markup=False)
