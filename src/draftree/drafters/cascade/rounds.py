"""The rounds of a cascade: the stage below proposes, the intermediate verifier scores all of it in one pass.

Every stage scores nodes of the proposal's tries. A node that the verifier has scored keeps its candidates. Below any
other node a round begins if the stopping rule lets the pending run go on; else nothing follows it, and the run ends.

The rule is that of Syu & Lee, *HSDDW*: while the intermediate verifier's entropy is at most the stopping threshold
tau2, the mean entropy of its tokens that the target has rejected.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...config import Budget, Checked, Count, Entropy
from ...policies.base import Candidates, GrowthPolicy, Plan
from ...policies.chains import Memory, Threshold
from ...request import Outcome, Request, StepCost
from ...tree import ROOT, DraftTree, Drawing
from ..base import Scorer, TokenSource, UnscoredNode
from ..distributions import joined, split
from ..grow import grow
from .trie import TokenTrie

TrieNode = tuple[int, int]
"""Row of the request, and the node in its trie."""
_NO_CANDIDATES = Candidates(np.zeros((1, 1), np.int64), np.full((1, 1), -np.inf, np.float32), np.zeros(1, np.float32))


@dataclass(frozen=True, slots=True)
class LoopBack(Checked):
    """When the stage below drafts again, rather than the pending run going to the target; by default as published.

    Attributes:
        tau: threshold before any rejection in nats; None: the least entropy of the request's first draft.
        pending: from this many tokens on a run is not drafted further, 50 as in the authors' code; 1: one round a
            proposal, the paper's ablation.
        memory: see ``Threshold``.

    Raises:
        ConfigError: a value is out of range.
    """

    tau: Entropy | None = None
    pending: Count = 50
    memory: Memory = math.inf


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """Decides on another round.

    Attributes:
        settings: how.
    """

    settings: LoopBack
    _thresholds: WeakKeyDictionary[Request, Threshold] = field(default_factory=WeakKeyDictionary, repr=False)

    def threshold(self, request: Request) -> Threshold:
        """The stopping threshold of a request."""
        return self._thresholds.setdefault(request, Threshold(self.settings.tau, self.settings.memory))

    def goes_on(self, request: Request, depth: int, entropy: float) -> bool:
        """Whether a round is made below a token that the verifier has chosen and not scored.

        Args:
            request: whose run it ends.
            depth: of the token below the run's base.
            entropy: nats, of the distribution that it was taken from.
        """
        return depth < self.settings.pending and entropy <= self.threshold(request).value


class SourceStage:
    """Scores nodes of the tries by one source, each of them once.

    Attributes:
        found: for each row, node -> what follows it.
    """

    def __init__(
        self, source: TokenSource, requests: Sequence[Request], tries: Sequence[TokenTrie], drawing: Drawing
    ) -> None:
        self._source, self._requests, self._tries = source, requests, tries
        self._scorer = source.begin(requests, drawing)
        self.found: list[dict[int, Candidates]] = [{} for _ in requests]

    @property
    def passes(self) -> int:
        """Model passes of the source so far."""
        return self._source.passes

    def proposer(self, row: int, node: int) -> int:
        """The stage whose token a node is: this one."""
        return 0

    def predict(self, nodes: Sequence[TrieNode], width: int) -> list[Candidates]:
        """What follows these nodes; those above them that the source has not read are scored with them."""
        unread = dict.fromkeys(place for row, node in nodes for place in self._unread(row, node))
        if unread:
            scored = self._scorer.score([self._tries[row].unscored(row, node) for row, node in unread], width)
            for (row, node), candidates in zip(unread, split(scored), strict=True):
                self.found[row][node] = candidates
        return [self.found[row][node] for row, node in nodes]

    def _unread(self, row: int, node: int) -> list[TrieNode]:
        """The nodes from the first one that has to be scored, or scored again, down to this one."""
        found, trie, request = self.found[row], self._tries[row], self._requests[row]
        way: list[TrieNode] = []
        while node == ROOT or node not in found or self._source.is_stale(request, node, trie.parent(node)):
            if node == ROOT:
                return way[::-1] if ROOT in found else [(row, ROOT), *way[::-1]]
            way.append((row, node))
            node = trie.parent(node)
        return way[::-1]


@dataclass(frozen=True, slots=True)
class Verifier:
    """An intermediate verifier: scores what the stage below proposes.

    Attributes:
        stage: its number, at least 1.
        below: the source that proposes, which may be a cascade.
        source: scores.
        policy: shapes the proposals.
        rule: ends a run.
    """

    stage: int
    below: TokenSource
    source: TokenSource
    policy: GrowthPolicy
    rule: StoppingRule


class StageProposal(NamedTuple):
    """What the stage below proposed below one node.

    Attributes:
        row: of the request.
        anchor: the node.
        tree: the proposal.
        nodes: of the tree, in the trie.
    """

    row: int
    anchor: int
    tree: DraftTree
    nodes: list[int]


@dataclass(slots=True)
class PendingRun:
    """What one stage has drafted for the one above it and not yet handed on.

    Attributes:
        base: the node that it begins below.
        refused: least entropy of a distribution whose token was not drafted further, since it was too unsure.
    """

    base: int = ROOT
    refused: float = math.inf


class VerifierStage:
    """Scores nodes of the tries by rounds.

    Attributes:
        found: for each row, node -> what follows it.

    Args:
        verifier: scores the proposals.
        below: proposes.
        requests, tries: of the proposal.
        fits: of each request, the budget that each stage's source can draft within.
        drawing: how children come out of the distributions.
    """

    def __init__(
        self,
        verifier: Verifier,
        below: Stage,
        requests: Sequence[Request],
        tries: Sequence[TokenTrie],
        fits: Sequence[Sequence[Budget]],
        drawing: Drawing,
    ) -> None:
        self._verifier, self._below, self._requests, self._tries = verifier, below, requests, tries
        self._fits, self._drawing = fits, drawing
        self._upper = SourceStage(verifier.source, requests, tries, drawing)
        self.found = self._upper.found
        self._runs = [PendingRun() for _ in requests]
        self._ended = [set[int]() for _ in requests]
        self._proposers = [dict[int, int]() for _ in requests]

    @property
    def passes(self) -> int:
        """Model passes of this stage and those below it so far."""
        return self._below.passes + self._upper.passes

    def proposer(self, row: int, node: int) -> int:
        """The stage whose token a node is: its own unless it was proposed."""
        return self._proposers[row].get(node, self._verifier.stage)

    def begin_run(self, row: int, base: int) -> None:
        """A new run begins below this node."""
        self._runs[row] = PendingRun(base)

    def predict(self, nodes: Sequence[TrieNode], width: int) -> list[Candidates]:
        """What follows nodes of one depth; nothing where the run ends."""
        wanted: dict[int, list[int]] = defaultdict(list)
        for row, node in nodes:
            if node not in self.found[row] and node not in self._ended[row]:
                if node == self._runs[row].base or self._goes_on(row, node):
                    wanted[row].append(node)
                else:
                    self._ended[row].add(node)
        if wanted:
            self._round(dict(sorted(wanted.items())), width)
        return [self.found[row].get(node, _NO_CANDIDATES) for row, node in nodes]

    def _goes_on(self, row: int, node: int) -> bool:
        """Whether the run is drafted further below a node."""
        run, trie, rule = self._runs[row], self._tries[row], self._verifier.rule
        above = self.found[row].get(trie.parent(node))
        if above is None:
            return False
        depth, entropy = trie.depth(node) - trie.depth(run.base), float(above.entropies[0])
        if rule.goes_on(self._requests[row], depth, entropy):
            return True
        if depth < rule.settings.pending:
            run.refused = min(run.refused, entropy)
        return False

    def _round(self, wanted: Mapping[int, Sequence[int]], width: int) -> None:
        """Propose below the likeliest wanted node of each request, and score all of it."""
        began, passes = time.perf_counter(), (self._below.passes, self._upper.passes)
        plan, proposals = self._propose({row: self._likeliest(row, nodes) for row, nodes in wanted.items()})
        proposed = time.perf_counter()
        self._upper.predict([(p.row, node) for p in proposals for node in [*wanted[p.row], *p.nodes]], width)
        draft, verify = proposed - began, time.perf_counter() - proposed
        cost = StepCost(len(proposals), draft, verify, 0.0, self._below.passes - passes[0])
        outcomes = [self._outcome(p, cost) for p in proposals]
        self._verifier.policy.observe(plan, outcomes)
        self._observe(proposals, outcomes, self._upper.passes - passes[1])

    def _likeliest(self, row: int, wanted: Sequence[int]) -> int:
        """The node whose path from the run's base down the verifier finds most probable."""
        found, trie, base = self.found[row], self._tries[row], self._runs[row].base

        def logprob(node: int) -> float:
            return sum(_logprob(found[trie.parent(n)], trie.token(n)) for n in trie.path(node, base))

        return wanted[0] if len(wanted) == 1 else max(wanted, key=logprob)

    def _propose(self, anchors: Mapping[int, int]) -> tuple[Plan, list[StageProposal]]:
        """What the stage below proposes below a node of each request, and the policy's plan of it."""
        policy = self._verifier.policy
        if isinstance(self._below, VerifierStage):
            for row, anchor in anchors.items():
                self._below.begin_run(row, anchor)
        requests = [self._requests[row] for row in anchors]
        plan = policy.plan(requests, [self._budget(row, anchor) for row, anchor in anchors.items()])
        if plan.enabled is not None:
            self._verifier.below.enable(plan.enabled)
        scorer = TrieScorer(self._below, self._tries, list(anchors.items()))
        grown = grow(scorer, policy, plan, self._drawing)
        proposals = []
        for (row, anchor), (tree, _) in zip(anchors.items(), grown, strict=True):
            nodes = self._tries[row].nodes_of(tree, anchor)
            for node in nodes:
                self._proposers[row].setdefault(node, self._below.proposer(row, node))
            proposals.append(StageProposal(row, anchor, tree, nodes))
        return plan, proposals

    def _budget(self, row: int, anchor: int) -> Budget:
        """What the verifier can score below a node: nothing below the deepest layer, and no leaf of it."""
        lower, upper = self._fits[row][self._verifier.stage - 1 :][:2]
        most = upper.nodes if upper.depth is None else min(upper.nodes, upper.depth)
        if lower.depth is not None:
            most = min(most, lower.depth + 1)
        return Budget(min(upper.nodes, lower.nodes), max(0, most - 1 - self._tries[row].depth(anchor)))

    def _outcome(self, proposal: StageProposal, cost: StepCost) -> Outcome:
        """The verifier accepts its own most probable tokens while they were proposed."""
        row, node, tree, nodes = proposal
        at, path, tokens = ROOT, list[int](), list[int]()
        while True:
            tokens.append(_best(self.found[row][node]))
            accepted = [child for child in tree.children(at) if int(tree.tokens[child]) == tokens[-1]]
            if not accepted:
                return Outcome(self._requests[row], tree, path, tokens, len(tokens), cost)
            at = accepted[0]
            node = nodes[at]
            path.append(at)

    def _observe(self, proposals: Sequence[StageProposal], outcomes: Sequence[Outcome], passes: int) -> None:
        """The stage below learns from a round; ``passes`` are the verifier's."""
        stage = self._verifier.stage
        for proposal, outcome in zip(proposals, outcomes, strict=True):
            below, above = outcome.request.stats.stages[stage - 1 : stage + 1]
            above.rounds += 1
            above.passes += passes
            above.seconds += outcome.step.verify
            below.proposed += len(outcome.tree)
            below.accepted += len(outcome.path)
            if isinstance(self._below, VerifierStage):
                self._below.learn(outcome, proposal.row)
            else:
                below.rounds += 1
                below.passes += outcome.step.draft_passes
                below.seconds += outcome.step.draft

    def learn(self, outcome: Outcome, row: int) -> None:
        """The stage above, or the target, has verified a pending run."""
        self._verifier.rule.threshold(outcome.request).learn(outcome, self._runs[row].refused)


def _best(found: Candidates) -> int:
    """The most probable token after one node; -1 where there is no candidate."""
    return int(found.tokens[0, 0]) if float(found.logprobs[0, 0]) > -math.inf else -1


def _logprob(found: Candidates, token: int) -> float:
    """Of a candidate after one node; -inf for any other token."""
    matching = found.logprobs[found.tokens == token]
    return float(matching[0]) if len(matching) else -math.inf


Stage = SourceStage | VerifierStage


class TrieScorer(Scorer):
    """Scores the nodes of growing trees, each below a node of a trie.

    The one place where the growth loop's numbers of nodes become nodes of a trie.
    """

    def __init__(self, stage: Stage, tries: Sequence[TokenTrie], anchors: Sequence[TrieNode]) -> None:
        self._stage, self._tries, self._anchors = stage, tries, anchors
        self._nodes: dict[tuple[int, int], int] = {}

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> Candidates:
        places = []
        for tree, node, parent, token in nodes:
            row, own = self._anchors[tree]
            if node != ROOT:
                own = self._tries[row].child(self._nodes[tree, parent], token)
            self._nodes[tree, node] = own
            places.append((row, own))
        return self._candidates(places, width)

    def _candidates(self, places: Sequence[TrieNode], width: int) -> Candidates:
        return joined(self._stage.predict(places, width))


class CascadeScorer(TrieScorer):
    """Scores the nodes of the target's trees by the last stage; candidates that it has scored already cost no pass."""

    def _candidates(self, places: Sequence[TrieNode], width: int) -> Candidates:
        found = super()._candidates(places, width)
        known = [
            [self._tries[row].find(node, token) in self._stage.found[row] for token in tokens]
            for (row, node), tokens in zip(places, found.tokens.tolist(), strict=True)
        ]
        return replace(found, known=np.array(known), origins=None)  # of the parts of the last stage's source
