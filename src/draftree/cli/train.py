"""The commands ``draftree train head``, ``draftree train classifier`` and ``draftree calibrate``."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from annotated_types import Ge, Interval

from ..artifacts import locked, new_file, own_folder, user_path
from ..bench.suites import STARTER_FILE
from ..config import Checked, check_fields, option
from ..drafters.grow import TreeDrafter
from ..drafters.provenance import provenance
from ..drafters.registry import load_drafter
from ..drafters.spec import DEFAULT_DRAFTER, NONE, DrafterSpec, learns, read_drafter
from ..errors import ConfigError, RunError
from ..models.base import FINAL_STATE
from ..models.heads.head_folder import EAGLE, shipped_head_for
from ..models.heads.own_heads import own_head_for
from ..models.model_files import DEFAULT_MODEL
from ..models.protocols import feature_model
from ..papers.c2t import CLASSIFIER_FILE, Classifier, ClassifierFile
from ..policies.base import Provenance
from ..policies.fixed import TREE_FILE, TreeFile, best_tree, expected_acceptance_length
from ..progress import out as output
from ..progress import progress_reporter
from ..train.c2t_fit import ClassifierFigures, ClassifierRecipe, evaluate, fit
from ..train.c2t_samples import (
    SampleOptions,
    SampleRecipe,
    SampleStore,
    collect,
    full_trees,
)
from ..train.eagle_fit import FitRecipe, fast_in_bf16
from ..train.eagle_training import HeadTraining, TrainingLimits
from ..train.head_architectures import ARCHITECTURES, Architecture, is_trained, read_trained
from ..train.head_data import HeadData
from ..train.rank_acceptance import TALLY_FILE, CalibrationOptions, Tally, TruePath, measure
from ..train.responses import (
    LONGEST_PROMPT,
    PROMPTS,
    TEMPERATURES,
    DataRecipe,
    PromptFile,
    digest,
    encoded,
    read_prompts,
    shuffled,
)
from ..train.shards import RECIPE
from .interrupt import GO_ON, on_interrupt
from .options import NAMES, ComputeOptions, Drafter, Target, with_options

_LICENCES = {str(PROMPTS): "Apache-2.0, of draftree"}
"""Of the prompts that ship."""
WORK = "work"
"""Folder, in that of a head, of what training needs."""

train = typer.Typer(help="Train what drafts.", add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The files of prompts that something is trained on, or measured with."""

    prompts: tuple[str, ...] = option("Prompts: one a line, .jsonl or .csv; may be repeated.", (), metavar="FILE")
    licence: tuple[str, ...] = option(
        "Licence of each prompt file, in their order; it is kept with the result.", (), metavar="TEXT"
    )
    raw: bool = option("Take prompts as they are, without the chat template.", False)
    seed: Annotated[int, Interval(ge=0, lt=2**62)] = option("Seed of responses, order and weights.", 0, metavar="S")

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.prompts:
            raise ConfigError("no --prompts: give a file with one prompt a line")
        if self.licence and len(self.licence) != len(self.prompts):
            raise ConfigError(
                f"{len(self.licence)} --licence for {len(self.prompts)} --prompts: give one for each, or none"
            )

    def read(self) -> tuple[list[str], list[PromptFile]]:
        """All prompts, in the order that the seed gives, and the files that they are from."""
        files: list[PromptFile] = []
        prompts: list[list[str]] = []
        for name, licence in zip(self.prompts, self.licence or [None] * len(self.prompts), strict=True):
            texts, sha256 = read_prompts(name)
            prompts.append(texts)
            files.append(PromptFile(Path(name).name, len(texts), sha256, licence or _LICENCES.get(name)))
        return shuffled(prompts, self.seed), files


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPrompts(PromptOptions):
    """The files of prompts that a tree is calibrated on: those of the suite that ships, if none is named."""

    prompts: tuple[str, ...] = option(
        "Prompts like yours: one a line, .jsonl or .csv; may be repeated. By default 20 that come with draftree.",
        (str(STARTER_FILE),),
        metavar="FILE",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPrompts(PromptOptions):
    """The files of prompts that a head is trained on: those that ship, if none is named."""

    prompts: tuple[str, ...] = option(
        "Prompts like yours: one a line, .jsonl or .csv; may be repeated. By default those that come with draftree.",
        (str(PROMPTS),),
        metavar="FILE",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions(Checked):
    """Which head is trained, and on what responses."""

    arch: Architecture = option(
        "Kind of head: EAGLE-1, or EAGLE-3 with an output layer of its own.",
        ARCHITECTURES["eagle"],
        choices=ARCHITECTURES,
    )
    max_tokens: Annotated[int, Ge(2)] = option("Most tokens of a response.", 160, metavar="N")
    init: str | None = option(
        "Start from this head; without --out by default from the one that comes with draftree, if one does.",
        metavar="DIR",
    )


@train.command()
@with_options
def head(
    *,
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=f"{NAMES}.")],
    source: HeadPrompts,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the head, and for what training needs; by default one that drafter auto finds it in.",
        ),
    ] = None,
    options: HeadOptions,
    limits: TrainingLimits,
    recipe: FitRecipe,
    bf16: Annotated[
        bool | None, typer.Option("--bf16/--no-bf16", help="Compute in bfloat16; by default where that is fast.")
    ] = None,
    compute: ComputeOptions,
) -> None:
    """Train a draft head for a model on its own responses to prompts; drafter auto uses it from then on.

    Ctrl-C keeps what is done: after a sixth of the time there is a head (of EAGLE-3 later), and the same command goes
    on from there.
    """
    architecture = options.arch
    if out is not None:
        _head_folder(out, architecture)
    start = None if options.init is None else user_path(options.init)
    if start is not None and not is_trained(start, architecture):
        raise ConfigError(f"no draft head of this --arch in {start}: give --init a folder of one")
    texts, files = source.read()
    target = feature_model(compute.load(model))
    folder = _head_folder(own_head_for(target) if out is None else out, architecture)
    if out is None and start is None and architecture.kind == EAGLE and limits.feed_forward is None:
        start = shipped_head_for(target)
    read = architecture.features(target) if start is None else read_trained(start, target)[0].features
    target.track_features(read | FINAL_STATE)
    encoded_prompts = encoded(target, texts, raw=source.raw)
    can = target.capabilities
    data = DataRecipe(
        target=can.fingerprint or can.name,
        prompts=digest(encoded_prompts),
        max_tokens=options.max_tokens,
        seed=source.seed,
        dtype=can.dtype,
    )
    if bf16 is None:
        bf16 = fast_in_bf16(target)
    context.with_resource(locked(folder, "--out", folder=True))
    training = HeadTraining(
        target=target,
        architecture=architecture,
        data=HeadData(folder / WORK, data, encoded_prompts, target.tracked),
        sources=files,
        recipe=replace(recipe, bf16=bf16, seed=source.seed),
        limits=limits,
        out=folder,
        init=start,
    )
    with on_interrupt(lambda: f"interrupted: {GO_ON}"):
        record = training.run(progress_reporter)
    if record.held_out:
        rates = " ".join(f"{row[0]:.3f}" for row in record.acceptance)
        output.print(
            f"on {record.held_out} responses kept apart: MAL of its chains {record.mal:.2f}, acceptance at depth 1 to "
            f"{len(record.acceptance)}: {rates}"
        )
    use = "drafter auto finds it, and 'draftree heads' lists it"
    if out:
        use = f"draft with it by --drafter {folder.absolute()}"
    output.print(f"{folder}: {use}; {folder / WORK} may be deleted")


def _head_folder(name: str | Path, architecture: Architecture) -> Path:
    """The folder of a head to train.

    Raises:
        ConfigError: it has something else, or a head alone.
    """
    if is_trained(user_path(name), architecture) and not (user_path(name) / WORK).exists():
        raise ConfigError(
            f"{name} has a head, but no {WORK} that its training goes on from: give --out another folder, or remove it "
            "first ('draftree heads remove' takes one that 'draftree heads' lists)"
        )
    folder = own_folder(name, "--out", WORK)
    if (folder / "config.json").exists() and not is_trained(folder, architecture):
        raise ConfigError(f"{name} holds another model: give --out a folder of its own")
    return folder


@train.command()
@with_options
def classifier(
    *,
    context: typer.Context,
    source: PromptOptions,
    out: Annotated[str, typer.Option(metavar="FILE", help="Where to write the classifier.")],
    target: Target = DEFAULT_MODEL,
    drafter: Drafter = DEFAULT_DRAFTER,
    sampling: SampleOptions,
    recipe: ClassifierRecipe,
    compute: ComputeOptions,
) -> None:
    """Train a classifier of drafts (--method c2t --set classifier=FILE) on the target's own responses to prompts.

    Ctrl-C keeps what is done: the same command goes on from there.
    """
    path = new_file(out, "--out")
    recipe, apart, negatives = replace(recipe, seed=source.seed), sampling.apart, sampling.negatives
    spec = _drafting(drafter)
    texts, files = source.read()
    folder = own_folder(sampling.data or f"{path}.samples", "--data", RECIPE)
    model = compute.load(target)
    drafts = load_drafter(spec, model, full_trees(), learning=False)
    tokens = encoded(model, texts, raw=source.raw)
    assert isinstance(drafts, TreeDrafter)  # noqa: S101 - drafter none is refused above
    made_for = provenance(model, drafts.source, drafts.name)
    context.with_resource(locked(folder, "--data", folder=True))
    store = SampleStore(
        folder,
        SampleRecipe(
            **asdict(made_for),
            prompts=digest(tokens),
            max_tokens=sampling.max_tokens,
            negatives=negatives,
            seed=source.seed,
            dtype=model.capabilities.dtype,
        ),
    )
    most, rows = sampling.samples, sampling.rows
    with on_interrupt(lambda: f"interrupted with {store.count} of {most} samples: {GO_ON}"):
        with progress_reporter("collecting samples", most, store.count) as progress:
            drafts.prepare(model)
            model.reserve(rows + 1, min(LONGEST_PROMPT + sampling.max_tokens, model.capabilities.max_length))
            collect(store, model, drafts, tokens, most=most, rows=rows, progress=progress)
        numbers = store.first(most)
        learned, kept_apart = store.samples(numbers).split(apart)
        with progress_reporter("fitting, epochs", recipe.epochs) as progress:
            fitted = fit(learned, recipe, negatives, progress, kept_apart)
    figures = evaluate(fitted, kept_apart, negatives)
    trained_on = {
        "prompts": [asdict(file) for file in files],
        "responses": len(numbers),
        "samples": len(learned.accepted),
        "accepted": int(learned.accepted.sum()),
        "negatives": negatives,
        "apart": apart,
        "max_tokens": sampling.max_tokens,
        "temperatures": list(TEMPERATURES),
        "recipe": asdict(recipe),
    }
    CLASSIFIER_FILE.write(path, ClassifierFile(fitted, made_for, trained_on, asdict(figures)))
    _report_classifier(fitted, figures, path, folder)


def _drafting(name: str) -> DrafterSpec:
    """Parse a drafter.

    Raises:
        ConfigError: it is unknown, or drafts nothing.
    """
    spec = DrafterSpec.parse(read_drafter(name))
    if str(spec) == NONE:
        raise ConfigError("drafter none drafts nothing: name lookup, a head, a draft model or an ensemble")
    return spec


def _report_classifier(fitted: Classifier, figures: ClassifierFigures, path: Path, folder: Path) -> None:
    if figures.prompts:
        output.print(f"{figures.prompts} prompts kept apart, {figures.nodes} nodes, {figures.accepted} accepted")
        output.print("beta  precision  recall  positive rate")
        for beta, (precision, recall, rate) in figures.betas.items():
            output.print(f"{beta:5} {precision:9.3f} {recall:7.3f} {rate:13.3%}")
        output.print(f"calibration error {figures.calibration_error:.3f}, loss {figures.loss:.3f} for an accepted node")
    else:
        output.print("no prompt kept apart was drafted for: no figures; use larger --samples, or a smaller --apart")
    output.print(
        f"{path}: {fitted.parameters} parameters; draft with it by --method c2t --set classifier={path}; "
        f"{folder} may be deleted",
    )


@partial(with_options, without=("licence",))
def calibrate(
    *,
    context: typer.Context,
    source: CalibrationPrompts,
    out: Annotated[str, typer.Option(metavar="FILE", help="Where to write the tree.")],
    target: Target = DEFAULT_MODEL,
    drafter: Drafter = DEFAULT_DRAFTER,
    options: CalibrationOptions,
    compute: ComputeOptions,
) -> None:
    """Measure how often a drafter is right, and write the best fixed tree for it (--method sequoia --set tree=FILE).

    Ctrl-C keeps what is measured: the same command goes on from there.
    """
    path = new_file(out, "--out")
    spec = _drafting(drafter)
    if learns(spec):
        raise ConfigError(
            f"drafter {drafter} learns while trees are verified: calibrate with lookup, a head or a draft model"
        )
    texts, _ = source.read()
    model, policy = compute.load(target), TruePath()
    drafts = load_drafter(spec, model, policy, learning=False)
    prompts = encoded(model, texts, raw=source.raw)
    assert isinstance(drafts, TreeDrafter)  # noqa: S101 - drafter none is refused above
    can, measured = model.capabilities, path.with_name(f"{path.name}.part")
    made_for = provenance(model, drafts.source, drafts.name)
    settings = {**asdict(options), "nodes": None, "seed": source.seed}
    identity = json.dumps([asdict(made_for), can.dtype, can.weight_format, settings, prompts])
    context.with_resource(locked(measured, "--out", folder=False))
    key = hashlib.sha256(identity.encode()).hexdigest()
    tally = Tally.load(measured, key, options.depth)
    with on_interrupt(lambda: f"interrupted after {tally.done} of {len(prompts)} prompts: {GO_ON}"):
        with progress_reporter("calibrating", len(prompts), tally.done) as progress:
            for done in measure(options, model, drafts, policy, prompts, source.seed, tally):
                TALLY_FILE.write(measured, tally)
                progress(done)
        counts = tally.counts
        acceptance = counts.acceptance
        tree = best_tree(acceptance, options.nodes)
        if not tree:
            measured.unlink(missing_ok=True)
            raise RunError(
                f"drafter {drafts.name} was never right in {sum(counts.trials)} trials: use more prompts, a larger "
                "--max-tokens, or another drafter"
            )
        tree_file = TreeFile(
            made_for=Provenance(made_for.target, made_for.drafter),
            temperature=options.temperature,
            prompts=len(prompts),
            counts=counts,
            expected_acceptance_length=expected_acceptance_length(acceptance, tree),
            tree=tree,
        )
        TREE_FILE.write(path, tree_file)
        measured.unlink(missing_ok=True)
    output.print(
        f"{path}: {len(tree)} nodes down to depth {max(map(len, tree))}, "
        f"expected acceptance length {tree_file.expected_acceptance_length:.2f} (bonus included)",
    )
