"""What a text may be, token by token: the seam of grammars. Knows nothing of trees, nor of who compiles grammars.

A state belongs to one text and never changes, so that every node of a draft tree has its own: it is the state of the
node's parent after the node's token. The target draws from its distribution over the tokens that the state allows
there, before logits processors and temperature: constrained decoding is AR decoding from another distribution, and
trees change nothing of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..errors import RunError


class ConstraintState(ABC):
    """Where a text stands in its constraint. What follows it is found once and kept."""

    @property
    @abstractmethod
    def mask(self) -> NDArray[np.uint32] | None:
        """[ceil(V / 32)] uint32, bit t % 32 of entry t // 32: token t may come next; None: any may."""

    @property
    def forced(self) -> int | None:
        """The token that begins what must come next, as the tokenizer spells it; None: nothing is known."""
        return None

    @abstractmethod
    def after(self, token: int) -> ConstraintState | None:
        """The state after one more token; None: it must not come next."""

    def allows(self, tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Whether each of some tokens may come next; of the same shape."""
        mask = self.mask
        if mask is None:
            return np.ones(tokens.shape, dtype=np.bool_)
        found: NDArray[np.bool_] = (mask[tokens >> 5] >> (tokens & 31).astype(np.uint32) & 1).astype(np.bool_)
        return found

    def allowed(self, token: int) -> bool:
        """Whether one token may come next."""
        mask = self.mask
        return mask is None or bool(mask[token >> 5] >> np.uint32(token & 31) & 1)


@runtime_checkable
class Constraint(Protocol):
    """What texts may be; requests share it."""

    def start(self) -> ConstraintState:
        """The state of an empty text."""


class TextEnded(ConstraintState):
    """The state after an end-of-sequence token: whatever is drawn then is not used."""

    @property
    def mask(self) -> NDArray[np.uint32] | None:
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
