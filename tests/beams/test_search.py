"""Beam search equals transformers', sequences and scores, whatever drafts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from draftree.beams.beam_engine import BeamEngine, BeamGeneration
from draftree.beams.forest import BeamParams
from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.integrations.hf_generate import as_processor
from draftree.models.base import Nodes
from draftree.models.huggingface.hf_model import HFModel

from ..pairs import target
from ..references import extended, prefilled
from ..tiny import FAMILIES
from ..toy import ToyModel
from .parts import PROMPTS, Found, searched, source

TOKENS = 12
EOS = (4, 9, 33)


def several_eos(model: HFModel, eos: tuple[int, ...]) -> HFModel:
    """The model, whose sequences these tokens end."""
    assert model.model.generation_config is not None
    model.model.generation_config.eos_token_id = list(eos)
    return HFModel(model.model, self_test=False)


@pytest.fixture(scope="module")
def model() -> HFModel:
    return several_eos(target(), EOS[:1])


def assert_same(got: BeamGeneration, want: list[Found]) -> None:
    assert [h.token_ids for h in got.hypotheses] == [w.ids for w in want]
    torch.testing.assert_close(
        torch.tensor([h.score for h in got.hypotheses]), torch.tensor([w.score for w in want]), rtol=1e-4, atol=1e-4
    )


def beams_of(
    model: HFModel, drafter: str, prompt: list[int], tokens: int = TOKENS, **settings: object
) -> BeamGeneration:
    engine = BeamEngine(model, source(drafter, model))
    params = SamplingParams(max_tokens=tokens)
    return engine.generate([prompt], params, BeamParams(**settings))[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("drafter", "width"),
    [(d, w) for i, d in enumerate(["none", "self", "relative", "stranger"]) for w in ((2, 4), (3, 5))[i % 2]],
)
def test_sequences_and_scores_are_those_of_transformers(drafter: str, width: int, model: HFModel) -> None:
    for prompt in PROMPTS:
        want = searched(model, prompt, num_beams=width, num_return_sequences=width, max_new_tokens=TOKENS)
        assert_same(beams_of(model, drafter, prompt, width=width, returned=width), want)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_keeps_beams_in_one_row(kind: str) -> None:
    made = target(kind)
    for prompt in PROMPTS:
        want = searched(made, prompt, num_beams=3, num_return_sequences=3, max_new_tokens=TOKENS)
        assert_same(beams_of(made, "self", prompt, width=3, returned=3), want)


@pytest.mark.parametrize(
    ("length_penalty", "eos"), [(0.0, EOS), (0.6, EOS[:1]), (1.0, EOS), (2.0, EOS[:1]), (-1.0, EOS), (-1.0, EOS[:1])]
)
@pytest.mark.parametrize("first", range(3))
def test_finished_beams_are_ranked_and_end_the_search_as_in_transformers(
    eos: tuple[int, ...], length_penalty: float, first: int
) -> None:
    """Each prompt under each rule of stopping, though not with each penalty."""
    made = several_eos(target(), eos)
    number = first + int(2 * length_penalty) + len(eos)
    options: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": (False, True, "never")[number % 3]}
    want = searched(made, PROMPTS[first], num_beams=3, num_return_sequences=3, max_new_tokens=TOKENS, **options)
    assert_same(beams_of(made, "relative", PROMPTS[first], width=3, returned=3, **options), want)


def test_each_rule_of_stopping_finds_other_beams_here() -> None:
    """The cases above are the same under any rule."""
    made, found = several_eos(target(), (2, 16, 26, 32, 48, 56)), list[list[list[int]]]()
    for early_stopping in (False, True, "never"):
        options: dict[str, Any] = {"early_stopping": early_stopping}
        want = searched(made, [32, 8], num_beams=3, num_return_sequences=3, max_new_tokens=TOKENS, **options)
        got = beams_of(made, "relative", [32, 8], width=3, returned=3, **options)
        assert_same(got, want)
        found.append([hypothesis.token_ids for hypothesis in got.hypotheses])
    assert all(found.count(each) == 1 for each in found)


def test_the_case_above_ends_beams_early() -> None:
    """Else that test would see full-length beams alone."""
    made = several_eos(target(), EOS)
    found = [h for p in PROMPTS for h in beams_of(made, "none", p, width=3, returned=3).hypotheses]
    assert {h.finish_reason for h in found} == {"eos", "length"} or {h.finish_reason for h in found} == {"eos"}
    assert min(len(h.token_ids) for h in found) < TOKENS


def test_processors_see_each_beams_own_history(model: HFModel) -> None:
    processor = RepetitionPenaltyLogitsProcessor(1.3)
    want = searched(
        model,
        PROMPTS[0],
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=TOKENS,
        logits_processor=LogitsProcessorList([processor]),
    )
    params = SamplingParams(max_tokens=TOKENS, processors=(as_processor(processor),))
    engine = BeamEngine(model, source("relative", model))
    assert_same(engine.generate([PROMPTS[0]], params, BeamParams(width=3, returned=3))[0], want)


def test_width_one_is_greedy_decoding(model: HFModel) -> None:
    greedy = Engine(model).generate([PROMPTS[0]], SamplingParams(max_tokens=TOKENS))[0]
    found = beams_of(model, "self", PROMPTS[0], width=1).hypotheses[0]
    assert found.token_ids[: len(greedy.token_ids)] == greedy.token_ids


@pytest.mark.parametrize("drafter", ["none", "relative"])
def test_a_batch_finds_what_each_prompt_finds_alone(drafter: str, model: HFModel) -> None:
    engine, params = BeamEngine(model, source(drafter, model)), SamplingParams(max_tokens=TOKENS)
    beams = BeamParams(width=3, returned=3)
    alone = [engine.generate([p], params, beams)[0] for p in PROMPTS]
    for one, both in zip(alone, engine.generate(PROMPTS, params, beams), strict=True):
        assert_same(both, [Found(h.token_ids, h.score) for h in one.hypotheses])


def test_a_drafter_that_is_always_right_saves_passes(model: HFModel) -> None:
    plain = beams_of(target(), "none", PROMPTS[0], width=3)
    drafted = beams_of(target(), "self", PROMPTS[0], width=3, depth=3)
    assert plain.stats.steps == TOKENS - 1
    assert drafted.stats.steps <= (TOKENS + 2) // 4 + 1
    assert drafted.stats.mal > 3


def test_scores_are_cumulative(model: HFModel) -> None:
    """Each sequence's log-probability is that of a fresh causal pass over its tokens."""
    for found in beams_of(model, "relative", PROMPTS[1], width=4, returned=4).hypotheses:
        row, first = prefilled(model, PROMPTS[1])
        logits = [first]
        logits += list(extended(model, [row], [Nodes.chain(found.token_ids)])[0][:-1])
        model.close(row)
        distributions = torch.stack(logits).log_softmax(-1)
        total = float(distributions[torch.arange(len(found.token_ids)), torch.tensor(found.token_ids)].sum())
        assert found.logprob == pytest.approx(total, abs=1e-3)
        assert found.score == pytest.approx(found.logprob / len(found.token_ids), abs=1e-6)


@pytest.mark.parametrize("width", [1, 3])
def test_a_vocabulary_of_one_token_has_one_beam(width: int) -> None:
    toy = ToyModel(1)
    found = BeamEngine(toy).generate([[0, 0]], SamplingParams(max_tokens=5), BeamParams(width=width))[0]
    assert [(h.token_ids, h.score) for h in found.hypotheses] == [([0] * 5, 0.0)]


def test_an_end_token_in_the_first_layer_finishes_a_beam() -> None:
    toy = ToyModel(3, eos_ids=frozenset({0, 1}))
    found = BeamEngine(toy).generate([[1, 2]], SamplingParams(max_tokens=6), BeamParams(width=3, returned=3))[0]
    ids = [h.token_ids for h in found.hypotheses]
    assert [0] in ids
    assert all(token == 2 for tokens in ids for token in tokens[:-1]), "no beam goes on behind an end token"


def test_it_ends_when_every_continuation_ends() -> None:
    toy = ToyModel(2, eos_ids=frozenset({0, 1}))
    found = BeamEngine(toy).generate([[1, 0]], SamplingParams(max_tokens=6), BeamParams(width=2, returned=2))[0]
    assert sorted(h.token_ids for h in found.hypotheses) == [[0], [1]]
    assert {h.finish_reason for h in found.hypotheses} == {"eos"}
