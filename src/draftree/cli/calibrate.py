"""The command ``draftree calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import locked, new_file
from ..config import Budget, SamplingParams
from ..drafters.base import Drafter as Drafts
from ..drafters.grow import TreeDrafter
from ..drafters.registry import check_corpus, learns, load_drafter
from ..drafters.spec import DEFAULT_DRAFTER, NONE, DrafterSpec
from ..errors import ConfigError, PromptError, RunError
from ..models.base import LanguageModel
from ..models.cost_profile import kept_or_measured
from ..models.model_files import DEFAULT_MODEL
from ..models.protocols import tokenizer_of
from ..policies.base import Provenance
from ..policies.fixed import TREE_FILE, TreeFile
from ..progress import out as output
from ..progress import progress_reporter
from ..text.encoding import encode, user
from ..text.tokenizer import Prompt
from ..train.prompts import read_prompts
from ..train.rank_acceptance import AcceptanceMeasurement, Tally, TreeCosts, TruePath, check_ranges, conclude, measure
from .interrupt import GO_ON, on_interrupt
from .options import ComputeOptions, Drafter, Seed, Target, Temperature, whole, with_options

_SHOWN_RANKS = 6
_CONTEXT = 512
"""Tokens behind which costs are taken."""


@with_options
def calibrate(
    *,
    context: typer.Context,
    prompts: Annotated[str, typer.Option(metavar="FILE", help="One prompt a line; or .jsonl with prompt or text.")],
    out: Annotated[str, typer.Option(metavar="FILE", help="Where to write the tree.")],
    target: Target = DEFAULT_MODEL,
    drafter: Drafter = DEFAULT_DRAFTER,
    nodes: Annotated[int, whole("N", "Most nodes of the tree.")] = 64,
    depth: Annotated[int, whole("D", "Deepest level of the tree.")] = 8,
    stride: Annotated[int, whole("N", "Tokens from one start of a draft to the next; 1 measures most.")] = 4,
    max_tokens: Annotated[int, whole("N", "Most tokens to decode after each prompt.")] = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Take prompts as they are, without the chat template.")] = False,
    by_cost: Annotated[
        bool, typer.Option("--by-cost", help="Choose size, up to --nodes, and depth by this machine's measured costs.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing tree file.")] = False,
    compute: ComputeOptions,
) -> None:
    """Measure how often a drafter is right, and write the best fixed tree for it (--method sequoia --tree FILE).

    Ctrl-C keeps what is measured: the same command goes on from there.
    """
    path = new_file(out, "--out", TREE_FILE.owns, force=force)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    check_ranges(depth, stride, max_tokens)
    if nodes < 1:
        raise ConfigError(f"nodes is {nodes}: use at least 1")
    Budget(nodes)
    spec = DrafterSpec.parse(drafter)
    if str(spec) == NONE:
        raise ConfigError("drafter none drafts nothing: calibrate with lookup, a head or a draft model")
    check_corpus(spec, None)
    if learns(spec):
        raise ConfigError(
            f"drafter {drafter} learns while trees are verified: calibrate with lookup, a head or a draft model"
        )
    texts = read_prompts(prompts)
    model = compute.load(target)
    policy = TruePath()
    drafts = load_drafter(spec, model, policy, learning=False)
    calibration = AcceptanceMeasurement(
        made_for=Provenance(model.capabilities.name, drafts.name),
        prompts=tuple(_encode(model, text, raw, f"prompt {i} of {prompts}") for i, text in enumerate(texts, start=1)),
        depth=depth,
        stride=stride,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=params.seed or 0,
        dtype=model.capabilities.dtype,
        weight_format=model.capabilities.weight_format,
    )
    measured = path.with_name(f"{path.name}.part")
    context.with_resource(locked(measured, "--out", folder=False))
    tally = Tally.load(measured, calibration, force=force)
    with on_interrupt(lambda: f"interrupted after {tally.done} of {len(texts)} prompts: {GO_ON}"):
        with progress_reporter("calibrating", len(texts), tally.done) as progress:
            for done in measure(calibration, model, drafts, policy, tally):
                progress(done)
    try:
        found = conclude(calibration, tally, nodes, _costs(model, drafts) if by_cost else None)
    except RunError:
        tally.path.unlink(missing_ok=True)
        raise
    found.save(path)
    tally.path.unlink(missing_ok=True)
    _report(found, path)


def _costs(target: LanguageModel, drafter: Drafts) -> TreeCosts:
    """Kept or measured; a layer of a drafter without a model costs next to nothing."""
    verify = kept_or_measured(target)
    model = drafter.source.model if isinstance(drafter, TreeDrafter) else None
    layer = kept_or_measured(model).seconds(1, _CONTEXT) if model else 0.0
    return TreeCosts(lambda tokens: verify.seconds(tokens, _CONTEXT), layer)


def _encode(model: LanguageModel, text: str, raw: bool, what: str) -> tuple[int, ...]:
    """Token ids of a prompt that leaves two tokens of the context, one of them drafted.

    Raises:
        PromptError: it is too long.
    """
    prompt: Prompt = text if raw else user(text)
    ids = encode(tokenizer_of(model), prompt)
    can = model.capabilities
    if len(ids) > can.max_length - 2:
        raise PromptError(
            f"{what} has {len(ids)} tokens but {can.name} takes {can.max_length} ({can.max_length_reason}), "
            f"generated ones included: shorten it to {can.max_length - 2} or fewer, or leave it out"
        )
    return tuple(ids)


def _report(found: TreeFile, path: Path) -> None:
    shown = range(min(_SHOWN_RANKS, len(found.counts.accepted[0])))
    output.print(f"{'depth':>5} {'trials':>7}  accepted at rank " + " ".join(f"{r:>5}" for r in shown))
    for d, (trials, rates) in enumerate(zip(found.counts.trials, found.counts.acceptance.tolist(), strict=True), 1):
        output.print(f"{d:>5} {trials:>7}  {'':16} " + " ".join(f"{rates[r]:5.3f}" for r in shown))
    output.print(
        f"{path}: {len(found.tree)} nodes down to depth {max(map(len, found.tree))}, "
        f"expected acceptance length {found.expected_acceptance_length:.2f} (bonus included)",
        markup=False,
    )
