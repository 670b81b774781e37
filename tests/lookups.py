"""What lookup is defined to find, by reading whole texts: the reference for its indexes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LONGEST, MOST = 16, 16


class Place(NamedTuple):
    """What follows in a text, at the position ``at``, and how many tokens of a path end before it."""

    text: int
    at: int
    length: int


class Reference:
    """Places and probabilities of paths below the end of the last of some texts."""

    def __init__(self, texts: Sequence[Sequence[int]], shortest: int = 2) -> None:
        self.texts, self.shortest = [list(text) for text in texts], shortest

    def search(self, tail: Sequence[int]) -> list[Place]:
        """Every place with the last tokens of a tail, the latest first."""
        found = []
        for number, text in enumerate(self.texts):
            for at in range(1, len(text)):
                most = min(at, len(tail), LONGEST)
                lengths = (n for n in range(most, self.shortest - 1, -1) if text[at - n : at] == list(tail)[-n:])
                if (length := next(lengths, 0)) and length >= self.shortest:
                    found.append(Place(number, at, length))
        return found[::-1]

    def follow(self, places: Sequence[Place], token: int) -> list[Place]:
        """The places that have ``token``, one further."""
        return [
            Place(number, at + 1, min(length + 1, LONGEST))
            for number, at, length in places
            if self.texts[number][at] == token and at + 1 < len(self.texts[number])
        ]

    def below(self, path: Sequence[int], read: int = 0) -> list[Place]:
        """Of a path below the last text: followed where there is such a place, else searched.

        Args:
            read: tokens at the end of the last text that were appended one by one after the first search.
        """
        whole = self.texts[-1]
        begin = len(whole) - read
        places = Reference([*self.texts[:-1], whole[:begin]], self.shortest).search(whole[:begin])[:MOST]
        for end in range(begin + 1, len(whole) + 1):
            grown = Reference([*self.texts[:-1], whole[:end]], self.shortest)
            places = grown.follow(places, whole[end - 1]) or grown.search(whole[:end])[:MOST]
        for depth, token in enumerate(path, start=1):
            places = self.follow(places, token) or self.search([*whole, *path[:depth]])[:MOST]
        return places

    def probabilities(self, places: Sequence[Place]) -> dict[int, float]:
        """n^1.5 for a place of n tokens; 3 for tokens that are not there for each one that is."""
        tokens = list(dict.fromkeys(self.texts[number][at] for number, at, _ in places))
        votes = {t: sum(n**1.5 for number, at, n in places if self.texts[number][at] == t) for t in tokens}
        total = sum(votes.values()) + 3 * len(votes)
        return {token: votes[token] / total for token in sorted(votes, key=lambda t: -votes[t])}

    def predict(self, path: Sequence[int] = (), read: int = 0) -> dict[int, float]:
        return self.probabilities(self.below(path, read))
