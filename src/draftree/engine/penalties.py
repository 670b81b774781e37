"""OpenAI's penalties and biases as logits processors: each node of a tree is processed with its own path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Makes tokens that are there already less likely.

    Attributes:
        prompt: tokens of the prompt: frequency and presence count those behind it.
        repetition: divides positive logits and multiplies negative ones of tokens of the prompt or behind it.
        frequency: taken off a logit for each time that its token was generated.
        presence: taken off once.
    """

    prompt: int
    repetition: float
    frequency: float
    presence: float

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """``ids`` [1, length], ``logits`` [1, V]."""
        found, row = logits.clone(), ids[0]
        if self.repetition != 1:
            seen = row.unique()
            values = found[0, seen]
            found[0, seen] = torch.where(values > 0, values / self.repetition, values * self.repetition)
        if len(row) > self.prompt and (self.frequency or self.presence):
            tokens, counts = row[self.prompt :].unique(return_counts=True)
            found[0, tokens] -= self.frequency * counts.to(found.dtype) + self.presence
        return found


@dataclass(frozen=True, slots=True)
class Bias:
    """Added to the logits of some tokens: -100 all but forbids one, 100 all but forces it.

    Attributes:
        biases: token -> what is added.
    """

    biases: Mapping[int, float]
    _tokens: Tensor = field(init=False, repr=False, compare=False)
    _values: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_tokens", torch.tensor(list(self.biases), dtype=torch.int64))
        object.__setattr__(self, "_values", torch.tensor(list(self.biases.values())))

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """``ids`` [1, length], ``logits`` [1, V]."""
        found = logits.clone()
        found[0, self._tokens.to(found.device)] += self._values.to(found)
        return found
