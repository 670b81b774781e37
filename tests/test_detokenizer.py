"""Tokens that come together are decoded by one call, as far as each has whole characters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

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


_WORD = "▁a"


def with_byte_fallback(strips: bool) -> PreTrainedTokenizerFast:
    """One word, and all bytes: as Llama 2's, which removes the space in front of a text, or as Gemma 3's."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), _WORD, "<unk>"]
    backend = Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


FALLBACKS = {strips: with_byte_fallback(strips) for strips in (True, False)}
WORD = FALLBACKS[True].get_vocab()[_WORD]
BROKEN = [b"", b"\xe5", b"\xe5\x90", b"\xf0\x9f\x98", b"\x97", b"\xe5\xe5\x90\x97", b"\x90" * 9]
RUNS = st.lists(st.tuples(st.text("吗é😀t", max_size=5), st.sampled_from(BROKEN)), min_size=1, max_size=6)


@pytest.mark.parametrize("strips", FALLBACKS)
@given(runs=RUNS)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_bytes_that_are_no_character_take_none_back(strips: bool, runs: list[tuple[str, bytes]]) -> None:
    """Of an answer cut within a character, each byte of all the characters around became U+FFFD."""
    parts = [([*text.encode(), *broken], text + "\ufffd" * len(broken)) for text, broken in [("t", b""), *runs]]
    ids = [token for part, _ in parts for token in (*part, WORD)][:-1]
    wanted = " a".join(text for _, text in parts)
    together, alone = (Detokenizer(FALLBACKS[strips]) for _ in range(2))
    assert "".join(together.push(ids, last=True)) == wanted
    pieces = [alone.push([token], last=count == len(ids)) for count, token in enumerate(ids, start=1)]
    assert "".join(piece for (piece,) in pieces) == wanted


@pytest.mark.parametrize("strips", FALLBACKS)
@pytest.mark.parametrize("text", ["吗吗é😀t", "t", "吗" * 9, "t😀"])
@pytest.mark.parametrize("behind", ["吗é", "t", "😀" * 9])
@pytest.mark.parametrize("lead", [[], [WORD], [WORD] * 20, [*"吗".encode()] * 6])
def test_a_context_that_ends_within_a_character_is_not_shown_again(
    strips: bool, text: str, behind: str, lead: list[int]
) -> None:
    data = (text + behind).encode()
    for cut in range(1, len(data)):
        shown = len(data[:cut].decode(errors="ignore"))
        stream = Detokenizer(FALLBACKS[strips], [*lead, *data[:cut]])
        wanted = f"{text}{behind} a"[shown:]
        assert "".join(stream.push([*data[cut:], WORD], last=True)) == wanted
