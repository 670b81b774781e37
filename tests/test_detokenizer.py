"""Tokens that come together are decoded by one call, as far as each has whole characters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.text.detokenizer import Detokenizer, Piece, PieceDecoder


class Words(PieceDecoder):
    """Tokens are words, a special token, and bytes of characters."""

    chat_template: str | dict[str, str] | None = None
    special_tokens_map = dict[str, str]()
    words: tuple[bytes, ...] = (
        b"</s>",
        b"the",
        b" a",
        b" ",
        "\u00e9\u20ac".encode(),
        b"\xe2",
        b"\x82",
        b"\xac",
        b"\x82\xac b",
        b"\xef\xbf\xbd",
    )

    def _read(self, token: int) -> Piece:
        return Piece(self.words[token], token == 0)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def get_vocab(self) -> dict[str, int]:
        return {}


class Prefixed(Words):
    """A space in front of a text is not the text's own."""

    words, _prefixed = Words.words[1:], True

    def _read(self, token: int) -> Piece:
        return Piece(self.words[token], False)


def looked_at_alone(words: Words, context: list[int]) -> Detokenizer:
    """Decodes its window for each token: it does not know how they are spelt."""
    stream = Detokenizer(words, context)
    stream._texts = None
    return stream


@pytest.mark.parametrize("words", [Words(10), Prefixed(9)], ids=["words", "prefixed"])
@given(data=st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_tokens_that_come_together_have_the_text_of_each_alone(words: Words, data: st.DataObject) -> None:
    ids = st.lists(st.sampled_from([*range(len(words.words)), 1, 2]), max_size=30)
    context, runs = data.draw(ids), data.draw(st.lists(ids, min_size=1, max_size=4))
    together, alone = Detokenizer(words, context), looked_at_alone(words, context)
    for number, run in enumerate(runs, start=1):
        assert together.push(run, last=number == len(runs)) == alone.push(run, last=number == len(runs))
