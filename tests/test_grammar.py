"""Grammars: what texts they give, what they refuse to compile, and that the tokens of every tokenizer do."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from draftree.config import SamplingParams
from draftree.drafters import grow as growing
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.drafters.registry import load_drafter
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation, SpeculationParams
from draftree.errors import ConfigError
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.loading import load
from draftree.papers.cascade import CascadeSource, LoopBack
from draftree.policies.fixed import StaticTree
from draftree.sampling.constraint import Constraint, ConstraintState, TextEnded, followed
from draftree.sampling.grammar import Function, Grammars
from draftree.text.encoding import CALL_TAGS, call_text

from . import tiny_gguf
from .scripted import ScriptedModel
from .test_constraint import Drafted
from .tiny import BYTES_VOCAB, VOCAB, bytes_tokenizer, save_gguf, tiny, tiny_tokenizer
from .toy import ToyModel

TOKENIZER = tiny_tokenizer()
EOS = 2


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, VOCAB, {EOS})


@pytest.fixture(scope="module")
def model() -> HFModel:
    tinier = tiny()
    if tinier.generation_config is not None:
        tinier.generation_config.eos_token_id = EOS
    return HFModel(tinier, TOKENIZER, name="tiny", self_test=False)


def takes(grammar: Constraint, text: str, tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> bool:
    """It may be the whole text."""
    state: ConstraintState | None = grammar.start()
    for token in [*tokenizer.encode(text), EOS]:
        state = state and state.after(token)
    return isinstance(state, TextEnded)


@pytest.mark.parametrize(
    ("make", "good", "bad"),
    [
        (lambda g: g.regex("[a-c]+x?"), ["a", "abcx"], ["", "ax a", "d", "xa"]),
        (lambda g: g.choice(["the cat", 'a "hat"']), ["the cat", 'a "hat"'], ["the", "the cat ", "a hat"]),
        (lambda g: g.grammar('start: "a" start "b" | "c"'), ["c", "aacbb"], ["ab", "aacb", "acbb"]),
        (lambda g: g.grammar('root ::= "a" root "b" | "c"'), ["c", "aacbb"], ["ab", "aacb", "acbb"]),
        (lambda g: g.json_schema({"type": "integer", "minimum": 7}), ["7", "123"], ["6", "7.5", "a", " 7"]),
        (lambda g: g.json_schema({"oneOf": [{"const": 1}, {"const": "a"}]}), ["1", '"a"'], ["2", "a"]),
        (lambda g: g.json_schema({"type": "string", "maxLength": 3}), ['"abc"', '""'], ['"abcd"', "abc"]),
        (lambda g: g.json_schema({}), ["1", '"a"', "true"], ["a", "1 2"]),
    ],
)
def test_grammars_take_what_they_say(
    grammars: Grammars, make: Callable[[Grammars], Constraint], good: list[str], bad: list[str]
) -> None:
    grammar = make(grammars)
    assert all(takes(grammar, text) for text in good)
    assert not any(takes(grammar, text) for text in bad)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: g.regex("("), "regex .*unclosed group"),
        (lambda g: g.regex("(?=a)b"), "look-around"),
        (lambda g: g.choice([]), "choice is "),
        (lambda g: g.choice(["a", ""]), "choice is "),
        (lambda g: g.grammar("start: nothing"), "grammar .*nothing"),
        (lambda g: g.grammar("((("), "grammar "),
        (lambda g: g.json_schema(True), "json_schema is True"),
        (lambda g: g.json_schema({"type": "object"}), "vocabulary"),  # it has no braces
        (lambda g: g.json_schema({"type": "nothing"}), "json_schema .*nothing"),
        (lambda g: g.json_schema({"not": {}}), "not"),
        (lambda g: g.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda g: g.json_schema({"if": {}, "then": False}), "#/then"),
        (lambda g: g.json_schema({"$ref": "#/$defs/x"}), "x"),
        (
            lambda g: g.json_schema(json.loads('{"items": ' * 200 + "{}" + "}" * 200)),
            "items",
        ),
        (lambda g: g.json_schema({"enum": ["a" * (1 << 20)]}), "1048590 characters: .*1048576"),
    ],
)
def test_what_cannot_be_enforced_is_refused_in_one_line(
    grammars: Grammars, make: Callable[[Grammars], Constraint], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make(grammars)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 400


@pytest.mark.parametrize("pattern", ["(a+)+b", "[a-z]{1,100000}", "((a{1,100}){1,100}){1,100}", "(x+x+)+y"])
def test_patterns_that_explode_elsewhere_do_not(grammars: Grammars, pattern: str) -> None:
    """Their automata are built as far as a text goes, and no further than a bound."""
    state = grammars.regex(pattern).start()
    for token in TOKENIZER.encode("x" * 60 if "x" in pattern else "a" * 60):
        if state.dead_end is not None:
            assert "too many expressions" in state.dead_end and not state.allows(token)
            break
        assert state.allows(token)
        state = followed(state, [token])


def test_states_stay_as_they_are(grammars: Grammars) -> None:
    """A node's state is not changed by what is asked of it, nor by what follows it."""
    start = grammars.regex("ab|ac").start()
    a, b, c = (TOKENIZER.encode(x)[0] for x in "abc")
    every = np.arange(VOCAB)
    first = start.after(a)
    assert first is not None and first is start.after(a)
    assert first.after(b) is not None and first.after(c) is not None and first.after(a) is None
    assert np.flatnonzero(start.allows(every)).tolist() == [a]
    assert np.flatnonzero(first.allows(every)).tolist() == sorted([b, c])


def test_special_tokens_are_no_text(grammars: Grammars) -> None:
    state = grammars.regex("[a-z<>/]*").start()
    assert state.allows(np.array([0, 1, EOS])).tolist() == [False, False, True]


def test_what_is_forced_is_known_and_drafted(grammars: Grammars, model: HFModel) -> None:
    state = followed(grammars.json_schema({"const": "the cat"}).start(), TOKENIZER.encode('"th'))
    assert state.forced is not None and str(TOKENIZER.decode([state.forced])).startswith("e")
    assert grammars.regex("a|b").start().forced is None
    params = SamplingParams(max_tokens=40, constraint=grammars.choice(["in the hat is a cat on the cat"]))
    drafter = load_drafter("lookup", model, StaticTree(width=1, depth=6))
    found = Engine(model, Speculation(drafter)).generate(["x"], params)[0]
    alone = Engine(model).generate(["x"], params)[0]
    assert found.token_ids == alone.token_ids and found.finish_reason == "eos"
    assert len(found.token_ids) > 9 and found.stats.steps < alone.stats.steps / 2


def test_a_vocabulary_that_cannot_spell_a_grammar_ends_that_request_alone(grammars: Grammars, model: HFModel) -> None:
    """The tiny vocabulary has no capitals."""
    engine = Engine(model)
    handles = [
        engine.submit("x", SamplingParams(max_tokens=4, constraint=constraint))
        for constraint in (grammars.regex("aaB"), None)
    ]
    with pytest.raises(ConfigError, match="vocabulary"):
        handles[0].result()
    assert len(handles[1].result().token_ids) == 4


def test_tokenizers_of_both_libraries_give_the_same_masks(grammars: Grammars, tmp_path: Path) -> None:
    target = load(str(save_gguf(tmp_path / "tiny.gguf")), backend="llama.cpp")
    others = Engine(target).grammars
    schema = {"enum": ["the cat", 12, "in"]}
    pairs = [(g.regex("[a-z ]+[0-9]").start(), g.json_schema(schema).start()) for g in (grammars, others)]
    for one, other, text in zip(*pairs, ("the cat 1", '"the '), strict=True):
        for token in TOKENIZER.encode(text):
            assert one.mask is not None and other.mask is not None
            width = len(one.mask)
            assert np.array_equal(one.mask, other.mask[:width])
            one, other = followed(one, [token]), followed(other, [token])


@pytest.mark.parametrize("backend", ["native", "llama.cpp"])
@pytest.mark.parametrize(
    "vocabulary",
    [
        replace(tiny_gguf.byte_level(), flags={gguf.Keys.Tokenizer.ADD_BOS: True}),
        tiny_gguf.with_byte_fallback(),
        replace(tiny_gguf.with_byte_fallback(), flags={gguf.Keys.Tokenizer.ADD_BOS: False}),
    ],
    ids=["byte level", "SentencePiece", "SentencePiece without a first token"],
)
def test_what_begins_a_text_of_a_vocabulary_begins_no_grammar(
    backend: str, vocabulary: tiny_gguf.Vocabulary, tmp_path: Path
) -> None:
    """Of Llama's vocabularies each text began with a token and a space of its own: no grammar could be followed."""
    target = load(str(tiny_gguf.write(tmp_path / "tiny.gguf", vocabulary=vocabulary)), backend=backend)
    assert target.tokenizer is not None
    for text in ("the rain", " the", "é ж", "a  b", "xyz"):
        engine = Engine(target, SpeculationParams(drafter="lookup"))
        constraint = engine.grammars.choice([text])
        (found,) = engine.generate([target.tokenizer.encode("a")], SamplingParams(max_tokens=32, constraint=constraint))
        assert (found.text, found.finish_reason) == (text, "eos")
        *ids, _ = found.token_ids
        assert b"".join(target.tokenizer.spelling()[0][token] for token in ids) == text.encode()  # type: ignore[attr-defined]


def test_models_without_text_or_an_end_have_no_grammars() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        _ = Engine(ToyModel()).grammars
    with pytest.raises(ConfigError, match="end-of-sequence"):
        Grammars(TOKENIZER, VOCAB, set())


FUNCTIONS = [
    Function("f", {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"enum": [1, "}}"]}}}),
    Function("g.h", {"type": "object", "properties": {"b": {"type": "object", "properties": {"c": {"const": 2}}}}}),
]
F, G = call_text("f", {"a": 1}), call_text("g.h", {"b": {"c": 2}})


@pytest.fixture(scope="module", params=[None, False, True], ids=["text", "token", "special"])
def spelling(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """A tokenizer to which the tags of calls are text, tokens or special tokens."""
    return bytes_tokenizer(request.param)


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({"forced": True, "several": True}, [F, G, f"{F}\n{G}\n{F}"], ["", "x", f"x{F}", F[:-1], f"{F}\n", f"{F}{G}"]),
        ({"forced": True, "several": False}, [F, G], [f"{F}\n{G}", "", "x"]),
        (
            {"forced": False, "several": True},
            ["", "x", "a < b <tool", F, f"x é\n{F}", f"{F}\n{G}", "</tool_call>", "{}"],
            [f"{F} x", f"{F}x", "<tool_call>", "x<tool_call>\n{}", call_text("f", {"a": 3}), call_text("e", {})],
        ),
        ({"forced": False, "several": False}, ["x", F, f"x{G}"], [f"{F}\n{G}"]),
        ({"forced": False, "several": True, "text": {"enum": [1, 2]}}, ["1", F, f"{F}\n{G}"], ["3", f"1{F}", "x"]),
    ],
)
def test_calls_are_held_to_their_format(
    spelling: PreTrainedTokenizerFast, options: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    """As the tokenizer spells them: tokens that reach from one part of the format into the next are allowed."""
    grammar = Grammars(spelling, BYTES_VOCAB, {EOS}).calls(FUNCTIONS, **options)
    assert [text for text in good if not takes(grammar, text, spelling)] == []
    assert [text for text in bad if takes(grammar, text, spelling)] == []


def test_a_tag_in_ordinary_tokens_is_a_tag_as_well() -> None:
    """Where a token is the tag a model may spell it all the same, and what follows is parsed."""
    tokenizer, text = bytes_tokenizer(True), bytes_tokenizer(None)
    grammar = Grammars(tokenizer, BYTES_VOCAB, {EOS}).calls(FUNCTIONS, forced=False, several=True)
    state: ConstraintState | None = grammar.start()
    for token in text.encode("x<tool_call>"):
        assert state is not None
        state = state.after(token)
    assert state is not None and not state.allows(text.encode("x")[0])
    assert state.after(text.encode("\n")[0]) is not None


def test_text_without_a_call_is_free(spelling: PreTrainedTokenizerFast) -> None:
    """Tokens that no text spells may come, as they do without functions: those that begin and end thoughts, say."""
    grammar = Grammars(spelling, BYTES_VOCAB, {EOS}).calls(FUNCTIONS, forced=False, several=True)
    state = followed(grammar.start(), [*spelling.encode("a"), 1, *spelling.encode("b"), 1])
    assert state.allows(np.array([0, 1, EOS])).tolist() == [True, True, True]
    state = followed(state, spelling.encode('c<tool_call>\n{"name": "'))
    assert state.allows(np.array([0, 1, EOS])).tolist() == [False, False, False]


def test_special_tags_are_named(spelling: PreTrainedTokenizerFast) -> None:
    """Their tokens give no text: who parses it must know them."""
    ids = [spelling.get_vocab().get(tag) for tag in CALL_TAGS]
    special = not spelling.decode([i for i in ids if i is not None], skip_special_tokens=True) and None not in ids
    assert Grammars(spelling, BYTES_VOCAB, {EOS}).tags == (dict(zip(ids, CALL_TAGS, strict=True)) if special else {})


def test_a_schema_of_arguments_that_cannot_be_enforced_is_refused(spelling: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="#/properties/a/uniqueItems") as caught:
        Grammars(spelling, BYTES_VOCAB, {EOS}).calls(
            [Function("f", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})],
            forced=False,
            several=True,
        )
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 400


BYTES = bytes_tokenizer()
OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
REPEATED = [
    ({"type": "object"}, '{"b": 1, "b": 2}', '{"b": 1, "bc": 2}'),
    (OPEN, '{"a": 1, "b": 1, "b": 2}', '{"a": 1, "b": 1, "c": 2}'),
    ({"type": "object"}, '{"b": {"c": 1, "c": 1}}', '{"b": {"c": {"c": 1}}, "c": {"b": 1}}'),
    ({"type": "object"}, '{"b": [{"x": 1, "x": 1}]}', '{"b": [{"x": 1}, {"x": 1}, "x", "x"], "x": "\\"x\\": 1, "}'),
    ({"type": "object"}, '{"b\\n": 1, "b\\u000a": 2}', '{"b\\n": 1, "b\\u000b": 2}'),
    ({"type": "object"}, '{"é": 1, "é": 2}', '{"é": 1, "è": 2}'),
    ({"type": "object"}, '{"": 1, "": 2}', '{"": 1, " ": 2}'),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"b": 1, "b": 2}', '{"b": 1, "c": 2}'),
    ({"type": "object", "patternProperties": {"^[ab]$": {}}}, '{"a": 1, "a": 2}', '{"a": 1, "b": 2}'),
    ({"type": "array", "items": OPEN}, '[{"b": 1}, {"b": 1, "b": 2}]', '[{"b": 1}, {"b": 1}]'),
]


@pytest.mark.parametrize(("schema", "twice", "once"), REPEATED)
def test_no_key_comes_twice(schema: dict[str, Any], twice: str, once: str) -> None:
    """A small model repeated keys of an object that the schema left open, until its limit."""
    grammar = Grammars(BYTES, BYTES_VOCAB, {EOS}).json_schema(schema)
    assert takes(grammar, once, BYTES) and not takes(grammar, twice, BYTES)


@pytest.mark.parametrize(
    "options", [{"forced": True}, {"forced": False}, {"forced": False, "text": {"type": "object"}}]
)
def test_nor_in_the_arguments_of_a_call(spelling: PreTrainedTokenizerFast, options: dict[str, Any]) -> None:
    open_ = [Function("f", {"type": "object"})]
    grammar = Grammars(spelling, BYTES_VOCAB, {EOS}).calls(open_, several=True, **options)
    good = call_text("f", {"b": 1, "c": {"b": '"b": '}})
    bad = good.replace('"c"', '"b"')
    assert takes(grammar, good, spelling) and takes(grammar, f"{good}\n{good}", spelling)
    assert not takes(grammar, bad, spelling) and not takes(grammar, f"{good}\n{bad}", spelling)
    if not options["forced"]:
        text = '{"b": 1, "b": 2}'
        assert takes(grammar, text, spelling) is ("text" not in options)


@pytest.mark.parametrize("text", [once for _, _, once in REPEATED])
def test_masks_allow_what_may_follow_and_no_more(text: str) -> None:
    """Whatever tokens end a key: alone, with what comes before it or behind it."""
    grammar = Grammars(BYTES, BYTES_VOCAB, {EOS}).json_schema({})
    state: ConstraintState | None = grammar.start()
    every = np.arange(len(BYTES))
    for token in [*BYTES.encode(text), EOS]:
        assert state is not None
        allowed = state.allows(every).tolist()
        assert allowed == [state.after(other) is not None for other in every.tolist()]
        assert allowed[token]
        state = state.after(token)


@pytest.mark.parametrize("vocab", [BYTES_VOCAB - 1, BYTES_VOCAB, BYTES_VOCAB + 1])
def test_masks_are_as_wide_as_the_vocabulary(vocab: int) -> None:
    """llguidance gave one word more where 32 divides it, which no other rule of tokens could be joined with."""
    mask = Grammars(BYTES, vocab, {EOS}).json_schema({"type": "object"}).start().mask
    assert mask is not None and len(mask) == -(-vocab // 32)


KEYS = {"type": "object", "patternProperties": {"^[ab]$": {}}, "additionalProperties": False}
DEAD_ENDS: dict[str, tuple[PreTrainedTokenizerFast, Callable[[Grammars], Constraint], str, str, str]] = {
    "keys": (BYTES, lambda g: g.json_schema(KEYS), '{"a": 1, "b": 2}', '{"a": 1, "a": 2}', "each key"),
    "vocabulary": (TOKENIZER, lambda g: g.regex("x(yB|z)"), "xz", "xy", "vocabulary"),
}
"""Tokenizer, grammar, a text of it, another one that it cannot go on with, and why."""


def speaking(script: str, tokenizer: PreTrainedTokenizerFast, draft: str, way: str = "model") -> Engine:
    """An engine whose target says a text, and whose draft model says another."""
    source = ModelSource(ScriptedModel(draft, tokenizer), BYTES_VOCAB)
    loop = LoopBack(tau=math.inf, rejected="on")
    made = CascadeSource(NgramSource(1), source, StaticTree(1, 4), loop) if way == "cascade" else source
    return Engine(ScriptedModel(script, tokenizer), Speculation(TreeDrafter(StaticTree(1, 9), made), 12))


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("way", ["model", "cascade"])
@pytest.mark.parametrize("why", DEAD_ENDS)
def test_a_draft_into_a_dead_end_fails_no_text_that_never_comes_there(
    why: str, way: str, in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the draft ran into was raised as if the text had come there."""
    if not in_c:
        monkeypatch.setattr(growing, "grows_by_rule", lambda policy: False)
    tokenizer, make, text, drafted, _ = DEAD_ENDS[why]
    grammar, seen = make(Grammars(tokenizer, BYTES_VOCAB, {EOS})), Drafted()
    handle = speaking(text, tokenizer, drafted, way).submit("q", SamplingParams(constraint=grammar), observers=[seen])
    assert handle.result().text == text
    assert any(followed(grammar.start(), path).dead_end for path in seen.paths)


@pytest.mark.parametrize("draft", ["its own", "another"])
@pytest.mark.parametrize("why", DEAD_ENDS)
def test_a_text_that_comes_to_a_dead_end_fails_there_alone(why: str, draft: str) -> None:
    """Its tokens are those of AR decoding, and none that the grammar rules out is among them."""
    tokenizer, make, other, text, reason = DEAD_ENDS[why]
    params = SamplingParams(constraint=make(Grammars(tokenizer, BYTES_VOCAB, {EOS})))
    engine = speaking(text, tokenizer, text if draft == "its own" else other)
    handles = [engine.submit("q", params, way) for way in (None, Speculation())]
    free = engine.submit("q", SamplingParams(max_tokens=40))
    for handle in handles:
        with pytest.raises(ConfigError, match=reason):
            handle.result()
    drafted, alone = (handle.request.output_ids for handle in handles)
    assert drafted == alone == [chunk.token for chunk in handles[0].request.chunks]
    assert followed(params.constraint.start(), alone).dead_end  # type: ignore[union-attr]
    assert free.result().text == text


def test_a_dead_end_behind_the_end_of_a_text_does_not_matter() -> None:
    tokenizer, make, _, text, _ = DEAD_ENDS["keys"]
    params = SamplingParams(constraint=make(Grammars(tokenizer, BYTES_VOCAB, {EOS})), stop=(", ",))
    found = speaking(text, tokenizer, text).generate(["q"], params)[0]
    assert (found.text, found.finish_reason) == ('{"a": 1', "stop")
