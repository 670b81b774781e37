"""Contestants that decode the same prompts in turn, and paired ratios between them."""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rich.progress import track

from ..config import SamplingParams
from ..engine import Engine


class Run(NamedTuple):
    """One decoding: seconds include the prefill; ``decode`` leaves it out; NaN where it is not known."""

    tokens: int
    seconds: float
    decode: float = math.nan
    mal: float = math.nan

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        """Tokens a second, the prefill left out."""
        return self.tokens / self.decode


Contestant = Callable[[list[int]], Run]
"""Decodes one prompt, given as token ids."""


def bootstrap(ratios: list[float], draws: int = 2000) -> tuple[float, float, float]:
    """Geometric mean and its 95% interval over prompts."""
    logs = [math.log(r) for r in ratios]
    dice = random.Random(0)  # noqa: S311 - resampling, not secrets
    means = sorted(sum(dice.choices(logs, k=len(logs))) / len(logs) for _ in range(draws))
    return tuple(math.exp(x) for x in (sum(logs) / len(logs), means[draws // 40], means[-draws // 40]))  # type: ignore[return-value]


def ours(engine: Engine, params: SamplingParams) -> Contestant:
    """An engine as a contestant."""

    def decode(prompt: list[int]) -> Run:
        began = time.perf_counter()
        stats = engine.generate([prompt], params)[0].stats
        seconds = time.perf_counter() - began
        return Run(stats.tokens, seconds, seconds - stats.seconds.prefill, stats.mal)

    return decode


def take_turns(
    contestants: Mapping[str, Contestant], prompts: list[list[int]], warm: list[int]
) -> dict[str, list[Run]]:
    """Every contestant decodes every prompt, in rotating order; ``warm`` does not count."""
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    order = list(contestants)
    for decode in contestants.values():
        decode(warm)
    for prompt in track(prompts, "decoding"):
        for name in order:
            runs[name].append(contestants[name](prompt))
        order.append(order.pop(0))
    return runs


def ratio(own: list[Run], base: list[Run], rate: Callable[[Run], float]) -> str:
    """Paired ratios of two contestants' rates: geometric mean and interval."""
    mean, low, high = bootstrap([rate(a) / rate(b) for a, b in zip(own, base, strict=True)])
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def mean_ratio(own: Sequence[Run], base: Sequence[Run]) -> float:
    """Geometric mean of the paired ratios of two contestants' rates, the prefill left out."""
    logs = [math.log(a.decode_rate / b.decode_rate) for a, b in zip(own, base, strict=True)]
    return math.exp(sum(logs) / len(logs))


def by_category(own: Sequence[Run], base: Sequence[Run], categories: Sequence[str]) -> dict[str, float]:
    """``mean_ratio`` of each category."""
    pairs: dict[str, list[tuple[Run, Run]]] = defaultdict(list)
    for category, a, b in zip(categories, own, base, strict=True):
        pairs[category].append((a, b))
    return {c: mean_ratio([a for a, _ in p], [b for _, b in p]) for c, p in pairs.items()}


def losses(ratios: Mapping[str, float]) -> str:
    """The worst category, and how many lie below 0.98."""
    worst = min(ratios, key=ratios.__getitem__)
    return f"{ratios[worst]:.2f} {worst:18} {sum(x < 0.98 for x in ratios.values()):3}"
