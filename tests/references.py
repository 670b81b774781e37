"""transformers' own decoding, which ours is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel

Found = list[tuple[list[int], float]]
"""Token ids and score of each beam."""


def generate_greedily(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Ids of greedy decoding."""
    ids = torch.tensor([list(prompt)], device=model.device)
    generate: Callable[..., torch.Tensor] = cast(Any, model).generate
    out = generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens)
    generated: list[int] = out[0, len(prompt) :].tolist()
    return generated


def beam_search(model: PreTrainedModel, prompt: Sequence[int], width: int, max_tokens: int) -> Found:
    """All beams of beam search, filled up to one length."""
    ids = torch.tensor([list(prompt)], device=model.device)
    generate: Callable[..., Any] = cast(Any, model).generate
    out = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows, scores = out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist()
    return list(zip(rows, scores, strict=True))


def same_beams(ours: Found, theirs: Found, near: float = 1e-3) -> bool:
    """The same beams with the same scores, up to the first near-tie: there rounding decides which beam wins."""
    for (mine, score), (other, want) in zip(ours, theirs, strict=True):
        if abs(score - want) > near:
            return False
        if mine != other[: len(mine)]:
            return True
    return True
