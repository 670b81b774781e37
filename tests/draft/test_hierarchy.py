"""Hierarchies: the text is the target's own, whoever proposes and verifies; each level learns from the one above."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch

from draftree.config import Budget, SamplingParams
from draftree.draft.auto import AutoTree
from draftree.draft.base import Outcome, StepCost
from draftree.draft.drafter import TreeDrafter
from draftree.draft.entropy import EntropyStop, StaticTree
from draftree.draft.hierarchy import HierarchySource
from draftree.draft.loop import Decider, LoopBack, Place
from draftree.draft.methods import METHODS, find_policy
from draftree.draft.policy import GrowthPolicy
from draftree.draft.source import Source
from draftree.draft.window import DynamicWindow, Window
from draftree.engine import Engine, Generation
from draftree.errors import ConfigError
from draftree.models.hf import HFModel
from draftree.sequence import Sequence
from draftree.text import NoText
from draftree.tree import DraftTree

from ..pairs import costs, source, target
from ..pairs import policy as policy_of
from ..tiny import MAX_LENGTH
from .test_union import Says, request

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8]]
TOKENS = 24
PAIRS = (
    "lookup>relative",
    "stranger>relative",
    "relative>self",
    "self>stranger",
    "lookup+recycle>relative",
    "relative>lookup",
    "relative>lookup+recycle",
    "lookup>stranger>relative",
    "relative>lookup>self",
)


def hierarchy(name: str, model: HFModel, policy: GrowthPolicy | None = None, loop: LoopBack | None = None) -> Source:
    """A hierarchy by names of ``pairs.source``."""
    lower, _, upper = name.rpartition(">")
    if not lower:
        return source(upper, model)
    below = hierarchy(lower, model, policy, loop)
    return HierarchySource(below, source(upper, model), policy or DynamicWindow(), loop or LoopBack())


def decode(
    name: str,
    params: SamplingParams,
    method: GrowthPolicy | None = None,
    policy: GrowthPolicy | None = None,
    loop: LoopBack | None = None,
    prompts: list[list[int]] = PROMPTS,
    nodes: int = 12,
) -> list[Generation]:
    model = target()
    drafter = TreeDrafter(method or StaticTree(1, 12), hierarchy(name, model, policy, loop))
    return Engine(model, drafter, nodes=nodes).generate(prompts, params)


def plain(params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [g.token_ids for g in Engine(target()).generate(prompts, params)]


# the text


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("name", PAIRS)
def test_ids_are_those_of_plain_decoding(name: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=7)
    want = plain(params)
    assert [g.token_ids for g in decode(name, params)] == want
    assert decode(name, params, prompts=PROMPTS[:1])[0].token_ids == want[0]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_draws_trees_from_a_hierarchy(method: str) -> None:
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=3)
        got = decode("stranger>relative", params, policy_of(method), StaticTree(2, 3))
        assert [g.token_ids for g in got] == plain(params)


@pytest.mark.parametrize("below", [StaticTree(2, 3), EntropyStop(), "opt-tree", "auto"])
@pytest.mark.parametrize("rule", ["entropy", "never"])
def test_every_shape_of_proposals_and_every_rule(below: GrowthPolicy | str, rule: str) -> None:
    policy = policy_of(below) if isinstance(below, str) else below
    params = SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=3)
    got = decode("lookup>relative", params, StaticTree(2, 5), policy, LoopBack(rule))
    assert [g.token_ids for g in got] == plain(params)
