"""Times the phases of steps, and adds what they did to the statistics of their requests."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..drafters.base import Drafter
from ..request import DrafterStats, Outcome, Request, StepCost


class StepTimer:
    """An observer that is notified as the phases of a step end."""

    def begun(self) -> None:
        self._began = time.perf_counter()

    def drafted(self) -> None:
        self._phase = time.perf_counter()

    def verified(self) -> None:
        now = time.perf_counter()
        self._verify, self._phase = now - self._phase, now

    def committed(self) -> None:
        self._other = time.perf_counter() - self._phase

    def cost(self, batch: int, drafter: Drafter, passes: int) -> StepCost:
        """The cost of the step for the requests of one drafter, which made so many passes in it."""
        return StepCost(batch, drafter.seconds, self._verify, self._other, passes, drafter.part_seconds)

    def read(self, request: Request) -> None:
        """The step is over; the request's prompt was read in it."""
        request.stats.seconds.prefill += time.perf_counter() - self._began


def count(outcome: Outcome, drafter: Drafter) -> None:
    """Add a step to the statistics of its request."""
    stats, cost, tree = outcome.request.stats, outcome.step, outcome.tree
    stats.steps += 1
    stats.tokens += outcome.taken
    stats.draft_passes += cost.draft_passes
    stats.seconds.draft += cost.draft
    stats.seconds.verify += cost.verify
    stats.seconds.other += cost.other
    if not len(tree):
        stats.expected += 1.0
        return
    accepted = outcome.path[: outcome.taken]
    stats.expected += tree.expected_acceptance_length
    _count_depths(stats.drafted, tree.depths.tolist())
    _count_depths(stats.accepted, range(1, len(accepted) + 1))
    total = stats.drafters.setdefault(drafter.parts[tree.part], DrafterStats())
    total.drafted += len(tree)
    total.accepted += len(accepted)
    entropies = tree.entropies.tolist()
    stats.accepted_entropies += [entropies[node] for node in accepted]
    if outcome.taken == len(outcome.tokens) and (entropy := outcome.rejected_entropy) is not None:
        stats.rejected_entropies.append(entropy)


def _count_depths(counts: list[int], depths: Sequence[int]) -> None:
    """Count nodes in level order, those of depth 1 first."""
    if depths:
        counts += [0] * (depths[-1] - len(counts))
    for depth in depths:
        counts[depth - 1] += 1
