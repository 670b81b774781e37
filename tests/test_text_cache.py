"""What is made of texts is kept as long as they are among the last, and no longer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from draftree.text.text_cache import TextCache


class Maker:
    """Notes what it is asked to make."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def of(self, text: str) -> Callable[[], str]:
        def make() -> str:
            self.made.append(text)
            return text.upper()

        return make


def test_a_text_that_is_kept_is_not_made_again() -> None:
    cache, maker = TextCache[str](100, 1), Maker()
    assert [cache.get(text, maker.of(text)) for text in ("a", "b", "a", "b")] == ["A", "B", "A", "B"]
    assert maker.made == ["a", "b"]


def test_what_a_text_is_made_with_keeps_it_apart() -> None:
    cache = TextCache[str](100, 1)
    assert cache.get("a", lambda: "one", "regex", None) == "one"
    assert cache.get("a", lambda: "two", "lark", None) == "two"
    assert cache.get("a", lambda: "three") == "three"
    assert cache.get("a", lambda: "four", "regex", None) == "one"


def test_texts_are_kept_up_to_their_characters_together() -> None:
    """Those that were asked for last stay."""
    cache, maker = TextCache[str](10, 1), Maker()
    for text in ("aaaa", "bbbb", "aaaa", "cccc", "aaaa", "bbbb"):
        cache.get(text, maker.of(text))
    assert maker.made == ["aaaa", "bbbb", "cccc", "bbbb"]


def test_a_short_text_counts_as_a_longer_one() -> None:
    cache, maker = TextCache[str](10, 5), Maker()
    for text in ("a", "b", "c", "b", "c", "a"):
        cache.get(text, maker.of(text))
    assert maker.made == ["a", "b", "c", "a"]


def test_a_text_that_is_too_long_puts_no_other_out() -> None:
    cache, maker = TextCache[str](10, 1), Maker()
    for text in ("a", "b" * 11, "a", "b" * 11):
        cache.get(text, maker.of(text))
    assert maker.made == ["a", "b" * 11, "b" * 11]


def test_what_falls_out_is_let_go() -> None:
    class Value:
        pass

    cache = TextCache[Value](10, 5)
    values = [weakref.ref(cache.get(str(i), Value)) for i in range(50)]
    gc.collect()
    assert [i for i, value in enumerate(values) if value() is not None] == [48, 49]


def test_a_failure_is_not_kept() -> None:
    cache, maker = TextCache[str](10, 1), Maker()

    def fail() -> str:
        raise OSError("a")

    for _ in range(2):
        with pytest.raises(OSError, match="a"):
            cache.get("a", fail)
    assert cache.get("a", maker.of("a")) == "A" == cache.get("a", fail)


def test_a_text_may_be_asked_for_while_another_is_made() -> None:
    """Nobody waits for a grammar of another request."""
    cache = TextCache[str](10, 1)
    assert cache.get("a", lambda: cache.get("b", lambda: "B") + cache.get("a", lambda: "A")) == "BA"
    assert cache.get("a", lambda: "made again") == "A"
