"""What is wrong with a body: fields that are refused by name, and errors in OpenAI's shape. Knows no HTTP.

Fields that this server reads are taken. Others are ignored, and the log names them; few are refused, for what a client
gets without them is another answer.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..config import way_out
from ..errors import ChatTemplateError, ContextError, FieldError, InputError, shortened

INVALID, MISSING = "invalid_request_error", "not_found_error"
"""Types of errors."""

log = logging.getLogger("draftree.openai")

NOT_JSON = "the body is no JSON object: send one, as application/json"

_OTHER_TOOLS = "use tools and tool_choice"
_OTHER_CONSTRAINT = "use structured_outputs"
_OTHER_LIMIT = "use max_tokens, or max_output_tokens of a response"
_OF_CHATS = "send it to /v1/chat/completions"
_OF_RESPONSES = "send it to /v1/responses"
_ALONE = "leave it out"
_REFUSED: Mapping[str, tuple[str, Sequence[object]]] = {
    "add_special_tokens": (_ALONE, (True,)),
    "audio": (_ALONE, ()),
    "best_of": (_ALONE, (1,)),
    "chat_template": ("start the server with --chat-template", ("",)),
    "function_call": (_OTHER_TOOLS, ("none", "auto")),
    "functions": (_OTHER_TOOLS, ([],)),
    "grammar": (_OTHER_CONSTRAINT, ("",)),
    "guided_choice": (_OTHER_CONSTRAINT, ()),
    "guided_grammar": (_OTHER_CONSTRAINT, ()),
    "guided_json": (_OTHER_CONSTRAINT, ()),
    "guided_regex": (_OTHER_CONSTRAINT, ()),
    "input": (_OF_RESPONSES, ()),
    "instructions": (_OF_RESPONSES, ()),
    "json_schema": (_OTHER_CONSTRAINT, ()),
    "max_completion_tokens": (_OTHER_LIMIT, ()),
    "max_output_tokens": (_OTHER_LIMIT, ()),
    "messages": (_OF_CHATS, ()),
    "modalities": (_ALONE, (["text"],)),
    "moderation": (_ALONE, ()),
    "prompt": ("send a text to /v1/completions", ()),
    "repeat_penalty": ("use repetition_penalty", (1,)),
    "response_format": ("use text.format of a response", ({"type": "text"},)),
    "suffix": (_ALONE, ("",)),
    "tool_choice": (_OF_CHATS, ("none", "auto")),
    "tools": (_OF_CHATS, ([],)),
    "truncate_prompt_tokens": ("shorten the prompt", ()),
    "use_beam_search": (_ALONE, (False,)),
    "web_search_options": (_ALONE, ()),
}
"""Fields that clients send and that would change the answer -> the way out, and the values that change nothing."""

_MOST_LOGGED = 1 << 8
"""Kinds of things left out that the log names: clients make names up."""
_LONGEST_LOGGED = 80
_MOST_OBJECTS = 1 << 14
"""Messages, their parts, calls and all else that is an object or a list: each takes some 20 us to be read."""
_MOST_FIELDS = 1 << 10
_NESTED = (dict, list)


class UnsupportedError(FieldError):
    """A field that would change the answer, and is not supported."""

    def __init__(self, field: str, way_out: str) -> None:
        super().__init__(field, f"{field} is not supported here: {way_out}")


class UnknownModelError(FieldError):
    """The model is another one."""


def check_model(asked: str, there: str) -> None:
    """Raise UnknownModelError unless a model is the one that is there."""
    if asked != there:
        raise UnknownModelError("model", f"no model {asked!r}: there is {there!r}")


def refuse_unsupported(extra: Mapping[str, object]) -> None:
    """Refuse fields that would change the answer.

    Raises:
        UnsupportedError: of the first such field.
    """
    for name, value in extra.items():
        way_out, neutral = _REFUSED.get(name, ("", (value,)))
        if value not in neutral:
            raise UnsupportedError(name, way_out)


logged: set[str] = set()
"""What the log has named."""


def left_out(what: str, why: str) -> None:
    """Log what requests have and no answer needs: each kind once, its name cut and its control characters escaped."""
    what = what if len(what) <= _LONGEST_LOGGED else f"{what[:_LONGEST_LOGGED]}…"
    if what in logged or len(logged) > _MOST_LOGGED:
        return
    logged.add(what)
    if len(logged) > _MOST_LOGGED:
        log.warning("more is left out of requests; the log has named %d kinds and names no others", _MOST_LOGGED)
    else:
        name = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in what)
        log.warning("%s of requests is left out: %s", name, why)


def check_values(body: object) -> object:
    """The body, if an answer could repeat all that it has.

    Raises:
        FieldError: a number is none (NaN, Infinity), or a text has half a character, or is nested too deep, or it has
            more objects, lists or fields than can be read while others wait.
    """
    if isinstance(body, dict) and len(body) > _MOST_FIELDS:
        raise FieldError([*body][_MOST_FIELDS], f"the body has {len(body)} fields: send at most {_MOST_FIELDS}")
    for name, value in body.items() if isinstance(body, dict) else ():
        if _objects(value) > _MOST_OBJECTS:
            raise FieldError(name, f"{name} has more than {_MOST_OBJECTS} objects and lists: send fewer")
        try:
            json.dumps({name: value}, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            named = _whole(name)
            why = f"{named} is no JSON in UTF-8 ({error}): send whole characters and finite numbers"
            raise FieldError(named, why) from None
    return body


def _objects(value: object) -> int:
    """Objects and lists inside it; no more are counted than may be there."""
    found, left = 0, [value]
    while left and found <= _MOST_OBJECTS:
        if isinstance(inner := left.pop(), _NESTED):
            found += 1
            left += [each for each in (inner.values() if isinstance(inner, dict) else inner) if type(each) in _NESTED]
    return found


def error(message: str, kind: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    where = None if field is None else _whole(field)
    return {"error": {"message": _whole(message), "type": kind, "param": where, "code": code}}


def _whole(text: str) -> str:
    """Text with escapes in place of halves of characters, which cannot be sent."""
    return text.encode(errors="backslashreplace").decode()


def failure(found: Exception, prefix: str = "") -> tuple[int, dict[str, Any]]:
    """Status and body of a request that was not answered; ``prefix`` begins the message."""
    if not isinstance(found, InputError):
        why = shortened(f"{prefix}{type(found).__name__}: {' '.join(str(found).split())}")
        return 500, error(why, "server_error")
    if not isinstance(found, FieldError):
        return 400, error(f"{prefix}{found}", INVALID)
    code = next((word for kind, word in _WORDS.items() if isinstance(found, kind)), "invalid_value")
    message = str(found) if found.field in str(found) else f"{found.field}: {found}"
    if isinstance(found, ChatTemplateError):
        message += " (/v1/completions continues texts; who serves the model gives it a template by --chat-template)"
    status, kind = (404, MISSING) if isinstance(found, UnknownModelError) else (400, INVALID)
    return status, error(prefix + message, kind, found.field, code)


_WORDS = {
    ContextError: "context_length_exceeded",
    UnknownModelError: "model_not_found",
    UnsupportedError: "unsupported_parameter",
}


def body_error(errors: Sequence[Any], sent: object, prefix: str = "") -> dict[str, Any]:
    """Of a body that is not what it should be: what is wrong with the first field that is.

    Args:
        errors: as pydantic lists them; of a union there is one for each of its types, of which the deepest counts.
        sent: the body.
    """
    first = errors[0]["loc"][:1]
    placed = [(tuple(_place(each, sent)), each) for each in errors if each["loc"][:1] == first]
    place = max((at for at, _ in placed), key=len)
    here = [each for at, each in placed if at == place]
    found = next((each for each in here if each["type"] == "value_error"), here[0])
    name = re.sub(r"\.(?=\[)", "", ".".join(place))
    if isinstance(inner := found.get("ctx", {}).get("error"), FieldError):
        inner.rename(f"{name}.{inner.field}".lstrip("."))
        return failure(inner, prefix)[1]
    if not place:
        return error(f"{prefix}{NOT_JSON}", INVALID)
    if found["type"] == "missing":
        return error(f"{prefix}{name} is missing: add it", INVALID, name, "missing_required_parameter")
    value = json.dumps(found["input"]) if isinstance(found["input"], (str, int, float)) else "wrong"
    what = ", or ".join(dict.fromkeys(way_out(each) for each in here))
    code = "invalid_type" if found["type"].endswith("_type") else "invalid_value"
    return error(prefix + shortened(f"{name} is {value}: {what}"), INVALID, name, code)


def _place(found: Mapping[str, Any], sent: object) -> Iterator[str]:
    """Where something is in a body, without pydantic's names of the types of a union; a key is in its object."""
    parts = found["loc"][: -2 if found["loc"][-1:] == ("[key]",) else None]
    for part in parts:
        if (isinstance(sent, list) and isinstance(part, int)) or (isinstance(sent, dict) and part in sent):
            yield f"[{part}]" if isinstance(sent, list) else str(part)
            sent = sent[part]
    if found["type"] == "missing" and found["loc"]:
        yield str(found["loc"][-1])
