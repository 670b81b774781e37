"""Text by llama.cpp's vocabulary: the ids and texts of transformers' tokenizer of the same file."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Thread, stack_size

import pytest
from gguf import TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draftree.drafters.fitting import share_vocabulary
from draftree.errors import PromptError
from draftree.models.gguf.gguf_checks import check
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.llama import llama_tokenizer
from draftree.models.llama.library import open_library
from draftree.models.llama.llama_tokenizer import LlamaTokenizer, read_tokenizer
from draftree.models.model_files import DEFAULT_MODEL, EMBEDDED, shipped
from draftree.text.detokenizer import Detokenizer
from draftree.text.encoding import Tokenizer, encode, user

from ...tiny import tiny
from ...tiny_gguf import SPECIAL, Vocabulary, byte_level, with_byte_fallback, write

TEXTS = [
    "Hello world",
    "  two  spaces   three    four\t\ttabs\n\n\nlines \n \n x ",
    "12345 3.14159 1,000,000 0x1F  2024-11-24\n\n1. one\n2. two ¼ Ⅷ",
    "def f(x):\n    return x**2 + 1  # why?\n\n\nclass A:\n\tpass\r\n",
    "I'll don't we've you're he'd it's I'm 'LL DON'T",
    "你好，世界！这是一个测试。日本語のテキスト カタカナ",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 flags 🇩🇪",
    "naïve café Ünïcödé ß e\u0301 ﬁ Привет العربية हिन्दी ไทย",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <|im_end|>x",
    "\u00a0nbsp\u2003em\u3000wide\u200bzero\u200dwidth\ufeff\ufffd",
    "https://example.com/a?b=c&d=e#f !!!??? ... --- === ///",
    " ",
    "",
]
CONVERSATIONS = [
    user("Why? 你好 😀"),
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<|im_end|> x "},
        {"role": "assistant", "content": " ok\n"},
        {"role": "user", "content": "  go\n\n1."},
    ],
]
examples = settings(max_examples=200, deadline=None, derandomize=True)
parts = [*"abc the\n\t1\"'.,é好😀▁\u0301\u200d\u3000", "  ", "'s", "ing", "on"]


class Loaded:
    """A file whose vocabulary llama.cpp holds until this ends."""

    def __init__(self, path: Path) -> None:
        library = open_library()
        params = library.model_default_params()
        params.vocab_only = True
        self.pointer = library.model_load_from_file(str(path).encode(), params)
        assert self.pointer, library.complaints
        weakref.finalize(self, library.model_free, self.pointer)


def read(path: Path) -> LlamaTokenizer:
    library, loaded = open_library(), Loaded(path)
    found = read_tokenizer(library, library.model_get_vocab(loaded.pointer), check(path).chat_template, loaded)
    assert found is not None
    return found


def of_transformers(path: Path) -> PreTrainedTokenizerBase:
    """Its tokenizer of the same file; that it splits digits, as "smollm" does, transformers leaves out."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if check(path).metadata.text("tokenizer.ggml.model") == "gpt2":
        digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    return tokenizer


Pair = tuple[LlamaTokenizer, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LlamaTokenizer]:
    """Writes a model and reads its tokenizer."""
    folder = tmp_path_factory.mktemp("made")
    return lambda name="tiny.gguf", **options: read(write(folder / name, **options))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = write(tmp_path_factory.mktemp("bpe") / "tiny.gguf")
    return read(path), of_transformers(path)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = write(tmp_path_factory.mktemp("spm") / "tiny.gguf", vocabulary=with_byte_fallback())
    return read(path), of_transformers(path)


@pytest.fixture(scope="module")
def smollm2() -> Pair:
    (path,) = shipped(EMBEDDED[DEFAULT_MODEL])
    return read(path), of_transformers(path)


def test_it_is_a_tokenizer(bpe: Pair) -> None:
    assert isinstance(bpe[0], Tokenizer)


def same(pair: Pair, text: str) -> None:
    own, other = pair
    ids = own.encode(text)
    assert ids == other.encode(text)
    same_text(pair, ids)


def same_text(pair: Pair, ids: list[int]) -> None:
    own, other = pair
    for skip in (False, True):
        wanted = other.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert own.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False) == wanted


def same_conversation(pair: Pair, conversation: list[dict[str, str]]) -> None:
    own, other = pair
    wanted = other.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert encode(own, conversation) == encode(other, conversation) == wanted


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts_are_transformers(bpe: Pair, text: str) -> None:
    same(bpe, text)


@pytest.mark.real
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts_of_the_default_model_are_transformers(smollm2: Pair, text: str) -> None:
    same(smollm2, text)


@given(drawn=st.lists(st.sampled_from(parts), max_size=20))
@examples
def test_any_text_has_transformers_ids_and_comes_back(bpe: Pair, drawn: list[str]) -> None:
    text = "".join(drawn)
    same(bpe, text)
    assert bpe[0].decode(bpe[0].encode(text)) == text


@pytest.mark.parametrize("kind", ["bpe", "pieces"])
@given(drawn=st.lists(st.sampled_from([*parts, *SPECIAL, *SPECIAL]), max_size=30))
@examples
def test_a_text_that_is_cut_has_the_ids_of_the_whole(bpe: Pair, pieces: Pair, kind: str, drawn: list[str]) -> None:
    """A conversation of 8,000 messages took 4.8 s: llama.cpp's time is quadratic in special tokens."""
    own, text = {"bpe": bpe, "pieces": pieces}[kind][0], "".join(drawn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_tokenizer, "_TOGETHER", 2)
        found = [own.encode(text), own.encode(text, add_special_tokens=False)]
        patch.setattr(llama_tokenizer, "_TOGETHER", 10**9)
        assert found == [own.encode(text), own.encode(text, add_special_tokens=False)]


@pytest.mark.real
@given(drawn=st.lists(st.sampled_from([*parts, *SPECIAL, "function", " of", "100"]), max_size=20))
@examples
def test_any_text_has_transformers_ids_in_the_default_model(smollm2: Pair, drawn: list[str]) -> None:
    same(smollm2, "".join(drawn))


@given(ids=st.lists(st.integers(0, len(byte_level().tokens) - 1), max_size=30))
@examples
def test_any_ids_have_transformers_text(bpe: Pair, ids: list[int]) -> None:
    """Also where bytes are no characters."""
    same_text(bpe, ids)


@pytest.mark.real
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
@examples
def test_any_ids_have_transformers_text_in_the_default_model(smollm2: Pair, ids: list[int]) -> None:
    same_text(smollm2, ids)


@given(drawn=st.lists(st.sampled_from(parts), max_size=20))
@examples
def test_sentence_pieces_are_transformers_and_come_back(pieces: Pair, drawn: list[str]) -> None:
    """transformers puts no space in front of a text that begins with one, nor of what follows a special token."""
    text = "".join(drawn).replace("▁", "_").lstrip()
    same(pieces, text)
    assert pieces[0].decode(pieces[0].encode(text), skip_special_tokens=True) == text


@pytest.mark.parametrize("text", ["  x", " ", "\n x", " the"])
def test_sentence_pieces_keep_the_space_that_begins_a_text(pieces: Pair, text: str) -> None:
    assert pieces[0].decode(pieces[0].encode(text), skip_special_tokens=True) == text


def test_special_tokens_begin_a_text_but_no_conversation(pieces: Pair) -> None:
    """The template has them, where there are any."""
    own = pieces[0]
    assert own.encode("the")[0] == 1
    assert own.encode("")[0] == 1
    assert encode(own, user("the"))[0] == own.get_vocab()["<|im_start|>"]


@pytest.mark.parametrize("kind", ["bpe", "pieces"])
@given(data=st.data())
@settings(examples, max_examples=100)
def test_streamed_pieces_add_up(bpe: Pair, pieces: Pair, kind: str, data: st.DataObject) -> None:
    """What a stream gives out is the text's and ends with whole characters."""
    own = {"bpe": bpe, "pieces": pieces}[kind][0]
    text, context = ("".join(data.draw(st.lists(st.sampled_from(parts), max_size=20))) for _ in range(2))
    text = text.replace("▁", "_").lstrip()
    ids = own.encode(text)
    stream = Detokenizer(own, context=own.encode(context))
    given_out = stream.push(ids, last=True)
    assert "".join(given_out).lstrip() == text
    assert "\ufffd" not in "".join(given_out)


@pytest.mark.parametrize("kind", ["bpe", "pieces"])
@given(ids=st.lists(st.integers(0, 273), max_size=30))
@settings(examples, max_examples=100)
def test_streamed_pieces_of_any_ids_add_up(bpe: Pair, pieces: Pair, kind: str, ids: list[int]) -> None:
    own = {"bpe": bpe, "pieces": pieces}[kind][0]
    stream = Detokenizer(own)
    found = "".join(stream.push(ids, last=True))
    assert found == own.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_conversations_are_transformers(bpe: Pair, conversation: list[dict[str, str]]) -> None:
    same_conversation(bpe, conversation)


@pytest.mark.real
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_conversations_of_the_default_model_are_transformers(smollm2: Pair, conversation: list[dict[str, str]]) -> None:
    same_conversation(smollm2, conversation)


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
    "  {{ m.content | trim }}{{ eos_token }}\n    {%- break %}\n{% endfor %}",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ pad_token }}{{ add_generation_prompt }}",
    "{% set ns = namespace(n=0) %}{% generation %}{{ ns.n }}{{ strftime_now('%') }}{% endgeneration %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_templates_may_use(tmp_path: Path, template: str) -> None:
    path = write(tmp_path / "tiny.gguf", template=template)
    same_conversation((read(path), of_transformers(path)), [{"role": "skip", "content": "x"}, *user(' <é> "好" ')])


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "chat template"),
        ("", "chat template"),
        ("{{ raise_exception('Only one message!') }}", "Only one message!"),
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{{ messages[0].content.nothing.more }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_templates_that_fail_are_prompt_errors(
    made: Callable[..., LlamaTokenizer], template: str | None, why: str
) -> None:
    with pytest.raises(PromptError, match=why):
        encode(made(template=template), user("Hello"))


def test_the_vocabulary_is_transformers(bpe: Pair, pieces: Pair) -> None:
    for own, other in (bpe, pieces):
        assert own.get_vocab() == other.get_vocab()


@pytest.mark.real
def test_the_vocabulary_of_the_default_model_is_transformers(smollm2: Pair) -> None:
    own, other = smollm2
    assert own.get_vocab() == other.get_vocab()


def padded(words: Vocabulary, size: int) -> Vocabulary:
    more = tuple(f"[PAD{i}]" for i in range(len(words.tokens), len(words.tokens) + size))
    return replace(words, tokens=words.tokens + more, types=words.types + (TokenType.UNUSED,) * size)


def model(tokenizer: LlamaTokenizer, name: str) -> HFModel:
    return HFModel(tiny(), tokenizer, name=name)


def test_vocabularies_that_are_padded_otherwise_are_the_same(made: Callable[..., LlamaTokenizer]) -> None:
    """The draft models of a family have output layers of other sizes: Qwen2.5 pads to 151936 and 152064 tokens."""
    one, other = (made(f"{n}.gguf", vocabulary=padded(byte_level(), n)) for n in (1, 5))
    assert share_vocabulary(model(one, "one"), model(other, "other"))
    assert len(one.get_vocab()) == len(byte_level().tokens)


def test_one_other_token_makes_another_vocabulary(made: Callable[..., LlamaTokenizer]) -> None:
    one, other = made("one.gguf"), made("other.gguf", vocabulary=byte_level(shift=True))
    assert not share_vocabulary(model(one, "one"), model(other, "other"))


def test_tokens_that_the_user_has_defined_are_found_as_they_are(made: Callable[..., LlamaTokenizer]) -> None:
    own = made(vocabulary=byte_level(extra=["<tool>", "é好  "]))
    first = len(byte_level().tokens)
    ids = own.encode("a<tool>é好  b")
    assert ids[1:3] == [first, first + 1]
    assert own.decode(ids, skip_special_tokens=True) == "a<tool>é好  b"


def test_ids_beyond_the_vocabulary_have_no_text(bpe: Pair) -> None:
    """Output layers are padded: such an id ended the process in llama.cpp."""
    own = bpe[0]
    assert own.decode([own.encode("x")[0], 10**6, -1, len(own.get_vocab())]) == "x"


def test_a_token_of_many_bytes_is_read_whole(made: Callable[..., LlamaTokenizer]) -> None:
    long = "word" * 100
    own = made(vocabulary=byte_level(extra=[long]))
    ids = own.encode(long)
    assert ids == [len(byte_level().tokens)]
    assert own.decode(ids) == long


@pytest.mark.parametrize("pre", ["default", "tekken", "gpt-4o"])
@pytest.mark.parametrize("character", ["a", "A", "1", "!", "好", "\n"])
def test_a_long_run_of_a_character_is_encoded(made: Callable[..., LlamaTokenizer], pre: str, character: str) -> None:
    """llama.cpp's regular expressions recur for each character: 22,000 of them in 8 MB ended the process."""
    own, text = made(vocabulary=replace(byte_level(), pre=pre)), character * 60_000
    assert own.decode(own.encode(text)) == text


def test_a_run_that_no_stack_holds_is_a_prompt_error(bpe: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_tokenizer, "_LONGEST", 10_000)
    bpe[0].encode("the " * 10_000)
    for prompt in ("the " * 10 + "a" * 10_001, user("a" * 10_001)):
        with pytest.raises(PromptError, match=r"^prompt has 100\d\d characters"):
            encode(bpe[0], prompt)


def test_a_stack_that_cannot_be_had_is_a_prompt_error(bpe: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", start)
    before = stack_size()
    with pytest.raises(PromptError, match="of stack"):
        bpe[0].encode("a" * 10_000)
    assert stack_size() == before


def test_threads_encode_at_once(bpe: Pair) -> None:
    texts = [f"{i} the " * 500 + str(i) * 5000 for i in range(8)]
    wanted = [bpe[0].encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(bpe[0].encode, texts)) == wanted


def test_a_model_without_texts_has_no_tokenizer(tmp_path: Path) -> None:
    """Its vocabulary's functions end the process."""
    library = open_library()
    words = Vocabulary("none", byte_level().tokens, byte_level().types)
    loaded = Loaded(write(tmp_path / "tiny.gguf", vocabulary=words))
    assert read_tokenizer(library, library.model_get_vocab(loaded.pointer), None) is None


def test_the_vocabulary_lives_as_long_as_the_tokenizer(tmp_path: Path) -> None:
    own = read(write(tmp_path / "tiny.gguf"))
    kept = weakref.ref(own._owner)
    assert kept() is not None
    assert own.decode(own.encode("the")) == "the"
    del own
    assert kept() is None
