"""Tokens to text: by their pieces, and as they come, up to a stop string."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import filterfalse
from typing import Any, NamedTuple, cast

from .encoding import Tokenizer
from .harmony import NO_TEXT

_WINDOW = 16
"""Tokens that are decoded together at most, once their text is complete; twice as many until then."""
_INCOMPLETE = "\ufffd"
_CUT = 3
"""Most bytes of an incomplete character."""
_KEPT = 1 << 14
"""Most tokens whose bytes are kept."""

_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""Bytes that stand for themselves as letters of byte-level BPE; the others are the letters from 256 on."""
BYTE_LETTERS = [chr(b) if b in _PRINTED else chr(256 + b - sum(p < b for p in _PRINTED)) for b in range(256)]
_LETTERS = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}
_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_level(token: str) -> bytes | None:
    """The bytes of a token of byte-level BPE; None: it has letters that stand for none."""
    try:
        return bytes(map(_LETTERS.__getitem__, token))
    except KeyError:
        return None


def fallback(token: str) -> bytes | None:
    """The byte of a token of byte fallback, such as "<0xE2>"; None: it is none."""
    return None if (match := _FALLBACK.fullmatch(token)) is None else bytes.fromhex(match[1])


class Piece(NamedTuple):
    """A token's text in bytes."""

    text: bytes
    special: bool


class PieceDecoder(ABC):
    """Decodes tokens by their pieces, each of which is read once.

    Args:
        size: of the vocabulary.
    """

    _prefixed = False
    """SentencePiece puts a space in front of a text, which is not the text's own."""

    def __init__(self, size: int) -> None:
        self._size, self._pieces = size, dict[int, Piece]()
        self._bytes, self._plain = dict[int, bytes](), dict[int, bytes]()  # of pieces; special ones show none

    @abstractmethod
    def _read(self, token: int) -> Piece:
        """The piece of a token of the vocabulary."""

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of ids; bytes that are no character become U+FFFD.

        Args:
            clean_up_tokenization_spaces: without effect: no space is removed.
        """
        for token in filterfalse(self._pieces.__contains__, token_ids):
            self.piece(token)
        text = b"".join(map((self._plain if skip_special_tokens else self._bytes).__getitem__, token_ids))
        return text[self._prefixed and text.startswith(b" ") :].decode(errors="replace")

    def texts(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> list[str] | None:
        """Each token's part of a text that goes on with them; None: one begins or ends inside a character."""
        for token in filterfalse(self._pieces.__contains__, token_ids):
            self.piece(token)
        try:
            return [
                *map(bytes.decode, map((self._plain if skip_special_tokens else self._bytes).__getitem__, token_ids))
            ]
        except UnicodeDecodeError:
            return None

    def piece(self, token: int) -> Piece:
        """A token's piece, empty beyond the vocabulary: output layers may have more tokens."""
        if token not in self._pieces:
            piece = self._read(token) if 0 <= token < self._size else Piece(b"", False)
            piece = Piece(piece.text, piece.special or piece.text in NO_TEXT)
            self._bytes[token], self._plain[token] = piece.text, b"" if piece.special else piece.text
            self._pieces[token] = piece
        return self._pieces[token]

    def spelling(self) -> tuple[list[bytes], list[int]]:
        """The bytes of each token, and the ids of special ones."""
        pieces = [self.piece(token) for token in range(self._size)]
        return [piece.text for piece in pieces], [token for token, piece in enumerate(pieces) if piece.special]


def token_speller(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """A function that returns the bytes of a token, special ones included; they may begin or end inside a character."""
    if isinstance(tokenizer, PieceDecoder):
        return lambda token: tokenizer.piece(token).text
    written = {token: text for text, token in tokenizer.get_vocab().items()}

    @lru_cache(_KEPT)
    def spelled(token: int) -> bytes:
        once, twice = (str(tokenizer.decode([token] * n, clean_up_tokenization_spaces=False)) for n in (1, 2))
        if _INCOMPLETE in once and token in written:
            if (spelt := fallback(written[token]) or byte_level(written[token])) is not None:
                return spelt
        return twice[len(once) :].encode()  # decoders may remove the space in front of a text

    return spelled


def _spelled(tokenizer: Tokenizer, tokens: Sequence[int]) -> bytes:
    return b"".join(map(token_speller(tokenizer), tokens))


class StopString:
    """Finds a string in a text that comes in pieces, and looks at each character a bounded number of times.

    Knuth, Morris & Pratt, *Fast Pattern Matching in Strings*, SIAM J. Comput. 6(2), 1977.

    Attributes:
        begun: characters of it that the text so far ends with, at most.
    """

    def __init__(self, text: str) -> None:
        self.text, self.begun = text, 0
        self._borders = [0]  # of each beginning, as far as one has come: the longest shorter one that it ends with

    def find(self, piece: str, *, counts: bool = True) -> int:
        """How far into the next piece the string ends for the first time; 0: not in it.

        Args:
            counts: what ends in this piece counts; what begins in it does in any case.
        """
        for passed, character in enumerate(piece, start=1):
            self.begun = self._after(self.begun, character)
            if self.begun > len(self._borders):
                self._borders.append(self._after(self._borders[-1], self.text[self.begun - 1]))
            if self.begun == len(self.text):
                if counts:
                    return passed
                self.begun = self._borders[-1]
        return 0

    def _after(self, begun: int, character: str) -> int:
        """What of the string a text ends with that ended with so much of it, once it has a character more."""
        while begun and self.text[begun] != character:
            begun = self._borders[begun - 1]
        return begun + (self.text[begun] == character)


class NoText:
    """The text stream of a model without a tokenizer: no text at all."""

    stopped = ""

    def push(self, tokens: Sequence[int | None], last: bool) -> list[str]:
        return [""] * len(tokens)


class Detokenizer:
    """Incremental detokenising with stop strings.

    Holds text back while its last character is incomplete (a token may end inside a UTF-8 sequence) and while its end
    could be the beginning of a stop string.

    Attributes:
        stopped: the stop string that has appeared; the text given out ends before it, or with it.

    Args:
        context: the tokens before the first one.
        stop: strings that end the text.
        min_tokens: stop strings count that end after so many tokens.
        include_stop: the text ends with the stop string.
        skip_special_tokens: special tokens give no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self.stopped = ""
        # Cleaning up would change text that has been given out.
        decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        self._decode = cast(Callable[[list[int]], str], decode)
        self._texts = (
            partial(tokenizer.texts, skip_special_tokens=skip_special_tokens)
            if isinstance(tokenizer, PieceDecoder) and not stop
            else None
        )
        self._stop, self._min_tokens, self._include_stop = [StopString(s) for s in stop], min_tokens, include_stop
        self._passed = 0  # tokens
        # Decoding is not a concatenation (leading spaces), so each piece is the difference of two decodings.
        self._window = self._tail(list(context[-_WINDOW:]))
        self._shown = self._decode(self._window)  # of the window's text
        self._whole = len(self._window)  # tokens up to the last one at which the text was whole
        # What comes next may belong to a character that has begun, unless the one that stands for others was written.
        ends = self._shown.endswith(_INCOMPLETE)
        self._incomplete = ends and not _spelled(tokenizer, self._window).endswith(_INCOMPLETE.encode())
        if self._incomplete:
            self._begin_inside(context)
        self._held = ""

    def _begin_inside(self, context: Sequence[int]) -> None:
        """Begin behind a context whose last character is incomplete."""
        self._whole = 0
        for cut in range(1, _CUT + 1):
            window = self._tail(list(context[-_WINDOW - cut : -cut]))
            if not (text := self._decode(window)).endswith(_INCOMPLETE):
                self._window, self._whole, self._shown = [*window, *context[-cut:]], len(window), text
                break
        self._shown = self._text().rstrip(_INCOMPLETE)

    def _text(self) -> str:
        """The window's text. Where its end would spoil what was whole, the window begins behind that.

        Tokenizers with byte fallback decode a run of bytes as one: where a character of it is incomplete, each byte
        becomes U+FFFD, those of the characters in front too.
        """
        text = self._decode(self._window)
        if self._whole and text.endswith(_INCOMPLETE) and not text.startswith(self._shown):
            del self._window[: self._whole]
            self._whole, self._shown = 0, ""
            text = self._decode(self._window)
        return text

    def _tail(self, tokens: list[int]) -> list[int]:
        """The shortest end, of 4 tokens or more, that begins with a whole character; ``_WINDOW`` where there is none.

        Tokenizers with byte fallback spell rare characters in bytes and decode a run of bytes as one: cut inside a
        character, all of the run would be lost.
        """
        for count in range(4, len(tokens) + 1):
            if _INCOMPLETE not in self._decode(tokens[-count:]):
                return tokens[-count:]
        return tokens[-_WINDOW:]

    def _shorten(self, cut: int) -> None:
        """Keep a long window's end, of which ``cut`` characters are held back."""
        self._window = self._tail(self._window)
        text = self._decode(self._window)
        self._shown = text[: max(len(text) - cut, 0)]

    def push(self, tokens: Sequence[int | None], last: bool) -> list[str]:
        """Text that became final with each token, up to the one with which the text has stopped.

        Args:
            tokens: None: one without text, which ends the text.
            last: all that is held back comes with the last of them.
        """
        # where the window shows nothing, a space in front of the next token may not be the text's own
        if self._texts and self._shown and not (self._incomplete or last):
            ids: Any = tokens  # None comes last
            texts = self._texts(ids)
            if texts is not None and _INCOMPLETE not in (text := "".join(texts)):
                self._window += ids
                self._shown += text
                if (size := len(self._window)) > _WINDOW:
                    self._shorten(0)
                    size = len(self._window)
                self._whole = size
                return texts
        given, final = list[str](), len(tokens) if last else 0
        for count, token in enumerate(tokens, start=1):
            if token is not None:
                self._window.append(token)
                self._passed += 1
            text, before = self._text(), len(self._held)
            cut = 0 if count == final else min(len(text) - len(text.rstrip(_INCOMPLETE)), _CUT)
            if not cut or len(self._window) > 2 * _WINDOW:  # so many bytes are no character
                self._held += text[len(self._shown) : len(text) - cut]
                self._shown = text[: len(text) - cut]
                if len(self._window) > _WINDOW:
                    self._shorten(cut)
                self._whole = 0 if cut else len(self._window)
            self._incomplete = cut > 0
            ends, begun, new = list[tuple[int, int, str]](), 0, self._held[before:]
            for stop in self._stop:
                if end := stop.find(new, counts=self._passed > self._min_tokens):
                    ends.append((before + end - len(stop.text), len(stop.text), stop.text))
                begun = max(begun, stop.begun)
            cut = len(self._held) - (0 if count == final else begun)
            if ends:
                at, length, self.stopped = min(ends)
                cut = at + length if self._include_stop else at
            given.append(self._held[:cut])
            self._held = self._held[cut:]
            if self.stopped:
                break
        return given


TextStream = Detokenizer | NoText
"""Turns tokens into text as they come."""
