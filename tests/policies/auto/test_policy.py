"""``auto`` on synthetic costs whose best tree is known, and what it learns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from draftree.config import Budget, SamplingParams
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.grow import TreeDrafter, grow
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.errors import ConfigError
from draftree.models.base import prefill
from draftree.models.cost_profile import Identity, Point, Profile
from draftree.policies.auto import AutoPlan, AutoTree
from draftree.request import Outcome, Request, Stats, StepCost
from draftree.tree import DraftTree

from ...pairs import begun
from ...toy import Path, ScriptedScorer, ToyModel

ME = Identity("toy", "ToyModel", 1, "stock", "float32", "", "eager", "cpu", "toy 1", "torch", 1)
NODES = 24


def costs(seconds: Callable[[int], float]) -> Profile:
    sizes = tuple(range(1, NODES + 2))
    return Profile(ME, (Point(1, 64, sizes, tuple(seconds(n) for n in sizes)),))


class Fake(Request):
    """A request with nothing but its tokens."""

    def __init__(self) -> None:
        self.ids = [0] * 64
        self.prompt_length = 64
        self.limit = 10**6
        self.stats = Stats(steps=1)


def decode(
    policy: AutoTree,
    steps: int,
    says: float,
    true: float,
    seed: int = 0,
    batch: int = 1,
    real: Profile | None = None,
    layer: float = 0.0,
) -> list[int]:
    """How many nodes each step verifies, when the drafter says ``says`` of each token of a chain and ``true`` holds.

    Of a batch: how many in all. Passes cost what the policy's own profile says, or what ``real`` says;
    drafting takes ``layer`` seconds a token.
    """
    profile = real or policy.target
    assert profile is not None
    rng, requests = Random(seed), [Fake() for _ in range(batch)]
    chosen = []
    script = lambda row, path: ([len(path) + 1], [math.log(says)], 1.0)  # noqa: E731
    for _ in range(steps):
        plan = policy.plan(requests, [Budget(NODES)] * batch)
        trees = [g.tree for g in grow(ScriptedScorer(script), policy, plan)]
        outcomes = []
        draft = 1e-6 + layer * max(map(len, trees))
        cost = StepCost(batch, draft, profile.seconds(1 + sum(map(len, trees)) / batch, 64, batch), 0.0, 0)
        for request, tree in zip(requests, trees, strict=True):
            luck = 0
            while rng.random() < true:
                luck += 1
            path = list(range(min(luck, len(tree))))
            # behind a chain that is right throughout, the target may say what the drafter would have said next
            tokens = [n + 1 for n in path] + [len(path) + 1 if luck > len(tree) else -1]
            outcomes.append(Outcome(request, tree, path, tokens, len(tokens), cost))
        policy.observe(plan, outcomes)
        chosen.append(sum(map(len, trees)))
    return chosen


def rate(seconds: Callable[[int], float], true: float, nodes: int) -> float:
    """Tokens a second of chains of ``nodes`` tokens that are accepted with probability ``true`` each."""
    return sum(math.pow(true, d) for d in range(nodes + 1)) / seconds(nodes + 1)


def best(seconds: Callable[[int], float], true: float) -> int:
    """The length of chain with the highest rate."""
    return max(range(NODES), key=lambda n: rate(seconds, true, n))


CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda n: 1.0,
    "linear": lambda n: 1.0 * n,
    "affine": lambda n: 1.0 + 0.1 * n,
    "steep": lambda n: 0.3 + 0.4 * n,
    "stepped": lambda n: 1.0 + 0.6 * ((n - 1) // 8),
    "uneven": lambda n: {1: 1.0, 2: 1.6, 3: 1.7, 4: 1.5}.get(n, 1.4 if n <= 8 else 1.5 + 0.05 * n),
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("true", [0.3, 0.8])
def test_the_best_length_is_found(curve: str, true: float) -> None:
    seconds = CURVES[curve]
    policy = AutoTree(depth=NODES, target=costs(seconds))
    late = decode(policy, 400, says=true, true=true)[200:]
    got = sum(rate(seconds, true, n) * seconds(n + 1) for n in late) / sum(seconds(n + 1) for n in late)
    assert got >= 0.97 * rate(seconds, true, best(seconds, true)), f"{late[-20:]} where {best(seconds, true)} is best"


def test_a_dent_in_the_curve_does_not_hide_what_lies_behind_it() -> None:
    """llama.cpp's kernels for Q4_K take 1.5 times as long for 8 tokens as for 7, and hardly more for 16."""
    kernels = costs(lambda n: 1 + 0.67 * (n - 1) if n < 8 else 7.5 + 0.25 * (n - 8))
    assert decode(AutoTree(depth=NODES, target=kernels), 120, 0.99, 0.99)[-1] >= 14


def test_on_a_flat_curve_all_that_may_be_accepted_is_verified() -> None:
    assert decode(AutoTree(depth=NODES, target=costs(CURVES["flat"])), 50, 0.9, 0.9)[-1] >= 16


@pytest.mark.parametrize("true", [0.2, 0.5, 0.9, 0.99])
def test_where_each_token_costs_as_much_as_a_pass_nothing_is_verified(true: float) -> None:
    assert set(decode(AutoTree(target=costs(CURVES["linear"])), 200, true, true)[20:]) == {0}


def test_on_a_stepped_curve_trees_end_at_an_edge() -> None:
    late = decode(AutoTree(depth=NODES, target=costs(CURVES["stepped"])), 300, 0.8, 0.8)[100:]
    assert all(n % 8 == 7 or n == 0 for n in late)
    assert late.count(0) <= len(late) / 16  # AR passes, to compare with


def test_an_overconfident_drafter_is_found_out() -> None:
    seconds = CURVES["affine"]
    chosen = decode(AutoTree(target=costs(seconds)), 300, says=0.9, true=0.3)
    assert chosen[0] > best(seconds, 0.3)
    assert sum(chosen[200:]) / 100 <= best(seconds, 0.3) + 2


def test_a_modest_drafter_is_found_out() -> None:
    seconds = CURVES["affine"]
    chosen = decode(AutoTree(target=costs(seconds), depth=NODES), 300, says=0.3, true=0.9)
    assert sum(chosen[200:]) / 100 >= 0.7 * best(seconds, 0.9)


def test_a_machine_that_is_slower_throughout_changes_nothing() -> None:
    seconds = CURVES["stepped"]
    as_kept, slower = (
        decode(AutoTree(target=costs(seconds)), 80, 0.8, 0.8, real=costs(real))
        for real in (seconds, lambda n: 3 * seconds(n))
    )
    assert as_kept == slower


def test_sequences_of_a_batch_share_the_size_of_the_pass() -> None:
    policy = AutoTree(target=costs(CURVES["stepped"]), depth=NODES)
    late = Counter(decode(policy, 300, 0.9, 0.9, batch=3)[100:])
    # 16 tokens, an edge; or four layers and no fifth, of which each node is likely to be worth what it costs, 0.61
    assert late[13] + late[12] >= 0.7 * late.total()
    assert late.keys() <= {0, 5, 12, 13, 21} and late[0] <= 4, "nothing but edges, and some AR passes to compare with"


def test_a_size_that_the_pool_does_not_have_is_not_chosen() -> None:
    """The best of all sizes was clipped to the pool, and could be a dent's expensive neighbour."""
    policy = AutoTree(target=costs(lambda n: {1: 1.0, 2: 2.0}.get(n, 1.1)), depth=1, width=1)
    assert set(decode(policy, 60, 0.6, 0.6)) == {0}


def test_batches_keep_what_a_single_sequence_keeps() -> None:
    """The threshold was B times too high."""
    seconds = lambda n: 1.0 + 0.005 * n  # noqa: E731
    one, many = (decode(AutoTree(target=costs(seconds)), 40, 0.7, 0.7, batch=b)[-1] for b in (1, 8))
    assert many >= 8 * 0.5 * one > 0


def test_a_policy_that_has_learned_for_other_models_is_refused() -> None:
    flat = costs(lambda n: 1.0)
    policy = AutoTree(target=flat)
    policy.prepare(ToyModel(5), [])
    policy.prepare(ToyModel(5), [])
    with pytest.raises(ConfigError, match="other models"):
        policy.prepare(ToyModel(4), [])


class TestWithADraftingModel:
    def policy(self, layer: float) -> AutoTree:
        return AutoTree(target=costs(lambda n: 1.0 + 0.02 * n), drafter=costs(lambda n: layer))

    def test_a_cheap_one_drafts(self) -> None:
        assert decode(self.policy(0.05), 200, 0.9, 0.9)[-1] >= 4

    def test_layers_that_take_less_than_single_passes_are_found_out(self) -> None:
        """Passes one after the other find weights in the processor's caches; a profile's come after others."""
        as_told, sooner = (
            sum(decode(self.policy(0.5), 300, 0.95, 0.95, layer=real)[100:]) / 200 for real in (0.5, 0.25)
        )
        assert sooner > 1.2 * as_told

    def test_one_that_can_never_pay_is_never_asked(self) -> None:
        policy = self.policy(1.1)
        assert set(decode(policy, 100, 0.99, 0.99)) == {0}
        assert policy.plan([Fake()], [Budget(NODES)]).budgets[0].nodes == 0

    def test_where_nothing_pays_that_is_settled_anew_at_times_and_with_a_new_request(self) -> None:
        policy, old, new = self.policy(1.1), Fake(), Fake()
        new.stats.steps = 0

        def settles(*requests: Request) -> bool:
            plan = policy.plan(requests, [Budget(NODES)] * len(requests))
            outcomes = [
                Outcome(request, DraftTree.empty(), [], [1], 1, StepCost(len(requests), 0.0, 1.0, 0.0, 0))
                for request in requests
            ]
            policy.observe(plan, outcomes)
            return isinstance(plan, AutoPlan)

        settled = [settles(old) for _ in range(17)]
        assert [step for step, anew in enumerate(settled) if anew] == [0, 8, 16]
        assert not settles(old) and settles(old, new) and not settles(old)
        assert policy.report.steps == 20, "steps in which it rests count"

    def test_one_that_is_mostly_wrong_is_asked_less_and_less(self) -> None:
        policy, asked = self.policy(0.3), 0
        for step in range(300):
            request = Fake()
            plan = policy.plan([request], [Budget(NODES)])
            asked += bool(plan.budgets[0].nodes) and step >= 100
            script = lambda row, path: ([7], [math.log(0.9)], 1.0)  # noqa: E731
            tree = grow(ScriptedScorer(script), policy, plan)[0].tree
            policy.observe(plan, [Outcome(request, tree, [], [1], 1, StepCost(1, 0.3, 1.0, 0.0, 1))])
        assert 0 < asked <= 8

    def test_it_is_asked_about_few_nodes_and_layers_where_many_candidates_share_the_distribution(self) -> None:
        asked: Counter[int] = Counter()

        def script(row: int, path: Path) -> tuple[list[int], list[float], float]:
            asked[len(path)] += 1
            return [1, 2, 3, 4, 5, 6], [math.log(p) for p in (0.35, 0.2, 0.12, 0.1, 0.08, 0.05)], 1.8

        policy = AutoTree(target=costs(lambda n: 0.9 + 0.1 * n), drafter=costs(lambda n: 0.12))
        tree = grow(ScriptedScorer(script), policy, policy.plan([Fake()], [Budget(NODES)]))[0].tree
        assert 2 <= len(tree) <= 5
        assert asked[0] == 1
        assert asked[1] <= 3  # of six: the others can have no child that is verified
        assert asked[2] == 0  # the second layer's nodes are hardly better than the first's last

    @pytest.mark.parametrize(("left", "fed"), [(5, False), (400, True)])
    def test_a_long_prompt_is_fed_where_the_answer_may_pay_for_it(self, left: int, fed: bool) -> None:
        target, model = (ToyModel(max_length=600) for _ in range(2))
        policy = AutoTree(target=costs(lambda n: 1.0), drafter=costs(lambda n: 0.05 * n))
        drafter = TreeDrafter(policy, ModelSource(model, 5))
        engine = Engine(target, Speculation(drafter, 4))
        request = begun(
            engine.stepper, engine.request([1, 2, 3] * 40, SamplingParams(max_tokens=left, ignore_eos=True))
        )
        engine.stepper.step([request])
        engine.stepper.close(request)
        assert (drafter.passes > 0) == fed

    def test_the_prompt_is_not_even_fed_to_one_that_cannot_pay(self) -> None:
        target, model = ToyModel(), ToyModel()
        flat = costs(lambda n: 1.0)
        engine = Engine(
            target, Speculation(TreeDrafter(AutoTree(target=flat, drafter=costs(lambda n: 2.0)), ModelSource(model, 5)))
        )
        engine.generate([[1, 2, 3]])
        assert prefill(model, [1]).number == 0
        assert not model._nodes[model._rows[0]]
        assert engine.speculation.drafter.passes == 0


def test_a_policy_without_costs_says_how_to_get_them() -> None:
    with pytest.raises(ConfigError, match="to an Engine"):
        AutoTree().plan([Fake()], [Budget(3)])


def test_bounds_below_1_are_refused() -> None:
    with pytest.raises(ConfigError, match="width is 0"):
        AutoTree(width=0)
    with pytest.raises(ConfigError, match="depth is 0"):
        AutoTree(depth=0)


def test_the_report_says_what_was_gained_and_what_it_cost() -> None:
    policy = AutoTree(target=costs(CURVES["stepped"]))
    assert "not decoded anything" in policy.report.text()
    decode(policy, 50, 0.8, 0.8)
    for words in ("auto: ", "tokens a step", "passes of AR decoding", "of 50 steps drafted", "tokens accepted a step"):
        assert words in policy.report.text()


def test_choosing_never_breaks_a_tree() -> None:
    def script(row: int, path: Path) -> tuple[list[int], list[float], float]:
        rng = Random(f"{row} {path}")
        distribution = sorted((rng.random() for _ in range(4)), reverse=True)
        return [rng.randrange(1000) for _ in distribution], [math.log(x / sum(distribution)) for x in distribution], 1.0

    policy = AutoTree(target=costs(CURVES["affine"]))
    for seed in range(30):
        requests = [Fake(), Fake()]
        plan = policy.plan(requests, [Budget(9), Budget(5, 2)])
        trees = [g.tree for g in grow(ScriptedScorer(script), policy, plan)]
        assert len(trees[0]) <= 9 and len(trees[1]) <= 5 and trees[1].depth <= 2
        outcomes = [
            Outcome(s, t, [], [seed], 1, StepCost(2, 0.0, 1.0, 0.0, 0)) for s, t in zip(requests, trees, strict=True)
        ]
        policy.observe(plan, outcomes)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_best_path_of_every_sequence_is_drafted_on(batch: int) -> None:
    """A node's price is for one in each request: against one request's path it counted for all of them."""
    passes = tuple(0.02 * n for n in range(1, NODES + 2))
    wide = Profile(
        ME, tuple(Point(b, 64, tuple(range(1, NODES + 2)), tuple(b * s for s in passes)) for b in (1, batch))
    )
    flat = Profile(ME, tuple(Point(b, 64, (1, NODES + 1), (1.0, 1.0)) for b in (1, batch)))
    policy = AutoTree(target=flat, drafter=wide)
    plan = policy.plan([Fake() for _ in range(batch)], [Budget(NODES)] * batch)
    distributions = [
        0.9,
        *[0.5] * (batch - 1),
    ]  # all but the first are less sure, and still worth a pass that is nearly free
    script = lambda row, path: ([len(path) + 1], [math.log(distributions[row])], 1.0)  # noqa: E731
    trees = [g.tree for g in grow(ScriptedScorer(script), policy, plan)]
    assert all(len(tree) > 1 for tree in trees)
