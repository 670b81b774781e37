"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_LARGEST = 2**63
"""What an int64 tensor and a seed no longer hold."""


def _to_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def _to_whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None
    if not -_LARGEST <= value < _LARGEST:
        raise typer.BadParameter(f"{text} is out of range: use a whole number below 2^63")
    return value


def number(metavar: str, help_text: str) -> Any:
    """A numeric option whose complaint names the value."""
    return typer.Option(parser=_to_number, metavar=metavar, help=help_text)


def whole(metavar: str, help_text: str, *names: str) -> Any:
    """A whole-number option whose complaint names the value; called as its parameter unless it has ``names``."""
    return typer.Option(*names, parser=_to_whole, metavar=metavar, help=help_text)


Target = Annotated[str, typer.Option(help="Model whose output you want: smollm2, a folder, a .gguf file or a hub id.")]
Drafter = Annotated[
    str,
    typer.Option(
        help="What drafts: auto (the best that is there for the target), lookup, recycle, head, a draft head's folder, "
        "a model with the target's vocabulary, int4, int8, fp16w, none, self, or several: A+B joins, A>B "
        "lets B verify A."
    ),
]
NoLoopBack = Annotated[
    bool, typer.Option("--no-loop-back", help="Of hierarchies A>B: one round a draft on every level (the ablation).")
]
RecycleFile = Annotated[
    Path | None,
    typer.Option("--recycle-file", metavar="FILE", help="Where recycle keeps what it has learned, for the next run."),
]
MethodName = Annotated[str, typer.Option("--method", help="How trees grow; 'draftree methods' lists them.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method; may be repeated.")
]
TreeFile = Annotated[
    str | None, typer.Option("--tree", metavar="FILE", help="A tree that 'draftree calibrate' wrote, for sequoia.")
]
Nodes = Annotated[
    int | None, whole("N", "Most drafted tokens in one step's tree; the method's own bound by default, mostly 31.")
]
Verify = Annotated[
    str, typer.Option(help="How trees are verified, NAME:KEY=VALUE...; 'draftree methods' lists the schemes.")
]
Candidates = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="At a temperature, under match: coupled ranks drafts knowing the target's noise (the default), plain by "
        "the draft distribution alone, as the papers do; the text is the same.",
    ),
]
MaxTokens = Annotated[
    int | None,
    whole("N", "Most tokens to generate; until the context is full by default."),
]
DecodedTokens = Annotated[int, whole("N", "Most tokens to decode after each prompt.")]
Depth = Annotated[int, whole("D", "Deepest level of the tree.")]
Stride = Annotated[int, whole("N", "Tokens from one start of a draft to the next; 1 measures most.")]
Temperature = Annotated[float, number("T", "0 is greedy decoding.")]
TopK = Annotated[int, whole("K", "Sample among the k most probable tokens; 0 is off.")]
TopP = Annotated[float, number("P", "Sample within this much probability; 1 is off.")]
MinP = Annotated[float, number("P", "Drop tokens below this share of the best one's probability; 0 is off.")]
Seed = Annotated[int | None, whole("S", "Makes sampled text repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")]
Dtype = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")]
Numerics = Annotated[
    str, typer.Option(help="Linear layers on a CPU: fp32, fp16w, int8, or auto, the fastest of these.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N.")]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write what every step did to this file (JSON lines).")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file of --trace.")]
