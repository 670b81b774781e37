"""Why ``auto`` chose what it chose, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ...request import Outcome
from .gain import Selection


class Report:
    """Sums over steps.

    Attributes:
        selection: the drafters.
        steps, drafted: all steps, and those that verified drafts.
        nodes, tokens: verified nodes, and tokens a request that were gained.
        passes: AR passes that the steps took.
    """

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.steps = self.drafted = self.nodes = 0
        self.tokens = self.passes = 0.0

    def add(self, nodes: int, outcomes: Sequence[Outcome], passes: float) -> None:
        """One step."""
        self.steps += 1
        self.drafted += nodes > 0
        self.nodes += nodes
        self.tokens += sum([outcome.taken for outcome in outcomes]) / len(outcomes)
        self.passes += passes

    def text(self) -> str:
        """A line for people, and one for each drafter."""
        if not self.steps:
            return "auto has not decoded anything yet"
        nodes, tokens, passes = (total / self.steps for total in (self.nodes, self.tokens, self.passes))
        lines = [
            f"auto: {tokens:.2f} tokens a step, which costs {passes:.2f} passes of AR decoding; "
            f"{self.drafted / self.steps:.0%} of {self.steps} steps drafted, {nodes:.1f} tokens a step"
        ]
        for record in self.selection.records:
            each, name = max(1, record.steps), f" {record.source.name}" if record.source else ""
            lines.append(
                f"drafter{name}, now {'on' if record.on else 'off'}: drafted in {record.steps / self.steps:.0%}, "
                f"{record.tokens / each:.2f} of its tokens accepted a step, {1e3 * record.seconds / each:.2f} ms"
            )
        return "\n".join(lines)
