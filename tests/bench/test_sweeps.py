"""Sweeps over windows and sets of layers: what is recorded once gives what drafting again would have given."""

from __future__ import annotations

import pytest

from draftree.bench.layers import agreement, leave_out, name_of
from draftree.bench.windows import Costs, Text, record, replay
from draftree.config import SamplingParams
from draftree.drafters.base import TreeDrafter
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.ngram import NgramSource
from draftree.drafters.spec import layers_of
from draftree.engine import Engine
from draftree.models.huggingface import HFModel
from draftree.policies.entropy import StaticTree
from draftree.policies.methods import find_policy
from draftree.train.replay import Replay

from ..pairs import costs, relative, target
from ..tiny import VOCAB

PROMPT = [31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8]


def drafter(name: str) -> TreeDrafter:
    source = NgramSource(1) if name == "lookup" else ModelSource(HFModel(relative(), self_test=False), VOCAB)
    return TreeDrafter(StaticTree(1, 8), source)


@pytest.mark.parametrize("name", ["lookup", "relative"])
@pytest.mark.parametrize(
    ("method", "settings"),
    [("chain", {"depth": 1}), ("chain", {"depth": 5}), ("hsddw", {"cap": 8, "start": "0.5", "share": 0.6})],
)
def test_a_window_on_recorded_chains_gains_what_it_gains_with_its_drafter(
    name: str, method: str, settings: dict[str, float]
) -> None:
    model = target()
    answer = Engine(model).generate([PROMPT], SamplingParams(max_tokens=40))[0].token_ids
    text = Text("", PROMPT, answer)
    found = replay(
        text, record(model, drafter(name), text, 8), find_policy(method, settings), 8, Costs(costs(1.0), None)
    )
    real, steps = TreeDrafter(find_policy(method, settings), drafter(name).source), 0
    with Replay(real, PROMPT, answer, SamplingParams()) as known:
        while known.left:
            known.step(8)
            steps += 1
    assert (found.tokens, found.passes) == (len(answer) - 1, steps)
    assert found.passes < found.tokens


def test_seconds_are_those_of_the_profiles() -> None:
    model = target()
    answer = Engine(model).generate([PROMPT], SamplingParams(max_tokens=12))[0].token_ids
    text = Text("", PROMPT, answer)
    chains = record(model, drafter("relative"), text, 3)
    found = replay(text, chains, find_policy("chain", {"depth": 1}), 3, Costs(costs(1.0), costs(0.25)))
    undrafted = 1 if found.tokens % 2 and found.passes * 2 > found.tokens else 0
    assert found.passes <= found.seconds <= found.passes * 1.25
    assert found.seconds >= found.passes + 0.25 * (found.passes - 1 - undrafted)


@pytest.mark.parametrize(
    ("kept", "name"), [((0, 1, 2), "layers=0-2"), ((0, 2, 3, 7), "layers=0.2-3.7"), ((5,), "layers=5-5")]
)
def test_sets_of_layers_have_names_that_are_read_back(kept: tuple[int, ...], name: str) -> None:
    assert name_of(kept) == name
    assert layers_of(name, 9) == kept


def test_all_layers_agree_and_the_first_to_go_costs_least() -> None:
    model = target()
    answers = [(PROMPT, Engine(model).generate([PROMPT], SamplingParams(max_tokens=30))[0].token_ids)]
    assert agreement(model, range(2), answers) == 1.0
    worst, kept, right = next(iter(leave_out(model, answers, 1, 2)))
    alone = {layer: agreement(model, [1 - layer], answers) for layer in (0, 1)}
    assert right == max(alone.values()) == alone[worst]
    assert kept == [1 - worst]
