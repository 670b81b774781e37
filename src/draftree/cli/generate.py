"""The command ``draftree generate``."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from ..bench.compare import first_difference
from ..drafters.base import NoDrafter
from ..drafters.spec import DEFAULT_DRAFTER, DrafterSpec
from ..engine import Engine
from ..errors import ConfigError, RunError
from ..load import load_beam_engine
from ..models.cpu.quantization import DEFAULT_NUMERICS
from ..models.load import DEFAULT_MODEL
from ..policies.auto.policy import AutoTree
from ..policies.methods import DEFAULT_METHOD
from ..progress import err, out
from ..request import Request
from ..text import Prompt, user
from ..verify.schemes import DEFAULT_SCHEME, Match
from . import beams as beam_command
from . import console as show
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
    Stop,
    Target,
    Temperature,
    TopK,
    TopP,
    TraceFile,
    TreeFile,
    Verify,
)
from .session import Place, engine_for, read_prompt, run, sampling_params, trace_to, with_tree


def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The question; - reads it from standard input.")],
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
    beams: beam_command.Beams = None,
    best: beam_command.Best = None,
    draft_beams: beam_command.DraftBeams = None,
    depth: beam_command.DraftDepth = None,
    width_threshold: beam_command.WidthThreshold = None,
    min_beams: beam_command.MinBeams = None,
    length_penalty: beam_command.LengthPenalty = None,
    early_stopping: beam_command.Early = None,
    single_cache: beam_command.SingleCache = False,
    beam_warp: beam_command.Warp = None,
    dtype: Dtype = None,
    device: Device = None,
    numerics: Numerics = DEFAULT_NUMERICS,
) -> None:
    """Answer one prompt, with the target's exact output."""
    wide = beam_command.beam_params(
        beams,
        best,
        draft_beams,
        depth,
        width_threshold,
        min_beams,
        length_penalty,
        early_stopping,
        single_cache,
        beam_warp,
    )
    if as_json and show_trees:
        raise ConfigError("--json and --show-trees exclude each other: choose one")
    if explain and (method != "auto" or drafter == "none"):
        what = "drafter none" if drafter == "none" else f"method {method}"
        raise ConfigError(f"--explain is about choices but {what} leaves none: use --method auto and a drafter")
    spec = DrafterSpec.parse(drafter).without_loop_back() if no_loop_back else DrafterSpec.parse(drafter)
    params = sampling_params(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
    text = read_prompt(prompt)
    if wide is not None:
        beam_command.exclude(
            {
                f"--method {method}": method != DEFAULT_METHOD,
                "--set": bool(settings),
                f"--tree {tree}": tree is not None,
                f"--recycle-file {recycle_file}": recycle_file is not None,
                f"--nodes {nodes}": nodes is not None,
                f"--verify {verify}": verify != DEFAULT_SCHEME,
                f"--candidates {candidates}": candidates is not None,
                "--show-trees": show_trees,
                "--explain": explain,
                "--compare": compare,
                f"--trace {trace}": trace is not None,
                "--force": force,
            }
        )
        wide.check(params)
        sampled, place = params.temperature > 0, Place(dtype, device, numerics)
        wide_engine = load_beam_engine(target, drafter=spec, sampled=sampled, **place._asdict())
        beam_command.print_beams(wide_engine, text if raw else user(text), params, wide, as_json)
        return
    observers = trace_to(context, trace, force, method)
    if show_trees:
        observers.append(show.Trees(out))
    given, place = with_tree(settings, tree), Place(dtype, device, numerics)
    engine = engine_for(target, spec, method, given, nodes, verify, place, observers, recycle_file, candidates)
    asked: Prompt = text if raw else user(text)
    request = engine.open(asked, params)
    interrupted = run(engine, request, silent=as_json, stream=not show_trees)
    report: dict[str, object] = {
        "text": request.text,
        "token_ids": request.output_ids,
        "finish_reason": request.finish_reason or "interrupted",
        "seed": request.seed,
        "verification": verify,
        "candidates": engine.verification.candidates,
        "lossy": engine.verification.lossy,
        "stats": show.as_json(request.stats),
    }
    policy = engine.drafter.policy
    if explain and isinstance(policy, AutoTree):
        report["explanation"] = policy.report.text()
    if not as_json:
        err.print(show.LEGEND)
        names = f"{engine.drafter.name}, {method}, {verify}"
        err.print(f"{names}: {show.figures(request.stats, engine.verification.lossy)}", markup=False)
        if request.stats.levels:
            err.print(show.levels(request.stats), markup=False)
        if explain:
            err.print(report["explanation"], markup=False)
    if compare and not interrupted:
        try:
            interrupted = _compare(engine, request, report, quiet=as_json)
        except KeyboardInterrupt:
            interrupted = True
    if as_json:
        out.out(json.dumps(report, ensure_ascii=False))
    if interrupted:
        raise RunError(f"interrupted after {len(request.output_ids)} tokens")


def _compare(engine: Engine, request: Request, report: dict[str, object], *, quiet: bool) -> bool:
    """Decode the same prompt plainly and report on both; true when Ctrl-C ended it."""
    plain = Engine(engine.target, NoDrafter(), tokenizer=engine.tokenizer)
    prompt = request.ids[: request.prompt_length]
    other = plain.open(prompt, replace(request.params, seed=request.seed))
    if run(plain, other, silent=True):
        return True
    one, two = request.output_ids, other.output_ids
    difference = first_difference(engine.target, prompt, one, two, request.params, request.seed)
    ratio = request.stats.tokens_per_second / other.stats.tokens_per_second
    same = difference is None
    report["plain"] = {"same_tokens": same, "speedup": ratio, "stats": show.as_json(other.stats)}
    if not quiet:
        err.print(f"none (plain decoding): {show.figures(other.stats)}")
        verdict = "the same text" if difference is None else f"text differs from token {difference.index} on"
        if difference and difference.near_tie:
            verdict += f" (a near-tie: the two logits are {difference.gap:.1g} apart)"
        elif difference and engine.verification.lossy:
            verdict += f" ({engine.verification.name} is lossy)"
        elif difference and request.params.temperature and not isinstance(engine.verification, Match):
            verdict += f" ({engine.verification.name}: another draw from the same law)"
        err.print(f"draft trees decode {ratio:.2f}x as fast as plain decoding (tokens per second), {verdict}")
    return False
