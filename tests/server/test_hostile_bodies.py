"""Bodies that no client should send, over all routes: each is refused with one sentence that names the field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from draftree.openai import bad_bodies

from .running import NAME, TEXT, Running, posted

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
    COMPLETION: {"prompt": TEXT, "max_tokens": 2},
    RESPONSE: {"input": TEXT, "max_output_tokens": 2},
    "/tokenize": {"prompt": TEXT},
    "/detokenize": {"tokens": [1, 2]},
}
ANSWERS = (CHAT, COMPLETION, RESPONSE)
LIMIT = {CHAT: "max_tokens", COMPLETION: "max_tokens", RESPONSE: "max_output_tokens"}
PROMPT = {CHAT: "messages", COMPLETION: "prompt", RESPONSE: "input"}
HALF = "\ud800"
DEEP: Any = json.loads("[" * 500 + "]" * 500)

# What is wrong on every route that answers: field -> values.
WRONG: dict[str, list[Any]] = {
    "temperature": [-1, "hot", float("nan"), float("inf"), True, [0.5], {}, 1e-9],
    "top_p": [0, -1, 2, "1", 1e400],
    "top_k": [-2, 1.5, "5"],
    "min_p": [-0.1, 1.1],
    "seed": [-2, 0.5, "7"],
    "stop": [5, [5], [""], {"a": 1}, ["x"] * 2000],
    "frequency_penalty": [-3, 3],
    "presence_penalty": ["much"],
    "repetition_penalty": [0, -1, 11],
    "logit_bias": [{"x": 1}, {"99999": 1}, {"-1": 1}, {"²": 1}, {"9" * 5000: 1}, {"1": 1000}, [1]],
    "min_tokens": [-1, 1000, "two"],
    "stop_token_ids": [[-1], [99999], "a", [10**30]],
    "bad_words": [[""], "a", [HALF]],
    "allowed_token_ids": [[], [99999], [True]],
    "include_stop_str_in_output": [1],
    "skip_special_tokens": ["no"],
    "truncate_prompt_tokens": [0, 5],
    "timeout": [0, -1, "soon"],
    "priority": [10**400, "high"],
    "stream": ["yes", 1],
    "stream_options": [5, {"include_usage": "yes"}],
    "draftree": [5, {"method": "magic"}, {"nodes": -1}, {"speed": 9}, {HALF: 1}, {"settings": {"x": []}}],
    "structured_outputs": [5, {}, {"regex": "("}, {"xml": "a"}, {"choice": []}, {"json": 5}],
    "user": [HALF],
    "note": [{"a": [HALF]}, float("-inf"), {HALF: 1}],
}
MISPLACED: list[tuple[str, str, Any]] = [
    (CHAT, "messages", []),
    (CHAT, "messages", "hello"),
    (CHAT, "messages", [5]),
    (CHAT, "messages", [{"role": "wizard", "content": "x"}]),
    (CHAT, "messages", [{"content": "x"}]),
    (CHAT, "messages", [{"role": "user", "content": ""}]),
    (CHAT, "messages", [{"role": "user", "content": HALF}]),
    (CHAT, "messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    (CHAT, "messages", [{"role": "user", "content": TEXT * 100}]),
    (CHAT, "messages", [{"role": "user", "content": [{"text": "x"}]}]),
    (CHAT, "messages", [{"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}}]),
    (CHAT, "messages", DEEP),
    (CHAT, "n", 0),
    (CHAT, "n", 17),
    (CHAT, "max_tokens", 0),
    (CHAT, "max_tokens", 5000),
    (CHAT, "max_tokens", "ten"),
    (CHAT, "max_completion_tokens", 5000),
    (CHAT, "max_completion_tokens", -1),
    (CHAT, "top_logprobs", 2),
    (CHAT, "top_logprobs", 21),
    (CHAT, "logprobs", 1),
    (CHAT, "prediction", {"type": "image", "content": "x"}),
    (CHAT, "prediction", {"type": "content", "content": "a b " * 200}),
    (CHAT, "tools", [{"type": "function", "function": {"name": "a b"}}]),
    (CHAT, "tools", 5),
    (CHAT, "tools", [5]),
    (CHAT, "tools", [{"function": {"name": "f"}}]),
    (CHAT, "tools", [{"type": 5}]),
    (CHAT, "tools", [{"type": "namespace", "name": "", "tools": []}]),
    (CHAT, "tools", [{"type": "namespace", "name": "f"}]),
    (CHAT, "tools", [{"type": "namespace", "name": "f", "tools": [{"type": "function", "name": "a b"}]}]),
    (CHAT, "tools", [{"type": "namespace", "name": "f", "tools": [{"type": "function", "name": "g"}] * 2}]),
    (CHAT, "tool_choice", "required"),
    (CHAT, "tool_choice", {"type": "function", "function": {"name": "f"}}),
    (CHAT, "response_format", {"type": "yaml"}),
    (CHAT, "response_format", {"type": "json_schema"}),
    (CHAT, "continue_final_message", True),
    (CHAT, "add_generation_prompt", False),
    (CHAT, "prompt", TEXT),
    (CHAT, "input", TEXT),
    (CHAT, "instructions", "Be brief."),
    (CHAT, "add_special_tokens", True),
    (COMPLETION, "prompt", ""),
    (COMPLETION, "prompt", []),
    (COMPLETION, "prompt", [""]),
    (COMPLETION, "prompt", [[]]),
    (COMPLETION, "prompt", [1, "a"]),
    (COMPLETION, "prompt", [99999]),
    (COMPLETION, "prompt", [-1]),
    (COMPLETION, "prompt", 5),
    (COMPLETION, "prompt", HALF),
    (COMPLETION, "prompt", DEEP),
    (COMPLETION, "prompt", TEXT * 100),
    (COMPLETION, "max_tokens", -1),
    (COMPLETION, "max_tokens", 0),
    (COMPLETION, "max_tokens", 5000),
    (COMPLETION, "logprobs", -1),
    (COMPLETION, "logprobs", 21),
    (COMPLETION, "echo", 1),
    (COMPLETION, "n", -1),
    (COMPLETION, "best_of", 4),
    (COMPLETION, "suffix", "x"),
    (COMPLETION, "messages", [{"role": "user", "content": TEXT}]),
    (COMPLETION, "max_completion_tokens", 4),
    (COMPLETION, "response_format", {"type": "json_object"}),
    (COMPLETION, "tools", [{"type": "function", "function": {"name": "f"}}]),
    (COMPLETION, "add_special_tokens", False),
    (RESPONSE, "input", []),
    (RESPONSE, "input", 5),
    (RESPONSE, "input", ""),
    (RESPONSE, "input", TEXT * 100),
    (RESPONSE, "input", [{"type": "reasoning"}]),
    (RESPONSE, "input", [{"type": 5}]),
    (RESPONSE, "input", [{"type": "mcp_call", "name": ""}] * 20000),
    (RESPONSE, "input", [{"type": "additional_tools", "role": "developer"}]),
    (RESPONSE, "input", [{"type": "additional_tools", "tools": [{"type": "function", "name": "a b"}]}]),
    (RESPONSE, "input", [{"role": "user"}]),
    (RESPONSE, "input", [{"content": "x"}]),
    (RESPONSE, "input", [{"type": "function_call", "arguments": "{}"}]),
    (RESPONSE, "max_output_tokens", 0),
    (RESPONSE, "max_output_tokens", 5000),
    (RESPONSE, "max_tokens", 4),
    (RESPONSE, "n", 2),
    (RESPONSE, "previous_response_id", "resp_1"),
    (RESPONSE, "conversation", "conv_1"),
    (RESPONSE, "background", True),
    (RESPONSE, "text", {"format": {"type": "json_schema"}}),
    (RESPONSE, "include", "logprobs"),
    (RESPONSE, "metadata", {"a": 5}),
    (RESPONSE, "metadata", {"a": HALF}),
    (RESPONSE, "reasoning", "high"),
    (RESPONSE, "messages", []),
    ("/tokenize", "prompt", 5),
    ("/tokenize", "prompt", ""),
    ("/tokenize", "prompt", None),
    ("/tokenize", "prompt", HALF),
    ("/tokenize", "chat_template", "{{ 1 }}"),
    ("/detokenize", "tokens", [99999]),
    ("/detokenize", "tokens", [-1]),
    ("/detokenize", "tokens", ["a"]),
    ("/detokenize", "tokens", "a"),
    ("/detokenize", "tokens", None),
]
HOSTILE = [(path, field, value) for path in ANSWERS for field, values in WRONG.items() for value in values] + MISPLACED

# Fields that would change an answer: a value that does, one that does not, and a word of the way out.
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "audio": ({"voice": "x", "format": "wav"}, None, "leave it out"),
    "best_of": (4, 1, "leave it out"),
    "chat_template": ("{{ 1 }}", "", "--chat-template"),
    "function_call": ({"name": "f"}, "auto", "tool_choice"),
    "functions": ([{"name": "f"}], [], "tools"),
    "grammar": ('root ::= "a"', "", "structured_outputs"),
    "guided_choice": (["a"], None, "structured_outputs"),
    "guided_json": ({"type": "object"}, None, "structured_outputs"),
    "n_predict": (200, None, "max_tokens"),
    "guided_regex": ("a", None, "structured_outputs"),
    "json_schema": ({"type": "object"}, None, "structured_outputs"),
    "modalities": (["text", "audio"], ["text"], "leave it out"),
    "repeat_penalty": (1.3, 1.0, "repetition_penalty"),
    "suffix": ("x", "", "leave it out"),
    "use_beam_search": (True, False, "leave it out"),
    "web_search_options": ({}, None, "leave it out"),
}


def text_of(value: Any) -> str:
    return json.dumps(value)[:50]


@pytest.mark.parametrize(("path", "field", "value"), HOSTILE, ids=text_of)
def test_a_hostile_body_is_refused_by_the_name_of_its_field(served: Running, path: str, field: str, value: Any) -> None:
    status, found = posted(served, path, {**GOOD[path], field: value})
    error = found["error"]
    assert status == 400 and set(error) == {"message", "type", "param", "code"}
    assert field in error["message"] and "\n" not in error["message"] and len(error["message"]) < 1300
    assert re.match(rf"{field}(\.|\[|$)", error["param"]), error
    assert error["code"] is not None and not re.search(r"str\b|list\[|function-", error["param"])
    assert served.idle


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("value", [1, "x", {}, [HALF]])
def test_half_a_character_as_a_field_is_named_by_its_code(served: Running, path: str, value: Any) -> None:
    """The name of the field in the error could not be sent: 500."""
    status, found = posted(served, path, {**GOOD[path], HALF: value})
    assert (status, found["error"]["param"]) == (400, "\\ud800")


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("body", [b"", b"{", b"null", b"[]", b'"a"', b"\xff\xfe", b"{" * 9000, b'{"n": ' + b"9" * 5000])
def test_a_body_that_is_no_object_is_one_sentence(served: Running, path: str, body: bytes) -> None:
    status, found = posted(served, path, body)
    said = "the body is no JSON object: send one, as application/json"
    assert (status, found["error"]["message"], found["error"]["param"]) == (400, said, None)


def test_so_is_one_of_another_type(served: Running) -> None:
    status, found = posted(served, CHAT, json.dumps(GOOD[CHAT]).encode(), {"Content-Type": "text/plain"})
    assert status == 400 and "as application/json" in found["error"]["message"]


@pytest.mark.parametrize("path", ANSWERS)
@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_would_change_the_answer_is_refused_by_name(served: Running, path: str, field: str) -> None:
    changes, neutral, way_out = REFUSED[field]
    status, found = posted(served, path, {**GOOD[path], field: changes})
    error = found["error"]
    assert (status, error["param"], error["code"]) == (400, field, "unsupported_parameter")
    assert error["message"].startswith(field) and way_out in error["message"]
    assert posted(served, path, {**GOOD[path], field: neutral})[0] == 200


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What the log says of requests from here on."""
    bad_bodies.logged.clear()
    yield lambda: [record.getMessage() for record in caplog.records if record.name == "draftree.openai"]
    bad_bodies.logged.clear()


@pytest.mark.parametrize("path", GOOD)
def test_an_unknown_field_is_ignored_and_the_log_names_it_once(
    served: Running, lines: Callable[[], list[str]], path: str
) -> None:
    for value in (5, "x", {"a": [1]}):
        assert posted(served, path, {**GOOD[path], "mirostat": value})[0] == 200
    assert ["mirostat" in line for line in lines()].count(True) == 1


def test_made_up_names_fill_neither_the_log_nor_memory(served: Running, lines: Callable[[], list[str]]) -> None:
    """Each name was a line of the log, and was kept: a client could send a thousand a request, of megabytes."""
    for start in range(0, 3000, 1000):
        more = {f"{'x' * 500}{n}" if n % 2 else f"{n}": n for n in range(start, start + 1000)}
        assert posted(served, CHAT, {**GOOD[CHAT], **more})[0] == 200
        tools = [{"type": f"made up {n}"} for n in range(start, start + 100)]
        assert posted(served, CHAT, {**GOOD[CHAT], "tools": tools})[0] == 200
    assert 200 < len(lines()) < 300 and sum(map(len, lines())) < 1 << 16
    assert sum(map(len, bad_bodies.logged)) < 1 << 15


def test_a_name_cannot_write_lines_or_colours_into_the_log(served: Running, lines: Callable[[], list[str]]) -> None:
    name = "a\nERROR b\x1b[31m\u202e\x85\u2028"
    assert posted(served, CHAT, {**GOOD[CHAT], name: 1})[0] == 200
    (line,) = lines()
    assert line.isprintable() and r"a\nERROR b\x1b[31m\u202e\x85\u2028" in line


@pytest.mark.parametrize("path", GOOD)
def test_a_missing_field_is_named(served: Running, path: str) -> None:
    field = next(iter(GOOD[path]))
    status, found = posted(served, path, {name: value for name, value in GOOD[path].items() if name != field})
    assert status == 400 and found["error"]["param"] == field
    if path != "/tokenize":  # which has two kinds of prompts
        assert found["error"]["code"] == "missing_required_parameter"


@pytest.mark.parametrize("path", ANSWERS)
def test_what_does_not_fit_the_context_has_openais_code_and_words(served: Running, path: str) -> None:
    """litellm and others find such errors by "this model's maximum context length is"."""
    long = {CHAT: [{"role": "user", "content": TEXT * 100}], COMPLETION: TEXT * 100, RESPONSE: TEXT * 100}[path]
    for field, value in ((PROMPT[path], long), (LIMIT[path], 5000)):
        status, found = posted(served, path, {**GOOD[path], field: value})
        error = found["error"]
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", field)
        assert "this model's maximum context length is 128 tokens" in error["message"]
        assert "string_above_max_length" not in error["message"]


@pytest.mark.parametrize("path", ANSWERS)
def test_another_model_is_not_found(served: Running, path: str) -> None:
    status, found = posted(served, path, {**GOOD[path], "model": "gpt-9"})
    assert (status, found["error"]["code"], found["error"]["param"]) == (404, "model_not_found", "model")
    assert NAME in found["error"]["message"]
