"""Which tokens would give an object a key twice: those of the definition, found by few looks at tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import numpy as np
import pytest
from llguidance import LLTokenizer

from draftree.sampling.constraint import ConstraintState, followed
from draftree.sampling.grammar import Function, Grammars
from draftree.sampling.json_keys import JsonKeys, KeyTokens
from draftree.text.encoding import CALL_TAGS

from .tiny import BYTES_VOCAB, bytes_tokenizer

BYTES, EOS = bytes_tokenizer(), 2
PIECES = [
    *(b"a", b'"', b'a"', b'","', b'": "', b'\\"', b'{"a": 1, "a"', b'"a": 1, "a"', b'a": 1, "a": 2, "a"', b">", b"l>"),
    *(b"<tool_call>", b'>{"a"', b'>{"a": 1, "a', b'>{"a": 1, "b"', b'>{"a": {"a": 1', b'>{"a": "\\"", "b": ">"}'),
    *(b'>{"a": 1, "a"', b'l>{"a": 1, "a"', b'x>{"a": 1, "a"', b'>>{"a": 1, "a"', b'_call>\n{"": 0, "": 1}\n'),
    *(b'<tool_call>{"a": [{"b": 1, "b"', b'>{"a": "> ", "a"', b'x <tool_call>{"a\\n": 1, "a\\u000a"'),
    *(b'>{"a": "a", "b"', b'\xc3>{"\xc3": 1, "\xc3"', b'<tool_call><tool_call>{"a": 1, "a"'),
    *(b'><tool_call>{"a": 1, "a"', b'>>>>>>>>>""""'),
]
"""Of a vocabulary whose tokens reach from free text through the end of a tag far into the call."""


class Pieces:
    """What ``KeyTokens`` reads of llguidance's tokenizer."""

    vocab_size = len(PIECES)

    def decode_bytes(self, tokens: list[int]) -> bytes:
        return b"".join(map(PIECES.__getitem__, tokens))


def repeating(keys: JsonKeys) -> list[int]:
    """Where every token is allowed."""
    every = np.full(-(-len(PIECES) // 32), 0xFFFFFFFF, np.uint32)
    return KeyTokens(cast(LLTokenizer, Pieces())).repeating(keys, every)


def twice(keys: JsonKeys) -> list[int]:
    """By the definition: of each token."""
    return [token for token, piece in enumerate(PIECES) if keys.after(piece) is None]


@pytest.mark.parametrize("held", range(len(CALL_TAGS[0])))
@pytest.mark.parametrize("before", ["", "x", "<tool", "> ", '{"a": 1, '])
def test_in_free_text_they_are_those_that_end_a_tag_and_have_a_key_twice(held: int, before: str) -> None:
    keys = JsonKeys(free=b"").after(f"{before}{CALL_TAGS[0][:held]}".encode())
    assert keys is not None and keys.free is not None
    assert sorted(repeating(keys)) == twice(keys)


def test_some_tokens_do_so_wherever_the_tag_begins() -> None:
    """Control: the test above compares more than empty lists."""
    found = [twice(JsonKeys(free=CALL_TAGS[0][:held].encode())) for held in (0, 5, 9, 10)]
    assert all(found) and len(set(map(tuple, found))) == 4


@pytest.mark.parametrize("text", ["", '{"', '{"a": 1, ', '{"a": 1, "', '{"a": {"b": 1, "b', '{"a": "', "["])
def test_behind_a_tag_they_are_those_of_before(text: str) -> None:
    keys = JsonKeys().after(text.encode())
    assert keys is not None
    assert sorted(set(repeating(keys))) == twice(keys)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the keys after a token are found."""
    looks, after = Counter[str](), JsonKeys.after

    def counted(keys: JsonKeys, more: bytes) -> JsonKeys | None:
        looks["after"] += 1
        return after(keys, more)

    monkeypatch.setattr(JsonKeys, "after", counted)
    return looks


def test_a_mask_of_free_text_looks_at_no_token(looks: Counter[str]) -> None:
    """It looked at each token with two quotation marks: at some hundreds of a published vocabulary."""
    options: dict[str, Any] = {"forced": False, "several": True}
    grammar = Grammars(BYTES, BYTES_VOCAB, {EOS}).calls([Function("f", {"type": "object"})], **options)
    state: ConstraintState = grammar.start()
    for text in ("x", '{"a": 1, "a', "<tool_c"):
        state = followed(state, BYTES.encode(text))
        looks.clear()
        assert state.mask is not None and state.mask.any()
        assert looks["after"] == 0, text
    state = followed(state, BYTES.encode('all>\n{"name": "f", "arguments": {'))
    looks.clear()
    assert state.mask is not None and state.mask.any()
    assert looks["after"] > 0, "where keys come it does"
