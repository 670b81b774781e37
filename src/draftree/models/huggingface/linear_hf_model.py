"""LinearHFModel: a stock Hugging Face causal model whose rows do not branch (``linear_rows``).

Each row has a cache of transformers' own, made by the model itself, and a pass of its own: what the model computes is
what its own ``generate`` computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import count
from threading import RLock

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from ...errors import UnsupportedModelError, first_line
from ...scores import Scores
from ...text.encoding import Tokenizer
from ...tree import Floats
from ..base import DRAFTED, PROMPT, Nodes, check_finite, difference
from ..linear_rows import LinearRow, LinearRows
from . import attention
from .inspection import FAILURES, describe, free_bytes, tolerance
from .torch_scores import scores_of

_CACHES = ("past_key_values", "cache_params")
"""What models call their cache, as an argument and in their output."""


@dataclass(slots=True, eq=False, kw_only=True)
class CachedRow(LinearRow):
    """A sequence inside a ``LinearHFModel``.

    Attributes:
        cache: of the tokens that are read; None: none are.
    """

    cache: Cache | None = None


class LinearHFModel(LinearRows[CachedRow]):
    """A Hugging Face causal model with forks, but no trees: it decodes without drafts, one row behind the other.

    One thread at a time can be inside it.

    Args:
        model: the Hugging Face model.
        tokenizer: the model's.
        name: what the user calls it.
        no_trees: why it can be given none.

    Raises:
        ModelFileError: its logits are no numbers.
        UnsupportedModelError: it fails, gives no cache, or decodes another text with it.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer | None, name: str, no_trees: str) -> None:
        takes = inspect.signature(model.forward).parameters
        self._cache_name, self._selects = next(filter(takes.__contains__, _CACHES), ""), "logits_to_keep" in takes
        if not self._cache_name:
            raise UnsupportedModelError(f"{name} ({type(model).__name__}) has no cache: use transformers' own generate")
        attention.give_back(model)
        self.model, self.tokenizer = model.eval(), tokenizer
        self.capabilities = describe(model, name, no_trees=no_trees)
        super().__init__(RLock())
        self.cache_bytes = free_bytes(self.capabilities.device) // 2
        self._by_parts = True
        self._measure()
        self.pass_seconds = 0.0

    @torch.inference_mode()
    def _measure(self) -> None:
        """Find the sizes of a token and of a row in the cache, and whether a row can go on by several tokens a pass.

        Mamba reads several from an empty state, whatever came before: there each has a pass of its own.
        """
        can, why = self.capabilities, ""
        parts = [[token % can.vocab_size for token in part] for part in (PROMPT, DRAFTED)]
        ids = torch.tensor([[*parts[0], *parts[1]]], device=can.device)
        try:
            whole = self.model(input_ids=ids, use_cache=False).logits[0].float().cpu().numpy()
        except FAILURES as error:
            raise UnsupportedModelError(
                f"{can.name} ({can.architecture}) fails with {type(error).__name__}: {first_line(error)}: use a model "
                "that this version of transformers runs"
            ) from error
        check_finite(can, whole)
        for self._by_parts in (True, False):
            row, apart, found, sizes = self._add([]), np.inf, list[Floats](), list[int]()
            try:
                for part in parts:
                    found.append(self.extend([row], [Nodes.chain(part)]).logits(range(len(part))).copy())
                    self.commit(row, range(len(part)))
                    sizes.append(_tensor_bytes(row.cache))
                apart = difference(np.concatenate(found), whole)
                why = f"logits differ by {apart:.2g} standard deviations from those of a pass without it"
            except FAILURES as error:
                why = first_line(error)
            self.close(row)
            if apart <= tolerance(self.model.dtype):
                slot = (sizes[1] - sizes[0]) // len(DRAFTED)
                self.capabilities = replace(can, slot_bytes=slot, row_bytes=max(0, sizes[0] - len(PROMPT) * slot))
                return
        raise UnsupportedModelError(
            f"{can.name} ({can.architecture}) does not go on from its own cache: {why}: use transformers' own generate"
        )

    def holds(self, lengths: Sequence[int]) -> bool:
        """Rows of so many tokens can be open together, within ``cache_bytes``."""
        can = self.capabilities
        return sum(lengths) * can.slot_bytes + len(lengths) * can.row_bytes <= self.cache_bytes

    def _make_room(self, tokens: int, rows: int) -> None:
        """Each cache grows as its model lets it."""

    def _add(self, tokens: list[int]) -> CachedRow:
        number = next(number for number in count() if number not in self._open)
        row = self._open[number] = CachedRow(number=number, length=len(tokens), tokens=tokens)
        return row

    @torch.inference_mode()
    def _read(self, rows: Sequence[CachedRow], texts: Sequence[Sequence[int]], wanted: Sequence[int]) -> Scores:
        read = [self._read_row(row, ids, number) for row, ids, number in zip(rows, texts, wanted, strict=True)]
        return scores_of(torch.cat(read), wanted)

    def _read_row(self, row: CachedRow, ids: Sequence[int], wanted: int) -> Tensor:
        """[wanted, V] logits of the last tokens.

        A text that is not read by parts waits for the pass that something of it is wanted of.
        """
        logits = [torch.zeros(0, self.capabilities.vocab_size, dtype=self.model.dtype, device=self.model.device)]
        if wanted or self._by_parts:
            size = len(ids) if self._by_parts or not row.read else 1
            while row.read < len(ids):
                part = torch.tensor([ids[row.read : row.read + size]], device=self.model.device)
                keep = max(1, wanted)
                options = {"logits_to_keep": keep} if self._selects else {}
                out = self.model(input_ids=part, use_cache=True, **{self._cache_name: row.cache}, **options)
                row.cache = out[self._cache_name]
                row.read += part.shape[1]
                logits.append(out.logits[0, -keep:])
        rows = torch.cat(logits)
        return rows[len(rows) - wanted :]

    def _forget(self, row: CachedRow) -> None:
        row.cache, row.read = None, 0

    @torch.inference_mode()
    def _share(self, row: CachedRow, forked: CachedRow) -> None:
        forked.cache = deepcopy(row.cache)


def _tensor_bytes(part: object) -> int:
    """Of all tensors in a cache, or in a part of one."""
    if isinstance(part, Tensor):
        return part.nbytes
    if isinstance(part, (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)):
        part = vars(part)
    parts = [*part.values()] if isinstance(part, dict) else part if isinstance(part, list) else []
    return sum(map(_tensor_bytes, parts))
