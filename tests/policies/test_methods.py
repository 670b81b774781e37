"""Growth policies by name: settings from text, and what is said about a name or value that cannot be."""

from __future__ import annotations

import math

import pytest

from draftree.config import DEFAULT_NODES, MAX_NODES, Budget
from draftree.drafters.grow import grow
from draftree.engine.engine import Engine
from draftree.engine.speculation import SpeculationParams
from draftree.errors import ConfigError, UnknownNameError
from draftree.papers.entropy_trees import BranchingSteps, EntropyStop, EntropyTree
from draftree.papers.hsddw import DynamicWindow
from draftree.policies.base import GrowthPolicy
from draftree.policies.fixed import StaticTree
from draftree.policies.methods import DEFAULT_METHOD, METHODS, find_method, find_policy

from ..drafters.test_ensemble import request_of
from ..toy import ScriptedScorer, ToyModel

NUMBERS = [
    (m.name, key, value) for m in METHODS.values() for key, value in m.settings.items() if not isinstance(value, str)
]


@pytest.mark.parametrize("name", sorted({*METHODS} - {"auto", "sequoia"}))
def test_every_method_drafts_with_its_defaults(name: str) -> None:
    policy = find_policy(name)
    scorer = ScriptedScorer(lambda row, path: (range(7), [-0.5] * 7, 0.5))
    tree = grow(scorer, policy, policy.plan([request_of(1)], [Budget(12)]))[0].tree
    assert 4 <= len(tree) <= 12


MOST = 64
"""Nodes of a step that a newcomer may wait for: a pass over so many tokens costs about ten of one on two cores."""


def widest(name: str, nodes: int, entropy: float) -> int:
    """Nodes that a method drafts with its default settings where every node has many candidates."""
    policy = find_policy(name)
    scorer = ScriptedScorer(lambda row, path: (range(64), [-0.05 - 0.05 * rank for rank in range(64)], entropy))
    return len(grow(scorer, policy, policy.plan([request_of(1)], [Budget(nodes)]))[0].tree)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_drafts_few_nodes_a_step_by_default(name: str) -> None:
    """``dynamic-width`` drafted 5,234 nodes and took 84 s for 12 tokens."""
    nodes = METHODS[name].nodes
    assert nodes <= MOST
    if name not in ("auto", "sequoia"):  # which need the costs of a machine, and a file
        assert max(widest(name, nodes, entropy) for entropy in (0.01, 0.5, 1.7, 5.0)) <= nodes


def test_the_papers_setting_is_there_by_its_budget() -> None:
    assert widest("dynamic-width", MAX_NODES, 1.7) > 1000
    assert f"--nodes {MAX_NODES}" in METHODS["dynamic-width"].use


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("chain", StaticTree(width=1, depth=4)),
        ("early-stop", EntropyStop(stop=1.0, width=1)),
        ("naive-width", EntropyStop(stop=1.0, width=4)),
        ("static", StaticTree(width=2, depth=4)),
        ("hsddw", DynamicWindow(start=None, cap=10)),
        ("dynamic-width", EntropyTree(BranchingSteps(0.02, 1.0, 4.0, 7), None, width=7, depth=4)),
        ("dynamic-width-depth", EntropyTree(BranchingSteps(0.02, 1.0, 4.0, 7, 1.75), None, width=7, depth=8)),
    ],
)
def test_the_defaults_are_the_papers(name: str, policy: GrowthPolicy) -> None:
    assert find_policy(name) == policy


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_in_one_line_what_it_does(name: str) -> None:
    assert METHODS[name].summary and "\n" not in METHODS[name].summary


def another(default: float) -> float:
    """A value that a setting can take as well."""
    if default == math.inf:
        return 7.0
    return default + 1 if isinstance(default, int) else default / 2


@pytest.mark.parametrize(("name", "key", "default"), NUMBERS)
def test_every_number_is_read_from_text(name: str, key: str, default: float) -> None:
    assert find_policy(name, {key: str(another(default))}) == find_policy(name, {key: another(default)})


@pytest.mark.parametrize(("name", "key", "default"), NUMBERS)
def test_every_number_changes_the_policy(name: str, key: str, default: float) -> None:
    assert find_policy(name, {key: another(default)}) != find_policy(name)


def test_sequoia_alone_needs_a_setting() -> None:
    assert [m.name for m in METHODS.values() if "" in m.settings.values()] == ["sequoia"]
    with pytest.raises(ConfigError, match="sequoia .*'draftree calibrate' .* --set tree=FILE"):
        find_policy("sequoia")


def test_a_threshold_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match="delta is 'much': .*0 and 1, .*'auto'"):
        find_policy("opt-tree", {"delta": "much"})


def test_the_default_method_and_node_budget_are_possible() -> None:
    assert DEFAULT_METHOD in METHODS
    assert Budget(DEFAULT_NODES).nodes == DEFAULT_NODES


def test_a_misspelt_method_is_answered_with_the_nearest_and_all_names() -> None:
    with pytest.raises(UnknownNameError) as error:
        find_method("dynamic-widht")
    assert "no method 'dynamic-widht': did you mean dynamic-width? choose from " in str(error.value)
    assert ", ".join(METHODS) in str(error.value)


def test_a_method_like_no_other_is_answered_with_all_names() -> None:
    with pytest.raises(UnknownNameError) as error:
        find_policy("zzz")
    assert str(error.value) == f"no method 'zzz': choose from {', '.join(METHODS)}"


@pytest.mark.parametrize("name", METHODS)
def test_an_unknown_setting_is_answered_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} .*'breadth': .*{', '.join(METHODS[name].settings) or 'none'}"):
        find_policy(name, {"breadth": 3})


@pytest.mark.parametrize(
    ("name", "key", "text", "said"),
    [
        ("static", "width", "two", "width is 'two': .*static"),
        ("static", "depth", "2.5", "depth is '2.5': .*static"),
        ("early-stop", "stop", "soon", "stop is 'soon': .*early-stop"),
        ("early-stop", "stop", "", "stop is '': .*early-stop"),
        ("static", "width", "0", "width is 0"),
        ("chain", "depth", "-1", "depth is -1"),
        ("dynamic-width", "width", "65", "width is 65"),
        ("dynamic-width-depth", "stop", "nan", "stop is nan"),
    ],
)
def test_a_value_that_does_not_do_is_named(name: str, key: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_policy(name, {key: text})


def test_a_ready_policy_is_taken_as_it_is() -> None:
    policy = StaticTree(3, 2)
    assert find_policy(policy) is policy


def test_settings_beside_a_ready_policy_are_refused() -> None:
    with pytest.raises(ConfigError, match="{'depth': 3}"):
        find_policy(StaticTree(3, 2), {"depth": 3})


@pytest.mark.parametrize("value", [2.7, float("inf"), float("nan"), None])
def test_a_number_that_is_not_whole_is_refused_where_a_whole_one_is_needed(value: float) -> None:
    with pytest.raises(ConfigError, match="width"):
        find_policy("static", {"width": value})
    with pytest.raises(ConfigError, match="width"):
        StaticTree(width=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted({*METHODS} - {"sequoia", "c2t"}))
def test_params_give_each_engine_a_policy_of_its_own(name: str) -> None:
    """The second engine of the same params was refused, or reset what the first one's policy had learned."""
    params, models = SpeculationParams(drafter="lookup", method=name), [ToyModel(5), ToyModel(6), ToyModel(6)]
    policies = [Engine(model, params).speculation.drafter.policy for model in models]
    assert len({*map(id, policies)}) == len(models)


def test_a_policy_that_is_given_is_every_engines() -> None:
    given = StaticTree(2, 3)
    params = SpeculationParams(drafter="lookup", method=given)
    assert all(Engine(ToyModel(vocab), params).speculation.drafter.policy is given for vocab in (5, 6))
