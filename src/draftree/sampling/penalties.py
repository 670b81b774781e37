"""OpenAI's penalties and biases as changes of logits: each node of a tree by its own path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..config import SamplingParams
from ..scores import Changes


class Penalties:
    """Penalties and biases of one request in one step.

    Args:
        history: committed token ids, of which the first ``prompt_length`` are the prompt's: frequency and presence
            count those behind it.
    """

    def __init__(self, params: SamplingParams, history: Sequence[int], prompt_length: int) -> None:
        self._repetition = params.repetition_penalty
        self._frequency, self._presence = params.frequency_penalty, params.presence_penalty
        self._counted = self._frequency != 0 or self._presence != 0
        self._generated = Counter(history[prompt_length:]) if self._counted else Counter[int]()
        biases = params.logit_bias or {}
        seen = set(history) if self._repetition != 1 else set[int]()
        tokens = seen.union(self._generated, biases)
        self._index = {token: i for i, token in enumerate(tokens)}
        factors = np.array([self._repetition if token in seen else 1.0 for token in tokens], np.float32)
        addend = [biases.get(token, 0.0) - self._penalty(self._generated[token]) for token in tokens]
        self._changes = Changes(
            np.array([*tokens], np.int32), np.reciprocal(factors), factors, np.array(addend, np.float32)
        )

    @classmethod
    def of(cls, params: SamplingParams, history: Sequence[int], prompt_length: int) -> Penalties | None:
        """None where nothing is penalised."""
        values = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        return cls(params, history, prompt_length) if values != (1.0, 0.0, 0.0) or params.logit_bias else None

    def _penalty(self, count: int) -> float:
        """What is taken off the logit of a token that was generated so often."""
        return self._frequency * count + self._presence if count else 0.0

    def after(self, drawn: Sequence[int]) -> Changes:
        """The changes after tokens that follow the history."""
        base = self._changes
        if not drawn or (self._repetition == 1 and not self._counted):
            return base
        index = self._index | {token: -1 for token in drawn if token not in self._index}
        new = [token for token, at in index.items() if at < 0]
        index |= {token: len(base.tokens) + i for i, token in enumerate(new)}
        factors = np.append(base.negative, np.ones(len(new), np.float32))
        addend = np.append(base.addend, np.zeros(len(new), np.float32))
        for token, times in Counter(drawn).items():
            at, before = index[token], self._generated[token]
            factors[at] = self._repetition
            addend[at] -= self._penalty(before + times) - self._penalty(before)
        return Changes(np.append(base.tokens, np.array(new, np.int32)), np.reciprocal(factors), factors, addend)
