"""Times the phases of steps, and adds what they did to the statistics of their requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

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
        return StepCost(batch, drafter.seconds, self._verify, self._other, passes)

    def ended(self, reading: Sequence[Request]) -> None:
        """The step is over; these requests' prompts were read in it."""
        for request in reading:
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
    stats.drafted = _sums(stats.drafted, np.bincount(tree.depths)[1:].tolist())
    stats.accepted = _sums(stats.accepted, [1] * len(accepted))
    for name, made in by_drafter(outcome, drafter).items():
        total = stats.drafters.setdefault(name, DrafterStats())
        total.drafted += made.drafted
        total.accepted += made.accepted
    stats.accepted_entropies += tree.entropies[accepted].tolist()
    if outcome.taken == len(outcome.tokens) and (entropy := outcome.rejected_entropy) is not None:
        stats.rejected_entropies.append(entropy)


def by_drafter(outcome: Outcome, drafter: Drafter) -> dict[str, DrafterStats]:
    """What the drafter did in a step whose tree has nodes; of an ensemble, what each part did."""
    accepted, origins = outcome.path[: outcome.taken], outcome.tree.origins
    if origins is None:
        return {drafter.name: DrafterStats(len(outcome.tree), len(accepted))}
    proposed = origins[:, None] >> np.arange(len(drafter.parts)) & 1
    counts = proposed.sum(0).tolist(), proposed[accepted].sum(0).tolist()
    return dict(zip(drafter.parts, map(DrafterStats, *counts), strict=True))


def _sums(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
