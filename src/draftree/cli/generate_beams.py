"""``draftree generate --beams W``: one prompt with beams, the best sequences as text or JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict

from ..beams.beam_engine import BeamEngine, BeamGeneration
from ..beams.params import BeamParams
from ..config import SamplingParams
from ..errors import ConfigError
from ..progress import err, out
from ..text import Prompt
from . import console as show

_DRAFTER = ("--drafter", "--no-loop-back")


def exclude(options: Mapping[str, object]) -> None:
    """Check that no option was given, beside --beams, that beams have no use for.

    Args:
        options: those that were given: flag -> value.

    Raises:
        ConfigError: one was.
    """
    for flag, value in options.items():
        if flag not in _DRAFTER:
            what = flag if value is True or flag == "--set" else f"{flag} {value}"
            raise ConfigError(f"--beams and {what} exclude each other: leave one out")


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
