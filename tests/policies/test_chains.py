"""The dynamic window: tau on scripted entropies and outcomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from draftree.config import Budget
from draftree.drafters.base import DraftSource, Scorer
from draftree.drafters.grow import TreeDrafter
from draftree.errors import ConfigError, UnknownNameError
from draftree.papers.hsddw import DynamicWindow
from draftree.policies.methods import find_policy
from draftree.request import Outcome, Request, StepCost
from draftree.tree import DraftTree

from ..drafters.test_ensemble import request_of
from ..toy import Path, ScriptedScorer

STEP = StepCost(batch=1, draft=1.0, verify=1.0, other=0.0, draft_passes=0)


class Unsure(DraftSource):
    """Says token 0, then 1, ... after every node, with entropies from a script by path."""

    name = "unsure"

    def __init__(self, entropy: Callable[[Path], float]) -> None:
        self.entropy = entropy

    def scorer(self, requests: Sequence[Request], coupled: bool) -> Scorer:
        logprobs = [math.log(0.5**rank) for rank in range(1, 9)]
        return ScriptedScorer(lambda row, path: (range(8), logprobs, self.entropy(path)))

    def close(self, request: Request) -> None: ...


class Script:
    """Drafts for one request and says what became of it."""

    def __init__(self, policy: DynamicWindow, *entropies: float) -> None:
        self.policy, self.request = policy, request_of(1, 2)
        self.source = Unsure(lambda path: 0.0)
        self.drafter = TreeDrafter(policy, self.source)
        if entropies:
            self.distributions(*entropies)

    def distributions(self, *entropies: float) -> None:
        """Entropies of the distributions by depth; the last one goes on."""
        self.source.entropy = lambda path: entropies[min(len(path), len(entropies) - 1)]

    def draft(self, nodes: int = 20) -> DraftTree:
        return self.drafter.propose([self.request], [Budget(nodes)])[0]

    def step(self, accepted: int, nodes: int = 20, ended: bool = False) -> int:
        """Draft; ``accepted`` of it are right. How many were drafted."""
        tree = self.draft(nodes)
        path = list(range(accepted))
        tokens = [*[0] * accepted, 7]
        taken = accepted if ended else len(tokens)
        self.drafter.observe([Outcome(self.request, tree, path, tokens, taken, STEP)])
        return len(tree)

    @property
    def tau(self) -> float:
        return self.policy.threshold(self.request).value


# tau


def test_tau_is_the_mean_entropy_of_rejected_tokens() -> None:
    """The first draft goes to the cap; later ones end with the first token above tau, which is kept."""
    policy = find_policy("hsddw")
    assert isinstance(policy, DynamicWindow)
    script, lengths, taus = Script(policy, 0.1, 0.4, 0.9, 1.6, 2.5), [], []
    for accepted in (2, 0, 3):  # rejected: the token of entropy 0.9, that of 0.1, none
        lengths.append(script.step(accepted))
        taus.append(script.tau)
    script.distributions(0.1, 0.2, 0.3, 2.0)
    lengths.append(script.step(3))  # rejected: 2.0
    taus.append(script.tau)
    assert lengths == [10, 4, 3, 4]
    assert taus == pytest.approx([0.9, (0.9 + 0.1) / 2, (0.9 + 0.1) / 2, (0.9 + 0.1 + 2.0) / 3])


def test_tau_starts_at_the_least_entropy_of_the_first_draft() -> None:
    script = Script(DynamicWindow(None, cap=4), 0.7, 0.3, 0.9, 1.1)
    assert script.tau == math.inf
    assert script.step(4) == 4  # as far as the cap goes, and nothing is rejected
    assert script.tau == pytest.approx(0.3)
    script.distributions(0.2, 0.2, 0.2, 0.2)
    script.step(4)
    assert script.tau == pytest.approx(0.3)


def test_a_rejection_in_the_first_draft_sets_tau() -> None:
    script = Script(DynamicWindow(), 0.7, 0.3, 0.9)
    script.step(2)
    assert script.tau == pytest.approx(0.9)


def test_each_sequence_has_its_own_tau() -> None:
    script = Script(DynamicWindow(start=1.0), 0.5)
    script.step(0)
    other = request_of(4)
    assert (script.tau, script.policy.threshold(other).value) == (0.5, 1.0)


def test_a_sequence_that_ended_within_the_draft_says_nothing() -> None:
    script = Script(DynamicWindow(start=2.0), 0.5)
    script.step(3, ended=True)
    assert script.tau == 2.0


def test_a_mean_of_rejected_tokens_stands_still_where_all_that_is_drafted_is_right() -> None:
    """Tau far too low: one token a draft, all right. That is as published."""
    script = Script(DynamicWindow(start=0.01), 0.3)
    assert [script.step(1) for _ in range(8)] == [1] * 8


# the draft


def test_the_token_that_crossed_is_the_last() -> None:
    assert Script(DynamicWindow(start=0.5), 0.1, 0.5, 0.6, 0.1).step(0) == 3


def test_at_least_one_token_is_drafted() -> None:
    assert Script(DynamicWindow(start=0.0), 3.0).step(0) == 1


@pytest.mark.parametrize("cap", [1, 3, 12])
def test_at_most_the_cap_is_drafted(cap: int) -> None:
    assert Script(DynamicWindow(start=5.0, cap=cap), 0.1).step(0) == cap


def test_the_node_budget_bounds_the_draft_too() -> None:
    assert Script(DynamicWindow(start=5.0), 0.1).step(0, nodes=3) == 3


# bad input


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cap": "100000"}, "cap is 100000"),
        ({"cap": "0"}, "cap is 0"),
        ({"start": "-0.5"}, "start is -0.5"),
        ({"start": "nan"}, "start is nan"),
        ({"start": "low"}, "start is 'low'"),
        ({"share": "0.6"}, "'share'"),
    ],
)
def test_nonsense_is_named_with_a_way_out(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refusal:
        find_policy("hsddw", settings)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["static+hsddw", "hsddw+hsddw"])
def test_no_stop_rule_goes_on_top_of_a_method(name: str) -> None:
    with pytest.raises(UnknownNameError, match="no method"):
        find_policy(name)
