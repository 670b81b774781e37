"""What ``generate`` and ``chat`` show of models that think aloud, and what of it goes back into the conversation."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from draftree.cli.main import run
from draftree.text.encoding import encode
from draftree.text.harmony import CHANNEL, MESSAGE, RETURN

from ..harmony import NEXT, SAYS, THINKS, HarmonyModel
from ..scripted import OPENED, THINKING, ScriptedModel, thinking_tokenizer

Captured = pytest.CaptureFixture[str]
SHOWN = "<think>\nso\n</think>\n\nYes."
MODELS: dict[str, Callable[[], ScriptedModel]] = {
    "channels": lambda: HarmonyModel(f"{THINKS}so{NEXT}{SAYS}Yes.{RETURN}"),
    "tags": lambda: ScriptedModel("<think>\nso\n</think>\n\nYes.", thinking_tokenizer(THINKING)),
    "tokens": lambda: ScriptedModel("<think>\nso\n</think>\n\nYes.", thinking_tokenizer(THINKING, True)),
    "a thought that the prompt begins": lambda: ScriptedModel("so</think>Yes.", thinking_tokenizer(OPENED)),
}
AS_IS = ["--drafter", "none", "--max-tokens", "90"]


@pytest.fixture(params=MODELS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("draftree.cli.options.load", lambda name, **options: MODELS[request.param]())
    return str(request.param)


def test_a_thought_is_shown_between_tags(kind: str, capsys: Captured) -> None:
    assert run(["generate", "hi", "--target", "x", *AS_IS]) == 0
    assert capsys.readouterr().out == f"{SHOWN}\n"
    assert run(["generate", "hi", "--target", "x", *AS_IS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == SHOWN


def test_a_second_turn_has_the_answer_alone(kind: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template of gpt-oss refuses an answer with its channels."""
    asked = list[Any]()

    def encoded(tokenizer: Any, prompt: Any, *more: Any) -> list[int]:
        asked.append(prompt)
        return encode(tokenizer, prompt, *more)

    monkeypatch.setattr("draftree.engine.input_processor.encode", encoded)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nand?\n"))
    assert run(["chat", "x", *AS_IS]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{SHOWN}\n" * 2 and "draftree:" not in printed.err
    *_, last = (prompt for prompt in asked if isinstance(prompt[0], dict))
    assert [turn["role"] for turn in last] == ["user", "assistant", "user"] and last[1]["content"] == "Yes."


def test_a_constraint_holds_the_answer_behind_the_thought(kind: str, capsys: Captured) -> None:
    assert run(["generate", "hi", "--target", "x", *AS_IS, "--regex", "Yes\\."]) == 0
    # a tag that several tokens spell cannot come first
    assert capsys.readouterr().out == ("Yes.\n" if kind == "tags" else f"{SHOWN}\n")


def test_a_thought_that_is_cut_off_is_shown_as_it_is(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"{CHANNEL}commentary{MESSAGE}Look.{NEXT}{THINKS}so long"
    monkeypatch.setattr("draftree.cli.options.load", lambda name, **options: HarmonyModel(script))
    assert run(["generate", "hi", "--target", "x", "--drafter", "none", "--max-tokens", "42"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Look.\n\n<think>\nso") and "</think>" not in out
    assert run(["generate", "hi", "--target", "x", "--drafter", "none", "--max-tokens", "5", "--raw"]) == 0
    assert capsys.readouterr().out == "comm\n"
