"""Passes of a draft head's layers over tokens of many rows, which a runner makes eagerly or in graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..abilities import FeatureModel
from ..huggingface.attention import attend_as_one
from ..huggingface.cache import TreeCache, packed, padded
from ..huggingface.runner import Made, Pass
from .eagle_head import DraftNetwork


class HeadPasses:
    """Makes the passes of one head (``EagerRunner``): of each wanted token they give the state that it predicts.

    Args:
        network: of the head.
        target: whose embeddings it reads where it has none of its own.
        device: that it computes on.
    """

    splits, masks = False, torch.bool

    def __init__(self, network: DraftNetwork, target: FeatureModel, device: torch.device) -> None:
        self._network, self._target, self.device = network, target, device
        self._turns: Tensor | None = None

    def forward(self, step: Pass, cache: TreeCache) -> Made:
        """One pass (``Runner.forward``); [W, H] states, of all tokens or of the last ones (``Pass.lasts``)."""
        blocks, at = self._network.blocks, cache.placement
        states, turns = self._read(step, at.slots)
        if not step.lasts:
            for number in range(len(blocks)):
                states = self._through(number, states, turns, step.mask, cache)
            return None, self._network.predicted(states)[0]
        slots = torch.arange(at.end, device=self.device)
        for number in range(len(blocks) - 1):
            seen = slots <= padded(step.positions[None, None, :, None], at.count, at.sources)
            states = self._through(number, states, turns, seen, cache)
        queries, keys, values = self._attend_with(len(blocks) - 1, states, turns, cache)
        found = attend_as_one(queries[0, step.wanted][:, :, None], keys, values, step.mask, None)
        outputs = blocks[-1].finish(states[0, step.wanted][:, None], found.flatten(2))
        return None, self._network.predicted(outputs)[:, 0]

    def _read(self, step: Pass, slots: int) -> tuple[Tensor, Tensor]:
        """[1, T, I] what the first layer reads; [1, T, ...] rotations, of a table for all slots."""
        if self._turns is None or self._turns.shape[0] < slots:
            self._turns = self._network.turns(torch.arange(slots, device=self.device))
        embed = self._network.embed_tokens
        embedded = self._target.embeddings(step.tokens) if embed is None else embed.forward(step.tokens)
        states = self._network.read(embedded[None], step.states[None])  # type: ignore[index]
        return states, self._turns[step.positions[None]]

    def _attend_with(
        self, number: int, states: Tensor, turns: Tensor, cache: TreeCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[1, T, heads, D] queries of a layer; [B, kv_heads, S, D] keys and values of all slots."""
        queries, keys, values = self._network.blocks[number].attend_with(states, turns)
        return queries, *cache.update(keys.transpose(1, 2), values.transpose(1, 2), number)

    def _through(self, number: int, states: Tensor, turns: Tensor, mask: Tensor | None, cache: TreeCache) -> Tensor:
        """[1, T, I] -> [1, T, H] through a layer whose queries see what [B, 1, width, S] allows."""
        queries, keys, values = self._attend_with(number, states, turns, cache)
        at = cache.placement
        lines = padded(queries.transpose(1, 2), at.count, at.sources)
        found = packed(attend_as_one(lines, keys, values, mask, None), at.index, at.sources)
        return self._network.blocks[number].finish(states, found.flatten(2))
