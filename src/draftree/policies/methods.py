"""The growth policies by name, with their settings: what ``--method NAME --set KEY=VALUE`` means."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..config import DEFAULT_NODES, MAX_NODES
from ..errors import ConfigError, UnknownNameError
from .auto.policy import AutoTree
from .base import MAX_WIDTH, GrowthPolicy
from .best_paths import Eagle2Tree, OptTree
from .c2t import (
    BETA,
    DEFAULT,
    DEFAULT_WIDTH,
    DEPTH,
    LEARNED_BETA,
    TOP,
    ClassifierTree,
    LearnedTree,
    LearnedWidth,
    read_classifier,
)
from .chains import DynamicWindow, EntropyStop, Window, read_start
from .entropy import BranchingSteps, BudgetTree, EntropyFunction, EntropyTree, StepFunction
from .fixed import EAGLE, RankTree, StaticTree, read_tree


def chain(depth: int = 4) -> GrowthPolicy:
    """chain of DEPTH tokens (the papers' baseline)"""
    return StaticTree(width=1, depth=depth)


def early_stop(stop: float = 1.0) -> GrowthPolicy:
    """chain that ends where the draft's entropy exceeds STOP nats"""
    return EntropyStop(stop=stop)


def naive_width(stop: float = 1.0, width: int = 4) -> GrowthPolicy:
    """early-stop whose last position gets WIDTH alternatives"""
    return EntropyStop(stop=stop, width=width)


def static(width: int = 2, depth: int = 4) -> GrowthPolicy:
    """full tree: WIDTH children each, DEPTH levels"""
    return StaticTree(width=width, depth=depth)


def binary() -> GrowthPolicy:
    """full tree of 2 children each, as deep as the node budget goes (OPT-Tree's baseline)"""
    return StaticTree(width=2, depth=MAX_NODES)


def eagle() -> GrowthPolicy:
    """EAGLE's fixed tree of 25 nodes"""
    return RankTree(EAGLE)


def sequoia(tree: str = "") -> GrowthPolicy:
    """the best fixed tree for target and drafter, read from the file TREE that 'draftree calibrate' wrote"""
    if not tree:
        raise ConfigError(
            "method sequoia needs a tree: make one with 'draftree calibrate' and give it with --tree FILE"
        )
    return read_tree(tree).policy


PAPER, NO_STEPS = "paper", "none"
"""In place of the steps of ``width_of`` and ``depth_of``: B(H) as published; ``depth``, whatever the entropy."""


def _shape(
    published: BranchingSteps, branching: BranchingSteps, levels: int, depth: int, width_of: str, depth_of: str
) -> tuple[EntropyFunction, EntropyFunction | None, int, int]:
    """Arguments of ``EntropyTree``.

    Args:
        published: B(H) by the defaults.
        branching: B(H) as it is set.
        levels: the default depth.
        depth: the depth as it is set.
        width_of: steps in place of B(H), or ``PAPER``.
        depth_of: steps of the deepest level, or ``NO_STEPS``.

    Raises:
        ConfigError: steps are malformed, or stand beside settings that they replace.
    """
    width: EntropyFunction = branching
    most, deepest = branching.most, None
    if width_of != PAPER:
        if branching != published:
            raise ConfigError(f"width_of={width_of} replaces B(H) and its settings: leave them out, or width_of")
        width = steps = StepFunction.parse("width_of", width_of, MAX_WIDTH)
        most = max(steps.values)
    if depth_of != NO_STEPS:
        if depth != levels:
            raise ConfigError(f"depth_of={depth_of} replaces depth={depth}: leave one of them out")
        deepest = StepFunction.parse("depth_of", depth_of)
        depth = max(deepest.values)
    return width, deepest, most, depth


def dynamic_width(
    sure: float = 0.02,
    unsure: float = 1.0,
    slope: float = 4.0,
    width: int = 7,
    depth: int = 4,
    width_of: str = PAPER,
    depth_of: str = NO_STEPS,
) -> GrowthPolicy:
    """B(H) children at entropy H: 1 below SURE, 2 below UNSURE, else ceil(SLOPE x H) up to WIDTH; DEPTH levels"""
    branching = BranchingSteps(sure, unsure, slope, width)
    return EntropyTree(*_shape(BranchingSteps(), branching, 4, depth, width_of, depth_of))


def dynamic_width_budget(
    sure: float = 0.02,
    unsure: float = 1.0,
    slope: float = 4.0,
    width: int = 7,
    depth: int = 4,
    width_of: str = PAPER,
    depth_of: str = NO_STEPS,
) -> GrowthPolicy:
    """dynamic-width, shrunk so that the node budget lasts to the last level: no children where B(H) exceeds the rest"""
    branching = BranchingSteps(sure, unsure, slope, width)
    return BudgetTree(*_shape(BranchingSteps(), branching, 4, depth, width_of, depth_of))


def dynamic_width_depth(
    sure: float = 0.02,
    unsure: float = 1.0,
    slope: float = 4.0,
    width: int = 7,
    depth: int = 8,
    stop: float = 1.75,
    width_of: str = PAPER,
    depth_of: str = NO_STEPS,
) -> GrowthPolicy:
    """dynamic-width, and no children at all where the entropy exceeds STOP nats"""
    branching = BranchingSteps(sure, unsure, slope, width, stop)
    return EntropyTree(*_shape(BranchingSteps(stop=1.75), branching, 8, depth, width_of, depth_of))


def learned_width(
    classifier: str = DEFAULT_WIDTH, beta: float = LEARNED_BETA, width: int = 7, depth: int = 4
) -> GrowthPolicy:
    """dynamic-width with learned B(H): the children to which CLASSIFIER (of entropy and rank) gives BETA and more"""
    found = read_classifier(classifier)
    return LearnedTree(LearnedWidth(found.classifier, beta), None, width, depth, found.made_for)


def opt_tree(delta: float | str = "auto", depth: int = MAX_NODES) -> GrowthPolicy:
    """the most probable paths: layer by layer while E(A) gains more than DELTA (auto: what a draft pass costs)"""
    if delta == "auto":
        return OptTree(None, depth)
    try:
        return OptTree(float(delta), depth)
    except ValueError:
        raise ConfigError(f"delta is {delta!r}: use a gain between 0 and 1, both excluded, or 'auto'") from None


def eagle2(width: int = 10, depth: int = 6) -> GrowthPolicy:
    """the most probable of all children of a beam of WIDTH nodes, DEPTH levels"""
    return Eagle2Tree(width, depth)


NO_TOP = "none"
"""``c2t`` keeps all nodes of a layer that score ``beta``."""


def c2t(
    classifier: str = DEFAULT, beta: float = BETA, width: int = 15, top: int | str = str(TOP), depth: int = DEPTH
) -> GrowthPolicy:
    """nodes that CLASSIFIER ('draftree train classifier') scores BETA or more; WIDTH children, TOP a layer (or none)"""
    try:
        limit = None if top == NO_TOP else int(top)
    except ValueError:
        raise ConfigError(f"top is {top!r}: use a whole number from 1, or {NO_TOP!r}") from None
    found = read_classifier(classifier)
    net = found.classifier
    return ClassifierTree(net, beta, width, limit, depth, net.given_parent, found.made_for)


def auto(width: int = 8, depth: int = 16) -> GrowthPolicy:
    """what pays most by this machine's measured costs, or none; WIDTH, DEPTH: bounds"""
    return AutoTree(width, depth)


def dynamic_window(cap: int = 16) -> GrowthPolicy:
    """chain of up to CAP tokens that ends where another no longer pays by this machine's measured costs"""
    return AutoTree(1, cap)


def hsddw(
    start: float | str = "first", crossing: str = "keep", floor: int = 1, cap: int = 10, memory: float = math.inf
) -> GrowthPolicy:
    """chain of FLOOR to CAP tokens, ended where entropy exceeds the mean of rejected tokens; over 'A>B' it is HSDDW"""
    if crossing not in ("keep", "drop"):
        raise ConfigError(f"crossing is {crossing!r}: the token that crosses the threshold is to 'keep' or to 'drop'")
    return DynamicWindow(Window(read_start("start", start), crossing == "keep", floor, cap, memory))


@dataclass(frozen=True, slots=True)
class Method:
    """A named way to shape draft trees.

    Attributes:
        name: as on the command line.
        make: keyword settings -> policy; its signature is the list of settings, its docstring the summary.
    """

    name: str
    make: Callable[..., GrowthPolicy]

    @property
    def summary(self) -> str:
        return inspect.getdoc(self.make) or ""

    @property
    def settings(self) -> dict[str, int | float | str]:
        """Names and defaults of the settings; empty text where one must be given."""
        return {name: p.default for name, p in inspect.signature(self.make).parameters.items()}

    @property
    def complete(self) -> bool:
        """Works with its defaults."""
        return "" not in self.settings.values()

    @property
    def nodes(self) -> int:
        """Node budget where none is given."""
        return self.policy().default_nodes if self.complete else DEFAULT_NODES

    def policy(self, settings: Mapping[str, float | str] | None = None) -> GrowthPolicy:
        """Build the policy; values may be text, as from a command line.

        Raises:
            ConfigError: no such setting, or a value that it cannot take.
        """
        return self.make(**self.values(settings))

    def values(self, settings: Mapping[str, float | str] | None) -> dict[str, float | str]:
        """Settings as numbers and text.

        Raises:
            ConfigError: no such setting, or a value that is not of its kind.
        """
        values: dict[str, float | str] = {}
        for key, value in (settings or {}).items():
            if key not in self.settings:
                raise ConfigError(
                    f"method {self.name} has no setting {key!r}: it has {', '.join(self.settings) or 'none'}"
                )
            kind = type(self.settings[key])
            try:
                values[key] = kind(value)
                if kind is not str and not isinstance(value, str) and values[key] != value:
                    raise ValueError
            except (ValueError, TypeError, OverflowError):
                noun = "a whole number" if kind is int else "a number"
                raise ConfigError(f"{key} is {value!r}: method {self.name} needs {noun} there") from None
        return values


_MAKERS: dict[str, Callable[..., GrowthPolicy]] = {
    "auto": auto,
    "chain": chain,
    "early-stop": early_stop,
    "naive-width": naive_width,
    "static": static,
    "binary": binary,
    "eagle": eagle,
    "sequoia": sequoia,
    "dynamic-width": dynamic_width,
    "dynamic-width-budget": dynamic_width_budget,
    "dynamic-width-depth": dynamic_width_depth,
    "learned-width": learned_width,
    "opt-tree": opt_tree,
    "eagle2": eagle2,
    "dynamic-window": dynamic_window,
    "hsddw": hsddw,
    "c2t": c2t,
}
"""A new method is a function, whose signature and docstring are its settings and its summary, and a line here."""
METHODS = {name: Method(name, make) for name, make in _MAKERS.items()}


DEFAULT_METHOD = "auto"


def find_policy(method: str | GrowthPolicy, settings: Mapping[str, float | str] | None = None) -> GrowthPolicy:
    """A policy by the name of its method, or the policy itself.

    Raises:
        UnknownNameError: there is no such method.
        ConfigError: no such setting, a value that it cannot take, or settings beside a ready policy.
    """
    if isinstance(method, str):
        return find_method(method).policy(settings)
    if settings:
        raise ConfigError(f"settings {dict(settings)} beside a ready policy: set them on the policy itself")
    return method


def find_method(name: str) -> Method:
    """The method called ``name``.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in METHODS:
        close = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UnknownNameError(f"no method {name!r}: {hint}choose from {', '.join(METHODS)}")
    return METHODS[name]
