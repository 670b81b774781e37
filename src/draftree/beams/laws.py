"""The laws of a token after a node, the target's and a drafter's, for beams that are sampled or searched.

Pure functions of logits. Sampled beams: processors (target only), then warping, then a softmax, once: what plain
sampling draws from. Searched beams: a softmax, then processors, as in transformers' beam search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..config import SamplingParams
from ..sampling import warp

Histories = Callable[[], Sequence[Sequence[int]]]
"""Token ids before each row's token, prompt included; asked for only where processors read them."""


def target_laws(logits: Tensor, params: SamplingParams, histories: Histories) -> Tensor:
    """[R, V] log-probabilities (nats) of the next token: float64 sampled, float32 searched.

    Args:
        logits: [R, V].
        params: how the request is decoded.
        histories: [R].
    """
    if params.temperature:
        rows = _processed(logits.float(), params, histories)
        return warp(rows, params).double().log_softmax(-1)
    return _processed(logits.float().log_softmax(-1), params, histories)


def draft_laws(logits: Tensor, params: SamplingParams) -> Tensor:
    """[R, V] log-probabilities (nats) of a drafter's next token, warped as the target's but not processed."""
    rows = logits.float()
    return warp(rows, params).double().log_softmax(-1) if params.temperature else rows.log_softmax(-1)


def _processed(rows: Tensor, params: SamplingParams, histories: Histories) -> Tensor:
    if not params.processors:
        return rows
    done = []
    for row, history in zip(rows.split(1), histories(), strict=True):
        ids = torch.tensor([list(history)]).to(rows.device, non_blocking=True)
        for processor in params.processors:
            row = processor(ids, row)
        done.append(row)
    return torch.cat(done)


def fitted(logits: Tensor, vocab: int) -> Tensor:
    """[R, V] of [R, K] logits whose first V entries count: cut where the output layer is padded, -inf where it ends."""
    if logits.shape[-1] >= vocab:
        return logits[..., :vocab]
    return torch.nn.functional.pad(logits, (0, vocab - logits.shape[-1]), value=float("-inf"))
