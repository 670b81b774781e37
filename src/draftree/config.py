"""What a caller may set, as frozen values that are checked when they are built; and the checks of their types."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import GenericAlias
from typing import Any, ParamSpec, TypeVar, Unpack, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

from .errors import ConfigError, FieldError
from .sampling.constraint import Constraint
from .sampling.warping import Warping

P = ParamSpec("P")
R = TypeVar("R")

_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True, revalidate_instances="always")
_hints: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise ConfigError for arguments of types other than its annotations'."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        kinds = _hints(function)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            kind = kinds.get(name, Any)
            if get_origin(kind) is Unpack:  # keyword arguments that a TypedDict names
                named = _hints(get_args(kind)[0])
                if unknown := next((each for each in value if each not in named), None):
                    raise TypeError(f"{function.__name__}() got an unexpected keyword argument {unknown!r}")
                for each, own in value.items():
                    check_type(each, own, named[each])
            else:
                check_type(name, value, kind)
        return function(*args, **kwargs)

    return checked


def check_fields(value: Any) -> None:
    """Check the fields of a dataclass against their annotations.

    Raises:
        ConfigError: the first field of a wrong type.
    """
    kinds = _hints(type(value))
    for each in fields(value):
        if each.init:
            check_type(each.name, getattr(value, each.name), kinds[each.name])


def check_type(name: str, value: object, kind: Any) -> None:
    """Check that a value, and all that is in it, is of the annotated kind.

    True and False are not numbers, an int is a float, a list does for a tuple. Protocols are ``runtime_checkable``.

    Raises:
        ConfigError: it is not; the message has ``name``.
    """
    given = tuple(value) if isinstance(value, list) and get_origin(kind) is tuple else value
    try:
        _adapter(kind).validate_python((given,))
    except ValidationError as error:
        wanted = dict.fromkeys(found["msg"] for found in error.errors(include_url=False))
        raise ConfigError(f"{name} is {value!r}: {', or '.join(wanted)}") from None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    alone: Any = GenericAlias(tuple, (kind,))  # pydantic takes no config for a bare dataclass
    return TypeAdapter(alone, config=_STRICT)


Processor = Callable[[NDArray[np.int64], NDArray[np.float32]], NDArray[np.float32]]
"""(ids [L] of a text, logits [V] of its next token) -> logits [V]; it may change the ones that it is given."""

Criterion = Callable[[NDArray[np.int64]], object]
"""(ids [L] of a text) -> truthy when it must end."""

MOST = 1e30
"""Of a temperature, a penalty or a bias: float32 logits overflow soon beyond it."""
MIN_TEMPERATURE = 1e-4
"""Below this float32 logits overflow; the distribution is greedy long before."""

MOST_LOGPROBS = 20
"""Of the most probable tokens, as in OpenAI's API."""

MAX_NODES = 4096
"""Largest node budget: above the 2800 nodes of the largest published tree, B(H) = 7, depth 4 (Gunjur & Waitz)."""

DEFAULT_NODES = 31
"""Node budget of methods that have none of their own: with the root 32 tokens a pass. ``auto`` verifies what pays."""


def option(
    help_text: str,
    default: object = None,
    *,
    metavar: str = "",
    name: str = "",
    choices: Mapping[str, object] | None = None,
    pairs: bool = False,
) -> Any:
    """A field that the command line makes an option of (``cli.options``).

    Args:
        help_text: for ``--help``.
        default: of the field.
        metavar: what stands for the value in ``--help``.
        name: of the option; the field's own by default.
        choices: what may be written -> the field's value.
        pairs: it is written KEY=VALUE and may be repeated.
    """
    about = {"help": help_text, "metavar": metavar, "name": name, "choices": choices or {}, "pairs": pairs}
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the target's next token is drawn and when generation ends.

    The distribution is transformers': what may come at all, penalties and biases, ``processors`` in order, then
    temperature, top-k, top-p, min-p.

    Attributes:
        max_tokens: most tokens to generate; None means until the context is full.
        min_tokens: before so many no token ends the text while any other may come, and no stop string counts.
        temperature: 0 is greedy decoding (argmax).
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches p; 1 keeps all.
        min_p: drop tokens less probable than min_p times the most probable one; 0 keeps all.
        seed: keys the noise of every draw together with the token's absolute position; None draws a fresh seed.
        stop: strings that end the text; the text ends before them.
        stop_token_ids: tokens that end the text beside the model's own; they are generated but give no text.
        include_stop_str_in_output: the text includes the stop string that ended it.
        ignore_eos: the model's end-of-text token does not end the text.
        bad_words: no token completes one of them as the tokenizer spells it, with a space before it or without.
        allowed_token_ids: no other token comes; None: any may.
        logit_bias: token -> what is added to its logit.
        repetition_penalty: divides positive logits and multiplies negative ones of tokens that the prompt or the text
            has; 1 is off.
        frequency_penalty: subtracted from a token's logit for each time that the token was generated.
        presence_penalty: subtracted once if the token was generated.
        skip_special_tokens: special tokens give no text.
        truncate_prompt_tokens: the prompt's last so many tokens are read; -1: as many as leave room for ``max_tokens``.
        logprobs: log-probabilities of each token and of so many of the most probable ones (``request.Logprobs``), by
            the target's own distribution, before constraint, processors and temperature; None: none. Drafts change none
            where the backend is exact (``Capabilities.rounding`` is 0), elsewhere by rounding.
        prompt_logprobs: the same of the prompt's tokens but the first (``Request.prompt_logprobs``); the prompt is read
            in small pieces then, and from its beginning.
        constraint: what the text may be, such as JSON of a schema (``draftree.grammar``); comes before the processors.
        processors: change logits (``Processor``); each tree node is processed with its own path as history.
        criteria: end a text (``Criterion``); they run after every token.

    Raises:
        ConfigError: a value is out of range (``FieldError``, with its name) or of a wrong type.
    """

    max_tokens: int | None = option("Most tokens to generate; until the context is full by default.", metavar="N")
    temperature: float = option("0 is greedy decoding.", 0.0, metavar="T")
    top_k: int = option("Sample among the k most probable tokens; 0 is off.", 0, metavar="K")
    top_p: float = option("Sample within this much probability; 1 is off.", 1.0, metavar="P")
    min_p: float = option("Drop tokens below this share of the best one's probability; 0 is off.", 0.0, metavar="P")
    seed: int | None = option("Makes sampled text repeatable.", metavar="S")
    stop: tuple[str, ...] = option("End before this text; may be repeated.", (), metavar="TEXT")
    min_tokens: int = option("Least tokens to generate.", 0, metavar="N")
    ignore_eos: bool = option("Go on after the end-of-text token.", False)
    bad_words: tuple[str, ...] = option(
        "Never generate this word; may be repeated.", (), name="--bad-word", metavar="WORD"
    )
    repetition_penalty: float = option("Make tokens that are there already less likely; 1 is off.", 1.0, metavar="X")
    frequency_penalty: float = option("Take off logits, for each time that a token was generated.", 0.0, metavar="X")
    presence_penalty: float = option("Take off logits of tokens that were generated.", 0.0, metavar="X")
    logit_bias: Mapping[int, float] | None = None
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    processors: tuple[Processor, ...] = ()
    criteria: tuple[Criterion, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            object.__setattr__(self, name, float(getattr(self, name)))  # a tensor takes no large int
        if self.max_tokens is not None and self.max_tokens < 1:
            raise FieldError("max_tokens", f"max_tokens is {self.max_tokens}: use at least 1")
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MOST):
            raise FieldError(
                "temperature", f"temperature is {self.temperature}: use 0 (greedy) or {MIN_TEMPERATURE} to {MOST}"
            )
        if self.top_k < 0:
            raise FieldError("top_k", f"top_k is {self.top_k}: use 0 (off) or a positive number")
        if not 0 < self.top_p <= 1:
            raise FieldError("top_p", f"top_p is {self.top_p}: use a number above 0 and up to 1 (off)")
        if not 0 <= self.min_p <= 1:
            raise FieldError("min_p", f"min_p is {self.min_p}: use a number from 0 (off) to 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise FieldError("seed", f"seed is {self.seed}: use a whole number from 0 to 2^63 - 1")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and not 0 <= count <= MOST_LOGPROBS:
                raise FieldError(name, f"{name} are {count}: use 0 (of the tokens alone) to {MOST_LOGPROBS}")
        if not all(self.stop):
            raise FieldError("stop", f"stop is {self.stop!r}: give strings of at least one character")
        if not 0 <= self.min_tokens <= (math.inf if self.max_tokens is None else self.max_tokens):
            most = "" if self.max_tokens is None else f", {self.max_tokens}"
            raise FieldError("min_tokens", f"min_tokens is {self.min_tokens}: use a number from 0 to max_tokens{most}")
        if not all(word.strip() for word in self.bad_words):
            raise FieldError("bad_words", f"bad_words are {self.bad_words!r}: give words of at least one character")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise FieldError("allowed_token_ids", "allowed_token_ids are none: name at least one, or leave them out")
        if not 1 / MOST <= self.repetition_penalty <= MOST:
            raise FieldError(
                "repetition_penalty",
                f"repetition_penalty is {self.repetition_penalty}: use a number above 0, up to {MOST}; 1 is off",
            )
        for name in ("frequency_penalty", "presence_penalty"):
            if not abs(getattr(self, name)) <= MOST:
                raise FieldError(name, f"{name} is {getattr(self, name)}: use a number from {-MOST} to {MOST}")
        if not all(abs(bias) <= MOST for bias in (self.logit_bias or {}).values()):
            raise FieldError("logit_bias", f"logit_bias has a value beyond {MOST}: use -100 to forbid a token")
        if self.truncate_prompt_tokens is not None and not (
            self.truncate_prompt_tokens == -1 or self.truncate_prompt_tokens > 0
        ):
            raise FieldError(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens is {self.truncate_prompt_tokens}: use at least 1, or -1 (as many as fit)",
            )

    @property
    def warping(self) -> Warping:
        """What shapes a distribution apart from processors."""
        return Warping(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True, slots=True)
class Budget:
    """How large one request's draft tree may be at this step.

    Attributes:
        nodes: most drafted nodes (the root is not counted).
        depth: deepest node (the root's children have depth 1); None leaves it to the growth policy.
        weight: what its tokens count beside those of other requests, where they share a pass.
        together: most drafted nodes of all requests that are drafted for with this one; None: each has its own alone.

    Raises:
        ConfigError: a value is out of range.
    """

    nodes: int
    depth: int | None = None
    weight: float = 1.0
    together: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.nodes, int) or not 0 <= self.nodes <= MAX_NODES:
            raise ConfigError(f"nodes is {self.nodes!r}: use 1 to {MAX_NODES}, or drafter 'none' for AR decoding")
        if self.depth is not None and (not isinstance(self.depth, int) or self.depth < 0):
            raise ConfigError(f"tree depth is {self.depth!r}: use a whole number, 0 or more")


_SETTING = re.compile(r":(?=\s*\w+\s*=)")


def named_settings(text: str) -> tuple[str, dict[str, str]]:
    """Read a name with its settings, written NAME:KEY=VALUE:KEY=VALUE.

    A value ends where the next KEY= begins, so it may hold colons and commas, as steps of entropy do.

    Raises:
        ConfigError: something between the colons is not KEY=VALUE.
    """
    name, *pairs = _SETTING.split(text)
    if ":" in name:
        raise ConfigError(f"{text!r} has a setting without a name: write it as NAME:KEY=VALUE")
    settings = (pair.partition("=") for pair in pairs)
    return name.strip(), {key.strip(): value.strip() for key, _, value in settings}
