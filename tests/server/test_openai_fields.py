"""Every field, tool and item that OpenAI's package has for a request is answered, or refused by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.chat.chat_completion_assistant_message_param import ContentArrayOfContentPart as ChatContent
from openai.types.chat.chat_completion_content_part_param import ChatCompletionContentPartParam
from openai.types.chat.chat_completion_tool_union_param import ChatCompletionToolUnionParam
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams
from openai.types.responses.response_create_params import ToolChoice
from openai.types.responses.response_input_content_param import ResponseInputContentParam
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from openai.types.responses.response_output_message_param import Content as ResponseContent
from openai.types.responses.tool_param import ToolParam

from draftree.openai import bad_bodies
from draftree.openai.chat_api import ChatRequest
from draftree.openai.messages_api import MessagesRequest
from draftree.openai.responses_api import ResponsesRequest

from .running import NAME, Running, bytes_target, posted, running

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "how?"}], "max_tokens": 2},
    COMPLETION: {"prompt": "how?", "max_tokens": 2},
    RESPONSE: {"input": "how?", "max_output_tokens": 2},
}
READ = {CHAT: "prompt_tokens", RESPONSE: "input_tokens"}
PARAMS = {CHAT: ChatParams, COMPLETION: CompletionParams, RESPONSE: ResponseParams}
FUNCTION: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
CHAT_FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "look"}}

_EVERYWHERE: dict[str, Any] = {
    "model": NAME,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.5,
    "user": "somebody",
}
_DRAWN: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1.0},
    "max_tokens": 3,
    "n": 2,
    "presence_penalty": 0.5,
    "seed": 7,
    "stop": ["x"],
}
_KEPT: dict[str, Any] = {
    "metadata": {"of": "a test"},
    "prompt_cache_key": "key",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "somebody",
    "service_tier": "flex",
    "store": True,
}
ANSWERED: dict[str, dict[str, Any]] = {
    CHAT: {
        **_EVERYWHERE,
        **_DRAWN,
        **_KEPT,
        "logprobs": True,
        "max_completion_tokens": 3,
        "messages": BODIES[CHAT]["messages"],
        "parallel_tool_calls": False,
        "prediction": {"type": "content", "content": "so"},
        "reasoning_effort": "high",
        "response_format": {"type": "text"},
        "tool_choice": "none",
        "tools": [CHAT_FUNCTION],
        "verbosity": "low",
    },
    COMPLETION: {**_EVERYWHERE, **_DRAWN, "echo": True, "logprobs": 1, "prompt": "so"},
    RESPONSE: {
        **_EVERYWHERE,
        **_KEPT,
        "access_programs": {"cyber": "standard"},
        "background_options": {"completion_window": "soonest"},
        "context_management": [{"type": "compaction", "compact_threshold": 5000}],
        "image": {"context_compression": "auto"},
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources", "message.output_text.logprobs"],
        "input": "so",
        "instructions": "be brief",
        "max_output_tokens": 3,
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low", "format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [FUNCTION],
        "top_logprobs": 2,
        "truncation": "auto",
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    CHAT: {
        "audio": {"voice": "x", "format": "wav"},
        "function_call": {"name": "look"},
        "functions": [{"name": "look"}],
        "modalities": ["text", "audio"],
        "moderation": {"model": "omni-moderation-latest"},
        "top_logprobs": 2,  # without logprobs
        "web_search_options": {"search_context_size": "low"},
    },
    COMPLETION: {"best_of": 4, "suffix": "x"},
    RESPONSE: {
        "background": True,
        "conversation": "conv_1",
        "moderation": {"model": "omni-moderation-latest"},
        "previous_response_id": "resp_1",
        "prompt": {"id": "pmpt_1"},
    },
}
ECHOED = (
    "max_tool_calls metadata prompt_cache_key prompt_cache_options prompt_cache_retention reasoning safety_identifier "
    "text truncation user"
).split()


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(bytes_target(tags=False)) as found:
        yield found


@pytest.mark.parametrize("path", PARAMS)
def test_every_field_of_openais_has_an_answer_here(path: str) -> None:
    """Codex's first request had ``reasoning``, which was refused: nobody had gone through what clients may send."""
    assert not ANSWERED[path].keys() & REFUSED[path].keys()
    assert ANSWERED[path].keys() | REFUSED[path].keys() == get_type_hints(PARAMS[path]).keys()


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, all_ in ANSWERED.items() for field in all_])
def test_what_a_model_does_without_is_answered(served: Running, path: str, field: str) -> None:
    status, found = posted(served, path, {**BODIES[path], field: ANSWERED[path][field]})
    assert status == 200, found


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, all_ in REFUSED.items() for field in all_])
def test_what_would_change_the_answer_is_refused(served: Running, path: str, field: str) -> None:
    status, found = posted(served, path, {**BODIES[path], field: REFUSED[path][field]})
    assert (status, found["error"]["param"]) == (400, field)


@pytest.mark.parametrize("field", ECHOED)
def test_a_response_has_what_was_sent(served: Running, field: str) -> None:
    sent = ANSWERED[RESPONSE][field]
    assert posted(served, RESPONSE, {**BODIES[RESPONSE], field: sent})[1][field] == sent


def test_logprobs_that_are_included_come_without_others(served: Running) -> None:
    body = {**BODIES[RESPONSE], "include": ["message.output_text.logprobs"]}
    answer = posted(served, RESPONSE, body)[1]
    told = answer["output"][0]["content"][0]["logprobs"]
    assert len(told) == answer["usage"]["output_tokens"] and not any(one["top_logprobs"] for one in told)


def types_of(union: Any) -> set[str]:
    """The values that ``type`` has in the classes of a union."""
    hints = [get_type_hints(each)["type"] for each in get_args(union) if isinstance(each, type)]
    found = {value for hint in hints for value in get_args(hint)}
    return {inner for value in found for inner in (get_args(value) or (value,)) if isinstance(inner, str)}


_HOSTED: dict[str, dict[str, Any]] = {
    "apply_patch": {},
    "code_interpreter": {"container": {"type": "auto"}},
    "computer": {},
    "computer_use_preview": {"display_height": 5, "display_width": 5, "environment": "linux"},
    "custom": {"name": "edit", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
    "file_search": {"vector_store_ids": ["vs_1"]},
    "image_generation": {"model": "gpt-image-1", "size": "auto"},
    "local_shell": {},
    "mcp": {"server_label": "docs", "server_url": "https://example.com", "require_approval": "never"},
    "programmatic_tool_calling": {},
    "shell": {"environment": {"type": "local"}},
    "tool_search": {"execution": "client", "description": "finds tools", "parameters": {"type": "object"}},
    "web_search": {"external_web_access": False},
    "web_search_2025_08_26": {"search_context_size": "low"},
    "web_search_preview": {"user_location": {"type": "approximate"}},
    "web_search_preview_2025_03_11": {},
}
NAMESPACE = {"type": "namespace", "name": "crew", "description": "Of helpers.", "tools": [FUNCTION]}


def test_every_tool_of_openais_has_an_answer_here() -> None:
    assert {*_HOSTED, "function", "namespace"} == types_of(ToolParam)
    assert types_of(ChatCompletionToolUnionParam) == {"function", "custom"}


@pytest.mark.parametrize("kind", [*_HOSTED, "a_tool_of_next_year"])
@pytest.mark.parametrize("path", [CHAT, RESPONSE])
def test_a_tool_that_is_no_function_is_left_out(
    served: Running, caplog: pytest.LogCaptureFixture, path: str, kind: str
) -> None:
    """The answer is that of the request without it, functions beside it are offered, and the log says it once."""
    bad_bodies.logged.clear()
    function = CHAT_FUNCTION if path == CHAT else FUNCTION
    tool = {"type": kind, **_HOSTED.get(kind, {})}
    body = {**BODIES[path], "temperature": 0}
    without, alone, beside, again = (
        posted(served, path, {**body, "tools": tools})
        for tools in ([function], [], [tool, function], [{"type": kind}, function])
    )
    only = posted(served, path, {**body, "tools": [tool]})
    read = [answer["usage"][READ[path]] for _, answer in (without, alone, beside, again, only)]
    assert read == [read[0], read[1], read[0], read[0], read[1]] and read[0] > read[1]
    assert path == CHAT or [each["type"] for each in beside[1]["tools"]] == ["function"]
    assert [kind in record.getMessage() for record in caplog.records if "left out" in record.getMessage()] == [True]


CHOICES: list[Any] = [
    "required",
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
    {"type": "function", "name": "edit"},
    {"type": "custom", "name": "edit"},
    {"type": "mcp", "server_label": "docs"},
    *({"type": kind} for kind in ("apply_patch", "shell", "programmatic_tool_calling", "a_tool_of_next_year")),
    *({"type": kind} for kind in types_of(ToolChoice) if kind not in ("function", "custom", "mcp", "allowed_tools")),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("path", [CHAT, RESPONSE])
def test_a_tool_that_was_left_out_cannot_be_forced(served: Running, path: str, choice: Any) -> None:
    tools = [{"type": kind, **more} for kind, more in _HOSTED.items()]
    status, found = posted(served, path, {**BODIES[path], "tools": tools, "tool_choice": choice})
    assert status == 400 and found["error"]["param"].startswith("tool_choice"), found


_TEXT = [{"type": "input_text", "text": "mark"}]
ITEMS: dict[str, dict[str, Any]] = {
    "additional_tools": {"role": "developer", "tools": [{**FUNCTION, "description": "mark"}]},
    "apply_patch_call": {"call_id": "1", "status": "completed", "operation": {"type": "delete_file", "path": "mark"}},
    "apply_patch_call_output": {"call_id": "1", "status": "failed", "output": "mark"},
    "code_interpreter_call": {"id": "1", "code": "mark", "outputs": [{"type": "logs", "logs": "5"}]},
    "computer_call": {"id": "1", "call_id": "1", "action": {"type": "type", "text": "mark"}},
    "computer_call_output": {"call_id": "mark", "output": {"type": "computer_screenshot", "image_url": "data:x"}},
    "custom_tool_call": {"call_id": "1", "name": "edit", "input": "mark"},
    "custom_tool_call_output": {"call_id": "1", "output": "mark"},
    "file_search_call": {"id": "1", "queries": ["q"], "results": [{"text": "mark"}]},
    "function_call": {"call_id": "1", "name": "look", "namespace": "mark", "arguments": "{}"},
    "function_call_output": {"call_id": "1", "output": [*_TEXT, {"type": "input_image", "image_url": "data:x"}]},
    "image_generation_call": {"id": "1", "status": "completed", "result": "aaaa", "revised_prompt": "mark"},
    "local_shell_call": {"id": "1", "call_id": "1", "action": {"type": "exec", "command": ["mark"], "env": {}}},
    "local_shell_call_output": {"id": "1", "output": "mark"},
    "mcp_approval_request": {"id": "1", "name": "ask", "server_label": "docs", "arguments": '{"x": "mark"}'},
    "mcp_approval_response": {"approval_request_id": "1", "approve": False, "reason": "mark"},
    "mcp_call": {"id": "1", "name": "ask", "server_label": "docs", "arguments": '{"x": 1}', "output": "mark"},
    "message": {"role": "user", "content": _TEXT},
    "program": {"id": "1", "call_id": "1", "code": "mark", "fingerprint": "x"},
    "program_output": {"id": "1", "call_id": "1", "result": "mark", "status": "completed"},
    "shell_call": {"call_id": "1", "action": {"commands": ["mark"]}},
    "shell_call_output": {"call_id": "1", "output": [{"stdout": "mark", "stderr": "", "outcome": {"type": "exit"}}]},
    "tool_search_call": {"call_id": "1", "arguments": {"query": "mark"}, "execution": "client"},
    "tool_search_output": {"call_id": "1", "tools": [{**FUNCTION, "description": "mark"}]},
    "web_search_call": {"id": "1", "status": "completed", "action": {"type": "search", "query": "mark"}},
}
"""Items that the model sees: "mark" is in its prompt."""
SILENT: dict[str, dict[str, Any]] = {
    "configuration_update": {"reasoning": {"effort": "low"}},
    "mcp_list_tools": {"id": "1", "server_label": "docs", "tools": [{"name": "ask", "input_schema": {}}]},
    "reasoning": {"id": "1", "summary": [], "encrypted_content": "x"},
}
UNREADABLE: dict[str, dict[str, Any]] = {
    "compaction": {"encrypted_content": "x"},
    "compaction_trigger": {},
    "item_reference": {"id": "msg_1"},
}


def prompt_of(items: list[dict[str, Any]], **more: Any) -> Mapping[str, Any]:
    (found,) = ResponsesRequest.model_validate({"model": NAME, "input": items, **more}).prompts()
    return {"messages": list(found.messages), "tools": list(found.tools)}


def test_every_item_of_openais_has_an_answer_here() -> None:
    assert ITEMS.keys() | SILENT.keys() | UNREADABLE.keys() == types_of(ResponseInputItemParam)


@pytest.mark.parametrize("kind", ITEMS)
def test_what_happened_is_in_the_prompt(served: Running, kind: str) -> None:
    before: dict[str, Any] = {"role": "user", "content": "how?"}
    item = {"type": kind, **ITEMS[kind]}
    assert "mark" in str(prompt_of([before, item]))
    status, found = posted(served, RESPONSE, {"input": [before, item, before], "max_output_tokens": 2})
    assert status == 200, found


PARTS: dict[str, dict[str, Any]] = {
    "input_text": {"text": "mark"},
    "output_text": {"text": "mark", "annotations": [], "logprobs": []},
    "refusal": {"refusal": "mark"},
    "text": {"text": "mark"},
}
PICTURES: dict[str, dict[str, Any]] = {
    "file": {"file": {"file_id": "file_1"}},
    "image_url": {"image_url": {"url": "data:x"}},
    "input_audio": {"input_audio": {"data": "x", "format": "wav"}},
    "input_file": {"file_id": "file_1"},
    "input_image": {"image_url": "data:x", "detail": "auto"},
}


def test_every_part_of_openais_has_an_answer_here() -> None:
    unions = (ResponseInputContentParam, ResponseContent, ChatCompletionContentPartParam, ChatContent)
    assert PARTS.keys() | PICTURES.keys() == set().union(*map(types_of, unions))


@pytest.mark.parametrize("kind", PARTS)
def test_what_was_said_is_in_the_prompt(kind: str) -> None:
    said: dict[str, Any] = {"role": "assistant", "content": [{"type": kind, **PARTS[kind]}]}
    (turn,) = prompt_of([said])["messages"]
    (other,) = ChatRequest.model_validate({"model": NAME, "messages": [said]}).prompts()
    assert turn == {"role": "assistant", "content": "mark"} == next(iter(other.messages))


def test_texts_of_a_message_are_lines_of_it() -> None:
    """As by vLLM and by llama.cpp's server: the end of one was glued to the beginning of the next.

    Those of an assistant are one text, which a model wrote.
    """
    texts = [{"type": "text", "text": text} for text in ("look at this", "be brief")]
    said = [{"role": role, "content": texts} for role in ("user", "assistant", "user")]
    called = [texts[0], {"type": "tool_use", "id": "1", "name": "look", "input": {}}, texts[1]]
    returned = {"type": "tool_result", "tool_use_id": "1", "content": texts}
    chat = {"model": NAME, "messages": [*said, {"role": "tool", "content": texts}]}
    response = {"model": NAME, "input": [*said, {"type": "function_call_output", "call_id": "1", "output": texts}]}
    turns = [*said, {"role": "assistant", "content": called}, {"role": "user", "content": [returned, *texts]}]
    conversations = [
        *ChatRequest.model_validate(chat).prompts(),
        *ResponsesRequest.model_validate(response).prompts(),
        *MessagesRequest.model_validate({"model": NAME, "max_tokens": 1, "messages": turns}).chat().prompts(),
    ]
    assert [len(each.messages) for each in conversations] == [4, 4, 6]
    for each in conversations:
        said_by = {(message["role"] == "assistant", message["content"]) for message in each.messages}
        assert said_by == {(False, "look at this\nbe brief"), (True, "look at thisbe brief")}
    predicted = ChatRequest.model_validate({**chat, "prediction": {"type": "content", "content": texts}})
    assert predicted.predicted == "look at thisbe brief"


@pytest.mark.parametrize("kind", PICTURES)
def test_what_is_no_text_is_refused(served: Running, kind: str) -> None:
    """An answer about a picture that the model has not seen would be another one."""
    asked = [{"role": "user", "content": [{"type": kind, **PICTURES[kind]}]}]
    for path, field in ((CHAT, "messages"), (RESPONSE, "input")):
        status, found = posted(served, path, {**BODIES[path], field: asked})
        assert status == 400 and found["error"]["param"] == f"{field}[0].content", found


def test_what_an_assistant_has_done_in_a_chat_is_in_the_prompt() -> None:
    """Refusals, and calls of tools that take a text: those that other servers' answers have."""
    call = {"id": "1", "type": "custom", "custom": {"name": "edit", "input": "mark"}}
    messages = [{"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "tool_calls": [call]}]
    (prompt,) = ChatRequest.model_validate({"model": NAME, "messages": messages}).prompts()
    refused, called = prompt.messages
    assert refused["content"] == "no"
    assert called["tool_calls"][0]["function"] == {"name": "edit", "arguments": {"input": "mark"}}


@pytest.mark.parametrize("kind", SILENT)
def test_what_a_model_is_not_shown_is_left_out(served: Running, kind: str) -> None:
    item = {"type": kind, **SILENT[kind]}
    assert prompt_of([ITEMS["message"], item]) == prompt_of([ITEMS["message"]])
    assert posted(served, RESPONSE, {"input": [ITEMS["message"], item], "max_output_tokens": 2})[0] == 200


@pytest.mark.parametrize("kind", [*UNREADABLE, "configuration_update", "an_item_of_next_year"])
def test_what_cannot_be_read_is_refused(served: Running, kind: str) -> None:
    """A conversation without it would be another one."""
    more = UNREADABLE.get(kind, {"text": {"format": {"type": "text"}}})
    body = {"input": [ITEMS["message"], {"type": kind, **more}]}
    status, found = posted(served, RESPONSE, body)
    assert (status, found["error"]["param"], found["error"]["code"]) == (400, "input[1].type", "unsupported_parameter")
