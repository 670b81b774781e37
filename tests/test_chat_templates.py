"""What chat templates get: turns joined where they take no others, typed parts, one template of several, thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftree.errors import ChatTemplateError
from draftree.models.gguf.gguf_file import read
from draftree.models.native.vocabulary import GGUFTokenizer
from draftree.sandbox import workers
from draftree.text.encoding import THOUGHTS, Conversation, call_text, render, user

from . import tiny_gguf
from .scripted import THINKING
from .strict_templates import NO_SYSTEM, STRICT, SYSTEM_FIRST, SYSTEM_WITHIN, TURNS
from .tiny import bytes_tokenizer

Turn = tuple[str, str]
TOOL = {"type": "function", "function": {"name": "f", "description": "finds", "parameters": {"type": "object"}}}
HERMES = (
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.reasoning_content }}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}>"
)
"""A template of conversations with tools, and of no others."""
IN_PARTS = (
    "{% for m in messages %}<{{ m.role }}{{ ':' if m.content[0].type == 'image' else ': ' }}{% for line in m.content %}"
    "{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}>{% endfor %}"
)
"""As SmolVLM2's."""


def written(template: str | dict[str, str], *turns: Turn, **more: Any) -> str:
    return rendered(template, [{"role": role, "content": content} for role, content in turns], **more)


def rendered(template: str | dict[str, str], messages: Sequence[dict[str, Any]], **more: Any) -> str:
    tokenizer = bytes_tokenizer(True)
    tokenizer.chat_template = template
    return render(tokenizer, Conversation(messages, **more))


def called(name: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": {}}}], **more}


MANY = [("system", "be"), ("system", "brief"), ("user", "a"), ("user", "b")]
LATE = [("user", "a"), ("assistant", "x"), ("system", "be"), ("user", "b")]


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (SYSTEM_FIRST, MANY, "<system>be\n\nbrief<user>a\n\nb>"),
        (SYSTEM_WITHIN, MANY, "<user>be\n\nbrief|a\n\nb>"),
        (NO_SYSTEM, MANY, "<user>be\n\nbrief\n\na\n\nb>"),
        (SYSTEM_FIRST, LATE, "<system>be<user>a<assistant>x<user>b>"),
        (SYSTEM_WITHIN, LATE, "<user>be|a<assistant>x<user>b>"),
        (NO_SYSTEM, LATE, "<user>be\n\na<assistant>x<user>b>"),
        (NO_SYSTEM, [("system", "be")], "<user>be>"),
        (NO_SYSTEM, [("system", ""), ("user", "a"), ("assistant", ""), ("assistant", "x")], "<user>a<assistant>x>"),
    ],
)
def test_strict_templates_get_turns_that_they_take(template: str, turns: list[Turn], expected: str) -> None:
    """Codex sends two turns of the developer and two of the user, and Claude Code a late one of the system: 400."""
    assert written(template, *turns) == expected


@pytest.mark.parametrize("turns", [MANY, LATE, [("user", "a"), ("user", "a"), ("assistant", "x"), ("assistant", "y")]])
def test_turns_that_a_template_takes_stay_as_they_are(turns: list[Turn]) -> None:
    assert written(TURNS, *turns) == "".join(f"<{role}>{content}" for role, content in turns) + ">"


@pytest.mark.parametrize("template", STRICT)
def test_strict_templates_take_what_they_were_written_for(template: str) -> None:
    turns = [("user", "a"), ("assistant", "x"), ("user", "b")]
    assert written(template, *turns) == "<user>a<assistant>x<user>b>"


@pytest.mark.parametrize("template", STRICT)
def test_an_answer_goes_on_behind_joined_turns(template: str) -> None:
    text = written(template, ("user", "a"), ("user", "b"), ("system", "be"), ("assistant", "so "), continued=True)
    assert text.endswith("a\n\nb<assistant>so ")


def test_joined_answers_keep_their_thoughts_and_calls() -> None:
    """Results of calls stay apart."""
    twice = "{% if loop.previtem and loop.previtem.role == m.role != 'tool' %}"
    strict = HERMES.replace("<{{", twice + "{{ raise_exception('no') }}{% endif %}<{{")
    answers = [called("f", reasoning_content="I see. ", content="x"), called("g", thinking="So. ", content="y")]
    results = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    calls = call_text("f", {}) + call_text("g", {})
    text = rendered(strict, [*user("a"), *answers, *results], tools=[TOOL])
    assert text.endswith(f"<user>a<assistant>I see. \n\nSo. x\n\ny{calls}<tool>one<tool>two>")
    assert rendered(HERMES, [*user("a"), *answers, *results], tools=[TOOL]).count("<assistant>") == 2


@pytest.mark.parametrize(
    "turns", [[("assistant", "x"), ("user", "a")], [("user", "a"), ("assistant", "x"), ("other", "y")]]
)
def test_what_no_joining_helps_is_refused_with_the_templates_first_word(turns: list[Turn]) -> None:
    with pytest.raises(ChatTemplateError, match="must alternate"):
        written(NO_SYSTEM, *turns)


def test_a_template_that_takes_too_long_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = list[str]()

    def run(name: str, *arguments: Any) -> Any:
        jobs.append(name)
        return workers.run(name, *arguments)

    monkeypatch.setattr(workers, "CPU_SECONDS", 1)
    monkeypatch.setattr("draftree.text.encoding.run", run)
    forever = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ChatTemplateError):
        written(forever, *MANY)
    assert len(jobs) == 1


@pytest.mark.parametrize("template", [NO_SYSTEM, SYSTEM_WITHIN])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "be brief"}]])
def test_strict_templates_get_tools_as_text(template: str, system: list[dict[str, Any]]) -> None:
    """The functions came as a turn of the system, and results as one of the user beside the user's own."""
    history = [*system, *user("the"), called("f"), {"role": "tool", "content": "one"}, *user("and?")]
    text = rendered(template, history, tools=[TOOL])
    assert text.startswith("<user>be brief\n\n# Tools" if system else "<user># Tools")
    assert '"description": "finds"' in text
    said = f"the<assistant>{call_text('f', {})}<user><tool_response>\none\n</tool_response>\n\nand?>"
    assert text.endswith(f"{'|' if template == SYSTEM_WITHIN else chr(10) * 2}{said}")


def test_a_template_of_typed_parts_gets_them() -> None:
    """It left out all that was said, without an error."""
    assert written(IN_PARTS, ("system", "be"), ("user", "a<é>"), ("assistant", "")) == (
        "<system: be><user: a<é>><assistant: >"
    )
    assert written(IN_PARTS, ("user", "a"), ("assistant", "so "), continued=True) == "<user: a><assistant: so "
    history = [*user("the"), called("f"), {"role": "tool", "content": "one"}]
    text = rendered(IN_PARTS, history, tools=[TOOL])
    assert "# Tools" in text and call_text("f", {}) in text and "\none\n" in text


def test_a_strict_template_of_typed_parts_gets_joined_ones() -> None:
    strict = "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}" + IN_PARTS
    assert written(strict, *MANY) == "<user: be\n\nbrief\n\na\n\nb>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content if m.content is string else 'parts' }}{% endfor %}", "the"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "THE"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "the"}]'),
        ("{% if answer is undefined %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}", "the"),
    ],
)
def test_a_template_that_takes_texts_gets_texts(template: str, expected: str) -> None:
    """One that fails where it is probed is not one of parts."""
    assert rendered(template, user("the"), variables={"answer": 1}) == expected


@pytest.mark.parametrize("text", ["{{ m.content }}", "{{ m.content[0].text }}"])
def test_a_template_is_probed_with_the_conversations_variables(text: str) -> None:
    template = f"{{% for m in messages %}}{{% if answer is defined %}}{text}{{% endif %}}{{% endfor %}}"
    assert rendered(template, user("the"), variables={"answer": 1}) == "the"


def test_a_template_that_writes_no_first_turn_is_one_of_texts() -> None:
    template = "{% for m in messages[1:] %}{{ m.content }}{% endfor %}"
    assert written(template, ("system", "be"), ("user", "the")) == "the"


NAMED = {"default": TURNS, "tool_use": HERMES}


def test_the_template_of_tools_is_that_of_conversations_with_tools() -> None:
    history = [*user("the"), called("f"), {"role": "tool", "content": "one"}]
    text = rendered(NAMED, history, tools=[TOOL])
    assert text.startswith('{"type": "function"') and text.endswith(f"{call_text('f', {})}<tool>one>")
    assert rendered(NAMED, user("the")) == "<user>the>"


def test_calls_of_a_conversation_without_tools_are_in_every_prompt() -> None:
    """The template of tools was probed, and the other one, which leaves calls out, had the conversation."""
    history = [*user("the"), called("f"), {"role": "tool", "content": "one"}]
    assert rendered(NAMED, history) == rendered(TURNS, history)
    assert call_text("f", {}) in rendered(NAMED, history)


def test_a_conversation_that_no_named_template_is_for_is_refused() -> None:
    """It was an empty prompt."""
    assert rendered({"tool_use": HERMES}, user("the"), tools=[TOOL]).endswith("<user>the>")
    with pytest.raises(ChatTemplateError):
        written({"tool_use": HERMES}, ("user", "the"))


def test_a_gguf_file_has_templates_by_name(tmp_path: Path) -> None:
    """Hermes-2-Pro's template of tools was not read."""
    named = [{"name": name, "template": template} for name, template in NAMED.items()]
    tokenizer = GGUFTokenizer(read(tiny_gguf.write(tmp_path / "tiny.gguf", layers=1, template=named)))
    assert tokenizer.chat_template == NAMED
    assert '"description": "finds"' in render(tokenizer, Conversation(user("the"), [TOOL]))
    assert render(tokenizer, Conversation(user("the"))) == "<user>the>"


@pytest.mark.parametrize("name", THOUGHTS)
@pytest.mark.parametrize("template", [THINKING, THINKING.replace("reasoning_content", "thinking")])
def test_a_thought_goes_to_the_template_under_the_name_that_it_reads(name: str, template: str) -> None:
    """vLLM and OpenRouter call it ``reasoning``; the template of gpt-oss reads ``thinking``."""
    answer = {"role": "assistant", "content": "x", name: "I see"}
    wanted = "user: a\nassistant: <think>I see</think>x\nuser: b\nbot: "
    assert rendered(template, [*user("a"), answer, *user("b")]) == wanted
    none = dict.fromkeys(THOUGHTS)
    assert rendered(template, [*user("a"), {**none, **answer}, *user("b")]) == wanted
    without = wanted.replace("<think>I see</think>", "")
    assert rendered(template, [*user("a"), {**answer, **none}, *user("b")]) == without
    tooled = rendered(template, [*user("a"), answer, *user("b")], tools=[TOOL])
    assert tooled.endswith(wanted)


def test_of_several_thoughts_each_name_keeps_its_own() -> None:
    answer = {"role": "assistant", "content": "x", "reasoning": "C", "reasoning_content": "A", "thinking": "B"}
    names = "".join("{{ m." + name + " }}" for name in (*THOUGHTS, "content"))
    template = "{% for m in messages %}" + names + "{% endfor %}"
    assert rendered(template, [*user("a"), answer]) == "aABCx"
