"""Why ``auto`` chose what it chose: predicted and measured, chosen and rejected."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from ...request import StepCost
from .benefit import Benefit, Selection
from .cost_model import Floats


@dataclass(slots=True)
class Report:
    """Sums over steps.

    Attributes:
        selection: the drafters.
        steps: of the policy.
        predicted, gained: tokens a request, as predicted and as they came.
        chosen: how often each number of nodes was verified.
        gains, seconds: [N + 1] predicted tokens and seconds if each step had verified 0, 1, ... N nodes.
        draft, verify, other: measured seconds.
    """

    selection: Selection
    steps: int = 0
    predicted: float = 0.0
    gained: float = 0.0
    chosen: Counter[int] = field(default_factory=Counter)
    gains: Floats = field(default_factory=lambda: np.zeros(0))
    seconds: Floats = field(default_factory=lambda: np.zeros(0))
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    def add(self, chosen: int, predicted: float, gained: float, cost: StepCost) -> None:
        """One step: nodes verified, tokens a request predicted and gained, and what it cost."""
        self.steps += 1
        self.chosen[chosen] += 1
        self.predicted += predicted
        self.gained += gained
        self.draft += cost.draft
        self.verify += cost.verify
        self.other += cost.other

    def compare(self, gains: Floats, seconds: Floats) -> None:
        """What one step would have given and cost with each number of nodes ([N + 1] both)."""
        if new := max(0, len(gains) - len(self.gains)):
            self.gains, self.seconds = np.pad(self.gains, (0, new)), np.pad(self.seconds, (0, new))
        self.gains[: len(gains)] += gains
        self.seconds[: len(seconds)] += seconds

    @property
    def drift(self) -> float:
        """Predicted over measured acceptance length, less 1."""
        return self.predicted / self.gained - 1 if self.gained else 0.0

    def text(self) -> str:
        """Some lines for people."""
        if not self.steps:
            return "auto has not decoded anything yet"
        n = self.steps
        lines = [
            f"auto, {n} steps: MAL predicted {self.predicted / n:.2f}, measured {self.gained / n:.2f} "
            f"(drift {self.drift:+.1%})",
            f"a step: drafting {1e3 * self.draft / n:.1f} ms, verifying {1e3 * self.verify / n:.1f} ms, "
            f"other {1e3 * self.other / n:.1f} ms",
            "verified: " + ", ".join(f"{k} nodes {self.chosen[k] / n:.0%}" for k in sorted(self.chosen)),
        ]
        if len(self.gains):
            rates = self.gains / self.seconds
            best = int(rates.argmax())
            sizes = sorted({best, *(2**k - 1 for k in range(len(rates).bit_length()))})
            lines.append(
                "predicted tokens/s of a request if every step that drafted had verified: "
                + ", ".join(f"{k} nodes {rates[k]:.1f}{' (best)' * (k == best)}" for k in sizes)
                + "; 0 nodes is AR decoding"
            )
        return "\n".join(lines + [self._drafter(drafter) for drafter in self.selection.drafters])

    def _drafter(self, drafter: Benefit) -> str:
        """Whether it drafted, and why."""
        n = max(1, drafter.steps)
        return (
            f"drafter {drafter.name}: enabled in {drafter.steps / self.steps:.0%} of the steps, where "
            f"{drafter.tokens / n:.2f} accepted tokens were its alone and it took {1e3 * drafter.seconds / n:.2f} ms; "
            f"it gains {drafter.rate:.2f} tokens an AR pass of cost where {self.selection.pace:.2f} are to be had, and "
            f"may lose {max(0.0, drafter.balance):.1f} passes: {'in use' if drafter.balance > 0 else 'disabled'}"
        )
