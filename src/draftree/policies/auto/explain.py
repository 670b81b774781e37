"""Why ``auto`` chose what it chose: predicted and measured, and each drafter's benefit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ...request import StepCost
from .benefit import Selection


@dataclass(slots=True)
class Report:
    """Sums over steps.

    Attributes:
        predicted, gained: tokens a request, as predicted and as they came.
        chosen: how often each number of nodes was verified, in all.
        draft, verify, other: measured seconds.
    """

    predicted: float = 0.0
    gained: float = 0.0
    chosen: Counter[int] = field(default_factory=Counter)
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    def add(self, chosen: int, predicted: float, gained: float, cost: StepCost) -> None:
        """One step: nodes verified, tokens a request predicted and gained, and what it cost."""
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

    def text(self, selection: Selection) -> str:
        """Some lines for people, of the steps and of the drafters."""
        steps = self.chosen.total()
        if not steps:
            return "auto has not decoded anything yet"
        lines = [
            f"auto, {steps} steps: MAL predicted {self.predicted / steps:.2f}, measured {self.gained / steps:.2f} "
            f"(drift {self.drift:+.1%})",
            f"a step: drafting {1e3 * self.draft / steps:.1f} ms, verifying {1e3 * self.verify / steps:.1f} ms, "
            f"other {1e3 * self.other / steps:.1f} ms",
            "verified: " + ", ".join(f"{k} nodes {self.chosen[k] / steps:.0%}" for k in sorted(self.chosen)),
        ]
        for drafter in selection.drafters:
            n = max(1, drafter.steps)
            lines.append(
                f"drafter {drafter.source.name if drafter.source else ''}: enabled in {drafter.steps / steps:.0%} of "
                f"the steps, where {drafter.tokens / n:.2f} accepted tokens were its alone and it took "
                f"{1e3 * drafter.seconds / n:.2f} ms; it gains {drafter.rate:.2f} tokens an AR pass of cost where "
                f"{selection.pace:.2f} are to be had, and may lose {max(0.0, drafter.balance):.1f} passes: "
                f"{'in use' if drafter.balance > 0 else 'disabled'}"
            )
        return "\n".join(lines)
