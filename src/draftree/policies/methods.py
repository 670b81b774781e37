"""The growth policies by name, with their settings: what ``--method NAME --set KEY=VALUE`` means.

Each is imported when it is used, as a user's own is. The papers' are in ``papers/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config import DEFAULT_NODES, MAX_NODES
from ..errors import ConfigError, unknown_name
from ..importing import Imported, import_named
from .base import GrowthPolicy


@dataclass(frozen=True, slots=True)
class Method:
    """A named way to shape draft trees.

    Attributes:
        name: as on the command line.
        summary: one line: what it does.
        attribute: MODULE:NAME of a policy, or of what makes one; its arguments with a number or a text as default are
            the settings, of which empty text must be given.
        paper: where it is from; "ours" is an answer.
        use: when it is the right one.
    """

    name: str
    summary: str
    attribute: str
    paper: str = ""
    use: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def imported(self) -> Imported[GrowthPolicy]:
        return import_named("method", self.attribute, GrowthPolicy)  # type: ignore[type-abstract]

    @property
    def settings(self) -> Mapping[str, int | float | str]:
        """Names and defaults, whose types the values take."""
        return self.imported.settings

    @property
    def nodes(self) -> int:
        """Node budget where none is given."""
        return DEFAULT_NODES if "" in self.settings.values() else self.policy().default_nodes

    def policy(self, settings: Mapping[str, float | str] | None = None) -> GrowthPolicy:
        """Build the policy; values may be text, as from a command line.

        Raises:
            ConfigError: no such setting, or a value that it cannot take.
        """
        imported, values = self.imported, dict(self.settings)
        for key, value in (settings or {}).items():
            if key not in values:
                raise ConfigError(f"method {self.name} has no setting {key!r}: it has {', '.join(values) or 'none'}")
            kind = type(values[key])
            try:
                values[key] = kind(value)
                if kind is not str and not isinstance(value, str) and values[key] != value:
                    raise ValueError
            except (ValueError, TypeError, OverflowError):
                noun = "a whole number" if kind is int else "a number"
                raise ConfigError(f"{key} is {value!r}: method {self.name} needs {noun} there") from None
        return imported.make(**values)


_METHODS = (
    Method(
        "auto",
        "what pays most by this machine's measured costs, or none; CREDIT: AR passes that it may lose",
        "draftree.policies.auto:auto",
        "ours",
        "the default: drafts what pays by the costs of this machine, or nothing",
    ),
    Method(
        "chain",
        "chain of DEPTH tokens (the papers' baseline)",
        "draftree.policies.fixed:chain",
        "Leviathan et al. 2023",
        "the baseline of all papers; a draft model that is almost always right",
    ),
    Method(
        "early-stop",
        "chain that ends where the draft's entropy exceeds STOP nats",
        "draftree.papers.entropy_trees:early_stop",
        "Gunjur & Waitz",
        "a chain, where the drafter is sure in some places and unsure in others",
    ),
    Method(
        "naive-width",
        "early-stop whose last position gets WIDTH alternatives",
        "draftree.papers.entropy_trees:naive_width",
        "Gunjur & Waitz",
        "to compare: early-stop with alternatives at its end",
    ),
    Method(
        "static",
        "full tree: WIDTH children each, DEPTH levels",
        "draftree.policies.fixed:StaticTree",
        "Miao et al. 2024 (SpecInfer)",
        "to compare; with schemes that draw children at random",
    ),
    Method(
        "binary",
        "full tree of 2 children each, as deep as the node budget goes (OPT-Tree's baseline)",
        "draftree.policies.fixed:BINARY",
        "Wang et al. 2024 (OPT-Tree)",
        "to compare: OPT-Tree's baseline",
    ),
    Method(
        "eagle",
        "EAGLE's fixed tree of 25 nodes",
        "draftree.policies.fixed:eagle",
        "Li et al. 2024 (EAGLE)",
        "to compare: the fixed tree of EAGLE's authors",
    ),
    Method(
        "sequoia",
        "the best fixed tree for target and drafter, read from the file TREE that 'draftree calibrate' wrote",
        "draftree.policies.fixed:sequoia",
        "Chen et al. 2024 (Sequoia)",
        "a fixed tree of your own two models, after 'draftree calibrate'",
    ),
    Method(
        "dynamic-width",
        "B(H) children at entropy H: 1 below SURE, 2 below UNSURE, else ceil(SLOPE x H) up to WIDTH; DEPTH levels",
        "draftree.papers.entropy_trees:dynamic_width",
        "Gunjur & Waitz",
        f"width by entropy; on a CPU --nodes 4; the paper's large trees: --nodes {MAX_NODES}",
    ),
    Method(
        "dynamic-width-budget",
        "dynamic-width, shrunk so that the node budget lasts to the last level: no children where B(H) exceeds the "
        "rest",
        "draftree.papers.entropy_trees:dynamic_width_budget",
        "Gunjur & Waitz, bounded by us",
        "width by entropy within a node budget",
    ),
    Method(
        "dynamic-width-depth",
        "dynamic-width, and no children at all where the entropy exceeds STOP nats",
        "draftree.papers.entropy_trees:dynamic_width_depth",
        "Gunjur & Waitz",
        "the same, shallower where the drafter is unsure (the rule is ours)",
    ),
    Method(
        "opt-tree",
        "the most probable paths: layer by layer while E(A) gains more than DELTA (auto: what a draft pass costs)",
        "draftree.papers.opt_tree:opt_tree",
        "Wang et al. 2024 (OPT-Tree)",
        "the most tokens a pass from a budget; on a CPU --nodes 4",
    ),
    Method(
        "eagle2",
        "the most probable of all children of a beam of WIDTH nodes, DEPTH levels",
        "draftree.policies.best_paths:Eagle2Tree",
        "Li et al. 2024 (EAGLE-2)",
        "with draft heads, beside opt-tree",
    ),
    Method(
        "hsddw",
        "chain of up to CAP tokens, ended where entropy exceeds the mean of rejected tokens; over 'A>B' it is HSDDW",
        "draftree.papers.hsddw:hsddw",
        "Syu & Lee 2025 (HSDDW)",
        "with a cascade 'A>B', or a chain that needs no measured costs",
    ),
    Method(
        "c2t",
        "nodes that CLASSIFIER ('draftree train classifier') scores BETA or more; WIDTH children, TOP a layer (or "
        "none)",
        "draftree.papers.c2t:c2t",
        "Huo et al. 2025 (C2T)",
        "a trained classifier for your target and head: fewer nodes for the same tokens",
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

    The attribute is a policy, which is copied wherever it is used, or returns one when it is called
    (``Method.attribute``).

    Raises:
        UnknownNameError: there is no such attribute.
        ConfigError: the module cannot be imported.
    """
    if ":" not in text:
        return text
    if text.partition(":")[0] in METHODS:
        raise ConfigError(f"method {text!r} has a setting without a value: write it as KEY=VALUE")
    import_named("method", text, GrowthPolicy)  # type: ignore[type-abstract]
    return Method(text, "", text)
