"""The pass of a model whose layers have all been merged: embedding, layers, final norm, output layer, and no more.

What transformers does around its layers (masks that we bring along, hooks, output records) takes a millisecond of each
pass. Whether a model does anything more is found out by trying: ``direct`` gives a decoder with equal logits, or none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from .attention import NAME
from .cache import TreeCache
from .layers import NOT_ALIKE, TOLERANCE, Forward, Norm, Rotation
from .stack import Stack, stacked


class Decoder:
    """A causal model of merged layers, on its own parts.

    Raises:
        any of NOT_ALIKE: the model has other parts.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        base: Any = model.base_model
        self._embeddings: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
        self._layers: list[Forward] = [layer.forward for layer in base.layers]
        self._norm, self._rotary, self._rotation = Norm(base.norm), base.rotary_emb, Rotation()
        self._output: nn.Module = model.get_output_embeddings()
        self._stack: Stack | None = stacked(self._layers)

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: TreeCache, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """One pass over [B, n] tokens at [B, n] positions.

        Args:
            tokens, positions: int64.
            mask: [B, 1, n, S], added to attention scores; None: causal.
            cache: takes the keys and values.
            last_only: logits after the last token alone.

        Returns:
            [B, n, H] hidden states after the final norm; [B, n or 1, V] logits.
        """
        states = embedding(tokens, self._embeddings)
        turn, used = self._rotation(self._rotary.forward(states, positions)), self._layers[0].implementation
        if self._stack is not None and used == NAME:
            states = self._stack(states, turn, mask, cache)
        else:
            states = self._one_by_one(states, turn, mask, cache)
        states = self._norm.forward(states)
        return states, self._output.forward(states[:, -1:] if last_only else states)

    def _one_by_one(self, states: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, cache: TreeCache) -> Tensor:
        """The layers, with another attention, or where TorchScript does not take them."""
        if mask is None and self._layers[0].implementation == "eager":  # the others take none for causal
            mask = states.new_full((states.shape[1],) * 2, torch.finfo(states.dtype).min).triu_(1)[None, None]
        attend = self._layers[0].attention
        for layer in self._layers:
            states = layer.run(states, turn, mask, cache, attend, {})
        return states


@torch.inference_mode()
def direct(model: PreTrainedModel) -> Decoder | None:
    """A decoder for ``model`` if all of its layers are merged and nothing else is done in a pass of it."""
    ids = torch.tensor([[11, 7, 5, 3, 2], [2, 3, 5, 7, 11]]) % model.config.get_text_config(decoder=True).vocab_size
    cache = TreeCache(model.config.get_text_config(decoder=True).num_hidden_layers)
    cache.place(0, [0, 0], ids.shape[1], ids.device)
    try:
        decoder = Decoder(model)
        got = decoder(ids, torch.arange(ids.shape[1])[None], None, cache)[1]
    except NOT_ALIKE:
        return None
    want = model(input_ids=ids, use_cache=False).logits
    alike = want.shape == got.shape and float((want - got).abs().max() / want.std()) <= TOLERANCE
    return decoder if alike else None
