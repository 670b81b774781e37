"""Rows of HFModel: ragged batches, forks, closings and twins stay exact."""

from __future__ import annotations

from random import Random

import pytest

from draftree.models.base import Nodes, Row, prefill

from ..references import extended
from ..tiny import FAMILIES
from .trees import (
    SHAPES,
    assert_cached,
    assert_close,
    expected,
    fresh,
    path_to,
    random_ids,
    random_tree,
    shallow_tree,
)

families = pytest.mark.parametrize("kind", FAMILIES)


@families
def test_a_ragged_batch_equals_the_causal_forwards(kind: str) -> None:
    rng, model = Random(4), fresh(kind)
    prompts = [random_ids(rng, n) for n in (3, 17, 9)]
    rows = [prefill(model, p) for p in prompts]
    for sizes in ((5, 1, 12), (2, 6, 3)):
        trees = [random_tree(rng, n) for n in sizes]
        logits = extended(model, rows, trees)
        for b, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
            assert_close(logits[b, : sizes[b]], expected(kind, prompt, tree))
            model.commit(rows[b], [])


@families
def test_any_rows_may_be_asked_in_any_order(kind: str) -> None:
    rng, model = Random(5), fresh(kind)
    prompts = [random_ids(rng, n) for n in (7, 12, 4, 9)]
    rows = [prefill(model, p) for p in prompts]
    for asked in ([2], [2, 0], [3, 1], [1, 3, 0], [0, 2]):
        trees = [random_tree(rng, rng.randint(1, 9)) for _ in asked]
        logits = extended(model, [rows[r] for r in asked], trees)
        for b, (r, tree) in enumerate(zip(asked, trees, strict=True)):
            assert_close(logits[b, : len(tree.tokens)], expected(kind, prompts[r], tree))
            model.commit(rows[r], [])


@families
def test_uncommitted_nodes_outlive_passes_that_do_not_ask_their_row(kind: str) -> None:
    rng, model = Random(6), fresh(kind)
    prompts = [random_ids(rng, n) for n in (5, 8, 11)]
    rows = [prefill(model, p) for p in prompts]
    tree = Nodes(random_ids(rng, 6), SHAPES["two branches"])
    model.extend([rows[1]], [Nodes(tree.tokens[:4], tree.parents[:4])])
    model.extend([rows[0], rows[2]], [random_tree(rng, 7), random_tree(rng, 3)])  # row 1 rides along with padding
    later = extended(model, [rows[1]], [Nodes(tree.tokens[4:], tree.parents[4:])])[0]
    assert_close(later, expected(kind, prompts[1], tree)[4:])


@families
def test_a_row_in_a_batch_answers_as_it_does_alone(kind: str) -> None:
    rng, model, alone = Random(7), fresh(kind), fresh(kind)
    prompts, trees = [random_ids(rng, n) for n in (4, 21, 10)], [random_tree(rng, n) for n in (9, 2, 6)]
    together = extended(model, [prefill(model, p) for p in prompts], trees)
    for b, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        assert_close(together[b, : len(tree.tokens)], extended(alone, [prefill(alone, prompt)], [tree])[0])


def test_a_row_without_new_nodes_rides_along_in_a_batch() -> None:
    rng, model = Random(8), fresh("llama")
    prompts = [random_ids(rng, n) for n in (6, 9)]
    tree = random_tree(rng, 5)
    logits = extended(model, [prefill(model, p) for p in prompts], [Nodes([], []), tree])
    assert_close(logits[1], expected("llama", prompts[1], tree))


@pytest.mark.parametrize(("kind", "seed"), [("llama", 0), ("llama", 1), ("gpt2", 2), ("opt", 3)])
def test_rows_that_open_fork_commit_and_close_at_random_stay_exact(kind: str, seed: int) -> None:
    rng, model = Random(seed), fresh(kind)
    rows: list[tuple[Row, list[int]]] = []
    for _ in range(60):
        action = rng.random()
        if not rows or (action < 0.15 and len(rows) < 6):
            ids = random_ids(rng, rng.randint(1, 30))
            rows.append((prefill(model, ids), ids))
        elif action < 0.25 and len(rows) < 6:
            row, ids = rng.choice(rows)
            rows.append((model.fork(row), list(ids)))
        elif action < 0.4:
            row, _ = rows.pop(rng.randrange(len(rows)))
            model.close(row)
        else:
            asked = rng.sample(rows, rng.randint(1, len(rows)))
            trees = [shallow_tree(rng, rng.randint(1, 8), 8) for _ in asked]
            logits = extended(model, [row for row, _ in asked], trees)
            for b, ((row, ids), tree) in enumerate(zip(asked, trees, strict=True)):
                assert_close(logits[b, : len(tree.tokens)], expected(kind, ids, tree))
                path = path_to(tree.parents, rng.randrange(-1, len(tree.tokens)))
                model.commit(row, path)
                ids += map(tree.tokens.__getitem__, path)
    for row, ids in rows:
        assert_cached(model, kind, row, ids)


@families
def test_closing_a_row_keeps_the_uncommitted_nodes_of_the_row_that_takes_its_place(kind: str) -> None:
    rng, model = Random(12), fresh(kind)
    prompts = [random_ids(rng, n) for n in (9, 5, 7)]
    rows = [prefill(model, p) for p in prompts]
    tree = Nodes(random_ids(rng, 6), SHAPES["two branches"])
    model.extend([rows[2]], [Nodes(tree.tokens[:4], tree.parents[:4])])
    model.close(rows[0])
    later = extended(model, [rows[2]], [Nodes(tree.tokens[4:], tree.parents[4:])])[0]
    assert_close(later, expected(kind, prompts[2], tree)[4:])
    model.commit(rows[2], [1, 3])
    assert_cached(model, kind, rows[2], [*prompts[2], tree.tokens[1], tree.tokens[3]])


def test_open_rows_stay_side_by_side_when_one_closes() -> None:
    model = fresh("llama")
    rows = [prefill(model, [i + 1]) for i in range(4)]
    model.close(rows.pop(1))
    assert sorted(row.number for row in rows) == [0, 1, 2]


@families
def test_a_fork_and_its_origin_go_their_own_ways(kind: str) -> None:
    rng, model = Random(13), fresh(kind)
    prompt = random_ids(rng, 11)
    origin = prefill(model, prompt)
    other = model.fork(origin)
    for row, tokens in ((origin, [1, 2, 3]), (other, [4, 5])):
        model.extend([row], [Nodes.chain(tokens)])
        model.commit(row, range(len(tokens)))
    assert_cached(model, kind, origin, [*prompt, 1, 2, 3])
    assert_cached(model, kind, other, [*prompt, 4, 5])


def test_a_fork_leaves_uncommitted_nodes_behind() -> None:
    rng, model = Random(14), fresh("llama")
    prompt, tree = random_ids(rng, 6), random_tree(rng, 5)
    origin = prefill(model, prompt)
    model.extend([origin], [random_tree(rng, 4)])
    other = model.fork(origin)
    assert len(other.parents) == 0
    assert_close(extended(model, [other], [tree])[0], expected("llama", prompt, tree))


def test_a_twin_has_rows_and_a_cache_of_its_own() -> None:
    rng, model = Random(15), fresh("llama")
    twin, (prompt, other) = model.twin(), (random_ids(rng, 8), random_ids(rng, 8))
    row, its = prefill(model, prompt), prefill(twin, other)
    assert twin.model is model.model
    assert (row.number, its.number) == (0, 0)
    assert_cached(model, "llama", row, prompt)
    assert_cached(twin, "llama", its, other)


@families
def test_rows_that_have_read_nothing_are_closed_in_any_order(kind: str) -> None:
    """The last one took the place of the first, and its slots were looked for where none were allotted."""
    model = fresh(kind)
    row = prefill(model, [1, 2, 3])
    for other in [model.open() for _ in range(3)]:
        model.close(other)
    assert_cached(model, kind, row, [1, 2, 3])
