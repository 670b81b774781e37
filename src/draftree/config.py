"""What a caller may set, as frozen values that are checked when they are built; and the checks of their types."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import GenericAlias
from typing import Annotated, Any, ParamSpec, TypeVar, Unpack, get_args, get_origin, get_type_hints

import numpy as np
from annotated_types import Ge, Gt, Interval, MinLen
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

from .errors import ConfigError, FieldError
from .sampling.constraint import Constraint
from .sampling.warping import Warping

P = ParamSpec("P")
R = TypeVar("R")

_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True, revalidate_instances="always")
_hints: Callable[[Any], dict[str, Any]] = functools.cache(functools.partial(get_type_hints, include_extras=True))

_WAYS_OUT = {
    "greater_than_equal": "use at least {ge}",
    "less_than_equal": "use at most {le}",
    "greater_than": "use more than {gt}",
    "less_than": "use less than {lt}",
    "too_short": "give at least one entry",
    "literal_error": "choose from {expected}",
    "multiple_of": "use a multiple of {multiple_of}",
}
"""What pydantic finds -> what to do."""


def way_out(found: Mapping[str, Any]) -> str:
    """What to do about an error of pydantic."""
    bounds = {name: f"{x:g}" if isinstance(x, float) else x for name, x in found.get("ctx", {}).items()}
    known = _WAYS_OUT.get(found["type"])
    return str(found["msg"]) if known is None else known.format_map(bounds)


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise FieldError for arguments that are not what its annotations allow."""
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        kinds = _argument_kinds(function)
        for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
            if name in kinds:
                check_type(name, value, kinds[name])
            elif name not in names:
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}")
        return function(*args, **kwargs)

    return checked


@functools.cache
def _argument_kinds(function: Callable[..., Any]) -> dict[str, Any]:
    """Argument -> its annotation; those that a TypedDict names (``Unpack``) stand for themselves."""
    kinds: dict[str, Any] = {}
    for name, kind in _hints(function).items():
        kinds |= _hints(get_args(kind)[0]) if get_origin(kind) is Unpack else {name: kind}
    return kinds


def check_fields(value: Any) -> None:
    """Check the fields of a dataclass against their annotations, ranges (``Annotated``) included.

    Raises:
        FieldError: of the first field that has a wrong type or is out of range.
    """
    kinds = _hints(type(value))
    for each in fields(value):
        if each.init:
            check_type(each.name, getattr(value, each.name), kinds[each.name])


class Checked:
    """A dataclass that checks its fields when it is built (``check_fields``)."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self)


def check_type(name: str, value: object, kind: Any) -> None:
    """Check that a value, and all that is in it, is of the annotated kind and in its range.

    True and False are not numbers, an int is a float, a list does for a tuple. Protocols are ``runtime_checkable``.

    Raises:
        FieldError: it is not; the message has ``name``.
    """
    given = tuple(value) if isinstance(value, list) and _is_tuple(kind) else value
    try:
        _adapter(kind).validate_python((given,))
    except ValidationError as error:
        ways = dict.fromkeys(way_out(found) for found in error.errors(include_url=False))
        raise FieldError(name, f"{name} is {value!r}: {', or '.join(ways)}") from None


def _is_tuple(kind: Any) -> bool:
    return get_origin(get_args(kind)[0] if get_origin(kind) is Annotated else kind) is tuple


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    alone: Any = GenericAlias(tuple, (kind,))  # pydantic takes no config for a bare dataclass
    return TypeAdapter(alone, config=_STRICT)


Processor = Callable[[NDArray[np.int64], NDArray[np.float32]], NDArray[np.float32]]
"""(ids [L] of a text, logits [V] of its next token) -> logits [V]; it may change the ones that it is given."""

Criterion = Callable[[NDArray[np.int64]], object]
"""(ids [L] of a text) -> truthy when it must end."""

MOST = 1e30
"""Of a temperature: float32 logits overflow soon beyond it."""
MIN_TEMPERATURE = 1e-4
"""Below this float32 logits overflow; the distribution is greedy long before."""

LEAST = 1e-20
"""Of a number that float32 logits are divided by, or compared with as a share: beyond it float32 has 0 and infinity."""

MOST_LOGPROBS = 20
"""Of the most probable tokens, as in OpenAI's API."""

MAX_NODES = 4096
"""Largest node budget: above the 2800 nodes of the largest published tree, B(H) = 7, depth 4 (Gunjur & Waitz)."""

Count = Annotated[int, Interval(ge=1, lt=2**63)]
Whole = Annotated[int, Interval(ge=0, lt=2**63)]
NodeCount = Annotated[int, Interval(ge=1, le=MAX_NODES)]
Entropy = Annotated[float, Ge(0)]
"""In nats."""
Probability = Annotated[float, Interval(ge=0, le=1)]
Positive = Annotated[float, Gt(0)]
LearningRate = Annotated[float, Interval(gt=0, lt=1)]
Temperature = Annotated[float, Interval(ge=0, le=MOST)]
TopK = Annotated[int, Interval(ge=0, lt=2**31)]
"""In C an int32."""
TopP = Annotated[float, Interval(ge=LEAST, le=1)]
Penalty = Annotated[float, Interval(ge=-2, le=2)]
"""As in OpenAI's API."""
RepetitionPenalty = Annotated[float, Interval(ge=LEAST, le=10)]
Bias = Annotated[float, Interval(ge=-100, le=100)]
"""As in OpenAI's API."""
Seed = Annotated[int, Interval(ge=0, lt=2**63)]
LogprobCount = Annotated[int, Interval(ge=0, le=MOST_LOGPROBS)]
Priority = Annotated[int, Interval(ge=-(10**6), le=10**6)]
"""The lower the sooner."""

DEFAULT_NODES = 31
"""Node budget of methods that have none of their own: with the root 32 tokens a pass. ``auto`` verifies what pays."""


def option(
    help_text: str,
    default: object = None,
    *,
    metavar: str = "",
    name: str = "",
    choices: Mapping[str, object] | None = None,
    read: Callable[[Any], object] | None = None,
) -> Any:
    """A field that the command line makes an option of (``cli.options``).

    Args:
        help_text: for ``--help``.
        default: of the field.
        metavar: what stands for the value in ``--help``.
        name: of the option; the field's own by default.
        choices: what may be written -> the field's value.
        read: what is written, a tuple where it may be repeated -> the field's value.
    """
    about = {"help": help_text, "metavar": metavar, "name": name, "choices": choices or {}, "read": read}
    return field(default=default, metadata=about)


def key_values(pairs: Sequence[str]) -> dict[str, str]:
    """What is written KEY=VALUE.

    Raises:
        ConfigError: something is not.
    """
    if wrong := next((pair for pair in pairs if "=" not in pair), None):
        raise ConfigError(f"{wrong!r} is no setting: write it as KEY=VALUE, such as depth=6")
    return {key.strip(): value.strip() for key, _, value in (pair.partition("=") for pair in pairs)}


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
        top_p: keep the smallest set of tokens whose probability reaches p, and what is as probable as its last; 1 keeps
            all.
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
        logprobs: log-probabilities of each token and of so many of the most probable ones (``request.Logprobs``), by
            the target's own distribution, before constraint, processors and temperature; None: none. Drafts change none
            where the backend is exact (``Capabilities.rounding`` is 0), elsewhere by rounding.
        prompt_logprobs: the same of the prompt's tokens but the first (``Request.prompt_logprobs``); the prompt is read
            in small pieces then, and from its beginning.
        constraint: what the text may be, such as JSON of a schema (``sampling/grammar.py``); comes before processors.
        processors: change logits (``Processor``); each tree node is processed with its own path as history.
        criteria: end a text (``Criterion``); they run after every token.

    Raises:
        ConfigError: a value is out of range (``FieldError``, with its name) or of a wrong type.
    """

    max_tokens: Count | None = option("Most tokens to generate; until the context is full by default.", metavar="N")
    temperature: Temperature = option("0 is greedy decoding.", 0.0, metavar="T")
    top_k: TopK = option("Sample among the k most probable tokens; 0 is off.", 0, metavar="K")
    top_p: TopP = option("Sample within this much probability; 1 is off.", 1.0, metavar="P")
    min_p: Probability = option(
        "Drop tokens below this share of the best one's probability; 0 is off.", 0.0, metavar="P"
    )
    seed: Seed | None = option("Makes sampled text repeatable.", metavar="S")
    stop: tuple[str, ...] = option("End before this text; may be repeated.", (), metavar="TEXT")
    min_tokens: Whole = option("Least tokens to generate.", 0, metavar="N")
    ignore_eos: bool = option("Go on after the end-of-text token.", False)
    bad_words: tuple[str, ...] = option(
        "Never generate this word; may be repeated.", (), name="--bad-word", metavar="WORD"
    )
    repetition_penalty: RepetitionPenalty = option(
        "Make tokens that are there already less likely; 1 is off.", 1.0, metavar="X"
    )
    frequency_penalty: Penalty = option("Take off logits, for each time that a token was generated.", 0.0, metavar="X")
    presence_penalty: Penalty = option("Take off logits of tokens that were generated.", 0.0, metavar="X")
    logit_bias: Mapping[int, Bias] | None = None
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: Annotated[tuple[int, ...], MinLen(1)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: LogprobCount | None = None
    prompt_logprobs: LogprobCount | None = None
    constraint: Constraint | None = None
    processors: tuple[Processor, ...] = ()
    criteria: tuple[Criterion, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            object.__setattr__(self, name, float(getattr(self, name)))  # a tensor takes no large int
        for name, least, off in (("temperature", MIN_TEMPERATURE, "greedy"), ("min_p", LEAST, "off")):
            if 0 < (value := getattr(self, name)) < least:
                raise FieldError(name, f"{name} is {value}: use 0 ({off}) or at least {least}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise FieldError(
                "min_tokens", f"min_tokens is {self.min_tokens}: use at most max_tokens, {self.max_tokens}"
            )
        if not all(self.stop):
            raise FieldError("stop", f"stop is {self.stop!r}: give strings of at least one character")
        if not all(word.strip() for word in self.bad_words):
            raise FieldError("bad_words", f"bad_words are {self.bad_words!r}: give words of at least one character")

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
    """

    nodes: int
    depth: int | None = None
