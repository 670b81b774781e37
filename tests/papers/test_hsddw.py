"""HSDDW as published: both thresholds are plain means of rejected entropies, by hand-computed runs of two levels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from draftree.config import MAX_NODES, Budget, SamplingParams
from draftree.drafters.base import DraftSource, Scorer
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.registry import load_drafter
from draftree.drafters.spec import DrafterSpec
from draftree.engine.engine import load_engine
from draftree.engine.speculation import SpeculationParams
from draftree.models.base import LanguageModel
from draftree.models.cost_profile import Profile
from draftree.models.huggingface.hf_loading import load_huggingface
from draftree.papers.cascade import CascadeSource, LoopBack, read_stages
from draftree.papers.hsddw import DynamicWindow
from draftree.policies.fixed import CHAIN, StaticTree
from draftree.policies.methods import find_policy
from draftree.request import Outcome, Request, StepCost

from ..drafters.test_ensemble import request_of
from ..pairs import costs
from ..tiny import save_tiny
from ..toy import Path as Nodes
from ..toy import ScriptedScorer

STEP = StepCost(batch=1, draft=1.0, verify=1.0, other=0.0, draft_passes=0)
Rule = Callable[[Nodes], tuple[int, float]]
"""Path from the root -> the next token, and the entropy of its distribution."""


class Scripted(DraftSource):
    """Predicts by a rule, which may be replaced between steps."""

    name = "scripted"

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def scorer(self, requests: Sequence[Request], coupled: bool) -> Scorer:
        def script(row: int, path: Nodes) -> tuple[list[int], list[float], float]:
            token, entropy = self.rule(path)
            return [token], [math.log(0.9)], entropy

        return ScriptedScorer(script)

    def close(self, request: Request) -> None: ...


class Levels:
    """M1 and M2 by rules, their settings by a drafter's name, and a target by a script."""

    def __init__(self, name: str, lower: Rule, upper: Rule) -> None:
        window, loop_back = read_stages(*DrafterSpec.parse(name).stages)
        assert isinstance(window, DynamicWindow)
        self.request, self.window = request_of(1, 2), window
        self.lower, self.upper = Scripted(lower), Scripted(upper)
        self.source = CascadeSource(self.lower, self.upper, window, loop_back)
        self.drafter = TreeDrafter(CHAIN, self.source)
        self.drafter.open(self.request)

    def step(self, accepted: int, nodes: int = 20) -> list[int]:
        """The tokens of a run, of which the target accepts the first ones."""
        tree = self.drafter.propose([self.request], [Budget(nodes)])[0]
        tokens = [*tree.tokens[:accepted], 7]
        self.drafter.observe([Outcome(self.request, tree, list(range(accepted)), tokens, len(tokens), STEP)])
        drafted: list[int] = tree.tokens
        return drafted

    @property
    def taus(self) -> tuple[float, float]:
        return self.window.threshold(self.request).value, self.source.threshold(self.request).value

    @property
    def proposed(self) -> int:
        """Tokens that M1 has proposed so far."""
        return int(self.request.stats.figures["stages"][0].proposed)


def by_depth(entropies: Sequence[float], odd: dict[Nodes, int] | None = None) -> Rule:
    """Token 1, but for some paths; entropies by depth, the last one goes on."""
    return lambda path: ((odd or {}).get(path, 1), entropies[min(len(path), len(entropies) - 1)])


LOWER = by_depth([0.5, 0.3, 0.8, 0.6, 0.9, 0.2])


def runs(name: str) -> tuple[Levels, list[tuple[float, float]]]:
    """Two runs, and both thresholds after each.

    Run 1: M1 drafts 10 tokens (tau1 is not known), M2 rejects the third (0.8), and gives 2. M2 is sure (tau2 is not
    known): M1 drafts 1, 1 below, the second above tau1 = 0.8. M2 accepts both and adds a token; the run has 6 tokens,
    more than 5. The target rejects the fourth: M2's entropy there was 0.4.

    Run 2: M2 rejects M1's first token (0.5). It is sure (0.1): M1 drafts two tokens more, M2 adds one, at 0.9 above
    tau2, so that the run ends. The target rejects this one.
    """
    levels = Levels(name, LOWER, by_depth([0.1, 0.2, 0.3, 0.4, 0.7], {(1, 1): 2}))
    taus = []
    assert levels.step(3) == [1, 1, 2, 1, 1, 1]
    assert levels.proposed == 10 + 2
    taus.append(levels.taus)
    levels.upper.rule = by_depth([0.1, 0.2, 0.3, 0.9], {(): 2})
    assert levels.step(3) == [2, 1, 1, 1]
    taus.append(levels.taus)
    return levels, taus


def test_both_thresholds_are_plain_means_of_rejected_entropies() -> None:
    levels, taus = runs("scripted:method=hsddw>scripted:pending=5:rejected=on")
    assert taus[0] == pytest.approx((0.8, 0.4))
    assert taus[1] == pytest.approx(((0.8 + 0.5) / 2, (0.4 + 0.9) / 2))
    assert levels.proposed == 10 + 2 + 5 + 2  # in run 2 up to the first entropy above 0.8, then above 0.65


def test_tau2_starts_at_the_least_entropy_of_the_first_run() -> None:
    """Entropies of M2 behind tokens of M1 that it had rejected were counted, though they are of no run."""
    upper = by_depth([0.3, 0.2, 0.25, 0.4], {(1, 1): 2})
    levels = Levels(
        "scripted:method=hsddw>scripted:pending=5:rejected=on",
        LOWER,
        lambda path: (upper(path)[0], 0.01 if path[:3] == (1, 1, 1) else upper(path)[1]),
    )
    assert levels.taus[1] == math.inf
    assert levels.step(6) == [1, 1, 2, 1, 1, 1]
    assert levels.taus[1] == pytest.approx(0.2)


def test_a_token_that_the_upper_level_gives_in_place_of_another_ends_the_run() -> None:
    """M2 gives 2 for M1's third token, and the target rejects the second, at 0.2. In the second run M1 drafts up to its
    first entropy above 0.8, M2 accepts all five tokens and adds one, at 0.9 above tau2; the target accepts all."""
    levels = Levels("scripted:method=hsddw>scripted", LOWER, by_depth([0.1, 0.2, 0.3, 0.4, 0.7], {(1, 1): 2}))
    assert levels.step(1) == [1, 1, 2]
    levels.upper.rule = by_depth([0.1, 0.1, 0.1, 0.1, 0.1, 0.9])
    assert levels.step(6) == [1] * 6
    assert levels.taus == pytest.approx((0.8, 0.2))
    assert levels.proposed == 10 + 5


@pytest.mark.parametrize(("entropy", "rounds"), [(0.5, 2), (0.51, 1)])
def test_looping_back_ends_above_tau2(entropy: float, rounds: int) -> None:
    levels = Levels("scripted:method=hsddw:cap=3>scripted:tau=0.5", LOWER, by_depth([0.1, 0.1, 0.1, entropy, 9.0]))
    levels.step(0)
    assert levels.request.stats.figures["stages"][1].rounds == rounds


def test_a_pending_run_of_50_tokens_is_not_drafted_further() -> None:
    """Rounds begin after 0, 11, 22, 33 and 44 tokens: M1's ten and M2's own; the run of 55 goes to the target."""
    levels = Levels("scripted:method=hsddw>scripted", by_depth([0.0]), by_depth([0.0]))
    assert len(levels.step(0, nodes=200)) == 55
    assert levels.request.stats.figures["stages"][1].rounds == 5


# by name, from Python and the command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models with fewer weights cost less."""

    def found(model: LanguageModel) -> Profile:
        return costs(1e-9 * model.capabilities.parameters)

    monkeypatch.setattr("draftree.drafters.default.profile_of", found)


def loaded(name: str, method: str, model: LanguageModel) -> tuple[TreeDrafter, CascadeSource]:
    made = load_drafter(name, model, find_policy(method))
    assert isinstance(made, TreeDrafter)
    assert isinstance(made.source, CascadeSource)
    return made, made.source


def test_the_method_hsddw_over_a_cascade_is_the_published_one(folder: Path) -> None:
    """One method name sets all: M1's window, and a run that tau2 and its cap alone end."""
    made, source = loaded("lookup>self", "hsddw", load_huggingface(str(folder)))
    assert made.policy == StaticTree(1, MAX_NODES)
    assert source.policy == DynamicWindow(None, 10)
    assert source.settings == LoopBack(None, 50)


def test_a_level_with_a_method_of_its_own_keeps_it(folder: Path) -> None:
    model = load_huggingface(str(folder))
    for below in ("lookup:method=static:depth=2", "lookup:cap=7"):
        _, source = loaded(f"{below}>self", "hsddw", model)
        assert source.policy == read_stages(*DrafterSpec.parse(f"{below}>self").stages)[0]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", ["lookup", "self", "lookup>self", "lookup:method=hsddw:start=1>self"])
def test_ids_are_those_of_autoregressive_decoding(folder: Path, drafter: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5)
    prompts = ["the rain is in", "a rose is a rose is a"]
    want = [g.token_ids for g in load_engine(str(folder), SpeculationParams(drafter="none")).generate(prompts, params)]
    engine = load_engine(str(folder), SpeculationParams(drafter=drafter, method="hsddw"))
    assert [g.token_ids for g in engine.generate(prompts, params)] == want
