"""Scores on a device: each call computes there and brings what it gives to the host in one transfer.

Noise and warping are those of ``sampling``, on rows of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby, repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...sampling.warping import GOLDEN, MASK64, MIX1, MIX2, Warping
from ...scores import Draft, Edits, NumpyScores, Scores, Slots, Top
from .pass_inputs import on_device


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


def warp_rows(logits: Tensor, warpings: Sequence[Warping], noise: Tensor | None = None) -> Tensor:
    """``warp`` of each row; rows at temperature 0 come back as they are.

    Args:
        noise: of the target's draws: rows are those of drafts that know it (``Draft.keys``).
    """
    parts, at = list[Tensor](), 0
    for warping, run in groupby(warpings):
        rows, count = logits[at:], len([*run])
        rows, at = rows[:count], at + count
        if warping.temperature:
            rows = warp(rows, warping)
            if noise is not None:
                rows = (rows + noise[at - count : at].float()) * warping.temperature
        parts.append(rows)
    return _joined(parts)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def _drop_below(x: Tensor, edge: Tensor) -> Tensor:
    return x.masked_fill(x < edge, float("-inf"))


def _nucleus_edge(x: Tensor, top_p: float) -> Tensor:
    """[R, 1] smallest logit of the smallest set whose probability reaches ``top_p``."""
    top = x.sort(-1, descending=True).values
    mass = (top - x.double().logsumexp(-1, keepdim=True)).exp().cumsum(-1)
    # A token stays iff the mass of the tokens before it is below top_p; the first always stays.
    count = 1 + (mass[:, :-1] < top_p).sum(-1, keepdim=True)
    return top.gather(-1, count - 1)


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


def gumbel_noise(keys: Sequence[int], tokens: Tensor) -> Tensor:
    """[R, K] float64 noise of keys (``sampling.warping.gumbel_noise``), that of [R, K] int64 tokens."""
    (numbers,) = on_device(tokens.device, np.array(keys, np.uint64).view(np.int64))
    return _gumbel(numbers, tokens * signed(GOLDEN))


def _gumbel(keys: Tensor, counters: Tensor) -> Tensor:
    uniform = _shift(_mixed(counters + keys[:, None]), 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def ranked(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[R, count] where the largest of [R, V] logits are; [R, count + 1] their log-probabilities, and the entropies."""
    best, logprobs = rows.topk(min(count, rows.shape[1])).indices, rows.log_softmax(-1)
    entropy = torch.special.entr(logprobs.exp()).sum(-1, keepdim=True)
    return best, torch.cat((logprobs.gather(-1, best), entropy), dim=1)


def _top_of(packed: Tensor) -> Top:
    """[R, 2k + 1] tokens, log-probabilities and an entropy, in float32, in which ids are whole numbers as far as 2^24:
    one tensor is one transfer."""
    ids, logprobs, entropies = np.split(packed.cpu().numpy(), [packed.shape[1] // 2, packed.shape[1] - 1], axis=1)
    return Top(ids.astype(np.int32), logprobs, entropies[:, 0])


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

    def _at(self, rows: Tensor, slots: Slots) -> Tensor:
        """[w, K] of [W, K] those of slots."""
        at = np.asarray(slots, np.int64)
        return rows if np.array_equal(at, np.arange(len(rows))) else rows.index_select(0, *on_device(rows.device, at))

    def _edited(self, slots: Slots, edits: Edits | None) -> Tensor:
        """[w, V] float32 logits."""
        rows = self._at(self.tensor, slots).float()
        return rows if edits is None else _edited(rows, edits)

    @torch.inference_mode()
    def argmax(self, slots: Slots, edits: Edits | None = None) -> NDArray[np.int32]:
        best = self._edited(slots, edits).argmax(-1, keepdim=True)
        return self._tokens(slots, best).cpu().numpy()[:, 0].astype(np.int32)

    @torch.inference_mode()
    def top(self, slots: Slots, count: int, edits: Edits | None = None, draft: Draft | None = None) -> Top:
        places, values = list[Tensor](), list[Tensor]()
        chunks = self._edited(slots, edits).split(_ROWS)
        keys = draft.keys if draft is not None and any(warping.temperature for warping in draft.warpings) else None
        noises = repeat(None, len(chunks)) if keys is None else self._noise(slots, keys)
        for at, (rows, noise) in enumerate(zip(chunks, noises, strict=True)):
            if draft is not None:
                rows = warp_rows(rows, draft.warpings[at * _ROWS :][:_ROWS], noise)
            best, figures = ranked(rows, count)
            places.append(best)
            values.append(figures)
        return _top_of(torch.cat((self._tokens(slots, _joined(places)), _joined(values)), dim=1))

    @torch.inference_mode()
    def log_probabilities(self, slots: Slots, tokens: Sequence[int]) -> NDArray[np.float32]:
        rows = self._edited(slots, None)
        (ids,) = on_device(rows.device, np.array(tokens, np.int64))
        return (rows.gather(1, ids[:, None])[:, 0] - rows.logsumexp(-1)).cpu().numpy()

    @torch.inference_mode()
    def draw(
        self, slots: Slots, keys: Sequence[int], warpings: Sequence[Warping], edits: Edits | None = None
    ) -> NDArray[np.int32]:
        parts, chunks = [], self._edited(slots, edits).split(_ROWS)
        for at, (rows, noise) in enumerate(zip(chunks, self._noise(slots, keys), strict=True)):
            kinds = warpings[at * _ROWS :][:_ROWS]
            for row_noise, kind in zip(noise, kinds, strict=True):
                if not kind.temperature:
                    row_noise.zero_()
            parts.append((warp_rows(rows, kinds).double() + noise).argmax(-1, keepdim=True))
        return self._tokens(slots, torch.cat(parts))[:, 0].int().cpu().numpy()

    @torch.inference_mode()
    def logits(self, slots: Slots, edits: Edits | None = None) -> NDArray[np.float32]:
        return self._edited(slots, edits).cpu().numpy().copy()

    def _noise(self, slots: Slots, keys: Sequence[int]) -> Iterator[Tensor]:
        """[w, V] float64 noise of each slot's key, ``_ROWS`` at a time, in new memory."""
        arrays, device = list[NDArray[np.int64]](), self.tensor.device
        for at in range(0, len(keys), _ROWS):
            chunk = keys[at : at + _ROWS]
            number = {key: i for i, key in enumerate(dict.fromkeys(chunk))}
            arrays += np.array([*number], np.uint64).view(np.int64), np.array([number[key] for key in chunk], np.int64)
        parts, counters = on_device(device, *arrays), _counters(self.tensor.shape[1], device)
        for different, which in zip(parts[::2], parts[1::2], strict=True):
            yield _gumbel(different, counters).index_select(0, which)

    def _tokens(self, slots: Slots, entries: Tensor) -> Tensor:
        """[w, k] the tokens of entries of the slots' logits."""
        return entries


def _edited(rows: Tensor, edits: Edits) -> Tensor:
    """[w, V] logits in new memory, as ``scores.edited`` changes them."""
    rows, device = rows.clone(), rows.device
    lists = {i: edit.changes for i, edit in enumerate(edits) if edit.changes is not None}
    masks = {i: edit.mask for i, edit in enumerate(edits) if edit.mask is not None and edit.mask.any()}
    if lists:
        which = np.repeat([*lists], [len(change.tokens) for change in lists.values()])
        tokens = np.concatenate([change.tokens for change in lists.values()]).astype(np.int64)
        columns = zip(*((change.positive, change.negative, change.addend) for change in lists.values()), strict=True)
        numbers = [np.concatenate(c).astype(np.float64).view(np.int64) for c in columns]
        row, token, *bits = on_device(device, which, tokens, *numbers)
        positive, negative, addend = (column.view(torch.float64).float() for column in bits)
        x = rows[row, token]
        rows[row, token] = x * torch.where(x > 0, positive, negative) + addend
    if masks:
        masked, words = on_device(device, np.array([*masks]), np.stack([*masks.values()]).astype(np.int64))
        every = words.view(len(masked), -1, 1) >> torch.arange(32, device=device) & 1
        allowed = every.flatten(1)[:, : rows.shape[1]].bool()
        rows[masked] = rows[masked].masked_fill(~allowed, float("-inf"))
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
        ids: [W, K] int64 their tokens.
        best: [W, 2k + 1] the most probable tokens, their log-probabilities and the entropy; None: not known yet.
    """

    def __init__(self, tensor: Tensor, ids: Tensor, counts: Sequence[int], best: Tensor | None = None) -> None:
        super().__init__(tensor, counts)
        self._ids: Tensor | None = ids
        self._best = best

    def expire(self) -> None:
        super().expire()
        self._ids = self._best = None

    @property
    def ids(self) -> Tensor:
        """[W, K] int64 the tokens of the logits by slot."""
        self.check()
        assert self._ids is not None  # noqa: S101
        return self._ids

    @torch.inference_mode()
    def top(self, slots: Slots, count: int, edits: Edits | None = None, draft: Draft | None = None) -> Top:
        self.check()
        warped = draft is not None and any(warping.temperature for warping in draft.warpings)
        masked = any(one.mask is not None for one in edits or ())
        if warped or masked or self._best is None or count > self._best.shape[1] // 2:
            return super().top(slots, count, edits, draft)
        ids, logprobs, entropies = _top_of(self._at(self._best, slots))
        return Top(ids[:, :count], logprobs[:, :count], entropies)

    def _edited(self, slots: Slots, edits: Edits | None) -> Tensor:
        rows = super()._edited(slots, None)
        masks = {i: edit.mask for i, edit in enumerate(edits or ()) if edit.mask is not None}
        if not masks:
            return rows
        masked, words = on_device(rows.device, np.array([*masks]), np.stack([*masks.values()]).astype(np.int64))
        logits, ids = rows.index_select(0, masked), self._at(self.ids, slots).index_select(0, masked)
        allowed = (words.view(len(masked), -1).gather(1, ids >> 5) >> (ids & 31) & 1).bool()
        allows_none = ~(allowed & logits.isfinite()).any(-1, keepdim=True)
        return rows.index_copy(0, masked, logits.masked_fill(~(allowed | allows_none), float("-inf")))

    def _noise(self, slots: Slots, keys: Sequence[int]) -> Iterator[Tensor]:
        return iter(gumbel_noise(keys, self._at(self.ids, slots)).split(_ROWS))

    def _tokens(self, slots: Slots, entries: Tensor) -> Tensor:
        return self._at(self.ids, slots).gather(1, entries)

    @torch.inference_mode()
    def log_probabilities(self, slots: Slots, tokens: Sequence[int]) -> NDArray[np.float32]:
        rows = self._edited(slots, None)
        (wanted,) = on_device(rows.device, np.array(tokens, np.int64))
        unwanted = self._at(self.ids, slots) != wanted[:, None]
        return (rows.masked_fill(unwanted, float("-inf")).amax(-1) - rows.logsumexp(-1)).cpu().numpy()
