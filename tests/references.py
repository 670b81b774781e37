"""transformers' own decoding, which ours is compared with; and logits of our passes as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from draftree.models.base import LanguageModel, Nodes, Row, prefill_scored
from draftree.models.huggingface.cache import TreeCache
from draftree.models.huggingface.torch_scores import TorchScores
from draftree.scores import NumpyScores, Scores

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


def tensor_of(scores: Scores) -> Tensor:
    """[W, V] logits by slot."""
    if isinstance(scores, TorchScores):
        return scores.tensor
    if isinstance(scores, NumpyScores):
        return torch.from_numpy(scores.rows)
    return torch.from_numpy(scores.logits(range(scores.starts[-1])))


def nbytes(cache: TreeCache) -> int:
    """Bytes that a cache's keys and values take."""
    return sum(states.nbytes for states in cache.blocks)


def extended(model: LanguageModel, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Tensor:
    """A pass, and [B, w, V] logits after the nodes of each row that are wanted; NaN past a row's own."""
    scores = model.extend(rows, nodes)
    return pad_sequence(list(tensor_of(scores).clone().split([new.scored for new in nodes])), True, float("nan"))


def prefilled(model: LanguageModel, ids: Sequence[int]) -> tuple[Row, Tensor]:
    """A new row that has read a text, and [V] logits after it."""
    row, scores = prefill_scored(model, ids)
    return row, tensor_of(scores)[0].clone()
