"""A random walk over everything that rows of a model without trees can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from draftree.models.base import Nodes, Row, prefill
from draftree.models.linear_rows import LinearRows
from draftree.tree import ROOT, Floats

ACTS = ("open", "extend", "extend", "extend", "commit", "prune", "fork", "close")


def walk(
    model: LinearRows[Any],
    reference: Callable[[Sequence[int]], Floats],
    *,
    steps: int,
    prompts: tuple[int, int],
    rounding: float,
    after: Callable[[], object] = lambda: None,
) -> int:
    """Check logits after tokens that are dropped, forks at any length, closes, and tokens of which nothing is wanted.

    Args:
        reference: ids -> [V] logits behind them.
        prompts: least and most tokens of one.
        rounding: by which logits may differ, at most.
        after: is called after each step.

    Returns:
        int: how many logits were checked.
    """
    rng, checked = Random(5), 0
    rows = list[tuple[Row, list[int], list[int]]]()  # with what is committed, and what waits

    def text(length: int) -> list[int]:
        return [rng.randrange(model.capabilities.vocab_size) for _ in range(length)]

    for _ in range(steps):
        act = rng.choice(ACTS)
        if act == "open" and len(rows) < 4:
            ids = text(rng.randint(*prompts))
            rows.append((prefill(model, ids), ids, []))
        elif rows and act == "extend":
            chosen, nodes, wanted = rng.sample(rows, rng.randint(1, len(rows))), list[Nodes](), rng.randint(0, 3) > 0
            for row, _, waiting in chosen:
                new, last = text(rng.randint(1, 4)), len(row.parents) + ROOT
                nodes.append(Nodes(new, [*range(last, last + len(new))], int(wanted)))
                waiting += new
            scores = model.extend([row for row, *_ in chosen], nodes)
            logits = [*scores.logits(range(len(chosen)))] if wanted else list[Floats]()
            for (_, ids, waiting), found in zip(chosen, logits, strict=False):
                assert np.abs(found - reference(ids + waiting)).max() < rounding
                checked += 1
        elif rows and act in ("commit", "prune"):
            row, ids, waiting = rng.choice(rows)
            keep = rng.randint(0, len(waiting))
            trunk = keep if act == "commit" else rng.randint(0, keep)
            model.commit(row, range(keep)) if act == "commit" else model.prune(row, range(keep), trunk)
            ids += waiting[:trunk]
            waiting[:] = waiting[trunk:keep]
            assert (row.length, len(row.parents)) == (len(ids), len(waiting))
        elif rows and act == "fork" and len(rows) < 5:
            row, ids, _ = rng.choice(rows)
            length = rng.choice([row.length, rng.randint(0, row.length)])
            rows.append((model.fork(row, length), ids[:length], []))
        elif rows and act == "close":
            model.close(rows.pop(rng.randrange(len(rows)))[0])
        after()
    for row, *_ in rows:
        model.close(row)
    assert model.rows == 0
    return checked
