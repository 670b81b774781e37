"""Rows that are kept for texts that begin as they do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from draftree.models.base import Row, prefill
from draftree.models.prefixes import PrefixCache, common_prefix

from ..toy import ToyModel


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2, 4], 2), ([2], [1], 0), ([1, 2], [1, 2], 2)],
)
def test_the_common_prefix_is_counted(one: list[int], other: list[int], shared: int) -> None:
    assert common_prefix(one, other) == common_prefix(other, one) == shared


def test_of_a_row_that_holds_more_than_its_text_only_the_text_is_used() -> None:
    """Ctrl-C between the target's commit and the request's tokens left a row that holds more than the text it was kept
    for: the next turn of a chat would have gone on behind tokens that nobody had seen."""
    model, text = ToyModel(), [i % 5 for i in range(20)]
    cache, row = PrefixCache(model, 2), prefill(model, [*text, 1])
    cache.keep(text, row)
    found = cache.find([*text, 1, 3])
    assert found.length == 20
    assert row.number == -1 and cache.lengths == []
    cache.keep([*text, 2], found)
    assert cache.lengths == [20]
    assert cache.find([*text, 3]).length == 20


def test_a_row_that_cannot_be_forked_stays_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was neither kept nor closed from then on."""
    model, text = ToyModel(), [i % 5 for i in range(20)]
    cache = PrefixCache(model, 2)
    cache.keep(text, prefill(model, text))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(model, "fork", raising(MemoryError()))
        cache.find([*text[:18], 0, 1])
    assert cache.lengths == [20]
    assert cache.find([*text[:18], 0, 1]).length == 18
    cache.clear()
    assert len(model._rows) == 1


def raising(error: Exception) -> Callable[..., Row]:
    def fork(row: Row, length: int | None = None) -> Row:
        raise error

    return fork


def test_kept_rows_take_half_of_the_caches_memory() -> None:
    """Their number was bounded, and not their tokens: 64 long conversations took all that requests did not."""
    model = ToyModel()
    model.most_tokens = 100
    cache = PrefixCache(model, 8)
    for first in range(4):
        text = [first, *(i % 5 for i in range(19))]
        cache.keep(text, prefill(model, text))
    assert cache.lengths == [20, 20]
    text = [i % 5 for i in range(60)]
    cache.keep(text, prefill(model, text))
    assert cache.lengths == []


def test_the_row_that_is_touched_is_the_one_that_is_found() -> None:
    """Of two rows that held as much, one was touched and the other found: other texts lost their rows."""
    model = ToyModel()
    cache = PrefixCache(model, 4)
    texts = [[first, *(i % 5 for i in range(19))] for first in (0, 0, 1, 1)]
    rows = [prefill(model, text) for text in texts]
    for text, row in zip(texts, rows, strict=True):
        cache.keep(text, row)
    assert not cache.touch(texts[0])
    assert cache.find(texts[0]) not in rows
    assert [held for _, held in cache._rows] == [rows[0], rows[2], rows[3], rows[1]]


def test_rows_that_have_read_next_to_nothing_are_not_kept() -> None:
    """One that was cancelled while it waited pushed out a row that texts go on from."""
    model = ToyModel()
    cache, text = PrefixCache(model, 1), [i % 5 for i in range(20)]
    cache.keep(text, prefill(model, text))
    cache.keep([1, 2, 3], model.open())
    assert cache.lengths == [20] and len(model._rows) == 1
