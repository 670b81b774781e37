"""Grow trees in C while it is refused memory: run by ``test_draft_models`` over a sanitized library.

python -m tests.models.native.growth_walk LIBRARY
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftree.models.native import binding
from draftree.models.native.draft_binding import BY_CALLER, BY_TEXT, Drafting, Node, Scored, TextIndex
from tests.models.native.out_of_memory import Memory

TOKENS, REQUESTS = 5, 3
SECONDS = [1.0, 1.02, 1.1, 1.15, 1.3, 1.31, 1.6, 2.0]


def score(part: int, nodes: list[Node], width: int) -> Sequence[Scored]:
    """Two tokens below most nodes."""
    return [([node % TOKENS, 7], [-0.4, -1.3], 1.0) if token % 3 else ([], [], 0.0) for _, node, _, token in nodes]


def find_states(nodes: list[Node]) -> tuple[list[NDArray[np.uint32] | None], list[int]]:
    """Token 0 is refused below every other node; token 2 is forced below some."""
    masks = [np.array([~1 & 0xFFFFFFFF], np.uint32) if node % 2 else None for _, node, _, _ in nodes]
    return list(masks), [2 if node % 5 == 1 else -1 for _, node, _, _ in nodes]


def find_meanings(part: int, keys: object) -> None:
    """No part translates."""
    raise AssertionError


def walk(memory: Memory) -> list[Any]:
    """Trees and trials of some steps of three requests."""
    draw, found = random.Random(1), list[Any]()  # noqa: S311
    kinds = [BY_TEXT, BY_TEXT, BY_CALLER]
    drafting = memory.call("open", lambda: Drafting([2, 0, 1], score, find_states, find_meanings))
    for part, kind in zip(drafting.parts, kinds, strict=True):
        part.kind, part.enabled, part.outputs, part.trust, part.onward, part.layer = kind, 1, 32, 1.1, 0.7, 0.01
    texts = [memory.call("index", lambda n=n: TextIndex(1 + n % 2)) for n in range(2 * REQUESTS)]  # type: ignore[misc]
    memory.call("room", lambda: texts[0].predict([1, 2, 3, 4] * 40))
    for step in range(8):
        rule = drafting.rule
        rule.width, rule.depth, rule.threshold, rule.rate, rule.tokens = 8, 6, 0.01, 0.5, 1.0
        drafting.set_curves(*([SECONDS] * 2 if step % 2 else [[], []]))
        for at in range(REQUESTS):
            more = [draw.randrange(TOKENS) for _ in range(draw.choice([1, 30, 200]))]
            own, sources = drafting.requests[at], drafting.sources[at]
            own.nodes, own.depth, own.constrained = draw.choice([0, 3, 12, 60]), 6, at == 1
            for source, text in zip(sources, texts[2 * at : 2 * at + 2], strict=False):
                memory.call("text", lambda text=text, more=more: text.extend(more))  # type: ignore[misc]
                source.index = text.index
            for source in sources:
                source.limit = draw.choice([0, 2, 9])
        trees = memory.call("draft", lambda: drafting.draft(REQUESTS))
        found += [grown for grown in trees if len(grown.tree)]
        paths = [[0] if len(grown.tree) else [] for grown in trees]
        tokens = [[*grown.tree.tokens[:1], 1] for grown in trees]
        found.append(memory.call("accept", lambda paths=paths, tokens=tokens: drafting.accept(paths, tokens)))  # type: ignore[misc]
    return found


def main() -> None:
    memory = Memory()
    begun = memory.library.memory_live()
    gc.freeze()
    expected = walk(memory)
    assert any(tree for tree in expected)
    for last, stride in ((0, 1), (2**31, 3)):  # one call fails, and all from one on until something has failed
        for number in count(1, stride):
            memory.fail(number, last or number)
            failed, found = memory.failed.total(), walk(memory)
            assert found == expected
            gc.collect()  # callbacks refer to what they are kept by
            assert memory.library.memory_live() == begun, "memory is lost"
            if memory.failed.total() == failed and memory.library.memory_calls() < number:
                break
    sys.stdout.write(f"{dict(memory.failed)}\n")


if __name__ == "__main__":
    binding.LIBRARY = Path(sys.argv[1])
    main()
