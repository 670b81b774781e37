"""The command ``draftree chat``."""

from __future__ import annotations

import sys
from functools import partial

import typer

from ..config import SamplingParams
from ..engine.engine import Engine
from ..engine.scheduler import SchedulerParams
from ..errors import InputError
from ..models.model_files import DEFAULT_MODEL
from ..progress import complain, err
from ..text.encoding import user
from . import console as show
from .console import run
from .interrupt import on_interrupt
from .options import ComputeOptions, SpeculationOptions, Target, TraceOptions, with_options

_ONE_CHAT = SchedulerParams(rows=1, prefixes=1)
"""A turn reads what is new in it: the row of the turn before is kept."""


def _raised() -> None:
    """Ctrl-C at the prompt: a line editor leaves the terminal as it was."""
    raise KeyboardInterrupt


@partial(with_options, without=("stop",))
def chat(
    *,
    context: typer.Context,
    target: Target = DEFAULT_MODEL,
    speculation: SpeculationOptions,
    params: SamplingParams,
    trace: TraceOptions,
    compute: ComputeOptions,
) -> None:
    """Talk to the target: /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer or it."""
    observers = trace.observers(context, str(speculation.method))
    engine = Engine(compute.load(target), speculation, observers=observers, scheduling=_ONE_CHAT)
    messages: list[dict[str, str]] = []
    err.print("/reset forgets the conversation, /exit ends it", style="dim")
    while True:
        try:
            with on_interrupt(_raised):
                line = input("> " if sys.stdin.isatty() else "")
            line.encode()
        except EOFError:
            err.print()
            return
        except UnicodeError:
            complain("the line is not valid UTF-8: convert it, for example with iconv")
            continue
        if line.strip() == "/exit":
            return
        if line.strip() == "/reset":
            messages.clear()
            continue
        if not line.strip():
            continue
        try:
            handle = engine.submit([*messages, *user(line)], params)
        except InputError as error:
            complain(f"{error}, or forget the conversation with /reset" if messages else str(error))
            continue
        with on_interrupt(handle.cancel):
            run(handle)
        answer = handle.generation
        err.print(show.figures(answer.stats, answer.lossy), style="dim")
        messages += [*user(line), {"role": "assistant", "content": answer.text}]
