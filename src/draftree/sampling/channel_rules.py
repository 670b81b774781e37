"""A constraint of answers in Harmony's channels: thoughts are free, the answer and the arguments of calls are not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..text.encoding import Tokenizer
from ..text.harmony import CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, START
from .constraint import Constraint, ConstraintState, TextEnded


class ChannelTokens:
    """What the tokens of one model mean around messages.

    Args:
        controls: control tokens and their texts.
        vocab_size: V, the tokens of masks.
        ends: tokens that end an answer.

    Attributes:
        end: the token that ends a message.
        inner: [ceil(V / 32)] uint32 mask of what may come in a message that another one follows.
        last: [ceil(V / 32)] uint32 mask of what may come in the last one.
    """

    def __init__(
        self, tokenizer: Tokenizer, controls: Mapping[int, str], vocab_size: int, ends: Collection[int]
    ) -> None:
        self._tokenizer, self._size, self.ends = tokenizer, vocab_size, frozenset(ends)
        self.end = next(token for token, tag in controls.items() if tag == END)
        text = set(range(vocab_size)) - controls.keys() - self.ends
        self.inner, self.last = self.mask([*text, self.end]), self.mask([*text, *self.ends])

    def mask(self, tokens: Sequence[int]) -> NDArray[np.uint32]:
        bits = np.zeros(-(-self._size // 32) * 32, dtype=bool)
        bits[tokens] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def header(self, text: str) -> tuple[int, ...]:
        """Token ids of a message's header."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


class ChannelRule:
    """A ``Constraint`` of messages: of thoughts and what else may come before the last, and of the last one.

    Headers are spelled as the tokenizer spells them.

    Args:
        answer: of the final message; None: it is any text, and others to the user may come before a call.
        calls: of the arguments of functions, by name. An answer calls one of them at most.
        forced: the answer is a call.
    """

    def __init__(
        self,
        tokens: ChannelTokens,
        answer: Constraint | None = None,
        calls: Mapping[str, Constraint] | None = None,
        *,
        forced: bool = False,
    ) -> None:
        self.tokens, calls = tokens, calls or {}
        self._begun: tuple[int, ...] = ()
        headers: dict[str, Callable[[], ConstraintState]] = {f"{CHANNEL}analysis": lambda: FreeMessage(self)}
        if not forced:
            headers[f"{CHANNEL}final"] = (lambda: FreeMessage(self, last=True)) if answer is None else answer.start
        if calls and answer is None and not forced:
            headers[f"{CHANNEL}commentary"] = lambda: FreeMessage(self)
        for name, arguments in calls.items():
            to = f" to={FUNCTIONS}{name}"
            for form in (" json", f" {CONSTRAIN}json", f"{CONSTRAIN}json"):
                headers[f"{CHANNEL}commentary{to}{form}"] = arguments.start
                headers[f"{to}{CHANNEL}commentary{form}"] = arguments.start
        self.texts = {tokens.header(f"{START}assistant{text}{MESSAGE}"): start for text, start in headers.items()}
        """Headers -> the state of the text behind each."""
        self.next = dict[tuple[int, ...], set[int]]()
        """Beginnings of headers -> the tokens that may come next."""
        for header in self.texts:
            for at, token in enumerate(header):
                self.next.setdefault(header[:at], set()).add(token)

    def behind(self, begun: Iterable[int]) -> ChannelRule:
        """The same behind a prompt that ends in a message.

        Args:
            begun: the message's tokens so far. Of one that may not come, or none, the answer begins another.
        """
        behind = copy(self)
        behind._begun = tuple(begun)
        return behind

    def start(self) -> ConstraintState:
        for header, start in self.texts.items():
            if self._begun[: len(header)] == header:
                return start()
        return HeaderState(self, self._begun if self._begun in self.next else ())


class HeaderState(ConstraintState):
    """Inside a message's header, of which these tokens have come."""

    def __init__(self, rule: ChannelRule, begun: tuple[int, ...]) -> None:
        self._rule, self._begun = rule, begun

    @cached_property
    def mask(self) -> NDArray[np.uint32]:
        return self._rule.tokens.mask([*self._rule.next[self._begun]])

    @property
    def forced(self) -> int | None:
        token, *others = self._rule.next[self._begun]
        return None if others else token

    def after(self, token: int) -> ConstraintState | None:
        begun = (*self._begun, token)
        if begun in self._rule.texts:
            return self._rule.texts[begun]()
        return HeaderState(self._rule, begun) if begun in self._rule.next else None


class FreeMessage(ConstraintState):
    """Inside a text that nothing holds: another message follows, or it is the last."""

    def __init__(self, rule: ChannelRule, *, last: bool = False) -> None:
        self._rule, self._mask = rule, rule.tokens.last if last else rule.tokens.inner

    @property
    def mask(self) -> NDArray[np.uint32]:
        return self._mask

    def after(self, token: int) -> ConstraintState | None:
        if not self.allows(token):
            return None
        if token in self._rule.tokens.ends:
            return TextEnded()
        return HeaderState(self._rule, ()) if token == self._rule.tokens.end else self
