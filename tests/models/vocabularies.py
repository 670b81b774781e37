"""Tiny models of four vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from draftree.models.base import LanguageModel
from draftree.models.native.native_model import NativeModel
from draftree.text.encoding import Tokenizer

from ..tiny_gguf import SPECIAL, Vocabulary, byte_level, with_byte_fallback, write

_COUNT = len(byte_level().tokens)
PERMUTED = [*range(len(SPECIAL)), *Random(3).sample(range(len(SPECIAL), _COUNT), _COUNT - len(SPECIAL))]
"""Tokens of ``byte_level`` in another order, the special ones as they are."""


def permuted() -> Vocabulary:
    """The same tokens as ``byte_level``, with other ids."""
    words = byte_level()
    return replace(words, tokens=tuple([words.tokens[token] for token in PERMUTED]))


VOCABULARIES: dict[str, Callable[[], Vocabulary]] = {
    "bytes": byte_level,
    "clashing": lambda: byte_level(shift=True),
    "pieces": with_byte_fallback,
    "tags": lambda: byte_level(extra=("<think>", "</think>", "é <|im_end|>", "🙂🙂")),
}
PAIRS = [(a, b) for a in VOCABULARIES for b in VOCABULARIES if a != b]


def models_in(folder: Path) -> dict[str, LanguageModel]:
    """One of each vocabulary; "same" is "bytes" with the ids of ``permuted``, "wrong" has its weights in that order."""

    def made(name: str, words: Vocabulary, seed: int, order: Sequence[int] | None = None) -> LanguageModel:
        path = folder / f"{name}.gguf"
        return NativeModel(write(path, layers=1, context=256, vocabulary=words, seed=seed, order=order), threads=1)

    found = {name: made(name, words(), seed) for seed, (name, words) in enumerate(VOCABULARIES.items())}
    found["same"] = made("same", permuted(), 0, PERMUTED)
    found["wrong"] = made("wrong", permuted(), 0)
    return found


def tokenizer_of(model: LanguageModel) -> Tokenizer:
    assert model.tokenizer is not None
    return model.tokenizer
