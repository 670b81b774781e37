"""Tokens to text as they come, and prompts to tokens, with a byte-level tokenizer made on the spot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from draftree.config import SamplingParams
from draftree.engine.input_processor import text_stream
from draftree.errors import ChatTemplateError, InputError, PromptError
from draftree.text.detokenizer import Detokenizer, NoText, Piece, PieceDecoder, StopString
from draftree.text.encoding import Conversation, Prompt, call_text, encode, user

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Every byte is a token, so that any text round-trips and characters beyond ASCII take several; a few pairs too."""
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("t", "h"), ("th", "e"), ("Ċ", "Ċ")]
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    backend = Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **SPECIAL)


def spaced() -> PreTrainedTokenizerFast:
    """A tokenizer that drops the space before the first word when it decodes, as SentencePiece does."""
    backend = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "▁the": 2, "▁abc": 3}))
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


TOKENIZER = tokenizer()
EOS = 1


def ids_of(text: str) -> list[int]:
    return encode(TOKENIZER, text)


def pieces(ids: Sequence[int], stop: Sequence[str] = (), context: Sequence[int] = ()) -> list[str]:
    """What a stream gives out for each token until it stops: the same whether they come one by one or together."""
    stream, given = Detokenizer(TOKENIZER, context, stop=stop), list[str]()
    for i, token in enumerate(ids):
        given += stream.push([token], last=i == len(ids) - 1)
        if stream.stopped:
            break
    together = Detokenizer(TOKENIZER, context, stop=stop)
    assert together.push(ids, last=True) == given
    assert together.stopped == stream.stopped
    return given


examples = settings(max_examples=150, deadline=None, derandomize=True)
words = st.text(st.sampled_from("abc the\né€😀.'\ufffd"), max_size=30)
stops = st.lists(st.text(st.sampled_from("abc e😀"), min_size=1, max_size=3), max_size=3)


@given(text=words)
@examples
def test_the_pieces_of_a_text_add_up_to_it(text: str) -> None:
    assert "".join(pieces(TOKENIZER(text)["input_ids"])) == text


@given(ids=st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30))
@examples
def test_the_pieces_of_any_tokens_add_up_to_their_decoding(ids: list[int]) -> None:
    """Also where they are no valid UTF-8."""
    assert "".join(pieces(ids)) == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(context=words, text=words)
@examples
def test_the_pieces_behind_a_context_add_up_without_it(context: str, text: str) -> None:
    before, whole = TOKENIZER(context)["input_ids"], TOKENIZER(text)["input_ids"]
    assert "".join(pieces(whole, context=before)) == text


def test_words_keep_the_spaces_between_them_where_decoding_drops_the_first() -> None:
    the, abc = 2, 3
    stream = Detokenizer(spaced())
    assert stream.push([the, abc] * 4, last=False) == ["the", *[" abc", " the"] * 3, " abc"]


def test_the_first_word_behind_a_context_keeps_its_space() -> None:
    the, abc = 2, 3
    assert Detokenizer(spaced(), context=[abc] * 6).push([the], last=False) == [" the"]


def test_a_word_behind_a_special_token_keeps_its_space() -> None:
    the, abc = 2, 3
    stream = Detokenizer(spaced())
    assert stream.push([abc, EOS, the], last=False) == ["abc", "", " the"]


@pytest.mark.parametrize("character", ["é", "€", "😀"])
def test_a_character_of_several_tokens_is_held_back_until_it_is_complete(character: str) -> None:
    ids = ids_of("x" + character + "y")
    assert len(ids) > 3
    assert pieces(ids) == ["x", *[""] * (len(ids) - 3), character, "y"]


def test_the_rest_of_a_character_that_never_ends_is_given_out_at_the_end() -> None:
    assert pieces(ids_of("x😀")[:-1]) == ["x", "", "", "\ufffd"]


def test_tokens_are_given_out_at_once_without_stop_strings() -> None:
    assert pieces(ids_of("abc the")) == ["abc", " ", "the"]


def test_special_tokens_give_no_text() -> None:
    assert pieces([EOS, *ids_of("the"), 0, *ids_of("the"), EOS]) == ["", "the", "", "the", ""]


def test_a_special_token_between_the_bytes_of_a_character_does_not_spoil_it() -> None:
    first, second = ids_of("é")
    assert pieces([first, EOS, second]) == ["", "", "é"]


@pytest.mark.parametrize("stop", ["d", "bcd", "abcd", "cd the"])
def test_a_stop_string_is_found_across_token_borders(stop: str) -> None:
    text = "the abcd the"
    assert "".join(pieces(ids_of(text), [stop])) == text[: text.index(stop)]


def test_a_stream_stops_with_the_token_that_completes_the_stop_string() -> None:
    assert len(pieces(ids_of("x.y.z"), [".y"])) == 3


def test_a_text_without_the_stop_string_never_stops() -> None:
    stream = Detokenizer(TOKENIZER, stop=("xyz",))
    stream.push(ids_of("xy xz yz"), last=False)
    assert not stream.stopped


def test_text_is_held_back_while_a_stop_string_may_begin() -> None:
    assert pieces(ids_of("x.y.y!"), [".y!"]) == ["x", "", "", ".y", "", ""]


def test_no_more_is_held_back_than_may_belong_to_a_stop_string() -> None:
    assert pieces(ids_of("xx.z"), ["x.y"]) == ["", "x", "", "x.z"]


def test_text_that_was_held_back_is_given_out_at_the_end() -> None:
    assert pieces(ids_of("x.y"), [".y!"]) == ["x", "", ".y"]


def test_text_after_a_stop_string_in_the_same_token_is_dropped() -> None:
    (the,) = ids_of("the")
    assert pieces([the, the], ["h"]) == ["t"]


@pytest.mark.parametrize("stop", [["c", "b"], ["b", "c"], ["bc", "c", "b"]])
def test_of_several_stop_strings_in_a_token_the_first_ends_the_text(stop: list[str]) -> None:
    (abc,) = ids_of("abc")
    assert pieces([abc], stop) == ["a"]


def test_a_stop_string_that_repeats_itself_is_found_behind_its_own_beginning() -> None:
    assert pieces(ids_of("x...!y"), ["..!"]) == ["x", "", "", ".", ""]


def test_a_stop_string_in_the_last_token_ends_the_text() -> None:
    stream = Detokenizer(TOKENIZER, stop=("x",))
    assert (stream.push(ids_of("x"), last=True), stream.stopped) == ([""], "x")


def test_a_stop_string_that_the_context_began_does_not_count() -> None:
    assert pieces(ids_of("y!"), [".y"], context=ids_of("x.")) == ["y", "!"]


def test_a_stop_string_may_hold_characters_of_several_tokens() -> None:
    assert "".join(pieces(ids_of("a😀b"), ["😀"])) == "a"


@given(text=words, stop=stops)
@examples
def test_a_stream_gives_what_comes_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    ends = [at for s in stop if (at := text.find(s)) >= 0]
    assert "".join(pieces(TOKENIZER(text)["input_ids"], stop)) == text[: min(ends, default=len(text))]


@given(
    text=words, stop=st.lists(st.text(st.sampled_from("abc e😀"), min_size=1, max_size=3), max_size=3), data=st.data()
)
@examples
def test_stop_strings_that_end_behind_the_least_number_of_tokens_count(
    text: str, stop: list[str], data: st.DataObject
) -> None:
    """One that began before it was never found, and the answer went on."""
    ids = TOKENIZER(text)["input_ids"]
    least = data.draw(st.integers(0, len(ids)))
    whole = [str(TOKENIZER.decode(ids[:count], skip_special_tokens=True)) for count in range(1, len(ids) + 1)]
    shown = [text.rstrip("\ufffd") for text in whole]
    passed = len(shown[least - 1]) if least else 0
    ends = [(at, at - len(s)) for s in stop for at in range(passed + 1, len(text) + 1) if text[:at].endswith(s)]
    stream = Detokenizer(TOKENIZER, stop=stop, min_tokens=least)
    found = "".join(stream.push(ids, last=True))
    if not ends:
        assert found == text and not stream.stopped
        return
    token = next(count for count, known in enumerate(shown) if len(known) >= min(ends)[0])
    assert found == text[: min(begin for end, begin in ends if end <= len(shown[token]))]


def test_bytes_that_are_no_characters_are_not_decoded_again_and_again() -> None:
    """Text was held back until its last character was complete, and decoded from there for every token."""
    decoded = 0

    class Bytes(PieceDecoder):
        chat_template: str | dict[str, str] | None = None
        special_tokens_map = dict[str, str]()

        def _read(self, token: int) -> Piece:
            return Piece(bytes([token]), False)

        def decode(self, token_ids: Sequence[int], **options: bool) -> str:
            nonlocal decoded
            decoded += len(token_ids)
            return super().decode(token_ids, **options)

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return list(text.encode())

        def get_vocab(self) -> dict[str, int]:
            return {}

    ids = [*b"\x80\xe2\x82" * 700, *"a€😀".encode(), *b"\xe2" * 1000, *"€b".encode()]
    stream = Detokenizer(tokenizer := Bytes(256))
    given, passed = "".join(stream.push(ids, last=False)), decoded
    assert given == tokenizer.decode(ids)
    assert passed <= 100 * len(ids)


def test_a_long_stop_string_is_compared_once_with_each_character() -> None:
    """A stop string of 200,000 characters was cut and compared at each of its lengths, for every token."""
    compared = 0

    class Counted(str):
        def __getitem__(self, at: object) -> str:
            nonlocal compared
            compared += 1
            return super().__getitem__(at)  # type: ignore[index]

    for piece in ("a", "ab" * 20, "a" * 400):
        stop, text = StopString(Counted((piece * 50)[:2000] + "c")), piece * 100
        compared, pieces = 0, [text[at : at + 7] for at in range(0, len(text), 7)]
        assert not any(map(stop.find, pieces)) and stop.begun > 0
        assert len(text) <= compared <= 6 * len(text)


def test_a_model_without_a_tokenizer_streams_no_text() -> None:
    stream = text_stream(None, SamplingParams())
    assert isinstance(stream, NoText)
    assert (stream.push([5], last=False), stream.push([6, 7], last=True), stream.stopped) == ([""], ["", ""], "")


def test_a_model_with_a_tokenizer_streams_its_text_behind_the_context_up_to_a_stop_string() -> None:
    the, abc = 2, 3
    stream = text_stream(spaced(), SamplingParams(stop=("bc",)), [abc])
    assert stream.push([the, abc], last=False) == [" the", " a"]
    assert stream.stopped


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(InputError, match=r"stop strings \['x', 'y'\]"):
        text_stream(None, SamplingParams(stop=("x", "y")))


def test_token_ids_are_taken_as_they_are_with_or_without_a_tokenizer() -> None:
    ids = (5, 3, 5)
    assert encode(TOKENIZER, ids) == encode(None, ids) == [5, 3, 5]


def test_encoding_ids_makes_a_list_of_its_own() -> None:
    ids = [5, 3]
    encode(None, ids).append(7)
    assert ids == [5, 3]


def test_text_is_encoded_as_it_is() -> None:
    assert TOKENIZER.decode(encode(TOKENIZER, "<user>the abc")) == "<user>the abc"


def test_a_conversation_goes_through_the_chat_template() -> None:
    conversation = [{"role": "system", "content": "be"}, {"role": "user", "content": "the"}]
    assert TOKENIZER.decode(encode(TOKENIZER, conversation)) == "<system>be<user>the>"


def test_user_makes_a_conversation_of_one_question() -> None:
    assert TOKENIZER.decode(encode(TOKENIZER, user("the"))) == "<user>the>"


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused(prompt: Prompt) -> None:
    with pytest.raises(PromptError, match="empty"):
        encode(TOKENIZER, prompt)


@pytest.mark.parametrize("content", ["", "  \n"])
def test_a_blank_chat_message_is_refused(content: str) -> None:
    with pytest.raises(PromptError, match="empty"):
        encode(TOKENIZER, user(content))


@pytest.mark.parametrize("prompt", ["the", user("the")])
def test_text_without_a_tokenizer_is_refused(prompt: Prompt) -> None:
    with pytest.raises(PromptError, match="no tokenizer"):
        encode(None, prompt)


def test_a_conversation_without_a_chat_template_is_refused() -> None:
    with pytest.raises(ChatTemplateError):
        encode(tokenizer(template=None), user("the"))


def test_a_character_that_begins_in_the_prompt_is_completed() -> None:
    first, second = ids_of("é")
    assert pieces([second], context=[first]) == ["é"]


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "x"}, {"role": "user", "content": None}])
def test_a_message_without_role_or_content_is_refused(message: dict[str, str]) -> None:
    with pytest.raises(PromptError, match="'content'"):
        encode(spaced(), [message])


def test_text_of_a_tokenizer_with_byte_fallback_survives_cutting_the_window() -> None:
    """Cut inside a character, a run of byte tokens decoded to nothing but replacement characters."""
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    backend = Tokenizer(
        BPE({t: i for i, t in enumerate(["<unk>", *bytes_])}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    text = "这是一个很长的中文句子吗, తెలుగు"
    ids = [1 + b for b in text.encode()]
    stream = Detokenizer(tokenizer)
    assert "".join(stream.push(ids, last=True)) == text


HERMES = """{%- if tools %}<system>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif -%}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}>{% endif %}"""
OTHER = HERMES.replace('"arguments"', '"parameters"')
"""A template that knows tools, in a format of its own."""
DAMAGED = "{% if tools %}{{ messages[9].x.y }}{% endif %}" + TEMPLATE
TOOL = {"type": "function", "function": {"name": "f", "description": "finds", "parameters": {"type": "object"}}}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "wait",
    "tool_calls": [{"function": {"name": "f", "arguments": {"é": 1}}}],
}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "the"},
    CALLED,
    {"role": "tool", "content": "one"},
    {"role": "tool", "content": "two"},
]


def rendered(template: str, conversation: Conversation) -> str:
    text = TOKENIZER.decode(encode(tokenizer(template), conversation))
    assert isinstance(text, str)
    return text


def test_a_template_that_knows_tools_gets_them() -> None:
    text = rendered(HERMES, Conversation(HISTORY, [TOOL]))
    assert text.startswith('<system>{"type": "function"') and "finds" in text
    assert text.endswith(f"<user>the<assistant>wait{call_text('f', {'é': 1})}<tool>one<tool>two>")
    assert "<system>" not in rendered(HERMES, Conversation(HISTORY))


@pytest.mark.parametrize("template", [TEMPLATE, OTHER, DAMAGED], ids=["none", "other", "damaged"])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "be brief"}]])
def test_a_template_that_does_not_gets_them_as_text(template: str, system: list[dict[str, str]]) -> None:
    text = rendered(template, Conversation([*system, *HISTORY], [TOOL]))
    assert text.startswith("<system>be brief\n\n# Tools" if system else "<system># Tools")
    assert '"description": "finds"' in text and '{"name": FUNCTION, "arguments": {ARGUMENT: VALUE}}' in text
    assert text.endswith(
        f"<user>the<assistant>wait\n{call_text('f', {'é': 1})}<user><tool_response>\none\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response>>"
    )
    assert "# Tools" not in rendered(template, Conversation([*system, *HISTORY]))


@pytest.mark.parametrize("template", [TEMPLATE, HERMES])
def test_a_conversation_without_calls_is_as_ever(template: str) -> None:
    assert rendered(template, Conversation(user("the"))) == "<user>the>"


def test_a_result_may_be_empty_and_a_call_may_come_without_text() -> None:
    call = {**CALLED, "content": ""}
    found = rendered(TEMPLATE, Conversation([*user("the"), call, {"role": "tool", "content": ""}]))
    assert found.endswith(f"<assistant>{call_text('f', {'é': 1})}<user><tool_response>\n\n</tool_response>>")


def test_a_message_is_gone_on_with() -> None:
    begun = Conversation([*user("the"), {"role": "assistant", "content": "abc "}], continued=True)
    assert rendered(TEMPLATE, begun) == "<user>the<assistant>abc "
    with pytest.raises(PromptError, match="conversation"):
        encode(tokenizer("{% for m in messages %}{{ m.role }}{% endfor %}"), begun)


def test_tools_that_are_not_text_are_refused() -> None:
    with pytest.raises(PromptError, match="UTF-8"):
        encode(TOKENIZER, Conversation(user("the"), [{"function": {"name": "\udcff"}}]))
    with pytest.raises(PromptError, match="empty"):
        encode(TOKENIZER, Conversation([]))
    with pytest.raises(PromptError, match="no tokenizer"):
        encode(None, Conversation(user("the")))


_ARGUMENTS = "{{ call.function.arguments | tojson }}"
RAW, PICKY, LOOPING = (
    HERMES.replace(_ARGUMENTS, each)
    for each in (
        "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
        + _ARGUMENTS
        + "{% endif %}",
        "{% if call.function.arguments is mapping %}" + _ARGUMENTS + "{% endif %}",
        """{{ "{" }}{% for key in call.function.arguments.keys() %}"{{ key }}": 1{% endfor %}{{ "}" }}""",
    )
)


@pytest.mark.parametrize("template", [TEMPLATE, HERMES, OTHER, RAW, PICKY, LOOPING])
@pytest.mark.parametrize("arguments", ['{"é": ', "[]", "null", '"x"'])
def test_arguments_that_are_text_are_in_every_prompt(template: str, arguments: str) -> None:
    """A template that goes through the keys of arguments failed, and one that asks for a mapping left them out."""
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    text = rendered(template, Conversation([*HISTORY, called, {"role": "tool", "content": "cut"}], [TOOL]))
    written = arguments if template == RAW else json.dumps(arguments, ensure_ascii=False)
    assert f'{{"name": "f", "arguments": {written}}}' in text and call_text("f", {"é": 1}) in text
