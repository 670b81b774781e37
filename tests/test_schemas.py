"""A hundred JSON Schemas: every answer that ends is valid, and grammars take and refuse what a validator does.

The kinds of cases are those of JSON-Schema-Test-Suite (draft 2020-12) for keywords that grammars can enforce; the cases
are our own, for the suite's instances are seldom JSON on one line with keys in the schema's order.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import jsonschema
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from draftree.config import SamplingParams
from draftree.drafters.registry import load_drafter
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.models.huggingface.hf_model import HFModel
from draftree.policies.fixed import StaticTree
from draftree.sampling.constraint import ConstraintState, TextEnded
from draftree.sampling.grammar import Grammar, Grammars

from .tiny import VOCAB, tiny

_SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
EOS = 2
_CHARACTERS = '{}[]":,.-+ 0123456789abcdefghijklmnopqrstuvwxyzTZ@/_xABC\\!'


def _tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character that JSON needs."""
    spelt = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(_CHARACTERS)[0][0]
    tokens = list(dict.fromkeys([*_SPECIAL.values(), *spelt]))
    backend = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, [], unk_token=_SPECIAL["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **_SPECIAL)


TOKENIZER = _tokenizer()
CLOSING = {TOKENIZER.encode(c)[0]: 5.0 for c in '"}]'} | {EOS: 5.0}
"""Biases with which a model that knows nothing comes to an end."""


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, VOCAB, {EOS})


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = tiny()
    if model.generation_config is not None:
        model.generation_config.eos_token_id = EOS
    target = HFModel(model, TOKENIZER, name="tiny", self_test=False)
    return Engine(target, Speculation(load_drafter("lookup", target, StaticTree(width=2, depth=3))))


def takes(grammar: Grammar, value: Any) -> bool:
    """The value, as JSON on one line, may be the whole text."""
    state: ConstraintState | None = grammar.start()
    for token in [*TOKENIZER.encode(json.dumps(value)), EOS]:
        state = state and state.after(token)
    return isinstance(state, TextEnded)


def valid(value: Any, schema: Any) -> bool:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return bool(jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(value))


class Case(NamedTuple):
    """A schema, values that fit it, and values that do not."""

    schema: dict[str, Any]
    good: list[Any]
    bad: list[Any]


def obj(required: str = "", more: Any = False, **properties: Any) -> dict[str, Any]:
    found = {"type": "object", "properties": properties, "additionalProperties": more}
    return found | ({"required": required.split()} if required else {})


INT, STR, BOOL = {"type": "integer"}, {"type": "string", "maxLength": 6}, {"type": "boolean"}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}

NUMBERS = [
    *({"type": "integer", "minimum": low, "maximum": low + span} for low in (-5, 0, 17, 999) for span in (0, 3, 1000)),
    *({"type": "number", "minimum": 0, "exclusiveMaximum": top} for top in (1, 10, 2.5)),
    *({"type": "integer", "multipleOf": m, "minimum": 0, "maximum": 999} for m in (2, 5, 7, 10)),
    *({"allOf": [{"type": "integer", "minimum": n}, {"maximum": n + 5}]} for n in (0, 10)),
    *({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer", "minimum": n, "maximum": n + 1}}} for n in (1, 8)),
]
STRINGS = [
    *({"type": "string", "minLength": n, "maxLength": n + more} for n in (0, 1, 4) for more in (0, 2, 5)),
    *({"type": "string", "pattern": p} for p in ("^[a-z]{2}$", "^(on|in)-[0-9]$", "^a.{0,3}$", "^[^aeiou]{1,4}$")),
    *({"anyOf": [DIGIT, {"type": "string", "maxLength": n}]} for n in (1, 3)),
]
VALUES = [
    *({"enum": e} for e in ([1, 2], ["a", "b c"], [None, True, "x"], ["the", "then", "there"])),
    *({"const": c} for c in (0, "on and on", True, None, -3.5)),
    {"type": ["boolean", "null"]},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
]
CASES = [
    # type
    Case({"type": "null"}, [None], [0, False, ""]),
    Case({"type": "boolean"}, [True, False], [None, 0, "true"]),
    Case({"type": "integer", "minimum": -9, "maximum": 99}, [0, -9, 99], [1.5, "1", -10, 100]),
    Case({"type": ["string", "integer"], "maxLength": 3, "minimum": 0, "maximum": 9}, ["abc", 9], [None, "abcd", 10]),
    Case({"type": ["array", "null"], "items": DIGIT, "maxItems": 2}, [None, [], [1, 2]], [[1, 2, 3], {}, 0]),
    # const and enum
    Case({"const": {"a": 1, "b": [2, None]}}, [{"a": 1, "b": [2, None]}], [{"a": 1}, {"a": 1, "b": [2]}]),
    Case({"const": [{"a": "b"}]}, [[{"a": "b"}]], [[], [{"a": "c"}], {"a": "b"}]),
    Case({"const": ""}, [""], [" ", None]),
    Case({"enum": [[], {}, 0, False]}, [[], {}, 0, False], [None, [0], {"a": 1}]),
    Case({"enum": ["one line\\", 'a "b"']}, ["one line\\", 'a "b"'], ["one line", "a b"]),
    # minimum, maximum, multipleOf
    Case({"type": "number", "minimum": -1.5, "maximum": 1.5}, [0, -1.5, 1.25], [1.6, -2, "0"]),
    Case({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6}, [4, 5], [3, 6]),
    Case({"type": "number", "exclusiveMinimum": 0, "maximum": 2}, [0.5, 2], [0, 2.5, -1]),
    Case({"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 30}, [0, 3, 30], [1, 31, 33]),
    # minLength, maxLength, pattern
    Case({"type": "string", "minLength": 2, "maxLength": 2}, ["ab", "  "], ["a", "abc"]),
    Case({"type": "string", "pattern": "^[A-C]+[0-9]?$", "maxLength": 4}, ["A", "ABC1"], ["", "1", "ABCA1", "a"]),
    Case({"type": "string", "pattern": "a", "maxLength": 3}, ["a", "bab"], ["b", "baba"]),
    Case({"type": "string", "pattern": "^\\d{3}-\\d{2}$"}, ["123-45"], ["12-345", "123-4a"]),
    # format
    Case({"type": "string", "format": "time"}, ["01:02:03Z"], [1, None]),
    Case({"type": "string", "format": "date"}, ["2026-11-25"], ["2026-13-25", "25-11-2026"]),
    Case({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["127.0.0", "256.0.0.1"]),
    Case({"type": "string", "format": "uuid"}, ["01234567-89ab-cdef-0123-456789abcdef"], ["0123", ""]),
    # properties, required, additionalProperties
    Case(obj("a", a=DIGIT), [{"a": 1}], [{}, {"a": "1"}, {"a": 1, "b": 2}, {"a": 10}]),
    Case(obj("", a=DIGIT, b=BOOL), [{}, {"a": 1}, {"b": True}, {"a": 1, "b": False}], [{"c": 1}, {"b": 1}]),
    Case(obj("b", a=DIGIT, b=BOOL), [{"b": True}, {"a": 1, "b": True}], [{}, {"a": 1}]),
    Case(obj("a b", a=STR, b={"type": "null"}), [{"a": "x", "b": None}], [{"a": "x"}, {"a": "abcdefg", "b": None}]),
    Case(obj("in", **{"in": obj("a", a=DIGIT)}), [{"in": {"a": 0}}], [{"in": {}}, {"in": {"a": 0, "b": 1}}, {}]),
    Case(obj("a b c", a=DIGIT, b=DIGIT, c=DIGIT), [{"a": 1, "b": 2, "c": 3}], [{"a": 1, "b": 2}, {}]),
    Case(obj("a", a={"enum": ["x", "y"]}, b=DIGIT), [{"a": "x"}, {"a": "y", "b": 0}], [{"a": "z"}, {"b": 0}]),
    Case(obj("a-b", **{"a-b": DIGIT}), [{"a-b": 1}], [{"a": 1}, {"a_b": 1}]),
    Case(obj("", False), [{}], [{"a": 1}, [], None]),
    Case(obj("a", DIGIT, a=DIGIT), [{"a": 1}, {"a": 1, "b": 2}], [{"a": 1, "b": "x"}, {"b": 2}]),
    Case({"type": "object", "additionalProperties": DIGIT, "maxProperties": 2}, [{}, {"x": 1}], [{"x": "y"}]),
    Case({"type": "object", "additionalProperties": BOOL, "minProperties": 1}, [{"x": True}], [{}]),
    Case(
        {"type": "object", "patternProperties": {"^x[0-9]$": DIGIT}, "additionalProperties": False},
        [{}, {"x1": 1}, {"x1": 1, "x2": 2}],
        [{"y1": 1}, {"x1": "1"}],
    ),
    Case({"properties": {"a": DIGIT}, "required": ["a"], "type": "object"}, [{"a": 1}], [{}, {"a": None}]),
    # items, prefixItems, minItems, maxItems
    Case({"type": "array", "items": DIGIT, "maxItems": 3}, [[], [1], [1, 2, 3]], [[1, 2, 3, 4], [10], ["a"]]),
    Case({"type": "array", "items": BOOL, "minItems": 2, "maxItems": 2}, [[True, False]], [[], [True], [True] * 3]),
    Case({"type": "array", "items": {"type": "array", "items": DIGIT, "maxItems": 1}, "maxItems": 2}, [[[1]]], [[1]]),
    Case({"type": "array", "items": obj("a", a=DIGIT), "maxItems": 1}, [[], [{"a": 1}]], [[{}], [{"a": 1}, {"a": 2}]]),
    Case(
        {"type": "array", "prefixItems": [DIGIT, BOOL], "items": False, "minItems": 2},
        [[1, True]],
        [[], [1], [True, 1], [1, True, None]],
    ),
    Case({"type": "array", "prefixItems": [STR], "items": DIGIT, "minItems": 1, "maxItems": 3}, [["a", 1]], [[1]]),
    Case({"type": "array", "prefixItems": [DIGIT, STR], "items": False}, [[], [1], [1, "a"]], [["a"]]),
    Case({"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 4}, [["a", "b"]], [["c"], []]),
    Case({"type": "array", "maxItems": 0}, [[]], [[1], None]),
    # anyOf, oneOf, allOf
    Case({"anyOf": [DIGIT, BOOL, {"type": "null"}]}, [1, True, None], ["a", 10]),
    Case({"anyOf": [obj("a", a=DIGIT), obj("b", b=BOOL)]}, [{"a": 1}, {"b": True}], [{}, {"a": True}]),
    Case({"oneOf": [obj("k", k={"const": "a"}), obj("k v", k={"const": "b"}, v=DIGIT)]}, [{"k": "a"}], [{"k": "b"}]),
    Case({"oneOf": [{"const": "on"}, {"const": "off"}]}, ["on", "off"], ["of", "onoff"]),
    Case({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, [2, 3, 4], [1, 5, "2"]),
    Case({"allOf": [{"minLength": 2}, {"type": "string", "maxLength": 3}]}, ["ab", "abc"], ["a", "abcd", 12]),
    Case({"type": "integer", "anyOf": [{"maximum": 3, "minimum": 0}, {"minimum": 7, "maximum": 9}]}, [3, 7], [5]),
    # $ref and $defs
    Case(
        {"$defs": {"d": DIGIT}, **obj("a b", a={"$ref": "#/$defs/d"}, b={"$ref": "#/$defs/d"})},
        [{"a": 1, "b": 2}],
        [{}],
    ),
    Case(
        {"$defs": {"a~b": DIGIT, "c/d": BOOL}, "anyOf": [{"$ref": "#/$defs/a~0b"}, {"$ref": "#/$defs/c~1d"}]},
        [1, True],
        ["x", None],
    ),
    Case(
        {"$ref": "#/$defs/list", "$defs": {"list": obj("v", v=DIGIT, next={"$ref": "#/$defs/list"})}},
        [{"v": 1}, {"v": 1, "next": {"v": 2}}, {"v": 1, "next": {"v": 2, "next": {"v": 3}}}],
        [{"next": {"v": 1}}, {"v": 1, "next": {}}, {"v": 1, "next": None}],
    ),
    Case(
        {"anyOf": [DIGIT, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}]},
        [1, [], [1, [2]], [[[]]]],
        ["a", [1, 2, 3], [[1, 2, 3]]],
    ),
    Case(
        {"$defs": {"leaf": {"$ref": "#/$defs/number"}, "number": DIGIT}, "$ref": "#/$defs/leaf"},
        [1],
        [10, "a", None],
    ),
    # annotations, which change nothing
    Case({"title": "x", "description": "y", "default": 3, "examples": [1], "$comment": "z", **DIGIT}, [1], ["a", 10]),
    Case({"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "boolean"}, [True], [1, None]),
    Case({"type": "integer", "minimum": 1, "maximum": 3, "deprecated": True, "readOnly": True}, [1, 3], [0, 4]),
    # what tools and extraction ask for
    Case(
        obj("name age", name={"type": "string", "pattern": "^[a-z]{1,5}$"}, age={**INT, "minimum": 0, "maximum": 130}),
        [{"name": "ada", "age": 36}],
        [{"name": "ada"}, {"name": "Ada", "age": 36}, {"age": 36, "name": "ada", "x": 1}],
    ),
    Case(
        obj("to body", to={"type": "array", "items": {"enum": ["a@b", "c@d"]}, "minItems": 1, "maxItems": 2}, body=STR),
        [{"to": ["a@b"], "body": "on"}],
        [{"to": [], "body": "on"}, {"to": ["e@f"], "body": "on"}],
    ),
    Case(
        obj("answer steps", steps={"type": "array", "items": STR, "maxItems": 2}, answer={"type": ["number", "null"]}),
        [{"steps": ["a", "b"], "answer": None}, {"steps": [], "answer": 1.5}],
        [{"steps": []}, {"steps": ["a", "b", "c"], "answer": 1}],
    ),
    Case(
        obj("kind", kind={"enum": ["circle", "square"]}, at=obj("x y", x=DIGIT, y=DIGIT)),
        [{"kind": "circle"}, {"kind": "square", "at": {"x": 1, "y": 2}}],
        [{"kind": "line"}, {"kind": "circle", "at": {"x": 1}}],
    ),
]
SCHEMAS = [*NUMBERS, *STRINGS, *VALUES, *(case.schema for case in CASES)]


def _name(schema: Any) -> str:
    return re.sub(r"\W+", "-", json.dumps(schema)).strip("-")[:48]


@pytest.mark.parametrize("schema", SCHEMAS, ids=_name)
def test_every_answer_that_ends_is_valid(grammars: Grammars, engine: Engine, schema: dict[str, Any]) -> None:
    """Sampled from a model that knows nothing: whatever the grammar allows comes."""
    constraint = grammars.json_schema(schema)
    params = [
        SamplingParams(max_tokens=96, temperature=1.5, seed=seed, constraint=constraint, logit_bias=CLOSING)
        for seed in range(3)
    ]
    ended = [g for g in engine.generate(["x"] * 3, params) if g.finish_reason == "eos"]
    assert ended
    for generation in ended:
        assert valid(json.loads(generation.text), schema), generation.text


@pytest.mark.parametrize("case", CASES, ids=lambda case: _name(case.schema))
def test_grammars_take_and_refuse_what_a_validator_does(grammars: Grammars, case: Case) -> None:
    grammar = grammars.json_schema(case.schema)
    for values, fits in ((case.good, True), (case.bad, False)):
        assert [value for value in values if valid(value, case.schema) is not fits] == []
        assert [value for value in values if takes(grammar, value) is not fits] == []
