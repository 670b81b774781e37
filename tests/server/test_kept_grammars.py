"""An agent sends the same tools at every turn: they are compiled once, and each answer begins anew."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from draftree.engine.engine import Engine
from draftree.errors import ConfigError
from draftree.openai.chat_api import ChatRequest
from draftree.sampling import grammar as grammars_module
from draftree.sampling.constraint import Constraint, ConstraintState, followed
from draftree.sampling.grammar import Function, Grammars
from draftree.sandbox import workers
from draftree.sandbox.workers import JobError

from ..tiny import BYTES_VOCAB, bytes_tokenizer
from .running import NAME, bytes_target
from .test_tools import ASKED, NAMED, SCHEMAS, TOOLS

EOS = 2
BYTES = bytes_tokenizer()
COMPILED = ("read_grammar", "matcher", "compute_bitmask")
"""In the sandbox, in this process, and the mask of the first tokens."""


class Counted:
    """A matcher of llguidance that counts what is asked of it and of its copies."""

    def __init__(self, matcher: LLMatcher, work: Counter[str]) -> None:
        self._matcher, self._work = matcher, work

    def __getattr__(self, name: str) -> Any:
        self._work[name] += 1
        return getattr(self._matcher, name)

    def deep_copy(self) -> Counted:
        return Counted(self._matcher.deep_copy(), self._work)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often grammars are read, matchers made, and each method of theirs called."""
    work, run = Counter[str](), workers.run

    def made(*arguments: Any, **options: Any) -> Counted:
        work["matcher"] += 1
        return Counted(LLMatcher(*arguments, **options), work)

    def counted(name: str, *arguments: Any) -> Any:
        work[name] += 1
        return run(name, *arguments)

    monkeypatch.setattr(grammars_module, "LLMatcher", made)
    monkeypatch.setattr(grammars_module, "run", counted)
    return work


def compiled(work: Counter[str]) -> list[int]:
    return [work[what] for what in COMPILED]


def constraint(engine: Engine, tools: Any = TOOLS, **more: Any) -> Constraint:
    """Of a turn whose body has come as JSON."""
    body = json.loads(json.dumps({"model": NAME, "messages": ASKED, "tools": tools, **more}))
    found = ChatRequest.model_validate(body).constraint(engine)
    assert found is not None
    return found


def mask(state: ConstraintState) -> list[int]:
    assert state.mask is not None
    return [*state.mask.tolist()]


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_equal_tools_are_compiled_once(choice: Any, work: Counter[str]) -> None:
    engine = Engine(bytes_target())
    masks = [mask(constraint(engine, tool_choice=choice).start()) for _ in range(3)]
    assert masks[0] == masks[1] == masks[2]
    assert compiled(work) == [1, 1, 1]


def described(tools: Any) -> None:
    tools[0]["function"]["description"] = "other words"


def constrained(tools: Any) -> None:
    tools[0]["function"]["parameters"]["properties"]["days"]["maximum"] = 6


def renamed(tools: Any) -> None:
    tools[0]["function"]["name"] = "get_climate"


def fewer(tools: Any) -> None:
    del tools[0]


@pytest.mark.parametrize(("change", "times"), [(described, 1), (constrained, 2), (renamed, 2), (fewer, 2)])
def test_a_changed_tool_compiles_again(change: Callable[[Any], None], times: int, work: Counter[str]) -> None:
    """What only the prompt reads of it changes no grammar."""
    engine, tools = Engine(bytes_target()), copy.deepcopy(TOOLS)
    constraint(engine)
    change(tools)
    for _ in range(2):
        constraint(engine, tools)
        constraint(engine)
    assert compiled(work) == [times] * 3


def test_how_functions_are_called_is_part_of_a_grammar(work: Counter[str]) -> None:
    engine = Engine(bytes_target())
    ways: list[dict[str, Any]] = [
        {},
        {"tool_choice": "required"},
        {"parallel_tool_calls": False},
        {"response_format": {"type": "json_object"}},
    ]
    for way in [*ways, *ways]:
        constraint(engine, **way)
    assert compiled(work) == [len(ways)] * 3


def test_sources_are_kept_apart_by_their_forms(work: Counter[str]) -> None:
    """The same text is a regular expression and a grammar."""
    grammars, text = Grammars(BYTES, BYTES_VOCAB, {EOS}), 'start: "a"'
    one, other = grammars.regex(text), grammars.grammar(text)
    assert grammars.regex(text) is one and grammars.grammar(text) is other
    assert mask(one.start()) != mask(other.start())
    assert compiled(work) == [2, 2, 2]


def test_models_share_no_grammars(work: Counter[str]) -> None:
    """Their tokens differ: here in whether the tags of calls are tokens."""
    engines = [Engine(bytes_target(tags)) for tags in (None, True)]
    masks = [mask(constraint(engine, tool_choice="required").start()) for engine in [*engines, *engines]]
    assert masks[:2] == masks[2:] and masks[0] != masks[1]
    assert compiled(work) == [2, 2, 2]


def test_grammars_go_with_their_model() -> None:
    grammars = Grammars(BYTES, BYTES_VOCAB, {EOS})
    kept: list[weakref.ref[Any]] = [weakref.ref(grammars), weakref.ref(grammars._kept)]
    state = grammars.regex("a+").start()
    assert state.after(BYTES.encode("a")[0])
    del grammars, state
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_few_grammars_are_kept(work: Counter[str]) -> None:
    grammars, count = Grammars(BYTES, BYTES_VOCAB, {EOS}), 2 * grammars_module._KEPT
    for number in range(count):
        grammars.regex(f"a{number}")
    for number in reversed(range(count)):
        grammars.regex(f"a{number}")
    assert work["read_grammar"] == count + count - grammars_module._KEPT


def test_a_failure_hides_no_later_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may fail for want of memory that is there a second later."""
    grammars, run, failures = Grammars(BYTES, BYTES_VOCAB, {EOS}), workers.run, 2

    def failing(name: str, *arguments: Any) -> Any:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise JobError("busy")
        return run(name, *arguments)

    monkeypatch.setattr(grammars_module, "run", failing)
    for _ in range(2):
        with pytest.raises(ConfigError, match="busy"):
            grammars.regex("a+")
    assert grammars.regex("a+") is grammars.regex("a+")


def test_a_refused_grammar_is_refused_again(work: Counter[str]) -> None:
    """In the sandbox, before anything is compiled here."""
    grammars = Grammars(BYTES, BYTES_VOCAB, {EOS})
    for _ in range(2):
        with pytest.raises(ConfigError, match="regex"):
            grammars.regex("a(")
    assert compiled(work) == [2, 0, 0]


def test_answers_under_a_kept_grammar_know_nothing_of_one_another() -> None:
    """Nor do they keep each other's states, of which a long answer has thousands."""
    grammars = Grammars(BYTES, BYTES_VOCAB, {EOS})
    functions = [Function(name, schema) for name, schema in SCHEMAS.items()]
    first, other = (grammars.calls(functions, forced=True, several=True) for _ in range(2))
    assert first is other
    before = mask(other.start())
    state = first.start()
    text = BYTES.encode('<tool_call>\n{"name": "get_w')
    later = followed(state, text)
    assert state.mask is not None
    np.copyto(state.mask, 0)
    assert mask(other.start()) == before != mask(later)
    assert other.start() is not other.start()
    assert followed(other.start(), text) is not later and mask(followed(other.start(), text)) == mask(later)
    held = weakref.ref(later)
    del state, later
    gc.collect()
    assert held() is None
