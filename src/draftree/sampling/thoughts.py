"""A constraint that holds from where a model has ended its thoughts: these are free, the answer behind them is not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..text.encoding import THINK_TAGS
from .constraint import Constraint, ConstraintState, clear

_CLOSES = THINK_TAGS[1].encode()
_BLANKS = 2
"""Most characters of white space between thoughts and an answer that begins with none: models write a blank line."""


class ThoughtTokens:
    """What the tokens of one model mean around thoughts.

    Args:
        spelled: [V] the bytes of each.
        ends: tokens that end a text; none ends a thought.
        opens: the token that begins a thought; None: several spell it.

    Attributes:
        blank: tokens of white space -> their characters.
        free: [ceil(V / 32)] uint32 mask of what may come in a thought, whatever came before.
    """

    def __init__(self, spelled: Sequence[bytes], ends: Collection[int], opens: int | None = None) -> None:
        self.spelled, self.ends, self.opens = spelled, frozenset(ends), opens
        self.blank = {token: len(text) for token, text in enumerate(spelled) if text and not text.strip(b" \n")}
        self._across = [token for token, text in enumerate(spelled) if text.partition(b">")[2].strip()]
        may = np.zeros(-(-len(spelled) // 32) * 32, dtype=bool)
        may[: len(spelled)] = True
        may[[*self.ends, *self.beyond(b"")]] = False
        self.free = np.packbits(may, bitorder="little").view(np.uint32)

    def beyond(self, tail: bytes) -> list[int]:
        """Tokens that would end the thought and begin the answer, behind the last bytes of the thought."""
        return [token for token in self._across if _behind(tail + self.spelled[token])]


def _behind(text: bytes) -> bytes:
    """What follows the end of a thought, without white space."""
    return text.partition(_CLOSES)[2].strip()


class AfterThought:
    """A ``Constraint`` of what follows thoughts.

    Args:
        inside: the prompt has begun a thought. Else one may come first, if one token begins it.
    """

    def __init__(self, inner: Constraint, tokens: ThoughtTokens, *, inside: bool) -> None:
        self.inner, self.tokens, self._inside = inner, tokens, inside

    def start(self) -> ConstraintState:
        return ThoughtState(self, b"") if self._inside else _BeforeThought(self)


class _BeforeThought(ConstraintState):
    def __init__(self, rule: AfterThought) -> None:
        self._rule, self._inner = rule, rule.inner.start()

    @cached_property
    def mask(self) -> NDArray[np.uint32] | None:
        inner, opens = self._inner.mask, self._rule.tokens.opens
        return inner if inner is None or opens is None else _with(inner, [opens])

    @property
    def forced(self) -> int | None:
        return self._inner.forced if self._rule.tokens.opens is None else None

    def after(self, token: int) -> ConstraintState | None:
        return ThoughtState(self._rule, b"") if token == self._rule.tokens.opens else self._inner.after(token)


class ThoughtState(ConstraintState):
    """Inside a thought, of which the last bytes may begin its end."""

    def __init__(self, rule: AfterThought, tail: bytes) -> None:
        self._rule, self._tail = rule, tail

    @cached_property
    def mask(self) -> NDArray[np.uint32]:
        tokens = self._rule.tokens
        if not self._tail:
            return tokens.free
        mask = tokens.free.copy()
        clear(mask, tokens.beyond(self._tail))
        return mask

    def after(self, token: int) -> ConstraintState | None:
        if token in self._rule.tokens.ends:
            return None
        text = self._tail + self._rule.tokens.spelled[token]
        if _CLOSES not in text:
            held = next(n for n in range(len(_CLOSES) - 1, -1, -1) if text.endswith(_CLOSES[:n]))
            return ThoughtState(self._rule, text[len(text) - held :])
        return None if _behind(text) else _Between(self._rule, self._rule.inner.start(), _BLANKS)


class _Between(ConstraintState):
    """White space may come before what the constraint holds, where it allows none itself."""

    def __init__(self, rule: AfterThought, inner: ConstraintState, left: int) -> None:
        self._rule, self._inner, self._left = rule, inner, left

    @cached_property
    def mask(self) -> NDArray[np.uint32] | None:
        inner = self._inner.mask
        if inner is None:
            return None
        return _with(inner, [token for token, size in self._rule.tokens.blank.items() if size <= self._left])

    def after(self, token: int) -> ConstraintState | None:
        if self._inner.allows(token):
            return self._inner.after(token)
        left = self._left - self._rule.tokens.blank.get(token, _BLANKS + 1)
        return None if left < 0 else _Between(self._rule, self._inner, left)


def _with(mask: NDArray[np.uint32], tokens: Collection[int]) -> NDArray[np.uint32]:
    """A mask that allows more tokens."""
    wider = mask.copy()
    for token in tokens:
        wider[token >> 5] |= np.uint32(1 << (token & 31))
    return wider
