"""Checks of arguments and fields against their annotations. Knows nothing of models."""

from __future__ import annotations

import builtins
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise ConfigError for arguments of types other than its annotations'."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        kinds = _kinds(function)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if not fits(value, kinds.get(name, Any)):
                raise _wrong(name, value, kinds[name], signature.parameters[name].annotation)
        return function(*args, **kwargs)

    return checked


def check_fields(value: Any) -> None:
    """Check the fields of a dataclass against their annotations.

    Raises:
        ConfigError: the first field of a wrong type.
    """
    made: Any = type(value)
    kinds = _kinds(made)
    for field in fields(value):
        if field.init and not fits(found := getattr(value, field.name), kinds[field.name]):
            raise _wrong(field.name, found, kinds[field.name], field.type)


def _wrong(name: str, value: object, kind: Any, annotation: object) -> ConfigError:
    if get_origin(kind) is Literal:
        return ConfigError(f"{name} is {value!r}: use {' or '.join(map(str, get_args(kind)))}")
    return ConfigError(f"{name} is {value!r}: use a value of type {annotation}")


def fits(value: object, kind: Any) -> bool:
    """The value, and all that is in it, is of the annotated kind.

    True and False are not numbers, an int is a float, a list does for a tuple of any length. A value fits a
    protocol by its attributes alone; an annotation that is no class fits anything.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, k) for k in inner)
    if origin is Literal:
        return any(value == k and type(value) is type(k) for k in inner)
    if origin is Callable or kind is Callable:
        return callable(value)
    if kind is None or kind is NoneType:
        return value is None
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return _is_number(value)
    if getattr(kind, "_is_protocol", False):
        return all(hasattr(value, name) for name in _members(kind))
    if kind in (Any, _Unknown) or not isinstance(origin or kind, type):
        return True
    if origin is tuple and len(inner) == 2 and inner[1] is ...:
        return isinstance(value, (tuple, list)) and all(fits(v, inner[0]) for v in value)
    if not isinstance(value, origin or kind):
        return False
    if origin is tuple and isinstance(value, tuple):
        return len(value) == len(inner) and all(map(fits, value, inner))
    if isinstance(value, Mapping):
        return not inner or all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if inner and isinstance(value, Sequence):
        return all(fits(v, inner[0]) for v in value)
    if is_dataclass(kind):
        made: Any = kind
        kinds = _kinds(made)
        return all(fits(getattr(value, f.name), kinds[f.name]) for f in fields(kind) if f.init)
    return True


def _is_number(value: object) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _members(protocol: Any) -> set[str]:
    own = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False) and base.__module__ != "typing"]
    names = {name for base in own for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    return {name for name in names if not name.startswith("_")}


@functools.cache
def _kinds(of: Any) -> dict[str, Any]:
    return get_type_hints(of, globalns={}, localns=_Names(of.__module__))


class _Names(dict[str, Any]):
    """What annotations of a module name; what it imports for a type checker alone may be anything."""

    def __init__(self, module: str) -> None:
        super().__init__({**vars(builtins), **vars(sys.modules[module])})

    def __missing__(self, name: str) -> Any:
        if name.startswith("__"):  # debuggers and pytest look for such names in every frame
            raise KeyError(name)
        return _Unknown


class _Unknown:
    """What an annotation names and nothing imports at run time; with arguments or without."""

    def __class_getitem__(cls, arguments: object) -> type[_Unknown]:
        return cls
