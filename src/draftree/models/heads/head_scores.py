"""Scores of a pass of a draft head, whose logits are over the draft vocabularies of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scores import Edits, Slots
from ..huggingface.torch_sampling import gumbel_noise_of
from ..huggingface.torch_scores import TorchScores


class HeadScores(TorchScores):
    """Scores over the draft vocabulary of each row; of an edit only the mask counts.

    Args:
        tensor: [W, K] logits by slot.
        ids: [W, K] int64, the tokens of the logits.
    """

    def __init__(self, tensor: Tensor, counts: Sequence[int], ids: Tensor) -> None:
        super().__init__(tensor, counts)
        self._ids = ids

    def _edited(self, slots: Slots, edits: Edits | None) -> Tensor:
        rows = super()._edited(slots, None)
        if edits is None or all(edit.mask is None for edit in edits):
            return rows
        rows = rows.clone()
        for row, slot, (_, mask) in zip(rows, slots, edits, strict=True):
            if mask is not None:
                bits = torch.from_numpy(mask.view(np.int32)).to(rows.device)
                ids = self._ids[slot]
                allowed = (bits[ids >> 5] >> (ids & 31) & 1).bool()
                if bool((allowed & row.isfinite()).any()):
                    row.masked_fill_(~allowed, float("-inf"))
        return rows

    def _noise(self, slots: Slots, keys: Sequence[int]) -> Tensor:
        return gumbel_noise_of(keys, self._ids[list(slots)])

    def _tokens(self, slots: Slots, entries: Tensor) -> Tensor:
        return self._ids[list(slots)].gather(1, entries)

    @torch.inference_mode()
    def log_probabilities(self, slots: Slots, tokens: Sequence[int]) -> NDArray[np.float32]:
        rows = self._edited(slots, None)
        other = self._ids[list(slots)] != torch.tensor(tokens, device=rows.device)[:, None]
        return (rows.masked_fill(other, float("-inf")).amax(-1) - rows.logsumexp(-1)).cpu().numpy()
