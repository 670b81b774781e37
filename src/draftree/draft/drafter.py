"""The drafter: what a source says, shaped by a policy in the growth loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import Budget
from ..models.base import LanguageModel
from ..outcome import Outcome
from ..policies.base import GrowthPolicy
from ..request import Request
from ..tree import DraftTree
from .drawing import Drawing
from .grow import grow
from .source import Source


@dataclass(slots=True)
class TreeDrafter:
    """Grows a tree for each request out of what a source says.

    Attributes:
        policy: shapes the trees.
        source: says what may follow.
        name: see ``Drafter``; by default the source's.
    """

    policy: GrowthPolicy
    source: Source
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or self.source.name

    @property
    def passes(self) -> int:
        """See ``Drafter``."""
        return self.source.passes

    @property
    def successors(self) -> int:
        """See ``Drafter``."""
        return self.source.successors

    @property
    def learns(self) -> bool:
        """See ``Drafter``."""
        return self.source.learns

    @property
    def host(self) -> LanguageModel | None:
        """See ``Drafter``."""
        return self.source.host

    def prepare(self, target: LanguageModel) -> None:
        """Tell source and policy."""
        self.source.prepare(target)
        self.policy.prepare(target, self.source.parts)

    def open(self, request: Request) -> None:
        """Tell the source."""
        self.source.open(request)

    def propose(
        self, requests: Sequence[Request], budgets: Sequence[Budget], drawing: Drawing = Drawing.COUPLED
    ) -> list[DraftTree]:
        """Plan, grow, and let the source know what stays.

        What a source takes that no profile tells is counted here, but for requests whose prompts may be read.
        """
        began = time.perf_counter()
        planned = self.policy.plan(requests, budgets)
        fitting = [self.source.fit(s, b) for s, b in zip(requests, planned, strict=True)]
        grown = grow(self.source.begin(requests, drawing), self.policy, fitting, drawing)
        self.source.settle(requests, grown)
        if self.source.costly and self.source.model is None and all(s.stats.steps for s in requests):
            self.source.spent += time.perf_counter() - began
        return [g.tree for g in grown]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Tell source and policy, which asks what the source has spent."""
        self.source.observe(outcomes)
        self.policy.observe(outcomes)

    def close(self, request: Request) -> None:
        """Tell the source."""
        self.source.close(request)
