"""Grammars over tokens, compiled by llguidance: JSON Schema, regular expressions, choices, Lark, GBNF, function calls.

llguidance refuses what it cannot enforce, keyword by keyword, so that every answer that ends is valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .constraint import ConstraintState, TextEnded
from .errors import ConfigError, shortened
from .text import CALL_TAGS, Tokenizer

_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
"""JSON on one line: models need no freedom there, and what is forced can be drafted. "oneOf" is read as "anyOf"."""
_LONGEST = 1 << 20
"""Characters of a grammar's text: beyond it compiling takes seconds."""


@runtime_checkable
class SpelledTokenizer(Tokenizer, Protocol):
    """A tokenizer that is none of transformers' fast ones, and says how its tokens are spelled."""

    def spelling(self) -> tuple[list[bytes], list[int]]:
        """The bytes of each token, and the ids of special ones."""


@dataclass(frozen=True, slots=True)
class Function:
    """What may be called.

    Attributes:
        parameters: JSON Schema of an object, its arguments.
    """

    name: str
    parameters: Mapping[str, Any]


class GrammarState(ConstraintState):
    """A matcher of llguidance at one place of a text."""

    def __init__(self, matcher: LLMatcher, ends: Collection[int]) -> None:
        self._matcher, self._ends = matcher, ends
        self._mask: Tensor | None = None
        self._after: dict[int, ConstraintState | None] = {}

    @property
    def mask(self) -> Tensor:
        """See ``ConstraintState``.

        Raises:
            ConfigError: the grammar is too complex here, or the vocabulary cannot spell what it asks for.
        """
        if self._mask is None:
            mask = torch.from_numpy(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32).copy())
            if self._matcher.is_error():
                raise ConfigError(f"the grammar cannot be followed: {_brief(self._matcher.get_error())}: simplify it")
            if not self._fits(mask):
                raise ConfigError("the grammar cannot be followed: no token of the model's vocabulary fits here")
            self._mask = mask
        return self._mask

    def _fits(self, mask: Tensor) -> bool:
        """A token does; llguidance allows one that does not where none does."""
        words = mask.nonzero()[:, 0].tolist()
        if len(words) != 1:
            return bool(words)
        word = int(mask[words[0]]) & 0xFFFFFFFF
        token = 32 * words[0] + word.bit_length() - 1
        return bool(word & (word - 1)) or token in self._ends or bool(self._matcher.validate_tokens([token]))

    @property
    def forced(self) -> int | None:
        tokens = self._matcher.compute_ff_tokens()
        return tokens[0] if tokens else None

    def after(self, token: int) -> ConstraintState | None:
        if token not in self._after:
            found: ConstraintState | None = None
            if token in self._ends:
                found = TextEnded() if bool(self.allows(torch.tensor(token))) else None
            elif self._matcher.validate_tokens([token]):
                matcher = self._matcher.deep_copy()
                matcher.consume_token(token)
                found = GrammarState(matcher, self._ends)
            self._after[token] = found
        return self._after[token]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, a ``Constraint`` of texts of one vocabulary.

    Attributes:
        kind: "json_schema", "regex", "choice", "grammar" or "calls".
        source: what it was made of.
    """

    kind: str
    source: str
    _matcher: LLMatcher = field(repr=False, compare=False)
    _ends: frozenset[int] = field(repr=False, compare=False)

    def start(self) -> ConstraintState:
        return GrammarState(self._matcher.deep_copy(), self._ends)


class Grammars:
    """Compiles grammars for the tokens of one model; any thread may ask.

    Args:
        tokenizer: of the model.
        vocab_size: width of its logits.
        eos_ids: tokens that end a text.

    Raises:
        ConfigError: the tokenizer does not say how its tokens are spelled, or no token ends a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        if not eos_ids:
            raise ConfigError("the model has no end-of-sequence token: a text that a grammar has ended could not end")
        self._tokenizer = tokenizer
        self._ends, ends = frozenset(eos_ids), sorted(eos_ids)
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            self._tokens = from_tokenizer(tokenizer, vocab_size, ends)
        elif isinstance(tokenizer, SpelledTokenizer):
            self._tokens = LLTokenizer(TokenizerWrapper(_Spelled(tokenizer, ends[0])), vocab_size, ends)
        else:
            raise ConfigError(f"{type(tokenizer).__name__} does not say how its tokens are spelled: grammars need that")

    def json_schema(self, schema: Mapping[str, Any]) -> Grammar:
        """JSON on one line that is valid by a schema. ``oneOf`` is read as ``anyOf``.

        Raises:
            ConfigError: it is no schema, or has what cannot be enforced; the message names it.
        """
        if not isinstance(schema, Mapping):
            raise ConfigError(f"the json_schema is {shortened(repr(schema))}: give an object")
        source = json.dumps(schema)
        try:
            grammar = LLMatcher.grammar_from_json_schema(source, overrides=_LAYOUT)
        except ValueError as error:  # it is nested too deep
            raise ConfigError(f"the json_schema cannot be used: {_brief(str(error))}") from None
        return self._compiled("json_schema", source, grammar)

    def json_object(self) -> Grammar:
        """Any JSON object, on one line."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> Grammar:
        """Texts that a regular expression matches as a whole, without look-around and back-references (Rust's syntax).

        Raises:
            ConfigError: it is none.
        """
        return self._compiled("regex", pattern, LLMatcher.grammar_from_regex(pattern))

    def choice(self, texts: Sequence[str]) -> Grammar:
        """One of these texts.

        Raises:
            ConfigError: there are none, or one is empty.
        """
        if not texts or not all(texts):
            raise ConfigError(f"choice is {list(texts)!r}: give texts of at least one character")
        either = " | ".join(map(json.dumps, texts))
        return self._compiled("choice", json.dumps(list(texts)), LLMatcher.grammar_from_lark(f"start: {either}"))

    def grammar(self, text: str) -> Grammar:
        """Texts of a context-free grammar: Lark's as llguidance reads it (the rule ``start``), or GBNF (``root``).

        Raises:
            ConfigError: it is none.
        """
        try:
            lark = any_to_lark(text)
        except GbnfToLarkError as error:
            raise ConfigError(f"the grammar cannot be read: {_brief(str(error))}") from None
        return self._compiled("grammar", text, LLMatcher.grammar_from_lark(lark))

    def calls(
        self, functions: Sequence[Function], *, forced: bool, several: bool, text: Mapping[str, Any] | None = None
    ) -> Grammar:
        """Calls of functions in Hermes' format (``CALL_TAGS``), each on lines of its own.

        Args:
            functions: at least one.
            forced: a call at once; else any text until the first tag, and no call if none comes.
            several: calls may follow the first.
            text: JSON Schema of an answer without calls.

        Raises:
            ConfigError: a schema is none, or has what cannot be enforced.
        """
        opens, closes = (self._tag(tag) for tag in CALL_TAGS)
        rules = [f"call: {' | '.join(f'call{i}' for i in range(len(functions)))}"]
        for i, function in enumerate(functions):
            name = json.dumps(json.dumps({"name": function.name})[:-1] + ', "arguments": ')
            rules.append(f'call{i}: "\\n" {name} {_inline(function.parameters)} "}}\\n" {closes}')
        more = f'("\\n" {opens} call)*' if several else ""
        if forced:
            start = f"{opens} call {more}"
        elif text is not None:
            start = f"{_inline(text)} | {opens} call {more}"
        else:
            tag = self._tag_tokens.get(CALL_TAGS[0])
            others = [str(token) for token in self._special if token != tag]
            start = f"{'other* ' if others else ''}(TEXT | first call {more})"
            rules += ["TEXT: /(?s:.*)/", f"spelled[lazy]: TEXT {json.dumps(CALL_TAGS[0])}"]
            rules.append(f"first: spelled{f' | TEXT {opens}' if tag in self._special else ''}")
            if others:
                rules.append(f"other: TEXT <[{','.join(others)}]>")
        grammar = "\n".join(["%llguidance {}", f"start: {start}", *rules])
        return self._compiled("calls", grammar, LLMatcher.grammar_from_lark(grammar))

    @cached_property
    def tags(self) -> Mapping[int, str]:
        """Tags of calls whose tokens give no text."""
        tokens = self._tag_tokens.items()
        return {token: tag for tag, token in tokens if not self._tokenizer.decode([token], skip_special_tokens=True)}

    @cached_property
    def _special(self) -> Sequence[int]:
        """Tokens that no text spells and that end none."""
        every = range(self._tokens.vocab_size)
        return [token for token in every if self._tokens.is_special_token(token) and token not in self._ends]

    @cached_property
    def _tag_tokens(self) -> Mapping[str, int]:
        vocab = self._tokenizer.get_vocab()
        return {tag: vocab[tag] for tag in CALL_TAGS if tag in vocab}

    def _tag(self, tag: str) -> str:
        """A tag in a rule: its token, if it is one."""
        return f"<[{self._tag_tokens[tag]}]>" if tag in self._tag_tokens else json.dumps(tag)

    def _compiled(self, kind: str, source: str, grammar: str) -> Grammar:
        if len(source) > _LONGEST:
            raise ConfigError(f"the {kind} has {len(source)} characters: use at most {_LONGEST}")
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ConfigError(f"the {kind} cannot be used: {_brief(matcher.get_error())}")
        made = Grammar(kind, source, matcher, self._ends)
        _ = made.start().mask  # what cannot even begin is found now
        return made


def _inline(schema: Mapping[str, Any]) -> str:
    """A schema inside a rule."""
    return f"%json {json.dumps({**schema, 'x-guidance': _LAYOUT})}"


class _Spelled:
    """A tokenizer as llguidance takes it."""

    def __init__(self, tokenizer: SpelledTokenizer, end: int) -> None:
        self._tokenizer = tokenizer
        self.tokens, self.special_token_ids = tokenizer.spelling()
        self.eos_token_id, self.bos_token_id = end, None

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("give text")
        return self._tokenizer.encode(text)


def _brief(error: str) -> str:
    """The first line of llguidance's words that says what is wrong, and no state of its parser."""
    lines = [line.strip() for line in error.split("<state>")[0].splitlines()]
    said = [line for line in lines if line and not re.fullmatch(r"[\^|\s\d]*(\|.*)?", line)]
    return "; ".join(said)[:300]
