"""What tokens spell, in bytes, and texts spelt in tokens: where two vocabularies meet, they meet in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from .detokenizer import BYTE_LETTERS, PieceDecoder, byte_level, fallback, token_speller
from .encoding import Tokenizer

_SPACE = "▁"
"""A space inside SentencePiece's tokens."""
_MARK = "\x02"
"""A control character: merges join it with nothing."""


class InnerSpelling:
    """Spells texts as they stand behind others.

    SentencePiece begins a text with a space that is not the text's own: that space belongs to a mark in front, whose
    tokens are cut off.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = partial(tokenizer.encode, add_special_tokens=False)
        bare = b"".join(map(token_speller(tokenizer), self._encode("a")))
        self._lead = _MARK if bare.startswith(b" ") else ""
        self._begun = self._encode(self._lead)

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text; as of one that begins with it where the tokenizer joins it to the mark."""
        ids, begun = self._encode(self._lead + text), len(self._begun)
        return ids[begun:] if len(ids) > begun and ids[:begun] == self._begun else self._encode(text)


class Spelling:
    """The tokens of a vocabulary by their bytes, which may begin or end inside a character.

    Attributes:
        texts: of each token, special ones included.
        special: tokens that are no text.

    Args:
        size: of the model's vocabulary; the tokenizer's tokens beyond are none.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        texts, special = tokenizer.spelling() if isinstance(tokenizer, PieceDecoder) else _written(tokenizer)
        self.texts, self.special = texts[:size], frozenset(token for token in special if token < size)
        ids = range(len(self.texts) - 1, -1, -1)  # of two tokens of the same text the first one counts
        self._ids = {self.texts[token]: token for token in ids if token not in self.special}
        self._ids.pop(b"", None)
        self._longest = dict[int, int]()  # first byte -> most bytes of a token
        for first, size in sorted({(text[0], len(text)) for text in self._ids}):
            self._longest[first] = size
        self._inner = InnerSpelling(tokenizer)

    def joined(self, tokens: list[int]) -> bytes | None:
        """The text of tokens; None: one of them is special, or the model does not have it."""
        if not self.special.isdisjoint(tokens) or max(tokens, default=0) >= len(self.texts):
            return None
        return b"".join([self.texts[token] for token in tokens])

    def spelt(self, text: bytes) -> list[tuple[int | None, int]]:
        """Tokens of a text, each with where it ends in it: those of the tokenizer, where these spell the text.

        A text that is one token is that one. Bytes that are no character, and texts that the tokenizer changes, are
        spelt by the longest tokens. A byte that no token spells has None.
        """
        if text in self._ids:
            return [(self._ids[text], len(text))]
        tokens, at = list[tuple[int | None, int]](), 0
        while at < len(text):
            try:
                tokens += self._encoded(text[at:].decode(), text[at:], at)
                break
            except UnicodeDecodeError as error:
                start, end = at + error.start, at + error.end
                if error.start:
                    tokens += self._encoded(text[at:start].decode(), text[at:start], at)
                tokens += self._by_longest(text[start:end], start)
                at = end
        return tokens

    def _encoded(self, text: str, data: bytes, start: int) -> list[tuple[int | None, int]]:
        """Tokens of whole characters, which begin at ``start``."""
        ids = self._inner(text)
        if self.joined(ids) != data:
            return [*self._by_longest(data, start)]
        tokens = list[tuple[int | None, int]]()
        for token in ids:
            start += len(self.texts[token])
            tokens.append((token, start))
        return tokens

    def _by_longest(self, data: bytes, start: int) -> Iterator[tuple[int | None, int]]:
        at = 0
        while at < len(data):
            sizes = range(min(self._longest.get(data[at], 0), len(data) - at), 0, -1)
            size = next((size for size in sizes if data[at : at + size] in self._ids), 0)
            yield self._ids[data[at : at + size]] if size else None, start + at + (size or 1)
            at += size or 1


def _written(tokenizer: Tokenizer) -> tuple[list[bytes], list[int]]:
    """As ``PieceDecoder.spelling``, by how a vocabulary writes its tokens."""
    vocabulary = tokenizer.get_vocab()
    named = (
        text
        for value in tokenizer.special_tokens_map.values()
        for text in ([value] if isinstance(value, str) else value)
    )
    special = {vocabulary[text] for text in named if text in vocabulary}
    # transformers' tokenizers know of tokens that were added: they are written as they are, and some are special
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special.update(token for token, text in added.items() if text.special)
    # a vocabulary may lack some bytes, but not the space
    is_byte_level = _SPACE not in vocabulary and BYTE_LETTERS[ord(" ")] in vocabulary
    texts = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for text, token in vocabulary.items():
        spelt = byte_level(text) if is_byte_level else fallback(text) or text.replace(_SPACE, " ").encode()
        texts[token] = text.encode() if token in added or token in special or spelt is None else spelt
    return texts, sorted(special)
