"""Functions that the model may call: how a request describes them, the answer's grammar, and its parser."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PrivateAttr, Tag

from ..engine.engine import Engine
from ..errors import ConfigError, FieldError, listed, shortened
from ..request import Chunk
from ..sampling.constraint import Constraint
from ..sampling.grammar import Function
from ..sampling.json_schemas import enforceable, weakened
from ..text.encoding import CALL_TAGS, check_variables
from .bad_bodies import left_out
from .schema import Body, Many, Sampled, of_field

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
    """A function's name."""

    name: str = ""


class NamedTool(NamedFunction):
    """The function to call. Its name is in ``function``, or of responses beside the type."""

    type: Literal["function"] = "function"
    function: NamedFunction | None = None

    @property
    def called(self) -> str:
        return (self.function or self).name


class DescribedFunction(NamedFunction):
    """A function: what it does, and the JSON Schema of its arguments."""

    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # what of the schema cannot be enforced is refused


class Tool(DescribedFunction):
    """A function that the model may call, described in ``function``, or of responses beside the type."""

    type: Literal["function"]
    function: DescribedFunction | None = None
    _namespace: str | None = PrivateAttr(None)

    @property
    def described(self) -> DescribedFunction:
        return self.function or self

    def field(self, where: str, name: str) -> str:
        """Return the path of a function's field in the request; ``where`` is that of the tool."""
        return f"{where}.{'function.' if self.function is not None else ''}{name}"

    def called(self) -> dict[str, str]:
        """Return how a call names the function to the client."""
        if self._namespace is None:
            return {"name": self.described.name}
        return {"name": self.described.name.removeprefix(f"{self._namespace}."), "namespace": self._namespace}

    def within(self, namespace: Namespace) -> Tool:
        """Return a copy in a namespace, whose name and description come before the function's."""
        function = self.described
        texts = filter(None, (namespace.description, function.description))
        more = {"name": f"{namespace.name}.{function.name}", "description": " ".join(texts)}
        renamed = self.model_copy(
            update=more if self.function is None else {"function": function.model_copy(update=more)}
        )
        renamed._namespace = namespace.name
        return renamed

    def template(self) -> dict[str, Any]:
        function = self.described
        described = {"name": function.name, "description": function.description or ""}
        return {"type": "function", "function": described | {"parameters": function.parameters or _NO_PARAMETERS}}

    def echoed(self) -> dict[str, Any]:
        function = self.described
        fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
        return {"type": "function", **fields, "strict": bool(function.strict)}

    def compiled(self) -> Function:
        """Return the function for the grammar: no argument but those that the schema names, unless that says more."""
        schema = {**(self.described.parameters or _NO_PARAMETERS), "type": "object"}
        properties, required = schema.get("properties"), schema.get("required", [])
        if isinstance(properties, dict) and isinstance(required, list) and not _SAYS_MORE & schema.keys():
            if all(name in properties for name in required):
                schema["additionalProperties"] = False
        return Function(self.described.name, schema)


class OtherTool(BaseModel):
    """A tool that is no function. The model is not offered it."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str

    def echoed(self) -> dict[str, Any] | None:
        return None


def by_type(*types: str) -> Discriminator:
    """Choose a union's class by the field ``type``: tag "a TYPE", or else "another"."""

    def tag(sent: Any) -> str:
        kind = sent.get("type") if isinstance(sent, dict) else getattr(sent, "type", None)
        return f"a {kind}" if kind in types else "another"

    return Discriminator(tag)


_Function = Annotated[Tool, Tag("a function")]
_Other = Annotated[OtherTool, Tag("another")]


class Namespace(Body):
    """Functions under a common name: the model calls ``NAMESPACE.FUNCTION``."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    tools: Many[Annotated[_Function | _Other, by_type("function")]]

    def echoed(self) -> dict[str, Any] | None:
        inner = [echo for tool in self.tools if (echo := tool.echoed())]
        return {"type": "namespace", "name": self.name, "description": self.description or "", "tools": inner}


AnyTool = Annotated[_Function | Annotated[Namespace, Tag("a namespace")] | _Other, by_type("function", "namespace")]


def functions(given: Sequence[AnyTool] | None, where: str = "tools") -> dict[str, Tool]:
    """Map places in the request to the functions there; other tools are left out."""
    tools = dict[str, Tool]()
    for at, tool in enumerate(given or ()):
        place = f"{where}[{at}]"
        if isinstance(tool, Tool):
            tools[place] = tool
        elif isinstance(tool, Namespace):
            tools |= {at: inner.within(tool) for at, inner in functions(tool.tools, f"{place}.tools").items()}
        else:
            left_out(f"tools: type {tool.type!r}", "the model is offered functions alone")
    return tools


class WithTools(Sampled):
    """A request whose answer may call functions."""

    tools: Many[AnyTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def variables(self) -> Mapping[str, Any]:
        """The variables of the chat template.

        Raises:
            FieldError: the conversation sets one of them.
        """
        given = self.chat_template_kwargs or {}
        check_variables(given, "chat_template_kwargs")
        return given if self.effort is None else {"reasoning_effort": self.effort, **given}

    @property
    def forced(self) -> bool:
        """Whether the answer has to call a function."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def several(self) -> bool:
        """Whether several calls may come. Forced ones only on request: a small model would call until its limit."""
        if isinstance(self.tool_choice, NamedTool):
            return False
        return not self.forced if self.parallel_tool_calls is None else self.parallel_tool_calls

    def functions(self) -> dict[str, Tool]:
        """Map places in the request to all functions there."""
        return functions(self.tools)

    def offered(self) -> dict[str, Tool]:
        """Map places in the request to the functions that the answer may call.

        Raises:
            FieldError: a function cannot be offered, or the one that is chosen is not there.
        """
        tools, chosen = check_tools(self.functions()), self.tool_choice
        if isinstance(chosen, NamedTool):
            names = {tool.described.name: at for at, tool in tools.items()}
            if chosen.called not in names:
                raise FieldError("tool_choice", f"tool_choice names {chosen.called!r}: the functions are {list(names)}")
            at = names[chosen.called]
            return {at: tools[at]}
        if chosen == "required" and not tools:
            raise FieldError("tool_choice", "tool_choice is 'required' but no tools are functions: give some")
        return {} if chosen == "none" else tools

    def templates(self) -> list[dict[str, Any]]:
        """List the functions for the prompt; none if the answer must not call any."""
        return [tool.template() for tool in self.functions().values()] if self.offered() else []

    def tags(self, engine: Engine) -> Mapping[int, str] | None:
        if not self.offered():
            return None
        return engine.grammars.tags if self.skip_special_tokens else {}

    @property
    def compiles(self) -> bool:
        return bool(self.tools) or super().compiles

    def constraint(self, engine: Engine) -> Constraint | None:
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
                grammar = grammars.calls(list(compiled.values()), forced=self.forced, several=self.several, text=text)
            except ConfigError as error:
                refused = error
            else:
                _log_left_out({offered[at].field(at, "parameters"): places for at, (_, places) in held.items()})
                return grammar
        for at, function in functions.items():
            if at not in held:
                with of_field(offered[at].field(at, "parameters")):
                    grammars.json_schema(function.parameters)
        if text is not None:
            with of_field(field):
                grammars.json_schema(text)
        raise FieldError("tools", str(refused))


def _log_left_out(places: Mapping[str, Sequence[str]]) -> None:
    """Log the parts of schemas that the grammar does not enforce."""
    if fields := [
        f"{field}: {shortened(listed(left_out, 'keyword'))}" for field, left_out in places.items() if left_out
    ]:
        log.warning("calls are not held to what cannot be enforced of schemas: %s", "; ".join(fields))


def check_tools(given: dict[str, Tool]) -> dict[str, Tool]:
    """Return the functions of a request, by their places in it.

    Raises:
        FieldError: they are too many, or a name is wrong or stands twice, or parameters are no object's.
    """
    if len(given) > _MOST:
        raise FieldError("tools", f"tools have {len(given)} functions: give at most {_MOST}")
    names: set[str] = set()
    for at, tool in given.items():
        function, where = tool.described, tool.field(at, "name")
        if not _NAME.fullmatch(function.name):
            raise FieldError(where, f"a function's name is {function.name!r}: use 1 to 128 of A-Z a-z 0-9 _ - . : /")
        if function.name in names:
            raise FieldError(where, f"two functions have the name {function.name!r}: rename one")
        names.add(function.name)
        if (kind := (function.parameters or _NO_PARAMETERS).get("type", "object")) != "object":
            said = f"parameters have the type {kind!r}: describe an object, whose properties are arguments"
            raise FieldError(tool.field(at, "parameters"), said)
    return given


@dataclass(slots=True)
class ToolCall:
    """A call of a function.

    Attributes:
        index: its number in the answer.
        key: its id.
        whole: its end has come.
    """

    index: int
    name: str
    key: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Parsed:
    """A part of an answer: of what is said or thought, or of a call.

    Attributes:
        text: what is said or thought, or what has come of the call's arguments.
        call: None: it is said or thought.
        begins: the call's name has come.
        ends: the call's end has come.
        thought: it is thought.
    """

    text: str
    call: ToolCall | None = None
    begins: bool = False
    ends: bool = False
    thought: bool = False


class Parser(Protocol):
    """Parses an answer as it comes.

    Attributes:
        calls: that were begun.
    """

    calls: list[ToolCall]

    @property
    def called(self) -> bool:
        """Whether there are calls, all of them complete."""

    @property
    def tokens(self) -> int | None:
        """Tokens of thoughts; None: the model does not think aloud."""

    @property
    def thinking(self) -> bool:
        """Whether the last token belongs to nothing that is said or called."""

    def push(self, chunk: Chunk) -> list[Parsed]:
        """Return the parts that became final with a token."""

    def end(self, rest: str) -> list[Parsed]:
        """Return those that were held back at the end of an answer.

        Args:
            rest: ``Request.rest``.
        """


class CallParser:
    """A ``Parser`` of texts of ``Grammars.calls`` in Hermes' format, whole or cut off anywhere.

    White space between what is said and a call, or between calls, belongs to neither.

    Attributes:
        tags: tokens of tags that give no text.
    """

    def __init__(self, tags: Mapping[int, str]) -> None:
        self.calls: list[ToolCall] = []
        self.tokens: int | None = None
        self.thinking = False
        self.tags = tags
        self._held = ""  # a call until its name has come, or what may begin one, or end its arguments

    @property
    def called(self) -> bool:
        return bool(self.calls) and self.calls[-1].whole and not self._held.startswith(_OPENS)

    def push(self, chunk: Chunk) -> list[Parsed]:
        self._held += chunk.text + self.tags.get(chunk.token, "")
        return list(self._parts())

    def end(self, rest: str) -> list[Parsed]:
        """Return the text that was held back at the end of an answer; parts of call tags are dropped.

        Args:
            rest: ``Request.rest``.
        """
        self._held += rest
        parts = list(self._parts())
        held = "" if self.calls or self._held.startswith(_OPENS) else self._held
        return [*parts, Parsed(held)] if held else parts

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
                call = ToolCall(len(self.calls), head[1])
                self.calls.append(call)
                yield Parsed("", call, begins=True)

    def _until(self, mark: str) -> tuple[str, bool]:
        """Take the text before a mark; return it, and whether the mark has come. A partial mark stays held."""
        at = self._held.find(mark)
        cut = at if at >= 0 else len(self._held) - overlap(self._held, mark)
        text, self._held = self._held[:cut], self._held[cut:]
        return text, at >= 0


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
