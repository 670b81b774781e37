"""Text by a GGUF file's own vocabulary: the ids and texts of llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGUFValueType as Kind
from gguf import TokenType
from gguf.constants import Keys
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from draftree.errors import DraftreeWarning, ModelFileError, NotNativeError, PromptError
from draftree.models.gguf.gguf_checks import check
from draftree.models.llama.library import open_library
from draftree.models.llama.llama_model import LlamaModel
from draftree.models.llama.llama_tokenizer import LlamaTokenizer
from draftree.models.loading import load
from draftree.models.model_files import DEFAULT_MODEL, EMBEDDED, shipped
from draftree.models.native.pre_tokenizers import PRE_TOKENIZERS
from draftree.models.native.vocabulary import GGUFTokenizer, read_vocabulary
from draftree.text.encoding import Tokenizer, encode

from ...tiny_gguf import SPECIAL, Vocabulary, byte_level, with_byte_fallback, write
from ..gguf.retyped import Rewriter, number
from ..llama.test_llama_tokenizer import TEXTS
from ..llama.test_llama_tokenizer import read as read_by_llama

PAIR = os.environ.get("DRAFTREE_PAIR", "")
Pair = tuple[GGUFTokenizer, LlamaTokenizer]

examples = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
ASCII = [*"abcXYZ019 \t\n\r'\".,!?$+<=>^~|`_-/(){}[]#@&*;:%\\\0", "  ", "\r\n", "'s", "'LL", "'t ", "123", "4567"]
BEYOND = [*"é好日¼Ⅷ٣…、。！「½µß\u200d\ufeff\ufffd😀🇩🏳", "가", "ไทย", "प", "𐐀", "Ⴀ", "ʰ", "ƻ"]
WIDE = [*"\u3000\u00a0\u2028\x85"]
MARKED = [*"ÀΩЖǅ", "e\u0301", "\u0301", "हिन्दी"]
SPLITS = list({each[:2]: name for name, each in PRE_TOKENIZERS.items() if not each.of_gemma4}.values())
"""A name for each way of splitting the letters of byte-level BPE."""
parts = [*ASCII, *BEYOND, *WIDE, *MARKED]
plain = st.characters(max_codepoint=0x2FFF, exclude_categories=("Cs", "Cn"))
"""Unicode's newest letters are known to one of the two engines; so few of them are below, and none of these."""


def texts_of(pieces: Sequence[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from([*pieces, *SPECIAL]), max_size=25).map("".join)


def pairs_of(alphabet: Sequence[str], pre: str) -> Vocabulary:
    """A vocabulary that has each two letters of some texts as a token, so that ids show where texts are split."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(False, use_regex=False)
    used = sorted({letter for text in alphabet for word, _ in spell.pre_tokenize_str(text) for letter in word})
    merges = tuple(f"{one} {other}" for one in used for other in used)
    tokens = (*SPECIAL, *letters, *(merge.replace(" ", "") for merge in merges))
    types = [TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(tokens) - len(SPECIAL))
    return Vocabulary("gpt2", tokens, tuple(types), merges, pre=pre)


def read(path: Path) -> GGUFTokenizer:
    tokenizer = read_vocabulary(check(path))
    assert tokenizer is not None
    return tokenizer


def both(path: Path, vocabulary: Vocabulary, architecture: str = "llama") -> Pair:
    write(path, vocabulary=vocabulary, hidden=32, heads=1, kv_heads=1, layers=1, architecture=architecture)
    return read(path), read_by_llama(path)


def ends_by_llama(tokenizer: LlamaTokenizer) -> frozenset[int]:
    library, vocab = open_library(), tokenizer._vocab
    return frozenset(i for i in range(tokenizer._size) if library.vocab_is_eog(vocab, i))


def same(pair: Pair, text: str) -> None:
    own, other = pair
    for add in (True, False):
        assert own.encode(text, add_special_tokens=add) == other.encode(text, add_special_tokens=add)
    ids = own.encode(text)
    for skip in (True, False):
        assert own.decode(ids, skip_special_tokens=skip) == other.decode(ids, skip_special_tokens=skip)


def same_vocabulary(pair: Pair) -> None:
    own, other = pair
    assert isinstance(own, Tokenizer)
    assert own.get_vocab() == other.get_vocab()
    assert own.spelling() == other.spelling()
    assert own.special_tokens_map == other.special_tokens_map
    assert own.chat_template == other.chat_template
    assert own.eos_ids == ends_by_llama(other)


def real() -> Pair:
    (path,) = shipped(EMBEDDED[DEFAULT_MODEL])
    return read(path), read_by_llama(path)


def coder() -> Pair:
    path = Path(PAIR) / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    return read(path), read_by_llama(path)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(real, marks=pytest.mark.real),
        pytest.param(coder, marks=[pytest.mark.pair, pytest.mark.skipif(not PAIR, reason="set DRAFTREE_PAIR")]),
    ],
)
def published(request: pytest.FixtureRequest) -> Pair:
    """The vocabulary of a published model."""
    found: Pair = request.param()
    return found


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return both(tmp_path_factory.mktemp("bpe") / "tiny.gguf", byte_level(extra=["<tool>", "é好  ", "<|unused_1|>"]))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return both(tmp_path_factory.mktemp("spm") / "tiny.gguf", with_byte_fallback())


def test_published_vocabularies_are_llamas(published: Pair) -> None:
    """But for a plain token "</s>", which llama.cpp takes for an end: Qwen's is a tag of HTML, and never one token."""
    own, other = published
    tag = own.get_vocab().get("</s>", -1)
    (texts, special), (their_texts, their_special) = own.spelling(), other.spelling()
    assert (texts, set(special)) == (their_texts, set(their_special) - {tag})
    assert own.eos_ids == ends_by_llama(other) - {tag}
    assert own.get_vocab() == other.get_vocab()
    assert own.special_tokens_map == other.special_tokens_map
    assert own.chat_template == other.chat_template


@pytest.mark.parametrize("text", TEXTS)
def test_texts_have_llamas_ids_in_published_vocabularies(published: Pair, text: str) -> None:
    same(published, text)
    assert published[0].decode(published[0].encode(text)) == text


@given(text=texts_of([*parts, "function", " of", "100", "return ", "the"]) | st.text(plain, max_size=30))
@examples
def test_any_text_has_llamas_ids_in_published_vocabularies(published: Pair, text: str) -> None:
    """SmolLM2 has no tokens for some bytes, control characters among them: texts with these do not come back."""
    same(published, text)
    spelt = {piece for piece in published[0].spelling()[0] if len(piece) == 1}
    if all(bytes([byte]) in spelt for byte in text.encode()):
        assert published[0].decode(published[0].encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_texts_begin_as_by_llama(tmp_path: Path, pre: str) -> None:
    """Where the file does not say whether a token of its own begins one."""
    pair = both(tmp_path / "tiny.gguf", replace(byte_level(), pre=pre, flags={Keys.Tokenizer.ADD_BOS: None}))
    same_vocabulary(pair)
    for text in ("", TEXTS[2], TEXTS[4]):
        same(pair, text)


@pytest.mark.parametrize("pre", SPLITS)
def test_any_text_is_split_as_by_llama(tmp_path: Path, pre: str) -> None:
    pair = both(tmp_path / "tiny.gguf", pairs_of(parts, pre))

    @given(text=texts_of(parts))
    @settings(examples, max_examples=40)
    def check_text(text: str) -> None:
        same(pair, text)
        assert pair[0].decode(pair[0].encode(text, add_special_tokens=False)) == text

    check_text()


def test_pieces_that_are_tokens_are_not_merged(tmp_path: Path) -> None:
    """Llama 3's vocabulary has tokens that its merges do not make."""
    words = byte_level()
    words = replace(words, tokens=(*words.tokens, "xyz"), types=(*words.types, TokenType.NORMAL), pre="llama-bpe")
    pair = both(tmp_path / "tiny.gguf", words)
    assert pair[0].encode("xyz", add_special_tokens=False) == [len(words.tokens) - 1]
    same(pair, "xyz xyzxyz abcxyz")


def test_small_vocabularies_are_llamas(bpe: Pair, pieces: Pair) -> None:
    same_vocabulary(bpe)
    same_vocabulary(pieces)


@given(ids=st.lists(st.integers(-1, 290), max_size=30))
@examples
def test_any_ids_have_llamas_text(bpe: Pair, pieces: Pair, ids: list[int]) -> None:
    """Also where bytes are no characters, and where there are no such ids."""
    for own, other in (bpe, pieces):
        for skip in (True, False):
            assert own.decode(ids, skip_special_tokens=skip) == other.decode(ids, skip_special_tokens=skip)


@given(text=texts_of([*parts, "<tool>", "é好  ", "<unk>", "<s>"]))
@examples
def test_tokens_inside_texts_are_found(bpe: Pair, pieces: Pair, text: str) -> None:
    same(bpe, text)
    same(pieces, text)


@st.composite
def scored(draw: st.DrawFn) -> Vocabulary:
    """SentencePiece of random pieces, each a pair of earlier ones, some with the same score."""
    words = list("▁abñ好")
    for _ in range(draw(st.integers(0, 20))):
        word = draw(st.sampled_from(words)) + draw(st.sampled_from(words))
        if word not in words and len(word) < 8:
            words.append(word)
    base = with_byte_fallback()
    types = (*base.types[:259], *[TokenType.NORMAL] * len(words), *[TokenType.CONTROL] * len(SPECIAL))
    drawn = draw(st.lists(st.integers(0, len(words) // 2), min_size=len(words), max_size=len(words)))
    scores = (*[0.0] * 259, *(-float(score) for score in drawn), *[0.0] * len(SPECIAL))
    return replace(base, tokens=(*base.tokens[:259], *words, *SPECIAL), types=types, scores=scores)


@given(
    words=scored(),
    prefix=st.sampled_from([None, True, False]),
    drawn=st.lists(st.lists(st.sampled_from([*"  aabbñ好\n▁x", SPECIAL[1]]), max_size=20).map("".join), max_size=10),
)
@settings(examples, max_examples=60)
def test_sentence_pieces_are_merged_by_score(
    tmp_path_factory: pytest.TempPathFactory, words: Vocabulary, prefix: bool | None, drawn: list[str]
) -> None:
    flags = {} if prefix is None else {Keys.Tokenizer.ADD_PREFIX: prefix}
    pair = both(tmp_path_factory.mktemp("scored") / "tiny.gguf", replace(words, flags=flags))
    for text in drawn:
        same(pair, text)


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("words", [byte_level(), with_byte_fallback()], ids=["bpe", "pieces"])
def test_texts_begin_and_end_as_the_file_tells(tmp_path: Path, words: Vocabulary, begins: bool, ends: bool) -> None:
    flags = {Keys.Tokenizer.ADD_BOS: begins, Keys.Tokenizer.ADD_EOS: ends}
    pair = both(tmp_path / "tiny.gguf", replace(words, flags=flags))
    for text in ("", "the", " the <|im_end|>"):
        same(pair, text)
    assert len(pair[0].encode("")) == begins + ends


def test_special_tokens_of_phi3_take_spaces_away(tmp_path: Path) -> None:
    words = with_byte_fallback()
    pair = both(tmp_path / "tiny.gguf", words, architecture="phi3")
    for text in ("<|im_start|> \n the", "<s>  the<|im_end|>\n<|endoftext|> the", "</s> the", "<|im_end|> \u00a0 the"):
        same(pair, text)


def test_ends_are_known_by_their_texts(tmp_path: Path) -> None:
    """Files of Gemma have ``<end_of_turn>`` as a plain token."""
    extra = ["<end_of_turn>", "<|eot_id|>", "<|file_sep|>", "<fim_pad>", "<PAD>", "<|repo_name|>", "<EOT>"]
    pair = both(tmp_path / "tiny.gguf", byte_level(extra=extra))
    assert pair[0].eos_ids - ends_by_llama(pair[1]) == set()
    first = len(byte_level().tokens)
    assert {first, first + 1, first + 2, first + 5, first + 6} < pair[0].eos_ids
    same(pair, "a<end_of_turn>b<EOT>")


@pytest.mark.parametrize(
    ("extra", "ends"),
    [
        (["<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"], 2),
        (["<|end|>", "<|calls|>", "<|flush|>"], 2),
        (["<|end|>", "<|return|>"], 2),
        (["<|end|>", "<|call|>"], 2),
        (["<turn|>", "<|tool_response>", "<|turn>"], 2),
        (["<|fim_prefix|>", "<|code_suffix|>", "<｜fim▁end｜>", "<|prefix|>x"], 0),
    ],
)
@pytest.mark.parametrize("kind", [TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.NORMAL])
def test_tokens_have_llamas_types(tmp_path: Path, extra: list[str], ends: int, kind: TokenType) -> None:
    """Of gpt-oss ``<|end|>`` ends a message, no text; of Gemma 4 ``</s>`` is a tag of HTML."""
    words, closed = byte_level(), ["</s>"] * (kind == TokenType.CONTROL)
    types = (*words.types, *[kind] * (len(extra) + len(closed)))
    pair = both(tmp_path / "tiny.gguf", replace(words, tokens=(*words.tokens, *extra, *closed), types=types))
    own, other = pair
    assert own.eos_ids == ends_by_llama(other)
    assert own.spelling() == other.spelling()
    assert len(own.eos_ids & set(range(len(words.tokens), len(words.tokens) + len(extra)))) == ends
    same(pair, "the".join([*extra, "</s>", ""]))


def test_the_first_of_equal_merges_counts(tmp_path: Path) -> None:
    words = byte_level()
    pair = both(tmp_path / "tiny.gguf", replace(words, merges=(*words.merges, "Ġ t", "h e")))
    same(pair, " the there then")


@pytest.mark.parametrize("pre", ["qwen2", "glm4"])
def test_texts_begin_with_no_token_that_the_file_does_not_name(tmp_path: Path, pre: str) -> None:
    """llama.cpp takes token 11 where a file names none, but for GLM's."""
    path = write(tmp_path / "whole.gguf", vocabulary=replace(byte_level(), pre=pre), layers=1)
    Rewriter(path).copy(lacking := tmp_path / "tiny.gguf", Keys.Tokenizer.BOS_ID, number(Kind.UINT32, 10**6))
    own, other = read(lacking), read_by_llama(lacking)
    assert own.special_tokens_map == other.special_tokens_map
    assert ("bos_token" in own.special_tokens_map) == (pre == "qwen2")


def test_a_plain_tag_of_html_is_no_end(tmp_path: Path) -> None:
    words = byte_level()
    words = replace(words, tokens=(*words.tokens, "</s>"), types=(*words.types, TokenType.NORMAL))
    own = read(write(tmp_path / "tiny.gguf", vocabulary=words))
    assert len(words.tokens) - 1 not in own.eos_ids
    assert own.decode(own.encode("a</s>b"), skip_special_tokens=True) == "a</s>b"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (replace(byte_level(), pre="superbpe"), "superbpe"),
        (replace(byte_level(), pre="qwen3-next"), "qwen3-next"),
        (replace(byte_level(), model="bert"), "bert"),
        (replace(byte_level(), model="t5"), "t5"),
        (replace(byte_level(), model="rwkv"), "rwkv"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_vocabularies_are_refused_by_name(tmp_path: Path, words: Vocabulary, named: str) -> None:
    header = check(write(tmp_path / "tiny.gguf", vocabulary=words))
    with pytest.raises(NotNativeError, match=named) as caught:
        read_vocabulary(header)
    assert "\n" not in str(caught.value)


def test_a_file_with_another_vocabulary_runs_on_llama(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", vocabulary=replace(byte_level(), pre="superbpe"))
    with pytest.warns(DraftreeWarning, match="superbpe"):
        assert isinstance(load(str(path)), LlamaModel)


def test_a_model_without_texts_has_no_tokenizer(tmp_path: Path) -> None:
    words = Vocabulary("none", byte_level().tokens, byte_level().types)
    header = check(write(tmp_path / "tiny.gguf", vocabulary=words))
    assert read_vocabulary(header) is None


@pytest.mark.parametrize("merges", [("Ġ t", "x yy"), ("Ġ",), ("Ġ t h", "h e")])
def test_merges_of_no_tokens_are_damage(tmp_path: Path, merges: tuple[str, ...]) -> None:
    header = check(write(tmp_path / "tiny.gguf", vocabulary=replace(byte_level(), merges=merges)))
    with pytest.raises(ModelFileError, match="merges"):
        read_vocabulary(header)


RUNS = ["a", "A", "1", "!", " ", "\n", "好", "A好", "e\u0301", " \n"]


def run_of(part: str, length: int) -> str:
    return f"{(part * length)[:length]}x"


@pytest.mark.parametrize("pre", SPLITS)
def test_a_long_text_without_a_break_is_encoded(tmp_path: Path, pre: str) -> None:
    """Expressions that look at a run again from each of its characters would take minutes."""
    own = read(write(tmp_path / "tiny.gguf", vocabulary=replace(byte_level(), pre=pre)))
    for part in RUNS:
        text = run_of(part, 2**15)
        assert own.decode(own.encode(text)) == text


@pytest.mark.parametrize("part", ["a", " "])
def test_a_megabyte_without_a_break_is_encoded(bpe: Pair, pieces: Pair, part: str) -> None:
    text = run_of(part, 2**20 - 1)
    for own, _ in (bpe, pieces):
        assert own.decode(own.encode(text), skip_special_tokens=True) == text


@pytest.mark.parametrize("part", ["a", " "])
def test_a_longer_run_is_a_prompt_error(bpe: Pair, part: str) -> None:
    """Far beyond it the search of the regular expressions ends in a panic, which is no ``Exception``."""
    with pytest.raises(PromptError, match=f"has {2**20 + 1} characters"):
        encode(bpe[0], part * (2**20 + 1))


def test_surrogates_are_a_prompt_error(bpe: Pair) -> None:
    with pytest.raises(PromptError):
        encode(bpe[0], "a\ud800b")


def test_threads_encode_at_once(published: Pair) -> None:
    texts = [f"{i} the " * 500 + str(i) * 5000 for i in range(8)]
    wanted = [published[0].encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(published[0].encode, texts)) == wanted
