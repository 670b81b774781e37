"""Answers in Harmony's channels, as gpt-oss gives them: thoughts, text and calls of every API, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from draftree.text.encoding import user
from draftree.text.harmony import CHANNEL, END, MESSAGE, RETURN, START

from ..harmony import CONTROLS, NEXT, SAYS, THINKS, HarmonyModel, call_of, harmony_tokenizer
from ..scripted import PLAIN
from .running import NAME, Running, posted, running, streamed
from .test_messages import client_of
from .test_reasoning import BODY, CHAT, FORMAT, RESPONSES, TOOLS, joined

THOUGHT, ANSWER, PREAMBLE = "I see: a < b,\n\nso <|end it.", " Hello <|you|>,\n", "I call."
CALL = call_of("f", '{"a": 1}')


@contextmanager
def saying(answer: str, thought: str = THOUGHT) -> Iterator[Running]:
    with running(HarmonyModel(f"{THINKS}{thought}{NEXT}{answer}")) as served:
        yield served


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with saying(f"{SAYS}{ANSWER}{RETURN}") as found:
        yield found


@pytest.fixture(scope="module", params=["", PREAMBLE])
def calling(request: pytest.FixtureRequest) -> Iterator[tuple[Running, str]]:
    """A server of a model that calls, and what it says before that."""
    preamble = f"{CHANNEL}commentary{MESSAGE}{request.param}{NEXT}" if request.param else ""
    with saying(f"{preamble}{CALL}") as found:
        yield found, request.param


@pytest.mark.parametrize("skip", [True, False])
def test_a_chat_has_no_control_token(served: Running, skip: bool) -> None:
    found = posted(served, CHAT, {**BODY, "skip_special_tokens": skip})[1]
    (choice,) = found["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == (THOUGHT, ANSWER, "stop")
    thought = harmony_tokenizer().encode(THOUGHT, add_special_tokens=False)
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": len([MESSAGE, *thought, END])}


@pytest.mark.parametrize("stop", ["stop", ">x", "lx", "sistant"])
def test_a_stop_string_that_an_answer_does_not_have_changes_nothing(served: Running, stop: str) -> None:
    """Its beginning is held back, and came in another message."""
    message = posted(served, CHAT, {**BODY, "stop": stop, "max_tokens": 200})[1]["choices"][0]["message"]
    whole = "" if stop == "sistant" else ANSWER  # a header has it
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, whole)


def test_a_stream_has_thoughts_first(served: Running) -> None:
    events = streamed(served, CHAT, {**BODY, "stream_options": {"include_usage": True}})
    assert (joined(events, "reasoning_content"), joined(events, "content")) == (THOUGHT, ANSWER)
    kinds = [next(iter(event["choices"][0]["delta"]), "") for event in events if event["choices"]]
    assert kinds == sorted(kinds, key=["role", "reasoning_content", "content", ""].index)


def test_an_answer_that_a_limit_ends_has_what_has_come(served: Running) -> None:
    for limit in range(1, 70):
        (choice,) = posted(served, CHAT, {**BODY, "max_tokens": limit})[1]["choices"]
        thought, said = choice["message"].get("reasoning_content", ""), choice["message"]["content"]
        assert THOUGHT.startswith(thought) and ANSWER.startswith(said) and (thought == THOUGHT or not said)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_an_item_of_each(served: Running, stream: bool) -> None:
    asked: dict[str, Any] = {"model": NAME, "input": "hi", "temperature": 0, "top_logprobs": 1}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        if stream:
            with client.responses.stream(**asked) as events:
                list(events)
                found: Any = events.get_final_response()
        else:
            found = client.responses.create(**asked)
    first, second = found.output
    assert (first.type, first.content[0].text, found.output_text) == ("reasoning", THOUGHT, ANSWER)
    assert found.usage.output_tokens_details.reasoning_tokens
    assert "".join(one.token for one in second.content[0].logprobs) == ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_a_block_of_each(served: Running, stream: bool) -> None:
    asked: Any = {"model": NAME, "max_tokens": 200, "messages": user("hi"), "extra_body": {"temperature": 0}}
    with client_of(served) as claude:
        if stream:
            with claude.messages.stream(**asked) as events:
                found: Any = events.get_final_message()
        else:
            found = claude.messages.create(**asked)
    first, second = found.content
    assert (first.thinking, second.text, found.stop_reason) == (THOUGHT, ANSWER, "end_turn")
    assert 0 < found.usage.output_tokens_details.thinking_tokens < found.usage.output_tokens


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_is_a_call_of_every_api(calling: tuple[Running, str], choice: str) -> None:
    served, said = calling
    if said and choice == "required":
        return  # it calls at once
    body = {**BODY, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    (found,) = posted(served, CHAT, body)[1]["choices"]
    message = found["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, said or None)
    (call,) = message["tool_calls"]
    assert (call["function"], found["finish_reason"]) == ({"name": "f", "arguments": '{"a": 1}'}, "tool_calls")
    events = streamed(served, CHAT, body)
    assert (joined(events, "reasoning_content"), joined(events, "content")) == (THOUGHT, said)
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    sent = {"input": "hi", "temperature": 0, "tools": TOOLS, "tool_choice": choice}
    items = posted(served, RESPONSES, sent)[1]["output"]
    assert [item["type"] for item in items] == ["reasoning", *(["message"] if said else []), "function_call"]
    assert (items[-1]["arguments"], {item["status"] for item in items}) == ('{"a": 1}', {"completed"})
    tool: Any = {"name": "f", "input_schema": TOOLS[0]["function"]["parameters"]}
    with (
        client_of(served) as claude,
        claude.messages.stream(
            model=NAME,
            max_tokens=200,
            messages=[{"role": "user", "content": "hi"}],
            tools=[tool],
            extra_body={"temperature": 0},
        ) as stream,
    ):
        whole: Any = stream.get_final_message()
    assert (whole.content[-1].input, whole.stop_reason) == ({"a": 1}, "tool_use")


def test_what_follows_a_call_goes_to_the_template(calling: tuple[Running, str]) -> None:
    """The thought and the preamble with it, which the template does not take side by side."""
    served, said = calling
    sent = {**BODY, "tools": TOOLS, "max_tokens": 200}
    answer = posted(served, CHAT, sent)[1]["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "one"}
    history = [*user("hi"), answer, result]
    ids = posted(served, "/tokenize", {"messages": history, "tools": TOOLS})[1]["tokens"]
    text = posted(served, "/detokenize", {"tokens": ids})[1]["prompt"]
    thought = f"{THOUGHT}\n\n{said}" if said else THOUGHT
    assert f'{THINKS}{thought}{NEXT} to=functions.f{CHANNEL}commentary json{MESSAGE}{{"a": 1}}' in text
    assert posted(served, CHAT, {**sent, "messages": history})[0] == 200


def test_messages_in_turns_are_items_in_turns() -> None:
    preamble = f"{CHANNEL}commentary{MESSAGE}{PREAMBLE}{NEXT}"
    with saying(f"{preamble}{THINKS}so{NEXT}{SAYS}yes{RETURN}") as served:
        items = posted(served, RESPONSES, {"input": "hi", "temperature": 0})[1]["output"]
        texts = [(item["type"], item["content"][0]["text"]) for item in items]
        assert texts == [
            ("reasoning", THOUGHT),
            ("message", PREAMBLE),
            ("reasoning", "\n\nso"),
            ("message", "\n\nyes"),
        ]
        message = posted(served, CHAT, BODY)[1]["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (f"{THOUGHT}\n\nso", f"{PREAMBLE}\n\nyes")


@pytest.mark.parametrize("wanted", [{"response_format": FORMAT}, {"structured_outputs": {"regex": '"abc"|7'}}])
def test_a_format_holds_the_final_message(wanted: dict[str, Any]) -> None:
    with saying(f'{SAYS}"abc"{RETURN}') as served:
        (found,) = posted(served, CHAT, {**BODY, **wanted, "max_tokens": 200})[1]["choices"]
        message = found["message"]
        assert (message["reasoning_content"], message["content"], found["finish_reason"]) == (THOUGHT, '"abc"', "stop")
    with saying(f"{SAYS}Sure!{RETURN}") as served:
        message = posted(served, CHAT, {**BODY, **wanted, "max_tokens": 200})[1]["choices"][0]["message"]
        assert message["reasoning_content"] == THOUGHT and json.loads(message["content"]) in ("abc", 7)


def test_a_second_turn_has_the_answer_alone(served: Running) -> None:
    """The template refuses an answer with its channels."""
    answer = posted(served, CHAT, BODY)[1]["choices"][0]["message"]
    history = [*user("hi"), answer, *user("and?")]
    ids = posted(served, "/tokenize", {"messages": history})[1]["tokens"]
    text = posted(served, "/detokenize", {"tokens": ids})[1]["prompt"]
    assert f"{SAYS}{ANSWER}" in text and THOUGHT not in text
    assert posted(served, CHAT, {**BODY, "messages": history})[0] == 200


def test_an_answer_is_gone_on_with() -> None:
    with running(HarmonyModel(f"you.{RETURN}")) as served:
        messages = [*user("hi"), {"role": "assistant", "content": "Hello "}]
        body = {**BODY, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        message = posted(served, CHAT, body)[1]["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (None, "you.")
        held = {**body, "structured_outputs": {"choice": ["you.", "me."]}}
        assert posted(served, CHAT, held)[1]["choices"][0]["message"]["content"] == "you."


def test_a_completion_is_text_as_it_comes(served: Running) -> None:
    body = {"prompt": f"{START}user{MESSAGE}hi", "temperature": 0, "max_tokens": 200}
    text = posted(served, "/v1/completions", body)[1]["choices"][0]["text"]
    assert text == f"analysis{THOUGHT}assistantfinal{ANSWER}" and not any(tag in text for tag in CONTROLS)
    shown = posted(served, "/v1/completions", {**body, "skip_special_tokens": False})[1]["choices"][0]["text"]
    assert shown == f"{THINKS}{THOUGHT}{NEXT}{SAYS}{ANSWER}"


def test_a_template_without_channels_is_answered_as_any_other() -> None:
    with running(HarmonyModel("Hello.", PLAIN)) as served:
        message = posted(served, CHAT, BODY)[1]["choices"][0]["message"]
        assert message["content"] == "Hello." and "reasoning_content" not in message
