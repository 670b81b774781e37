"""A backend that claims exactness keeps it: log-probabilities and texts to the last bit, with drafts and kept rows.

A backend that claims none is skipped: its texts and log-probabilities may differ by rounding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import draftree
from draftree import Engine, Generation, SamplingParams, SchedulerParams, SpeculationParams
from draftree.models.base import LanguageModel

from .. import tiny_gguf
from ..toy import ToyModel

PAIR = os.environ.get("DRAFTREE_PAIR", "")
TEXT = [5 + (3 * i + i // 9) % 60 for i in range(40)]
BACKENDS = (
    "toy",
    *(f"llama.cpp {weights}" for weights in ("Q8_0", "Q4_0", "Q4_1")),
    pytest.param("default", marks=pytest.mark.real),
    pytest.param("pair", marks=[pytest.mark.pair, pytest.mark.skipif(not PAIR, reason="set DRAFTREE_PAIR")]),
)


def loaded(backend: str, folder: Path) -> LanguageModel:
    if backend == "toy":
        toy = ToyModel(70, spread=6.0, max_length=128)
        toy.capabilities = replace(toy.capabilities, rounding=0.0)
        return toy
    if backend == "default":
        return draftree.load("smollm2")
    if backend == "pair":
        return draftree.load(str(next(Path(PAIR).glob("*0.5b*.gguf"))))
    return draftree.load(str(tiny_gguf.write(folder / "tiny.gguf", weights=backend.split()[1])))


@pytest.fixture(scope="module", params=BACKENDS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LanguageModel]]:
    """A target, and what drafts: the same once more, so that long paths are accepted."""
    folder = tmp_path_factory.mktemp("gguf")
    target = loaded(request.param, folder)
    if target.capabilities.rounding != 0:
        pytest.skip(f"{request.param} claims no exactness")
    yield [target, loaded(request.param, folder)]


def params(temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=24, temperature=temperature, seed=3, logprobs=4, ignore_eos=True)


def scored(found: Generation) -> list[object]:
    return [(chunk.token, chunk.logprobs) for chunk in found.chunks]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["chain", "binary"])
def test_drafts_change_no_log_probability(models: list[LanguageModel], method: str, temperature: float) -> None:
    """Over llama.cpp a token of a file in Q4_K_M had -1.234 without drafts and -1.408 in a chain of 6."""
    target, draft = models
    prompts = [TEXT, TEXT[:7]]
    alone = [Engine(target).generate([prompt], params(temperature))[0] for prompt in prompts]
    settings = {"depth": 6} if method == "chain" else None
    speculation = SpeculationParams(drafter=draft, method=method, settings=settings, nodes=14)
    found = Engine(target, speculation).generate(prompts, params(temperature))
    assert [scored(one) for one in found] == [scored(one) for one in alone]
    assert sum(chunk.drafted for one in found for chunk in one.chunks) > 12


@pytest.mark.parametrize("drafted", [False, True])
def test_kept_rows_change_no_log_probability(models: list[LanguageModel], drafted: bool) -> None:
    """Over llama.cpp a prompt in Q4_K_M that found a kept row went on with another text than one that was read whole,
    where the two best tokens were 0.018 apart."""
    target, draft = models
    chain = SpeculationParams(drafter=draft if drafted else "none", method="chain")
    warm = Engine(target, chain, scheduling=SchedulerParams(prefixes=2))
    (first,) = warm.generate([TEXT], params(0.0))
    for prompt in (TEXT, [*TEXT, *first.token_ids, 7, 8, 9], [*TEXT[:30], 7, 8, 9]):
        (found,) = warm.generate([prompt], params(0.0))
        (cold,) = Engine(target).generate([prompt], params(0.0))
        assert found.stats.reused > 16 and not cold.stats.reused
        assert scored(found) == scored(cold)
    warm.stepper.prefixes.clear()
