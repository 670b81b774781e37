"""A hierarchy: a source made of two. The lower one proposes trees, the upper one says what it makes of them.

Source: Syu & Lee, *Hierarchical Speculative Decoding with Dynamic Window* (HSDDW; Findings of NAACL 2025). The upper
source's word is what counts. The lower one drafts what the upper one is likely to be asked about next, so that the
upper one answers for many nodes in one pass: it keeps what it finds right, gives its own token where it does not, and
adds what else it finds probable. Either may be a hierarchy itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import torch

from ...config import Budget
from ...errors import ConfigError
from ...models.base import LanguageModel
from ...outcome import Outcome
from ...policies.auto.policy import AutoTree
from ...policies.base import GrowthPolicy
from ...request import Level, Request
from ..distributions import Drawing
from ..source import Grown, Scorer, Source
from .rounds import HierarchyScorer, Proposal
from .state import Known
from .stopping_rule import Decider, LoopBack


@dataclass(slots=True)
class HierarchySource(Source):
    """Says what its upper source says, sooner.

    Attributes:
        lower: proposes.
        upper: is asked about what was proposed, and answers.
        policy: shapes the proposals.
        settings: of looping back.
        called: what people call the lower source and the upper one; by default their names.
        inner: it is the lower source of another hierarchy, which books what the target accepts.
    """

    learns: ClassVar[bool] = True

    lower: Source = field()
    upper: Source = field()
    policy: GrowthPolicy = field()
    settings: LoopBack = LoopBack()
    called: tuple[str, str] = ("", "")
    inner: bool = field(default=False, repr=False)
    _decider: Decider = field(init=False, repr=False)
    _room: dict[Request, tuple[Budget, Budget]] = field(default_factory=dict, repr=False)
    """What is left for the trees of the proposal, and for the lower source."""
    _scorer: HierarchyScorer | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._decider, self.at_once = Decider(self.settings), self.upper.at_once
        if isinstance(self.lower, HierarchySource):
            self.lower.inner = True

    @property
    def name(self) -> str:
        """All names, joined by ">"."""
        return ">".join(self.levels)

    @property
    def fingerprint(self) -> str:
        """All fingerprints, joined by ">"."""
        return f"{self.lower.fingerprint}>{self.upper.fingerprint}"

    @property
    def levels(self) -> tuple[str, ...]:
        """Names of the sources, the lowest first."""
        lower, upper = self.called
        below = self.lower.levels if isinstance(self.lower, HierarchySource) else (lower or self.lower.name,)
        return (*below, upper or self.upper.name)

    @property
    def costly(self) -> bool:
        """See ``Source``."""
        return True

    @property
    def model(self) -> LanguageModel | None:
        """None: it does not make one pass of one model for each layer."""
        return None

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        """Of both."""
        return (*self.lower.models, *self.upper.models)

    @property
    def host(self) -> LanguageModel | None:
        """Of either."""
        return self.upper.host or self.lower.host

    def unread(self, request: Request) -> list[tuple[LanguageModel, int]]:
        """Of both."""
        return [*self.lower.unread(request), *self.upper.unread(request)]

    @property
    def passes(self) -> int:
        """Of both."""
        return self.lower.passes + self.upper.passes

    @property
    def successors(self) -> int:
        """As many as the one that wants more."""
        return max(self.lower.successors, self.upper.successors)

    @property
    def decider(self) -> Decider:
        """What decides on looping back."""
        return self._decider

    def prepare(self, target: LanguageModel) -> None:
        """Tell both, and the policy for whom it shapes proposals.

        Raises:
            ConfigError: the policy counts seconds of the upper source's model, and there is none.
        """
        self.upper.prepare(target)
        self.lower.prepare(target)
        judge = self.upper.model
        if judge is not None:
            self.policy.prepare(judge, self.lower.parts)
        elif isinstance(self.policy, AutoTree):
            raise ConfigError(
                f"hierarchy {self.name}: {self.upper.name} is no model: use another method than auto below"
            )
        self._decider.prepare(target if judge is None or not self.inner else judge)

    def open(self, request: Request) -> None:
        """Tell both."""
        if not self.inner:
            request.stats.levels = [Level(name) for name in self.levels]
        self.upper.open(request)
        self.lower.open(request)

    def fit(self, request: Request, budget: Budget) -> Budget:
        """What the upper source can draft within."""
        room = self.upper.fit(request, budget)
        self._room[request] = room, self.lower.fit(request, budget)
        return room

    def room(self, request: Request) -> tuple[Budget, Budget]:
        """What ``fit`` found for the upper source, and for the lower one."""
        return self._room[request]

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        """Nothing is asked yet."""
        fresh = any(request.stats.steps == 0 for request in requests)
        self._scorer = HierarchyScorer(self, requests, drawing, fresh)
        return self._scorer

    def judged(self, proposals: Sequence[Proposal], outcomes: Sequence[Outcome], passes: int, seconds: float) -> None:
        """The upper source has answered for the lower one's proposals: policy and lower source learn from it.

        Args:
            proposals: what it proposed.
            outcomes: what the upper source made of them.
            passes, seconds: of the upper source.
        """
        self.policy.observe(outcomes)
        top = len(self.levels) - 1
        for proposal, outcome in zip(proposals, outcomes, strict=True):
            levels = outcome.request.stats.levels
            above, below = levels[top], levels[top - 1]
            above.rounds, above.passes, above.seconds = above.rounds + 1, above.passes + passes, above.seconds + seconds
            below.proposed += len(outcome.tree)
            below.accepted += len(outcome.path)
            if isinstance(self.lower, HierarchySource):
                self.lower.learn(outcome, proposal.row)
            else:
                below.rounds += 1
                below.passes += outcome.step.draft_passes
                below.seconds += outcome.step.draft

    def learn(self, outcome: Outcome, row: int) -> None:
        """The level above has judged a pending run.

        Args:
            outcome: of it.
            row: of its request in the proposal.
        """
        known = self._known(row)
        nodes = known.numbers(outcome.tree, known.base)
        accepted = [nodes[n] for n in outcome.path[: outcome.taken]]
        begins = [i for i, node in enumerate(accepted) if node in known.rounds]
        below = [after - at for at, after in pairwise([*begins, len(accepted) - 1])]
        self._decider.observe(outcome, known.refused, below)

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
        """Tell both which of the nodes they know stay."""
        ours = [
            Grown(tree, torch.tensor(self._known(row).numbers(tree), dtype=torch.int64))
            for row, (tree, _) in enumerate(grown)
        ]
        self.upper.settle(requests, ours)
        self.lower.settle(requests, ours)

    def _known(self, row: int) -> Known:
        """Of a request of the proposal under way."""
        if self._scorer is None:
            raise ConfigError("a hierarchy was told of trees that it has not begun: call begin first")
        return self._scorer.known[row]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """The target has judged: learn from it, book whose tokens came out, and tell both."""
        if self._scorer is not None and not self.inner:
            for row, outcome in enumerate(outcomes):
                self.learn(outcome, row)
                self._book(outcome, self._known(row))
        self._scorer = None
        self.upper.observe(outcomes)
        self.lower.observe(outcomes)

    @staticmethod
    def _book(outcome: Outcome, known: Known) -> None:
        levels, top = outcome.request.stats.levels, len(outcome.request.stats.levels) - 1
        nodes, accepted = known.numbers(outcome.tree), outcome.path[: outcome.taken]
        levels[top].proposed += len(outcome.tree)
        levels[top].accepted += len(accepted)
        for n in accepted:
            levels[known.level.get(nodes[n], top)].emitted += 1

    def close(self, request: Request) -> None:
        """Tell both."""
        self._room.pop(request, None)
        self.upper.close(request)
        self.lower.close(request)
