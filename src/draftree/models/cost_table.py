"""Tables of what passes cost, which ship (``costs/``): for models that nobody has measured on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from ..artifacts import JsonFormat
from ..config import Positive
from .base import Capabilities

FOLDER = Path(__file__).parents[1] / "costs"


@dataclass(frozen=True, slots=True)
class CostTable:
    """Rates of a tier of an engine, which know no model: what passes cost as long as nobody has measured them.

    A pass over n tokens behind c others reads W bytes of weights and makes n products with each of a token's P weights;
    how far the two overlap is a power k:

        seconds = ((W / reading)^k + (n P / products)^k)^(1/k) + c S (1 / cache_reading + n / cache_products)

    with S bytes of keys and values a token. It is within a quarter of the passes of models of 135M to 1.5B weights that
    it was fitted to, mostly within a tenth (``python -m benchmarks.cost_tables``). On another machine the level may be
    off, the shape less so.

    Attributes:
        source: where the numbers come from.
        reading: bytes of weights a second.
        products: weights times tokens a second, of one thread, or of a whole accelerator.
        overlap: the power k: at 1 reading and products follow each other, above they overlap.
        cache_reading: bytes of keys and values a second.
        cache_products: these bytes times tokens a second, of the same.
    """

    source: str
    reading: Positive
    products: Positive
    overlap: Annotated[float, Ge(1)]
    cache_reading: Positive
    cache_products: Positive

    def seconds(self, can: Capabilities, tokens: float, context: float) -> float:
        """Seconds of a model's pass over so many tokens behind ``context`` others."""
        reading = _bytes_read(can, tokens) / self.reading
        computing = tokens * can.weights / (self.products * can.threads)
        cached, overlap = context * can.slot_bytes, self.overlap
        attention = cached / self.cache_reading + tokens * cached / (self.cache_products * can.threads)
        return float((reading**overlap + computing**overlap) ** (1 / overlap)) + attention


def _bytes_read(can: Capabilities, tokens: float) -> float:
    """Of the weights: each token has experts of its own, of which some are another's by chance."""
    experts = float(1 - (1 - can.expert_share) ** tokens) / can.expert_share  # over a token's
    return can.weight_bytes + can.expert_bytes * (experts - 1)


TABLES = JsonFormat(
    "draftree-costs", 1, "cost table", "make it anew with python -m benchmarks.cost_tables", content=CostTable
)


@cache
def shipped_table(tier: str) -> CostTable:
    """The table of a tier (``JsonFormat.read``)."""
    return TABLES.read(FOLDER / f"{tier}.json")
