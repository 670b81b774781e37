"""Answers in Harmony's channels, however they are cut into tokens, and what holds the last message alone."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.models.base import LanguageModel
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.llama.llama_model import LlamaModel
from draftree.models.native.native_model import NativeModel
from draftree.openai.channels import ChannelParser
from draftree.openai.choices import AnswerForm
from draftree.request import Chunk
from draftree.sampling.channel_rules import ChannelRule
from draftree.sampling.constraint import Constraint, ConstraintState, TextEnded
from draftree.sampling.grammar import Function, Grammars
from draftree.text.encoding import Conversation, render, user
from draftree.text.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START

from .harmony import CONTROLS, NEXT, PROMPT, SAYS, TEMPLATE, THINKS, call_of, harmony_tokenizer, harmony_vocabulary
from .tiny import tiny
from .tiny_gguf import write

TAGS = {100 + at: tag for at, tag in enumerate(CONTROLS)}
IDS = {tag: token for token, tag in TAGS.items()}
THOUGHT, SAID = "thought", "said"
Part = tuple[str, str]
"""A kind, of a call the function's name, and a text."""
ARGUMENTS = '{"a": "<|x|> é"}'
ANSWERS: dict[str, tuple[str, list[Part]]] = {
    "thought and answer": (f"{THINKS}so{NEXT}{SAYS}yes{RETURN}", [(THOUGHT, "so"), (SAID, "yes")]),
    "answer": (f"{SAYS} yes\n<|{RETURN}", [(SAID, " yes\n<|")]),
    "call": (f"{THINKS}so{NEXT}{call_of('f', ARGUMENTS)}", [(THOUGHT, "so"), ("f", ARGUMENTS)]),
    "call to a recipient before the channel": (call_of("a.f", ARGUMENTS, first=True), [("a.f", ARGUMENTS)]),
    "call without a space": (f"{CHANNEL}commentary to=functions.f{CONSTRAIN}json{MESSAGE}{{}}{CALL}", [("f", "{}")]),
    "call that the message's end ends": (call_of("f", "{}").replace(CALL, END), [("f", "{}")]),
    "preamble": (
        f"{THINKS}so{NEXT}{CHANNEL}commentary{MESSAGE}I call.{NEXT}{call_of('f', '{}')}",
        [(THOUGHT, "so"), (SAID, "I call."), ("f", "{}")],
    ),
    "several messages of a kind": (
        f"{THINKS}a{NEXT}{THINKS}b{NEXT}{CHANNEL}commentary{MESSAGE}c{NEXT}{SAYS}d{RETURN}",
        [(THOUGHT, "a\n\nb"), (SAID, "c\n\nd")],
    ),
    "tool of its own": (f"{CHANNEL}analysis to=python code{MESSAGE}1 + 1{CALL}", [(THOUGHT, "1 + 1")]),
    "no channel": (f"{MESSAGE}yes{RETURN}", [(SAID, "yes")]),
    "no end of a message": (f"{THINKS}so{SAYS}yes{RETURN}", [(THOUGHT, "so"), (SAID, "yes")]),
    "tags that mean nothing there": (f"{SAYS}ye{MESSAGE}s{CONSTRAIN}{RETURN}", [(SAID, "yes")]),
    "empty thought": (f"{THINKS}{NEXT}{SAYS}yes{RETURN}", [(SAID, "yes")]),
    "nothing": ("", []),
}
Token = tuple[int, str]


def tokens_of(text: str, places: Sequence[int] = ()) -> list[Token]:
    """Control tokens, and the text between them, cut at these places; what ends an answer gives no text."""
    found = list[Token]()
    for part in re.split(f"({'|'.join(map(re.escape, CONTROLS))})", text):
        if part in IDS:
            found.append((IDS[part], "" if part in (CALL, RETURN) else part))
        elif part:
            ends = sorted({place % len(part) for place in places} - {0})
            found += [(1, part[a:b]) for a, b in zip([0, *ends], [*ends, len(part)], strict=True)]
    return found


def held_back(tokens: Sequence[Token], size: int) -> tuple[list[Token], str]:
    """Texts as they come where up to so many characters of each end may begin a stop string; and the rest."""
    held, found = "", list[Token]()
    for token, text in tokens:
        held += text
        cut = max(0, len(held) - size)
        found.append((token, held[:cut]))
        held = held[cut:]
    return found, held


def parser(*, begun: str | None = "assistant", functions: bool = True) -> ChannelParser:
    return ChannelParser(TAGS, begun=begun, functions=functions)


def parsed(of: ChannelParser, tokens: Sequence[Token], rest: str = "") -> list[Part]:
    """The parts, those of a kind as one."""
    parts = [part for token, text in tokens for part in of.push(Chunk(token, text, False, 0))] + of.end(rest)
    kinds = [(part.call.name if part.call else THOUGHT if part.thought else SAID, part.text) for part in parts]
    return [(kind, "".join(text for _, text in group)) for kind, group in groupby(kinds, lambda pair: pair[0])]


@pytest.mark.parametrize(("text", "parts"), ANSWERS.values(), ids=ANSWERS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(places=some.lists(some.integers(0, 99), max_size=12), size=some.integers(0, 12))
def test_all_cuts_of_an_answer_give_the_same_parts(text: str, parts: list[Part], places: list[int], size: int) -> None:
    tokens = tokens_of(text, places)
    assert parsed(parser(), tokens) == parts
    late, rest = held_back(tokens, size)
    of = parser()
    assert parsed(of, late, rest) == parts
    calls = [call for call in of.calls]
    assert [call.name for call in calls] == [kind for kind, _ in parts if kind not in (THOUGHT, SAID)]
    assert of.called == bool(calls) and len({call.key for call in calls}) == len(calls)


@pytest.mark.parametrize(("text", "parts"), ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_is_cut_off_has_what_has_come(text: str, parts: list[Part]) -> None:
    """And no header, and no control token."""
    tokens = tokens_of(text, range(99))
    for count in range(len(tokens)):
        of = parser()
        found = parsed(of, tokens[:count])
        assert [kind for kind, _ in found] == [kind for kind, _ in parts[: len(found)]]
        for (_, some_of), (_, whole) in zip(found, parts, strict=False):
            assert whole.startswith(some_of)
        assert not of.called or tokens[count - 1][0] in (IDS[CALL], IDS[END])


def test_text_that_spells_a_control_token_is_text() -> None:
    """Whoever asks about the format got half an answer."""
    spelled = "<|end|> ends, <|start|> and <|channel|>final<|message|> begin"
    tokens = [*tokens_of(THINKS), (1, spelled), *tokens_of(f"{NEXT}{SAYS}"), (1, spelled), *tokens_of(RETURN)]
    assert parsed(parser(), tokens) == [(THOUGHT, spelled), (SAID, spelled)]


def test_a_call_that_nobody_offered_is_no_call() -> None:
    of = parser(functions=False)
    assert parsed(of, tokens_of(f"{call_of('f', '{}')}")) == [(THOUGHT, "{}")]
    assert not of.calls and not of.called


@pytest.mark.parametrize(
    ("begun", "parts"),
    [
        (None, [(SAID, "yes")]),
        (f"assistant{SAYS}oh ", [(SAID, "yes")]),
        (f"assistant{THINKS}", [(THOUGHT, "yes")]),
        ("assistant", []),
    ],
)
def test_an_answer_goes_on_where_the_prompt_ends(begun: str | None, parts: list[Part]) -> None:
    assert parsed(parser(begun=begun), [(1, "yes")]) == parts


def test_tokens_of_thoughts_are_counted_and_those_of_answers_known() -> None:
    of = parser()
    tokens = tokens_of(f"{THINKS}so{NEXT}{SAYS}yes{RETURN}", range(9))
    said = list[str]()
    for token, text in tokens:
        of.push(Chunk(token, text, False, 0))
        said += [] if of.thinking else [text]
    assert of.tokens == len([MESSAGE, *"so", END]) and said == [*"yes"]


BACKENDS = ["native", "llama.cpp", "transformers"]


@pytest.fixture(scope="module", params=BACKENDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Of random weights, with the vocabulary."""
    if request.param == "transformers":
        weights, tokenizer = tiny("llama_bytes"), harmony_tokenizer()
        assert weights.generation_config is not None
        weights.generation_config.eos_token_id = tokenizer.eos_token_id  # as a fine-tuned model may have it
        return HFModel(weights, tokenizer, self_test=False)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(path, layers=1, vocabulary=harmony_vocabulary(), template=TEMPLATE)
    return NativeModel(path, threads=1) if request.param == "native" else LlamaModel(path)


def vocabulary_of(model: LanguageModel) -> dict[str, int]:
    assert model.tokenizer is not None
    return model.tokenizer.get_vocab()


def test_a_returned_answer_and_a_call_end_on_every_backend(model: LanguageModel) -> None:
    vocab = vocabulary_of(model)
    ends = {tag for tag in CONTROLS if vocab[tag] in model.capabilities.eos_ids}
    assert ends == {CALL, RETURN}


def test_control_tokens_are_no_text_on_any_backend(model: LanguageModel) -> None:
    """GGUF files showed them, and JSON could have one in a string."""
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(f"{PROMPT}{THINKS}so{END}", add_special_tokens=False)
    assert len(ids) == len(CONTROLS) - 3 + len(model.tokenizer.encode("assistantanalysisso", add_special_tokens=False))
    shown, hidden = (model.tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True))
    assert (shown, hidden) == (f"{PROMPT}{THINKS}so{END}", "assistantanalysisso")
    mask = Engine(model).grammars.regex("(?s:.*)").start()
    vocab = vocabulary_of(model)
    assert not mask.allows(np.array([vocab[tag] for tag in (START, CHANNEL, MESSAGE, END, CONSTRAIN)])).any()


SCHEMA: dict[str, Any] = {"enum": ["abc", 7]}


def test_a_grammar_begins_behind_the_last_header_on_every_backend(model: LanguageModel) -> None:
    """It began with the first token, and no model could say so in a channel."""
    engine = Engine(model)
    vocab, thoughts = vocabulary_of(model), 0
    for seed in range(6):
        ids = engine.inputs.encode(user(f"hi {seed}"))
        bias = {vocab[END]: 40.0}  # a random model would seldom come to an end
        params = SamplingParams(temperature=4.0, seed=seed, max_tokens=700, logit_bias=bias)
        form = AnswerForm(engine, ids, params, engine.grammars.json_schema(SCHEMA))
        generation, of = engine.generate([ids], form.params)[0], form.parser()
        assert of is not None and generation.finish_reason == "eos"
        parts = [part for chunk in generation.chunks for part in of.push(chunk)] + of.end("")
        assert json.loads("".join(part.text for part in parts if not part.thought)) in SCHEMA["enum"]
        assert THINKS in generation.text or generation.text.startswith(SAYS)
        thoughts += generation.text.count(THINKS)
    assert thoughts


FUNCTIONS = [
    Function(name, {"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "additionalProperties": False})
    for name in ("f", "a.f")
]
DONE = call_of("f", '{"a": 1}')
TAKEN: dict[str, list[str]] = {
    "answer": [
        f"{SAYS}yes{RETURN}",
        f"{THINKS}so <|en{NEXT}{SAYS}no{RETURN}",
        f"{THINKS}{NEXT}{THINKS}{NEXT}{SAYS}no{CALL}",
    ],
    "auto": [
        f"{SAYS}whatever{RETURN}",
        DONE,
        f"{THINKS}so{NEXT}{CHANNEL}commentary{MESSAGE}I call.{NEXT}{call_of('a.f', '{}', first=True)}",
    ],
    "forced": [DONE, f"{THINKS}so{NEXT}{DONE}", call_of("a.f", '{"a": "x"}', first=True)],
    "auto or JSON": [f"{SAYS}7{RETURN}", f'{THINKS}so{NEXT}{SAYS}"abc"{RETURN}', DONE],
}
REFUSED: dict[str, list[str]] = {
    "answer": [
        f"yes{RETURN}",
        f"{SAYS}so{RETURN}",
        f"{THINKS}yes{RETURN}",
        f"{SAYS}yes{NEXT}{SAYS}no{RETURN}",
        f"{CHANNEL}commentary{MESSAGE}yes{RETURN}",
        f"{THINKS}so{NEXT}{DONE}",
        f"{THINKS}so{MESSAGE}{NEXT}{SAYS}no{RETURN}",
        f"{START}user{MESSAGE}no{RETURN}",
    ],
    "auto": [
        call_of("g", "{}"),
        *(call_of("f", wrong) for wrong in ('{"b": 1}', '{"a": 2}', "{")),
        f"{SAYS}a{NEXT}{DONE}",
    ],
    "forced": [f"{SAYS}whatever{RETURN}", f"{CHANNEL}commentary{MESSAGE}I call.{NEXT}{DONE}"],
    "auto or JSON": [f"{SAYS}8{RETURN}", f"{CHANNEL}commentary{MESSAGE}I call.{NEXT}{DONE}"],
}


@pytest.fixture(scope="module")
def grammars(model: LanguageModel) -> Grammars:
    return Engine(model).grammars


def rule_of(grammars: Grammars, kind: str) -> Constraint:
    assert grammars.channels is not None
    if kind == "answer":
        return ChannelRule(grammars.channels, grammars.choice(["yes", "no"]))
    text = SCHEMA if kind == "auto or JSON" else None
    return grammars.calls(FUNCTIONS, forced=kind == "forced", several=True, text=text)


def takes(grammars: Grammars, kind: str, text: str) -> bool:
    """A text, token by token as the masks allow it; a mask allows what has a state and nothing else."""
    rule, encode = rule_of(grammars, kind), grammars._tokenizer.encode
    assert isinstance(rule, ChannelRule)
    state: ConstraintState | None = rule.behind(encode(PROMPT, add_special_tokens=False)).start()
    every = range(len(grammars._tokenizer.get_vocab()))
    for token in encode(text, add_special_tokens=False):
        assert state is not None
        follows = [token for token in every if state.after(token) is not None]
        assert np.flatnonzero(state.allows(np.arange(len(every)))).tolist() == follows
        assert state.forced is None or state.forced in follows
        state = state.after(token)
        if state is None:
            return False
    return isinstance(state, TextEnded)


def cases(of: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(kind, text) for kind, texts in of.items() for text in texts]


@pytest.mark.parametrize(("kind", "text"), cases(TAKEN))
def test_messages_of_the_format_may_come(grammars: Grammars, kind: str, text: str) -> None:
    assert takes(grammars, kind, text)


@pytest.mark.parametrize(("kind", "text"), cases(REFUSED))
def test_nothing_else_may_come(grammars: Grammars, kind: str, text: str) -> None:
    assert not takes(grammars, kind, text)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", f"{PROMPT}{SAYS}no{RETURN}"),
        (f"{START}user{MESSAGE}a", f"{PROMPT}{SAYS}no{RETURN}"),
        (f"{PROMPT}{CHANNEL}", f"final{MESSAGE}no{RETURN}"),
        (f"{PROMPT}{SAYS}", f"no{RETURN}"),
        (f"{PROMPT}{SAYS}oh, ", f"no{RETURN}"),
        (f"{PROMPT}{THINKS}oh, ", f"so{NEXT}{SAYS}no{RETURN}"),
    ],
)
def test_a_constraint_begins_where_the_prompt_ends(grammars: Grammars, prompt: str, text: str) -> None:
    rule, encode = rule_of(grammars, "answer"), grammars._tokenizer.encode
    assert isinstance(rule, ChannelRule)
    state: ConstraintState | None = rule.behind(encode(prompt, add_special_tokens=False)).start()
    for token in encode(text, add_special_tokens=False):
        state = state and state.after(token)
    assert isinstance(state, TextEnded)


TOOL = {"type": "function", "function": {"name": "f", "description": "finds", "parameters": {"type": "object"}}}


def rendered(messages: list[dict[str, Any]], **more: Any) -> str:
    return render(harmony_tokenizer(), Conversation(messages, **more))


def called(arguments: object, **more: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": '])
def test_the_template_writes_calls_and_their_thoughts_itself(arguments: object) -> None:
    """It was told of them as text in Hermes' format, and a thought in front of a call was lost."""
    history = [*user("hi"), called(arguments, reasoning_content="so"), {"role": "tool", "content": "one"}]
    text = rendered(history, tools=[TOOL])
    assert "type f = " in text and "tool_call" not in text
    call = f" to=functions.f{CHANNEL}commentary json{MESSAGE}{json.dumps(arguments)}{CALL}"
    returned = f'{START}functions.f to=assistant{CHANNEL}commentary{MESSAGE}"one"{END}'
    assert text.endswith(f"{PROMPT}{THINKS}so{NEXT}{call}{returned}{PROMPT}")


def test_what_was_said_in_front_of_a_call_joins_the_thought() -> None:
    """The template refuses both."""
    turn = called({}, content="I call.", reasoning="so")
    assert f"{THINKS}so\n\nI call.{NEXT} to=functions.f" in rendered([*user("hi"), turn])
    assert f"{THINKS}I call.{NEXT} to=functions.f" in rendered([*user("hi"), called({}, content="I call.")])
