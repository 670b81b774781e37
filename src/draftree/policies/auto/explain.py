"""Why ``auto`` chose what it chose: predicted and measured, and each drafter's benefit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ...request import StepCost
from .benefit import Benefit, Selection


@dataclass(slots=True)
class Report:
    """Sums over steps.

    Attributes:
        selection: the drafters.
        steps: of the policy.
        predicted, gained: tokens a request, as predicted and as they came.
        chosen: how often each number of nodes was verified.
        draft, verify, other: measured seconds.
    """

    selection: Selection
    steps: int = 0
    predicted: float = 0.0
    gained: float = 0.0
    chosen: Counter[int] = field(default_factory=Counter)
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
