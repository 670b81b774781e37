"""One pass of a model over the new tokens of many rows, and what makes it.

The tokens of all rows are packed, one row's behind another's, so that everything but attention computes what is new and
no padding; where their keys and values go, and how attention lays them out, is the cache's ``Placement``.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from .attention import laid_out
from .cache import TreeCache
from .probe import HiddenStates


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass computes.

    Attributes:
        tokens, positions: [T] int64 on the device.
        mask: [B, 1, width, S], added to attention scores; None: one row that was empty reads a chain, so that attention
            is plain causal.
        wanted: of which tokens the logits are wanted: the last ones, or [W] int64 of them.
    """

    tokens: Tensor
    positions: Tensor
    mask: Tensor | None
    wanted: slice | Tensor

    @property
    def last(self) -> int | None:
        """How many of the last tokens' logits are wanted; None: of others too."""
        return len(self.tokens) - int(self.wanted.start) if isinstance(self.wanted, slice) else None


class Runner(Protocol):
    """Makes passes of one model."""

    def forward(self, step: Pass, cache: TreeCache) -> tuple[Tensor | None, Tensor]:
        """Make a pass; its keys and values go to where the cache is placed.

        Returns:
            [T, H] hidden states after the final norm, None where nobody reads them; [W, V] logits.
        """


class StockRunner:
    """Passes by the model's own forward.

    Attributes:
        hidden: reads hidden states; None: nobody wants them.
    """

    def __init__(self, model: PreTrainedModel, hidden: HiddenStates | None = None) -> None:
        self._model, self.hidden = model, hidden
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, step: Pass, cache: TreeCache) -> tuple[Tensor | None, Tensor]:
        """One pass (``Runner.forward``)."""
        last = step.last
        options = {"logits_to_keep": step.wanted if last is None else last or 1} if self._selects else {}
        with laid_out(cache.placement):
            out = self._model(
                input_ids=step.tokens[None],
                attention_mask=step.mask,
                position_ids=step.positions[None],
                past_key_values=cache,
                use_cache=True,
                **options,
            )
        logits: Tensor = out.logits[0]
        if last is not None:
            logits = logits[len(logits) - last :]
        elif not self._selects:
            logits = logits[step.wanted]
        return self.hidden.last[0] if self.hidden else None, logits
