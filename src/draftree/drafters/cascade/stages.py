"""A cascade: a source made of stages. The first one drafts, each one after it verifies what the one before proposes.

Source: Syu & Lee, *Hierarchical Speculative Decoding with Dynamic Window* (HSDDW; Findings of NAACL 2025). The last
stage's distributions are the cascade's. The stages before it draft what it is likely to be asked about next, so that it
scores many nodes in one pass: it keeps what it finds right, gives its own token where it does not, and adds what else
it finds probable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...config import Budget
from ...errors import ConfigError
from ...models.base import LanguageModel
from ...policies.auto.policy import AutoTree
from ...policies.base import GrowthPolicy
from ...request import Outcome, Request, StageStats
from ...tree import ROOT, Drawing
from ..base import Grown, Scorer, TokenSource
from .rounds import CascadeScorer, LoopBack, SourceStage, Stage, StoppingRule, Verifier, VerifierStage
from .trie import TokenTrie


@dataclass(slots=True)
class CascadeSource(TokenSource):
    """Predicts what its last stage predicts, sooner.

    Attributes:
        lower: proposes; the stages of a cascade come before its own.
        upper: the intermediate verifier of what was proposed: its last stage.
        policy: shapes the proposals.
        settings: when the pending run goes to the target, or to the stage above.
        called: names of the lower source and the upper one; by default their own.
    """

    learns = True

    lower: TokenSource = field()
    upper: TokenSource = field()
    policy: GrowthPolicy = field()
    settings: LoopBack = LoopBack()
    called: tuple[str, str] = ("", "")
    sources: tuple[TokenSource, ...] = field(init=False, repr=False)
    """Of the stages, the first one first."""
    verifiers: tuple[Verifier, ...] = field(init=False, repr=False)
    """Of the stages but the first."""
    _fits: dict[Request, list[Budget]] = field(default_factory=dict, repr=False)
    """What each stage's source can draft within, in the proposal."""
    _tries: list[TokenTrie] = field(default_factory=list, repr=False)
    """Of the requests of the proposal."""
    _last: VerifierStage | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        lower = self.lower
        below, before = (lower.sources, lower.verifiers) if isinstance(lower, CascadeSource) else ((lower,), ())
        self.sources = (*below, self.upper)
        self.verifiers = (*before, Verifier(len(below), lower, self.upper, self.policy, StoppingRule(self.settings)))

    @property
    def name(self) -> str:
        return ">".join(self.stage_names)

    @property
    def fingerprint(self) -> str:
        return ">".join(source.fingerprint for source in self.sources)

    @property
    def stage_names(self) -> tuple[str, ...]:
        """Names of the stages, the first one first."""
        lower, upper = self.called
        below = self.lower.stage_names if isinstance(self.lower, CascadeSource) else (lower or self.lower.name,)
        return (*below, upper or self.upper.name)

    def prepare(self, target: LanguageModel, prefixes: int = 0) -> None:
        """Prepare the stages, and the policies for the models that verify what they shape.

        Raises:
            ConfigError: a policy counts seconds of a verifier's model, and there is none.
        """
        super(CascadeSource, self).prepare(target, prefixes)
        for verifier in self.verifiers:
            name, model = verifier.source.name, verifier.source.model
            if model is not None:
                verifier.policy.prepare(model, verifier.below.parts)
            elif isinstance(verifier.policy, AutoTree):
                raise ConfigError(f"cascade {self.name}: {name} is no model: use another method than auto below")

    def open(self, request: Request) -> None:
        request.stats.stages = [StageStats(name) for name in self.stage_names]
        super(CascadeSource, self).open(request)

    def fit(self, request: Request, budget: Budget) -> Budget:
        """What the last stage can draft within."""
        self._fits[request] = [source.fit(request, budget) for source in self.sources]
        return self._fits[request][-1]

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        """New tries; nothing is scored yet."""
        self._tries = [TokenTrie() for _ in requests]
        fits = [self._fits[request] for request in requests]
        stage: Stage = SourceStage(self.sources[0], requests, self._tries, drawing)
        for verifier in self.verifiers:
            stage = self._last = VerifierStage(verifier, stage, requests, self._tries, fits, drawing)
        return CascadeScorer(stage, self._tries, [(row, ROOT) for row in range(len(requests))])

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
        """The stages know a node by its number in the trie."""
        ours = [
            Grown(tree, np.array(trie.nodes_of(tree), np.int64))
            for trie, (tree, _) in zip(self._tries, grown, strict=True)
        ]
        for source in self.sources:
            source.settle(requests, ours)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from what the target has verified, and count whose tokens it accepted."""
        if self._last is not None:
            for row, (outcome, trie) in enumerate(zip(outcomes, self._tries, strict=True)):
                nodes = trie.nodes_of(outcome.tree)
                self._last.learn(outcome, row)
                stages, accepted = outcome.request.stats.stages, outcome.path[: outcome.taken]
                stages[-1].proposed += len(nodes)
                stages[-1].accepted += len(accepted)
                for n in accepted:
                    stages[self._last.proposer(row, nodes[n])].emitted += 1
        self._last = None
        super(CascadeSource, self).observe(outcomes)

    def close(self, request: Request) -> None:
        self._fits.pop(request, None)
        super(CascadeSource, self).close(request)
