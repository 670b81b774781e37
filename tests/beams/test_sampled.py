"""Sampled beams as the engine gives them: width one, batches, ends, scores, duplicates, one cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from draftree.beams import beam_engine as engines
from draftree.beams.beam_engine import BeamEngine
from draftree.beams.forest import BeamNode, BeamParams, BeamRequest
from draftree.beams.layers import sample
from draftree.config import SamplingParams
from draftree.drafters.draft_model import ModelSource
from draftree.engine.engine import Engine
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.torch_scores import warp

from ..pairs import target
from ..references import prefilled
from ..toy import ToyModel
from .parts import PROMPTS, source

TOKENS = 12


@pytest.fixture(scope="module")
def model() -> HFModel:
    return target(eos=4)


def sampled(
    model: HFModel,
    drafter: str,
    prompts: Sequence[list[int]],
    seed: int = 5,
    temperature: float = 1.0,
    **settings: Any,
) -> list[list[list[int]]]:
    engine = BeamEngine(model, source(drafter, model))
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, top_k=20, top_p=0.95, seed=seed)
    made = engine.generate(list(prompts), params, BeamParams(**settings))
    return [[h.token_ids for h in one.hypotheses] for one in made]


@pytest.mark.parametrize("seed", range(4))
def test_one_plain_beam_draws_the_tokens_of_ar_decoding(seed: int, model: HFModel) -> None:
    """A single beam has one row of cells, whose warp is that of single sequences."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.8, top_k=20, top_p=0.95, seed=seed)
    want = [[g.token_ids] for g in Engine(model).generate(PROMPTS, params)]
    assert sampled(model, "none", PROMPTS, seed, 0.8, width=1) == want


@pytest.mark.parametrize("drafter", ["none", "self", "relative", "stranger"])
@pytest.mark.parametrize("settings", [{}, {"threshold": 0.7, "min_width": 2}, {"single_cache": True}])
def test_a_batch_draws_what_each_prompt_draws_alone(drafter: str, settings: dict[str, Any], model: HFModel) -> None:
    alone = [sampled(model, drafter, [p], width=3, returned=3, **settings)[0] for p in PROMPTS]
    assert sampled(model, drafter, PROMPTS, width=3, returned=3, **settings) == alone


def test_a_drafter_with_the_targets_distribution_is_never_refused(model: HFModel) -> None:
    engine, params = BeamEngine(target(), source("self", model)), SamplingParams(max_tokens=17, temperature=1.0, seed=3)
    made = engine.generate([PROMPTS[0]], params, BeamParams(width=3, draft_width=3, depth=3))[0]
    assert made.stats.steps == 4
    assert made.stats.mal == 4.0


def test_finished_beams_keep_their_place_and_are_never_extended(model: HFModel) -> None:
    ended = 0
    for seed in range(8):
        for beams in sampled(model, "relative", PROMPTS, seed, width=4, returned=4):
            assert len(beams) == 4
            assert all(4 not in tokens[:-1] for tokens in beams)
            ended += sum(tokens[-1] == 4 for tokens in beams)
    assert ended


def test_scores_are_cumulative_log_probabilities(model: HFModel) -> None:
    """Of the target's own next-token distributions, unwarped (Eq. 1)."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.7, top_k=10, seed=2)
    beams = BeamParams(width=3, returned=3, length_penalty=0.5)
    for found in BeamEngine(model, source("relative", model)).generate([PROMPTS[2]], params, beams)[0].hypotheses:
        total = 0.0
        for i, token in enumerate(found.token_ids):
            row, logits = prefilled(model, [*PROMPTS[2], *found.token_ids[:i]])
            total += float(logits.log_softmax(-1)[token])
            model.close(row)
        assert found.logprob == pytest.approx(total, abs=1e-3)
        assert found.score == pytest.approx(found.logprob / len(found.token_ids) ** 0.5, abs=1e-6)


def test_beams_that_coincide_are_all_returned() -> None:
    toy = ToyModel(2, spread=9.0)
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=1)
    made = BeamEngine(toy).generate([[1, 0]], params, BeamParams(width=4, returned=4))[0]
    ids = [tuple(h.token_ids) for h in made.hypotheses]
    assert len(ids) == 4
    assert len(set(ids)) < 4


def test_a_vocabulary_of_one_token_is_drafted_and_accepted() -> None:
    toy = ToyModel(1)
    engine = BeamEngine(toy, ModelSource(ToyModel(1, 4), 1))
    made = engine.generate([[0]], SamplingParams(max_tokens=9, temperature=1.0), BeamParams(width=3, returned=3))[0]
    assert [h.token_ids for h in made.hypotheses] == [[0] * 9] * 3
    assert made.stats.steps == 2


@pytest.mark.parametrize("drafter", ["none", "stranger"])
def test_a_single_cache_goes_on_with_the_most_probable_beam(drafter: str) -> None:
    """One beam runs on after each pass, so the cache holds one sequence and what was drafted below it."""
    made, prompt = target(), PROMPTS[0]
    params, beams = (
        SamplingParams(max_tokens=40, temperature=1.0, seed=4),
        BeamParams(width=4, depth=3, single_cache=True),
    )
    found = BeamEngine(made, source(drafter, made)).generate([prompt], params, beams)[0]
    drafts = 0 if drafter == "none" else beams.nodes
    assert found.peak_slots <= len(prompt) + 40 + drafts
    wide = BeamEngine(made).generate([prompt], params, BeamParams(width=4))[0]
    assert found.peak_slots - drafts < wide.peak_slots


def test_a_single_cache_keeps_the_beam_of_lowest_unwarped_perplexity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below several drafted layers warped distributions would keep another one now and then."""
    toy, params, beams = ToyModel(5), SamplingParams(temperature=2.0), BeamParams(width=4, depth=3, single_cache=True)
    differ = 0
    layers: list[list[BeamNode]] = []

    def seen(request: BeamRequest, *rest: Any) -> None:
        sample(request, *rest)
        layers.append(request.ends)

    def by(node: BeamNode, warped: bool) -> float:
        tokens, total = [1, 0, *node.tokens], 0.0
        for i in range(2, len(tokens)):
            logits = toy.after(tokens[:i])
            logits = warp(logits[None], params.warping)[0] if warped else logits
            total += float(logits.log_softmax(-1)[tokens[i]])
        return total

    monkeypatch.setattr(engines, "sample", seen)
    for seed in range(40):
        engine = BeamEngine(toy, ModelSource(ToyModel(5), 5))
        request = BeamRequest([1, 0], replace(params, seed=seed), beams, 20, frozenset())
        engine.open(request)
        for _ in range(3):
            engine.step([request])
            best, other = (max(layers[-1], key=partial(by, warped=warped)) for warped in (False, True))
            assert request.ends == [best]
            differ += best is not other
        engine.close(request)
    assert differ


def test_shared_tokens_take_one_slot() -> None:
    """W beams take far less than W caches: they share the prompt, and most of what they have said."""
    made, width, tokens = target(), 4, 60
    found = BeamEngine(made).generate([PROMPTS[0]], SamplingParams(max_tokens=tokens), BeamParams(width=width))[0]
    assert found.peak_slots < 0.6 * width * (len(PROMPTS[0]) + tokens)
