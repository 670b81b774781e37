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


def text(first: int, length: int = 20) -> list[int]:
    return [first, *(i % 5 for i in range(length - 1))]


def keeping(model: ToyModel, *texts: list[int]) -> PrefixCache:
    """What keeps a row of each text, in this order."""
    cache = PrefixCache(model, 8)
    for each in texts:
        cache.keep(each, prefill(model, each))
    return cache


def test_kept_rows_take_as_much_as_the_cache_has() -> None:
    """They took half of it at most: a conversation of more than that was read anew at each turn."""
    model = ToyModel()
    model.most_tokens = 100
    cache = keeping(model, *([first, *text(0, 19)] for first in range(5)))
    assert cache.lengths == [20] * 5
    cache.keep(text(1, 60), prefill(model, text(1, 60)))
    assert cache.lengths == [20, 20, 60], "the last one stays, however long it is"
    model.most_tokens = 50
    cache.keep(text(2, 60), prefill(model, text(2, 60)))
    assert cache.lengths == [20, 20, 60] and len(model._rows) == 3, "one that does not fit takes no other's place"


@pytest.mark.parametrize(
    ("by_row", "ids", "left"),
    [
        (True, [*text(0, 30), 3], [30]),
        (False, [*text(0, 30), 3], [30]),
        (True, [*text(0, 25), 0, 0], [30]),
        (False, [*text(0, 25), 0, 0], []),
        (True, text(3, 40), []),
    ],
    ids=["taken over", "taken over, with rows as long as the longest", "forked", "copied", "neither"],
)
def test_the_row_that_a_text_goes_on_from_makes_no_room_for_it(by_row: bool, ids: list[int], left: list[int]) -> None:
    """It was counted twice where it was forked, though a fork shares its memory: near the limit it was closed, and all
    of the text was read anew."""
    model = ToyModel()
    model.most_tokens, model.grows_by_row = 100, by_row
    cache = keeping(model, text(0, 30), text(1, 30))
    cache.make_room([80], [ids])
    assert cache.lengths == left
    assert cache.find(ids).length == (0 if not left else 30 if ids[25] == text(0, 30)[25] else 25)


def test_the_rows_that_several_texts_go_on_from_stay() -> None:
    model = ToyModel()
    model.most_tokens = 100
    cache = keeping(model, text(0, 30), text(1, 30), text(2, 30))
    cache.make_room([50, 50], [[*text(first, 30), 3] for first in (2, 0)])
    assert [held[0] for held, _ in cache._rows] == [2, 0]


def test_a_row_makes_room_where_a_text_goes_on_from_one_that_somebody_works_on() -> None:
    model = ToyModel()
    model.most_tokens = 100
    cache, ids = keeping(model, text(0, 30)), text(0, 50)
    cache.make_room([40, 50], [ids], [(ids, prefill(model, text(0, 40)))])
    assert cache.lengths == []


def test_the_row_that_is_touched_is_the_one_that_is_found() -> None:
    """Of two rows that held as much, one was touched and the other found: other texts lost their rows."""
    model = ToyModel()
    texts = [text(first) for first in (0, 0, 1, 1)]
    cache = keeping(model, *texts)
    rows = [row for _, row in cache._rows]
    cache.make_room([], [texts[0]])
    assert cache.find(texts[0]) not in rows
    assert [held for _, held in cache._rows] == [rows[0], rows[2], rows[3], rows[1]]


def test_rows_may_lack_the_first_tokens_of_their_texts() -> None:
    """As those of draft heads do, whose states depend on them all the same."""
    model = ToyModel()
    cache = PrefixCache(model, 4, before=1)
    cache.keep(text(0), prefill(model, text(0)[1:]))
    assert not cache.has([1, *text(0)[1:], 3, 3]) and cache.has([*text(0), 3])
    assert cache.find(text(0)).length == 18, "the last token is read for what follows it"
    assert cache.lengths == [19]
    assert cache.find([*text(0), 3]).length == 19
    assert cache.lengths == []


def test_rows_that_have_read_next_to_nothing_are_not_kept() -> None:
    """One that was cancelled while it waited pushed out a row that texts go on from."""
    model = ToyModel()
    cache, text = PrefixCache(model, 1), [i % 5 for i in range(20)]
    cache.keep(text, prefill(model, text))
    cache.keep([1, 2, 3], model.open())
    assert cache.lengths == [20] and len(model._rows) == 1
