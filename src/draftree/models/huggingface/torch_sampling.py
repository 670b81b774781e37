"""``sampling.noise`` and ``sampling.warping`` on rows of torch tensors, on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...sampling.warping import GOLDEN, MASK64, MIX1, MIX2, Warping

_NUCLEUS = 1024
"""Tokens that are sorted at first to find a top-p set on a CPU; the whole vocabulary when they hold too little mass."""
_CHUNK = 256
"""Most tokens whose largest logit is found at once."""


def warp(logits: Tensor, warping: Warping) -> Tensor:
    """[R, V] float32 logits warped (``sampling.warping.warp``)."""
    x = logits / warping.temperature
    if 0 < warping.top_k < x.shape[-1]:
        x = _drop_below(x, x.topk(warping.top_k).values[:, -1:])
    if warping.top_p < 1:
        x = _drop_below(x, _nucleus_edge(x, warping.top_p))
    if warping.min_p > 0:
        # p >= min_p * p_max  <=>  x >= x_max + ln(min_p)
        x = _drop_below(x, x.amax(-1, keepdim=True) + torch.tensor(warping.min_p).log().item())
    return x


def warp_rows(logits: Tensor, warpings: Sequence[Warping]) -> Tensor:
    """``warp`` of each row, in new memory; rows at temperature 0 come back as they are."""
    kinds = set(warpings)
    if len(kinds) == 1 and warpings[0].temperature:
        return warp(logits, warpings[0])
    out = logits.clone()
    for warping in kinds:
        if warping.temperature:
            rows = [r for r, own in enumerate(warpings) if own == warping]
            out[rows] = warp(logits[rows], warping)
    return out


def _drop_below(x: Tensor, edge: Tensor) -> Tensor:
    return x.masked_fill(x < edge, float("-inf"))


def _nucleus_edge(x: Tensor, top_p: float) -> Tensor:
    """[R, 1] smallest logit of the smallest set whose probability reaches ``top_p``."""
    total = x.double().logsumexp(-1, keepdim=True)
    vocab = x.shape[-1]
    width = vocab if x.is_cuda else min(_NUCLEUS, vocab)
    while True:
        top = x.topk(width).values
        mass = (top - total).exp().cumsum(-1)
        if width == vocab or bool((mass[:, -1] >= top_p).all()):
            break
        width = vocab
    # A token stays iff the mass of the tokens before it is below top_p; the first always stays.
    kept = 1 + (mass[:, :-1] < top_p).sum(-1, keepdim=True)
    return top.gather(-1, kept - 1)


def signed(x: int) -> int:
    """64 bits as a signed integer, which is what int64 tensors hold."""
    x &= MASK64
    return x - (1 << 64) if x >> 63 else x


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical (not arithmetic) right shift of int64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _shaken(x: Tensor, bits: int) -> Tensor:
    """``x`` itself, combined in place with its upper bits."""
    return x.bitwise_xor_(_shift(x, bits))


def _mixed(x: Tensor) -> Tensor:
    return _shaken(_shaken(_shaken(x, 30).mul_(signed(MIX1)), 27).mul_(signed(MIX2)), 31)


@lru_cache(maxsize=8)
def _counters(vocab: int, device: torch.device) -> Tensor:
    return torch.arange(vocab, device=device) * signed(GOLDEN)


def gumbel_noise(keys: Sequence[int], vocab: int, device: torch.device | str = "cpu") -> Tensor:
    """[R, vocab] float64 noise of keys (``sampling.noise.gumbel_noise``)."""
    return _gumbel(_on(keys, torch.device(device)), _counters(vocab, torch.device(device)))


def gumbel_noise_of(keys: Sequence[int], tokens: Tensor) -> Tensor:
    """[R, K] of ``gumbel_noise`` that of some tokens alone, [R, K] int64."""
    return _gumbel(_on(keys, tokens.device), tokens * signed(GOLDEN))


def _on(keys: Sequence[int], device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(keys, np.uint64).view(np.int64)).to(device, non_blocking=True)


def _gumbel(keys: Tensor, counters: Tensor) -> Tensor:
    uniform = _shift(_mixed(counters + keys[:, None]), 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def largest(logits: Tensor, count: int) -> Tensor:
    """[R, count] int64 where the largest of [R, V] logits are, the largest first.

    All of them are in the chunks with the ``count`` largest maxima.
    """
    chunk = math.gcd(logits.shape[-1], _CHUNK)
    if min(chunk, logits.shape[-1] // chunk) <= 2 * count:
        return logits.topk(count).indices
    chunks = logits.reshape(len(logits), -1, chunk)
    where = chunks.amax(-1).topk(count).indices
    at = chunks.gather(1, where[..., None].expand(-1, -1, chunk)).flatten(1).topk(count).indices
    return where.gather(-1, at // chunk) * chunk + at % chunk
