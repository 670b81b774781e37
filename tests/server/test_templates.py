"""What makes a prompt of a conversation: variables of chat templates, a template for a model that has none."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftree.cli.main import run
from draftree.engine.engine import Engine
from draftree.openai.bad_bodies import logged
from draftree.openai.batches import Answering, BatchLine
from draftree.text.encoding import user

from .. import tiny_gguf
from ..scripted import ScriptedModel, thinking_tokenizer
from .running import LOOKUP, NAME, Running, posted, running

TEMPLATE = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}{{ color }},{{ size }}"
READS_EFFORT = TEMPLATE + ",{{ reasoning_effort }}"
CHAT, RESPONSES, TOKENIZE = "/v1/chat/completions", "/v1/responses", "/tokenize"


def bodies(**more: Any) -> list[tuple[str, dict[str, Any]]]:
    return [
        (CHAT, {"messages": user("hi"), "max_tokens": 1, **more}),
        (RESPONSES, {"input": "hi", "max_output_tokens": 1, **more}),
        (TOKENIZE, {"messages": user("hi"), **more}),
    ]


def model(template: str | None = TEMPLATE) -> ScriptedModel:
    tokenizer = thinking_tokenizer(template or "")
    tokenizer.chat_template = template
    return ScriptedModel("yes", tokenizer)


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(model(), template_variables={"color": "red", "size": 1}) as found:
        yield found


def prompt_of(served: Running, path: str, body: dict[str, Any]) -> str:
    """The prompt that a body makes: of ``/tokenize`` as it answers, of others by their number of tokens."""
    status, found = posted(served, path, body)
    assert status == 200, found
    if path == TOKENIZE:
        return str(posted(served, "/detokenize", {"tokens": found["tokens"]})[1]["prompt"])
    usage = found["usage"]
    return "x" * int(usage.get("prompt_tokens", usage.get("input_tokens")))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (None, "red,1"),
        ({}, "red,1"),
        ({"color": "blue"}, "blue,1"),
        ({"color": "dark green", "size": [1, 2]}, "dark green,[1, 2]"),
        ({"color": None, "unread": 1}, "None,1"),
    ],
)
def test_a_requests_variables_come_before_the_servers(served: Running, variables: Any, expected: str) -> None:
    text = f"[user|hi]{expected}"
    for path, body in bodies(chat_template_kwargs=variables):
        found = prompt_of(served, path, body)
        assert found == text if path == TOKENIZE else len(found) == len(text)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_what_a_conversation_sets_itself_is_refused(served: Running, name: str) -> None:
    for path, body in bodies(chat_template_kwargs={name: []}):
        status, found = posted(served, path, body)
        assert (status, found["error"]["param"]) == (400, f"chat_template_kwargs.{name}")


def test_variables_are_an_object(served: Running) -> None:
    for path, body in bodies(chat_template_kwargs="x"):
        status, found = posted(served, path, body)
        assert (status, found["error"]["param"]) == (400, "chat_template_kwargs")


EFFORTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": user("hi"), "max_tokens": 1, "reasoning_effort": "high"}),
    (RESPONSES, {"input": "hi", "max_output_tokens": 1, "reasoning": {"effort": "high", "summary": "auto"}}),
]


@pytest.mark.parametrize(("path", "body"), EFFORTS)
def test_the_effort_goes_to_a_template_that_reads_it(
    caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    with running(model(READS_EFFORT)) as served, caplog.at_level(logging.INFO, "draftree.openai"):
        assert len(prompt_of(served, path, body)) == len("[user|hi],,high")
    assert not [record for record in caplog.records if record.name == "draftree.openai"]


@pytest.mark.parametrize(("path", "body"), EFFORTS)
def test_others_do_without_and_the_log_says_so(
    served: Running, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    logged.clear()  # it says so once
    with caplog.at_level(logging.INFO, "draftree.openai"):
        assert len(prompt_of(served, path, body)) == len("[user|hi]red,1")
    (record,) = [record for record in caplog.records if record.name == "draftree.openai"]
    assert "reasoning_effort" in record.getMessage()


def test_a_response_says_how_it_was_to_think(served: Running) -> None:
    assert posted(served, *EFFORTS[1])[1]["reasoning"] == {"effort": "high", "summary": "auto"}


def test_a_batch_has_variables_too() -> None:
    engine = Engine(model(), LOOKUP, template_variables={"color": "red", "size": 1})
    line = {"prompt": "hi", "max_tokens": 1, "chat_template_kwargs": {"size": 234}}
    (record,) = Answering(engine, LOOKUP, NAME, 2).records([BatchLine(1, json.dumps(line).encode())])
    assert record["response"]["body"]["usage"]["prompt_tokens"] == len("[user|hi]red,234")


def test_a_client_of_a_model_without_a_template_is_told_what_a_client_can_do() -> None:
    """The message named an option of the command line."""
    with running(model(None)) as served:
        for path, body in bodies():
            status, found = posted(served, path, body)
            error = found["error"]
            assert (status, error["param"]) == (400, "input" if path == RESPONSES else "messages")
            assert "/v1/completions" in error["message"] and "--raw" not in error["message"]
        assert posted(served, "/v1/completions", {"prompt": "hi", "max_tokens": 1})[0] == 200


def test_who_is_at_the_command_line_is_told_of_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tiny_gguf.write(tmp_path / "base.gguf", template=None))
    assert run(["generate", "hi", "--target", target]) == 2
    said = capsys.readouterr().err
    assert "--raw" in said and "--chat-template" in said and "/v1" not in said


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_a_file_gives_a_base_model_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    target, template = str(tiny_gguf.write(tmp_path / "base.gguf", template=None)), tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    options = ["--target", target, "--chat-template", str(template), "--max-tokens", "2"]
    options += ["--chat-template-kwargs", '{"color": "red"}']
    lines, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text('{"prompt": "hi", "max_tokens": 2}\n')
    if command == "generate":
        assert run(["generate", "hi", "--json", *options]) == 0
        assert json.loads(capsys.readouterr().out)["token_ids"]
    else:
        assert run(["batch", str(lines), str(answers), *options[:4], *options[6:]]) == 0
        record = json.loads(answers.read_text())
        assert record["response"]["body"]["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chat-template", "missing.jinja"], "missing.jinja"),
        (["--chat-template", "damaged.jinja"], "chat template"),
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs"),
        (["--chat-template-kwargs", "{"], "--chat-template-kwargs"),
        (["--chat-template-kwargs", '{"messages": 1}'], "--chat-template-kwargs.messages"),
        (["--chat-template", "damaged.jinja", "--beams", "2"], "--beams"),
    ],
)
def test_a_template_that_does_not_do_is_found_at_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    target = str(tiny_gguf.write(tmp_path / "base.gguf", template=None))
    (tmp_path / "damaged.jinja").write_text("{% if %}")
    assert run(["generate", "hi", "--target", target, *options]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": ""}],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": " \n"}],
        [*user("hi"), {"role": "assistant", "content": ""}],
        [*user("hi"), {"role": "assistant", "content": "yes"}, {"role": "user", "content": None}],
    ],
)
def test_a_blank_last_message_beside_text_is_no_empty_prompt(served: Running, messages: list[dict[str, Any]]) -> None:
    """Agents start a conversation by its system text."""
    assert posted(served, CHAT, {"messages": messages, "max_tokens": 1})[0] == 200
    assert posted(served, TOKENIZE, {"messages": messages})[0] == 200


def test_a_completion_has_a_response_format(served: Running) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [7]}}}
    body = {"prompt": "hi", "response_format": wanted}
    status, found = posted(served, "/v1/completions", body)
    assert (status, found["choices"][0]["text"]) == (200, "7")
    status, found = posted(served, "/v1/completions", {**body, "structured_outputs": {"choice": ["a"]}})
    assert (status, found["error"]["param"]) == (400, "structured_outputs")


def test_tokenize_knows_llama_cpps_name_of_a_prompt(served: Running) -> None:
    for more in ({}, {"add_special_tokens": False}):
        named, other = ({name: "hi", **more} for name in ("content", "prompt"))
        assert posted(served, TOKENIZE, named) == posted(served, TOKENIZE, other)
    status, found = posted(served, TOKENIZE, {"prompt": "hi", "content": "hi"})
    assert (status, found["error"]["param"]) == (400, "prompt")
