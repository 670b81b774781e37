"""The seam between the engine and whatever proposes trees; drafters that grow trees from a token source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from ..config import Budget
from ..models.base import LanguageModel
from ..policies.base import GrowthPolicy
from ..request import Outcome, Request
from ..tree import DraftTree
from .distributions import Drawing
from .grow import grow
from .source import TokenSource


@runtime_checkable
class Drafter(Protocol):
    """Proposes a draft tree for each request and keeps whatever state that takes.

    Attributes:
        name: what people call it: the name that ``load_drafter`` made it by.
        passes: drafter model passes so far; each brings its candidates to the host in one transfer, and its drawn
            children in another.
        policy: what shapes its trees; None: it drafts nothing.
        successors: how many of the target's most probable tokens after each verified node it learns from; 0: none.
        learns: its predictions depend on other requests, so that drawn children would not repeat under the same seed.
        host: the target whose rows it drafts on; None: it needs none.
    """

    @property
    def name(self) -> str: ...

    @property
    def passes(self) -> int: ...

    @property
    def policy(self) -> GrowthPolicy | None: ...

    @property
    def successors(self) -> int: ...

    @property
    def learns(self) -> bool: ...

    @property
    def host(self) -> LanguageModel | None: ...

    def prepare(self, target: LanguageModel) -> None:
        """It will draft for ``target``: called once, before anything else."""

    def open(self, request: Request) -> None:
        """A request begins: its prompt is in ``request.ids``."""

    def propose(
        self, requests: Sequence[Request], budgets: Sequence[Budget], drawing: Drawing = Drawing.COUPLED
    ) -> list[DraftTree]:
        """One tree for each request, rooted at its last token and within its budget.

        ``drawing``: how children come out of the draft distribution; a request at temperature 0 gets the most probable.
        """

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """What became of the proposed trees; ``request.ids`` already ends with the tokens gained."""

    def close(self, request: Request) -> None:
        """A request has ended."""


class NoDrafter:
    """Drafts nothing: autoregressive decoding."""

    name = "none"
    passes = 0
    successors = 0
    learns = False
    policy: GrowthPolicy | None = None
    host: LanguageModel | None = None

    def prepare(self, target: LanguageModel) -> None: ...

    def open(self, request: Request) -> None: ...

    def propose(
        self, requests: Sequence[Request], budgets: Sequence[Budget], drawing: Drawing = Drawing.COUPLED
    ) -> list[DraftTree]:
        """Empty trees."""
        return [DraftTree.empty() for _ in requests]

    def observe(self, outcomes: Sequence[Outcome]) -> None: ...

    def close(self, request: Request) -> None: ...


@dataclass(slots=True)
class TreeDrafter:
    """Grows a tree for each request out of a source's candidates.

    Attributes:
        policy: shapes the trees.
        source: predicts what may follow.
        name: by default the source's.
    """

    policy: GrowthPolicy
    source: TokenSource
    name: str = ""
    _enabled: Sequence[bool] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.name = self.name or self.source.name
        self._enabled = [True] * len(self.source.parts)

    @property
    def passes(self) -> int:
        return self.source.passes

    @property
    def successors(self) -> int:
        """Of the parts that are enabled."""
        return max((p.successors for p, on in zip(self.source.parts, self._enabled, strict=True) if on), default=0)

    @property
    def learns(self) -> bool:
        return self.source.learns

    @property
    def host(self) -> LanguageModel | None:
        return self.source.host

    def prepare(self, target: LanguageModel) -> None:
        self.source.prepare(target)
        self.policy.prepare(target, self.source.parts)

    def open(self, request: Request) -> None:
        self.source.open(request)

    def propose(
        self, requests: Sequence[Request], budgets: Sequence[Budget], drawing: Drawing = Drawing.COUPLED
    ) -> list[DraftTree]:
        """Plan, grow, and settle."""
        planned = self.policy.plan(requests, budgets)
        if (enabled := self.policy.enabled) is not None:
            self._enabled = enabled
            self.source.enable(enabled)
        if not any(budget.nodes for budget in planned):
            return [DraftTree.empty() for _ in requests]
        fitting = [self.source.fit(s, b) for s, b in zip(requests, planned, strict=True)]
        grown = grow(self.source.begin(requests, drawing), self.policy, fitting, drawing)
        self.source.settle(requests, grown)
        return [g.tree for g in grown]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Notify source and policy; the policy learns what each part of the source took."""
        self.source.observe(outcomes)
        if self.source.seconds:
            step = replace(outcomes[0].step, drafters=self.source.seconds)
            outcomes = [replace(outcome, step=step) for outcome in outcomes]
        self.policy.observe(outcomes)

    def close(self, request: Request) -> None:
        self.source.close(request)
