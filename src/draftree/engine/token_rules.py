"""What a request's parameters rule out, token by token, as one constraint: ``min_tokens``, ``bad_words`` and
``allowed_token_ids``, beside a grammar where there is one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..config import SamplingParams
from ..constraint import Constraint, ConstraintState, TextEnded
from ..errors import ConfigError, FieldError, PromptError
from ..models.base import Capabilities


class RuleState(ConstraintState):
    """How many tokens there are, the last of them, and where the grammar stands."""

    def __init__(self, rules: TokenRules, inner: ConstraintState | None, count: int, tail: tuple[int, ...]) -> None:
        self._rules, self._inner, self._count, self._tail = rules, inner, count, tail
        self._mask: NDArray[np.uint32] | None = None
        self._looked = False
        self._after: dict[int, ConstraintState | None] = {}

    @property
    def mask(self) -> NDArray[np.uint32] | None:
        if not self._looked:
            self._looked, self._mask = True, self._found()
        return self._mask

    def _found(self) -> NDArray[np.uint32] | None:
        rules, inner = self._rules, None if self._inner is None else self._inner.mask
        early, refused = self._count < rules.least, rules.refused(self._tail)
        if rules.allowed is None and inner is None and not early and not refused:
            return None
        mask = rules.base.copy() if inner is None else rules.base & inner
        _clear(mask, refused)
        if early:
            longer = mask.copy()
            _clear(longer, rules.ends)
            if longer.any():
                return longer
        return mask

    @property
    def forced(self) -> int | None:
        return None if self._inner is None else self._inner.forced

    def after(self, token: int) -> ConstraintState | None:
        """See ``ConstraintState``.

        Raises:
            ConfigError: no token may come next.
        """
        if token not in self._after:
            self._after[token] = self._next(token)
        return self._after[token]

    def _next(self, token: int) -> ConstraintState | None:
        if self.mask is not None and not self.mask.any():
            raise ConfigError(
                "no token may come next: bad_words, allowed_token_ids and the constraint rule out all of them: loosen "
                "one of them"
            )
        if not self.allowed(token):
            return None
        rules = self._rules
        if token in rules.ends:
            return TextEnded()
        inner = None if self._inner is None else self._inner.after(token)
        tail = (*self._tail, token)[-rules.longest :] if rules.longest else ()
        return RuleState(rules, inner, min(self._count + 1, rules.least), tail)


def _clear(mask: NDArray[np.uint32], tokens: Collection[int]) -> None:
    """Rule tokens out, in place."""
    for token in tokens:
        mask[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class TokenRules:
    """A ``Constraint`` that is made of a request's parameters.

    Attributes:
        vocab_size: V.
        ends: tokens that end the text.
        least: tokens before which they do not come while any other may.
        allowed: tokens of which all are; None: any may come.
        words: sequences of which the last token does not come behind the others.
        inner: what the text must be besides.
        base: [ceil(V / 32)] uint32 mask of ``allowed``.
        longest: tokens before the last one of the longest sequence.
    """

    vocab_size: int = field(repr=False)
    ends: frozenset[int] = field(repr=False)
    least: int = 0
    allowed: tuple[int, ...] | None = field(default=None, repr=False)
    words: Sequence[tuple[int, ...]] = ()
    inner: Constraint | None = None
    base: NDArray[np.uint32] = field(init=False, repr=False, compare=False)
    longest: int = field(init=False, repr=False)
    _endings: Mapping[tuple[int, ...], list[int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        bits = np.zeros(-(-self.vocab_size // 32) * 32, dtype=bool)
        bits[list(self.allowed) if self.allowed is not None else slice(self.vocab_size)] = True
        object.__setattr__(self, "base", np.packbits(bits, bitorder="little").view(np.uint32))
        endings: dict[tuple[int, ...], list[int]] = {}
        for *before, last in self.words:
            endings.setdefault(tuple(before), []).append(last)
        object.__setattr__(self, "_endings", endings)
        object.__setattr__(self, "longest", max((len(before) for before in endings), default=0))

    def start(self) -> ConstraintState:
        return RuleState(self, None if self.inner is None else self.inner.start(), 0, ())

    def refused(self, tail: tuple[int, ...]) -> list[int]:
        """Tokens that would complete a sequence."""
        places = (tail[at:] for at in range(len(tail) + 1))
        return [token for before in places for token in self._endings.get(before, ())]


def for_request(
    params: SamplingParams, prompt_length: int, can: Capabilities, spell: Callable[[str], list[int]] = lambda _: []
) -> SamplingParams:
    """The same with what its parameters rule out as its constraint, and what they weigh as its first processors.

    What comes out may be given again, for another prompt too.

    Args:
        can: of the target.
        spell: the token ids of a text, of which ``bad_words`` are made.

    Raises:
        FieldError: a parameter names a token that the model has not, or a word is no text.
        ConfigError: a text that a constraint ends is to go on.
    """
    inner = params.constraint.inner if isinstance(params.constraint, TokenRules) else params.constraint
    if params.ignore_eos and inner is not None:
        raise ConfigError("ignore_eos with a constraint: it says where the text ends: leave one of them out")
    ends = frozenset(params.stop_token_ids).union(() if params.ignore_eos else can.eos_ids)
    named: dict[str, Iterable[int]] = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias or (),
    }
    for name, ids in named.items():
        if (out := next((token for token in ids if not 0 <= token < can.vocab_size), None)) is not None:
            raise FieldError(name, f"{name} has {out}: use token ids from 0 to {can.vocab_size - 1}")
    if params.min_tokens or params.bad_words or params.allowed_token_ids is not None:
        words = []
        for word in params.bad_words:
            try:
                words += [tuple(spell(word.strip())), tuple(spell(f" {word.strip()}"))]
            except PromptError as error:
                raise FieldError("bad_words", f"bad_words has {word!r}: {error}") from None
        rules = TokenRules(can.vocab_size, ends, params.min_tokens, params.allowed_token_ids, words, inner)
        params = replace(params, constraint=rules)
    return params
