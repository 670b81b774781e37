"""The command line: ``draftree generate | chat | info | methods | profile | calibrate``.

Text goes to standard output, figures and complaints to standard error. Bad input is one line and exit code 2; a failure
while running, or Ctrl-C, is one line and exit code 1.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from . import show
from .bench.exact import first_difference
from .config import Budget, SamplingParams
from .draft.auto import AutoTree
from .draft.base import NoDrafter
from .draft.load import DRAFTERS
from .draft.methods import DEFAULT_METHOD, DEFAULT_NODES, METHODS, find_method
from .engine import Engine, load_engine
from .errors import ConfigError, DraftreeWarning, InputError, PromptError, RunError
from .models.command import profile
from .models.load import DEFAULT_MODEL, load
from .observer import Observer
from .options import (
    Device,
    Drafter,
    Dtype,
    Force,
    MaxTokens,
    MethodName,
    MinP,
    Nodes,
    Seed,
    Settings,
    Stop,
    Target,
    Temperature,
    TopK,
    TopP,
    TraceFile,
    TreeFile,
    Verify,
)
from .sequence import Chunk, Sequence
from .text import Prompt, user
from .trace import Trace
from .train.command import calibrate
from .verify.schemes import DEFAULT_SCHEME, SCHEMES, Match

app = typer.Typer(
    name="draftree",
    help="Lossless speculative decoding with draft trees that change shape at every step.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out, err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)

_ClickError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What typer raises for unusable arguments; typer carries its own click, so click's class would not do."""


@app.command()
def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The question; - reads it from standard input.")],
    target: Target = DEFAULT_MODEL,
    drafter: Drafter = "lookup",
    method: MethodName = DEFAULT_METHOD,
    settings: Settings = None,
    tree: TreeFile = None,
    nodes: Nodes = DEFAULT_NODES,
    verify: Verify = DEFAULT_SCHEME,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    stop: Stop = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")] = False,
    show_trees: Annotated[bool, typer.Option("--show-trees", help="Print each step's tree and accepted path.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say why the method auto chose what it chose.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Then decode plainly and compare text and speed.")] = False,
    trace: TraceFile = None,
    force: Force = False,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Answer one prompt, with the target's exact output."""
    if as_json and show_trees:
        raise ConfigError("--json and --show-trees exclude each other: choose one")
    if explain and (method != "auto" or drafter == "none"):
        raise ConfigError(f"--explain is about choices but method {method} makes none: use --method auto")
    params = _params(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
    text = _read(prompt)
    observers = _trace(context, trace, force, drafter, method)
    if show_trees:
        observers.append(show.Trees(out))
    engine = _engine(target, drafter, method, _with_tree(settings, tree), nodes, verify, dtype, device, observers)
    asked: Prompt = text if raw else user(text)
    sequence = engine.open(asked, params)
    interrupted = _run(engine, sequence, silent=as_json, stream=not show_trees)
    report: dict[str, object] = {
        "text": sequence.text,
        "token_ids": sequence.output_ids,
        "finish_reason": sequence.finish_reason or "interrupted",
        "seed": sequence.seed,
        "verification": verify,
        "lossy": engine.verification.lossy,
        "stats": show.as_json(sequence.stats),
    }
    policy = engine.drafter.policy
    if explain and isinstance(policy, AutoTree):
        report["explanation"] = policy.report.text()
    if not as_json:
        err.print(show.LEGEND)
        err.print(f"{drafter}, {method}, {verify}: {show.figures(sequence.stats, engine.verification.lossy)}")
        if explain:
            err.print(report["explanation"], markup=False)
    if compare and not interrupted:
        try:
            interrupted = _compare(engine, sequence, report, quiet=as_json)
        except KeyboardInterrupt:
            interrupted = True
    if as_json:
        out.out(json.dumps(report, ensure_ascii=False))
    if interrupted:
        raise RunError(f"interrupted after {len(sequence.output_ids)} tokens")


@app.command()
def chat(
    context: typer.Context,
    target: Target = DEFAULT_MODEL,
    drafter: Drafter = "lookup",
    method: MethodName = DEFAULT_METHOD,
    settings: Settings = None,
    tree: TreeFile = None,
    nodes: Nodes = DEFAULT_NODES,
    verify: Verify = DEFAULT_SCHEME,
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
) -> None:
    """Talk to the target: /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer."""
    params = _params(max_tokens, temperature, top_k, top_p, min_p, seed, None)
    observers = _trace(context, trace, force, drafter, method)
    engine = _engine(target, drafter, method, _with_tree(settings, tree), nodes, verify, dtype, device, observers)
    messages: list[dict[str, str]] = []
    err.print("/reset forgets the conversation, /exit ends it", style="dim")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            err.print()
            return
        if line.strip() == "/exit":
            return
        if line.strip() == "/reset":
            messages.clear()
            continue
        if not line.strip():
            continue
        try:
            sequence = engine.open([*messages, *user(line)], params)
        except KeyboardInterrupt:
            err.print()
            continue
        except InputError as error:
            _complain(f"{error}, or forget the conversation with /reset" if messages else str(error))
            continue
        _run(engine, sequence)
        err.print(show.figures(sequence.stats, engine.verification.lossy), style="dim")
        messages += [*user(line), {"role": "assistant", "content": sequence.text}]


@app.command()
def info(
    model: Annotated[str, typer.Argument(help="smollm2, a folder, a .gguf file or a hub id.")],
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Load a model, test that it can verify draft trees, and say what was found."""
    began = time.perf_counter()
    loaded = load(model, dtype=dtype, device=device)
    seconds, can = time.perf_counter() - began, loaded.capabilities
    row = loaded.open([0])
    per_token = loaded.cache.nbytes / (loaded.cache.placement.rows * loaded.cache.placement.slots)
    loaded.close(row)
    for what, value in {
        "model": can.name,
        "architecture": can.architecture,
        "parameters": f"{can.parameters / 1e6:.1f} million, {str(can.dtype).removeprefix('torch.')} on {can.device}",
        "longest sequence": f"{can.max_length} tokens ({can.max_length_reason})",
        "vocabulary": f"{can.vocab_size} tokens, end of sequence {sorted(can.eos_ids)}",
        "attention": can.attention,
        "draft trees": "yes: 4-D masks and depth positions are honoured (self-test passed)",
        "KV cache": f"{per_token / 1024:.1f} KiB a token, compactable",
        "chat template": "yes" if loaded.tokenizer and loaded.tokenizer.chat_template else "no: use --raw",
        "loaded in": f"{seconds:.1f} s, self-test included",
    }.items():
        out.print(f"{what:17} {value}")


@app.command()
def methods() -> None:
    """List the ways to shape draft trees, the verification schemes, and the drafters."""
    for method in METHODS.values():
        settings = " ".join(f"{key}={'FILE' if value == '' else value}" for key, value in method.settings.items())
        out.print(f"{method.name:20} {method.summary}{f' [{settings}]' if settings else ''}", markup=False)
    out.print("\nverification:")
    for scheme in SCHEMES.values():
        out.print(f"{scheme.name:23} {scheme.summary}")
    out.print("\ndrafters:")
    for name, summary in DRAFTERS.items():
        out.print(f"{name:20} {summary}")
    out.print(f"{'MODEL':20} any model with the target's vocabulary")


app.command()(profile)
app.command()(calibrate)


def _params(
    max_tokens: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    stop: list[str] | None,
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
    )


def _read(prompt: str) -> str:
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError:
        raise PromptError("the prompt is not valid UTF-8: convert it, for example with iconv") from None
    if not text.strip():
        raise PromptError("the prompt is empty: give it at least one character")
    return text


def _trace(context: typer.Context, file: Path | None, force: bool, drafter: str, method: str) -> list[Observer]:
    """A trace to ``file`` that ends with the command, if there is one."""
    if file is None:
        if force:
            raise ConfigError("--force overwrites the file of --trace: name one with --trace FILE")
        return []
    return [
        context.with_resource(Trace(file, force=force, labels={"drafter": drafter, "method": method}, warn=_complain))
    ]


def _with_tree(settings: list[str] | None, tree: str | None) -> list[str]:
    """``--tree FILE`` is the setting "tree"."""
    return [*(settings or ()), *([] if tree is None else [f"tree={tree}"])]


def _engine(
    target: str,
    drafter: str,
    method: str,
    settings: list[str] | None,
    nodes: int,
    verify: str,
    dtype: str | None,
    device: str | None,
    observers: Many[Observer] = (),
) -> Engine:
    """Check everything that needs no model before loading one."""
    pairs = {}
    for item in settings or ():
        key, sign, value = item.partition("=")
        if not sign:
            raise ConfigError(f"--set {item}: write it as KEY=VALUE, such as --set depth=6")
        pairs[key.strip()] = value.strip()
    policy = find_method(method).policy(pairs)
    if nodes < 1:
        raise ConfigError(f"node budget is {nodes}: use at least 1, or --drafter none for plain decoding")
    Budget(nodes)
    return load_engine(
        target,
        drafter=drafter,
        method=policy,
        nodes=nodes,
        verification=verify,
        dtype=dtype,
        device=device,
        observers=observers,
    )


def _run(engine: Engine, sequence: Sequence, *, silent: bool = False, stream: bool = True) -> bool:
    """Run a sequence to its end, showing its text as it comes or at the end; true when Ctrl-C ended it."""
    try:
        for chunk in engine.follow(sequence):
            if stream and not silent:
                _print(chunk)
    except KeyboardInterrupt:
        return True
    finally:
        engine.close(sequence)
        if not silent:
            out.out("" if stream else sequence.text, highlight=False)
    return False


def _print(chunk: Chunk) -> None:
    """Coloured in a terminal; byte for byte elsewhere (a console would expand tabs)."""
    if out.is_terminal:
        out.print(show.token(chunk), end="")
    else:
        sys.stdout.write(chunk.text)
        sys.stdout.flush()


def _compare(engine: Engine, sequence: Sequence, report: dict[str, object], *, quiet: bool) -> bool:
    """Decode the same prompt plainly and report on both; true when Ctrl-C ended it."""
    plain = Engine(engine.target, NoDrafter(), tokenizer=engine.tokenizer)
    prompt = sequence.ids[: sequence.prompt_length]
    other = plain.open(prompt, replace(sequence.params, seed=sequence.seed))
    if _run(plain, other, silent=True):
        return True
    one, two = sequence.output_ids, other.output_ids
    difference = first_difference(engine.target, prompt, one, two, sequence.params, sequence.seed)
    ratio = sequence.stats.tokens_per_second / other.stats.tokens_per_second
    same = difference is None
    report["plain"] = {"same_tokens": same, "speedup": ratio, "stats": show.as_json(other.stats)}
    if not quiet:
        err.print(f"none (plain decoding): {show.figures(other.stats)}")
        verdict = "the same text" if difference is None else f"text differs from token {difference.index} on"
        if difference and difference.near_tie:
            verdict += f" (a near-tie: the two logits are {difference.gap:.1g} apart)"
        elif difference and engine.verification.lossy:
            verdict += f" ({engine.verification.name} is lossy)"
        elif difference and sequence.params.temperature and not isinstance(engine.verification, Match):
            verdict += f" ({engine.verification.name}: another draw from the same law)"
        err.print(f"draft trees decode {ratio:.2f}x as fast as plain decoding (tokens per second), {verdict}")
    return False


def _complain(message: str) -> None:
    err.print(f"draftree: {' '.join(message.split())}", style="red", markup=False)


def _show_warning(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
    _complain(str(message))


def run(arguments: list[str] | None = None) -> int:
    """Run one command; its exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", DraftreeWarning)
        warnings.showwarning = _show_warning
        return _run_command(arguments)


def _run_command(arguments: list[str] | None) -> int:
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        app(args=arguments or ["--help"], prog_name="draftree", standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    except _ClickError as error:
        _complain(f"{error.format_message().rstrip('.')}: see 'draftree --help'")  # type: ignore[attr-defined]
        return 2
    except InputError as error:
        _complain(str(error))
        return 2
    except RunError as error:
        _complain(str(error))
        return 1
    except (MemoryError, torch.OutOfMemoryError):
        _complain("out of memory: use a smaller --nodes, a shorter prompt, or --dtype bfloat16")
        return 1
    except (KeyboardInterrupt, typer.Abort):
        _complain("interrupted")
        return 1
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        return 1
    except (RuntimeError, OSError) as error:
        _complain(f"failed while running: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}")
        return 1
    return 0


def main() -> None:
    """Entry point of the ``draftree`` command."""
    sys.exit(run())
