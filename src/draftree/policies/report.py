"""What a policy that weighs costs reports of its choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..models.cost_profile import Profile
from ..request import Outcome


class DrafterRecord(Protocol):
    """What one drafter has gained and cost.

    Attributes:
        name: of the drafter; empty: unknown.
        on: it drafts in the step that was begun last.
        steps, tokens, seconds: how often it drafted, accepted tokens of its trees, what drafting took.
        token: passes of AR decoding that a token by it takes.
    """

    on: bool
    steps: int
    tokens: float
    seconds: float
    token: float

    @property
    def name(self) -> str: ...


class Report:
    """Why a policy that weighs costs chose what it chose: sums over steps.

    Attributes:
        drafters: what each of them has gained and cost.
        target: the target's costs; None: not known yet.
        steps, drafted: all steps, and those that verified drafts.
        together: steps and nodes by the number of requests that a step decoded.
        tokens: that were gained, a request.
        passes: AR passes that the steps took.
    """

    def __init__(self, drafters: Sequence[DrafterRecord], target: Profile | None) -> None:
        self.drafters, self.target = drafters, target
        self.steps = self.drafted = 0
        self.together: dict[int, tuple[int, int]] = {}
        self.tokens = self.passes = 0.0

    def add(self, nodes: int, outcomes: Sequence[Outcome], passes: float) -> None:
        """Count a step that verified ``nodes`` nodes and took ``passes`` AR passes."""
        self.steps += 1
        self.drafted += nodes > 0
        steps, verified = self.together.get(len(outcomes), (0, 0))
        self.together[len(outcomes)] = steps + 1, verified + nodes
        self.tokens += sum([outcome.taken for outcome in outcomes]) / len(outcomes)
        self.passes += passes

    def nodes_by_requests(self) -> dict[int, float]:
        """Nodes a step by the number of requests that it decoded; any thread may call it."""
        return {requests: nodes / steps for requests, (steps, nodes) in sorted(self.together.copy().items())}

    def text(self) -> str:
        """A line for people, one for each drafter, and one of steps that decoded several requests."""
        if not self.steps:
            return "auto has not decoded anything yet"
        nodes = sum([verified for _, verified in self.together.values()])
        tokens, passes = self.tokens / self.steps, self.passes / self.steps
        lines = [
            f"auto: {tokens:.2f} tokens a step, which costs {passes:.2f} passes of AR decoding; "
            f"{self.drafted / self.steps:.0%} of {self.steps} steps drafted, {nodes / self.steps:.1f} tokens a step"
        ]
        for record in self.drafters:
            steps, name = max(1, record.steps), f" {record.name}".rstrip()
            lines.append(
                f"drafter{name}, now {'on' if record.on else 'off'}: drafted in {record.steps / self.steps:.0%}, "
                f"{record.tokens / steps:.2f} of its tokens accepted a step, {1e3 * record.seconds / steps:.2f} ms"
            )
        if max(by_requests := self.nodes_by_requests()) > 1:
            each_size = ", ".join(f"{mean:.1f} of {requests}" for requests, mean in by_requests.items())
            lines.append(f"drafted tokens a step by requests that decode together: {each_size}")
        return "\n".join(lines)
