"""Trees on tiny models, and what plain causal forwards say of them.

The reference is a second model of the same weights with eager attention, called without draftree.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from draftree.models.base import Nodes, Row
from draftree.models.huggingface.cache import TreeCache
from draftree.models.huggingface.hf_model import HFModel

from ..references import extended
from ..tiny import MAX_LENGTH, VOCAB, causal_logits, tiny

ATOL = 5e-5  # logits have a standard deviation near 1.7; a wrong position or mask moves them by tenths

SHAPES: dict[str, list[int]] = {
    "chain": [-1, 0, 1, 2, 3, 4],
    "wide": [-1] * 7,
    "two branches": [-1, -1, 0, 1, 2, 3],
    "binary": [-1, -1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 5],
    "comb": [-1, -1, 0, 0, 2, 2, 4, 4, 6, 6],
}


@functools.cache
def reference(kind: str) -> PreTrainedModel:
    return tiny(kind, attention="eager")


def fresh(kind: str) -> HFModel:
    return HFModel(tiny(kind), name=kind)


def random_ids(rng: Random, n: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(n)]


def random_parents(rng: Random, n: int) -> list[int]:
    """A random tree in level order: half of the draws prefer the newest nodes, which makes it deep."""
    parents: list[int] = []
    for i in range(n):
        parents.append(max(rng.randrange(-1, i), rng.choice([-1, i - 2])))
    depths = [len(path_to(parents, i)) for i in range(n)]
    order = sorted(range(n), key=depths.__getitem__)
    rank = {-1: -1, **{old: new for new, old in enumerate(order)}}
    return [rank[parents[old]] for old in order]


def random_tree(rng: Random, n: int) -> Nodes:
    return Nodes(random_ids(rng, n), random_parents(rng, n))


def shallow_tree(rng: Random, size: int, depth: int) -> Nodes:
    """A random tree not deeper than ``depth``."""
    while len(deepest((tree := random_tree(rng, size)).parents)) > depth:
        size -= 1
    return tree


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root down to ``node``."""
    return [*path_to(parents, parents[node]), node] if node >= 0 else []


def deepest(parents: Sequence[int]) -> list[int]:
    return max((path_to(parents, i) for i in range(len(parents))), key=len)


def expected(kind: str, committed: Sequence[int], tree: Nodes) -> Tensor:
    """[n, V] logits that follow each node, by one causal forward a node."""
    tokens, parents = tree.tokens, tree.parents
    paths = [[tokens[p] for p in path_to(parents, i)] for i in range(len(tokens))]
    return torch.stack([causal_logits(reference(kind), [*committed, *path])[-1] for path in paths])


def assert_close(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual, wanted, atol=ATOL, rtol=0)


def storage(cache: Any) -> list[tuple[Tensor, Tensor]]:
    if isinstance(cache, TreeCache):
        return [*map(cache.of, sorted(cache._places))]
    return [(layer.keys, layer.values) for layer in cache.layers]


@torch.inference_mode()
def assert_cached(model: HFModel, kind: str, row: Row, committed: Sequence[int]) -> None:
    """The row's keys and values, layer by layer, and its next logits are those of a fresh prefill."""
    assert row.length == len(committed)
    whole = DynamicCache()  # without the config, whose windows would drop keys
    cache = reference(kind)(input_ids=torch.tensor([list(committed)]), past_key_values=whole).past_key_values
    for (keys, values), (true_keys, true_values) in zip(storage(model.cache), storage(cache), strict=True):
        assert_close(keys[row.number, :, : row.length], true_keys[0])
        assert_close(values[row.number, :, : row.length], true_values[0])
    if row.length < MAX_LENGTH:
        assert_close(extended(model, [row], [Nodes.chain([7])])[0], expected(kind, committed, Nodes.chain([7])))
        model.commit(row, [])
