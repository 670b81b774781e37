"""Real GGUF files: the default model, and a pair of them where a folder is named."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch

import draftree
from draftree import Engine, SamplingParams, SpeculationParams
from draftree.cli.main import run
from draftree.engine.replay import first_difference
from draftree.models.llama.context import Context, Token
from draftree.models.llama.llama_model import EXACT, LlamaModel, exactness
from draftree.text.encoding import encode

QUESTIONS = [
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that adds two numbers, then the same function for three numbers.",
]
TOKENS = 24


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    found = draftree.load("smollm2", backend="llama.cpp")
    assert isinstance(found, LlamaModel)
    return found


@functools.cache
def by_llama(model: LlamaModel, prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy ids by llama.cpp alone: the prompt in one pass, then a token a pass."""
    context, ids = Context(model.weights, 2048, model.threads), list(prompt)
    fresh = list(prompt)
    while len(ids) < len(prompt) + count and ids[-1] not in model.capabilities.eos_ids:
        start = len(ids) - len(fresh)
        tokens = [Token(token, start + i, [0], i == len(fresh) - 1) for i, token in enumerate(fresh)]
        found = context.decode(tokens)
        assert found is not None
        fresh = [int(found[-1].argmax())]
        ids += fresh
    return ids[len(prompt) :]


@pytest.mark.real
@pytest.mark.parametrize("method", ["auto", "opt-tree"])
def test_trees_give_the_ids_of_llama_cpp_alone(method: str, model: LlamaModel) -> None:
    assert model.capabilities.trees == EXACT
    prompts = [encode(model.tokenizer, draftree.user(question)) for question in QUESTIONS]
    engine = Engine(model, SpeculationParams(drafter="lookup", method=method, nodes=12))
    results = engine.generate(prompts, SamplingParams(max_tokens=TOKENS))
    assert [result.token_ids for result in results] == [by_llama(model, tuple(prompt), TOKENS) for prompt in prompts]
    engine.stepper.prefixes.clear()


@pytest.mark.real
def test_sampled_text_with_drafts_is_that_of_ar_decoding(model: LlamaModel) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=0.9, seed=4)
    prompts = [draftree.user(question) for question in QUESTIONS]
    alone = [Engine(model).generate([prompt], params)[0].token_ids for prompt in prompts]
    engine = Engine(model, SpeculationParams(drafter="lookup", method="opt-tree", nodes=8))
    results = engine.generate(prompts, params)
    assert [result.token_ids for result in results] == alone
    assert sum(sum(result.stats.accepted) for result in results) > 3
    engine.stepper.prefixes.clear()


@pytest.mark.real
def test_trees_are_exact_behind_more_than_512_tokens(model: LlamaModel) -> None:
    """From 512 cells on llama.cpp splits one token's sums over threads, unless keys and values differ in type."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        own = LlamaModel(model.weights.header.path, threads=2)
        assert exactness(own, tokens=600) == (EXACT, 0.0)
    finally:
        torch.set_num_threads(threads)


PAIR = os.environ.get("DRAFTREE_PAIR", "")
pair = pytest.mark.skipif(not PAIR, reason="set DRAFTREE_PAIR to a folder with the two Qwen2.5-Coder files")


@pytest.mark.pair
@pair
def test_a_pair_gives_ar_decodings_text_but_for_near_ties(capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = (str(Path(PAIR) / f"qwen2.5-coder-{size}-instruct-q4_k_m.gguf") for size in ("1.5b", "0.5b"))
    model = draftree.load(target, backend="llama.cpp")
    assert "near-ties" in model.capabilities.trees
    prompt = encode(model.tokenizer, draftree.user(QUESTIONS[1]))
    params = SamplingParams(max_tokens=TOKENS)
    alone = Engine(model).generate([prompt], params)[0].token_ids
    engine = Engine(model, SpeculationParams(drafter=drafter, method="chain", nodes=3))
    result = engine.generate([prompt], params)[0]
    assert sum(result.stats.accepted) > 10
    difference = first_difference(model, prompt, alone, result.token_ids, params)
    assert difference is None or difference.near_tie, difference
    assert run(["info", target, "--backend", "llama.cpp"]) == 0
    assert "Q4_K" in capsys.readouterr().out
