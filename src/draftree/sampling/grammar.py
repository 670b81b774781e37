"""Grammars over tokens, compiled by llguidance: JSON Schema, regular expressions, choices, Lark, GBNF, function calls.

What cannot be enforced is refused, keyword by keyword, so that every answer that ends is valid. llguidance does not
know which keys an object has that a schema leaves open: ``JsonKeys`` sees to it that none comes twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from ..errors import ConfigError, listed, shortened
from ..sandbox.jobs import JSON_LAYOUT
from ..sandbox.workers import JobError, run
from ..text.encoding import CALL_TAGS, THINK_TAGS, Tokenizer
from ..text.spelling import InnerSpelling
from ..text.text_cache import TextCache
from .channel_rules import ChannelRule, ChannelTokens
from .constraint import Constraint, ConstraintState, TextEnded, clear
from .json_keys import JsonKeys, KeyTokens
from .json_schemas import enforceable, weakened
from .thoughts import ThoughtTokens

_LONGEST = 1 << 20
"""Characters of a grammar's text: beyond it compiling takes seconds."""
_KEPT = 16
"""Most grammars that are kept, of ``_LONGEST`` characters together."""


@runtime_checkable
class SpelledTokenizer(Tokenizer, Protocol):
    """A tokenizer that says how its tokens are spelled."""

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
    """A matcher of llguidance at one place of a text, and the keys of its JSON.

    Args:
        mask: what may come there, if it is known.
    """

    def __init__(
        self, matcher: LLMatcher, grammars: Grammars, keys: JsonKeys | None, mask: NDArray[np.uint32] | None = None
    ) -> None:
        self._matcher, self._grammars, self._keys = matcher, grammars, keys
        self._after: dict[int, ConstraintState | None] = {}
        if mask is not None:
            self._found = mask, None

    @property
    def mask(self) -> NDArray[np.uint32]:
        return self._found[0]

    @property
    def dead_end(self) -> str | None:
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[NDArray[np.uint32], str | None]:
        """The mask, and why it allows nothing, if it does not."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)  # it may have one more than V needs
        mask = bits[: self._grammars.words].copy()
        reason = None
        if self._matcher.is_error():
            reason = f"{_brief(self._matcher.get_error())}: simplify it"
        elif not self._fits(mask):
            reason = "no token of the model's vocabulary fits here"
        elif self._keys is not None:
            clear(mask, self._grammars.key_tokens.repeating(self._keys, mask))
            if not mask.any():
                reason = "its object has each key that may come already"
        if reason is None:
            return mask, None
        return np.zeros_like(mask), f"the grammar cannot be followed: {reason}"

    def _fits(self, mask: NDArray[np.uint32]) -> bool:
        """A token does; llguidance allows one that does not where none does."""
        words = mask.nonzero()[0].tolist()
        if len(words) != 1:
            return bool(words)
        word = int(mask[words[0]])
        token = 32 * words[0] + word.bit_length() - 1
        return bool(word & (word - 1)) or token in self._grammars.ends or bool(self._matcher.validate_tokens([token]))

    @property
    def forced(self) -> int | None:
        tokens = self._matcher.compute_ff_tokens()
        return tokens[0] if tokens and self.allows(tokens[0]) else None

    def after(self, token: int) -> ConstraintState | None:
        if token not in self._after:
            self._after[token] = self._next(token)
        return self._after[token]

    def _next(self, token: int) -> ConstraintState | None:
        if token in self._grammars.ends:
            return TextEnded() if self.allows(token) else None
        if not self._matcher.validate_tokens([token]):
            return None
        keys = self._keys and self._keys.after(self._grammars.key_tokens.spelled(token))
        if keys is None and self._keys is not None:
            return None
        matcher = self._matcher.deep_copy()
        matcher.consume_token(token)
        return GrammarState(matcher, self._grammars, keys)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Grammar:
    """A compiled grammar, a ``Constraint`` of texts of one vocabulary; requests at once may begin with it."""

    _matcher: LLMatcher
    _grammars: Grammars
    _keys: JsonKeys | None
    _mask: NDArray[np.uint32]
    """Of the first tokens."""

    def start(self) -> ConstraintState:
        """The state of an empty text, which shares nothing: it keeps what follows it for as long as it lives."""
        return GrammarState(self._matcher.deep_copy(), self._grammars, self._keys, self._mask.copy())


class Grammars:
    """Compiles grammars for the tokens of one model, and keeps the last ones; any thread may ask.

    Args:
        tokenizer: of the model.
        vocab_size: width of its logits.
        eos_ids: tokens that end a text.
        controls: control tokens of Harmony's channels, with their texts, where the model answers in them.

    Attributes:
        ends: tokens that end a text.
        channels: what tokens mean in channels; None: the model does not answer in them.
        words: of a mask.

    Raises:
        ConfigError: the tokenizer does not say how its tokens are spelled, or no token ends a text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_ids: Collection[int],
        controls: Mapping[int, str] | None = None,
    ) -> None:
        if not eos_ids:
            raise ConfigError("the model has no end-of-sequence token: a text that a grammar has ended could not end")
        self._tokenizer = tokenizer
        self.ends, ends = frozenset(eos_ids), sorted(eos_ids)
        if isinstance(tokenizer, SpelledTokenizer):
            self._tokens = LLTokenizer(TokenizerWrapper(_Spelled(tokenizer, ends[0])), vocab_size, ends)
        else:
            self._tokens = _of_transformers(tokenizer, vocab_size, ends)
        size = self._tokens.vocab_size
        self.words = -(-size // 32)
        self.channels = ChannelTokens(tokenizer, controls, size, self.ends) if controls else None
        self._kept = TextCache[Grammar](_LONGEST, _LONGEST // _KEPT)

    def json_schema(self, schema: Mapping[str, Any]) -> Grammar:
        """JSON on one line that is valid by a schema, without a key twice in an object. ``oneOf`` is read as ``anyOf``.

        Raises:
            ConfigError: it is no schema, or has what cannot be enforced; the message names it.
        """
        if not isinstance(schema, Mapping):
            raise ConfigError(f"the json_schema is {shortened(repr(schema))}: give an object")
        enforced = _enforced(schema)
        source = json.dumps(enforced)
        try:
            return self._compiled("json_schema", "json_schema", source, JsonKeys())
        except ConfigError as error:
            if len(source) > _LONGEST or not (places := weakened(enforced).left_out):
                raise
            raise ConfigError(f"{error}: leave out {_shown(places)}") from None

    def regex(self, pattern: str) -> Grammar:
        """Texts that a regular expression matches as a whole, without look-around and back-references (Rust's syntax).

        Raises:
            ConfigError: it is none.
        """
        return self._compiled("regex", "regex", pattern)

    def choice(self, texts: Sequence[str]) -> Grammar:
        """One of these texts.

        Raises:
            ConfigError: there are none, or one is empty.
        """
        if not texts or not all(texts):
            raise ConfigError(f"choice is {list(texts)!r}: give texts of at least one character")
        return self._compiled("choice", "lark", f"start: {' | '.join(map(json.dumps, texts))}")

    def grammar(self, text: str) -> Grammar:
        """Texts of a context-free grammar: Lark's as llguidance reads it (the rule ``start``), or GBNF (``root``).

        Raises:
            ConfigError: it is none.
        """
        return self._compiled("grammar", "grammar", text)

    def calls(
        self, functions: Sequence[Function], *, forced: bool, several: bool, text: Mapping[str, Any] | None = None
    ) -> Constraint:
        """Calls of functions in Hermes' format (``CALL_TAGS``), each on lines of its own; or one in a channel.

        Args:
            functions: at least one.
            forced: a call at once; else any text until the first tag, and no call if none comes.
            several: calls may follow the first.
            text: JSON Schema of an answer without calls.

        Raises:
            ConfigError: a schema is none, or has what cannot be enforced.
        """
        if self.channels is not None:
            arguments = {function.name: self.json_schema(function.parameters) for function in functions}
            answer = None if text is None else self.json_schema(text)
            return ChannelRule(self.channels, answer, arguments, forced=forced)
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
        keys = JsonKeys(free=None if forced or text is not None else b"")
        return self._compiled("calls", "lark", "\n".join(["%llguidance {}", f"start: {start}", *rules]), keys)

    @cached_property
    def key_tokens(self) -> KeyTokens:
        return KeyTokens(self._tokens)

    @cached_property
    def thoughts(self) -> ThoughtTokens:
        """What tokens mean around thoughts (``AfterThought``)."""
        vocab = self._tokenizer.get_vocab()
        tags = {vocab[tag]: tag.encode() for tag in THINK_TAGS if tag in vocab}
        spelled = [tags.get(token) or self.key_tokens.spelled(token) for token in range(self._tokens.vocab_size)]
        return ThoughtTokens(spelled, self.ends, vocab.get(THINK_TAGS[0]))

    @cached_property
    def tags(self) -> Mapping[int, str]:
        """Tags of calls whose tokens give no text."""
        tokens = self._tag_tokens.items()
        return {token: tag for tag, token in tokens if not self._tokenizer.decode([token], skip_special_tokens=True)}

    @cached_property
    def _special(self) -> Sequence[int]:
        """Tokens that no text spells and that end none."""
        every = range(self._tokens.vocab_size)
        return [token for token in every if self._tokens.is_special_token(token) and token not in self.ends]

    @cached_property
    def _tag_tokens(self) -> Mapping[str, int]:
        vocab = self._tokenizer.get_vocab()
        return {tag: vocab[tag] for tag in CALL_TAGS if tag in vocab}

    def _tag(self, tag: str) -> str:
        """A tag in a rule: its token, if it is one."""
        return f"<[{self._tag_tokens[tag]}]>" if tag in self._tag_tokens else json.dumps(tag)

    def _compiled(self, kind: str, form: str, source: str, keys: JsonKeys | None = None) -> Grammar:
        """A grammar, compiled once as long as it is kept: agents send the same functions with each turn.

        Args:
            kind: what errors call it.
            form: how the source is written (``sandbox.jobs.read_grammar``).
            keys: at its start; None: its texts are no JSON.
        """
        if len(source) > _LONGEST:
            raise ConfigError(f"the {kind} has {len(source)} characters: use at most {_LONGEST}")
        return self._kept.get(source, lambda: self._compile(kind, form, source, keys), kind, form, keys)

    def _compile(self, kind: str, form: str, source: str, keys: JsonKeys | None) -> Grammar:
        """Compile a grammar that a worker has read without harm; that takes no lock of the interpreter."""
        try:
            grammar = run("read_grammar", form, source)
        except JobError as error:
            raise ConfigError(f"the {kind} cannot be used: {_brief(str(error))}") from None
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ConfigError(f"the {kind} cannot be used: {_brief(matcher.get_error())}")
        first = GrammarState(matcher, self, keys)
        if (reason := first.dead_end) is not None:
            raise ConfigError(reason)
        return Grammar(matcher, self, keys, first.mask)


def _of_transformers(tokenizer: Tokenizer, vocab_size: int, ends: list[int]) -> LLTokenizer:
    """The tokens of one of transformers' fast tokenizers.

    Raises:
        ConfigError: it is none.
    """
    try:
        from llguidance.hf import from_tokenizer

        return from_tokenizer(tokenizer, vocab_size, ends)  # type: ignore[arg-type]
    except (ImportError, ValueError):
        name = type(tokenizer).__name__
        raise ConfigError(f"{name} does not say how its tokens are spelled: grammars need that") from None


def _inline(schema: Mapping[str, Any]) -> str:
    """A schema inside a rule."""
    return f"%json {json.dumps({**_enforced(schema), 'x-guidance': JSON_LAYOUT})}"


def _enforced(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema as the compiler takes it.

    Raises:
        ConfigError: it is no JSON, or a keyword is never enforced.
    """
    checked, left_out = enforceable(schema)
    if left_out:
        raise ConfigError(f"the json_schema has what cannot be enforced: leave out {_shown(left_out)}")
    return checked


def _shown(left_out: Sequence[str]) -> str:
    return shortened(" ".join(listed(left_out, "keyword").split()))


class _Spelled:
    """A tokenizer as llguidance takes it."""

    def __init__(self, tokenizer: SpelledTokenizer, end: int) -> None:
        self._spelled = InnerSpelling(tokenizer)
        self.tokens, self.special_token_ids = tokenizer.spelling()
        self.eos_token_id, self.bos_token_id = end, None

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("give text")
        return self._spelled(text)


def _brief(error: str) -> str:
    """The first line of llguidance's words that says what is wrong, and no state of its parser."""
    lines = [line.strip() for line in error.split("<state>")[0].splitlines()]
    said = [line for line in lines if line and not re.fullmatch(r"[\^|\s\d]*(\|.*)?", line)]
    return "; ".join(said)[:300]
