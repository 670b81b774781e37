"""Attention for tree passes on a CPU: transformers' SDPA without copying keys and values per query head.

Grouped-query models share each key head among several query heads. Under a 4-D mask transformers repeats keys and
values for every query head in every layer of every pass (its CUDA kernels need that); PyTorch's CPU kernel reads the
shared heads in place. The results are bit-equal. `python -m draftree.bench.overhead` shows what it saves.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "draftree_sdpa"


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention that reads shared key heads in place; TorchScript can take it as a part.

    Args:
        query: [B, H, n, D].
        key, value: [B, kv_heads, S, D].
        mask: [B, 1, n, S], added to scores; None: causal, S = n.
        scaling: of scores; None: 1 / sqrt(D).

    Returns:
        [B, n, H, D].
    """
    causal = mask is None and query.shape[2] > 1
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=0.0, is_causal=causal, scale=scaling, enable_gqa=True
    ).transpose(1, 2)


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, n, D], key and value [B, kv_heads, S, D] -> [B, n, H, D]."""
    special = dropout or kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None
    if attention_mask is None or query.device.type != "cpu" or special:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return output
    return attend(query, key, value, attention_mask, scaling).contiguous(), None


def share_key_heads(model: PreTrainedModel) -> None:
    """Use ``grouped_sdpa`` in a model that uses transformers' SDPA; leave any other alone."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, grouped_sdpa)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
