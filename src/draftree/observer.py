"""The seam between the engine and whatever watches it: traces, trees in a terminal, an inspector.

An observer sees everything and changes nothing. What it takes of the time is in no request's figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .draft.base import Drafter
from .draft.outcome import Outcome
from .models.base import LanguageModel
from .request import Request


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine was built of.

    Attributes:
        target: the model whose output is given.
        drafter: what proposes trees.
        nodes: node budget of one request's tree at one step.
        verification: how target logits turn into accepted tokens.
        candidates: how tokens come out of the draft distribution (``Scheme.candidates``).
        tokenizer: None for bare token ids.
    """

    target: LanguageModel
    drafter: Drafter
    nodes: int
    verification: str
    candidates: str
    tokenizer: PreTrainedTokenizerBase | None


class Observer:
    """Is told what an engine does; overrides what it wants to hear of."""

    def begin(self, setup: Setup) -> None:
        """An engine has been built with this observer."""

    def opened(self, request: Request) -> None:
        """A request has been prefilled and has its first token."""

    def stepped(self, outcomes: Sequence[Outcome], learned: float) -> None:
        """A step is over; each ``request.ids`` already ends with the tokens taken.

        Args:
            outcomes: one for each request of the step.
            learned: seconds that the drafter took to learn of them, beyond ``Outcome.step``.
        """

    def closed(self, request: Request) -> None:
        """A request is freed, even if its prefill failed; ``finish_reason`` is None when it was left early."""
