"""Recorded laws: policies grow of them the trees that they grow of the drafter itself; nodes at equal MAL by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from draftree.bench.c2t import Point, _nodes_at, held_against, joined, joint, report
from draftree.bench.grid import Costs, ReadSource, Speed, along, foresight, hindsight
from draftree.bench.recorded import KnownText, Laws, RecordedSource, record
from draftree.config import SamplingParams
from draftree.drafters.base import TreeDrafter
from draftree.drafters.eagle import EagleSource
from draftree.drafters.source import TokenSource
from draftree.models.cost_profile import Point as Size
from draftree.models.cost_profile import Profile
from draftree.models.huggingface import HFModel
from draftree.policies.auto.policy import AutoTree
from draftree.policies.best_paths import Eagle2Tree, OptTree
from draftree.policies.c2t import ClassifierTree
from draftree.policies.classifier import Classifier
from draftree.policies.learned import ScoredAuto
from draftree.policies.methods import find_policy
from draftree.train.replay import Replay

from ..heads import trained
from ..pairs import costs, source, target
from ..tiny import VOCAB

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8]]
POLICIES = [Eagle2Tree(4, 5), OptTree(0.01, 6), ClassifierTree(joint, 0.05, 6, 6, 6), ClassifierTree(joint, 0.05, 1)]


def made(name: str, model: HFModel) -> TokenSource:
    return EagleSource(trained(model), VOCAB) if name == "head" else source(name, model)


@pytest.mark.parametrize("name", ["relative", "lookup", "head"])
def test_trees_of_recorded_laws_are_those_of_the_drafter(name: str, tmp_path: Path) -> None:
    model = target()
    texts = list(record(model, made(name, model), PROMPTS, 16, tmp_path / "new" / "laws.safetensors"))
    assert len(texts) == 2
    again = list(record(model, made(name, model), PROMPTS, 16, tmp_path / "new" / "laws.safetensors"))
    assert [(t.prompt, t.text) for t in again] == [(t.prompt, t.text) for t in texts]
    for policy in POLICIES:
        for known in again:
            drafter = TreeDrafter(policy, made(name, model))
            verifier = model if model.tracks_features else None
            with (
                Replay(drafter, known.prompt, known.text, SamplingParams(), target=verifier) as real,
                Replay(TreeDrafter(policy, RecordedSource(known)), known.prompt, known.text, SamplingParams()) as told,
            ):
                while real.left:
                    (tree, gained), (copy, same) = real.step(8), told.step(8)
                    assert torch.equal(copy.tokens, tree.tokens)
                    assert torch.equal(copy.parents, tree.parents)
                    assert torch.allclose(copy.path_logprobs, tree.path_logprobs, atol=1e-3)
                    assert gained == same


def test_what_was_not_recorded_is_counted_and_has_no_candidates() -> None:
    model = target()
    (known,) = record(model, source("relative", model), PROMPTS[:1], 8)
    whole, missing = held_against(("x", Eagle2Tree(4, 3), 8), [known])
    assert missing == 0
    known.laws = [type(laws)({(): 0}, laws.tokens, laws.logprobs, laws.entropies) for laws in known.laws]
    less, missing = held_against(("x", Eagle2Tree(4, 3), 8), [known])
    assert 0 < missing < 1
    assert int(less.nodes) < int(whole.nodes)


def point(nodes: float, tokens: float) -> Point:
    return Point("p", *(torch.tensor([x, x], dtype=torch.float64) for x in (nodes, 10.0, tokens)))


def test_nodes_at_equal_mal_are_read_between_points() -> None:
    # MAL 1 at 0 nodes, 2 at 20 / 20 = 1 node a token, 3 at 120 / 30 = 4; 2.5 lies half-way: 2.5 nodes a token.
    curve = [point(0, 10), point(20, 20), point(120, 30)]
    weights = torch.ones(1, 2, dtype=torch.float64)
    found = [float(_nodes_at(torch.tensor([x], dtype=torch.float64), curve, weights)) for x in (1.5, 2.5, 3.0, 3.5)]
    assert found[:3] == pytest.approx([0.5, 2.5, 4.0])
    assert math.isnan(found[3])


def test_the_report_says_how_curves_compare(capsys: pytest.CaptureFixture[str]) -> None:
    base = [Point(f"N={n}", *p[1:]) for n, p in ((1, point(10, 15)), (8, point(40, 20)))]
    half = [Point("beta=0.5", *p[1:]) for p in (point(5, 15), point(20, 20))]
    report({"eagle2, N": base, "net, beta": half}, "eagle2, N", ["N=8"])
    printed = capsys.readouterr().out
    assert "1.000 [1.000, 1.000]" in printed
    assert "0.500 [0.500, 0.500]" in printed


def test_auto_decodes_along_recorded_laws_by_the_profiles_seconds() -> None:
    model = target()
    texts = list(record(model, source("self", model), PROMPTS, 16))
    policy = AutoTree(target=costs(1.0), drafter=costs(0.01))
    speeds = along(texts, Costs(costs(1.0), costs(0.01)), policy)
    for speed, known in zip(speeds, texts, strict=True):
        assert speed.tokens == speed.plain == len(known.text) - 1
        assert speed.steps <= speed.seconds < speed.plain  # all that the target drafts for itself is accepted
    assert policy.trust > 0.9


def rising(seconds: float) -> Profile:
    """Each token beyond the first takes a tenth of a pass more."""
    return Profile(costs(1.0).identity, (Size(1, 64, (1, 64), (seconds, 7.3 * seconds)),))


def test_no_policy_is_faster_than_foresight() -> None:
    model = target()
    texts = list(record(model, source("relative", model), PROMPTS, 16))
    for layer in (0.01, 0.2, 2.0):
        machine = Costs(rising(1.0), costs(layer))
        bound = foresight(texts, machine, 8)
        for policy in (
            AutoTree(**machine._asdict()),
            *POLICIES[:2],
            *(find_policy("chain", {"depth": d}) for d in (1, 4)),
        ):
            for least, speed in zip(bound, along(texts, machine, policy), strict=True):
                assert least.seconds <= speed.seconds + 1e-9
                assert least.tokens == speed.tokens
                assert least.plain == pytest.approx(speed.plain)
    assert all(speed.steps == speed.tokens for speed in bound)  # so slow a drafter is not asked


def test_hindsight_takes_the_fastest_method_of_each_text() -> None:
    slow, fast = (Speed(4, 4, seconds, 4.0) for seconds in (3.0, 2.0))
    assert hindsight([[slow, fast], [fast, slow]]) == [fast, fast]
    assert hindsight([[slow, fast]]) == [slow, fast]


def test_foresight_stops_where_the_drafter_is_wrong() -> None:
    """By hand: of the text 5 6 7 8 9 1 the drafter has 6, 7 and 9 right, each below the one before."""
    laws = [
        Laws({(): 0, (6,): 1, (6, 7): 2}, torch.tensor([[6, 2], [3, 7], [4, 4]]), torch.zeros(3, 2), torch.zeros(3)),
        Laws({(): 0}, torch.tensor([[4, 4]]), torch.zeros(1, 2), torch.zeros(1)),
        Laws({(): 0}, torch.tensor([[4, 4]]), torch.zeros(1, 2), torch.zeros(1)),
        Laws({(): 0}, torch.tensor([[9, 4]]), torch.zeros(1, 2), torch.zeros(1)),
    ]
    known = KnownText([1, 2], [5, 6, 7, 8, 9, 1], laws)
    machine = Costs(rising(1.0), costs(0.2))
    (wide,), (narrow,) = (foresight([known], machine, width) for width in (2, 1))
    assert (wide.tokens, wide.steps, wide.plain) == (5, 2, 5.0)
    assert wide.seconds == pytest.approx((1.2 + 2 * 0.2) + (1.1 + 0.2))  # 6 7 and the 8 of the target; 9 and its 1
    assert narrow.seconds == pytest.approx((1.1 + 0.2) + 1.0 + (1.1 + 0.2))  # 7 is its second choice


def test_foresight_verifies_more_nodes_where_that_costs_less() -> None:
    law = Laws({(): 0}, torch.tensor([[6, 2]]), torch.zeros(1, 2), torch.zeros(1))
    dip = Profile(costs(1.0).identity, (Size(1, 64, (1, 2, 4, 64), (1.0, 3.0, 1.5, 9.0)),))
    (found,) = foresight([KnownText([1, 2], [5, 6, 7], [law])], Costs(dip, costs(0.2)), 2)
    assert found.steps == 1
    assert found.seconds == pytest.approx(1.5 + 0.2)


def test_a_model_whose_laws_are_recorded_has_nothing_to_read() -> None:
    """To read the prompt would take longer than to answer it, so that ``auto`` would never ask the model itself."""
    model = target()
    texts = list(record(model, source("self", model), [PROMPTS[0] * 8], 16))
    slow = Profile(costs(1.0).identity, (Size(1, 64, (1, 16, 64), (0.01, 0.01, 100.0)),))
    machine, steps = Costs(costs(1.0), slow), []
    for drafting in (ReadSource(source("self", model)), source("self", model)):
        policy = AutoTree(**machine._asdict())
        policy.prepare(model, [drafting])
        steps.append(along(texts, machine, policy)[0].steps)
    assert steps[0] <= steps[1] / 2
    assert steps[1] == 15


def test_auto_decodes_by_a_classifier_too() -> None:
    """One that finds nothing likely drafts less of what is always right."""
    model = target()
    texts = list(record(model, source("self", model), PROMPTS, 16))
    never = Classifier(("step",), ((0.0,),), (1.0,), (-9.0,), 0.0, given_parent=True)
    machine = Costs(costs(1.0), costs(0.01))
    whole = along(texts, machine, AutoTree(**machine._asdict()))
    less = along(texts, machine, ScoredAuto(**machine._asdict(), classifier=never))
    assert [s.tokens for s in less] == [s.tokens for s in whole]
    assert sum(s.steps for s in less) > sum(s.steps for s in whole)


def test_a_fixed_method_replays_within_its_nodes() -> None:
    model = target()
    texts = list(record(model, source("self", model), PROMPTS, 16))
    machine = Costs(costs(1.0), costs(0.01))
    one, four = (along(texts, machine, OptTree(0.01), nodes) for nodes in (1, 4))
    for short, long, known in zip(one, four, texts, strict=True):
        gained = len(known.text) - 1
        assert short.steps == -(-gained // 2)  # a node and the bonus token
        assert -(-gained // 5) <= long.steps < short.steps


def test_curves_of_several_suites_are_joined_by_prompt() -> None:
    one, two = {"a": [point(1, 10)]}, {"a": [point(3, 30)]}
    (both,) = joined([one, two])["a"]
    assert both.tokens.tolist() == [10, 10, 30, 30]
