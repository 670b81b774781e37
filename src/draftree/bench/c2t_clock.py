"""Wall clock beside nodes: decodes prompts with policies of equal acceptance length, taking turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.progress import track

from ..config import SamplingParams
from ..drafters.registry import load_drafter
from ..engine import Engine
from ..models.huggingface import HFModel
from ..policies.base import GrowthPolicy
from ..policies.c2t import ClassifierTree
from .summary import ratio

Contestant = tuple[str, GrowthPolicy, int]
"""Label, policy and node budget."""
_WARM = 8
"""Tokens of a first decode that does not count: memory is allocated, kernels are chosen."""


class Timed(NamedTuple):
    """Decodes of one prompt after its prefill: wall-clock seconds, tokens gained, target passes, verified nodes."""

    seconds: float
    tokens: int
    steps: int
    nodes: int


def of_mal(mal: float, points: Sequence[Contestant], mals: Sequence[float]) -> Contestant:
    """The setting of a curve at which its MAL is ``mal``, between its first two points around it; else an end.

    Args:
        points: of the curve, as it goes.
        mals: theirs.
    """
    for one, other, low, high in zip(points, points[1:], mals, mals[1:], strict=False):
        if low <= mal <= high:
            return _between(one, other, (mal - low) / max(1e-9, high - low))
    return points[0] if mal < min(mals) else points[-1]


def _between(one: Contestant, other: Contestant, share: float) -> Contestant:
    """A share of the way from one point to the next: in the budget, and in the logarithm of beta."""
    (_, policy, few), (_, after, more) = one, other
    nodes = round(few + share * (more - few))
    if not isinstance(policy, ClassifierTree) or not isinstance(after, ClassifierTree):
        return f"N={nodes}", policy, nodes
    beta = policy.beta ** (1 - share) * after.beta**share
    return f"beta={beta:.3g} N={nodes}", replace(policy, beta=beta), nodes


def decoded(
    target: HFModel,
    drafter: str,
    contestants: Mapping[str, Contestant],
    prompts: Sequence[list[int]],
    max_tokens: int,
    repeats: int,
) -> dict[str, list[Timed]]:
    """Each contestant's greedy decodes of each prompt, summed over ``repeats``.

    On every prompt all contestants decode one after the other, and who begins moves on by one from prompt to prompt.

    Args:
        drafter: a name for ``load_drafter``; each contestant has one of its own.
        prompts: each with an answer of more than one token.
    """
    engines = {
        name: Engine(target, load_drafter(drafter, target, policy), nodes=nodes)
        for name, (_, policy, nodes) in contestants.items()
    }
    for engine in engines.values():
        engine.generate([prompts[0]], SamplingParams(max_tokens=_WARM))
    found = {name: [Timed(0.0, 0, 0, 0)] * len(prompts) for name in engines}
    names, params = list(engines), SamplingParams(max_tokens=max_tokens)
    for turn in track(range(repeats * len(prompts)), "decoding in turns", transient=True):
        at, first = turn % len(prompts), turn % len(names)
        for name in (*names[first:], *names[:first]):
            stats = engines[name].generate([prompts[at]], params)[0].stats
            seconds = stats.seconds.total - stats.seconds.prefill
            own = Timed(seconds, stats.tokens - 1, stats.steps, sum(stats.drafted))
            found[name][at] = Timed(*(a + b for a, b in zip(found[name][at], own, strict=True)))  # type: ignore[arg-type]
    return found


def print_clock(found: Mapping[str, list[Timed]], pairs: Sequence[tuple[str, str]]) -> None:
    """MAL, nodes and milliseconds a token; of each pair (base, other) the time of the other over that of the base."""
    print(f"  {'by the clock':44}{'MAL':>8}{'gamma':>8}{'ms a token':>12}")
    for name, times in found.items():
        seconds, tokens, steps, nodes = (sum(column) for column in zip(*times, strict=True))
        print(f"  {name:44}{tokens / steps:8.3f}{nodes / tokens:8.2f}{1e3 * seconds / tokens:12.2f}")
    for base, other in pairs:
        own, over = ([t.seconds / t.tokens for t in found[name]] for name in (other, base))
        print(f"  time a token of {other} over {base}: {ratio(own, over).text('.3f')}", flush=True)
