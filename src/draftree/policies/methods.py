"""The growth policies by name, with their settings: what ``--method NAME --set KEY=VALUE`` means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ..config import DEFAULT_NODES, MAX_NODES
from ..errors import ConfigError, unknown_name
from ..importing import import_named
from .auto import AutoTree
from .base import GrowthPolicy, read_number
from .best_paths import Eagle2Tree, OptTree
from .c2t import BETA, DEFAULT, ClassifierTree, read_classifier
from .entropy import (
    FIRST,
    BranchingSteps,
    BudgetTree,
    DynamicWindow,
    EntropyStop,
    EntropyTree,
    read_start,
)
from .fixed import EAGLE, RankTree, StaticTree, read_tree
from .gain import AutoSettings

Settings = Mapping[str, int | float | str]

BY_ENTROPY: Settings = {"sure": 0.02, "unsure": 1.0, "slope": 4.0, "width": 7, "depth": 4}


def _auto(width: int, depth: int, **settings: Any) -> GrowthPolicy:
    return AutoTree(width, depth, settings=AutoSettings(**settings))


def _by_entropy(tree: type[EntropyTree], *, width: int, depth: int, **thresholds: float) -> GrowthPolicy:
    """A tree by B(H)."""
    return tree(BranchingSteps(width=width, **thresholds), None, width, depth)


def _sequoia(tree: str) -> GrowthPolicy:
    if not tree:
        raise ConfigError(
            "method sequoia needs a tree: make one with 'draftree calibrate' and give it with --set tree=FILE"
        )
    found = read_tree(tree)
    return RankTree(found.tree, found.made_for)


def _opt_tree(delta: str, depth: int) -> GrowthPolicy:
    way_out = "use a gain between 0 and 1, both excluded, or 'auto'"
    return OptTree(None if delta == "auto" else read_number(float, "delta", delta, way_out), depth)


def _hsddw(start: str, cap: int) -> GrowthPolicy:
    return DynamicWindow(read_start("start", start), cap)


def _c2t(classifier: str, beta: float, width: int, top: str, depth: int) -> GrowthPolicy:
    limit = None if top == "none" else read_number(int, "top", top, "use a whole number from 1, or 'none'")
    found = read_classifier(classifier)
    return ClassifierTree(found.classifier, beta, width, limit, depth, found.made_for)


@dataclass(frozen=True, slots=True)
class Method:
    """A named way to shape draft trees.

    Attributes:
        name: as on the command line.
        summary: one line: what it does.
        make: keyword settings, all of them -> policy.
        paper: where it is from; "ours" is an answer.
        use: when it is the right one.
        settings: names and defaults, whose types the values take; empty text where one must be given.
    """

    name: str
    summary: str
    make: Callable[..., GrowthPolicy]
    paper: str
    use: str
    settings: Settings = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def nodes(self) -> int:
        """Node budget where none is given."""
        return DEFAULT_NODES if "" in self.settings.values() else self.policy().default_nodes

    def policy(self, settings: Mapping[str, float | str] | None = None) -> GrowthPolicy:
        """Build the policy; values may be text, as from a command line.

        Raises:
            ConfigError: no such setting, or a value that it cannot take.
        """
        values = dict(self.settings)
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
        return self.make(**values)


_METHODS = (
    Method(
        "auto",
        "what pays most by this machine's measured costs, or none; CREDIT: AR passes that it may lose",
        _auto,
        "ours",
        "the default: drafts what pays by the costs of this machine, or nothing",
        {"width": 8, "depth": 16, **asdict(AutoSettings())},
    ),
    Method(
        "chain",
        "chain of DEPTH tokens (the papers' baseline)",
        partial(StaticTree, width=1),
        "Leviathan et al. 2023",
        "the baseline of all papers; a draft model that is almost always right",
        {"depth": 4},
    ),
    Method(
        "early-stop",
        "chain that ends where the draft's entropy exceeds STOP nats",
        EntropyStop,
        "Gunjur & Waitz",
        "a chain, where the drafter is sure in some places and unsure in others",
        {"stop": 1.0},
    ),
    Method(
        "naive-width",
        "early-stop whose last position gets WIDTH alternatives",
        EntropyStop,
        "Gunjur & Waitz",
        "to compare: early-stop with alternatives at its end",
        {"stop": 1.0, "width": 4},
    ),
    Method(
        "static",
        "full tree: WIDTH children each, DEPTH levels",
        StaticTree,
        "Miao et al. 2024 (SpecInfer)",
        "to compare; with schemes that draw children at random",
        {"width": 2, "depth": 4},
    ),
    Method(
        "binary",
        "full tree of 2 children each, as deep as the node budget goes (OPT-Tree's baseline)",
        partial(StaticTree, width=2, depth=MAX_NODES),
        "Wang et al. 2024 (OPT-Tree)",
        "to compare: OPT-Tree's baseline",
    ),
    Method(
        "eagle",
        "EAGLE's fixed tree of 25 nodes",
        partial(RankTree, EAGLE),
        "Li et al. 2024 (EAGLE)",
        "to compare: the fixed tree of EAGLE's authors",
    ),
    Method(
        "sequoia",
        "the best fixed tree for target and drafter, read from the file TREE that 'draftree calibrate' wrote",
        _sequoia,
        "Chen et al. 2024 (Sequoia)",
        "a fixed tree of your own two models, after 'draftree calibrate'",
        {"tree": ""},
    ),
    Method(
        "dynamic-width",
        "B(H) children at entropy H: 1 below SURE, 2 below UNSURE, else ceil(SLOPE x H) up to WIDTH; DEPTH levels",
        partial(_by_entropy, EntropyTree),
        "Gunjur & Waitz",
        f"width by entropy; on a CPU --nodes 4; the paper's large trees: --nodes {MAX_NODES}",
        BY_ENTROPY,
    ),
    Method(
        "dynamic-width-budget",
        "dynamic-width, shrunk so that the node budget lasts to the last level: no children where B(H) exceeds the "
        "rest",
        partial(_by_entropy, BudgetTree),
        "Gunjur & Waitz, bounded by us",
        "width by entropy within a node budget",
        BY_ENTROPY,
    ),
    Method(
        "dynamic-width-depth",
        "dynamic-width, and no children at all where the entropy exceeds STOP nats",
        partial(_by_entropy, EntropyTree),
        "Gunjur & Waitz",
        f"the same, shallower where the drafter is unsure; the paper's is --nodes {MAX_NODES}",
        {**BY_ENTROPY, "depth": 8, "stop": 1.75},
    ),
    Method(
        "opt-tree",
        "the most probable paths: layer by layer while E(A) gains more than DELTA (auto: what a draft pass costs)",
        _opt_tree,
        "Wang et al. 2024 (OPT-Tree)",
        "the most tokens a pass from a budget: large trees on a GPU, --nodes 4 on a CPU",
        {"delta": "auto", "depth": MAX_NODES},
    ),
    Method(
        "eagle2",
        "the most probable of all children of a beam of WIDTH nodes, DEPTH levels",
        Eagle2Tree,
        "Li et al. 2024 (EAGLE-2)",
        "with draft heads, beside opt-tree",
        {"width": 10, "depth": 6},
    ),
    Method(
        "hsddw",
        "chain of up to CAP tokens, ended where entropy exceeds the mean of rejected tokens; over 'A>B' it is HSDDW",
        _hsddw,
        "Syu & Lee 2025 (HSDDW)",
        "with a cascade 'A>B', or a chain that needs no measured costs",
        {"start": FIRST, "cap": 10},
    ),
    Method(
        "c2t",
        "nodes that CLASSIFIER ('draftree train classifier') scores BETA or more; WIDTH children, TOP a layer (or "
        "none)",
        _c2t,
        "Huo et al. 2025 (C2T)",
        "a trained classifier for your target and head: fewer nodes for the same tokens",
        {"classifier": DEFAULT, "beta": BETA, "width": 15, "top": "15", "depth": 10},
    ),
)
METHODS = {method.name: method for method in _METHODS}
DEFAULT_METHOD = "auto"


def find_policy(method: str | Method | GrowthPolicy, settings: Mapping[str, float | str] | None = None) -> GrowthPolicy:
    """A policy by its method or the name of that, or the policy itself.

    Raises:
        UnknownNameError: there is no such method.
        ConfigError: no such setting, a value that it cannot take, or settings beside a ready policy.
    """
    if not isinstance(method, GrowthPolicy):
        return (find_method(method) if isinstance(method, str) else method).policy(settings)
    if settings:
        raise ConfigError(f"settings {dict(settings)} beside a ready policy: set them on the policy itself")
    return method


def find_method(name: str) -> Method:
    """The method called ``name``.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]


def read_method(text: str) -> str | Method:
    """The method that a command line names: MODULE:NAME is imported, another text is the name of a method.

    The attribute is a policy, which is copied wherever it is used, or returns one when it is called; its arguments
    with a number or a text as default are the settings.

    Raises:
        UnknownNameError: there is no such attribute.
        ConfigError: the module cannot be imported.
    """
    if ":" not in text:
        return text
    if text.partition(":")[0] in METHODS:
        raise ConfigError(f"method {text!r} has a setting without a value: write it as KEY=VALUE")
    found = import_named("method", text, GrowthPolicy)  # type: ignore[type-abstract]
    return Method(text, "", found.make, "", "", found.settings)
