"""A growth policy of one's own: a node gets the more children, the less sure the drafter is of what follows it.

draftree generate "Name the capital of France." --method examples.entropy_policy:ByEntropy --set width=3 --show-trees
"""

from dataclasses import dataclass

import draftree


@dataclass(frozen=True)
class ByEntropy(draftree.GrowthPolicy):
    """1 + floor(H) children at entropy H in nats, up to ``width``; none below where H exceeds ``stop``."""

    width: int = 4
    depth: int = 5
    stop: float = 2.0

    def grow(self, frontier: draftree.Frontier) -> list[draftree.Child]:
        entropies = [found.entropy for found in frontier.candidates]
        counts = [min(self.width, 1 + int(entropy)) for entropy in entropies]
        deeper = [frontier.depth + 1 < self.depth and entropy <= self.stop for entropy in entropies]
        return frontier.likeliest(counts, extend=deeper)
