"""What a model reads of a text of another vocabulary: its own tokens, and its own template's marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from gguf import TokenType
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftree.models.gguf.gguf_checks import check
from draftree.models.native.vocabulary import read_vocabulary
from draftree.text.encoding import Conversation, Tokenizer, render
from draftree.text.spelling import Spelling
from draftree.text.translation import FirstTokens, TextReader, marks

from ..tiny import VOCAB, bytes_tokenizer, tiny_tokenizer
from ..tiny_gguf import TEMPLATE, Vocabulary, byte_level, with_byte_fallback, write

_LOOP, _ADD = "{% for m in messages %}", "{% endfor %}{% if add_generation_prompt %}"
CHATML = TEMPLATE
HEADERS = (
    "<|begin|>" + _LOOP + "<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}<|eot|>" + _ADD + "<|header|>"
    "assistant<|/header|>\n\n{% endif %}"
)
TURNS = (
    "<|begin|>" + _LOOP + "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<|turn|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<|/turn|>\n"
    + _ADD
    + "<|turn|>model\n{% endif %}"
)
INST = (
    "<|begin|>{% set s = namespace(text='') %}"
    + _LOOP
    + "{% if m.role == 'system' %}{% set s.text = m.content + '\n\n' %}"
    "{% elif m.role == 'user' %}[INST] {{ s.text if loop.last else '' }}{{ m.content }} [/INST]"
    "{% else %}{{ m.content }}<|eot|>{% endif %}{% endfor %}"
)
PLAIN = _LOOP + "{{ m.role }}: {{ m.content }}\n" + _ADD + "assistant: {% endif %}"
LOUD = _LOOP + "{{ m.role }}: {{ m.content | upper }}\n" + _ADD + "assistant: {% endif %}"
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "turns": TURNS, "inst": INST, "plain": PLAIN}
_CONTROL = ("<|begin|>", "<|header|>", "<|/header|>", "<|eot|>", "<|turn|>", "<|/turn|>")
MESSAGES = [("user", "thé 🙂 in"), ("assistant", "or\n\nthe"), ("user", "他 er"), ("assistant", "x"), ("user", "<b>")]


def with_control(words: Vocabulary) -> Vocabulary:
    count = len(_CONTROL)
    scores = (*words.scores, *[0.0] * count) if words.scores else ()
    types = (*words.types, *[TokenType.CONTROL] * count)
    return replace(words, tokens=words.tokens + _CONTROL, types=types, scores=scores)


def tokenizer_of(path: Path, words: Vocabulary, template: str | None) -> Tokenizer:
    found = read_vocabulary(check(write(path, layers=1, vocabulary=words, template=template)))
    assert found is not None
    return found


def reader(own: Tokenizer, target: Tokenizer) -> TextReader:
    return TextReader(own, 10**6, target, 10**6)


def text(found: TextReader, ids: Sequence[int]) -> str:
    return b"".join(found.own.texts[token] for token in ids).decode()


def conversation(*turns: tuple[str, str]) -> Conversation:
    return Conversation([{"role": role, "content": content} for role, content in turns])


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {name: tokenizer_of(folder / name, with_control(byte_level()), each) for name, each in TEMPLATES.items()}


@pytest.mark.parametrize("target", TEMPLATES)
@pytest.mark.parametrize("own", TEMPLATES)
def test_a_conversation_is_read_in_the_models_own_template(
    tokenizers: dict[str, Tokenizer], own: str, target: str
) -> None:
    """Wherever the text is cut into two that are read one after the other, or is forked."""
    found, turns = reader(tokenizers[own], tokenizers[target]), conversation(*MESSAGES)
    wanted = render(tokenizers[own], turns)
    tokens = tokenizers[target].encode(render(tokenizers[target], turns), add_special_tokens=False)
    ids, ends = found.read(b"", tokens, hold=False)
    assert text(found, ids) == wanted
    for cut, (count, left) in enumerate(ends, start=1):
        if cut < len(tokens):
            more, _ = found.read(left, tokens[cut:], hold=False)
            assert text(found, ids[:count] + more) == wanted


@pytest.mark.parametrize("own", ["chatml", "headers", "plain"])
def test_a_system_has_a_turn_of_its_own(tokenizers: dict[str, Tokenizer], own: str) -> None:
    found, turns = reader(tokenizers[own], tokenizers["chatml"]), conversation(("system", "be"), MESSAGES[0])
    ids, _ = found.read(b"", tokenizers["chatml"].encode(render(tokenizers["chatml"], turns)), hold=False)
    assert text(found, ids) == render(tokenizers[own], turns)


def test_marks_of_templates_that_move_or_change_contents(tmp_path: Path) -> None:
    """A system's part in the last question leaves the marks of conversations without; changed contents leave none."""
    words = with_control(byte_level())
    assert marks(tokenizer_of(tmp_path / "a", words, INST))["user>assistant"] == " [/INST]"
    assert ">system" not in marks(tokenizer_of(tmp_path / "a", words, INST))
    assert marks(tokenizer_of(tmp_path / "b", words, LOUD)) == {}
    assert marks(tokenizer_of(tmp_path / "c", words, None)) == {}


def test_control_tokens_that_a_model_lacks_are_left_out(tmp_path: Path) -> None:
    target = tokenizer_of(tmp_path / "a", with_control(byte_level()), None)
    found = reader(tokenizer_of(tmp_path / "b", with_byte_fallback(), None), target)
    ids, ends = found.read(b"", target.encode("a<|turn|>b<|im_end|>"), hold=False)
    assert [found.own.texts[token] for token in ids] == [b"a", b"b", b"<|im_end|>"]
    assert [count for count, _ in ends] == [1, 1, 2, 3]
    firsts = FirstTokens(
        reader(target, found_target := tokenizer_of(tmp_path / "c", with_byte_fallback(), None)), 400, (), frozenset()
    )
    turn, end = (target.get_vocab()[name] for name in ("<|turn|>", "<|im_end|>"))
    assert firsts.of(np.array([turn]))[0] < 0
    assert firsts.of(np.array([end]))[0] == found_target.get_vocab()["<|im_end|>"]


def test_ends_of_answers_stand_for_one_another(tmp_path: Path) -> None:
    own = tokenizer_of(tmp_path / "a", with_control(byte_level()), HEADERS)
    target = tokenizer_of(tmp_path / "b", with_control(with_byte_fallback()), TURNS)
    ours, theirs = own.get_vocab(), target.get_vocab()
    ends = frozenset({theirs["</s>"], theirs["<|/turn|>"]})
    firsts = FirstTokens(reader(own, target), 400, {ours["<|eot|>"]}, ends)
    assert firsts.of(np.array([ours["<|eot|>"]]))[0] == theirs["<|/turn|>"]


def test_what_begins_has_the_models_first_token_once(tmp_path: Path, tokenizers: dict[str, Tokenizer]) -> None:
    """Where its template writes that token, where it is cut, and where the text has no template."""
    own = tokenizer_of(tmp_path / "a", with_byte_fallback(), "<s>" + PLAIN)
    found, turns, target = reader(own, tokenizers["chatml"]), conversation(*MESSAGES), tokenizers["chatml"]
    tokens = target.encode(render(target, turns))
    whole, ends = found.begun(tokens, 1000)
    assert whole == found.read(b"", tokens, hold=False)[0]
    assert [i for i, token in enumerate(whole) if token == 1] == [0]
    cut, cut_ends = found.begun(tokens, 9)
    assert cut == [1, *whole[-9:]]
    assert [count for count, _ in cut_ends] == [
        max(0, count - len(whole) + 10) * (count > len(whole) - 9) for count, _ in ends
    ]
    assert found.begun(target.encode("the"), 9)[0] == [1, *found.read(b"", target.encode("the"), hold=False)[0]]


def unigram() -> Tokenizer:
    """As Gemma's by transformers: SentencePiece, what no piece spells in bytes."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    pieces += [(piece, -float(i)) for i, piece in enumerate(("▁the", "▁t", "he", "▁", "i", "n", "in", "é"), start=1)]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    found: Tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")
    return found


def word_pieces() -> Tokenizer:
    """It cannot write what it reads."""
    words = ["[UNK]", "[SEP]", "the", "in", "##in", "t", "##he", "a", "##b"]
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    found: Tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[SEP]")
    return found


TEXTS = ["the thé 🙂 in", " the", "a\n\nb  他说", "<s>the</s> in", "in"]


@pytest.mark.parametrize("text", TEXTS)
def test_all_bytes_of_a_text_are_spelt(tmp_path: Path, text: str) -> None:
    every: list[Tokenizer] = [bytes_tokenizer(), unigram(), tokenizer_of(tmp_path / "a", with_byte_fallback(), None)]
    for tokenizer in every:
        spelling, data = Spelling(tokenizer, 10**6), text.encode()
        for part in (data, data[1:], data[:-1]):
            found = spelling.spelt(part)
            assert b"".join(spelling.texts[token] for token, _ in found if token is not None) == part
            assert [end for _, end in found][-1] == len(part)


def test_texts_are_spelt_as_the_tokenizer_does_behind_other_text(tmp_path: Path) -> None:
    """The space that some put in front of a text is none of the text's own: "the" is "t" and "he", and not " the"."""
    for tokenizer in (unigram(), tokenizer_of(tmp_path / "a", with_byte_fallback(), None)):
        spelling = Spelling(tokenizer, 10**6)
        behind = tokenizer.encode("a the in", add_special_tokens=False)
        found = [token for token, _ in spelling.spelt(b"a the in")]
        assert found[-3:] == behind[-3:]
        assert b"".join(spelling.texts[token] for token in found if token is not None) == b"a the in"


def test_bytes_that_no_token_spells_are_passed_over() -> None:
    spelling = Spelling(tiny_tokenizer(), 61)
    assert [token is None for token, _ in spelling.spelt("aQ他b".encode())] == [False, *[True] * 4, False]
    found = TextReader(tiny_tokenizer(), 61, bytes_tokenizer(), 288)
    ids, ends = found.read(b"", bytes_tokenizer().encode("他" * 50 + "b"), hold=False)
    assert text(found, ids) == "b"
    assert max(len(left) for _, left in ends) == 0


def test_tokens_beyond_the_output_layer_are_none() -> None:
    """A tokenizer may have more tokens than its model, and an output layer more than its tokenizer."""
    for own, target in ((tiny_tokenizer(), bytes_tokenizer()), (bytes_tokenizer(), tiny_tokenizer())):
        for sizes in ((50, 200), (40, 45), (10**6, 10**6)):
            found = TextReader(own, sizes[0], target, sizes[1])
            ids, ends = found.read(b"", [*target.encode("the that in"), 10**5, 2, 0], hold=False)
            assert max(ids) < sizes[0] and len(ends) == len(target.encode("the that in")) + 3
            firsts = FirstTokens(found, 2 * sizes[0], {2, 10**7}, frozenset({2}))
            assert firsts.of(np.arange(2 * min(sizes[0], len(own.get_vocab())))).max() < sizes[1]


@pytest.mark.parametrize("make", [unigram, word_pieces, tiny_tokenizer, bytes_tokenizer])
def test_any_text_is_read_and_forked(make: object) -> None:
    """Of tokens in any order: what is read up to a token, and what is left, is read on."""
    random, target = Random(1), make()  # type: ignore[operator]
    for own in (unigram(), word_pieces(), tiny_tokenizer(), bytes_tokenizer()):
        found, size = reader(own, target), len(target.get_vocab())
        tokens = [random.randrange(size) for _ in range(60)]
        for hold in (False, True):
            ids, ends = found.read(b"", tokens, hold)
            assert len(ends) == 60 and all(token < len(found.own.texts) for token in ids)
            assert [count for count, _ in ends] == sorted(count for count, _ in ends)
            for cut in (10, 30, 50):
                count, left = ends[cut - 1]
                more, rest = found.read(left, tokens[cut:], hold)
                whole = b"".join(found.own.texts[token] for token in ids) + ends[-1][1]
                again = b"".join(found.own.texts[token] for token in ids[:count] + more) + rest[-1][1]
                assert again == whole


def test_added_tokens_of_transformers_are_read_as_they_are_written() -> None:
    tokenizer = bytes_tokenizer(tags=True)
    spelling = Spelling(tokenizer, 10**6)
    call = tokenizer.get_vocab()["<tool_call>"]
    assert spelling.texts[call] == b"<tool_call>" and call in spelling.special
    tokenizer.add_tokens(["é<|x|>"])
    assert Spelling(tokenizer, 10**6).texts[tokenizer.get_vocab()["é<|x|>"]] == "é<|x|>".encode()


@pytest.mark.parametrize("make", [tiny_tokenizer, bytes_tokenizer, unigram])
def test_tokens_spell_what_they_decode_to(make: Callable[[], Tokenizer]) -> None:
    """SmolLM2 lacks some bytes, as ``tiny_tokenizer`` does: its tokens were spelt as they are written, as "Ġthe"."""
    tokenizer = make()
    for token, spelt in enumerate(Spelling(tokenizer, 10**6).texts):
        assert spelt.decode(errors="replace") == tokenizer.decode([token], clean_up_tokenization_spaces=False)


def test_a_vocabulary_that_lacks_bytes_reads_another() -> None:
    own, target, said = tiny_tokenizer(), bytes_tokenizer(), "the thé\nin an"
    ids, _ = TextReader(own, VOCAB, target, 10**6).read(b"", target.encode(said), hold=False)
    assert ids == own.encode(said)
