"""Bodies of requests in OpenAI's format, and the engine's settings that they stand for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ..config import (
    MAX_NODES,
    Bias,
    Count,
    LogprobCount,
    Penalty,
    Positive,
    Priority,
    Probability,
    RepetitionPenalty,
    SamplingParams,
    Temperature,
    TopP,
    Whole,
)
from ..drafters.spec import LOOKUP, NONE
from ..engine.engine import Engine
from ..engine.speculation import SpeculationParams
from ..errors import ConfigError, FieldError, InputError
from ..policies.methods import DEFAULT_METHOD
from ..sampling.constraint import Constraint
from ..sampling.grammar import Grammar
from ..text.encoding import Prompt
from .bad_bodies import UnsupportedError, check_values, left_out, refuse_unsupported

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first wrong entry is reported alone: a body has room for millions of them."""
_MOST_CHARACTERS = 1 << 14
"""Of stop strings, or of bad words, all together: steps of everybody look for them."""
_MOST_ENTRIES = 1 << 14
"""Most entries of an object that a client sends; each is checked."""


def _short(texts: str | list[str]) -> str | list[str]:
    if (size := len(texts) if isinstance(texts, str) else sum(map(len, texts))) > _MOST_CHARACTERS:
        raise ValueError(f"it has {size} characters: use at most {_MOST_CHARACTERS} in all")
    return texts


def _few(given: object) -> object:
    if isinstance(given, dict) and len(given) > _MOST_ENTRIES:
        raise ValueError(f"it has {len(given)} entries: send at most {_MOST_ENTRIES}")
    return given


Few = BeforeValidator(_few)
Texts = Annotated[Many[str], Field(max_length=1024), AfterValidator(_short)]
TokenIds = Many[Whole]
_TOKENS = 16
"""Token limit of a completion without one, as in OpenAI's API."""


class Fields(BaseModel):
    """A JSON object. null means a missing field; a required field that is null is an error."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        required = {field.alias or name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in given.items() if value is not None or name in required}


class Body(Fields):
    """A body or a part of it. Unknown fields are kept."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        refuse_unsupported(self.model_extra or {})
        return self


class Sent(Body):
    """The whole body of a request.

    Attributes:
        passed_on: extra fields that another body reads.
    """

    passed_on: ClassVar[Sequence[str]] = ()
    _check_values = model_validator(mode="before")(check_values)

    @model_validator(mode="after")
    def _log_unknown(self) -> Self:
        for name in (self.model_extra or {}).keys() - self.passed_on:
            left_out(f"field {name}", "it is not read here")
        return self

    @contextmanager
    def named(self) -> Iterator[None]:
        """Rename the fields of the engine's errors to those of the body."""
        try:
            yield
        except FieldError as error:
            sent = (name for name in _CLIENTS.get(error.field, ()) if getattr(self, name, None) is not None)
            if not isinstance(error, UnsupportedError):
                error.rename(next(sent, error.field))
            raise


_CLIENTS = {"prompt": ("messages", "input"), "max_tokens": ("max_output_tokens", "max_completion_tokens")}
"""The engine's name of a field -> the clients', where those are others."""


class Speculative(Fields):
    """How one request is drafted for. A missing field keeps the server's setting."""

    model_config = ConfigDict(extra="forbid")

    method: str | None = None
    settings: Annotated[dict[str, float | str] | None, Few] = None
    drafter: str | None = None
    nodes: Count | None = None
    verification: str | None = None


class StructuredOutputs(Fields):
    """A constraint of the answer, by vLLM's names. Exactly one field is set."""

    model_config = ConfigDict(extra="forbid")

    json_schema: dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None

    def compiled(self, engine: Engine) -> Grammar:
        """Compile the grammar.

        Raises:
            FieldError: there are none or several, or it cannot be used.
        """
        given = [(name, value) for name, value in self if value not in (None, False)]
        if len(given) != 1:
            names = ", ".join(field.alias or name for name, field in type(self).model_fields.items())
            raise FieldError("structured_outputs", f"structured_outputs has {len(given)} of {names}: give one")
        ((name, value),) = given
        with of_field("structured_outputs"):
            if name == "json_object":
                name, value = "json_schema", {"type": "object"}
            compile_: Callable[[Any], Grammar] = getattr(engine.grammars, name)
            return compile_(value)


@contextmanager
def of_field(name: str) -> Iterator[None]:
    """Make a compiler's errors name a field."""
    try:
        yield
    except ConfigError as error:
        raise FieldError(name, str(error)) from None


class NamedSchema(Body):
    """A JSON Schema and its name."""

    name: str = ""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(NamedSchema):
    """The format of the answer. Its schema is in ``json_schema``, or of responses beside the type."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: NamedSchema | None = None

    def wanted(self, field: str) -> dict[str, Any] | None:
        """Return the JSON Schema of an answer, or None for any text.

        Raises:
            FieldError: there is no schema.
        """
        if self.type == "text":
            return None
        schema = (self.json_schema or self).schema_
        if self.type == "json_object":  # some servers take its schema beside the type
            return {"type": "object"} if schema is None else schema
        if schema is None:
            raise FieldError(field, f"{field} has no schema: give one")
        return schema


class StreamOptions(Body):
    """What a stream contains besides text."""

    include_usage: bool = False
    include_trace: bool = False


class Sampled(Sent):
    """Fields that all generating endpoints share.

    Attributes:
        prefix: of the ids of answers.
    """

    prefix: ClassVar[str]
    model: str
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=16)] = 1
    stop: Annotated[str, AfterValidator(_short)] | Texts | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: Annotated[int, Field(ge=-1)] | None = None  # -1: as if there were none
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Probability | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Annotated[dict[Annotated[int, Field(strict=False)], Bias] | None, Few] = None  # JSON has texts for keys
    ignore_eos: bool = False
    min_tokens: Whole | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    allowed_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: Priority = 0
    timeout: Positive | None = None
    draftree: Speculative | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def format(self) -> tuple[str, ResponseFormat]:
        """The name and the value of the field for the response format."""
        return "response_format", ResponseFormat()

    @property
    def compiles(self) -> bool:
        """Whether ``constraint`` compiles a grammar."""
        return self.structured_outputs is not None or self.format[1].type != "text"

    def constraint(self, engine: Engine) -> Constraint | None:
        """Compile the constraint of the answer, which may take long; None: any text.

        Raises:
            FieldError: there are two constraints, or one cannot be compiled.
        """
        field, wanted = self.format
        schema = wanted.wanted(field)
        if self.structured_outputs is None:
            with of_field(field):
                return None if schema is None else engine.grammars.json_schema(schema)
        if schema is not None:
            raise FieldError("structured_outputs", f"structured_outputs and {field} exclude each other: choose one")
        return self.structured_outputs.compiled(engine)

    def tags(self, engine: Engine) -> Mapping[int, str] | None:
        """Return the tokens of call tags that give no text; None: the answer calls no functions."""
        return None

    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """Return the prompts to answer."""

    def refuse(self) -> None:
        """Raise FieldError where fields exclude each other."""

    def limit(self, room: int) -> int | None:
        """Return the most tokens of an answer. A default fits into ``room``, the tokens that the prompt leaves."""
        sent = (getattr(self, name, None) for name in (*_CLIENTS["max_tokens"], "max_tokens"))
        return next((most for most in sent if most is not None), None)

    @property
    def predicted(self) -> str:
        """The predicted output; empty: there is none."""
        return ""

    @property
    def raw(self) -> bool:
        """Whether prompts are texts to continue, not conversations."""
        return False

    @property
    def effort(self) -> str | None:
        """How much the model thinks; None: the chat template's default."""
        return None

    @property
    def begun(self) -> str:
        """The text of the assistant that the answer continues; empty: it begins a turn."""
        return ""

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives get log-probabilities beside each token; None: no log-probabilities."""
        return None

    @property
    def traced(self) -> bool:
        """Whether the stream contains trace lines besides tokens."""
        return self.stream and self.stream_options is not None and self.stream_options.include_trace

    def params(self, choice: int, room: int) -> SamplingParams:
        """Return the sampling parameters of a choice.

        Args:
            choice: its number, from 0; each has a seed of its own.
            room: as of ``limit``.
        """
        sent = {name: value for name in _ENGINES if (value := getattr(self, name)) is not None}
        changed = {
            "max_tokens": self.limit(room),
            "top_k": max(0, self.top_k or 0),
            "seed": None if self.seed in (None, -1) else (self.seed + choice) % 2**63,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop or (),
            "logprobs": self.wanted_logprobs,
        }
        given: dict[str, Any] = {"temperature": 1.0, **sent, **changed}
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return SamplingParams(**given)

    def speculation(self, default: SpeculationParams, most: int = MAX_NODES) -> SpeculationParams | None:
        """Return how the request is drafted for; None: by default. ``lookup`` drafts from a predicted output.

        Args:
            most: drafted tokens of a step's tree; methods whose own bound is larger get this one.

        Raises:
            FieldError: the names do not go together, or name a drafter that is not loaded, or nodes are too many.
        """
        chosen = self.draftree or Speculative()
        if chosen.drafter not in (None, NONE, str(default.spec)):
            said = f"drafter {chosen.drafter!r} is not loaded: use {str(default.spec)!r} or {NONE!r}"
            raise FieldError("draftree.drafter", said)
        # A method of its own has its own settings.
        changed: dict[str, Any] = {} if chosen.method is None else {"settings": None, "nodes": None}
        sent = chosen.model_dump(exclude_none=True)
        if chosen.drafter == str(default.spec):  # as it is: a request loads and imports nothing
            del sent["drafter"]
        if chosen.verification is not None:
            changed["candidates"] = None
        if chosen.nodes is not None and chosen.nodes > most:
            said = f"draftree.nodes is {chosen.nodes}: use at most {most}, or start the server with --nodes-limit"
            raise FieldError("draftree.nodes", said)
        if self.predicted and chosen.drafter is None and LOOKUP not in default.spec.sources:
            lookup = {"drafter": LOOKUP, "method": DEFAULT_METHOD, "settings": None}
            with suppress(InputError):  # a verification that draws its drafts verifies none that are looked up
                return replace(default, **lookup | changed | sent).within(most)
        if self.draftree is None:
            return None
        try:
            return replace(default, **changed | sent).within(most)
        except InputError as error:
            raise FieldError("draftree", str(error)) from None


_ENGINES = {field.name for field in fields(SamplingParams)} & Sampled.model_fields.keys()
"""Names that bodies and ``SamplingParams`` share."""


class CompletionRequest(Sampled):
    """Texts to continue: the body of ``POST /v1/completions``."""

    prefix = "cmpl-"
    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    echo: bool = False
    logprobs: LogprobCount | None = None
    response_format: ResponseFormat = ResponseFormat()

    @property
    def raw(self) -> bool:
        return True

    @property
    def format(self) -> tuple[str, ResponseFormat]:
        return "response_format", self.response_format

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def limit(self, room: int) -> int | None:
        most = super().limit(room)
        return max(1, min(room, max(_TOKENS, self.min_tokens or 0))) if most is None else most

    def params(self, choice: int, room: int) -> SamplingParams:
        return replace(super().params(choice, room), prompt_logprobs=self.logprobs if self.echo else None)

    def refuse(self) -> None:
        if not self.prompt:
            raise FieldError("prompt", "the prompt is empty: give at least one")
        if self.stream and self.echo and self.logprobs is not None:
            raise FieldError("stream", "a prompt with logprobs is not streamed: leave stream out")

    def prompts(self) -> Sequence[Prompt]:
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given


class DetokenizeRequest(Sent):
    """Token ids whose text is wanted."""

    tokens: TokenIds
