"""Scores on a device: each call computes there and brings what it gives to the host in one transfer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...sampling.warping import Warping
from ...scores import Draft, Edits, NumpyScores, Scores, Slots, Top
from .torch_sampling import gumbel_noise, largest, warp_rows

_ROWS = 8
"""Slots that are looked at together: bounds what is allocated beyond the logits."""


class TorchScores(Scores):
    """Scores by torch.

    Args:
        tensor: [W, V] logits by slot, on any device; they are not changed.
    """

    def __init__(self, tensor: Tensor, counts: Sequence[int]) -> None:
        super().__init__(counts)
        self._tensor: Tensor | None = tensor

    def expire(self) -> None:
        super().expire()
        self._tensor = None

    @property
    def tensor(self) -> Tensor:
        """[W, V] logits by slot, which must not be changed."""
        self.check()
        assert self._tensor is not None  # noqa: S101
        return self._tensor

    def _edited(self, slots: Slots, edits: Edits | None) -> Tensor:
        """[w, V] float32 logits."""
        every = self.tensor
        at = np.asarray(slots, np.int64)
        if not np.array_equal(at, np.arange(len(every))):
            every = every[torch.from_numpy(at).to(every.device, non_blocking=True)]
        return every.float() if edits is None else _edited(every.float(), edits)

    @torch.inference_mode()
    def argmax(self, slots: Slots, edits: Edits | None = None) -> NDArray[np.int32]:
        best = self._edited(slots, edits).argmax(-1, keepdim=True)
        return self._tokens(slots, best)[:, 0].int().cpu().numpy()

    @torch.inference_mode()
    def top(self, slots: Slots, count: int, edits: Edits | None = None, draft: Draft | None = None) -> Top:
        parts = []
        for at, rows in enumerate(self._edited(slots, edits).split(_ROWS)):
            chunk = slice(at * _ROWS, (at + 1) * _ROWS)
            if draft is not None:
                rows = self._drafted(rows, slots[chunk], draft.warpings[chunk], draft.keys and draft.keys[chunk])
            best, logprobs = largest(rows, min(count, rows.shape[1])), rows.log_softmax(-1)
            p = logprobs.exp()
            entropy = -torch.linalg.vecdot(p, logprobs.clamp(min=torch.finfo(torch.float32).min))  # 0 log 0 = 0
            columns = (self._tokens(slots[chunk], best).double(), logprobs.gather(-1, best).double(), entropy[:, None])
            parts.append(torch.cat(columns, dim=1))
        found = torch.cat(parts).cpu().numpy()
        tokens, logprobs, entropies = np.split(found, [(found.shape[1] - 1) // 2, found.shape[1] - 1], axis=1)
        return Top(tokens.astype(np.int32), logprobs.astype(np.float32), entropies[:, 0].astype(np.float32))

    @torch.inference_mode()
    def log_probabilities(self, slots: Slots, tokens: Sequence[int]) -> NDArray[np.float32]:
        rows = self._edited(slots, None)
        ids = torch.tensor(tokens, dtype=torch.int64).to(rows.device, non_blocking=True)
        return (rows.gather(1, ids[:, None])[:, 0] - rows.logsumexp(-1)).cpu().numpy()

    @torch.inference_mode()
    def draw(
        self, slots: Slots, keys: Sequence[int], warpings: Sequence[Warping], edits: Edits | None = None
    ) -> NDArray[np.int32]:
        rows = self._edited(slots, edits)
        parts = []
        for at in range(0, len(rows), _ROWS):
            chunk = slice(at, at + _ROWS)
            kinds = warpings[chunk]
            warped, noise = warp_rows(rows[chunk], kinds), self._noise(slots[chunk], keys[chunk])
            if not all(kind.temperature for kind in kinds):
                noise = noise * torch.tensor([[float(kind.temperature > 0)] for kind in kinds]).to(rows.device)
            parts.append((warped.double() + noise).argmax(-1, keepdim=True))
        return self._tokens(slots, torch.cat(parts))[:, 0].int().cpu().numpy()

    @torch.inference_mode()
    def logits(self, slots: Slots, edits: Edits | None = None) -> NDArray[np.float32]:
        return self._edited(slots, edits).cpu().numpy().copy()

    def _drafted(self, rows: Tensor, slots: Slots, warpings: Sequence[Warping], keys: Sequence[int] | None) -> Tensor:
        """[w, V] logits of the distributions of drafts (``Draft``)."""
        rows = warp_rows(rows, warpings)
        random = [i for i, warping in enumerate(warpings) if warping.temperature]
        if keys is not None and random:
            scale = torch.tensor([warpings[i].temperature for i in random])[:, None].to(rows.device)
            noise = self._noise([slots[i] for i in random], [keys[i] for i in random])
            rows[random] = (rows[random] + noise.float()) * scale
        return rows

    def _noise(self, slots: Slots, keys: Sequence[int]) -> Tensor:
        """[w, V] the noise of each slot's key."""
        number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        noise = gumbel_noise(list(number), self.tensor.shape[1], self.tensor.device)
        return noise[[number[key] for key in keys]] if len(number) > 1 else noise.expand(len(keys), -1)

    def _tokens(self, slots: Slots, entries: Tensor) -> Tensor:
        """[w, k] the tokens of entries of the slots' logits."""
        return entries


def _edited(rows: Tensor, edits: Edits) -> Tensor:
    """[w, V] logits in new memory, as ``scores.edited`` changes them."""
    rows, device = rows.clone(), rows.device
    if changed := [i for i, edit in enumerate(edits) if edit.changes is not None]:
        lists = [changes for i in changed if (changes := edits[i].changes) is not None]
        which = np.repeat(changed, [len(own.tokens) for own in lists])
        at = tuple(
            torch.from_numpy(x.astype(np.int64)).to(device, non_blocking=True)
            for x in (which, np.concatenate([own.tokens for own in lists]))
        )
        columns = zip(*((own.positive, own.negative, own.addend) for own in lists), strict=True)
        positive, negative, addend = (torch.from_numpy(np.concatenate(c)).to(device) for c in columns)
        x = rows[at]
        rows[at] = x * torch.where(x > 0, positive, negative) + addend
    masks = {i: edit.mask for i, edit in enumerate(edits) if edit.mask is not None and edit.mask.any()}
    if masks:
        words = torch.from_numpy(np.stack([*masks.values()]).view(np.int32)).to(device, non_blocking=True)
        bits = words[..., None] >> torch.arange(32, dtype=torch.int32, device=device) & 1
        allowed = bits.flatten(1)[:, : rows.shape[1]].bool()
        own = torch.tensor([*masks]).to(device, non_blocking=True)
        rows[own] = rows[own].masked_fill(~allowed, float("-inf"))
    return rows


def scores_of(logits: Tensor, counts: Sequence[int]) -> Scores:
    """Scores of [W, V] logits, ``counts`` of each row: where they lie on an accelerator, by NumPy on a CPU."""
    if logits.device.type != "cpu":
        return TorchScores(logits, counts)
    return NumpyScores(logits.detach().float().numpy(), counts)


def tensor_of(scores: Scores) -> Tensor:
    """[W, V] logits by slot, where they are; they must not be changed."""
    if isinstance(scores, TorchScores):
        return scores.tensor
    if isinstance(scores, NumpyScores):
        return torch.from_numpy(scores.rows)
    return torch.from_numpy(scores.logits(range(scores.starts[-1])))
