"""Prompts to token ids that fit the model, and texts of a request to what decoding needs of them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, cast

from ..config import SamplingParams
from ..errors import ConfigError, ContextError, FieldError, InputError, PromptError
from ..models.base import Capabilities, LanguageModel, check_text
from ..sampling.constraint import TokenRules
from ..text.detokenizer import Detokenizer, NoText, TextStream, token_speller
from ..text.encoding import THINK_TAGS, Conversation, Prompt, Tokenizer, encode
from ..text.harmony import START, control_tokens
from ..text.spelling import InnerSpelling
from .speculation import EngineRequest, Observer, Speculation

if TYPE_CHECKING:
    from ..sampling.grammar import Grammars


_MOST_LISTS = 8
"""Most lists of ``bad_words`` whose tokens are kept: all choices of a body share one list."""


class InputProcessor:
    """Makes requests of a model's prompts; any thread may use it.

    Attributes:
        tokenizer: the model's; None: prompts are token ids.

    Args:
        variables: that chat templates read where a conversation has no others of these names.
    """

    def __init__(self, target: LanguageModel, variables: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self._target, self._variables = target.tokenizer, target, variables
        self._spell = lru_cache(_MOST_LISTS)(self._spelled_words)
        # transformers' tokenizers change in their first call; from then on threads may share them.
        self._start = [] if self.tokenizer is None else self.tokenizer.encode("")

    def encode(self, prompt: Prompt, field: str = "prompt") -> list[int]:
        """Token ids of a prompt (``Engine.request``).

        Raises:
            PromptError: there are none; ContextError: it cannot fit; of ``field``.
        """
        self.check_size(prompt, field)
        return encode(self.tokenizer, prompt, field, self._variables)

    def check_size(self, prompt: Prompt, field: str = "prompt") -> None:
        """Reject what cannot fit the context before reading it: each message and each longest token takes a token.

        Raises:
            ContextError: it has too many messages, characters or tokens.
        """
        can = self._target.capabilities
        messages = prompt.messages if isinstance(prompt, Conversation) else prompt
        parts: Sequence[object] = messages if isinstance(messages, (list, tuple)) else [messages]
        texts = [part.get("content") if isinstance(part, Mapping) else part for part in parts]
        characters = sum([len(text) for text in texts if isinstance(text, str)])
        if len(parts) > can.max_length:
            what = "tokens" if isinstance(parts[0], int) else "messages"
            raise ContextError(f"the {field} has {len(parts)} {what} but {_context(can)}: shorten it", field)
        if characters > can.max_length and characters > can.max_length * self._longest:
            raise ContextError(f"the {field} has {characters} characters but {_context(can)}: shorten it", field)

    @cached_property
    def _longest(self) -> float:
        """Characters of the longest token."""
        return math.inf if self.tokenizer is None else max(map(len, self.tokenizer.get_vocab()), default=1)

    def spelled(self, text: str, field: str = "text") -> list[int]:
        """Token ids of a text without the special tokens that begin a prompt."""
        ids = self.encode(text, field)
        return ids[self.begun(ids) :]

    def begun(self, ids: list[int]) -> int:
        """How many of a text's ids are special tokens that begin a prompt."""
        begin = len(self._start)
        return begin if ids[:begin] == self._start else 0

    @cached_property
    def token_bytes(self) -> Callable[[int], bytes]:
        """Returns the bytes of a token of the model.

        Raises:
            PromptError: it has no tokenizer.
        """
        if self.tokenizer is None:
            raise PromptError("the model has no tokenizer: it gives no text")
        return token_speller(self.tokenizer)

    @cached_property
    def thought_tags(self) -> Mapping[int, str] | None:
        """Tokens of ``THINK_TAGS`` that give no text; None: neither the vocabulary nor a chat template has the tags."""
        if self.tokenizer is None:
            return None
        vocab = self.tokenizer.get_vocab()
        tokens = {vocab[tag]: tag for tag in THINK_TAGS if tag in vocab}
        if len(tokens) < len(THINK_TAGS) and not self._writes(THINK_TAGS[0]):
            return None
        return {t: tag for t, tag in tokens.items() if not self.tokenizer.decode([t], skip_special_tokens=True)}

    @cached_property
    def controls(self) -> Mapping[int, str]:
        """Control tokens of Harmony's channels, and their texts; none: the model does not answer in them."""
        if self.tokenizer is None or not self._writes(START):
            return {}
        return control_tokens(self.tokenizer.get_vocab())

    def _writes(self, tag: str) -> bool:
        """Test whether a chat template of the model has a tag."""
        templates = "" if self.tokenizer is None else self.tokenizer.chat_template or ""
        return any(tag in text for text in (templates.values() if isinstance(templates, dict) else [templates]))

    @cached_property
    def grammars(self) -> Grammars:
        """As ``Engine.grammars``."""
        from ..sampling.grammar import Grammars

        if self.tokenizer is None:
            raise ConfigError("grammars are of text but the model has no tokenizer: load one with it")
        can = self._target.capabilities
        return Grammars(self.tokenizer, can.vocab_size, can.eos_ids, self.controls)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        prediction: str | Sequence[int],
        prepare: Callable[[], Speculation],
        observers: Sequence[Observer] = (),
    ) -> EngineRequest:
        """A request that fits the model (``Engine.request``).

        Args:
            prepare: loads its drafter; called when all else is right.
        """
        params, can = SamplingParams() if params is None else params, self._target.capabilities
        check_params(params)
        ids = self.encode(prompt)
        limit = limit_of(self._target, ids, params)
        stream = text_stream(self.tokenizer, params, ids)
        params = with_token_rules(params, can, self._spell)
        predicted = self._predicted(prediction)
        request = EngineRequest(
            ids, params, limit, can.eos_ids, stream, predicted, speculation=prepare(), observers=observers
        )
        if params.max_tokens is None:
            request.limit = self._most_held(request)
        return request

    def _most_held(self, request: EngineRequest) -> int:
        """As many tokens, up to the request's limit, as the cache has room for by itself; at least 1."""

        def exceeds(tokens: int) -> bool:
            return not self._target.holds([request.row_length(request.prompt_length + tokens)])

        return max(1, bisect_left(range(1, request.limit + 1), True, key=exceeds))

    def _spelled_words(self, words: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Token ids of ``bad_words``, with a space before them and without.

        Raises:
            FieldError: one is no text.
        """
        spellings = list[tuple[int, ...]]()
        for word in words:
            try:
                self.encode(word, "text")
            except PromptError as error:
                raise FieldError("bad_words", f"bad_words has {word!r}: {error}") from None
            spellings += [tuple(self._inner(text)) for text in (word.strip(), f" {word.strip()}")]
        return spellings

    @cached_property
    def _inner(self) -> InnerSpelling:
        """Spells words that stand behind others; the model has a tokenizer."""
        return InnerSpelling(cast(Tokenizer, self.tokenizer))

    def _predicted(self, prediction: str | Sequence[int]) -> list[int]:
        if not len(prediction):
            return []
        field = "prediction"
        ids = self.spelled(prediction, field) if isinstance(prediction, str) else self.encode(prediction, field)
        if len(ids) > (most := self._target.capabilities.max_length):
            why = f"the prediction has {len(ids)} tokens but an answer at most {most}: shorten it"
            raise PromptError(why, "prediction")
        return ids


def each_params(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """The sampling params of each prompt of a batch.

    Raises:
        ConfigError: the prompts are no list, or there are not as many params.
    """
    if not isinstance(prompts, (list, tuple)) or any(isinstance(p, (int, Mapping)) for p in prompts):
        raise ConfigError("generate takes a list of prompts: put this one into a list, or use stream")
    if not isinstance(params, (list, tuple)):
        return [SamplingParams() if params is None else cast(SamplingParams, params)] * len(prompts)
    if len(params) != len(prompts):
        raise ConfigError(f"{len(params)} sampling params for {len(prompts)} prompts: give one for all, or one each")
    return list(params)


def check_params(params: object) -> None:
    """Raise ConfigError unless they are SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"sampling params are {params!r}: give SamplingParams")


def _context(can: Capabilities) -> str:
    """Clients know errors by these words, those of OpenAI's API."""
    return f"this model's maximum context length is {can.max_length} tokens ({can.name}, {can.max_length_reason})"


def limit_of(target: LanguageModel, ids: Sequence[int], params: SamplingParams) -> int:
    """Most tokens to generate behind a prompt.

    Raises:
        PromptError: the prompt is empty, or has other tokens than the model.
        ContextError: it does not fit the context, or ``max_tokens`` do not fit behind it.
    """
    can = target.capabilities
    left = can.max_length - len(ids)
    most = _context(can)
    if left < 1:
        raise ContextError(
            f"the prompt has {len(ids)} tokens but {most}, generated ones included: "
            f"shorten the prompt to {can.max_length - 1} or fewer"
        )
    check_text(can, ids)
    if params.max_tokens is not None and params.max_tokens > left:
        raise ContextError(
            f"max_tokens is {params.max_tokens} but {most} and the prompt has {len(ids)}: use at most {left}",
            "max_tokens",
        )
    return params.max_tokens or left


def text_stream(tokenizer: Tokenizer | None, params: SamplingParams, context: Sequence[int] = ()) -> TextStream:
    """The stream for one request.

    Raises:
        InputError: stop strings without a tokenizer.
    """
    if tokenizer is not None:
        return Detokenizer(
            tokenizer,
            context,
            stop=params.stop,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
    if params.stop:
        raise InputError(f"stop strings {list(params.stop)} need text: load the model with its tokenizer")
    return NoText()


class ParameterRules(TokenRules):
    """What ``with_token_rules`` has made; it makes them anew where the params are given again."""


def with_token_rules(
    params: SamplingParams,
    can: Capabilities,
    spell: Callable[[tuple[str, ...]], Sequence[tuple[int, ...]]] = lambda _: (),
) -> SamplingParams:
    """The same with what its parameters rule out as its constraint.

    What comes out may be given again, for another prompt too.

    Args:
        can: the target's capabilities.
        spell: the token ids of ``bad_words``.

    Raises:
        FieldError: a parameter names a token that the model has not, a word is no text, or a text that a constraint
            ends is to go on.
    """
    constraint = params.constraint.inner if isinstance(params.constraint, ParameterRules) else params.constraint
    if params.ignore_eos and constraint is not None:
        raise FieldError("ignore_eos", "ignore_eos and a constraint exclude each other: leave one of them out")
    ends = frozenset(params.stop_token_ids).union(() if params.ignore_eos else can.eos_ids)
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        given = getattr(params, name) or ()
        if len(given) > can.vocab_size:
            raise FieldError(name, f"{name} has {len(given)} ids but the model {can.vocab_size} tokens: name each once")
        for token in given:
            if not 0 <= token < can.vocab_size:
                raise FieldError(name, f"{name} has {token}: use token ids from 0 to {can.vocab_size - 1}")
    if params.min_tokens or params.bad_words or params.allowed_token_ids is not None:
        ruled_out = ends, params.min_tokens, params.allowed_token_ids, spell(tuple(params.bad_words))
        constraint = ParameterRules(can.vocab_size, *ruled_out, constraint)
    return params if constraint is params.constraint else replace(params, constraint=constraint)
