"""All merged layers of a pass in one TorchScript call, bit for bit what they compute one by one.

To go from one small operation to the next takes Python as long as the operation itself, some thirty times a layer. The
arithmetic is that of ``Merged``, ``write`` and ``attend``, scripted. Whether TorchScript takes it, and computes the
same, is found out by trying: ``stacked`` gives a stack, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .attention import attend, grouped_sdpa
from .cache import TreeCache, write
from .layers import Forward
from .script import NOT_TAKEN, all_scripted, one_plan, scripted

_PROMPT, _STARTS, _NEW = 3, (3, 2), 2
"""Of the trial: tokens of its prompts, slots where its next pass begins, and new tokens there."""


class Stack:
    """Merged layers, called as one.

    Raises:
        any of NOT_TAKEN: TorchScript does not take them.
    """

    def __init__(self, layers: Sequence[Forward]) -> None:
        self._like = [(layer.number, layer.merged.empty()) for layer in layers]
        self._script = scripted(_Layers(all_scripted([layer.merged for layer in layers]))).forward

    def __call__(self, states: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, cache: TreeCache) -> Tensor:
        """[B, n, width] after the embedding -> after the last layer.

        Args:
            states: the former.
            turn: of a ``Rotation``.
            mask: [B, 1, n, S], added to attention scores; None: causal, S = n.
            cache: takes the keys and values.
        """
        at = cache.placement
        keys, values = cache.storage(self._like)
        out: Tensor = self._script(states, *turn, mask, keys, values, at.first, at.starts[0], at.end, at.index)
        return out


class _Layers(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(layers)

    def forward(
        self,
        states: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        keys: list[Tensor],
        values: list[Tensor],
        first: int,
        start: int,
        end: int,
        index: Tensor | None,
    ) -> Tensor:
        for i, layer in enumerate(self.layers):
            query, key, value = layer.before(states, cos, sin)
            key, value = write(keys[i], values[i], key, value, first, start, end, index)
            states = layer.after(states, attend(query, key, value, mask, layer.scaling))
        return states


@torch.inference_mode()
def stacked(layers: Sequence[Forward]) -> Stack | None:
    """A stack of ``layers`` if TorchScript takes them and gives the same bits as one after the other."""
    try:
        stack = Stack(layers)
        with one_plan():
            return stack if _same(stack, layers) else None
    except NOT_TAKEN:
        return None


def _same(stack: Stack, layers: Sequence[Forward]) -> bool:
    """Do both give the same states, behind no context and behind one whose rows differ in length?"""
    noise = torch.Generator().manual_seed(0)
    count, width, head = len(_STARTS), layers[0].merged.width, layers[0].merged.empty().shape[-1]
    caches = [TreeCache(1 + max(layer.number for layer in layers)) for _ in range(2)]
    for starts, n, mask in (
        ((0,) * count, _PROMPT, None),
        (_STARTS, _NEW, torch.zeros((count, 1, _NEW, max(_STARTS) + _NEW))),
    ):
        states = torch.randn((count, n, width), generator=noise)
        turn = torch.randn((count, n, 1, head), generator=noise), torch.randn((count, n, 1, head), generator=noise)
        for cache in caches:
            cache.place(0, starts, n, states.device)
        want = states
        for layer in layers:
            want = layer.run(want, turn, mask, caches[0], grouped_sdpa, {})
        if not torch.equal(stack(states, turn, mask, caches[1]), want):
            return False
    return True
