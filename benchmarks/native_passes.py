"""Passes of a model by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from draftree.models.base import LanguageModel, Nodes


def text(count: int) -> list[int]:
    """Token ids that are in every vocabulary; what they say does not matter to a pass."""
    return [(7919 * i + 1000) % 20000 for i in range(count)]


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


K = TypeVar("K")


def chains(sizes: Iterable[int]) -> dict[int, Sequence[int]]:
    """Parents of chains, by their sizes."""
    return {size: range(-1, size - 1) for size in sizes}


def pass_seconds(
    model: LanguageModel, context: int, drafts: Mapping[K, Sequence[int]], passes: int
) -> dict[K, list[float]]:
    """Seconds of passes over nodes behind a context, with their argmax, for each of ``drafts``: the nodes' parents.

    The drafts take turns, three passes each, of which the first is left out: as in decoding, a pass comes behind one
    that left the same in the processor's caches. The nodes are forgotten, but by a model that takes chains alone.
    """
    row, found = model.open(), {draft: list[float]() for draft in drafts}
    model.extend([row], [Nodes.chain(text(context), 0)])
    model.commit(row, range(context))

    def once(parents: Sequence[int]) -> None:
        count = len(parents)
        model.extend([row], [Nodes(text(count), [*parents])]).argmax(range(count))

    for _ in range(passes):
        for draft, seconds in found.items():
            for turn in range(3):
                spent = timed(lambda: once(drafts[draft]))  # noqa: B023
                model.commit(row, range(len(drafts[draft])) if model.capabilities.no_trees else [])
                seconds += [spent] if turn else []
    model.close(row)
    return found
