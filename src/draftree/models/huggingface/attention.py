"""Attention for tree passes: transformers' SDPA without copying keys and values per query head.

Grouped-query models share each key head among several query heads. Under a 4-D mask transformers repeats keys and
values for every query head in every layer of every pass. PyTorch's CPU kernel reads the shared heads in place, with
bit-equal results; for its CUDA kernels, which do not, the query heads of a key head become further queries of it.
Those kernels take one block of queries a key head, which walks the whole context alone: few queries are faster by
matrix products (``by_products``).

A pass brings the tokens of all rows packed, as one sequence; here alone each row has a line of its own (``laid_out``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from .cache import packed, padded
from .pass_inputs import Placement

NAME = "draftree_sdpa"
EAGER = "draftree_eager"
_OURS = {"sdpa": NAME, "eager": EAGER}

Attention = Callable[..., tuple[Tensor, Tensor | None]]
"""transformers' interface: a layer, query [B, H, n, D], key and value [B, kv_heads, S, D], mask -> [B, n, H, D] and
weights, or None. Some layers give the mask by its name, ``attention_mask``."""

_UNDER_WAY = local()


@contextmanager
def laid_out(at: Placement) -> Iterator[None]:
    """What attends in here, in this thread, belongs to a pass that was placed so."""
    _UNDER_WAY.placement = at
    try:
        yield
    finally:
        _UNDER_WAY.placement = None


def by_rows(attention: Attention) -> Attention:
    """An attention that takes the packed tokens of the pass under way (``laid_out``); else it is what it was."""

    @wraps(attention)
    def run(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        at: Placement | None = getattr(_UNDER_WAY, "placement", None)
        if at is None or at.count == 1:
            return attention(module, query, key, value, attention_mask, **options)
        lines, _ = attention(module, padded(query, at.count, at.sources), key, value, attention_mask, **options)
        return packed(lines, at.index), None

    return run


def grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """An ``Attention``."""
    mask = attention_mask
    special = options.get("dropout") or any(options.get(name) is not None for name in ("softcap", "position_bias"))
    if mask is None or mask.shape[1] > 1 or special:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    scaling = options.get("scaling")
    if query.device.type != "cpu":
        return attend_as_one(query, key, value, mask, scaling), None
    attended = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return attended.transpose(1, 2).contiguous(), None


def attend_as_one(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention by kernels that take as many query heads as key heads.

    Args:
        query: [B, H, n, D].
        key, value: [B, kv_heads, S, D].
        mask: [B, 1, n, S], added to scores, or bool; None: all see all.
        scaling: of scores; None: 1 / sqrt(D).

    Returns:
        [B, n, H, D].
    """
    heads, n = query.shape[1:3]
    group = heads // key.shape[1]
    grouped = query.unflatten(1, (-1, group)).flatten(2, 3)  # [B, kv_heads, group x n, D]
    shared = mask if mask is None or mask.shape[2] == 1 else mask.repeat(1, 1, group, 1)
    few = grouped.shape[2] <= _FEW and grouped.shape[:3].numel() * key.shape[2] <= _MOST_SCORES
    if query.is_cuda and shared is not None and few:
        attended = by_products(grouped, key, value, shared, scaling)
    else:
        attended = scaled_dot_product_attention(grouped, key, value, attn_mask=shared, scale=scaling)
    apart: Tensor = attended.unflatten(2, (group, n)).permute(0, 3, 1, 2, 4)
    return apart.flatten(2, 3)


_FEW, _MOST_SCORES = 128, 1 << 24
"""Most queries a key head that attend by products, and most scores, which take four bytes each."""
_PIECE = 64
"""Slots of values that are summed together, and apart from others."""


def by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Attention by batched matrix products, with scores in float32: all of a GPU works, however few the queries.

    Args:
        query: [B, H, m, D].
        key, value: [B, H, S, D].
        mask: [B, 1, m or 1, S], added to scores, or bool.
        scaling: of scores; None: 1 / sqrt(D).

    Returns:
        [B, H, m, D].
    """
    count, heads, m, size = query.shape
    slots = key.shape[2]
    scores = _product(query.flatten(0, 1), key.flatten(0, 1).mT).unflatten(0, (count, heads))
    scores.mul_(size**-0.5 if scaling is None else scaling)
    scores = scores.masked_fill_(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1).to(value.dtype)
    if slots % _PIECE or slots == _PIECE:
        return torch.matmul(weights, value)
    # one product over all slots would leave each head to one block of threads
    pieces = weights.unflatten(-1, (-1, _PIECE)).transpose(2, 3)  # [B, H, pieces, m, slots of a piece]
    sums = _product(pieces.flatten(0, 2), value.unflatten(2, (-1, _PIECE)).flatten(0, 2))
    attended: Tensor = sums.unflatten(0, (count, heads, -1)).sum(2).to(value.dtype)
    return attended


def _product(left: Tensor, right: Tensor) -> Tensor:
    """[b, m, n] float32 of [b, m, k] and [b, k, n]."""
    if left.dtype == torch.float32:
        return torch.bmm(left, right)
    return torch.bmm(left, right, out_dtype=torch.float32)


def eager(module: nn.Module, *given: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """An ``Attention``: the eager one of the layer's own modeling code."""
    attention: Attention = sys.modules[type(module).__module__].eager_attention_forward
    return attention(module, *given, **options)


def take_over(model: PreTrainedModel) -> None:
    """Give a model that uses transformers' SDPA ``grouped_sdpa``, and let it or eager attention take packed rows."""
    name = _OURS.get(model.config._attn_implementation)
    if name and model._can_set_attn_implementation():
        AttentionInterface.register(NAME, by_rows(grouped_sdpa))
        AttentionMaskInterface.register(NAME, sdpa_mask)
        AttentionInterface.register(EAGER, by_rows(eager))
        AttentionMaskInterface.register(EAGER, eager_mask)
        model.set_attn_implementation(name)


def give_back(model: PreTrainedModel) -> None:
    """Let a model attend as it did before ``take_over``."""
    name = {ours: stock for stock, ours in _OURS.items()}.get(model.config._attn_implementation)
    if name:
        model.set_attn_implementation(name)


def takes_packed_rows(model: PreTrainedModel) -> bool:
    """Several rows can share a pass: the model attends by one of the functions here."""
    return model.config.get_text_config(decoder=True)._attn_implementation in (NAME, EAGER)
