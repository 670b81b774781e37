"""Why ``auto`` chose what it chose: predicted and measured, and each drafter's benefit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...request import StepCost
from .benefit import Selection


@dataclass(slots=True)
class Report:
    """Sums over steps.

    Attributes:
        predicted, gained: tokens a request, as predicted and as they came.
        chosen: how often each number of nodes was verified, in all.
        seconds: that drafting, verifying and all else took.
    """

    predicted: float = 0.0
    gained: float = 0.0
    chosen: Counter[int] = field(default_factory=Counter)
    seconds: Sequence[float] = (0.0, 0.0, 0.0)

    def add(self, chosen: int, predicted: float, gained: float, cost: StepCost) -> None:
        """One step: nodes verified, tokens a request predicted and gained, and what it cost."""
        self.chosen[chosen] += 1
        self.predicted += predicted
        self.gained += gained
        self.seconds = [a + b for a, b in zip(self.seconds, (cost.draft, cost.verify, cost.other), strict=True)]

    @property
    def drift(self) -> float:
        """Predicted over measured acceptance length, less 1."""
        return self.predicted / self.gained - 1 if self.gained else 0.0

    def text(self, selection: Selection) -> str:
        """Some lines for people, of the steps and of the drafters."""
        steps = self.chosen.total()
        if not steps:
            return "auto has not decoded anything yet"
        draft, verify, other = (1e3 * seconds / steps for seconds in self.seconds)
        lines = [
            f"auto, {steps} steps: MAL predicted {self.predicted / steps:.2f}, measured {self.gained / steps:.2f} "
            f"(drift {self.drift:+.1%})",
            f"a step: drafting {draft:.1f} ms, verifying {verify:.1f} ms, other {other:.1f} ms",
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
