"""The commands ``draftree generate``, with beams or without, and ``draftree chat``."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..beams.beam_engine import BeamEngine, load_beam_engine
from ..beams.forest import BeamParams
from ..config import SamplingParams, option
from ..drafters.spec import AUTO, LOOKUP, NONE
from ..engine.engine import Engine
from ..engine.replay import first_difference
from ..engine.scheduler import SchedulerParams
from ..engine.speculation import SpeculationParams
from ..errors import ConfigError, DraftreeError, InputError
from ..models.llama.library import has_library
from ..models.loading import load_llama
from ..models.model_files import DEFAULT_MODEL
from ..policies.methods import DEFAULT_METHOD
from ..progress import complain, err, out, write
from ..request import Request
from ..sampling.constraint import Constraint
from ..sampling.grammar import Grammar
from ..text.encoding import Prompt, user
from ..verify.schemes import Match
from . import console as show
from .console import read_file, read_json, read_prompt, run
from .interrupt import on_interrupt
from .options import ComputeOptions, Model, Target, TemplateOptions, TraceOptions, given, with_options

if TYPE_CHECKING:
    from ..openai.choices import AnswerForm


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Constraints of the answer, and what is printed."""

    raw: bool = option("Continue the prompt as it is, without the chat template.", False)
    prediction: str | None = option(
        "A text that the answer probably repeats, such as the file to edit; drafter lookup drafts from it.",
        metavar="FILE",
    )
    json_schema: str | None = option("The answer is JSON that is valid by this schema.", metavar="FILE")
    regex: str | None = option("The answer is what this regular expression matches.", metavar="PATTERN")
    as_json: bool = option("Print one JSON object instead of streaming text.", False, name="--json")
    show_trees: bool = option("Print each step's tree and accepted path.", False)
    explain: bool = option("Report why the method auto chose what it chose.", False)
    compare: bool = option("Then decode without drafts, also by llama.cpp if it is installed, and compare.", False)

    def __post_init__(self) -> None:
        if self.as_json and self.show_trees:
            raise ConfigError("--json and --show-trees exclude each other: choose one")
        if self.json_schema is not None and self.regex is not None:
            raise ConfigError("--json-schema and --regex exclude each other: choose one")


_OF_BEAMS = ("--drafter", "--raw", "--json")
"""Options outside the groups of sampling, beams and computing that go with --beams."""


@with_options
def generate(
    *,
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The question; - reads it from standard input.")],
    target: Target = DEFAULT_MODEL,
    speculation: SpeculationParams,
    params: SamplingParams,
    options: AnswerOptions,
    trace: TraceOptions,
    beams: BeamParams | None,
    template: TemplateOptions,
    compute: ComputeOptions,
) -> None:
    """Answer one prompt, with the target's exact output."""
    schema = None if options.json_schema is None else read_json(options.json_schema, "--json-schema")
    if options.explain:
        _check_choices(speculation)
    text = read_prompt(prompt)
    message: Prompt = text if options.raw else user(text)
    if beams is not None:
        flags = (*given(speculation), *given(trace), *given(options), *given(template))
        if unused := next((flag for flag in flags if flag not in _OF_BEAMS), None):
            raise ConfigError(f"--beams and {unused} exclude each other: leave one out")
        beams.check(params)
        beam_engine = load_beam_engine(target, drafter=speculation.spec, **compute.options)
        _print_beams(beam_engine, message, params, beams, options.as_json)
        return
    predicted, method = "", str(speculation.method)
    if options.prediction is not None:
        predicted, speculation = read_file(options.prediction, "--prediction"), _reading_predictions(speculation)
    observers = trace.observers(context, method)
    if options.show_trees:
        observers.append(show.Trees())
    engine = template.engine(compute.load(target), speculation, observers)
    ids, form = _asked(engine, message, params, _grammar(engine, schema, options.regex), raw=options.raw)
    handle = engine.submit(ids, form.params, prediction=predicted)
    request = handle.request
    with on_interrupt(lambda: f"interrupted after {len(request.output_ids)} tokens"):
        answer = run(handle, form.parser(), silent=options.as_json, stream=not options.show_trees)
    report = _report(engine, request, answer.text)
    if options.explain:
        report["explanation"] = _explanation(engine)
    if not options.as_json:
        names = f"{engine.speculation.drafter.name}, {method}, {report['verification']}"
        err.print(show.LEGEND)
        err.print(f"{names}: {show.figures(request.stats, engine.speculation.scheme.lossy)}")
        if options.explain:
            err.print(report["explanation"])
    compared = _compare(engine, request, report, target, compute) if options.compare else []
    if options.as_json:
        write(json.dumps(report, ensure_ascii=False) + "\n")
    elif compared:
        err.print("\n".join(compared))


def _check_choices(speculation: SpeculationParams) -> None:
    """Raise ConfigError unless the method auto has something to choose."""
    method, drafter = str(speculation.method), str(speculation.spec)
    if method != DEFAULT_METHOD or drafter == NONE:
        what = f"method {method}" if method != DEFAULT_METHOD else "drafter none"
        raise ConfigError(f"--explain is about choices but {what} leaves none: use --method auto and a drafter")


def _asked(
    engine: Engine, prompt: Prompt, params: SamplingParams, constraint: Constraint | None = None, *, raw: bool = False
) -> tuple[list[int], AnswerForm]:
    """The token ids of a prompt, and what its answer consists of."""
    from ..openai.choices import AnswerForm  # the server's bodies take a while to load

    ids = engine.inputs.encode(prompt)
    return ids, AnswerForm(engine, ids, params, constraint, raw=raw)


def _grammar(engine: Engine, schema: Any, regex: str | None) -> Grammar | None:
    if schema is not None:
        return engine.grammars.json_schema(schema)
    return None if regex is None else engine.grammars.regex(regex)


def _report(engine: Engine, request: Request, text: str) -> dict[str, object]:
    scheme = engine.speculation.scheme
    return {
        "text": text,
        "token_ids": request.output_ids,
        "finish_reason": request.finish_reason,
        "seed": request.seed,
        "verification": scheme.name,
        "candidates": scheme.candidates,
        "lossy": scheme.lossy,
        "stats": show.as_json(request.stats),
    }


def _explanation(engine: Engine) -> str:
    policy = engine.speculation.drafter.policy
    if policy is not None and policy.report:
        return policy.report.text()
    return f"nothing is drafted: {engine.target.capabilities.no_trees}"


def _reading_predictions(speculation: SpeculationParams) -> SpeculationParams:
    """Choose a drafter that drafts from predictions: lookup, unless another is named.

    Raises:
        ConfigError: the named drafter does not.
    """
    if str(speculation.spec) == AUTO:
        return replace(speculation, drafter=LOOKUP)
    if LOOKUP not in speculation.spec.sources:
        raise ConfigError(
            f"drafter {speculation.spec} does not draft from --prediction: use {LOOKUP}, or {LOOKUP}+{speculation.spec}"
        )
    return speculation


def _compare(
    engine: Engine, request: Request, report: dict[str, object], target: str, compute: ComputeOptions
) -> list[str]:
    """Decode the same prompt without drafts, also by llama.cpp if both engines read the file; return lines to print."""
    from ..models.native.native_model import NativeModel

    prompt = request.ids[: request.prompt_length]
    params = replace(request.params, seed=request.seed)
    ar, scheme = Engine(engine.target).generate([prompt], params)[0], engine.speculation.scheme
    difference = first_difference(engine.target, prompt, request.output_ids, ar.token_ids, params)
    ratio = request.stats.tokens_per_second / ar.stats.tokens_per_second
    report["ar"] = {"same_tokens": difference is None, "speedup": ratio, "stats": show.as_json(ar.stats)}
    verdict = "the same text" if difference is None else f"text differs from token {difference.index} on"
    if difference and difference.near_tie:
        verdict += f" (a near-tie: the two logits are {difference.gap:.1g} apart)"
    elif difference and scheme.lossy:
        verdict += f" ({scheme.name} is lossy)"
    elif difference and request.params.temperature and not isinstance(scheme, Match):
        verdict += f" ({scheme.name}: another draw from the same distribution)"
    said = [
        f"none (AR decoding): {show.figures(ar.stats)}",
        f"draft trees decode {ratio:.2f}x as fast as AR decoding (tokens per second), {verdict}",
    ]
    if isinstance(engine.target, NativeModel) and has_library():
        try:
            model = load_llama(target, threads=compute.threads)
        except DraftreeError as error:
            complain(f"the comparison leaves llama.cpp out: {error}")
            return said
        stats = Engine(model).generate([prompt], params)[0].stats
        ratio = request.stats.tokens_per_second / stats.tokens_per_second
        report["llama.cpp"] = {"speedup": ratio, "stats": show.as_json(stats)}
        said += [f"none, by llama.cpp: {show.figures(stats)}", f"draft trees decode {ratio:.2f}x as fast as llama.cpp"]
    return said


def _print_beams(engine: BeamEngine, prompt: Prompt, params: SamplingParams, beams: BeamParams, as_json: bool) -> None:
    """Decode one prompt and print its best sequences: figures go to standard error."""
    generation = engine.generate([prompt], params, beams)[0]
    best = generation.hypotheses[0]
    if as_json:
        report = {
            "text": best.text,
            "token_ids": best.token_ids,
            "finish_reason": best.finish_reason,
            "seed": generation.seed,
            "beams": [asdict(beam) for beam in generation.hypotheses],
            "peak_slots": generation.peak_slots,
            "stats": show.as_json(generation.stats),
        }
        write(json.dumps(report, ensure_ascii=False) + "\n")
        return
    for rank, beam in enumerate(generation.hypotheses, start=1):
        if beams.returned > 1:
            out.print(f"{rank}. score {beam.score:.4f}, {len(beam.token_ids)} tokens", style="dim")
        write(f"{beam.text}\n")
    drafter, kind = engine.source.name if engine.source else NONE, "sampled" if params.temperature else "searched"
    layers = f"{generation.stats.tokens} layers, {generation.stats.drafted_layers} drafted"
    err.print(
        f"{drafter}: {beams.width} beams {kind}, {layers}, at most {generation.peak_slots} tokens in the cache · "
        f"{show.figures(generation.stats)}",
    )


def _raised() -> None:
    """Ctrl-C at the prompt: a line editor leaves the terminal as it was."""
    raise KeyboardInterrupt


@partial(with_options, without=("stop",))
def chat(
    *,
    context: typer.Context,
    model: Model = DEFAULT_MODEL,
    speculation: SpeculationParams,
    params: SamplingParams,
    trace: TraceOptions,
    template: TemplateOptions,
    compute: ComputeOptions,
) -> None:
    """Talk to a model: /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer or it."""
    observers = trace.observers(context, str(speculation.method))
    # A turn reads what is new in it: the row of the turn before is kept.
    engine = template.engine(compute.load(model), speculation, observers, SchedulerParams(rows=1, prefixes=1))
    messages: list[dict[str, str]] = []
    if sys.stdin.isatty() and sys.stdout.isatty():
        with suppress(ImportError):  # without it ``input`` gets no more of a line than the terminal holds, 4095 bytes
            import readline  # noqa: F401
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
            ids, form = _asked(engine, [*messages, *user(line)], params)
            handle = engine.submit(ids, form.params)
        except InputError as error:
            complain(f"{error}, or forget the conversation with /reset" if messages else str(error))
            continue
        with on_interrupt(handle.cancel):
            answer = run(handle, form.parser())
        err.print(show.figures(handle.generation.stats, handle.generation.lossy), style="dim")
        messages += [*user(line), {"role": "assistant", "content": answer.said}]
