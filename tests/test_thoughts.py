"""Thoughts in an answer's text, however it is cut into tokens, and the constraint that begins behind them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from draftree.openai.reasoning import ThoughtParser
from draftree.openai.tools import CallParser
from draftree.request import Chunk
from draftree.sampling.constraint import ConstraintState, TextEnded
from draftree.sampling.grammar import Grammars
from draftree.sampling.thoughts import AfterThought, ThoughtTokens
from draftree.text.encoding import THINK_TAGS, call_text

from .scripted import PLAIN, thinking_tokenizer
from .tiny import BYTES_VOCAB

EOS = 2
OPENS, CLOSES = THINK_TAGS
CALL = call_text("f", {"a": 1})


def parsed(parser: ThoughtParser, pieces: list[str], rest: str = "") -> tuple[str, str, list[str]]:
    """What was thought, what was said, and arguments of calls."""
    parts = [part for piece in pieces for part in parser.push(Chunk(0, piece, False, 0))] + parser.end(rest)
    said = [part for part in parts if part.call is None]
    thought = "".join(part.text for part in said if part.thought)
    answer = "".join(part.text for part in said if not part.thought)
    return thought, answer, ["".join(part.text for part in parts if part.call is call) for call in parser.calls]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


ANSWERS = [
    ("<think>\nso\n</think>\n\nyes", False, "so", "yes"),
    ("\n <think>a <b> </think c </think>yes </think>", False, "a <b> </think c", "yes </think>"),
    ("<think></think>yes", False, "", "yes"),
    ("<think>\n\n</think>\n\nyes", False, "", "yes"),
    ("<think>so\n</thi", False, "so\n</thi", ""),
    ("<think>so\n \n", False, "so", ""),
    ("<think>", False, "", ""),
    ("so\n</think>\nyes", True, "so", "yes"),
    ("<think>\nso</think>yes", True, "so", "yes"),  # the model writes the tag that the prompt has
    ("so", True, "so", ""),
    ("</think>yes", True, "", "yes"),
    ("yes <think>so</think>", False, "", "yes <think>so</think>"),
    (" \n yes", False, "", " \n yes"),
    ("<thin", False, "", "<thin"),
    ("<thinking>so</thinking>", False, "", "<thinking>so</thinking>"),
    ("", False, "", ""),
]


@pytest.mark.parametrize(("text", "inside", "thought", "answer"), ANSWERS, ids=lambda value: repr(value)[:30])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(places=some.lists(some.integers(0, 99), max_size=12))
def test_thoughts_are_told_from_the_answer(
    text: str, inside: bool, thought: str, answer: str, places: list[int]
) -> None:
    *before, last = pieces = cut(text, places)
    for calls in (False, True):
        whole, cut_off = (ThoughtParser({}, inside=inside, inner=CallParser({}) if calls else None) for _ in "ab")
        assert parsed(whole, pieces) == (thought, answer, [])
        assert parsed(cut_off, [*before, ""], last) == (thought, answer, [])
        assert cut_off.tokens == whole.tokens


@settings(max_examples=60, deadline=None, derandomize=True)
@given(places=some.lists(some.integers(0, 200), max_size=20), said=some.sampled_from(["", "wait"]))
def test_calls_come_behind_thoughts(places: list[int], said: str) -> None:
    """A call that is thought of is none."""
    text = f"<think>\nI could {CALL}\n</think>\n\n{said}\n{CALL}\n{CALL}"
    found = parsed(ThoughtParser({}, inside=False, inner=CallParser({})), cut(text, places))
    assert found == (f"I could {CALL}", said, ['{"a": 1}'] * 2)


def test_tags_that_give_no_text_are_found_by_their_tokens() -> None:
    tags, calls = {7: OPENS, 8: CLOSES}, {9: "<tool_call>", 10: "</tool_call>"}
    parser = ThoughtParser(tags, inside=False, inner=CallParser(calls))
    head = '\n{"name": "f", "arguments": '
    chunks = [(7, ""), (1, "so"), (8, ""), (1, "\n"), (9, ""), (1, head), (1, "{}}\n"), (10, "")]
    parts = [part for token, text in chunks for part in parser.push(Chunk(token, text, False, 0))]
    assert [part.text for part in parts if part.thought] == ["so"] and parser.called
    plain = ThoughtParser(tags, inside=False, inner=CallParser(calls))
    for token, text in chunks[4:]:
        plain.push(Chunk(token, text, False, 0))
    assert plain.called and not plain.tokens and parser.tokens == 3


@pytest.fixture(scope="module", params=[None, False, True], ids=["text", "token", "special"])
def grammars(request: pytest.FixtureRequest) -> Grammars:
    return Grammars(thinking_tokenizer(PLAIN, request.param), BYTES_VOCAB, {EOS})


def takes(grammars: Grammars, text: str, *, inside: bool) -> bool:
    """A text, and its end, token by token as the masks allow it; a mask allows what has a state and nothing else."""
    answers = grammars.choice(["yes", "no"])
    state: ConstraintState | None = AfterThought(answers, grammars.thoughts, inside=inside).start()
    for token in [*grammars._tokenizer.encode(text, add_special_tokens=False), EOS]:
        assert state is not None
        follows = [token for token in range(BYTES_VOCAB) if state.after(token) is not None]
        assert np.flatnonzero(state.allows(np.arange(BYTES_VOCAB))).tolist() == follows
        state = state.after(token)
        if state is None:
            return False
    return isinstance(state, TextEnded)


@pytest.mark.parametrize("text", ["so</think>yes", "</think>\n\nno", "a <b </thin </think>\nyes", "no</think> no"])
def test_an_answer_behind_thoughts_is_held(grammars: Grammars, text: str) -> None:
    assert takes(grammars, text, inside=True)


@pytest.mark.parametrize("text", ["yes", "so</think>so", "so</think>\n\n\nyes", "so</think>yes\n", "so", "</think>"])
def test_what_is_no_thought_with_an_answer_is_not_taken(grammars: Grammars, text: str) -> None:
    assert not takes(grammars, text, inside=True)


def test_a_thought_may_come_first_where_one_token_begins_it(grammars: Grammars) -> None:
    assert takes(grammars, "yes", inside=False) and not takes(grammars, "so", inside=False)
    assert takes(grammars, "<think>so</think>\nno", inside=False) is (grammars.thoughts.opens is not None)


def test_a_token_that_reaches_behind_a_thought_does_not_come() -> None:
    """The answer's beginning would be held by nothing."""
    spelled = [b"a", b"</think>", b"k>\n", b"k>b", b"</thin", b"</think>b", b"</s>", b"\n"]
    tokens = ThoughtTokens(spelled, {6}, None)

    class Anything(ConstraintState):
        mask = None

        def after(self, token: int) -> ConstraintState:
            return self

    class Free:
        def start(self) -> ConstraintState:
            return Anything()

    state = AfterThought(Free(), tokens, inside=True).start()
    assert state.allows(np.arange(8)).tolist() == [True, True, True, True, True, False, False, True]
    after = state.after(4)
    assert after is not None
    assert after.allows(np.arange(8)).tolist() == [True, True, True, False, True, False, False, True]
    assert [after.after(token) is not None for token in range(8)] == after.allows(np.arange(8)).tolist()
