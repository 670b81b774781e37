"""Tokens to text by the bytes of each: what all tokenizers of GGUF files have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """A token's text in bytes."""

    text: bytes
    special: bool


class PieceDecoder:
    """Decodes tokens by their pieces, each of which is read once.

    Args:
        size: of the vocabulary.
    """

    _prefixed = False
    """SentencePiece puts a space in front of a text, which is not the text's own."""

    def __init__(self, size: int) -> None:
        self._size, self._pieces = size, dict[int, Piece]()

    def _read(self, token: int) -> Piece:
        """The piece of a token of the vocabulary."""
        raise NotImplementedError

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of ids; bytes that are no character become U+FFFD.

        Args:
            clean_up_tokenization_spaces: without effect: no space is removed.
        """
        text = self._join(token_ids, skip_special_tokens)
        return text[self._prefixed and text.startswith(b" ") :].decode(errors="replace")

    def _join(self, ids: Sequence[int], skip_special: bool = False) -> bytes:
        pieces = [self._pieces.get(token) or self._piece(token) for token in ids]
        return b"".join([piece.text for piece in pieces if not (skip_special and piece.special)])

    def _piece(self, token: int) -> Piece:
        """A token's piece, empty beyond the vocabulary: output layers may have more tokens."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._read(token) if 0 <= token < self._size else Piece(b"", False)
        return piece

    def spelling(self) -> tuple[list[bytes], list[int]]:
        """The bytes of each token, and the ids of special ones."""
        pieces = [self._piece(token) for token in range(self._size)]
        return [piece.text for piece in pieces], [token for token, piece in enumerate(pieces) if piece.special]
