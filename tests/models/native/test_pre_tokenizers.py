"""Texts of many scripts by each pre-tokenizer: the ids of llama.cpp, over merges that cross whatever it splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from gguf import TokenType
from gguf.constants import Keys

from draftree.models.llama.llama_tokenizer import LlamaTokenizer
from draftree.models.native.pre_tokenizers import PRE_TOKENIZERS
from draftree.models.native.vocabulary import GGUFTokenizer

from ...tiny_gguf import SPECIAL, Vocabulary, with_byte_fallback, write
from .test_vocabulary import SPLITS, both, read
from .texts_of_scripts import merged, pieces, texts_of_scripts

ALL, SOME = 2000, 200
FAMILIES = (
    *("qwen2", "qwen35", "llama-bpe", "tekken", "gpt-4o", "dbrx", "refact", "granite-docling", "seed-coder"),
    *("hunyuan-dense", "kimi-k2"),
)
"""A name for each way of splitting that the models people run most have; others split as one of these."""


@cache
def learnt() -> Vocabulary:
    return merged(texts_of_scripts(ALL), 4000)


@cache
def learnt_pieces() -> tuple[Vocabulary, Vocabulary]:
    return pieces(texts_of_scripts(ALL), 3000)


def same_ids(own: GGUFTokenizer, other: LlamaTokenizer, texts: Sequence[str], lossy: Sequence[str] = ()) -> None:
    """They have the same ids, and each text comes back, but for those with one of the ``lossy`` parts."""
    for text in texts:
        ids = own.encode(text, add_special_tokens=False)
        assert ids == other.encode(text, add_special_tokens=False), text
        assert own.decode(ids) == text or any(part in text for part in lossy)


def test_the_families_split_in_ways_of_their_own() -> None:
    assert len({PRE_TOKENIZERS[name][:2] for name in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize("pre", [name for name, each in PRE_TOKENIZERS.items() if not each.of_gemma4])
def test_texts_of_many_scripts_have_llamas_ids(tmp_path: Path, pre: str) -> None:
    own, other = both(tmp_path / "tiny.gguf", replace(learnt(), pre=pre))
    same_ids(own, other, texts_of_scripts(ALL if pre in FAMILIES else SOME))


def test_each_way_of_splitting_has_ids_of_its_own(tmp_path: Path) -> None:
    """So the test above fails for a name that has the row of another."""
    found = {}
    for pre in SPLITS:
        own = read(write(tmp_path / "tiny.gguf", vocabulary=replace(learnt(), pre=pre), layers=1))
        found[pre] = [own.encode(text) for text in texts_of_scripts(SOME)]
    assert not [(one, other) for one, other in combinations(found, 2) if found[one] == found[other]]


@pytest.mark.parametrize("prefix", [True, False])
def test_texts_of_many_scripts_have_llamas_pieces(tmp_path: Path, prefix: bool) -> None:
    """A text with "▁" comes back with a space there; with a prefix each piece behind a special token has one too."""
    words, _ = learnt_pieces()
    own, other = both(tmp_path / "tiny.gguf", replace(words, flags={Keys.Tokenizer.ADD_PREFIX: prefix}))
    same_ids(own, other, texts_of_scripts(ALL), ("▁", *SPECIAL * prefix))


@pytest.mark.parametrize("flags", [{}, {Keys.Tokenizer.ADD_BOS: False}])
def test_texts_of_many_scripts_have_llamas_ids_of_gemma4(tmp_path: Path, flags: dict[str, bool]) -> None:
    """Whatever the file says, a text begins with a token of its own."""
    _, words = learnt_pieces()
    own, other = both(tmp_path / "tiny.gguf", replace(words, flags=flags))
    same_ids(own, other, texts_of_scripts(ALL), "▁")
    assert own.encode("a") == other.encode("a") == [1, *own.encode("a", add_special_tokens=False)]


def test_lines_of_gemma4_are_whole(tmp_path: Path) -> None:
    """Four line breaks are a token that no merges make; five are as many tokens."""
    words, lines = with_byte_fallback(), ("\n", "\n" * 4)
    types = (*words.types, *[TokenType.NORMAL] * len(lines))
    words = replace(
        words, model="gemma4", tokens=(*words.tokens, *lines), types=types, scores=(), merges=("▁ t", "h e")
    )
    own, other = both(tmp_path / "tiny.gguf", words)
    same_ids(own, other, ["\n" * count for count in range(1, 7)] + ["a\n\n\n\n the \n\n"])
    assert [len(own.encode("\n" * count, add_special_tokens=False)) for count in (4, 5)] == [1, 5]
