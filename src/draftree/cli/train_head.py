"""The command ``draftree train head``."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..artifacts import user_path
from ..errors import ConfigError, RunError
from ..models.eagle_file import is_head
from ..models.loading import DEFAULT_MODEL
from ..progress import out as output
from ..progress import progress_reporter
from ..train.eagle_fit import FitRecipe, HeadFigures
from ..train.eagle_training import HeadTraining, PromptFile, TrainingLimits
from ..train.head_data import DataRecipe, HeadData, digest, encoded, shuffled
from ..train.responses import read_prompts
from .options import ComputeOptions, Target, number, whole, with_options

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def train() -> None:
    """Train what drafts."""


@app.command()
@partial(with_options, without=("weight_format",))
def head(
    *,
    prompts: Annotated[
        list[str],
        typer.Option(metavar="FILE", help="Prompts: one a line, .jsonl or .csv; may be repeated."),
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder for the head, and for what training needs.")],
    target: Target = DEFAULT_MODEL,
    licence: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Of each prompt file, in their order, for the card.")
    ] = None,
    hours: Annotated[float, number("H", "Time for everything, earlier runs of this command included.")] = 3.0,
    tokens: Annotated[int, whole("N", "Response tokens to draw, if the hours allow.")] = 600_000,
    max_tokens: Annotated[int, whole("N", "Most tokens of a response.")] = 160,
    steps: Annotated[int | None, whole("N", "Training steps; by default what fits the hours.")] = None,
    batch: Annotated[int, whole("N", "Responses of one training step.")] = 8,
    learning_rate: Annotated[float, number("R", "The highest; it falls to 0.")] = 1e-3,
    unroll: Annotated[int, whole("N", "Drafting steps that are trained.")] = 3,
    vocabulary: Annotated[int, whole("N", "Tokens that the head drafts; the text's own come on top.")] = 8192,
    held_out: Annotated[int, whole("N", "Prompts kept apart, for the figures.")] = 32,
    responses: Annotated[int, whole("N", "Most responses to a prompt; further ones are sampled.")] = 1,
    rows: Annotated[
        int | None, whole("N", "Responses that a worker draws together; 32, on a GPU 1024, as memory allows.")
    ] = None,
    workers: Annotated[
        int | None, whole("N", "Processes that draw responses; by default one a core, as memory allows; one on a GPU.")
    ] = None,
    init: Annotated[str | None, typer.Option(metavar="DIR", help="Start from this head, not afresh.")] = None,
    bf16: Annotated[
        bool | None, typer.Option("--bf16/--no-bf16", help="Compute in bfloat16; by default where that is fast.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take prompts as they are, without the chat template.")] = False,
    seed: Annotated[int, whole("S", "Of responses, order and weights.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Drop a training with other settings.")] = False,
    compute: ComputeOptions,
) -> None:
    """Train a draft head (--drafter DIR) on the target's own responses to prompts.

    Ctrl-C keeps what is done: the same command goes on from there.
    """
    limits = TrainingLimits(
        hours=hours,
        tokens=tokens,
        steps=steps,
        held_out=held_out,
        vocabulary=vocabulary,
        responses=responses,
        rows=rows,
        workers=workers,
    )
    if max_tokens < 2:
        raise ConfigError(f"max_tokens is {max_tokens}: use at least 2, for one token to draft")
    if not 0 <= seed < 2**62:
        raise ConfigError(f"seed is {seed}: use a whole number from 0 to 2^62 - 1")
    recipe = FitRecipe(batch=batch, learning_rate=learning_rate, unroll=unroll, bf16=bool(bf16), seed=seed)
    licences = stated(licence, len(prompts))
    folder = _check_place(out)
    start = None if init is None else user_path(init)
    if start is not None and not is_head(start):
        raise ConfigError(f"no draft head in {init}: give --init a folder that this command wrote")
    files = [read_prompts(name) for name in prompts]
    model = compute.load(target)
    limits.workers_on(model.capabilities.device)
    model.track_features()
    encoded_prompts = encoded(model, shuffled(files, seed), raw=raw)
    data = DataRecipe(
        target=model.capabilities.name,
        prompts=digest(encoded_prompts),
        max_tokens=max_tokens,
        seed=seed,
        dtype=str(model.capabilities.dtype),
    )
    training = HeadTraining(
        target=model,
        data=HeadData.open(folder / "work", data, encoded_prompts),
        sources=[
            PromptFile(Path(name).name, len(found), sha256(name), stated_licence)
            for name, found, stated_licence in zip(prompts, files, licences, strict=True)
        ],
        recipe=recipe if bf16 is not None else replace(recipe, bf16=_made_for_bf16(model.capabilities.device.type)),
        limits=limits,
        out=folder,
        init=start,
    )
    try:
        greedy, sampled = training.run(progress_reporter, force=force)
    except KeyboardInterrupt:
        raise RunError("interrupted: the same command goes on from there") from None
    _report(folder, greedy, sampled)


def _made_for_bf16(kind: str) -> bool:
    """Does this kind of device multiply bfloat16 matrices faster than float32 ones?"""
    return kind == "cuda" or bool(torch.cpu._is_avx512_bf16_supported())


def stated(licences: list[str] | None, files: int) -> list[str | None]:
    """A licence, or none, for each file of prompts.

    Raises:
        ConfigError: there are more or fewer.
    """
    if licences and len(licences) != files:
        raise ConfigError(f"{len(licences)} --licence for {files} --prompts: give one for each, or none")
    return [*licences] if licences else [None] * files


def sha256(name: str) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(user_path(name).read_bytes()).hexdigest()


def _check_place(name: str) -> Path:
    """Where the head goes, once it is clear that it can.

    Raises:
        ConfigError: it is a file, or no folder that can be written.
    """
    folder = user_path(name)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{name} is a file: give --out a folder")
    place = folder if folder.exists() else folder.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(f"folder {place} is not there or cannot be written: make it, or choose another")
    if (folder / "config.json").exists() and not is_head(folder):
        raise ConfigError(f"{name} holds another model: give --out a folder of its own")
    return folder


def _report(folder: Path, greedy: HeadFigures | None, sampled: HeadFigures | None) -> None:
    for name, figures in (("greedy", greedy), ("sampled", sampled)):
        if figures:
            rates = " ".join(f"{row[0]:.3f}" for row in figures.acceptance)
            lengths = ", ".join(f"{tree} {mal:.2f}" for tree, mal in figures.mal.items())
            output.print(f"{name}: acceptance at depth 1 to {len(figures.acceptance)}: {rates}; MAL: {lengths}")
    output.print(f"{folder}: draft with it by --drafter {folder}", markup=False)
