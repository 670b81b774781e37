"""The command ``draftree train classifier``."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import locked, new_file, own_folder
from ..drafters.grow import TreeDrafter
from ..drafters.registry import load_drafter, provenance
from ..drafters.spec import DEFAULT_DRAFTER, NONE, DrafterSpec
from ..errors import ConfigError
from ..models.model_files import DEFAULT_MODEL
from ..policies.c2t import CLASSIFIER_FILE, DEFAULT_FEATURES, Classifier, ClassifierFile, read_classifier
from ..progress import out as output
from ..progress import progress_reporter
from ..train.c2t_fit import (
    FINE_RATE,
    RATE,
    ClassifierFigures,
    ClassifierRecipe,
    check_split,
    evaluate,
    fit,
)
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
from ..train.prompts import LONGEST_PROMPT, digest, encoded
from ..train.responses import MAX_ROWS, TEMPERATURES
from .interrupt import GO_ON, on_interrupt
from .options import ComputeOptions, Drafter, Target, number, whole, with_options
from .train_head import PromptOptions, train


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
    init = None if fine_tune is None else _start(fine_tune, recipe)
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
    _report(found, figures, path, folder)


def _start(name: str, recipe: ClassifierRecipe) -> Classifier:
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


def _report(found: Classifier, figures: ClassifierFigures, path: Path, folder: Path) -> None:
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
