"""The commands ``draftree heads``, ``draftree heads check`` and ``draftree heads remove``."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import LOCK, locked, user_path
from ..bench.run import encode_turns
from ..bench.suites import STARTER, load_suite
from ..config import SamplingParams
from ..engine.engine import Engine
from ..engine.speculation import SpeculationParams
from ..errors import ConfigError, ModelFileError, RunError, UnknownNameError
from ..models.heads.head_folder import SHIPPED, find_head, head_in
from ..models.heads.head_format import CONFIG
from ..models.heads.own_heads import HEAD_RECORD, RECORD, named_head, own_heads
from ..models.model_files import shipped
from ..progress import out
from .options import NAMES, ComputeOptions, with_options

heads = typer.Typer(
    help="List, check and remove draft heads.", add_completion=False, invoke_without_command=True, rich_markup_mode=None
)
_LISTED = "A head as 'draftree heads' lists it, or how that begins"
_NODES, _TOKENS = 8, 64
"""Of the trees, and of the answers, that a head is checked with."""


@heads.callback()
def list_heads(context: typer.Context) -> None:
    """List the draft heads that drafter auto looks for its target's among: yours, and those that come with draftree."""
    if context.invoked_subcommand is not None:
        return
    for folder in own_heads():
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
        out.print(f"{folder.name}  {_about(folder)}, {size:.0f} MB in {folder}")
    for folder in shipped(SHIPPED):
        out.print(f"{folder.name}  comes with draftree, {_about(folder)}")


def _about(folder: Path) -> str:
    """What a head is for, and what it has reached."""
    try:
        if (head := find_head(folder)) is None:
            return "no head yet: the command that began it goes on"
    except ConfigError as error:
        return str(error)
    with suppress(FileNotFoundError, ConfigError):
        if (record := HEAD_RECORD.read(folder / RECORD)).held_out:
            return f"for {head.target}, MAL {record.mal:.2f} on {record.held_out} responses kept apart"
    return f"for {head.target}"


@heads.command()
@with_options
def check(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"{_LISTED}, or its folder.")],
    target: Annotated[
        str | None, typer.Option(help=f"What it drafts for, by default what it was made for: {NAMES}.")
    ] = None,
    compute: ComputeOptions,
) -> None:
    """Measure how often a head is right on 20 prompts that come with draftree for no training."""
    given = user_path(name)
    folder = given.absolute() if (given / CONFIG).is_file() else named_head(name, shipped(SHIPPED))
    made_for = target or head_in(folder).target
    if made_for is None:
        raise ConfigError(f"draft head {folder} does not name its target: give --target")
    params = SpeculationParams(drafter=str(folder), method="opt-tree", nodes=_NODES)
    try:
        model = compute.load(made_for)
    except (UnknownNameError, ModelFileError):
        if target is not None:
            raise
        why = f"draft head {folder.name} is for {made_for}, which cannot be loaded by this name"
        raise UnknownNameError(f"{why}: give that model's file as --target FILE") from None
    engine, longest = Engine(model, params), model.capabilities.max_length - _TOKENS
    encoded = [encode_turns(model, item.turns[:1]) for item in load_suite(STARTER)]
    if not (prompts := [ids for ids in encoded if len(ids) < longest]):
        raise ConfigError(f"{made_for} has a context of {longest + _TOKENS} tokens: too few for any prompt")
    stats = [answer.stats for answer in engine.generate(prompts, SamplingParams(max_tokens=_TOKENS))]
    tokens, steps = (sum(numbers) for numbers in zip(*((s.tokens - 1, s.steps) for s in stats), strict=True))
    right = sum(s.accepted[0] for s in stats if s.accepted) / max(1, steps)
    out.print(
        f"{folder.name}: MAL {tokens / max(1, steps):.2f} with trees of {_NODES} nodes, whose first token is right in "
        f"{right:.0%} of {steps} steps, on {len(prompts)} prompts"
    )


@heads.command()
def remove(name: Annotated[str, typer.Argument(metavar="NAME", help=f"{_LISTED}.")]) -> None:
    """Remove one of your heads, with what its training needs."""
    folder = named_head(name)
    try:
        with locked(folder, "head", folder=True):
            (folder / CONFIG).unlink(missing_ok=True)  # without it there is no head, whatever else is left
            for path in folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != LOCK:  # Windows removes no open file
                    path.unlink()
        shutil.rmtree(folder)
    except OSError as error:
        raise RunError(f"cannot remove {error.filename}: {error.strerror}: remove {folder} by hand") from None
    out.print(f"removed {folder}")
