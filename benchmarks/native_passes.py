"""Passes of a model by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from draftree.models.base import LanguageModel, Nodes


def text(count: int) -> list[int]:
    """Token ids that are in every vocabulary; what they say does not matter to a pass."""
    return [(7919 * i + 1000) % 20000 for i in range(count)]


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def pass_seconds(
    model: LanguageModel,
    context: int,
    sizes: Sequence[int],
    passes: int,
    parents: Callable[[int], Sequence[int]] = lambda size: range(-1, size - 1),
) -> dict[int, list[float]]:
    """Seconds of passes over nodes behind a context, by default chains, with their argmax.

    The sizes take turns, three passes each, of which the first is left out: as in decoding, a pass comes behind one
    that left the same in the processor's caches.
    """
    row, found = model.open(), {size: list[float]() for size in sizes}
    model.extend([row], [Nodes.chain(text(context), 0)])
    model.commit(row, range(context))

    def once(size: int) -> None:
        model.extend([row], [Nodes.of(text(size), parents(size))]).argmax(range(size))

    for _ in range(passes):
        for size, seconds in found.items():
            for turn in range(3):
                spent = timed(lambda: once(size))  # noqa: B023
                model.commit(row, [])
                seconds += [spent] if turn else []
    model.close(row)
    return found
