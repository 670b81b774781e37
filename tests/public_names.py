"""What may be written of the Python interface: its names, and expressions that fit their signatures."""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import draftree
import draftree.sampling.grammar  # that ``Engine.grammars`` loads when it is used

_is_class: Callable[[Any], bool] = inspect.isclass  # narrows no type: classes are not ``Hashable`` to mypy
VARIABLES = {
    "beams": "BeamEngine",
    "draws": "UniformDraws",
    "found": "BeamGeneration",
    "policy": "GrowthPolicy",
    "target": "LanguageModel",
}
"""What documents call a value of a class; by default it is the class's name, in small letters."""


class PublicNames:
    """The public names, and what can be reached from them by annotations.

    Attributes:
        classes: of the package, by name.
        parameters: of all their functions.
    """

    def __init__(self) -> None:
        self.classes: dict[str, type] = {}
        self.parameters: set[str] = set()
        for name in draftree.__all__:
            self._reach(getattr(draftree, name))

    @cached_property
    def words(self) -> set[str]:
        """All names of classes, functions, attributes and parameters."""
        attributes = {name for each in self.classes.values() for name in members(each)}
        return {*draftree.__all__, *self.classes, *self.parameters, *attributes, *VARIABLES}

    def _reach(self, found: Any) -> None:
        if _is_class(found):
            if found.__module__.startswith("draftree") and self.classes.setdefault(found.__name__, found) is found:
                self.parameters |= parameters(found)
                for each in members(found).values():
                    if not _is_class(each) or each.__name__ not in self.classes:
                        self._reach(each)
        elif inspect.isroutine(found):
            self.parameters |= parameters(found)
            for kind in _hints(found).values():
                for each in _classes(kind):
                    if each.__name__ not in self.classes:
                        self._reach(each)

    def faults(self, text: str) -> list[str]:
        """What an expression, or an assignment ``name=value``, names that is not there; no Python has no faults."""
        try:
            node = ast.parse(text).body[0]
        except (SyntaxError, IndexError):
            return []
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
            if target.id not in self.words:
                return [f"{text}: no parameter or attribute is called {target.id}"]
        return [fault for each in ast.walk(node) for fault in self._faults_of(each)]

    def _faults_of(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            if owner and not self._attribute(owner, node.attr):
                yield f"{ast.unparse(node)}: there is no {node.attr}"
        elif isinstance(node, ast.Call):
            called = self._called(node.func)
            if not called and isinstance(node.func, ast.Name) and not self._is_value(node.func.id):
                yield f"{ast.unparse(node)}: nothing is called {node.func.id}"
            elif called and not any(fits(each, node) for each in called):
                yield f"{ast.unparse(node)}: these are not its arguments"

    def _called(self, function: ast.expr) -> list[Any]:
        """What a call may call; a bare name is a public one, or a method of any class."""
        if isinstance(function, ast.Name) and function.id not in (*draftree.__all__, *self.classes):
            methods = (members(each).get(function.id) for each in self.classes.values())
            return [each for each in methods if inspect.isroutine(each)]
        return self._value(function)

    def _is_value(self, name: str) -> bool:
        """It is an argument or an attribute, a class of the reader's own, or one of Python's functions."""
        return name[0].isupper() or name in self.words or hasattr(builtins, name)

    def _value(self, node: ast.expr) -> list[Any]:
        """What an expression may be: classes stand for their values too; nothing: that is not known."""
        match node:
            case ast.Name("draftree"):
                return [draftree]
            case ast.Name(name) if name in draftree.__all__:
                return [getattr(draftree, name)]
            case ast.Name(name) if name not in VARIABLES and (module := sys.modules.get(f"draftree.{name}")):
                kind = self.classes.get(name.capitalize())
                return [module, kind] if kind else [module]
            case ast.Name(name):
                kind = self.classes.get(VARIABLES.get(name, name)) or self.classes.get(name.capitalize())
                return [] if kind is None else [kind]
            case ast.Attribute(owner, name):
                return [found for each in self._value(owner) for found in self._attribute([each], name)]
            case ast.Subscript(owner):
                return self._value(owner)
            case ast.Call(function):
                called = self._called(function)
                kinds = [_hints(each).get("return") if inspect.isroutine(each) else each for each in called]
                return [each for kind in kinds for each in _classes(kind)]
        return []

    def _attribute(self, owners: list[Any], name: str) -> list[Any]:
        found = list[Any]()
        for owner in owners:
            if isinstance(owner, ModuleType):
                found += [getattr(owner, name)] if hasattr(owner, name) else _module(f"{owner.__name__}.{name}")
            elif _is_class(owner) and name in (those := members(owner)):
                found += [those[name]] if inspect.isroutine(those[name]) else _classes(those[name]) or [object()]
            elif _is_class(owner) and not owner.__module__.startswith("draftree"):
                found.append(object())
        return found


def _module(name: str) -> list[ModuleType]:
    """The module of the package that is called so; nothing: there is none."""
    try:
        return [import_module(name)]
    except ModuleNotFoundError:
        return []


def fits(function: Any, call: ast.Call) -> bool:
    """The call's arguments can be bound; where ``...`` stands for some of them, the named ones alone have to be."""
    if not callable(function):
        return False
    try:
        signature = inspect.signature(function)
    except ValueError:
        return True
    named = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    if not named.keys() <= parameters(function):
        return False
    given = {name: value for name, value in named.items() if name in signature.parameters}
    first = next(iter(signature.parameters), "")
    others = [None] * (len(call.args) + (first == "self"))
    partial = any(isinstance(arg, ast.Constant) and arg.value is ... for arg in call.args)
    try:
        signature.bind_partial(**given) if partial else signature.bind(*others, **given)
    except TypeError:
        return False
    return True


@cache
def parameters(function: Any) -> frozenset[str]:
    """Names of arguments, those of ``**options: Unpack[...]`` included."""
    try:
        found = inspect.signature(function).parameters
    except (ValueError, TypeError):
        return frozenset()
    names = {name for name, each in found.items() if each.kind is not inspect.Parameter.VAR_KEYWORD} - {"self"}
    for kind in _hints(function if inspect.isroutine(function) else function.__init__).values():
        if get_origin(kind) is Unpack:
            names |= get_type_hints(get_args(kind)[0]).keys()
    return frozenset(names)


@cache
def members(kind: Any) -> Mapping[str, Any]:
    """Attribute -> the method, the annotated kind, or None; those that ``__init__`` sets included."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("draftree"):
            continue
        for name in (name for name in vars(base) if name[0] != "_" or name == "__call__"):
            value = inspect.getattr_static(base, name)
            value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if isinstance(value, property):
                value = _hints(value.fget).get("return")
            found[name] = value if inspect.isroutine(value) or get_origin(value) or _is_class(value) else None
        found |= _set_by(base)
        found |= {name: hint for name, hint in _hints(base).items() if name[0] != "_"}
    return found


def _set_by(kind: type) -> dict[str, Any]:
    """Attributes that ``__init__`` sets, with their kinds where they are a parameter's or a class's that it calls."""
    made = kind.__dict__.get("__init__")
    made = inspect.unwrap(made) if made else None
    if not inspect.isfunction(made) or not made.__code__.co_filename.endswith(".py"):
        return {}
    hints, names = _hints(made), vars(sys.modules[kind.__module__])
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(made)))):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        pairs = [pair for target in targets for pair in _pairs(target, value)]
        for target, value in pairs:
            if isinstance(target, ast.Attribute) and target.attr[0] != "_":
                called = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
                named = hints.get(value.id) if isinstance(value, ast.Name) else names.get(called)
                found[target.attr] = named if _is_class(named) or get_origin(named) else None
    return found


def _pairs(target: ast.expr, value: ast.expr | None) -> list[tuple[ast.expr, ast.expr | None]]:
    """Targets of an assignment, each with its value."""
    if isinstance(target, ast.Tuple):
        values = value.elts if isinstance(value, ast.Tuple) else [None] * len(target.elts)
        return list(zip(target.elts, values, strict=True))
    return [(target, value)]


@cache
def _hints(found: Any) -> dict[str, Any]:
    """Annotations; names that a module imports for typing alone are looked up in the others."""
    known = dict[str, Any]()
    while True:
        try:
            return get_type_hints(found, localns=known)
        except TypeError:
            return {}
        except NameError as error:
            loaded = [vars(module) for name, module in sys.modules.items() if name.startswith("draftree.")]
            there = next((names[error.name] for names in loaded if error.name in names), None)
            if there is None or error.name is None or error.name in known:
                return {}
            known[error.name] = there


def _classes(kind: Any) -> list[Any]:
    """The classes in an annotation, a list's entries for the list."""
    if _is_class(kind) and not get_args(kind):
        return [kind] if kind.__module__ != "builtins" else []
    return [each for part in get_args(kind) if not isinstance(part, str) for each in _classes(part)]
