"""Requests over GGUF files: every kind of drafter gives AR decoding's ids, alone and in batches, greedy and sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

import draftree
from draftree import Engine, SamplingParams, SpeculationParams
from draftree.beams.beam_engine import load_beam_engine
from draftree.beams.forest import BeamParams
from draftree.models.base import LanguageModel

from .. import tiny_gguf

PROMPTS = ["the cat in the hat sat on the mat, the cat in the", "one two three one two", "a"]
METHODS = ("auto", "chain", "opt-tree", "static", "binary", "dynamic-width-budget")
"""The first of two is greedy, the second sampled."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft model that is nearly the target, one that is another, and one of another vocabulary."""
    folder = tmp_path_factory.mktemp("gguf")
    tiny_gguf.write(folder / "target.gguf", weights="Q8_0")
    tiny_gguf.write(folder / "near.gguf", weights="Q4_0")
    tiny_gguf.write(folder / "other.gguf", weights="Q8_0", layers=1, seed=7)
    tiny_gguf.write(folder / "foreign.gguf", vocabulary=tiny_gguf.byte_level(shift=True))
    return folder


@pytest.fixture(scope="module", params=["native", "llama.cpp"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(backend: str, folder: Path) -> LanguageModel:
    return draftree.load(str(folder / "target.gguf"), backend=backend)


@pytest.fixture(scope="module")
def alone(target: LanguageModel) -> dict[float, list[list[int]]]:
    """AR decoding's ids of each prompt alone, by temperature."""
    engine = Engine(target)
    return {t: [engine.generate([prompt], params(t))[0].token_ids for prompt in PROMPTS] for t in (0.0, 1.0)}


def params(temperature: float, seed: int = 3) -> SamplingParams:
    return SamplingParams(max_tokens=16, temperature=temperature, seed=seed)


@pytest.mark.filterwarnings(
    "ignore:stage 2"
)  # its passes take about as long as the target's: by the clock maybe longer
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["lookup", "near.gguf", "other.gguf", "lookup>near.gguf", "lookup+near.gguf"])
def test_drafts_give_the_ids_of_ar_decoding(
    drafter: str, temperature: float, folder: Path, target: LanguageModel, alone: dict[float, list[list[int]]]
) -> None:
    drafter = drafter.replace("near", str(folder / "near")).replace("other", str(folder / "other"))
    accepted = 0
    for method in METHODS[int(temperature) :: 2]:
        engine = Engine(target, SpeculationParams(drafter=drafter, method=method))
        for result, ids in zip(engine.generate(PROMPTS, params(temperature)), alone[temperature], strict=True):
            assert result.token_ids == ids
            accepted += sum(result.stats.accepted)
    assert accepted > 10 or "near" not in drafter
    engine.stepper.prefixes.clear()


def test_requests_with_drafters_of_their_own_share_passes(folder: Path, target: LanguageModel) -> None:
    engine, alone = Engine(target), []
    handles = []
    for i, drafter in enumerate(["none", "lookup", str(folder / "near.gguf"), f"lookup+{folder / 'near.gguf'}"] * 2):
        prompt, given = PROMPTS[i % 3], params(float(i % 2), seed=i)
        alone.append(Engine(target).generate([prompt], given)[0].token_ids)
        handles.append(engine.submit(prompt, given, SpeculationParams(drafter=drafter, method="opt-tree", nodes=6)))
    engine.wait(lambda: all(handle.done for handle in handles))
    assert [handle.result().token_ids for handle in handles] == alone


def test_a_text_has_the_log_probabilities_as_a_prompt_that_it_had_when_it_was_generated(target: LanguageModel) -> None:
    """To the last bit, though passes over prompts have many tokens and the others one."""
    engine = Engine(target)
    for prompt in PROMPTS:
        made = engine.submit(prompt, SamplingParams(max_tokens=100, logprobs=1)).result()
        ids = [*engine.inputs.encode(prompt), *made.token_ids]
        again = engine.submit(ids, SamplingParams(max_tokens=1, prompt_logprobs=1))
        again.result()
        generated = again.request.prompt_logprobs[-len(made.token_ids) :]
        assert generated == [chunk.logprobs for chunk in made.chunks]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_beams_are_those_of_beams_without_drafts(temperature: float, folder: Path, backend: str) -> None:
    found = []
    for drafter in ("none", str(folder / "near.gguf")):
        engine = load_beam_engine(str(folder / "target.gguf"), drafter=drafter, backend=backend)
        found.append(engine.generate([PROMPTS[0]], params(temperature), BeamParams(width=3, returned=3))[0])
    plain, drafted = ([beam.token_ids for beam in result.hypotheses] for result in found)
    assert temperature or plain == drafted
    assert len(drafted) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_of_another_vocabulary_is_translated(
    temperature: float, folder: Path, target: LanguageModel, alone: dict[float, list[list[int]]]
) -> None:
    engine = Engine(target, SpeculationParams(drafter=str(folder / "foreign.gguf"), method="opt-tree"))
    found = engine.generate(PROMPTS, params(temperature))
    assert [result.token_ids for result in found] == alone[temperature]
    assert sum(sum(result.stats.accepted) for result in found) > 0
