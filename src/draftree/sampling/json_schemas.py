"""What of a JSON Schema grammars can enforce: the schema without the rest, and what that is.

Leaving a constraint out only ever allows more: a keyword goes with those whose meaning depends on it, and what stands
inside a keyword that is left out goes with it. So each value that the whole schema allows is still allowed ("oneOf" is
read as "anyOf").
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..sandbox.workers import JobError, run

Schema = dict[str, Any]
Path = tuple[str, ...]

FORMATS = frozenset("date date-time duration email hostname ipv4 ipv6 time unknown uri uuid".split())
"""Values of "format" that are enforced; all others are annotations, which ask for nothing."""
_DIALECTS = re.compile(
    r"(http://json-schema\.org/draft-0[3467]|https://json-schema\.org/draft/(2019-09|2020-12))/schema#?"
)
_DEEPEST = 100
"""Levels of JSON; the compiler reads 125."""
_TRIED, _LARGEST = 1 << 21, 1 << 18
"""Most characters that are compiled to find what cannot be enforced, each schema as if it had a thousand at least, and
of one schema: seconds of a processor. Beyond them what is left is left out as a whole."""


def _always(value: object) -> bool:
    """A schema that allows everything."""
    return value is True or value == {}


_NAMES_ARE_TEXT = ({"type": "string"}, {"type": ["string"]})
_UNENFORCED: Mapping[str, Callable[[Schema], bool]] = {
    "$dynamicAnchor": lambda _: True,
    "$dynamicRef": lambda _: False,
    "$recursiveAnchor": lambda _: True,
    "$recursiveRef": lambda _: False,
    "contains": lambda s: s.get("minContains") == 0 and "maxContains" not in s,
    "dependencies": lambda s: s["dependencies"] == {},
    "dependentRequired": lambda s: not any((s["dependentRequired"] or {}).values()),
    "dependentSchemas": lambda s: all(map(_always, (s["dependentSchemas"] or {}).values())),
    "else": lambda s: "if" not in s or _always(s["else"]),
    "if": lambda _: True,  # without "then" and "else" it decides nothing
    "maxContains": lambda _: True,  # says more of "contains"
    "minContains": lambda _: True,
    "not": lambda s: s["not"] is False,
    "propertyNames": lambda s: _always(s["propertyNames"]) or s["propertyNames"] in _NAMES_ARE_TEXT,
    "then": lambda s: "if" not in s or _always(s["then"]),
    "unevaluatedItems": lambda s: _always(s["unevaluatedItems"]),
    "unevaluatedProperties": lambda s: _always(s["unevaluatedProperties"]),
    "uniqueItems": lambda s: s["uniqueItems"] is False,
    "x-guidance": lambda _: True,  # how the compiler writes JSON, which is ours to choose
}
"""Keywords that are not enforced -> the value changes nothing in its schema."""

_TOGETHER: tuple[tuple[str, ...], ...] = (
    ("pattern",),
    ("minProperties", "maxProperties"),
    ("patternProperties", "additionalProperties"),  # keys that a pattern allows are not additional
    ("multipleOf",),
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("required",),
    ("enum",),
    ("const",),
    ("$ref",),
    ("anyOf",),
    ("oneOf",),
    ("allOf",),
    ("prefixItems", "items", "additionalItems"),
    ("properties", "patternProperties", "additionalProperties"),
    ("type",),
)
"""Keywords that are left out together, first those that say little."""
_DEFINED = ("$defs", "definitions")
_OF_SCHEMAS = (*_DEFINED, "properties", "patternProperties")
_LISTS = ("prefixItems", "items", "anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalItems", "additionalProperties")


class Enforceable(NamedTuple):
    """A schema that can be enforced.

    Attributes:
        left_out: what of the original is not in it, as JSON pointers to keywords.
    """

    schema: Schema
    left_out: tuple[str, ...]


def enforceable(schema: Mapping[str, Any]) -> Enforceable:
    """A schema without the keywords that are never enforced; where they change nothing they are not named.

    Raises:
        ConfigError: it is no JSON.
    """
    try:
        root = json.loads(source := json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the json_schema cannot be used: it is no JSON ({error})") from None
    left_out = list[str]()
    foreign = '"$id": ' not in source  # what refers to no place inside refers to another document
    waiting: list[tuple[Path, Schema]] = [((), root)]
    while waiting:
        at, part = waiting.pop()
        if len(at) > _DEEPEST:
            left_out += [_pointer((*at, name)) for name in part]
            part.clear()
        unenforced = [name for name in part if name in _UNENFORCED]
        if foreign and not str(part.get("$ref", "#")).startswith("#"):
            unenforced.append("$ref")
        left_out += [_pointer((*at, name)) for name in unenforced if not _changes_nothing(name, part)]
        for name in [*unenforced, *(name for name in part if _annotates(name, part[name]))]:
            del part[name]
        waiting += _inner(part, at)
    return Enforceable(root, tuple(left_out))


def _changes_nothing(name: str, schema: Schema) -> bool:
    try:
        return name in _UNENFORCED and _UNENFORCED[name](schema)
    except (AttributeError, TypeError):
        return False  # the value is of another type


def _annotates(name: str, value: object) -> bool:
    """The compiler would refuse a value that says nothing about values."""
    if name == "format":
        return not (isinstance(value, str) and value in FORMATS)
    return name == "$schema" and not (isinstance(value, str) and _DIALECTS.fullmatch(value))


def _inner(schema: Schema, at: Path) -> Iterator[tuple[Path, Schema]]:
    """The schemas in one, without those that are true or false, and where they are."""
    for name in _OF_SCHEMAS:
        if isinstance(many := schema.get(name), dict):
            yield from (((*at, name, key), inner) for key, inner in many.items() if isinstance(inner, dict))
    for name in _LISTS:
        if isinstance(several := schema.get(name), list):
            yield from (((*at, name, str(i)), inner) for i, inner in enumerate(several) if isinstance(inner, dict))
    for name in _SINGLE:
        if isinstance(inner := schema.get(name), dict):
            yield (*at, name), inner


def _pointer(path: Path) -> str:
    return "#" + "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in path)


def weakened(schema: Mapping[str, Any]) -> Enforceable:
    """A schema without what the compiler refuses, which it is tried with; ``{"type": "object"}`` stays that.

    Raises:
        ConfigError: it is no JSON.
    """
    checked = enforceable(schema)
    source, more = _tried(json.dumps(checked.schema))
    return Enforceable(json.loads(source), checked.left_out + more)


@lru_cache(maxsize=128)  # agents send the same functions with each turn
def _tried(source: str) -> tuple[str, tuple[str, ...]]:
    trials = _Trials(json.loads(source))
    trials.mend((), trials.root)
    return json.dumps(trials.root), tuple(trials.left_out)


class _Trials:
    """Compiles a schema, and what is in it alone, and leaves out what is refused.

    Attributes:
        left_out: what is not in the schema any more, as JSON pointers.
    """

    def __init__(self, root: Schema) -> None:
        self.root, self.left_out = root, list[str]()
        self._left = _TRIED

    def mend(self, at: Path, schema: Schema) -> None:
        """Leave out of one schema what is refused of it: as much of those in it as can be, then keywords."""
        if self._compiles(at):
            return
        # What others refer to comes first, and what refers to others last: the fault may be there.
        inner = sorted(_inner(schema, at), key=lambda each: (each[0][-2:][0] not in _DEFINED, '"$ref"' in str(each[1])))
        for path, part in inner:
            if self._left > 0:
                self.mend(path, part)
        if inner and self._compiles(at):
            return
        keywords = [
            name for name in schema if name not in _DEFINED and not (name == "type" and schema[name] == "object")
        ]
        groups = [present for group in _TOGETHER if (present := [name for name in group if name in keywords])]
        before = dict(schema)
        for names in [*groups, keywords] if self._left > 0 else [keywords]:
            for name in names:
                del schema[name]
            if names is keywords or self._compiles(at):
                self.left_out += [_pointer((*at, name)) for name in names]
                return
            schema.clear()
            schema.update(before)

    def _compiles(self, at: Path) -> bool:
        if self._left <= 0:
            return False
        source = json.dumps(self.root)
        self._left -= max(len(source), 1000) if len(source) <= _LARGEST else self._left
        if self._left <= 0:
            return False
        if at:
            moved = json.loads(_REFERENCE.sub(r"\1#/$defs/root", source))
            source = json.dumps({"$ref": _pointer(("$defs", "root", *at)), "$defs": {"root": moved}})
        try:
            run("read_grammar", "json_schema", source)
        except JobError:
            return False
        return True


_REFERENCE = re.compile(r'("\$ref": ")#(?=[/"])')
