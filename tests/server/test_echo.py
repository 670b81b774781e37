"""Prompts that are echoed with log-probabilities: what harnesses score choices by."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import torch

from draftree.config import SamplingParams
from draftree.engine.engine import Engine

from ..tiny import causal_logits, tiny
from .running import NAME, TEXT


def _told(client: openai.OpenAI, **asked: Any) -> list[Any]:
    create: Any = client.completions.create
    return list(create(model=NAME, temperature=0, echo=True, **asked).choices)


@pytest.mark.parametrize("most", [1, 5])
def test_a_prompt_has_the_log_probabilities_of_a_causal_pass(client: openai.OpenAI, alone: Engine, most: int) -> None:
    prompts = [alone.inputs.encode(TEXT), alone.inputs.encode("the cat in the hat")]
    choices = _told(client, prompt=prompts, max_tokens=most, logprobs=2)
    whole = _told(client, prompt=prompts, max_tokens=most)
    for prompt, choice, plain in zip(prompts, choices, whole, strict=True):
        told = choice.logprobs
        assert choice.text == plain.text and plain.logprobs is None
        assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
        assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == len(prompt) + most
        logprobs = causal_logits(tiny(), prompt)[:-1].log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert told.token_logprobs[1 : len(prompt)] == pytest.approx(own.tolist(), abs=1e-4)
        for best, row in zip(told.top_logprobs[1 : len(prompt)], logprobs, strict=True):
            assert max(best.values()) == pytest.approx(float(row.max()), abs=1e-4)
        assert "".join(told.tokens[: len(prompt)]) == choice.text[: told.text_offset[len(prompt)]]


def test_a_token_that_is_the_best_has_the_very_number_of_the_best(client: openai.OpenAI, alone: Engine) -> None:
    """lm-eval compares the two to see whether a choice is what greedy decoding gives."""
    prompt = alone.inputs.encode(TEXT)
    (greedy,) = alone.generate([prompt], SamplingParams(max_tokens=12))
    (choice,) = _told(client, prompt=[*prompt, *greedy.token_ids], max_tokens=1, logprobs=1)
    own, best = choice.logprobs.token_logprobs[len(prompt) :], choice.logprobs.top_logprobs[len(prompt) :]
    assert own == [max(each.values()) for each in best] and len(own) == 13
