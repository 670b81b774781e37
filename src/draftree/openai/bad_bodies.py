"""Rejects bodies, and describes errors in OpenAI's shape. Knows no HTTP.

Unknown fields are ignored, and the log names them. A few are rejected: a client would get another answer without them.
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

_REFUSED: Mapping[str, tuple[str, Sequence[object]]] = {
    name: (way_out, neutral)
    for names, way_out, neutral in (
        ("audio moderation web_search_options", "leave it out", ()),
        ("add_special_tokens best_of", "leave it out", (1,)),  # 1 is True, 0 is False
        ("modalities", "leave it out", (["text"],)),
        ("suffix use_beam_search", "leave it out", ("", 0)),
        ("chat_template", "start the server with --chat-template", ("",)),
        ("function_call functions", "use tools and tool_choice", ("none", "auto", [])),
        ("grammar guided_choice guided_grammar guided_json guided_regex json_schema", "use structured_outputs", ("",)),
        ("input instructions", "send it to /v1/responses", ()),
        ("max_completion_tokens max_output_tokens n_predict", "use max_tokens, or max_output_tokens of a response", ()),
        ("messages", "send it to /v1/chat/completions", ()),
        ("prompt", "send a text to /v1/completions", ()),
        ("repeat_penalty", "use repetition_penalty", (1,)),
        ("response_format", "use text.format of a response", ({"type": "text"},)),
        ("tool_choice tools", "send it to /v1/chat/completions", ("none", "auto", [])),
        ("truncate_prompt_tokens", "shorten the prompt", ()),
    )
    for name in names.split()
}
"""Fields that clients send and that would change the answer -> the way out, and the values that change nothing."""

_MOST_LOGGED = 1 << 8
"""Most names that are logged: clients may make names up."""
_LONGEST_LOGGED = 80
_MOST_OBJECTS = 1 << 14
"""Messages, their parts, calls and all else that is an object or a list: each takes some 20 us to be read."""
_MOST_FIELDS = 1 << 10
_NESTED = (dict, list)


class UnsupportedError(FieldError):
    """A field that would change the answer is not supported."""

    def __init__(self, field: str, way_out: str) -> None:
        super().__init__(field, f"{field} is not supported here: {way_out}")


class UnknownModelError(FieldError):
    """The request names a model that is not served."""


def check_model(name: str, served: str) -> None:
    """Raise UnknownModelError unless a model is the served one."""
    if name != served:
        raise UnknownModelError("model", f"no model {name!r}: there is {served!r}")


def refuse_unsupported(extra: Mapping[str, object]) -> None:
    """Raise UnsupportedError for the first field that would change the answer."""
    for name, value in extra.items():
        way_out, neutral = _REFUSED.get(name, ("", (value,)))
        if value not in neutral:
            raise UnsupportedError(name, way_out)


logged: set[str] = set()
"""Names that were logged."""


def left_out(what: str, why: str) -> None:
    """Log a part of requests that is ignored, once. Its name is cut, and control characters in it are escaped."""
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
    """Return the body if an answer could repeat it.

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
    """Count the objects and lists in a value, up to one more than allowed."""
    count, left = 0, [value]
    while left and count <= _MOST_OBJECTS:
        if isinstance(inner := left.pop(), _NESTED):
            count += 1
            values = inner.values() if isinstance(inner, dict) else inner
            left += [nested for nested in values if type(nested) in _NESTED]
    return count


def error(message: str, kind: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    where = None if field is None else _whole(field)
    return {"error": {"message": _whole(message), "type": kind, "param": where, "code": code}}


def _whole(text: str) -> str:
    """Escape halves of characters, which cannot be sent."""
    return text.encode(errors="backslashreplace").decode()


def failure(raised: Exception, prefix: str = "") -> tuple[int, dict[str, Any]]:
    """Compute status and body of an exception's response; ``prefix`` begins the message."""
    if not isinstance(raised, InputError):
        why = shortened(f"{prefix}{type(raised).__name__}: {' '.join(str(raised).split())}")
        return 500, error(why, "server_error")
    if not isinstance(raised, FieldError):
        return 400, error(f"{prefix}{raised}", INVALID)
    code = next((word for kind, word in _WORDS.items() if isinstance(raised, kind)), "invalid_value")
    message = str(raised) if raised.field in str(raised) else f"{raised.field}: {raised}"
    if isinstance(raised, ChatTemplateError):
        message += " (/v1/completions continues texts; who serves the model gives it a template by --chat-template)"
    status, kind = (404, MISSING) if isinstance(raised, UnknownModelError) else (400, INVALID)
    return status, error(prefix + message, kind, raised.field, code)


_WORDS = {
    ContextError: "context_length_exceeded",
    UnknownModelError: "model_not_found",
    UnsupportedError: "unsupported_parameter",
}


def body_error(errors: Sequence[Any], sent: object, prefix: str = "") -> dict[str, Any]:
    """Describe what is wrong with the first wrong field of a body.

    Args:
        errors: as pydantic lists them; a union has one for each of its types, and the deepest counts.
        sent: the body.
    """
    first = errors[0]["loc"][:1]
    placed = [(tuple(_place(problem, sent)), problem) for problem in errors if problem["loc"][:1] == first]
    place = max((at for at, _ in placed), key=len)
    here = [problem for at, problem in placed if at == place]
    wrong = next((problem for problem in here if problem["type"] == "value_error"), here[0])
    name = re.sub(r"\.(?=\[)", "", ".".join(place))
    if isinstance(inner := wrong.get("ctx", {}).get("error"), FieldError):
        inner.rename(f"{name}.{inner.field}".lstrip("."))
        return failure(inner, prefix)[1]
    if not place:
        return error(f"{prefix}{NOT_JSON}", INVALID)
    if wrong["type"] == "missing":
        return error(f"{prefix}{name} is missing: add it", INVALID, name, "missing_required_parameter")
    value = json.dumps(wrong["input"]) if isinstance(wrong["input"], (str, int, float)) else "wrong"
    what = ", or ".join(dict.fromkeys(way_out(problem) for problem in here))
    code = "invalid_type" if wrong["type"].endswith("_type") else "invalid_value"
    return error(prefix + shortened(f"{name} is {value}: {what}"), INVALID, name, code)


def _place(wrong: Mapping[str, Any], sent: object) -> Iterator[str]:
    """Yield the path to an error in a body, without pydantic's tags of unions; a bad key is located in its object."""
    parts = wrong["loc"][: -2 if wrong["loc"][-1:] == ("[key]",) else None]
    for part in parts:
        if (isinstance(sent, list) and isinstance(part, int)) or (isinstance(sent, dict) and part in sent):
            yield f"[{part}]" if isinstance(sent, list) else str(part)
            sent = sent[part]
    if wrong["type"] == "missing" and wrong["loc"]:
        yield str(wrong["loc"][-1])
