"""Byte pair encoding: of a word's letters, the pair that comes first among the merges becomes one, again and again.

Sennrich, Haddow & Birch, *Neural Machine Translation of Rare Words with Subword Units* (ACL 2016).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import chain, count, pairwise
from typing import NamedTuple

import regex  # type: ignore[import-untyped]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OPENED = r"[^\r\n\p{L}\p{N}]?"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = "|".join([_CONTRACTIONS, _WORDS, r"\p{N}{1,3}", _SYMBOLS, _SPACES])
_QWEN2 = "|".join([_CONTRACTIONS, _WORDS, r"\p{N}", _SYMBOLS, _SPACES])
_QWEN35 = "|".join(
    [_CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES]
)
_TEKKEN = "|".join(
    [f"{_OPENED}{_UPPER}*{_LOWER}+", f"{_OPENED}{_UPPER}+{_LOWER}*", r"\p{N}", _PATHS, _SPACES],
)
_GPT4O = "|".join(
    [
        f"{_OPENED}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?",
        f"{_OPENED}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?",
        r"\p{N}{1,3}",
        _PATHS,
        _SPACES,
    ]
)
_SEED = "|".join([_CONTRACTIONS, _WORDS, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES])
_MINICPM5 = "|".join([_CONTRACTIONS, _WORDS, r"\p{N}+", _SYMBOLS, _SPACES])
_DEEPSEEK3 = "|".join(
    [
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        _SPACES,
    ]
)
_CJK = "[一-龥ࠀ-一가-퟿]+"


class PreTokenizer(NamedTuple):
    """How a text is split.

    Attributes:
        patterns: each splits the pieces of the one before; what none matches is a piece too.
        ignore_merges: a piece that is a token is that token, whatever merges make of it.
        adds_bos: a text begins with a token of its own, unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_OF_LLAMA3 = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)

PRE_TOKENIZERS = {
    "default": _DEFAULT,
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "gigachat", "a.x-4.0", "mellum", "trillion"), PreTokenizer((_GPT2,))
    ),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), _DIGITS_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), _OF_LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2"), PreTokenizer((_QWEN2,))),
    "qwen35": PreTokenizer((_QWEN35,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), PreTokenizer((_GPT4O,))),
    "seed-coder": PreTokenizer((_SEED,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _MINICPM5), ignore_merges=True),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"(?<!\s)\s+$", _CJK, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}
"""By their names in GGUF files."""


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
