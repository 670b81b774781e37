"""Keeps what was made of texts that come again, as those of a conversation do at each turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class TextCache(Generic[Value]):
    """A least-recently-used cache of what was made of texts, bounded by the characters of all of them.

    Threads may share it; two that ask for the same new text at once make it both. What raises is not kept.

    Args:
        most: characters of the texts together.
        least: characters that a shorter text counts as, for what is made of it takes memory too.
    """

    def __init__(self, most: int, least: int) -> None:
        self._most, self._least, self._size = most, least, 0
        self._made: OrderedDict[tuple[str, tuple[Hashable, ...]], Value] = OrderedDict()
        self._lock = Lock()

    def get(self, text: str, make: Callable[[], Value], *more: Hashable) -> Value:
        """What ``make`` gave for a text before, or gives now; nobody may change it.

        Args:
            more: what it depends on besides.
        """
        key = text, more
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        value = make()  # without the lock: others need not wait
        with self._lock:
            if key not in self._made and self._counted(text) <= self._most:
                self._made[key] = value
                self._size += self._counted(text)
                while self._size > self._most:
                    (oldest, _), _ = self._made.popitem(last=False)
                    self._size -= self._counted(oldest)
        return value

    def _counted(self, text: str) -> int:
        return max(len(text), self._least)
