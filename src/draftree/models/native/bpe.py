"""Byte pair encoding: of a word's letters, the pair that comes first among the merges becomes one, again and again.

Sennrich, Haddow & Birch, *Neural Machine Translation of Rare Words with Subword Units* (ACL 2016).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import chain, count, pairwise

import regex  # type: ignore[import-untyped]

_WORD = 64
"""A word of at most so many letters is kept with its tokens."""
_KEPT = 1 << 14
"""Most words that are kept."""


class BytePairs:
    """Encodes words as tokens.

    Args:
        ids: of the tokens.
        merges: pairs of tokens, those that are merged first in front.
        whole: a word that is a token is that token, whatever merges make of it.

    Raises:
        ValueError: a pair, or what it becomes, is no token.
    """

    def __init__(self, ids: Mapping[str, int], merges: Sequence[tuple[str, str]], whole: bool = False) -> None:
        for tokens in (set(chain.from_iterable(merges)), set(map("".join, merges))):
            if unknown := tokens - ids.keys():
                raise ValueError(f"{min(unknown)!r} is merged but no token")
        self._ids, self._whole = ids, whole
        self._ranks = dict(zip(merges, count(), strict=False))
        self._kept = lru_cache(_KEPT)(self._merged)

    def tokens(self, word: str) -> Sequence[str]:
        """The parts of a word; a letter that no token has is a part of its own."""
        if self._whole and word in self._ids:
            return (word,)
        return self._kept(word) if len(word) <= _WORD else self._merged(word)

    def _merged(self, word: str) -> Sequence[str]:
        """Merge the first pair by (rank, place) until there is none; parts are a list linked by places."""
        ranks, parts = self._ranks, list(word)
        after, before = list(range(1, len(parts) + 1)), list(range(-1, len(parts) - 1))
        ranked = enumerate(map(ranks.get, pairwise(parts)))
        heap = [(rank, i) for i, rank in ranked if rank is not None]
        heapify(heap)
        while heap:
            rank, i = heappop(heap)
            j = after[i]
            if j == len(parts) or not parts[i] or ranks.get((parts[i], parts[j])) != rank:
                continue  # a part of it has been merged since
            parts[i], parts[j], after[i] = parts[i] + parts[j], "", after[j]
            if after[j] < len(parts):
                before[after[j]] = i
            for left in (before[i], i):
                if left >= 0 and after[left] < len(parts):
                    rank_there = ranks.get((parts[left], parts[after[left]]))
                    if rank_there is not None:
                        heappush(heap, (rank_there, left))
        return tuple(filter(None, parts))


def split(text: str, patterns: Sequence[regex.Pattern[str]]) -> Iterator[str]:
    """The words of a text: each pattern splits those of the one before; what it does not match is a word too."""
    if not patterns:
        yield text
        return
    first, *others = patterns
    at = 0
    for found in first.finditer(text):
        if at < found.start():
            yield from split(text[at : found.start()], others)
        yield from split(found[0], others)
        at = found.end()
    if at < len(text):
        yield from split(text[at:], others)


class AddedTokens:
    """Tokens that texts contain as they are: the first, and of those the longest, before anything else.

    Args:
        ids: of the tokens.
        strips: tokens that take away the white space behind them.
    """

    def __init__(self, ids: Mapping[str, int], strips: frozenset[str]) -> None:
        self._ids, self._strips = ids, strips
        self._lengths = sorted(set(map(len, ids)), reverse=True)
        self._first = regex.compile(f"[{''.join(map(regex.escape, sorted({t[0] for t in ids})))}]" if ids else "(?!)")

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """A text in parts: what stands before a token, and that token; None behind the last one."""
        at = 0
        for found in self._first.finditer(text):
            start = found.start()
            if start < at:
                continue
            token = next((t for n in self._lengths if (t := text[start : start + n]) in self._ids), None)
            if token is not None:
                yield text[at:start], self._ids[token]
                at = start + len(token)
                while token in self._strips and text[at : at + 1].isspace():
                    at += 1
        yield text[at:], None
