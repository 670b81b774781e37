"""The command ``draftree chat``."""

from __future__ import annotations

import sys

import typer

from ..drafters.spec import DEFAULT_DRAFTER, DrafterSpec
from ..errors import InputError
from ..models.cpu.quantization import DEFAULT_NUMERICS
from ..models.load import DEFAULT_MODEL
from ..policies.methods import DEFAULT_METHOD
from ..progress import err
from ..text import user
from ..verify.schemes import DEFAULT_SCHEME
from . import console as show
from .console import complain
from .options import (
    Candidates,
    Device,
    Drafter,
    Dtype,
    Force,
    MaxTokens,
    MethodName,
    MinP,
    Nodes,
    NoLoopBack,
    Numerics,
    RecycleFile,
    Seed,
    Settings,
    Target,
    Temperature,
    TopK,
    TopP,
    TraceFile,
    TreeFile,
    Verify,
)
from .session import Place, engine_for, run, sampling_params, trace_to, with_tree


def chat(
    context: typer.Context,
    target: Target = DEFAULT_MODEL,
    drafter: Drafter = DEFAULT_DRAFTER,
    no_loop_back: NoLoopBack = False,
    method: MethodName = DEFAULT_METHOD,
    settings: Settings = None,
    tree: TreeFile = None,
    recycle_file: RecycleFile = None,
    nodes: Nodes = None,
    verify: Verify = DEFAULT_SCHEME,
    candidates: Candidates = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    trace: TraceFile = None,
    force: Force = False,
    dtype: Dtype = None,
    device: Device = None,
    numerics: Numerics = DEFAULT_NUMERICS,
) -> None:
    """Talk to the target: /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer."""
    spec = DrafterSpec.parse(drafter).without_loop_back() if no_loop_back else DrafterSpec.parse(drafter)
    params = sampling_params(max_tokens, temperature, top_k, top_p, min_p, seed, None)
    observers = trace_to(context, trace, force, method)
    given, place = with_tree(settings, tree), Place(dtype, device, numerics)
    engine = engine_for(target, spec, method, given, nodes, verify, place, observers, recycle_file, candidates)
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
