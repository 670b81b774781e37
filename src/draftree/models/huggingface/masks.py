"""Masks as transformers' models take them: one, or one for each type of layers, of which some have a sliding window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..base import DRAFTED, PROMPT, difference
from .inspection import FAILURES, tolerance, whole_number

_SLIDING = "sliding_attention"
_NARROW = 3
"""Tokens of a window beyond which the short texts of the self-test go."""


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as eager attention adds it to scores; SDPA takes either kind."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def within(seen: Tensor, window: int) -> Tensor:
    """Of the slots [..., S] that a token attends to, bool, those of the last ``window`` positions, its own included.

    They are the token's path, in order. So the k-th of them is at position k, wherever it lies.
    """
    if seen.shape[-1] <= window:
        return seen
    counts = seen.cumsum(-1, dtype=torch.int32)
    return seen & (counts > counts[..., -1:] - window)


@dataclass(frozen=True, slots=True)
class Windows:
    """Sliding layers of a model whose forward takes masks for them.

    Attributes:
        config: of its text model. Each pass reads its ``sliding_window``, as transformers' own masks do: to how many
            tokens of its path a token attends, itself included.
        layer_types: of all layers. The forward takes a mask of each by name; none: all slide, and it takes one mask.
    """

    config: Any
    layer_types: frozenset[str]

    def masks(self, seen: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Additive ones.

        Args:
            seen: [B, 1, n, S] bool, the slots of each token's path.
        """
        near = within(seen, self.config.sliding_window)
        sliding = additive(near, dtype)
        if not self.layer_types:
            return sliding
        whole = sliding if near is seen else additive(seen, dtype)
        return {kind: sliding if kind == _SLIDING else whole for kind in self.layer_types}

    @contextmanager
    def narrowed(self) -> Iterator[None]:
        """In here windows are so narrow, the model's own masks included, that short texts go beyond them."""
        window = self.config.sliding_window
        self.config.sliding_window = min(window, _NARROW)
        try:
            yield
        finally:
            self.config.sliding_window = window


@torch.inference_mode()
def find_windows(model: PreTrainedModel) -> Windows | None:
    """A model's sliding layers, if one forward with masks for them gives the logits of one that makes its own.

    Returns:
        None: no layer slides, or the forward takes no such masks.
    """
    config = model.config.get_text_config(decoder=True)
    types = frozenset(getattr(config, "layer_types", None) or ())
    if not whole_number(config, "sliding_window") or (types and _SLIDING not in types):
        return None
    windows, tokens = Windows(config, types), [*PROMPT, *DRAFTED]
    ids = torch.tensor([tokens], device=model.device) % model.get_output_embeddings().weight.shape[0]
    positions = torch.arange(len(tokens), device=model.device)
    seen = (positions <= positions[:, None])[None, None]
    try:
        with windows.narrowed():
            own = model(input_ids=ids, use_cache=False).logits
            given = windows.masks(seen, model.dtype)
            ours = model(input_ids=ids, attention_mask=given, position_ids=positions[None], use_cache=False).logits
    except FAILURES:
        return None
    apart = difference(ours.float().cpu().numpy(), own.float().cpu().numpy())
    return windows if apart <= tolerance(model.dtype) else None
