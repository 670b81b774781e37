"""Log-probabilities of tokens are the target's own, drafted or not, whatever processes and draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from draftree.config import MOST_LOGPROBS, SamplingParams
from draftree.engine.engine import Engine
from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import SpeculationParams
from draftree.errors import ConfigError
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.llama.llama_model import LlamaModel
from draftree.models.native.native_model import NativeModel

from . import tiny_gguf
from .tiny import causal_logits, tiny

PROMPTS = [[1, 5, 6, 5, 6, 5, 6, 5], [1, 7, 8, 9]]


@pytest.fixture(scope="module")
def model() -> HFModel:
    return HFModel(tiny(), name="tiny", self_test=False)


def bias(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Another distribution than the target's own."""
    logits[5] += 2.0
    return logits


@pytest.mark.parametrize("drafter", ["none", "lookup", "self"])
@pytest.mark.parametrize("verification", ["match", "multi-round"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_they_are_those_of_a_causal_pass(model: HFModel, drafter: str, verification: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=16, temperature=temperature, seed=3, logprobs=4, processors=(bias,))
    engine = Engine(model)
    if drafter != "none":
        engine = Engine(model, SpeculationParams(drafter=drafter, method="static", nodes=6, verification=verification))
    for prompt, found in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
        logprobs = causal_logits(model.model, [*prompt, *found.token_ids])[len(prompt) - 1 : -1].log_softmax(-1)
        assert len(found.chunks) == len(found.token_ids)
        if drafter == "self" and not temperature:
            assert any(chunk.drafted for chunk in found.chunks)
        for chunk, row in zip(found.chunks, logprobs, strict=True):
            assert chunk.logprobs is not None
            assert chunk.logprobs.token == pytest.approx(float(row[chunk.token]), abs=1e-4)
            best = row.topk(4)
            assert [token for token, _ in chunk.logprobs.best] == best.indices.tolist()
            assert [value for _, value in chunk.logprobs.best] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_they_are_there_where_they_are_asked_for(model: HFModel) -> None:
    each = [SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, logprobs=0)]
    none, own = Engine(model).generate(PROMPTS, each)
    assert [chunk.logprobs for chunk in none.chunks] == [None] * 4
    assert all(chunk.logprobs is not None and chunk.logprobs.best == [] for chunk in own.chunks)
    assert torch.tensor([chunk.logprobs.token for chunk in own.chunks if chunk.logprobs]).le(0).all()


@pytest.mark.parametrize("backend", [NativeModel, LlamaModel])
def test_they_are_the_same_with_however_many_of_the_best(
    backend: type[LlamaModel | NativeModel], tmp_path: Path
) -> None:
    """None of the best were refused by the native engine: each answer with logprobs alone ended with an error."""
    engine = Engine(backend(tiny_gguf.write(tmp_path / "tiny.gguf", weights="Q8_0")))
    found = list[list[float]]()
    for count in (0, 1, MOST_LOGPROBS):
        handle = engine.submit(PROMPTS[0], SamplingParams(max_tokens=4, logprobs=count, prompt_logprobs=count))
        own = [chunk.logprobs for chunk in handle.result().chunks if chunk.logprobs]
        assert len(own) == 4 and len(handle.request.prompt_logprobs) == len(PROMPTS[0]) - 1
        every = [*handle.request.prompt_logprobs, *own]
        assert {len(one.best) for one in every} == {count}
        found.append([one.token for one in every])
    assert found[1] == pytest.approx(found[0], abs=1e-5) and found[2] == pytest.approx(found[0], abs=1e-5)


LONG = [1 + (7 * i) % 60 for i in range(100)]
"""A prompt that is read in several pieces."""


@pytest.mark.parametrize("drafter", ["none", "lookup"])
def test_those_of_prompts_are_those_of_a_causal_pass(model: HFModel, drafter: str) -> None:
    """Beside requests that want none, whatever is kept of the prompt; what is generated stays the same."""
    speculation = SpeculationParams(drafter=drafter, method="chain")
    engine = Engine(model, speculation, scheduling=SchedulerParams(prefixes=2, chunk=24))
    prompts = [LONG, LONG[:1], LONG[:40], LONG]
    wanted = [3, 3, None, 0]
    each = [SamplingParams(max_tokens=8, prompt_logprobs=count) for count in wanted]
    plain = engine.generate(prompts, SamplingParams(max_tokens=8))
    handles = [engine.submit(prompt, params) for prompt, params in zip(prompts, each, strict=True)]
    assert [handle.result().token_ids for handle in handles] == [found.token_ids for found in plain]
    for prompt, count, handle in zip(prompts, wanted, handles, strict=True):
        found = handle.request.prompt_logprobs
        if count is None:
            assert found == []
            continue
        logprobs = causal_logits(model.model, prompt)[:-1].log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
        assert [one.token for one in found] == pytest.approx(own.tolist(), abs=1e-4)
        for one, row in zip(found, logprobs, strict=True):
            best = row.topk(count)
            assert [value for _, value in one.best] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("count", [-1, MOST_LOGPROBS + 1])
def test_there_is_a_most(name: str, count: int) -> None:
    options: dict[str, Any] = {name: count}
    with pytest.raises(ConfigError, match=f"^{name} is {count}: "):
        SamplingParams(**options)
