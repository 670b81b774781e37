"""Policies along recorded drafts grow the trees that they grow of the drafter itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.c2t import held_against, joint
from benchmarks.recorded import Drafts, KnownText, RecordedSource, record
from benchmarks.replay import Costs, ReadSource, Speed, along, foresight, hindsight, main
from draftree.config import SamplingParams
from draftree.drafters.base import DraftSource
from draftree.drafters.eagle import EagleSource
from draftree.drafters.grow import TreeDrafter
from draftree.engine.replay import Replay
from draftree.models.cost_profile import Point as Size
from draftree.models.cost_profile import Profile
from draftree.models.huggingface.hf_model import HFModel
from draftree.policies.auto.policy import AutoTree
from draftree.policies.best_paths import Eagle2Tree, OptTree
from draftree.policies.c2t import ClassifierTree
from draftree.policies.methods import find_policy

from ..heads import trained
from ..pairs import costs, source, target
from ..tiny import VOCAB, save_tiny

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8]]
POLICIES = [Eagle2Tree(4, 5), OptTree(0.01, 6), ClassifierTree(joint, 0.05, 6, 6, 6), ClassifierTree(joint, 0.05, 1)]


def made(name: str, model: HFModel) -> DraftSource:
    return EagleSource(trained(model), VOCAB) if name == "head" else source(name, model)


@pytest.mark.parametrize("name", ["relative", "lookup", "head"])
def test_trees_of_recorded_drafts_are_those_of_the_drafter(name: str, tmp_path: Path) -> None:
    model = target()
    texts = list(record(model, made(name, model), PROMPTS, 16, tmp_path / "new" / "drafts.safetensors"))
    assert len(texts) == 2
    again = list(record(model, made(name, model), PROMPTS, 16, tmp_path / "new" / "drafts.safetensors"))
    assert [(t.prompt, t.text) for t in again] == [(t.prompt, t.text) for t in texts]
    for policy in POLICIES:
        for known in again:
            drafter = TreeDrafter(policy, made(name, model))
            verifier = model if model.tracked else None
            with (
                Replay(drafter, known.prompt, known.text, SamplingParams(), target=verifier) as real,
                Replay(TreeDrafter(policy, RecordedSource(known)), known.prompt, known.text, SamplingParams()) as told,
            ):
                while real.left:
                    (tree, path), (copy, same) = real.step(8), told.step(8)
                    assert np.array_equal(copy.tokens, tree.tokens)
                    assert np.array_equal(copy.parents, tree.parents)
                    assert np.allclose(copy.path_logprobs, tree.path_logprobs, atol=1e-3)
                    assert path == same


def test_what_was_not_recorded_is_counted_and_has_no_candidates() -> None:
    model = target()
    (known,) = record(model, source("relative", model), PROMPTS[:1], 8)
    whole, missing = held_against(("x", Eagle2Tree(4, 3), 8), [known])
    assert missing == 0
    known.drafts = [Drafts({(): 0}, d.tokens, d.logprobs, d.entropies) for d in known.drafts]
    less, missing = held_against(("x", Eagle2Tree(4, 3), 8), [known])
    assert 0 < missing < 1
    assert int(less.nodes) < int(whole.nodes)


def test_auto_decodes_along_recorded_drafts_by_the_profiles_seconds() -> None:
    model = target()
    texts = list(record(model, source("self", model), PROMPTS, 16))
    policy = AutoTree(target=costs(1.0), drafter=costs(0.01))
    speeds = along(texts, Costs(costs(1.0), costs(0.01)), policy)
    for speed, known in zip(speeds, texts, strict=True):
        assert speed.tokens == speed.ar == len(known.text) - 1
        assert speed.steps <= speed.seconds < speed.ar  # all that the target drafts for itself is accepted


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
            AutoTree(target=machine.target, drafter=machine.drafter),
            *POLICIES[:2],
            *(find_policy("chain", {"depth": d}) for d in (1, 4)),
        ):
            for least, speed in zip(bound, along(texts, machine, policy), strict=True):
                assert least.seconds <= speed.seconds + 1e-9
                assert least.tokens == speed.tokens
                assert least.ar == pytest.approx(speed.ar)
    assert all(speed.steps == speed.tokens for speed in bound)  # so slow a drafter is not used


def test_hindsight_takes_the_fastest_method_of_each_text() -> None:
    slow, fast = (Speed(4, 4, seconds, 4.0) for seconds in (3.0, 2.0))
    assert hindsight([[slow, fast], [fast, slow]]) == [fast, fast]
    assert hindsight([[slow, fast]]) == [slow, fast]


def test_foresight_stops_where_the_drafter_is_wrong() -> None:
    """By hand: of the text 5 6 7 8 9 1 the drafter has 6, 7 and 9 right, each below the one before."""
    drafts = [
        Drafts({(): 0, (6,): 1, (6, 7): 2}, torch.tensor([[6, 2], [3, 7], [4, 4]]), torch.zeros(3, 2), torch.zeros(3)),
        Drafts({(): 0}, torch.tensor([[4, 4]]), torch.zeros(1, 2), torch.zeros(1)),
        Drafts({(): 0}, torch.tensor([[4, 4]]), torch.zeros(1, 2), torch.zeros(1)),
        Drafts({(): 0}, torch.tensor([[9, 4]]), torch.zeros(1, 2), torch.zeros(1)),
    ]
    known = KnownText([1, 2], [5, 6, 7, 8, 9, 1], drafts)
    machine = Costs(rising(1.0), costs(0.2))
    (wide,), (narrow,) = (foresight([known], machine, width) for width in (2, 1))
    assert (wide.tokens, wide.steps, wide.ar) == (5, 2, 5.0)
    assert wide.seconds == pytest.approx((1.2 + 2 * 0.2) + (1.1 + 0.2))  # 6 7 and the 8 of the target; 9 and its 1
    assert narrow.seconds == pytest.approx((1.1 + 0.2) + 1.0 + (1.1 + 0.2))  # 7 is its second choice


def test_foresight_verifies_more_nodes_where_that_costs_less() -> None:
    one = Drafts({(): 0}, torch.tensor([[6, 2]]), torch.zeros(1, 2), torch.zeros(1))
    dip = Profile(costs(1.0).identity, (Size(1, 64, (1, 2, 4, 64), (1.0, 3.0, 1.5, 9.0)),))
    (found,) = foresight([KnownText([1, 2], [5, 6, 7], [one])], Costs(dip, costs(0.2)), 2)
    assert found.steps == 1
    assert found.seconds == pytest.approx(1.5 + 0.2)


def test_a_model_whose_drafts_are_recorded_has_nothing_to_read() -> None:
    """Reading the prompt would take longer than the answer, so that ``auto`` would never draft with that model."""
    model = target()
    texts = list(record(model, source("self", model), [PROMPTS[0] * 8], 16))
    slow = Profile(costs(1.0).identity, (Size(1, 64, (1, 16, 64), (0.01, 0.01, 100.0)),))
    machine, steps = Costs(costs(1.0), slow), []
    for drafting in (ReadSource(source("self", model)), source("self", model)):
        policy = AutoTree(target=machine.target, drafter=machine.drafter)
        policy.prepare(model, [drafting])
        steps.append(along(texts, machine, policy)[0].steps)
    assert steps[0] <= steps[1] / 2
    assert steps[1] == 15


def test_a_fixed_method_replays_within_its_nodes() -> None:
    model = target()
    texts = list(record(model, source("self", model), PROMPTS, 16))
    machine = Costs(costs(1.0), costs(0.01))
    one, four = (along(texts, machine, OptTree(0.01), nodes) for nodes in (1, 4))
    for short, long, known in zip(one, four, texts, strict=True):
        gained = len(known.text) - 1
        assert short.steps == -(-gained // 2)  # a node and the bonus token
        assert -(-gained // 5) <= long.steps < short.steps


@pytest.mark.parametrize("name", ["lookup", "relative"])
def test_a_chain_replays_the_steps_of_its_drafter(name: str) -> None:
    """A sweep over windows records one node a layer, as deep as the largest window."""
    model = target()
    (known,) = record(model, source(name, model), PROMPTS[1:], 24, size=(1, 12))
    for policy in (
        *(find_policy("chain", {"depth": depth}) for depth in (1, 5)),
        find_policy("hsddw", {"cap": 8, "start": "0.5"}),
    ):
        (speed,) = along([known], Costs(costs(1.0), None, 1), policy)
        drafter, steps = TreeDrafter(policy, source(name, model)), 0
        with Replay(drafter, known.prompt, known.text, SamplingParams()) as real:
            while real.left:
                real.step(31)
                steps += 1
        assert speed.steps == steps
        assert speed.seconds == pytest.approx(steps)  # drafting is free


def test_the_command_prints_speeds_and_categories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, suite = save_tiny(tmp_path / "tiny"), tmp_path / "own.jsonl"
    suite.write_text("".join(f'{{"prompt": "the cat {word}", "category": "{word}"}}\n' for word in ("hat", "one")))
    shape = ["--target", str(model), "--drafter", "self", "--suites", str(suite), "--max-tokens", "8"]
    main([*shape, "--methods", "auto,chain:depth=2", "--categories", "--beam", "2", "--layers", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if " MAL " in line} == {"auto", "chain:depth=2", "hindsight", "foresight"}
    assert [cell.strip() for cell in lines[-6].split("|")[1:-1]] == ["method", "hat", "one"]
