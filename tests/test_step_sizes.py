"""How much a step reads of prompts while others decode, and how much it drafts."""

from __future__ import annotations

import pytest

from draftree.engine.scheduler import ChunkSize, NodeShare


@pytest.mark.parametrize("token", [0.001, 0.01, 0.0001])
def test_chunks_become_as_large_as_a_step_may_take(token: float) -> None:
    chunk = ChunkSize()
    chunk.observe(0, 0.1)
    for _ in range(100):
        tokens = chunk.size
        chunk.observe(tokens, 0.1 + token * tokens)
    fits = max(8, min(512, 0.15 / token))
    assert 0.7 * fits <= chunk.size <= 1.25 * fits


def test_a_slow_moment_costs_a_chunk_a_quarter() -> None:
    chunk = ChunkSize()
    chunk.observe(0, 0.1)
    before = chunk.size
    chunk.observe(before, 10.0)
    assert chunk.size == before * 3 // 4
    chunk.observe(chunk.size - 1, 0.01)
    assert chunk.size == before * 3 // 4, "the end of a prompt says nothing of a whole chunk"


@pytest.mark.parametrize("node", [0.001, 0.02, 0.2])
def test_shared_steps_draft_as_much_as_the_bound_leaves(node: float) -> None:
    share = NodeShare(2.0)
    assert share.most(2) == 0, "what a step takes without drafts is measured first"
    for _ in range(400):
        drafted = share.most(2) or 0
        share.observe(2, drafted, 1.0 + node * drafted)
    fits = 0.6 / node
    assert 0.7 * fits <= share.size <= 1.25 * (fits + 1)


@pytest.mark.parametrize("drafting", [1.0, 3.0, 6.0])
def test_where_one_node_takes_too_long_few_steps_draft(drafting: float) -> None:
    share, took, count = NodeShare(2.0), list[float](), 0
    for _ in range(400):
        drafted = (share.most(2) or 0) // 2 * 2  # the same for each of two requests
        took.append(1.0 + (drafting + 0.1 * drafted if drafted else 0.0))
        count += drafted > 0
        share.observe(2, drafted, took[-1])
    assert count > 20 and sum(took) <= 2 * len(took)


def test_steps_without_drafts_are_measured_for_each_number_of_requests_and_again() -> None:
    share, plain = NodeShare(2.0), 0
    for _ in range(600):
        drafted = share.most(3) or 0
        plain += not drafted
        share.observe(3, drafted, 1.0)
    assert plain == 10
    assert share.most(4) == 0 < (share.most(3) or 0)


def test_a_stall_while_nothing_is_drafted_leaves_the_bound_where_it_is() -> None:
    share = NodeShare(2.0)
    share.observe(2, 0, 1.0)
    share.observe(2, 0, 50.0)
    size = share.size
    share.observe(2, int(size), 2.5)
    assert share.size < size
