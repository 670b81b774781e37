"""Policies, drafters and schemes by MODULE:NAME: users' own, of a command line, and those of the registries."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

from .errors import ConfigError, UnknownNameError, call_named, first_line

T = TypeVar("T")

_NAMED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_imported(text: str) -> bool:
    """A text is MODULE:NAME: a dotted name, a colon and a name."""
    return _NAMED.fullmatch(text) is not None


def module_file(text: str) -> str:
    """The file of the module that MODULE:NAME has imported; empty where a text has imported none."""
    name, sign, _ = text.partition(":")
    return getattr(sys.modules.get(name), "__file__", None) or "" if sign else ""


@dataclass(frozen=True, slots=True)
class Imported(Generic[T]):
    """What MODULE:NAME stands for: a value, or what returns one when it is called.

    Attributes:
        text: MODULE:NAME.
        what: it is, in messages.
        kind: of the value.
        value: what the module has by that name.
    """

    text: str
    what: str
    kind: type[T]
    value: Any

    def __str__(self) -> str:
        return self.text

    @property
    def settings(self) -> Mapping[str, int | float | str]:
        """The arguments of the call that have a number or a text as default."""
        settings = dict[str, int | float | str]()
        if not isinstance(self.value, self.kind):
            with suppress(TypeError, ValueError):  # of what cannot be called, or is built in
                defaults = {p.name: p.default for p in inspect.signature(self.value).parameters.values()}
                settings = {key: value for key, value in defaults.items() if type(value) in (int, float, str)}
        return settings

    def make(self, /, *args: object, **settings: object) -> T:
        """A copy of the value, or what the call returns.

        Raises:
            ConfigError: it returned something else.
            RunError: it raised.
        """
        name, value = f"{self.what} {self.text!r}", self.value
        if isinstance(value, self.kind):
            return call_named(name, deepcopy, value)
        result: Any = call_named(name, value, *args, **settings)
        if not isinstance(result, self.kind):
            raise ConfigError(f"{name} returned {result!r}: return a {self.kind.__name__}")
        return result


def import_named(what: str, text: str, kind: type[T]) -> Imported[T]:
    """Import what MODULE:NAME names, of a module that lies in the working folder or is installed.

    Only for what the user of this process has written, or a registry: an import runs code.

    Args:
        what: it is, in messages.
        text: MODULE:NAME.
        kind: that it is, or returns.

    Raises:
        UnknownNameError: the module has nothing of that name.
        ConfigError: the module cannot be imported.
    """
    name, _, attribute = text.partition(":")
    if (folder := os.getcwd()) not in sys.path and not name.startswith(f"{__package__}."):
        sys.path.insert(0, folder)
    try:
        module = import_module(name)
    except (Exception, SystemExit) as error:
        raised = f"{type(error).__name__}: {first_line(error)}"
        way_out = f"write MODULE:NAME of a module in {folder} or an installed one"
        raise ConfigError(f"{what} {text!r}: importing {name} raised {raised}: {way_out}") from error
    if (value := getattr(module, attribute, None)) is None:
        raise UnknownNameError(f"{what} {text!r}: {module_file(text) or name} has no {attribute!r}")
    return Imported(text, what, kind, value)
