"""The command ``draftree train head``."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from annotated_types import Interval

from ..artifacts import LARGEST_DATA, locked, own_folder, read_bytes, user_path
from ..config import check_fields, option
from ..errors import ConfigError, UnknownNameError
from ..models.base import FINAL_STATE
from ..models.model_files import DEFAULT_MODEL
from ..models.protocols import trainable
from ..progress import out as output
from ..progress import progress_reporter
from ..train.eagle_fit import FitRecipe, HeadFigures, fast_in_bf16
from ..train.eagle_training import HeadTraining, TrainingLimits
from ..train.head_architectures import ARCHITECTURES, Architecture, is_trained, read_trained
from ..train.head_data import HeadData
from ..train.prompts import PromptFile, digest, encoded, read_prompts, shuffled
from ..train.responses import DataRecipe
from .interrupt import GO_ON, on_interrupt
from .options import ComputeOptions, Target, whole, with_options

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
    folder = _check_place(out, architecture)
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
    _report(folder, figures)


def _check_place(name: str, architecture: Architecture) -> Path:
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


def _report(folder: Path, figures: dict[str, HeadFigures]) -> None:
    for name, found in figures.items():
        rates = " ".join(f"{row[0]:.3f}" for row in found.acceptance)
        lengths = ", ".join(f"{tree} {mal:.2f}" for tree, mal in found.mal.items())
        output.print(f"{name}: acceptance at depth 1 to {len(found.acceptance)}: {rates}; MAL: {lengths}")
    output.print(f"{folder}: draft with it by --drafter {folder}", markup=False)
