"""What a text may be, token by token: the seam of grammars, and what a request's parameters rule out.

A state belongs to one text and never changes, so that every node of a draft tree has its own: it is the state of the
node's parent after the node's token. The target draws from its distribution over the tokens that the state allows
there, before logits processors and temperature: constrained decoding is AR decoding from another distribution, and
trees change nothing of it.

``TokenRules`` is ``min_tokens``, ``bad_words`` and ``allowed_token_ids``, beside a grammar where there is one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, RunError


class ConstraintState(ABC):
    """Where a text stands in its constraint. What follows it is found once and kept."""

    @property
    @abstractmethod
    def mask(self) -> NDArray[np.uint32] | None:
        """[ceil(V / 32)] uint32, bit t % 32 of entry t // 32: token t may come next; None: any may."""

    @property
    def dead_end(self) -> str | None:
        """Why no token may come next; None: one may. Drafts may come here: whoever draws a token raises it."""
        return None

    @property
    def forced(self) -> int | None:
        """The token that begins what must come next, as the tokenizer spells it; None: nothing is known."""
        return None

    @abstractmethod
    def after(self, token: int) -> ConstraintState | None:
        """The state after one more token; None: it must not come next."""

    def allows(self, tokens: NDArray[np.integer] | int) -> NDArray[np.bool_]:
        """Whether tokens, or one, may come next; of the same shape."""
        at, mask = np.asarray(tokens), self.mask
        if mask is None:
            return np.ones(at.shape, np.bool_)
        allowed: NDArray[np.bool_] = (mask[at >> 5] >> (at & 31).astype(np.uint32) & 1).astype(np.bool_)
        return allowed


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
        ConfigError: no token could come there.
        RunError: one of them was not.
    """
    for token in tokens:
        after = state.after(token)
        if after is None:
            if (reason := state.dead_end) is not None:
                raise ConfigError(reason)
            raise RunError(f"token {token} does not fit the constraint: it was drawn without it")
        state = after
    return state


class RuleState(ConstraintState):
    """How many tokens there are, the last of them, and where the grammar stands."""

    def __init__(self, rules: TokenRules, inner: ConstraintState | None, count: int, tail: tuple[int, ...]) -> None:
        self._rules, self._inner, self._count, self._tail = rules, inner, count, tail
        self._after: dict[int, ConstraintState | None] = {}

    @cached_property
    def mask(self) -> NDArray[np.uint32]:
        rules, inner = self._rules, None if self._inner is None else self._inner.mask
        mask = rules.base.copy() if inner is None else rules.base & inner
        clear(mask, rules.refused(self._tail))
        if self._count < rules.least:
            longer = mask.copy()
            clear(longer, rules.ends)
            if longer.any():
                return longer
        return mask

    @property
    def forced(self) -> int | None:
        return None if self._inner is None else self._inner.forced

    @property
    def dead_end(self) -> str | None:
        inner = None if self._inner is None else self._inner.dead_end
        if inner is not None or self.mask.any():
            return inner
        return (
            "no token may come next: bad_words, allowed_token_ids and the constraint rule out all of them: loosen one "
            "of them"
        )

    def after(self, token: int) -> ConstraintState | None:
        if token not in self._after:
            self._after[token] = self._next(token)
        return self._after[token]

    def _next(self, token: int) -> ConstraintState | None:
        if not self.allows(token):
            return None
        rules = self._rules
        if token in rules.ends:
            return TextEnded()
        inner = None if self._inner is None else self._inner.after(token)
        tail = (*self._tail, token)[-rules.longest :] if rules.longest else ()
        return RuleState(rules, inner, min(self._count + 1, rules.least), tail)


def clear(mask: NDArray[np.uint32], tokens: Collection[int]) -> None:
    """Rule tokens out, in place."""
    for token in tokens:
        mask[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)


class TokenRules:
    """A ``Constraint`` that is made of a request's parameters.

    Args:
        vocab_size: V.
        ends: tokens that end the text.
        least: tokens before which they do not come while any other may.
        allowed: tokens of which all are; None: any may come.
        words: sequences of which the last token does not come behind the others.
        inner: what the text must be besides.

    Attributes:
        base: [ceil(V / 32)] uint32 mask of ``allowed``.
        longest: tokens before the last one of the longest sequence.
    """

    def __init__(
        self,
        vocab_size: int,
        ends: frozenset[int],
        least: int = 0,
        allowed: Sequence[int] | None = None,
        words: Sequence[tuple[int, ...]] = (),
        inner: Constraint | None = None,
    ) -> None:
        self.ends, self.least, self.inner = ends, least, inner
        bits = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
        bits[slice(vocab_size) if allowed is None else list(allowed)] = True
        self.base = np.packbits(bits, bitorder="little").view(np.uint32)
        self._endings: dict[tuple[int, ...], list[int]] = {}
        for *before, last in words:
            self._endings.setdefault(tuple(before), []).append(last)
        self._lengths = sorted({len(before) for before in self._endings})
        self.longest = max(self._lengths, default=0)

    def start(self) -> ConstraintState:
        return RuleState(self, None if self.inner is None else self.inner.start(), 0, ())

    def refused(self, tail: tuple[int, ...]) -> list[int]:
        """Tokens that would complete a sequence."""
        before = (tail[len(tail) - length :] for length in self._lengths if length <= len(tail))
        return [token for ending in before for token in self._endings.get(ending, ())]
