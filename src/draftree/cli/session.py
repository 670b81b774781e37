"""What ``draftree generate`` and ``draftree chat`` share: from options to an engine, and a request to its end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import typer

from ..config import SamplingParams
from ..drafters.spec import DrafterSpec
from ..engine import Engine
from ..errors import ConfigError, PromptError
from ..load import load_engine
from ..policies.methods import find_method
from ..progress import out
from ..request import Chunk, Request
from ..trace import Observer, Trace
from . import console as show
from .console import complain


def sampling_params(
    max_tokens: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    stop: list[str] | None,
) -> SamplingParams:
    """As given on the command line."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
    )


def read_prompt(prompt: str) -> str:
    """The prompt, or standard input for "-".

    Raises:
        PromptError: it is empty or not valid UTF-8.
    """
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError:
        raise PromptError("the prompt is not valid UTF-8: convert it, for example with iconv") from None
    if not text.strip():
        raise PromptError("the prompt is empty: give it at least one character")
    return text


def trace_to(context: typer.Context, file: Path | None, force: bool, method: str) -> list[Observer]:
    """A trace to ``file`` that ends with the command, if there is one."""
    if file is None:
        if force:
            raise ConfigError("--force overwrites the file of --trace: name one with --trace FILE")
        return []
    return [context.with_resource(Trace(file, force=force, labels={"method": method}, warn=complain))]


def with_tree(settings: list[str] | None, tree: str | None) -> list[str]:
    """``--tree FILE`` is the setting "tree"."""
    return [*(settings or ()), *([] if tree is None else [f"tree={tree}"])]


class Place(NamedTuple):
    """Where and how models compute."""

    dtype: str | None
    device: str | None
    numerics: str


def engine_for(
    target: str,
    drafter: DrafterSpec,
    method: str,
    settings: list[str] | None,
    nodes: int | None,
    verify: str,
    place: Place,
    observers: Sequence[Observer] = (),
    recycle_file: Path | None = None,
    candidates: str | None = None,
) -> Engine:
    """Check everything that needs no model before loading one."""
    pairs = {}
    for item in settings or ():
        key, sign, value = item.partition("=")
        if not sign:
            raise ConfigError(f"--set {item}: write it as KEY=VALUE, such as --set depth=6")
        pairs[key.strip()] = value.strip()
    policy = find_method(method).policy(pairs)
    return load_engine(
        target,
        drafter=drafter,
        method=policy,
        nodes=nodes,
        verification=verify,
        candidates=candidates,
        dtype=place.dtype,
        device=place.device,
        numerics=place.numerics,
        observers=observers,
        recycle_file=recycle_file,
    )


def run(engine: Engine, request: Request, *, silent: bool = False, stream: bool = True) -> bool:
    """Run a request to its end, showing its text as it comes or at the end; true when Ctrl-C ended it."""
    try:
        for chunk in engine.follow(request):
            if stream and not silent:
                _print(chunk)
    except KeyboardInterrupt:
        return True
    finally:
        engine.close(request)
        if not silent:
            out.out("" if stream else request.text, highlight=False)
    return False


def _print(chunk: Chunk) -> None:
    """Coloured in a terminal; byte for byte elsewhere (a console would expand tabs)."""
    if out.is_terminal:
        out.print(show.token(chunk), end="")
    else:
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
