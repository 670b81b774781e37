"""The commands ``draftree info`` and ``draftree profile``."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..artifacts import user_path
from ..config import option
from ..drafters.registry import is_head
from ..errors import ConfigError, FieldError
from ..models.base import Capabilities, LanguageModel
from ..models.cost_profile import FULL, Identity, Profile, load_profile, measure_and_keep, profile_folder
from ..models.protocols import FeatureModel
from ..progress import out
from .options import ComputeOptions, numbers, with_options

_BAR = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What is measured; the grid checks it."""

    sizes: str | None = option("Tokens a pass, from 1 on.", metavar="N,N,...")
    contexts: str | None = option("Tokens before them.", metavar="N,N,...")
    batches: str | None = option("Sequences a pass.", metavar="N,N,...")
    repeats: int = option("Passes of each kind; the fastest counts.", FULL.repeats, metavar="N")


@with_options
def profile(
    *,
    model: Annotated[str, typer.Argument(help="A target or a draft model, named as for generate.")],
    options: ProfileOptions,
    compute: ComputeOptions,
) -> None:
    """Measure what passes of a model cost on this machine, and keep it for the method auto."""
    given = {name: getattr(options, name) for name in ("sizes", "contexts", "batches")}
    chosen: dict[str, Any] = {name: numbers(f"--{name}", text, int) for name, text in given.items() if text is not None}
    try:
        grid = replace(FULL, **chosen, repeats=options.repeats)
    except FieldError as error:
        error.rename(f"--{error.field}")
        raise
    if len(grid.sizes) < 2:
        raise ConfigError(f"--sizes is {options.sizes!r}: give at least two, such as 1,2,4,8")
    loaded = compute.load(model)
    longest = loaded.capabilities.max_length
    if options.contexts is not None and grid.contexts[-1] >= longest:
        raise ConfigError(f"--contexts ends with {grid.contexts[-1]}: {model} takes {longest} with a pass")
    began = time.perf_counter()
    measured = measure_and_keep(loaded, grid.fitting(longest) if options.sizes is None else grid)
    seconds = time.perf_counter() - began
    identity = measured.identity
    out.print(f"{identity.dtype}, weight format {identity.weight_format}, {identity.device}", markup=False)
    out.print(_engine(identity), markup=False)
    out.print(_table(measured), soft_wrap=False)
    out.print(f"measured in {seconds:.1f} s, kept as {_file(measured.identity)}", markup=False)


@with_options
def info(
    model: Annotated[
        str,
        typer.Argument(
            help="smollm2, a folder, a .gguf file, hf.co/ORG/NAME:QUANTISATION or a hub id; or a draft head's folder."
        ),
    ],
    compute: ComputeOptions,
) -> None:
    """Load a model, test that it can verify draft trees, and print its capabilities; of a draft head what it is for."""
    if is_head(model):
        from ..models.heads.head_folder import head_in

        for what, value in head_in(user_path(model)).describe().items():
            out.print(f"{what:17} {value}", markup=False)
        return
    began = time.perf_counter()
    loaded = compute.load(model)
    seconds, can, tokenizer = time.perf_counter() - began, loaded.capabilities, loaded.tokenizer
    for what, value in {
        "model": can.name,
        "architecture": can.architecture,
        "parameters": f"{can.parameters / 1e6:.1f} million, {can.dtype} on {can.device}",
        "longest sequence": f"{can.max_length} tokens ({can.max_length_reason})",
        "vocabulary": f"{can.vocab_size} tokens, end of sequence {sorted(can.eos_ids)}",
        "engine": _engine(can),
        "weight format": can.weight_format,
        "attention": can.attention,
        "passes": getattr(loaded, "passes", ""),
        "draft trees": can.trees,
        "abilities": "hidden states, training of heads" if isinstance(loaded, FeatureModel) else "none beside trees",
        "KV cache": f"{can.slot_bytes / 1024:.1f} KiB a token, compactable",
        "costs of passes": _costs(loaded),
        "chat template": "yes" if tokenizer and tokenizer.chat_template else "no: use --raw",
        "loaded in": f"{seconds:.1f} s",
    }.items():
        if value:
            out.print(f"{what:17} {value}")


def _engine(can: Capabilities | Identity) -> str:
    tier = "" if can.tier in can.engine else f", {can.tier}"
    return f"{can.engine}{tier}, {can.threads} thread{'s' * (can.threads > 1)}"


def _costs(model: LanguageModel) -> str:
    """Where they come from."""
    if load_profile(model) is not None:
        return f"measured, kept as {_file(Identity.of(model))}"
    return f"by the table of {model.capabilities.tier} that ships; 'draftree profile' or an idle server measures them"


def _file(identity: Identity) -> Path:
    return profile_folder() / identity.file_name


def _table(measured: Profile) -> Table:
    """Milliseconds by tokens a pass, a column for each batch and context; bars for the first."""
    table = Table(title=f"{measured.identity.model}: milliseconds a pass", title_justify="left")
    table.add_column("tokens", justify="right")
    for point in measured.points:
        table.add_column(f"context {point.context}\nbatch {point.batch}", justify="right")
    table.add_column(f"\ncontext {measured.points[0].context}, batch {measured.points[0].batch}")
    longest = max(measured.points[0].seconds)
    for i, size in enumerate(measured.points[0].sizes):
        bar = "█" * max(1, round(_BAR * measured.points[0].seconds[i] / longest))
        table.add_row(str(size), *(f"{1e3 * p.seconds[i]:.1f}" for p in measured.points), bar)
    return table
