"""What grammars cannot enforce of JSON Schemas: named where a schema is strict, else left out, and soundly."""

from __future__ import annotations

import copy
import json
import random
from typing import Any
from unittest.mock import Mock

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from draftree.errors import ConfigError
from draftree.sampling.constraint import ConstraintState, TextEnded
from draftree.sampling.grammar import Function, Grammar, Grammars
from draftree.sampling.json_schemas import FORMATS, enforceable, weakened

from .test_schemas import EOS, TOKENIZER, takes, valid
from .tiny import VOCAB

STRING, ITEMS = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
OPEN = {"type": "object"}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, VOCAB, {EOS})


CHANGES_NOTHING: list[tuple[dict[str, Any], dict[str, Any], Any, Any]] = [
    (ITEMS, {"uniqueItems": False}, [1, 1], ["a"]),
    (ITEMS, {"minContains": 2, "maxContains": 1}, [], ["a"]),
    (ITEMS, {"contains": {"const": 1}, "minContains": 0}, [2], ["a"]),
    (ITEMS, {"unevaluatedItems": True}, [1], ["a"]),
    (OPEN, {"propertyNames": True}, {}, 1),
    (OPEN, {"propertyNames": {"type": "string"}}, {"a": 1}, 1),
    (OPEN, {"dependentRequired": {"a": []}}, {"a": 1}, 1),
    (OPEN, {"dependentSchemas": {"a": {}}, "dependencies": {}}, {"a": 1}, 1),
    (OPEN, {"unevaluatedProperties": {}}, {"a": 1}, 1),
    (DIGIT, {"not": False}, 1, 10),
    (DIGIT, {"if": {"const": 1}}, 1, 10),
    (DIGIT, {"then": False, "else": False}, 1, 10),
    (DIGIT, {"if": {"const": 1}, "then": True, "else": {}}, 1, 10),
    (DIGIT, {"$dynamicAnchor": "here", "$recursiveAnchor": True}, 1, 10),
    (DIGIT, {"x-guidance": {"whitespace_flexible": True, "nonsense": 1}}, 1, 10),
    (DIGIT, {"$schema": "https://example.com/schema"}, 1, 10),
    (DIGIT, {"format": "int32"}, 1, 10),
    *(
        (STRING, {"format": name}, "no such thing", 1)
        for name in "path password binary byte url regex uri-reference json-pointer a-name-of-ones-own".split()
    ),
    (STRING, {"format": ["date"]}, "no such thing", 1),
]


@pytest.mark.parametrize(("schema", "more", "good", "bad"), CHANGES_NOTHING, ids=lambda value: str(value)[:40])
def test_a_value_that_changes_nothing_is_no_reason_to_refuse(
    grammars: Grammars, schema: dict[str, Any], more: dict[str, Any], good: Any, bad: Any
) -> None:
    """``"uniqueItems": false`` and the formats that OpenAPI names refused whole requests, strict or not."""
    nested = {"type": "array", "prefixItems": [{**schema, **more}], "items": False, "minItems": 1}
    for made, wrap in (({**schema, **more}, lambda value: value), (nested, lambda value: [value])):
        assert enforceable(made).left_out == ()
        grammar = grammars.json_schema(made)
        assert takes(grammar, wrap(good)) and not takes(grammar, wrap(bad))


def test_each_format_that_is_enforced_is_one_of_the_compilers(grammars: Grammars) -> None:
    for name in FORMATS - {"unknown"}:
        assert not takes(grammars.json_schema({"type": "string", "format": name}), "!"), name


CANNOT: list[tuple[dict[str, Any], str]] = [
    ({"uniqueItems": True}, "uniqueItems"),
    ({"propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"not": {"const": "a"}}, "not"),
    ({"not": {}}, "not"),
    ({"if": {"const": "a"}, "then": {"maxLength": 1}}, "then"),
    ({"if": {"const": "a"}, "else": {"maxLength": 1}}, "else"),
    ({"contains": {"const": 1}}, "contains"),
    ({"contains": {"const": 1}, "minContains": 0, "maxContains": 1}, "contains"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"dependentRequired": "a"}, "dependentRequired"),
    ({"dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
    ({"dependencies": {"a": ["b"]}}, "dependencies"),
    ({"unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"unevaluatedItems": {"type": "null"}}, "unevaluatedItems"),
    ({"$dynamicRef": "#node"}, "$dynamicRef"),
    ({"type": "string", "pattern": "^(?!a).*$"}, "pattern"),
    ({"type": "string", "pattern": "("}, "pattern"),
    ({"type": "object", "patternProperties": {"^(?=a)": {}}, "additionalProperties": False}, "patternProperties"),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 3}, "maxProperties"),
    ({"type": "any"}, "type"),
    ({"$ref": "https://example.com/other.json"}, "$ref"),
    ({"$ref": "#/$defs/nothing"}, "$ref"),
    ({"type": "number", "minimum": 1e-300}, "minimum"),
]
PLACES = [
    lambda inner: ({"type": "object", "properties": {"a~b/c": inner}}, "#/properties/a~0b~1c"),
    lambda inner: ({"type": "array", "items": {"anyOf": [{"type": "null"}, inner]}}, "#/items/anyOf/1"),
    lambda inner: ({"$ref": "#/$defs/x", "$defs": {"x": inner}}, "#/$defs/x"),
]


@pytest.mark.parametrize("place", PLACES, ids=["property", "alternative", "definition"])
@pytest.mark.parametrize(("schema", "keyword"), CANNOT, ids=lambda value: str(value)[:40])
def test_what_cannot_be_enforced_is_named_with_its_path(
    grammars: Grammars, schema: dict[str, Any], keyword: str, place: Any
) -> None:
    """Strict: refused. Else it is left out, it alone, and what is left compiles."""
    whole, where = place(schema)
    with pytest.raises(ConfigError) as caught:
        grammars.json_schema(whole)
    assert f"{where}/{keyword}" in str(caught.value) and "\n" not in str(caught.value)
    sent = copy.deepcopy(whole)
    found, left_out = weakened(whole)
    assert f"{where}/{keyword}" in left_out and all(path.startswith(where) for path in left_out)
    assert whole == sent
    grammars.json_schema(found)


def test_schemas_that_are_too_deep_are_cut_where_they_are(grammars: Grammars) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ConfigError, match="items"):
        grammars.json_schema(deep)
    grammar = grammars.json_schema(weakened(deep).schema)
    assert takes(grammar, [[[]]]) and not takes(grammar, [[""]])


def test_what_cannot_be_found_in_time_leaves_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trials end, however long a schema is; arguments are an object all the same."""
    monkeypatch.setattr("draftree.sampling.json_schemas._TRIED", 3000)
    many = {f"p{i}": {"type": "string", "pattern": "(?=a)" + "a" * i} for i in range(50)}
    assert weakened({"type": "object", "properties": many, "required": ["p1"]}).schema == {"type": "object"}


def test_a_schema_that_is_too_long_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 30,000 properties was looked into after the trials had ended: minutes for one request."""
    dumps = Mock(side_effect=json.dumps)
    monkeypatch.setattr("draftree.sampling.json_schemas.json.dumps", dumps)
    many = {f"p{i}": {"type": "string"} for i in range(30_000)}
    found = weakened({"type": "object", "properties": many})
    assert found.schema == {"type": "object"} and found.left_out == ("#/properties",)
    assert dumps.call_count < 10


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # A key that a pattern allows is not additional: both go, or keys that are valid could not come.
        (
            {
                "type": "object",
                "properties": {"n": DIGIT},
                "patternProperties": {"^(?=x)": DIGIT},
                "additionalProperties": False,
            },
            [{"n": 1, "x": 2}],
            [{"n": "a"}],
        ),
        ({"type": "array", "prefixItems": [{"type": "any"}], "items": False}, [["a"], [1]], [["a", 1]]),
        ({"type": "array", "contains": {"not": {"const": 1}}, "items": DIGIT, "maxItems": 2}, [[1], [2]], [["a"]]),
        ({"anyOf": [{"type": "string", "pattern": "(?=a)a"}, DIGIT]}, ["b", 1], [10]),
        (
            {
                "$ref": "#/$defs/list",
                "$defs": {
                    "list": {
                        "type": "object",
                        "properties": {"v": {**DIGIT, "not": {"const": 3}}, "next": {"$ref": "#/$defs/list"}},
                        "required": ["v"],
                        "additionalProperties": False,
                    }
                },
            },
            [{"v": 3, "next": {"v": 1}}],
            [{"v": 10}, {"v": 1, "next": {}}],
        ),
        (
            {
                "$ref": "#/$defs/tree",
                "$defs": {
                    "tree": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string", "pattern": "^(?!x)"},
                            "inner": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                        },
                        "required": ["name"],
                        "additionalProperties": False,
                    }
                },
            },
            [{"name": "x", "inner": [{"name": "y"}]}],
            [{"name": 1}, {"name": "y", "inner": [{"name": 1}]}, {"name": "y", "inner": [{}]}],
        ),
        ({"type": "string", "maxLength": 10**9, "pattern": "^(?!x)"}, ["x"], [1]),
        ({"type": "array", "items": DIGIT, "maxItems": 10**7, "uniqueItems": True}, [[1, 1]], [["a"]]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**64, "not": {"const": 0}}, [0, 2**63], ["a", 1.5]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_rest_of_a_schema_is_enforced(
    grammars: Grammars, schema: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    grammar = grammars.json_schema(weakened(schema).schema)
    assert [value for value in good if not takes(grammar, value)] == []
    assert [value for value in bad if takes(grammar, value)] == []


REMOVED = ("uniqueItems", "propertyNames", "not", "if", "then", "else", "contains", "dependentRequired", "pattern")


def unenforced(inner: some.SearchStrategy[Any]) -> some.SearchStrategy[dict[str, Any]]:
    """Keywords of ``REMOVED`` with any values."""
    return some.fixed_dictionaries(
        {},
        optional={
            "uniqueItems": some.booleans(),
            "propertyNames": some.sampled_from([True, {"type": "string"}, {"maxLength": 1}]),
            "not": inner | some.booleans(),
            "if": inner,
            "then": inner,
            "else": inner,
            "contains": inner,
            "dependentRequired": some.sampled_from([{}, {"a": ["b"]}]),
            "format": some.sampled_from(["path", "int32", "password"]),
        },
    )


KEYS = some.sampled_from("abc")
LEAVES: list[Any] = [
    DIGIT,
    {"type": "boolean"},
    {"type": ["null", "boolean"]},
    {"type": "string", "maxLength": 3},
    {"type": "string", "pattern": "^(?!a)", "maxLength": 3},
    {"type": "string", "pattern": "^[ab]{1,2}$"},
    {"enum": ["a", 1, None]},
    {"$ref": "#/$defs/d"},
    {},
    True,
]


def larger(inner: some.SearchStrategy[Any]) -> some.SearchStrategy[Any]:
    lists = some.lists(inner, min_size=1, max_size=3)
    made = some.one_of(
        some.builds(
            lambda properties, required, more: {
                "type": "object",
                "properties": properties,
                "required": [name for name in required if name in properties],
                "additionalProperties": more,
            },
            some.dictionaries(KEYS, inner, max_size=3),
            some.sets(KEYS).map(sorted),
            some.booleans() | inner,
        ),
        some.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        some.builds(lambda items: {"type": "array", "prefixItems": items, "items": False}, lists),
        some.builds(lambda name, several: {name: several}, some.just("anyOf"), lists),
    )
    return some.builds(lambda schema, more: {**schema, **more}, made, unenforced(inner))


SCHEMAS = some.builds(
    lambda schema, defined: {**schema, "$defs": {"d": defined}},
    larger(some.recursive(some.sampled_from(LEAVES), larger, max_leaves=6)),
    some.sampled_from([leaf for leaf in LEAVES if leaf is not True and "$ref" not in leaf]),
)


def removed(schema: Any) -> Any:
    """Without ``REMOVED``, patterns with look-ahead among them."""
    if isinstance(schema, list):
        return [removed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value if name in ("enum", "required", "pattern") else removed(value)
        for name, value in schema.items()
        if name not in REMOVED or (name == "pattern" and "(?" not in value)
    }


def walked(grammar: Grammar, seed: int) -> Any:
    """A random text of a grammar, read as JSON; None: it does not end soon."""
    chance, state, ids = random.Random(seed), grammar.start(), list[int]()  # noqa: S311
    closing = {TOKENIZER.encode(c)[0] for c in '"}]'} | {EOS}
    for _ in range(200):
        allowed = [token for token in range(VOCAB) if state.allows(token)]
        likely = [token for token in allowed if token in closing]
        token = chance.choice(likely if likely and chance.random() < 0.5 else allowed)
        after: ConstraintState | None = state.after(token)
        assert after is not None
        if isinstance(after, TextEnded):
            return [json.loads(str(TOKENIZER.decode(ids)))]
        ids, state = [*ids, token], after
    return None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schema=SCHEMAS, seed=some.integers(0, 99))
def test_arguments_conform_to_the_schema_without_what_cannot_be_enforced(schema: dict[str, Any], seed: int) -> None:
    """Whatever a model that knows nothing calls a function with."""
    grammars = Grammars(TOKENIZER, VOCAB, {EOS})
    found, _ = weakened(schema)
    grammars.calls([Function("f", found)], forced=False, several=True)
    if ended := walked(grammars.json_schema(found), seed):
        assert valid(ended[0], removed(schema)), ended


VALUES = some.recursive(
    some.none() | some.booleans() | some.integers(0, 11) | some.text("abx", max_size=4),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(schema=SCHEMAS, values=some.lists(VALUES, min_size=8, max_size=8))
def test_what_the_whole_schema_allows_is_still_allowed(schema: dict[str, Any], values: list[Any]) -> None:
    found, _ = weakened(schema)
    for value in values:
        if jsonschema.Draft202012Validator(schema).is_valid(value):
            assert valid(value, found), value
