"""Scores on a device: each call computes there and brings what it gives to the host in one transfer.

Noise and warping are those of ``sampling``, on rows of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...sampling.warping import GOLDEN, MASK64, MIX1, MIX2, Warping
from ...scores import Draft, Edits, NumpyScores, Scores, Slots, Top

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
    top = x.sort(-1, descending=True).values
    mass = (top - x.double().logsumexp(-1, keepdim=True)).exp().cumsum(-1)
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
