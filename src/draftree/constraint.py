"""What a text may be, token by token: the seam of grammars. Knows nothing of trees, nor of who compiles grammars.

A state belongs to one text and never changes, so that every node of a draft tree has its own: it is the state of the
node's parent after the node's token. The target draws from its distribution over the tokens that the state allows
there, before logits processors and temperature: constrained decoding is AR decoding from another distribution, and
trees change nothing of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .errors import RunError

_BITS = torch.arange(32, dtype=torch.int32)


class ConstraintState(ABC):
    """Where a text stands in its constraint. What follows it is found once and kept."""

    @property
    @abstractmethod
    def mask(self) -> Tensor | None:
        """[ceil(V / 32)] int32, bit t % 32 of entry t // 32: token t may come next; None: any may."""

    @property
    def forced(self) -> int | None:
        """The token that begins what must come next, as the tokenizer spells it; None: nothing is known."""
        return None

    @abstractmethod
    def after(self, token: int) -> ConstraintState | None:
        """The state after one more token; None: it must not come next."""

    def allows(self, tokens: Tensor) -> Tensor:
        """Whether each of int64 tokens on the host may come next; bool of the same shape."""
        mask = self.mask
        if mask is None:
            return torch.ones_like(tokens, dtype=torch.bool)
        return (mask[tokens >> 5] >> (tokens & 31).int()).bitwise_and_(1).bool()


@runtime_checkable
class Constraint(Protocol):
    """What texts may be; requests share it."""

    def start(self) -> ConstraintState:
        """The state of an empty text."""


class TextEnded(ConstraintState):
    """The state after an end-of-sequence token: whatever is drawn then is not used."""

    @property
    def mask(self) -> Tensor | None:
        return None

    def after(self, token: int) -> ConstraintState:
        return self


def followed(state: ConstraintState, tokens: Iterable[int]) -> ConstraintState:
    """The state after tokens that were drawn under the constraint.

    Raises:
        RunError: one of them was not.
    """
    for token in tokens:
        after = state.after(token)
        if after is None:
            raise RunError(f"token {token} does not fit the constraint: it was drawn without it")
        state = after
    return state


def masked(logits: Tensor, states: Sequence[ConstraintState | None], entries: Sequence[Tensor] | None = None) -> Tensor:
    """[R, K] logits with -inf for tokens that a row's state does not allow, in new memory where there is any.

    Args:
        logits: [R, K].
        states: [R]; None: everything is allowed. Of a row none of whose entries are allowed everything stays: nothing
            is drafted there, and no token that is drawn there follows.
        entries: [R] of [K] or less, the ids of the logits' entries; None: entry i is token i.
    """
    found = logits
    for row, state in enumerate(states):
        if state is None or (mask := state.mask) is None:
            continue
        if found is logits:
            found = logits.clone()
        if entries is None:
            allowed = (mask[:, None] >> _BITS).bitwise_and_(1).flatten()[: logits.shape[1]].bool()
        else:
            allowed = state.allows(entries[row].cpu())
        if not bool(allowed.any()):
            continue
        found[row, : len(allowed)].masked_fill_(~allowed.to(logits.device, non_blocking=True), float("-inf"))
    return found
