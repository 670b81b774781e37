"""Options of commands, made from the fields of the dataclasses that they fill (``config.option``)."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer

from ..config import Checked, Count, option
from ..engine.engine import Engine
from ..engine.scheduler import SchedulerParams
from ..engine.speculation import Observer, SpeculationParams
from ..errors import ConfigError, FieldError
from ..models.base import LanguageModel
from ..models.loading import ModelOptions, load
from ..text.encoding import Conversation, check_variables, render, user
from .console import read_file


def _parser(kind: type[int] | type[float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not a {'whole ' * (kind is int)}number") from None

    return read


def with_options(function: Callable[..., None], without: Collection[str] = ()) -> Callable[..., None]:
    """Make a command of a function: a parameter that is a dataclass stands for the options of its fields.

    A parameter of type ``Dataclass | None`` is None unless its first option is given; the others need that one.
    Fields ``without`` an option keep their defaults.
    """
    signature = inspect.signature(function, eval_str=True)
    filled: dict[str, tuple[Any, bool]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        kinds = get_args(parameter.annotation) or (parameter.annotation,)
        if not is_dataclass(kinds[0]):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        group, optional = kinds[0], NoneType in kinds
        filled[parameter.name] = group, optional
        parameters += [_parameter(f, kind, optional) for f, kind in _option_fields(group) if f.name not in without]

    def command(**given: Any) -> None:
        for name, (group, optional) in filled.items():
            values = {f.name: _read(f, given.pop(f.name, None)) for f, _ in _option_fields(group)}
            values = {key: value for key, value in values.items() if value is not None}
            try:
                given[name] = _filled_if_given(group, values) if optional else group(**values)
            except FieldError as error:
                error.rename(next((flag_of(f) for f, _ in _option_fields(group) if f.name == error.field), error.field))
                raise
        function(**given)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _option_fields(group: Any) -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(group)
    return [(f, hints[f.name]) for f in fields(group) if "help" in f.metadata]


def flag_of(field: Field[Any]) -> str:
    return str(field.metadata["name"] or f"--{field.name.replace('_', '-')}")


def _parameter(field: Field[Any], hint: Any, optional: bool) -> inspect.Parameter:
    about = field.metadata
    kinds = {get_origin(kind) or kind for kind in get_args(hint) or (hint,)}
    kind: Any = str
    if get_origin(hint) is tuple or Mapping in kinds:
        kind = list[str]
    elif not about["choices"]:
        kind = next((known for known in (bool, int, float) if known in kinds), str)
    parser = _parser(kind) if kind in (int, float) else None
    metavar = about["metavar"] or "|".join(about["choices"]) or None
    typed = typer.Option(flag_of(field), parser=parser, metavar=metavar, help=about["help"])
    default = None if optional or kind == list[str] else field.default
    if kind is bool:
        default = False
    elif about["choices"]:
        default = next((text for text, value in about["choices"].items() if value is default), None)
    annotation: Any = Annotated[kind if kind is bool else kind | None, typed]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _read(field: Field[Any], value: Any) -> Any:
    """Convert an option's value to its field's; None means not given."""
    if value is None or value is False:
        return None
    if choices := field.metadata["choices"]:
        if value not in choices:
            raise ConfigError(f"{flag_of(field)} {value}: use one of {', '.join(choices)}")
        return choices[value]
    value = tuple(value) if isinstance(value, list) else value
    return value if (read := field.metadata["read"]) is None else read(value)


def _filled_if_given(group: Any, values: dict[str, Any]) -> Any:
    first, *others = (f for f, _ in _option_fields(group))
    if first.name in values:
        return group(**values)
    for f in others:
        if f.name in values:
            raise ConfigError(f"{flag_of(f)} {values[f.name]} goes with {flag_of(first)}: give that too, or neither")
    return None


def given(value: Any) -> list[str]:
    """List the options of a dataclass that differ from their defaults."""
    return [flag_of(f) for f, _ in _option_fields(type(value)) if getattr(value, f.name) != f.default]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions(Checked):
    """Where and how models compute."""

    backend: str | None = option(
        "What runs the model: native, llama.cpp or transformers; by default native for GGUF files that it knows."
    )
    threads: Count | None = option("CPU threads of a pass over a GGUF file; by default one a core.", metavar="N")
    dtype: str | None = option("Type of the weights: float32, float16 or bfloat16.")
    device: str | None = option("Where the model runs: cpu, cuda or cuda:N.")
    runner: str | None = option("What makes passes: graph, CUDA graphs (the default there), or eager.")

    @property
    def options(self) -> ModelOptions:
        """Keyword arguments of ``draftree.load``."""
        return cast(ModelOptions, asdict(self))

    def load(self, name: str) -> LanguageModel:
        return load(name, **self.options)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"--chat-template-kwargs is {text!r}: write a JSON object, such as '{{\"name\": true}}'")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """How a conversation becomes a prompt."""

    chat_template: str | None = option(
        "A chat template (Jinja) for a model that has none, or in place of its own.", metavar="FILE"
    )
    variables: dict[str, Any] | None = option(
        "What the chat template reads, such as '{\"enable_thinking\": false}'; a request's own come first.",
        metavar="JSON",
        name="--chat-template-kwargs",
        read=_json_object,
    )

    def __post_init__(self) -> None:
        check_variables(self.variables or {}, "--chat-template-kwargs")

    def engine(
        self,
        model: LanguageModel,
        speculation: SpeculationParams,
        observers: Sequence[Observer],
        scheduling: SchedulerParams | None = None,
    ) -> Engine:
        """Set the model's chat template and build an engine.

        Raises:
            PromptError: the file cannot be read, or is no template that takes a question.
            ConfigError: the model has no tokenizer.
        """
        if self.chat_template is not None:
            if model.tokenizer is None:
                raise ConfigError(f"--chat-template {self.chat_template}: the model has no tokenizer: leave it out")
            model.tokenizer.chat_template = read_file(self.chat_template, "--chat-template")
            render(model.tokenizer, Conversation(user("?"), variables=self.variables or {}))
        variables = self.variables
        return Engine(model, speculation, observers=observers, scheduling=scheduling, template_variables=variables)


NAMES = "smollm2, a folder, a .gguf file, hf.co/ORG/NAME:QUANTISATION or a hub id"
"""How a model is named, for help."""
Model = Annotated[str, typer.Argument(metavar="[MODEL]", help=f"{NAMES}.")]
Target = Annotated[str, typer.Option(help=f"Model whose output you want: {NAMES}.")]
Drafter = Annotated[str, typer.Option(help="What drafts, named as for generate.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Where a trace is written, if anywhere."""

    trace: str | None = option("Write what every step did to this file (JSON lines).", metavar="FILE")

    def observers(self, context: typer.Context, method: str) -> list[Observer]:
        """Return a trace that ends with the command, or nothing."""
        if self.trace is None:
            return []
        from ..engine.trace import Trace

        return [context.with_resource(Trace(self.trace, labels={"method": method}))]
