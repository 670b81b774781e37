"""The command ``draftree chat``."""

from __future__ import annotations

import sys
from functools import partial

import typer

from ..config import SamplingParams
from ..errors import InputError
from ..models.loading import DEFAULT_MODEL
from ..progress import err
from ..text import user
from . import console as show
from .console import complain, run
from .options import ComputeOptions, SpeculationOptions, Target, TraceOptions, with_options


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
    """Talk to the target: /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer."""
    observers = trace.observers(context, str(speculation.method))
    engine = speculation.engine(compute.load(target), observers)
    messages: list[dict[str, str]] = []
    err.print("/reset forgets the conversation, /exit ends it", style="dim")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
            line.encode()
        except (EOFError, KeyboardInterrupt):
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
            request = engine.open([*messages, *user(line)], params)
        except KeyboardInterrupt:
            err.print()
            continue
        except InputError as error:
            complain(f"{error}, or forget the conversation with /reset" if messages else str(error))
            continue
        run(engine, request)
        err.print(show.figures(request.stats, engine.verification.lossy), style="dim")
        messages += [*user(line), {"role": "assistant", "content": request.text}]
