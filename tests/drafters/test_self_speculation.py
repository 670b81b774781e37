"""The target as its own drafter on its own rows: it reads nothing again, keeps nothing, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from draftree.config import Budget, SamplingParams
from draftree.drafters.draft_model import ModelSource, SelfSpeculationSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.registry import load_drafter
from draftree.engine.engine import Engine
from draftree.errors import ConfigError, RunError
from draftree.models.huggingface.hf_model import HFModel
from draftree.policies.fixed import StaticTree
from draftree.policies.methods import METHODS
from draftree.train.replay import Replay

from ..pairs import costs, policy
from ..tiny import VOCAB, tiny

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26, 53, 58]]
PARAMS = [SamplingParams(max_tokens=20, temperature=t, seed=7, ignore_eos=True) for t in (0.0, 1.0, 0.7)]
OWN = ["int8", "fp16w", "int4"]


@pytest.fixture(scope="module")
def model() -> HFModel:
    return HFModel(tiny(), weight_format="fp32", self_test=False)


@pytest.fixture(scope="module")
def plain(model: HFModel) -> list[list[int]]:
    return [g.token_ids for g in Engine(model).generate(PROMPTS, PARAMS)]


@pytest.fixture(autouse=True)
def told_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels that a busy machine finds slower than the target are warned of."""
    monkeypatch.setattr("draftree.drafters.registry.kept_or_measured", lambda model: costs(1.0))


def self_speculation(model: HFModel, drafting: HFModel | None = None) -> SelfSpeculationSource:
    return SelfSpeculationSource((drafting or model.twin()).on_rows_of(model), VOCAB, target=model)


def ids(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [g.token_ids for g in engine.generate(prompts, params)]


@pytest.mark.parametrize("name", [*OWN, "lookup>int8", "lookup+int8", "fp16w>int8"])
@pytest.mark.parametrize("method", ["chain", "opt-tree", "auto", "hsddw"])
def test_ids_are_those_of_ar_decoding(model: HFModel, plain: list[list[int]], name: str, method: str) -> None:
    engine = Engine(model, load_drafter(name, model, policy(method)), nodes=8)
    assert ids(engine, PROMPTS, PARAMS) == plain
    assert [ids(engine, [p], [q])[0] for p, q in zip(PROMPTS, PARAMS, strict=True)] == plain


@pytest.mark.parametrize("scheme", ["multi-round", "top1-residual", "block"])
def test_its_children_can_be_drawn(model: HFModel, scheme: str) -> None:
    made = StaticTree(1, 4) if scheme == "block" else StaticTree(2, 3)
    for source in (self_speculation(model), ModelSource(model.twin(), VOCAB)):
        engine = Engine(model, TreeDrafter(made, source), nodes=9, verification=scheme)
        drawn = ids(engine, PROMPTS, PARAMS)
        if isinstance(source, SelfSpeculationSource):
            want = drawn
    assert want == drawn, "a model on rows of its own draws others"


def test_a_twin_of_the_target_is_always_right(model: HFModel) -> None:
    source = self_speculation(model)
    (found,) = Engine(model, TreeDrafter(StaticTree(1, 4), source), nodes=4).generate(PROMPTS[:1], PARAMS[:1])
    assert found.stats.accepted == found.stats.drafted
    assert found.stats.steps == 4, "1 + 4 x 5 tokens, the last step short of one"
    assert isinstance(source.model, HFModel)
    assert source.model.cache is model.cache, "it has none of its own"


@pytest.mark.parametrize("name", OWN)
def test_trees_are_those_of_the_same_model_with_a_cache_of_its_own(name: str) -> None:
    """With the target's own weights; other weights read what the target has read, so that they say a little else."""
    model = HFModel(tiny(), weight_format="fp32", self_test=False)
    for prompt in PROMPTS:
        engine = Engine(model)
        request = engine.open(prompt, PARAMS[0])
        trees = []
        for source in (self_speculation(model), ModelSource(model.twin(), VOCAB)):
            drafter = TreeDrafter(METHODS["opt-tree"].policy(), source)
            trees.append(drafter.propose([request], [Budget(9)])[0])
            drafter.close(request)
        assert np.array_equal(trees[0].tokens, trees[1].tokens)
        assert np.array_equal(trees[0].parents, trees[1].parents)
        torch.testing.assert_close(trees[0].path_logprobs, trees[1].path_logprobs, atol=1e-4, rtol=0)
        other = load_drafter(name, model, StaticTree(1, 2))
        assert len(other.propose([request], [Budget(2)])[0]) == 2
        assert len(request.row.parents) == 0 if request.row else False
        engine.close(request)


def test_it_reads_no_prompt_and_makes_one_pass_a_layer(model: HFModel) -> None:
    source = self_speculation(model)
    engine = Engine(model, TreeDrafter(StaticTree(1, 3), source), nodes=3)
    request = engine.open(PROMPTS[0], PARAMS[0])
    assert source.unread(request) == [(source.model, 0)]
    seen = []
    extend = source.model.extend
    source.model.extend = lambda rows, nodes: seen.append([len(n.tokens) for n in nodes]) or extend(rows, nodes)  # type: ignore[method-assign, func-returns-value]
    engine.step([request])
    engine.step([request])
    engine.close(request)
    assert seen == [[1]] * 6
    assert source.passes == 6


def test_a_step_that_failed_in_between_leaves_nothing_that_counts(model: HFModel, plain: list[list[int]]) -> None:
    source = self_speculation(model)
    engine = Engine(model, TreeDrafter(StaticTree(2, 3), source), nodes=6)
    request = engine.open(PROMPTS[0], PARAMS[0])
    extend, count = source.model.extend, [0]

    def failing(rows: object, nodes: object) -> object:
        count[0] += 1
        if count[0] == 2:
            raise RunError("out of memory")
        return extend(rows, nodes)  # type: ignore[arg-type]

    source.model.extend = failing  # type: ignore[method-assign, assignment]
    with pytest.raises(RunError):
        engine.step([request])
    while request.finish_reason is None:
        engine.step([request])
    assert request.output_ids == plain[0]
    engine.close(request)


def test_sequences_come_and_go(model: HFModel, plain: list[list[int]]) -> None:
    """The last row takes a closed one's place in storage: the drafter follows, since the row is the target's."""
    engine = Engine(model, load_drafter("int8", model, StaticTree(2, 2)), nodes=6)
    first, second = (engine.open(p, q) for p, q in zip(PROMPTS[:2], PARAMS[:2], strict=True))
    engine.step([first, second])
    engine.close(first)
    while second.finish_reason is None:
        engine.step([second])
    assert second.output_ids == plain[1]
    engine.close(second)
    assert ids(engine, PROMPTS, PARAMS) == plain, "rows that were closed are forgotten"


def test_storage_that_is_allotted_anew_is_the_drafters_too(model: HFModel, plain: list[list[int]]) -> None:
    engine = Engine(model, load_drafter("int8", model, StaticTree(1, 2)), nodes=3)
    assert ids(engine, PROMPTS[:1], PARAMS[:1]) == plain[:1]
    model.reserve(5, 900)  # no row is open: the old storage goes
    assert ids(engine, PROMPTS, PARAMS) == plain


def test_the_cache_need_not_grow_for_what_is_drafted_and_not_verified() -> None:
    model = HFModel(tiny(), weight_format="fp32", self_test=False)
    engine = Engine(model, load_drafter("int8", model, METHODS["eagle2"].policy()), nodes=6)
    request = engine.open([(7 * i) % VOCAB for i in range(50)], SamplingParams(max_tokens=6, ignore_eos=True))
    before, most = model.cache.placement.slots, 0
    place = model.cache.place

    def placed(*given: Any, **options: Any) -> None:
        nonlocal most
        place(*given, **options)
        most = max(most, model.cache.placement.end)

    model.cache.place = placed  # type: ignore[method-assign]
    while request.finish_reason is None:
        engine.step([request])
    engine.close(request)
    assert most > 64, "more than the answer and one tree take"
    assert model.cache.placement.slots == before


def test_it_cannot_draft_for_another_target(model: HFModel) -> None:
    drafter = load_drafter("int8", model, StaticTree())
    with pytest.raises(ConfigError, match="was loaded for another target"):
        Engine(model.twin(), drafter)


def test_a_cache_of_another_shape_cannot_be_shared(model: HFModel) -> None:
    with pytest.raises(ConfigError, match="cannot read the cache of"):
        HFModel(tiny("llama_mha"), self_test=False).on_rows_of(model)


def test_two_of_the_target_in_one_drafter_keep_rows_of_their_own(model: HFModel) -> None:
    for name, alone in (("lookup+int8", True), ("fp16w>int8", False)):
        drafter = load_drafter(name, model, StaticTree())
        assert (drafter.host is model) is alone


@pytest.mark.parametrize("name", ["int8", "lookup>int8", "lookup+int8"])
def test_known_text_is_drafted_along_as_it_was_decoded(model: HFModel, name: str) -> None:
    """Calibration and replays have no target pass of their own: a drafter on the target's rows needs one."""
    (found,) = Engine(model, drafter := load_drafter(name, model, StaticTree(2, 3)), nodes=9).generate(
        PROMPTS[:1], PARAMS[:1]
    )
    steps = 0
    with Replay(drafter, PROMPTS[0], found.token_ids, PARAMS[0]) as replay:
        while replay.left:
            replay.step(9)
            steps += 1
    assert steps == found.stats.steps
    assert not model._rows
