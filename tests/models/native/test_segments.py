"""What stands between special tokens is encoded once while it is kept, and has the same ids wherever it stands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gguf.constants import Keys

from draftree.models.native import vocabulary as vocabulary_module
from draftree.models.native.vocabulary import BytePairs, GGUFTokenizer

from ...tiny_gguf import SPECIAL, Vocabulary, byte_level, with_byte_fallback, write
from ..llama.test_llama_tokenizer import TEXTS
from .test_vocabulary import RUNS, read, run_of

PLAIN = [text for text in TEXTS if not any(special in text for special in SPECIAL)]
MARK = SPECIAL[-1]
VOCABULARIES: dict[str, tuple[Vocabulary, str]] = {
    "bpe": (byte_level(extra=["<tool>", "é好  "]), "llama"),
    "qwen2": (replace(byte_level(), pre="qwen2"), "llama"),
    "deepseek-llm": (replace(byte_level(), pre="deepseek-llm"), "llama"),
    "afmoe": (replace(byte_level(), pre="afmoe"), "llama"),
    "pieces": (with_byte_fallback(), "llama"),
    "pieces without a first space": (replace(with_byte_fallback(), flags={Keys.Tokenizer.ADD_PREFIX: False}), "llama"),
    "pieces of phi": (with_byte_fallback(), "phi3"),
}
vocabularies = pytest.mark.parametrize(("words", "architecture"), VOCABULARIES.values(), ids=VOCABULARIES)


def written(folder: Path, words: Vocabulary, architecture: str) -> Path:
    return write(
        folder / "m.gguf", vocabulary=words, hidden=32, heads=1, kv_heads=1, layers=1, architecture=architecture
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words that merges were asked for."""
    asked, tokens = list[str](), BytePairs.tokens

    def noting(pairs: BytePairs, word: str) -> object:
        asked.append(word)
        return tokens(pairs, word)

    monkeypatch.setattr(BytePairs, "tokens", noting)
    return asked


def turns() -> list[str]:
    """A conversation of the texts as it grows."""
    conversation, grown = "", list[str]()
    for number, text in enumerate([*TEXTS, *(run_of(part, 90) for part in RUNS), TEXTS[3]]):
        conversation += f"{SPECIAL[number % len(SPECIAL)]}user\n{text}{MARK}\n"
        grown.append(f"{conversation}{MARK}assistant\n")
    return grown


@vocabularies
def test_kept_ids_are_those_of_a_tokenizer_that_has_read_nothing(
    tmp_path: Path, words: Vocabulary, architecture: str
) -> None:
    path = written(tmp_path, words, architecture)
    own = read(path)
    for text in [*TEXTS, *turns()[::4], turns()[-1], *TEXTS]:
        wanted = read(path).encode(text)
        assert [own.encode(text), own.encode(text)] == [wanted, wanted], text


@vocabularies
def test_a_segment_has_the_same_ids_wherever_it_stands(tmp_path: Path, words: Vocabulary, architecture: str) -> None:
    """Also the space that SentencePiece puts before a text, and white space that ends one."""
    own = read(written(tmp_path, words, architecture))
    (mark,) = own.encode(MARK, add_special_tokens=False)

    def ids(text: str) -> list[int]:
        return own.encode(text, add_special_tokens=False)

    for text in PLAIN:
        behind = text.lstrip(" \t\n\v\f\r") if architecture == "phi3" else text  # its special tokens take that away
        assert ids(f"{text}{MARK}{text}{MARK}{text}") == [*ids(text), mark, *ids(behind), mark, *ids(behind)]


@vocabularies
def test_merges_are_asked_only_for_what_is_new(
    tmp_path: Path, words: Vocabulary, architecture: str, asked: list[str]
) -> None:
    """Each turn split and merged the whole conversation again."""
    path = written(tmp_path, words, architecture)
    own, first, more = read(path), turns()[-1], ["why, then?\n\n  x = 12", "the end"]
    own.encode(first)
    assert asked
    asked.clear()
    own.encode(first)
    assert asked == []
    own.encode(MARK.join([first, *more]))
    new = [*asked]
    asked.clear()
    for text in more:
        read(path).encode(text)
    assert new == asked != []


def test_the_segments_that_are_kept_have_a_bound(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary_module, "_SEGMENTS", 4 * vocabulary_module._SEGMENT)
    own: GGUFTokenizer = read(written(tmp_path, byte_level(), "llama"))
    segments = ["one", "two", "three", "four", "five"]

    def merged(segment: str) -> bool:
        asked.clear()
        own.encode(segment)
        return bool(asked)

    assert [merged(segment) for segment in segments] == [True] * 5
    assert [merged(segment) for segment in ("five", "two", "one", "five")] == [False, False, True, False]
    long = "five " * 80
    assert [merged(long), merged(long), merged("five")] == [True, True, False]
