"""``draftree generate --beams W``: one prompt with beams, the best sequences as text or JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, cast

import typer

from ..beams.beam_engine import BeamEngine, BeamGeneration
from ..beams.params import BeamParams, BeamWarp, EarlyStopping
from ..config import SamplingParams
from ..errors import ConfigError
from ..progress import err, out
from ..text import Prompt
from . import console as show
from .options import number, whole

Beams = Annotated[int | None, whole("W", "Decode with this many beams: searched at temperature 0, sampled above it.")]
Best = Annotated[int | None, whole("N", "Best sequences of --beams to print; 1 by default.", "-n")]
DraftBeams = Annotated[int | None, whole("W", "Drafted beams of a layer; at most twice --beams by default.")]
DraftDepth = Annotated[
    int | None,
    whole("D", "Drafted layers of --beams; by default as many as are likely to be fastest, 3 if costs are not known."),
]
WidthThreshold = Annotated[
    float | None, number("T", "Sampled beams: as many as are accepted with this probability, up to --beams.")
]
MinBeams = Annotated[int | None, whole("W", "Least beams with --width-threshold; 1 by default.")]
LengthPenalty = Annotated[
    float | None, number("P", "Beams score their log-probability over length to this power; 1 by default.")
]
Early = Annotated[
    str | None, typer.Option("--early-stopping", metavar="yes|no|never", help="Of beam search, as in transformers.")
]
SingleCache = Annotated[
    bool, typer.Option("--single-cache", help="Sampled beams: only the best goes on after each target pass.")
]
Warp = Annotated[
    str | None,
    typer.Option(
        "--beam-warp",
        metavar="joint|token",
        help="Sampled beams: temperature, top-k, top-p and min-p act on the joint distribution of beam and next token "
        "(joint, the default) or on each beam's next tokens (token).",
    ),
]
_EARLY: Mapping[str, EarlyStopping] = {"yes": True, "no": False, "never": "never"}


def beam_params(
    beams: int | None,
    best: int | None,
    draft_beams: int | None,
    depth: int | None,
    width_threshold: float | None,
    min_beams: int | None,
    length_penalty: float | None,
    early_stopping: str | None,
    single_cache: bool,
    beam_warp: str | None,
) -> BeamParams | None:
    """The options as one value; None: no beams were asked for.

    Raises:
        ConfigError: a value is out of range, or an option is of beams and there are none.
    """
    given = {
        "-n": best,
        "--draft-beams": draft_beams,
        "--depth": depth,
        "--width-threshold": width_threshold,
        "--min-beams": min_beams,
        "--length-penalty": length_penalty,
        "--early-stopping": early_stopping,
        "--single-cache": single_cache or None,
        "--beam-warp": beam_warp,
    }
    if beams is None:
        for name, value in given.items():
            if value is not None:
                raise ConfigError(f"{name} {value} is of beams: say how many with --beams W")
        return None
    if early_stopping is not None and early_stopping not in _EARLY:
        raise ConfigError(f"--early-stopping {early_stopping}: use one of {', '.join(_EARLY)}")
    return BeamParams(
        width=beams,
        returned=1 if best is None else best,
        draft_width=draft_beams,
        depth=depth,
        threshold=width_threshold,
        min_width=1 if min_beams is None else min_beams,
        length_penalty=1.0 if length_penalty is None else length_penalty,
        early_stopping=_EARLY[early_stopping or "no"],
        single_cache=single_cache,
        warp=cast(BeamWarp, beam_warp or "joint"),  # BeamParams checks it
    )


def exclude(options: Mapping[str, bool]) -> None:
    """Make sure that nothing was asked for that beams do not do.

    Args:
        options: what was asked for beside --beams.

    Raises:
        ConfigError: something was.
    """
    if asked := [name for name, given in options.items() if given]:
        raise ConfigError(f"--beams and {asked[0]} exclude each other: leave one out")


def print_beams(engine: BeamEngine, prompt: Prompt, params: SamplingParams, beams: BeamParams, as_json: bool) -> None:
    """Decode one prompt and print its best sequences: figures go to standard error."""
    began = time.perf_counter()
    made = engine.generate([prompt], params, beams)[0]
    seconds = time.perf_counter() - began
    if as_json:
        out.out(json.dumps(_report(made), ensure_ascii=False))
        return
    for rank, found in enumerate(made.hypotheses, start=1):
        if beams.returned > 1:
            out.print(f"{rank}. score {found.score:.4f}, {len(found.token_ids)} tokens", style="dim", markup=False)
        out.out(found.text, highlight=False)
    kind = "sampled" if params.temperature else "searched"
    s = made.stats
    t = s.seconds
    err.print(
        f"{engine.name}: {beams.width} beams {kind}, {s.tokens} layers in {seconds:.2f} s "
        f"({s.tokens / seconds:.1f} tokens/s of one beam) · {s.steps} target passes · {s.mal:.2f} layers a pass (bonus "
        f"included) · {sum(s.drafted)} nodes drafted in {s.drafted_layers} layers, {sum(s.accepted)} went on · "
        f"prefill {t.prefill:.2f} s, "
        f"draft {t.draft:.2f} s, verify {t.verify:.2f} s, other {t.other:.2f} s · "
        f"at most {made.peak_slots} tokens in the cache",
        markup=False,
    )


def _report(made: BeamGeneration) -> dict[str, object]:
    best = made.hypotheses[0]
    return {
        "text": best.text,
        "token_ids": best.token_ids,
        "finish_reason": best.finish_reason,
        "seed": made.seed,
        "beams": [asdict(found) for found in made.hypotheses],
        "peak_slots": made.peak_slots,
        "stats": show.as_json(made.stats) | {"drafted_layers": made.stats.drafted_layers},
    }
