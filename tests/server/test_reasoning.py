"""What a model thinks aloud comes apart from its answer: whole and streamed, beside calls and grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import openai
import pytest

from draftree.openai.responses_api import ResponsesRequest
from draftree.text.encoding import user

from ..scripted import OPENED, PLAIN, THINKING, ScriptedModel, thinking_tokenizer
from .running import NAME, Running, posted, running, streamed

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
THOUGHT, ANSWER = "I see: a < b,\n\nso </thin> it.", "Hello <thinking> you </thin> <"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["abc", 7]}}}


class Kind(NamedTuple):
    """A model that thinks.

    Attributes:
        special: as of ``thinking_tokenizer``.
    """

    template: str
    special: bool | None

    def says(self, answer: str, thought: str = THOUGHT) -> ScriptedModel:
        begin = "" if self.template == OPENED else "<think>\n"
        script = f"{begin}{thought}\n</think>\n\n{answer}"
        return ScriptedModel(script, thinking_tokenizer(self.template, self.special))


KINDS = {
    "tags that are text": Kind(THINKING, None),
    "tags that are tokens": Kind(THINKING, False),
    "special tags": Kind(THINKING, True),
    "special tags that no template names": Kind(PLAIN, True),
    "a thought that the prompt begins": Kind(OPENED, None),
    "a thought that the prompt begins with a token": Kind(OPENED, False),
    "a thought that the prompt begins with a special token": Kind(OPENED, True),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@contextmanager
def saying(kind: Kind, answer: str) -> Iterator[Running]:
    with running(kind.says(answer)) as served:
        yield served


@pytest.fixture(scope="module")
def served(kind: Kind) -> Iterator[Running]:
    with saying(kind, ANSWER) as found:
        yield found


BODY: dict[str, Any] = {"messages": user("hi"), "temperature": 0}


def joined(events: list[dict[str, Any]], name: str) -> str:
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(delta.get(name) or "" for delta in deltas)


def test_a_chat_has_them_beside_its_content(served: Running, kind: Kind) -> None:
    status, found = posted(served, CHAT, BODY)
    assert status == 200
    (choice,) = found["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, ANSWER)
    assert choice["finish_reason"] == "stop"
    tokenizer = kind.says("").tokenizer
    assert tokenizer is not None
    said = f"{'' if kind.template == OPENED else '<think>' + chr(10)}{THOUGHT}\n</think>"
    thought = len(tokenizer.encode(said, add_special_tokens=False))
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}


def test_a_stream_has_them_first(served: Running) -> None:
    events = streamed(served, CHAT, {**BODY, "stream_options": {"include_usage": True}})
    assert (joined(events, "reasoning_content"), joined(events, "content")) == (THOUGHT, ANSWER)
    kinds = [next(iter(event["choices"][0]["delta"]), "") for event in events if event["choices"]]
    assert kinds == sorted(kinds, key=["role", "reasoning_content", "content", ""].index)
    assert events[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > len(THOUGHT) / 2


def test_a_thought_that_is_cut_off_is_no_answer(served: Running) -> None:
    (choice,) = posted(served, CHAT, {**BODY, "max_tokens": 12})[1]["choices"]
    message = choice["message"]
    assert THOUGHT.startswith(message["reasoning_content"]) and message["reasoning_content"]
    assert (message["content"], choice["finish_reason"]) == ("", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_an_item_of_them(served: Running, stream: bool) -> None:
    asked: dict[str, Any] = {"model": NAME, "input": "hi", "temperature": 0, "top_logprobs": 1}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        if stream:
            with client.responses.stream(**asked) as events:
                kinds: list[str] = list(dict.fromkeys(event.type for event in events))
                found: Any = events.get_final_response()
        else:
            found = client.responses.create(**asked)
    if stream:
        assert kinds.index("response.reasoning_text.delta") < kinds.index("response.reasoning_text.done")
        assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    first, second = found.output
    assert first.type == "reasoning" and first.content is not None and second.type == "message"
    assert [part.text for part in first.content] == [THOUGHT] and found.output_text == ANSWER
    assert {first.status, second.status} == {"completed"}
    assert found.usage is not None and found.usage.output_tokens_details.reasoning_tokens > len(THOUGHT) / 2
    (part,) = second.content
    assert part.type == "output_text" and part.logprobs is not None
    assert "".join(one.token for one in part.logprobs).strip().startswith(ANSWER)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("said", ["", "I call."])
def test_a_call_may_follow_them(kind: Kind, choice: str, said: str) -> None:
    """A grammar of calls, and one of an answer, held from the first token on: a thought could not come."""
    if choice == "required" and (said or (kind.special is None and kind.template != OPENED)):
        return  # it calls at once: a tag that several tokens spell cannot come first
    with saying(kind, f"{said}{CALL}") as served:
        body = {**BODY, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
        (found,) = posted(served, CHAT, body)[1]["choices"]
        message = found["message"]
        assert (message["reasoning_content"], message["content"]) == (THOUGHT, said or None)
        (call,) = message["tool_calls"]
        assert (call["function"], found["finish_reason"]) == ({"name": "f", "arguments": '{"a": 1}'}, "tool_calls")
        events = streamed(served, CHAT, body)
        assert joined(events, "reasoning_content") == THOUGHT and joined(events, "content") == said
        answer = posted(served, RESPONSES, {"input": "hi", "temperature": 0, "tools": TOOLS, "tool_choice": choice})[1]
        kinds = ["reasoning", *(["message"] if said else []), "function_call"]
        assert [item["type"] for item in answer["output"]] == kinds


@pytest.mark.parametrize("wanted", [{"response_format": FORMAT}, {"structured_outputs": {"regex": '"abc"|7'}}])
def test_an_answer_with_a_format_may_follow_them(kind: Kind, wanted: dict[str, Any]) -> None:
    with saying(kind, '"abc"') as served:
        (found,) = posted(served, CHAT, {**BODY, **wanted, "max_tokens": 200})[1]["choices"]
        assert found["message"]["content"] == '"abc"' and found["finish_reason"] == "stop"
        # What a tag is that several tokens spell, a grammar lets come first only where the prompt has begun it.
        thought = None if kind.special is None and kind.template != OPENED else THOUGHT
        assert found["message"].get("reasoning_content") == thought
        body = {"prompt": "hi", **wanted, "max_tokens": 200, "temperature": 0}
        assert posted(served, "/v1/completions", body)[1]["choices"][0]["text"] == '"abc"'


def test_a_template_that_leaves_thoughts_out_leaves_them_out(kind: Kind) -> None:
    """``enable_thinking: false`` writes an empty thought into the prompt: the answer begins at once."""
    if kind.template == PLAIN:
        return
    tokenizer = thinking_tokenizer(kind.template, kind.special)
    with running(ScriptedModel(ANSWER, tokenizer)) as served:
        body = {**BODY, "chat_template_kwargs": {"enable_thinking": False}}
        found = posted(served, CHAT, body)[1]
        assert found["choices"][0]["message"]["content"] == ANSWER
        assert "reasoning_content" not in found["choices"][0]["message"]
        assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_text_of_a_model_that_does_not_think_is_untouched() -> None:
    script = f"<think>{THOUGHT}</think>{ANSWER}"
    with running(ScriptedModel(script, thinking_tokenizer(PLAIN))) as served:
        found = posted(served, CHAT, BODY)[1]
        assert found["choices"][0]["message"]["content"] == script
        assert "completion_tokens_details" not in found["usage"]


def test_a_completion_is_text_as_it_comes(served: Running, kind: Kind) -> None:
    found = posted(served, "/v1/completions", {"prompt": "hi", "temperature": 0, "max_tokens": 200})[1]
    text = found["choices"][0]["text"]
    assert THOUGHT in text and text.endswith(ANSWER)


def test_a_thought_is_gone_on_with() -> None:
    kind = Kind(THINKING, None)
    with running(ScriptedModel("so.</think>yes", thinking_tokenizer(kind.template))) as served:
        for begun, thought, content in (("<think>I see, ", "so.", "yes"), ("I see, ", None, "so.</think>yes")):
            messages = [*user("hi"), {"role": "assistant", "content": begun}]
            body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
            message = posted(served, CHAT, {**body, "temperature": 0})[1]["choices"][0]["message"]
            assert (message.get("reasoning_content"), message["content"]) == (thought, content)


def test_thoughts_of_the_past_go_to_the_template(served: Running, kind: Kind) -> None:
    """An answer is sent back as it came."""
    answer = posted(served, CHAT, BODY)[1]["choices"][0]["message"]
    history = [*user("hi"), answer, *user("and?")]
    ids = posted(served, "/tokenize", {"messages": history})[1]["tokens"]
    text = posted(served, "/detokenize", {"tokens": ids})[1]["prompt"]
    thought = "" if kind.template == PLAIN else f"<think>{THOUGHT}</think>"
    assert text.startswith(f"user: hi\nassistant: {thought}{ANSWER}\nuser: and?\n")
    assert posted(served, CHAT, {**BODY, "messages": history})[0] == 200


@pytest.mark.parametrize("name", ["reasoning", "thinking"])
def test_a_thought_may_come_back_under_another_name(served: Running, name: str) -> None:
    """The name of vLLM and OpenRouter was left out."""
    bodies = [
        {"messages": [*user("hi"), {"role": "assistant", "content": ANSWER, **thought}, *user("and?")]}
        for thought in ({"reasoning_content": THOUGHT}, {"reasoning_content": None, name: THOUGHT})
    ]
    first, second = (posted(served, "/tokenize", body)[1]["tokens"] for body in bodies)
    assert first == second
    setting = {"role": "assistant", "content": ANSWER, name: {"type": "enabled"}}  # means nothing in a message
    assert posted(served, "/tokenize", {"messages": [*user("hi"), setting, *user("and?")]})[0] == 200


def test_thoughts_of_past_responses_belong_to_what_followed_them(served: Running) -> None:
    """Items of an output were left out where a client sent them back."""
    output = posted(served, "/v1/responses", {"input": "hi", "temperature": 0})[1]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    summed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}], "encrypted_content": "x"}
    unread = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    more = {"type": "reasoning", "summary": [{"type": "summary_text", "text": " much"}]}
    sent = [{"role": "user", "content": "hi"}, *output, {"role": "user", "content": "and?"}, summed, more, call, unread]
    (conversation,) = ResponsesRequest.model_validate({"model": NAME, "input": sent}).prompts()
    _, answer, _, called = conversation.messages
    assert answer == {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
    assert (called["content"], called["reasoning_content"], len(called["tool_calls"])) == ("", "so much", 1)
    assert posted(served, "/v1/responses", {"input": sent, "temperature": 0})[0] == 200


def test_each_choice_has_its_own(served: Running) -> None:
    for choice in posted(served, CHAT, {**BODY, "n": 3})[1]["choices"]:
        assert choice["message"]["reasoning_content"] == THOUGHT and choice["message"]["content"] == ANSWER


def test_logprobs_are_of_all_tokens(served: Running) -> None:
    found = posted(served, CHAT, {**BODY, "logprobs": True})[1]
    assert len(found["choices"][0]["logprobs"]["content"]) == found["usage"]["completion_tokens"]
    assert json.dumps(found)
