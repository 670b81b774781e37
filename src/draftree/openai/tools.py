"""Functions that a request lets the model call, the grammar of an answer, and its text taken apart as it comes."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from ..engine.engine import Engine
from ..errors import ConfigError, FieldError, listed, shortened
from ..request import Chunk
from ..sampling.grammar import Function, Grammar
from ..sampling.json_schemas import enforceable, weakened
from ..text.detokenizer import overlap
from ..text.encoding import CALL_TAGS
from .schema import Body, Sampled, of_field

log = logging.getLogger("draftree.openai")

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MOST = 128
"""Functions of a request."""
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_SAYS_MORE = frozenset(
    "additionalProperties unevaluatedProperties patternProperties propertyNames dependencies dependentSchemas "
    "allOf anyOf oneOf if then else $ref $dynamicRef $recursiveRef".split()
)
"""Keywords of an object's schema that allow properties beside those in "properties"."""
_OPENS, _CLOSES = CALL_TAGS
_HEAD = re.compile(_OPENS + r'\s*\{"name": "([^"\\]*)", "arguments": ')
_END = f"}}\n{_CLOSES}"
"""Behind arguments, in which it cannot be: JSON on one line has no line break."""


class NamedFunction(Body):
    """A function by its name."""

    name: str = ""


class NamedTool(NamedFunction):
    """A function by its name, which stands in ``function``, of responses beside the type."""

    type: Literal["function"] = "function"
    function: NamedFunction | None = None

    @property
    def called(self) -> str:
        return (self.function or self).name


class DescribedFunction(NamedFunction):
    """A function."""

    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # what of the schema cannot be enforced is refused


class Tool(DescribedFunction):
    """A function, described in ``function``, of responses beside the type."""

    type: Literal["function"]
    function: DescribedFunction | None = None

    @property
    def described(self) -> DescribedFunction:
        return self.function or self

    def field(self, at: int, name: str) -> str:
        """Where a field of the function is in the request."""
        return f"tools[{at}].{'function.' if self.function is not None else ''}{name}"

    def template(self) -> dict[str, Any]:
        function = self.described
        found: dict[str, Any] = {"name": function.name, "description": function.description or ""}
        return {"type": "function", "function": found | {"parameters": function.parameters or _NO_PARAMETERS}}

    def echoed(self) -> dict[str, Any]:
        function = self.described
        fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
        return {"type": "function", **fields, "strict": bool(function.strict)}

    def compiled(self) -> Function:
        """Its arguments are an object of those that it names, unless its schema says more."""
        schema = {**(self.described.parameters or _NO_PARAMETERS), "type": "object"}
        properties, required = schema.get("properties"), schema.get("required", [])
        if isinstance(properties, dict) and isinstance(required, list) and not _SAYS_MORE & schema.keys():
            if all(name in properties for name in required):
                schema["additionalProperties"] = False
        return Function(self.described.name, schema)


class WithTools(Sampled):
    """A request whose answer may call functions."""

    tools: Annotated[list[Tool], Field(max_length=_MOST)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def forced(self) -> bool:
        """The answer has to call a function."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def several(self) -> bool:
        """More than one call may come; of forced ones by request alone, or a small model calls until its limit."""
        if isinstance(self.tool_choice, NamedTool):
            return False
        return not self.forced if self.parallel_tool_calls is None else self.parallel_tool_calls

    def offered(self) -> dict[int, Tool]:
        """Functions that the answer may call, by their numbers in the request; none: it calls none.

        Raises:
            FieldError: a function cannot be offered, or the one that is chosen is not there.
        """
        tools, chosen = check_tools(self.tools), self.tool_choice
        if isinstance(chosen, NamedTool):
            names = [tool.described.name for tool in tools]
            if chosen.called not in names:
                raise FieldError("tool_choice", f"tool_choice names {chosen.called!r}: the names of tools are {names}")
            at = names.index(chosen.called)
            return {at: tools[at]}
        if chosen == "required" and not tools:
            raise FieldError("tool_choice", "tool_choice is 'required' but there are no tools: give some")
        return {} if chosen == "none" else dict(enumerate(tools))

    def templates(self) -> list[dict[str, Any]]:
        """Functions that the prompt describes; none where it must not call any."""
        return [tool.template() for tool in self.tools or ()] if self.offered() else []

    def tags(self, engine: Engine) -> Mapping[int, str] | None:
        if not self.offered():
            return None
        return engine.grammars.tags if self.skip_special_tokens else {}

    def constraint(self, engine: Engine) -> Grammar | None:
        if not (offered := self.offered()):
            return super().constraint(engine)
        if self.structured_outputs is not None:
            raise FieldError("structured_outputs", "structured_outputs and tools exclude each other: leave one out")
        field, wanted = self.format
        text = None if self.forced else wanted.wanted(field)
        with of_field("tools"):
            grammars = engine.grammars
        functions, refused = {at: tool.compiled() for at, tool in offered.items()}, None
        for leave_out in (enforceable, weakened):  # what the compiler refuses is found by trials, where it does
            held = {at: leave_out(f.parameters) for at, f in functions.items() if not offered[at].described.strict}
            compiled = functions | {at: replace(functions[at], parameters=schema) for at, (schema, _) in held.items()}
            try:
                made = grammars.calls(list(compiled.values()), forced=self.forced, several=self.several, text=text)
            except ConfigError as error:
                refused = error
            else:
                _log_left_out({offered[at].field(at, "parameters"): places for at, (_, places) in held.items()})
                return made
        for at, function in functions.items():
            if at not in held:
                with of_field(offered[at].field(at, "parameters")):
                    grammars.json_schema(function.parameters)
        if text is not None:
            with of_field(field):
                grammars.json_schema(text)
        raise FieldError("tools", str(refused))


def _log_left_out(places: Mapping[str, Sequence[str]]) -> None:
    """Log what calls are not held to."""
    if found := [
        f"{field}: {shortened(listed(left_out, 'keyword'))}" for field, left_out in places.items() if left_out
    ]:
        log.warning("calls are not held to what cannot be enforced of schemas: %s", "; ".join(found))


def check_tools(given: Sequence[Tool] | None) -> list[Tool]:
    """The functions of a request.

    Raises:
        FieldError: one has no name that can be used, or another's, or parameters that are no object's.
    """
    names: set[str] = set()
    for at, tool in enumerate(given or ()):
        function, where = tool.described, tool.field(at, "name")
        if not _NAME.fullmatch(function.name):
            raise FieldError(where, f"a function's name is {function.name!r}: use 1 to 128 of A-Z a-z 0-9 _ - . : /")
        if function.name in names:
            raise FieldError(where, f"two functions have the name {function.name!r}: rename one")
        names.add(function.name)
        if (kind := (function.parameters or _NO_PARAMETERS).get("type", "object")) != "object":
            said = f"parameters have the type {kind!r}: describe an object, whose properties are arguments"
            raise FieldError(tool.field(at, "parameters"), said)
    return list(given or ())


@dataclass(slots=True)
class ToolCall:
    """A call of a function.

    Attributes:
        index: its number in the answer.
        key: its id.
        whole: its end has come.
    """

    index: int
    key: str
    name: str
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Parsed:
    """A part of an answer: of what is said, or of a call.

    Attributes:
        text: what is said, or what has come of the call's arguments.
        call: None: it is said.
        begins: the call's name has come.
        ends: the call's end has come.
    """

    text: str
    call: ToolCall | None = None
    begins: bool = False
    ends: bool = False


class CallParser:
    """Parses texts of ``Grammars.calls``, whole or cut off anywhere.

    White space between what is said and a call, or between calls, belongs to neither.

    Attributes:
        calls: that were begun.

    Args:
        tags: tokens of tags that give no text.
    """

    def __init__(self, tags: Mapping[int, str]) -> None:
        self.calls: list[ToolCall] = []
        self._tags = tags
        self._held = ""  # a call until its name has come, or what may begin one, or end its arguments

    @property
    def called(self) -> bool:
        """There are calls, all of them whole."""
        return bool(self.calls) and self.calls[-1].whole and not self._held.startswith(_OPENS)

    def push(self, chunk: Chunk) -> list[Parsed]:
        self._held += chunk.text + self._tags.get(chunk.token, "")
        return list(self._parts())

    def end(self) -> list[Parsed]:
        """The answer has ended: what of its text was held back; of a call that would be its end, or its beginning."""
        return [] if self.calls or not self._held or self._held.startswith(_OPENS) else [Parsed(self._held)]

    def _parts(self) -> Iterator[Parsed]:
        while True:
            if self.calls and not (call := self.calls[-1]).whole:
                text, call.whole = self._until(_END)
                if text or call.whole:
                    yield Parsed(text, call, ends=call.whole)
                if not call.whole:
                    return
                self._held = self._held.removeprefix(_END)
            else:
                text, opened = self._until(_OPENS)
                said = text.rstrip()
                if not opened:
                    self._held = text[len(said) :] + self._held
                if said and not self.calls:
                    yield Parsed(said)
                if (head := _HEAD.match(self._held)) is None:
                    return
                self._held = self._held[head.end() :]
                call = ToolCall(len(self.calls), f"call_{secrets.token_hex(12)}", head[1])
                self.calls.append(call)
                yield Parsed("", call, begins=True)

    def _until(self, mark: str) -> tuple[str, bool]:
        """Text before a mark, and whether it is there; it, or what may be its beginning, stays held."""
        at = self._held.find(mark)
        cut = at if at >= 0 else len(self._held) - overlap(self._held, mark)
        text, self._held = self._held[:cut], self._held[cut:]
        return text, at >= 0
