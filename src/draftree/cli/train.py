"""The commands ``draftree train head`` and ``draftree train classifier``."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from annotated_types import Interval

from ..artifacts import LARGEST_DATA, locked, new_file, own_folder, read_bytes, user_path
from ..config import check_fields, option
from ..drafters.grow import TreeDrafter
from ..drafters.registry import load_drafter, provenance
from ..drafters.spec import DEFAULT_DRAFTER, NONE, DrafterSpec
from ..errors import ConfigError, UnknownNameError
from ..models.base import FINAL_STATE
from ..models.model_files import DEFAULT_MODEL
from ..models.protocols import trainable
from ..policies.c2t import CLASSIFIER_FILE, DEFAULT_FEATURES, Classifier, ClassifierFile, read_classifier
from ..progress import out as output
from ..progress import progress_reporter
from ..train.c2t_fit import FINE_RATE, RATE, ClassifierFigures, ClassifierRecipe, check_split, evaluate, fit
from ..train.c2t_samples import (
    APART,
    SAMPLES_RECIPE,
    SampleRecipe,
    SampleStore,
    check_recipe,
    check_room,
    collect,
    full_trees,
)
from ..train.eagle_fit import FitRecipe, HeadFigures, fast_in_bf16
from ..train.eagle_training import HeadTraining, TrainingLimits
from ..train.head_architectures import ARCHITECTURES, Architecture, is_trained, read_trained
from ..train.head_data import HeadData
from ..train.prompts import LONGEST_PROMPT, PromptFile, digest, encoded, read_prompts, shuffled
from ..train.responses import MAX_ROWS, TEMPERATURES, DataRecipe
from .interrupt import GO_ON, on_interrupt
from .options import ComputeOptions, Drafter, Target, number, whole, with_options

WORK = "work"
"""Folder, in that of a head, of what training needs."""

train = typer.Typer(help="Train what drafts.", add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The files of prompts that something is trained on."""

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
            prompts.append(read_prompts(name))
            digest = hashlib.sha256(read_bytes(user_path(name), LARGEST_DATA)).hexdigest()
            files.append(PromptFile(Path(name).name, len(prompts[-1]), digest, licence))
        return shuffled(prompts, self.seed), files


@train.command()
@with_options
def head(
    *,
    context: typer.Context,
    source: PromptOptions,
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder for the head, and for what training needs.")],
    target: Target = DEFAULT_MODEL,
    arch: Annotated[
        str,
        typer.Option(
            metavar="|".join(ARCHITECTURES), help="Kind of head: EAGLE-1, or EAGLE-3 with an output layer of its own."
        ),
    ] = "eagle",
    max_tokens: Annotated[int, whole("N", "Most tokens of a response.")] = 160,
    limits: TrainingLimits,
    recipe: FitRecipe,
    init: Annotated[str | None, typer.Option(metavar="DIR", help="Start from this head, not afresh.")] = None,
    bf16: Annotated[
        bool | None, typer.Option("--bf16/--no-bf16", help="Compute in bfloat16; by default where that is fast.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Drop a training with other settings.")] = False,
    compute: ComputeOptions,
) -> None:
    """Train a draft head (--drafter DIR) on the target's own responses to prompts.

    Ctrl-C keeps what is done: the same command goes on from there.
    """
    if max_tokens < 2:
        raise ConfigError(f"max_tokens is {max_tokens}: use at least 2, for one token to draft")
    if arch not in ARCHITECTURES:
        raise UnknownNameError(f"--arch {arch}: use one of {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[arch]
    folder = _head_folder(out, architecture)
    start = None if init is None else user_path(init)
    if start is not None and not is_trained(start, architecture):
        raise ConfigError(f"no draft head in {init} from which --arch {arch} could start: give --init a folder of one")
    texts, files = source.read()
    model = trainable(compute.load(target))
    read = architecture.features(model) if start is None else read_trained(start, model, architecture)[0].features
    model.track_features(read | FINAL_STATE)
    encoded_prompts = encoded(model, texts, raw=source.raw)
    data = DataRecipe(
        target=model.capabilities.name,
        prompts=digest(encoded_prompts),
        max_tokens=max_tokens,
        seed=source.seed,
        dtype=model.capabilities.dtype,
    )
    if bf16 is None:
        bf16 = fast_in_bf16(model)
    context.with_resource(locked(folder, "--out", folder=True))
    training = HeadTraining(
        target=model,
        architecture=architecture,
        data=HeadData.open(folder / WORK, data, encoded_prompts, model.tracked),
        sources=files,
        recipe=replace(recipe, bf16=bf16, seed=source.seed),
        limits=limits,
        out=folder,
        init=start,
    )
    with on_interrupt(lambda: f"interrupted: {GO_ON}"):
        figures = training.run(progress_reporter, force=force)
    _report_head(folder, figures)


def _head_folder(name: str, architecture: Architecture) -> Path:
    """Where the head goes, once it is clear that it can.

    Raises:
        ConfigError: it is a file, or no folder that can be written, or holds what no training of heads wrote.
    """
    folder = own_folder(name, "--out", WORK)
    place = folder if folder.exists() else folder.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(f"folder {place} is not there or cannot be written: make it, or choose another")
    if (folder / "config.json").exists() and not is_trained(folder, architecture):
        raise ConfigError(f"{name} holds another model: give --out a folder of its own")
    return folder


def _report_head(folder: Path, figures: dict[str, HeadFigures]) -> None:
    for name, found in figures.items():
        rates = " ".join(f"{row[0]:.3f}" for row in found.acceptance)
        lengths = ", ".join(f"{tree} {mal:.2f}" for tree, mal in found.mal.items())
        output.print(f"{name}: acceptance at depth 1 to {len(found.acceptance)}: {rates}; MAL: {lengths}")
    output.print(f"{folder}: draft with it by --drafter {folder}", markup=False)


@train.command()
@with_options
def classifier(
    *,
    context: typer.Context,
    source: PromptOptions,
    out: Annotated[str, typer.Option(metavar="FILE", help="Where to write the classifier.")],
    target: Target = DEFAULT_MODEL,
    drafter: Drafter = DEFAULT_DRAFTER,
    samples: Annotated[int, whole("N", "Nodes of draft trees to learn from, if there are prompts enough.")] = 600_000,
    negatives: Annotated[
        float, number("R", "Share of the nodes that the target does not accept to keep; the score makes up for it.")
    ] = 0.1,
    max_tokens: Annotated[int, whole("N", "Most tokens of a response.")] = 96,
    rows: Annotated[int, whole("N", "Responses that are drawn together.")] = 16,
    features: Annotated[str, typer.Option(help="What it sees of a node, with commas.")] = ",".join(DEFAULT_FEATURES),
    recipe: ClassifierRecipe,
    learning_rate: Annotated[
        float | None, number("R", f"Learning rate of Adam; {RATE:g}, or {FINE_RATE:g} with --fine-tune.")
    ] = None,
    fine_tune: Annotated[
        str | None, typer.Option("--fine-tune", metavar="FROM", help="Start from this classifier, not afresh.")
    ] = None,
    apart: Annotated[
        int, whole("N", "One prompt in N is kept apart, to choose among epochs and for the figures.")
    ] = APART,
    data: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder of the samples, for several fits; else FILE.samples.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite an existing classifier, and samples of other settings.")
    ] = False,
    compute: ComputeOptions,
) -> None:
    """Train a classifier of drafts (--method c2t --set classifier=FILE) on the target's own responses to prompts.

    Ctrl-C keeps what is done: the same command goes on from there.
    """
    path = new_file(out, "--out", CLASSIFIER_FILE.owns, force=force)
    names = tuple(name.strip() for name in features.split(","))
    rate = learning_rate if learning_rate is not None else RATE if fine_tune is None else FINE_RATE
    recipe = replace(recipe, features=names, learning_rate=rate, seed=source.seed)
    check_recipe(max_tokens, negatives, source.seed)
    if samples < 1:
        raise ConfigError(f"samples is {samples}: use at least 1")
    if not 1 <= rows <= MAX_ROWS:
        raise ConfigError(f"rows is {rows}: use 1 to {MAX_ROWS}")
    init = None if fine_tune is None else _first_classifier(fine_tune, recipe)
    spec = DrafterSpec.parse(drafter)
    if str(spec) == NONE:
        raise ConfigError("drafter none drafts nothing: train for lookup, a head, a draft model or an ensemble")
    texts, files = source.read()
    check_split(len(texts), apart)
    folder = own_folder(data or f"{path}.samples", "--data", SAMPLES_RECIPE)
    check_room(folder, samples)
    model = compute.load(target)
    drafts = load_drafter(spec, model, full_trees(), learning=False)
    tokens = encoded(model, texts, raw=source.raw)
    check_split(len(tokens), apart)
    assert isinstance(drafts, TreeDrafter)  # noqa: S101 - drafter none is refused above
    made_for = provenance(model, drafts.source, drafts.name)
    context.with_resource(locked(folder, "--data", folder=True))
    store = SampleStore.open(
        folder,
        SampleRecipe(
            **asdict(made_for),
            prompts=digest(tokens),
            max_tokens=max_tokens,
            negatives=negatives,
            seed=source.seed,
            dtype=model.capabilities.dtype,
        ),
        force=force,
    )
    with on_interrupt(lambda: f"interrupted with {store.count} of {samples} samples: {GO_ON}"):
        with progress_reporter("collecting samples", samples, store.count) as progress:
            drafts.prepare(model)
            model.reserve(rows + 1, LONGEST_PROMPT + max_tokens)
            collect(store, model, drafts, tokens, most=samples, rows=rows, progress=progress)
        learned, kept_apart = store.samples().split(apart)
        with progress_reporter("fitting, epochs", recipe.epochs) as progress:
            found = fit(learned, recipe, negatives, init, progress, kept_apart)
    figures = evaluate(found, kept_apart, negatives)
    trained_on = {
        "prompts": [asdict(file) for file in files],
        "responses": len(store.done),
        "trees": store.trees,
        "samples": len(learned.accepted),
        "accepted": int(learned.accepted.sum()),
        "negatives": negatives,
        "apart": apart,
        "max_tokens": max_tokens,
        "temperatures": list(TEMPERATURES),
        "recipe": asdict(recipe),
        "fine_tuned_from": None if fine_tune is None else Path(fine_tune).name,
    }
    ClassifierFile(found, made_for, trained_on, asdict(figures)).save(path)
    _report_classifier(found, figures, path, folder)


def _first_classifier(name: str, recipe: ClassifierRecipe) -> Classifier:
    """The classifier to start from.

    Raises:
        ConfigError: it sees other features, or has another number of units, than the new one shall have.
    """
    init = read_classifier(name).classifier
    if init.given_parent != recipe.given_parent:
        here, there = ("with", "without") if init.given_parent else ("without", "with")
        raise ConfigError(f"--fine-tune {name} was trained {here} --given-parent, not {there}: train it as it was")
    if init.features != recipe.features:
        raise ConfigError(
            f"--fine-tune {name} has features {','.join(init.features)}, not {','.join(recipe.features)}: "
            f"give --features {','.join(init.features)}"
        )
    if len(init.hidden) != recipe.hidden:
        raise ConfigError(
            f"--fine-tune {name} has {len(init.hidden)} units, not {recipe.hidden}: give --hidden {len(init.hidden)}"
        )
    return init


def _report_classifier(found: Classifier, figures: ClassifierFigures, path: Path, folder: Path) -> None:
    if figures.prompts:
        output.print(f"{figures.prompts} prompts kept apart, {figures.nodes} nodes, {figures.accepted} accepted")
        output.print("beta  precision  recall  positive rate")
        for beta, (precision, recall, rate) in figures.betas.items():
            output.print(f"{beta:5} {precision:9.3f} {recall:7.3f} {rate:13.3%}")
        output.print(f"calibration error {figures.calibration_error:.3f}, loss {figures.loss:.3f} for an accepted node")
    else:
        output.print("no prompt kept apart was drafted for: no figures; use larger --samples")
    output.print(
        f"{path}: {found.parameters} parameters; draft with it by --method c2t --set classifier={path}; "
        f"{folder} may be deleted",
        markup=False,
    )
