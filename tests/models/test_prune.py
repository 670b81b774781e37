"""Rows that go on with more than one path: what is kept is exact, what they share is committed, the rest is gone."""

from __future__ import annotations

from random import Random

import pytest

from draftree.errors import CacheError
from draftree.models.base import Nodes, prefill
from draftree.models.huggingface.cache import feature_row
from draftree.models.huggingface.hf_model import HFModel
from draftree.tree import ROOT

from ..references import extended, nbytes
from ..tiny import FAMILIES, tiny
from .trees import assert_cached, assert_close, expected, fresh, random_ids

SHAPE = [-1, -1, 0, 0, 2, 2, 3, 5]
"""Node 0 has children 2 and 3, node 2 children 4 and 5, node 3 child 6, node 5 child 7; node 1 is a leaf."""


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(
    ("keep", "trunk", "parents"),
    [
        ([0, 2, 3, 5, 6], 1, [-1, -1, 0, 1]),
        ([0, 2, 4, 5], 2, [-1, -1]),
        ([0, 2, 5, 7], 4, []),
        ([0, 1, 3], 0, [-1, -1, 0]),
        ([], 0, []),
    ],
)
def test_nodes_below_kept_ones_see_their_own_path(kind: str, keep: list[int], trunk: int, parents: list[int]) -> None:
    rng, model = Random(3), fresh(kind)
    prompt, tokens = random_ids(rng, 9), random_ids(rng, len(SHAPE))
    prefill(model, random_ids(rng, 20))  # a neighbour of another length
    row = prefill(model, prompt)
    model.extend([row], [Nodes(tokens, SHAPE)])
    model.prune(row, keep, trunk)
    assert row.parents == parents
    committed = [*prompt, *(tokens[n] for n in keep[:trunk])]
    left = [tokens[n] for n in keep[trunk:]]
    assert row.length == len(committed)
    new = random_ids(rng, len(left) + 1)
    logits = extended(model, [row], [Nodes(new, [ROOT, *range(len(left))])])[0]
    below = [ROOT, *range(len(left))]
    whole = Nodes([*left, *new], [*parents, *below])
    assert_close(logits, expected(kind, committed, whole)[len(left) :])
    model.commit(row, [])
    assert_cached(model, kind, row, committed)


@pytest.mark.parametrize(
    ("keep", "trunk", "said"),
    [
        ([2], 0, "8 nodes: .*parent"),
        ([0, 0], 0, "ascending order"),
        ([2, 0], 0, "ascending order"),
        ([9], 0, "of 8 nodes"),
        ([0, 1], 1, "descend from"),
        ([0, 2, 3], 2, "descend from"),
        ([0], 2, "descend from"),
    ],
)
def test_what_is_no_part_of_the_tree_is_refused(keep: list[int], trunk: int, said: str) -> None:
    model = fresh("llama")
    row = prefill(model, [3, 4, 5])
    model.extend([row], [Nodes([*range(8)], SHAPE)])
    with pytest.raises(CacheError, match=said):
        model.prune(row, keep, trunk)
    assert (row.length, row.parents) == (3, SHAPE)


def test_hidden_states_follow() -> None:
    model = HFModel(tiny(), self_test=False)
    model.track_features()
    row, tokens = prefill(model, [3, 4, 5]), list(range(10, 18))
    model.extend([row], [Nodes(tokens, SHAPE)])
    model.prune(row, [0, 2, 4, 5], 2)
    text = prefill(model, [3, 4, 5, tokens[0], tokens[2], tokens[5]])
    want = feature_row(text).last_features()
    assert_close(feature_row(row).last_features(), want[:5])
    model.commit(row, [1])
    assert_close(feature_row(row).last_features(), want)


def test_a_slot_takes_as_many_bytes_as_it_says() -> None:
    for kind in FAMILIES:
        model = fresh(kind)
        prefill(model, [1, 2, 3])
        at = model.cache.placement
        assert model.capabilities.slot_bytes * at.rows * at.slots == nbytes(model.cache)


TREE = Nodes([2, 8, 4, 6], [ROOT, 0, 0, 1])
