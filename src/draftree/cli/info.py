"""The commands ``draftree info``, ``draftree profile`` and ``draftree show``."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated

import typer
from rich.table import Table

from ..artifacts import user_path
from ..drafters.default import advice, resolved
from ..drafters.registry import is_head, load_draft_model
from ..drafters.spec import AUTO, DrafterSpec
from ..errors import ConfigError
from ..models.base import Capabilities, LanguageModel
from ..models.cost_profile import PROFILES, Identity, Profile, load_profile
from ..models.heads.head_folder import head_for
from ..models.measuring import FULL, measure_and_keep
from ..models.model_files import DEFAULT_MODEL
from ..models.protocols import FeatureModel
from ..models.translated import TranslatedModel
from ..page.show import show as draw
from ..policies.auto import AutoTree
from ..progress import out, write
from .options import NAMES, ComputeOptions, with_options


@with_options
def profile(
    *,
    model: Annotated[str, typer.Argument(help="A target or a draft model, named as for generate.")],
    compute: ComputeOptions,
) -> None:
    """Measure what passes of a model cost on this machine, and keep it for the method auto."""
    loaded = compute.load(model)
    measured = measure_and_keep(loaded, FULL)
    identity = measured.identity
    out.print(f"{identity.dtype}, weight format {identity.weight_format}, {identity.device}")
    out.print(_engine(identity))
    out.print(_table(measured), soft_wrap=False)
    if _is_kept(measured):
        out.print(f"kept as {identity.path}")


def _is_kept(measured: Profile) -> bool:
    """The file is this profile's: where it cannot be written there is none, or that of another time."""
    with suppress(FileNotFoundError, ConfigError):
        return PROFILES.read(measured.identity.path) == measured
    return False


@with_options
def info(
    model: Annotated[str, typer.Argument(help=f"{NAMES}; or a draft head's folder.")] = DEFAULT_MODEL,
    *,
    compute: ComputeOptions,
) -> None:
    """Load a model, test that it can verify draft trees, and print its capabilities; of a draft head what it is for."""
    if is_head(model):
        from ..models.heads.head_folder import head_in

        for what, value in head_in(user_path(model)).describe().items():
            out.print(f"{what:17} {value}")
        return
    began = time.perf_counter()
    loaded = compute.load(model)
    seconds, can, tokenizer = time.perf_counter() - began, loaded.capabilities, loaded.tokenizer
    measured = load_profile(loaded)
    for what, value in {
        "model": can.name,
        "architecture": can.architecture,
        "parameters": f"{can.parameters / 1e6:.1f} million, {can.dtype} on {can.device}",
        "longest sequence": f"{can.max_length} tokens ({can.max_length_reason})",
        "vocabulary": f"{can.vocab_size} tokens, end of sequence {sorted(can.eos_ids)}",
        "runs on": _runs(loaded),
        "engine": _engine(can),
        "weight format": can.weight_format,
        "attention": can.attention,
        "passes": getattr(loaded, "passes", ""),
        "draft trees": can.trees,
        "abilities": _abilities(loaded),
        "KV cache": f"{can.slot_bytes / 1024:.1f} KiB a token" + (", compactable" if not can.no_trees else ""),
        "state": f"{can.row_bytes / 1024:.1f} KiB a sequence" if can.row_bytes else "",
        "costs of passes": _costs(can, measured) if measured or not can.no_trees else "",
        "drafter auto": f"none: {can.no_trees}" if can.no_trees else _auto_drafter(loaded),
        "drafter head": _head(loaded),
        "chat template": "yes" if tokenizer and tokenizer.chat_template else "no: use --raw",
        "loaded in": f"{seconds:.1f} s",
    }.items():
        if value:
            out.print(f"{what:17} {value}")
    if measured is not None:
        out.print(_table(measured), soft_wrap=False)


def _runs(model: LanguageModel) -> str:
    """Describe which backend runs a model and how, and why the native engine does not run a GGUF file."""
    from ..models.llama.linear_model import LinearModel
    from ..models.llama.llama_model import LlamaModel
    from ..models.native.native_model import NativeModel, not_native

    how = "without drafts" if model.capabilities.no_trees else "with draft trees"
    if not isinstance(model, (LlamaModel, LinearModel)):
        return f"{'native' if isinstance(model, NativeModel) else 'transformers'}, {how}"
    return f"llama.cpp, {how}: {not_native(model.weights.header) or 'it was chosen by --backend'}"


def _abilities(model: LanguageModel) -> str:
    if isinstance(model, FeatureModel):
        return "hidden states, training of heads"
    return "" if model.capabilities.no_trees else "none beside trees"


def _engine(can: Capabilities | Identity) -> str:
    tier = "" if can.tier in can.engine else f", {can.tier}"
    return f"{can.engine}{tier}, {can.threads} thread{'s' * (can.threads > 1)}"


def _costs(can: Capabilities, measured: Profile | None) -> str:
    """Name the source of the cost profile."""
    if measured is not None:
        return f"measured, kept as {measured.identity.path}"
    return f"by the table of {can.tier} that ships; 'draftree profile' or an idle server measures them"


def _auto_drafter(target: LanguageModel) -> str:
    drafter = DrafterSpec.parse(AUTO)
    usual, drawn = (resolved(drafter, target, AutoTree(), learning=learning) for learning in (True, False))
    names = [str(usual)]
    if str(usual) != str(drawn):
        names.append(f"{drawn} where children are drawn at random")
    if DEFAULT_MODEL in usual.sources and isinstance(load_draft_model(DEFAULT_MODEL, target), TranslatedModel):
        names.append(f"{DEFAULT_MODEL} has another vocabulary, and is translated")
    return "; ".join(filter(None, [*names, advice(target)]))


def _head(target: LanguageModel) -> str:
    """Where the head lies that drafts for a target."""
    place = head_for(target)
    return "" if place is None else f"draft layer in {place}" if place.is_file() else str(place)


def _table(measured: Profile) -> Table:
    """Milliseconds by tokens a pass, a column for each batch and context."""
    table = Table(title="milliseconds a pass", title_justify="left")
    table.add_column("tokens", justify="right")
    for point in measured.points:
        table.add_column(f"context {point.context}\nbatch {point.batch}", justify="right")
    curves = [dict(zip(point.sizes, point.seconds, strict=True)) for point in measured.points]
    for size in sorted({size for curve in curves for size in curve}):
        table.add_row(str(size), *(f"{1e3 * curve[size]:.1f}" if size in curve else "" for curve in curves))
    return table


def show(source: Annotated[str, typer.Argument(metavar="FILE", help="A trace, as --trace writes it.")]) -> None:
    """Draw what the steps of a trace did: prints a page of HTML that loads nothing."""
    write(f"{draw(source).html}\n")
