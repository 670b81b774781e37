"""What tokenizers do, what a prompt may be, and how one becomes token ids: as it is, or through a chat template.

Calls of functions are in Hermes' format where a template has none, and turns are joined where it refuses them apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

from ..errors import ChatTemplateError, FieldError, PromptError
from ..sandbox.workers import JobError, JobRaisedError, run
from .harmony import CALL, MESSAGE


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a model's chat template is given.

    Attributes:
        messages: with "role" and a text "content"; of assistants also "tool_calls" ("function" with "name" and
            "arguments", an object, or text that is none) and a thought by a name of ``THOUGHTS``; results of calls have
            the role "tool".
        tools: functions that may be called: "function" with "name", "description" and "parameters" (a JSON Schema).
        continued: the answer goes on with the last message, an assistant's, in place of beginning one.
        variables: what the template reads besides, such as "enable_thinking".
        day: that it writes, as YYYY-MM-DD; None: today.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    continued: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    day: str | None = None


Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Conversation
"""Text as it is, token ids, or a conversation: messages with "role" and "content" for the model's chat template."""


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back; transformers' tokenizers are such as they are.

    Attributes:
        chat_template: None, or empty, where a model has none; several by their names.
    """

    chat_template: str | dict[str, str] | None

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """Special tokens that templates know by names, such as "bos_token"."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """The ids of a text, with the special tokens that begin one; special tokens that it contains are found."""

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool = ..., clean_up_tokenization_spaces: bool = ...
    ) -> str | list[str]:
        """The text of ids (no list of texts: that is of lists of ids, which nobody gives)."""

    def get_vocab(self) -> dict[str, int]:
        """The ids of all tokens."""


CALL_TAGS = ("<tool_call>", "</tool_call>")
"""Around a call of a function in Hermes' format, {"name": ..., "arguments": {...}} on a line of its own between."""

THINK_TAGS = ("<think>", "</think>")
"""Around what a model thinks aloud before it answers."""

_GOES_ON = "\ue000goes on "
"""Behind the content that an answer goes on with, in a rendered conversation; a template may strip its space."""


def encode(
    tokenizer: Tokenizer | None, prompt: Prompt, field: str = "prompt", variables: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a prompt: text as it is, a conversation through the model's chat template, ids unchanged.

    Args:
        field: what it is, in errors.
        variables: that templates read where a conversation has no others of these names.

    Raises:
        PromptError: the prompt is empty, no text, or not ids and there is no tokenizer or no chat template.
    """
    if isinstance(prompt, Sequence) and not prompt:
        raise PromptError(f"the {field} is empty: give it at least one token", field)
    items: Sequence[Any] = prompt if isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes)) else ()
    if set(map(type, items)) == {int}:
        return list(items)
    if items and all(isinstance(message, Mapping) for message in items):
        prompt = Conversation(items)
    if not isinstance(prompt, (str, Conversation)):
        raise PromptError(f"the {field} is {prompt!r}: give text, token ids or a conversation of dicts", field)
    if tokenizer is None:
        raise PromptError(f"the {field} is text but the model has no tokenizer: give token ids", field)
    if isinstance(prompt, str):
        return _ids(tokenizer, prompt, field)
    prompt = replace(prompt, variables={**(variables or {}), **prompt.variables})
    return _ids(tokenizer, render(tokenizer, prompt), "prompt", add_special_tokens=False)


def _ids(tokenizer: Tokenizer, text: str, field: str, **options: bool) -> list[int]:
    check_text(text, field)
    try:
        return tokenizer.encode(text, **options)
    except PromptError as error:
        error.rename(field)
        raise
    except Exception as error:  # noqa: BLE001 - libraries raise what they like
        raise PromptError(f"the model's tokenizer does not take the {field} ({error}): give another", field) from None


def user(prompt: str) -> list[dict[str, str]]:
    """A conversation that consists of one question."""
    return [{"role": "user", "content": prompt}]


def render(tokenizer: Tokenizer, conversation: Conversation) -> str:
    """A conversation as the model's chat template writes it, up to where the answer begins.

    Raises:
        PromptError: a message lacks its role or content, or there is no template that takes the conversation.
    """
    messages, tools = [dict(m) for m in conversation.messages], [dict(tool) for tool in conversation.tools]
    for message in messages:
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise PromptError(f"message {message} of the conversation: give it a text 'role' and a text 'content'")
    check_text(json.dumps([messages, tools], ensure_ascii=False, default=str), "prompt")
    if not any(m["content"].strip() or m["role"] == "tool" or m.get("tool_calls") for m in messages):
        raise PromptError("the prompt is empty: give it at least one character")
    messages = [_with_thought(message) for message in messages]
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    probes: list[dict[str, int] | str] = []
    if tools or calls or any(message["role"] == "tool" for message in messages):
        probes = [_ARGUMENTS, *([_CUT] if any(isinstance(call["arguments"], str) for call in calls) else [])]
    template = template_of(tokenizer, tools=bool(tools))
    if not all(_writes_calls(tokenizer, template, arguments) for arguments in probes):
        messages, tools = _with_calls_as_text(messages, tools), []
        template = template_of(tokenizer)
    if not template:
        raise ChatTemplateError("the model has no chat template: give text to continue, or a template")
    failures = list[JobError]()
    for form in _forms(messages):
        try:
            return _rendered(tokenizer, template, form, tools, conversation)
        except JobError as error:
            failures.append(error)
            if not isinstance(error, JobRaisedError):
                break
    raise ChatTemplateError(
        f"the model's chat template does not take this conversation ({failures[0]}): give text to continue, or another "
        "template"
    )


THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of an assistant's thought in a message. Templates read the first, but gpt-oss's reads the second."""


def _with_thought(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its thought, whatever its name, under the names that templates read."""
    thought = next(filter(None, map(message.get, THOUGHTS)), None)
    return message | {name: thought for name in THOUGHTS[:2] if thought and not message.get(name)}


def _forms(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The forms of a conversation that templates may take: as it is, and three that strict templates do.

    In one a turn that calls functions has what it says at the end of its thought: gpt-oss's takes one of them. In the
    others neighbours of one role are one turn, but for results of calls, and all that the system says comes first: as a
    turn of its own, or at the beginning of the user's.
    """
    forms = [messages]
    if (form := [_with_all_thought(message) for message in messages]) != messages:
        forms.append(form)
    for role in ("system", "user"):
        turns = [{**turn, "role": role} for turn in messages if turn["role"] == "system"]
        turns += [turn for turn in messages if turn["role"] != "system"]
        form = list[dict[str, Any]]()
        for name, group in groupby(turns, itemgetter("role")):
            neighbours = list(group)
            form += neighbours if name == "tool" else [_joined(neighbours)]
        if form not in forms:
            forms.append(form)
    return forms


def _with_all_thought(message: dict[str, Any]) -> dict[str, Any]:
    """A message; one that thinks, says something and calls a function has said nothing."""
    if not (message["content"] and message.get("tool_calls") and message.get(THOUGHTS[0])):
        return message
    thought = f"{message[THOUGHTS[0]]}\n\n{message['content']}"
    return {**message, "content": "", **dict.fromkeys(THOUGHTS[:2], thought)}


def _joined(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Turns of one role as one: their texts a blank line apart, their calls one after the other."""
    joined = dict(turns[0])
    for name in ("content", *THOUGHTS):
        if texts := [str(turn[name]) for turn in turns if turn.get(name)]:
            joined[name] = "\n\n".join(texts)
    if calls := [call for turn in turns for call in turn.get("tool_calls") or ()]:
        joined["tool_calls"] = calls
    return joined


SET_HERE = frozenset(("messages", "tools", "add_generation_prompt"))
"""Variables of templates that a conversation sets itself."""


def check_variables(variables: Mapping[str, Any], field: str) -> None:
    """Raise FieldError where variables of a template are those that a conversation sets."""
    if name := next((name for name in variables if name in SET_HERE), None):
        raise FieldError(f"{field}.{name}", f"{field}.{name} is what a conversation sets itself: leave it out")


def template_of(tokenizer: Tokenizer, *, tools: bool = False) -> str:
    """The model's chat template; empty: it has none."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("tool_use" if tools else "default") or template.get("default", "")
    return template or ""


@lru_cache(maxsize=8)
def template_variables(template: str) -> frozenset[str]:
    """The names that a chat template reads."""
    try:
        return frozenset(run("variables", template))
    except JobError:
        return frozenset()


def _rendered(
    tokenizer: Tokenizer,
    template: str,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
    conversation: Conversation,
) -> str:
    """A conversation as a chat template writes it, up to what begins an answer, or to the last message's content.

    Args:
        messages, tools: of the conversation, as the template takes them, but for typed parts.

    Raises:
        JobError: the template fails.
    """
    if continued := conversation.continued:
        *before, last = messages
        messages = [*before, {**last, "content": last["content"] + _GOES_ON}]
    if _takes_parts(tokenizer, template, conversation.variables):
        messages = [_in_parts(message) for message in messages]
    given = {"messages": messages, "tools": list(tools) or None, "add_generation_prompt": not continued}
    text = run(
        "render",
        template,
        {**tokenizer.special_tokens_map, "documents": None, **conversation.variables, **given},
        conversation.day,
    )
    if not continued:
        return str(text)
    beginning, mark, behind = str(text).rpartition(_GOES_ON.rstrip())
    if not mark:
        raise JobError("it leaves the last message's content out")
    return beginning if behind.startswith(" ") else beginning.rstrip()


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a list of one typed part."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


_SAID = "saidbytheuser"


def _takes_parts(tokenizer: Tokenizer, template: str, variables: Mapping[str, Any]) -> bool:
    """The chat template writes contents that are lists of typed parts, and leaves those that are texts out.

    Raises:
        JobError: it takes too much.
    """
    said = {"role": "user", "content": _SAID}
    try:
        as_text, in_parts = (_probed(tokenizer, template, [turn], variables) for turn in (said, _in_parts(said)))
    except JobRaisedError:
        return False  # it may take another conversation
    return _SAID not in as_text.lower() and _SAID in in_parts.lower()


def call_text(name: str, arguments: object) -> str:
    """A call of a function in Hermes' format, tags included."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"\n{call}\n".join(CALL_TAGS)


_ARGUMENTS, _CUT = {"x": 1}, '{"x": "cut'
_PROBED = {"name": "probe", "description": "what_it_does", "parameters": {"type": "object", "properties": {}}}


def _writes_calls(tokenizer: Tokenizer, template: str, arguments: dict[str, int] | str) -> bool:
    """The chat template describes tools, and writes past calls in Hermes' format or in Harmony's, white space aside.

    A template that does neither gets all of it as text, and so does one that has a format of its own: an answer's calls
    are parsed in these formats alone. Arguments that are text may be written as they are, or as JSON.
    """
    call = {"name": "probe", "arguments": arguments}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "b"},
    ]
    try:
        text = _probed(tokenizer, template, messages, {}, [{"type": "function", "function": _PROBED}])
    except JobError:
        return False
    written = "".join(text.split())
    forms = [call_text("probe", arguments), f"{MESSAGE}{json.dumps(arguments)}{CALL}"]
    if isinstance(arguments, str):
        forms += [form.replace(json.dumps(arguments), arguments) for form in forms]
    return "what_it_does" in written and any("".join(form.split()) in written for form in forms)


def _probed(
    tokenizer: Tokenizer,
    template: str,
    messages: Sequence[dict[str, Any]],
    variables: Mapping[str, Any],
    tools: Sequence[dict[str, Any]] | None = None,
) -> str:
    """What a chat template makes of a conversation that is always the same.

    Raises:
        JobError: the template fails.
    """
    given = {"messages": messages, "tools": tools, "add_generation_prompt": True}
    every = {**tokenizer.special_tokens_map, "documents": None, **variables, **given}
    return _kept(template, json.dumps(every, default=str))


@lru_cache(maxsize=32)
def _kept(template: str, variables: str) -> str:
    return str(run("render", template, json.loads(variables)))


def _with_calls_as_text(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools, calls and their results in Hermes' format: in messages of the system, the assistant and the user."""
    rendered: list[dict[str, Any]] = []
    for role, turns in groupby(messages, itemgetter("role")):
        if role == "tool":
            results = [f"<tool_response>\n{turn['content']}\n</tool_response>" for turn in turns]
            rendered.append({"role": "user", "content": "\n".join(results)})
        else:
            for turn in turns:
                calls = [call["function"] for call in turn.get("tool_calls") or ()]
                written = [call_text(call["name"], call["arguments"]) for call in calls]
                content = "\n".join(filter(None, [turn["content"], *written]))
                thought = {name: turn[name] for name in THOUGHTS if name in turn}
                rendered.append({"role": role, "content": content, **thought})
    if tools:
        instructions = _INSTRUCTIONS.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if rendered[0]["role"] == "system":
            rendered[0]["content"] += f"\n\n{instructions}"
        else:
            rendered.insert(0, {"role": "system", "content": instructions})
    return rendered


_INSTRUCTIONS = """# Tools

Functions that you can call, as JSON, one in each line:
<tools>
{}
</tools>

To call one, write its name and its arguments as JSON inside tags, and do so again for each further call:
<tool_call>
{{"name": FUNCTION, "arguments": {{ARGUMENT: VALUE}}}}
</tool_call>

What a call returns comes to you inside <tool_response></tool_response>."""


def check_text(text: str, field: str) -> None:
    """Raise PromptError where a text has lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError(f"the {field} is not valid UTF-8: convert it, for example with iconv", field) from None
