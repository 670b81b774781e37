"""HSDDW: Syu & Lee, *Hierarchical Speculative Decoding with Dynamic Window* (2025): the hierarchy, a cascade A>B.

A proposes, and the intermediate verifier B scores all of a proposal in one pass. B's distributions are the cascade's. A
drafts the nodes that B is likely to score next, so that B scores many of them in one pass: B keeps what it finds right,
gives its own token where it does not, and adds what else it finds probable.

Both score nodes of the proposal's tries. A node that B has scored keeps its candidates. Below any other node a round
begins if the stopping rule lets the pending run go on; else nothing follows it, and the run ends. The rule: B's entropy
is at most the stopping threshold tau2, the mean entropy of its tokens that the target has rejected.
``docs/how-it-works/cascades.md`` lists where we differ.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

from ..config import Budget, Checked, Count, Entropy
from ..drafters.base import DraftSource, Grown, Scorer, UnscoredNode
from ..drafters.grow import grow
from ..drafters.spec import StageSpec
from ..errors import ConfigError
from ..models.base import LanguageModel
from ..policies.base import NO_CANDIDATES, Candidates, GrowthPolicy, read_number
from ..policies.methods import find_method
from ..request import Outcome, Request, StepCost
from ..tree import ROOT, DraftTree
from .hsddw import Threshold, read_start


@dataclass(frozen=True, slots=True)
class LoopBack(Checked):
    """When A drafts again, rather than the pending run going to the target; by default as published.

    Attributes:
        tau: threshold before any rejection in nats; None: the least entropy of the request's first draft.
        pending: from this many tokens on a run is not drafted further, 50 as in the authors' code; 1: one round a
            proposal, the paper's ablation.
        rejected: what becomes of the run where B's token is none that A proposed: it ends with it, or goes on below
            it (ours).

    Raises:
        ConfigError: a value is out of range.
    """

    tau: Entropy | None = None
    pending: Count = 50
    rejected: Literal["end", "on"] = "end"


_LOOP: Mapping[str, Callable[[str], Any]] = {
    "tau": partial(read_start, "tau"),
    "pending": lambda text: read_number(int, "pending", text, "use a whole number of tokens, at least 1"),
    "rejected": str,
}
"""Settings of ``LoopBack``, and how they are read."""
STAGES = "stages"
"""Their figures in ``Stats.figures``: a list of ``StageStats``, the first to draft first."""
METHOD = "hsddw"
"""The default method of a stage's proposals."""


def read_stages(below: StageSpec, last: StageSpec) -> tuple[GrowthPolicy, LoopBack]:
    """What shapes A's proposals, from "method" and the settings of that method, and when B lets A draft again.

    Raises:
        ConfigError: a setting does not exist or is out of range.
    """
    settings = dict(below.settings)
    policy = find_method(settings.pop("method", METHOD)).policy(settings)
    if wrong := [key for key in last.settings if key not in _LOOP]:
        raise ConfigError(f"the last stage, {last}, has no setting {wrong[0]!r}: it has {', '.join(_LOOP)}")
    return policy, LoopBack(**{key: _LOOP[key](text) for key, text in last.settings.items()})


@dataclass(slots=True)
class StageStats:
    """What one stage of a cascade did for one request.

    Attributes:
        name: of its source.
        rounds: rounds in which it drafted, those of other requests in the batch included.
        passes: its model passes in them.
        proposed: tokens that it proposed to the next stage, the target in the end.
        accepted: of these, accepted there.
        emitted: tokens of the output that it was the first to propose; the others are the target's own.
        seconds: that it took in these rounds.
    """

    name: str
    rounds: int = 0
    passes: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    seconds: float = 0.0


class TokenTrie:
    """The token paths of one request in one proposal, whoever drafted them; ROOT is the empty path.

    Attributes:
        above: node -> its parent and its token; ROOT's mean nothing.
    """

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}
        self.above = {ROOT: (ROOT, 0)}

    def child(self, parent: int, token: int) -> int:
        """The child of a node by its token; new if there was none."""
        node = self._children.setdefault((parent, token), len(self._children))
        self.above[node] = parent, token
        return node

    def path(self, node: int) -> list[int]:
        """The nodes from the root, left out, down to this one."""
        down: list[int] = []
        while node != ROOT:
            down.append(node)
            node, _ = self.above[node]
        return down[::-1]

    def nodes_of(self, tree: DraftTree, anchor: int = ROOT) -> list[int]:
        """The nodes of a tree whose root is ``anchor``."""
        nodes: list[int] = []
        for parent, token in zip(tree.parents, tree.tokens, strict=True):
            nodes.append(self.child(anchor if parent == ROOT else nodes[parent], token))
        return nodes


TrieNode = tuple[int, int]
"""Which request of the proposal, from 0, and the node in its trie."""


class _Stage:
    """Scores nodes of the tries by one source, each of them once.

    Attributes:
        candidates: for each request, node -> what follows it.
    """

    def __init__(self, source: DraftSource, requests: Sequence[Request], tries: Sequence[TokenTrie], coupled: bool):
        self._tries, self._scorer = tries, source.scorer(requests, coupled)
        self.candidates: list[dict[int, Candidates]] = [{} for _ in requests]

    def predict(self, nodes: Sequence[TrieNode], width: int) -> list[Candidates]:
        """What follows these nodes; those above them that the source has not read are scored with them."""
        paths = [(b, n) for b, node in nodes for n in (ROOT, *self._tries[b].path(node))]
        if unread := [*dict.fromkeys((b, n) for b, n in paths if n not in self.candidates[b])]:
            new = [UnscoredNode(b, node, *self._tries[b].above[node]) for b, node in unread]
            scored = self._scorer.score(new, width)
            for (b, node), candidates in zip(unread, scored, strict=True):
                self.candidates[b][node] = candidates
        return [self.candidates[b][node] for b, node in nodes]


class _TrieScorer(Scorer):
    """Scores the nodes of growing trees, each below a node of a trie."""

    def __init__(
        self,
        predict: Callable[[Sequence[TrieNode], int], list[Candidates]],
        tries: Sequence[TokenTrie],
        anchors: Sequence[TrieNode],
    ) -> None:
        self._predict, self._tries, self._anchors = predict, tries, anchors
        self._nodes: dict[tuple[int, int], int] = {}

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        places = []
        for tree, node, parent, token in nodes:
            b, trie_node = self._anchors[tree]
            if node != ROOT:
                trie_node = self._tries[b].child(self._nodes[tree, parent], token)
            self._nodes[tree, node] = trie_node
            places.append((b, trie_node))
        return self._predict(places, width)


class _Rounds:
    """The rounds of one proposal of the cascade.

    Attributes:
        tries: the requests' tries.
        proposed: for each request, the nodes whose tokens A proposed.
    """

    def __init__(self, cascade: CascadeSource, requests: Sequence[Request], coupled: bool) -> None:
        self._cascade, self._requests = cascade, requests
        self.tries = [TokenTrie() for _ in requests]
        self._lower = _Stage(cascade.lower, requests, self.tries, coupled)
        self._upper = _Stage(cascade.upper, requests, self.tries, coupled)
        self.proposed = [set[int]() for _ in requests]

    def predict(self, nodes: Sequence[TrieNode], width: int) -> list[Candidates]:
        """What follows nodes of one depth; nothing where the run ends."""
        candidates = self._upper.candidates
        wanted: dict[int, list[int]] = defaultdict(list)
        for b, node in nodes:
            if node not in candidates[b] and (node == ROOT or self._goes_on(b, node)):
                wanted[b].append(node)
        if wanted:
            self._round(wanted, width)
        return [candidates[b].get(node, NO_CANDIDATES) for b, node in nodes]

    def _goes_on(self, b: int, node: int) -> bool:
        """Whether the run is drafted further below a token that B has chosen and not scored."""
        trie, cascade = self.tries[b], self._cascade
        parent, _ = trie.above[node]
        if (above := self._upper.candidates[b].get(parent)) is None:
            return False
        if cascade.settings.rejected == "end" and any(trie.above[n][0] == parent for n in self.proposed[b]):
            return False
        return cascade.goes_on(self._requests[b], len(trie.path(node)), above.entropy)

    def _round(self, wanted: Mapping[int, Sequence[int]], width: int) -> None:
        """Propose below the first wanted node of each request, mostly the likeliest, and score all of it."""
        lower, upper, policy = self._cascade.lower, self._cascade.upper, self._cascade.policy
        began, passes = time.perf_counter(), (lower.passes, upper.passes)
        anchors = [(b, nodes[0]) for b, nodes in wanted.items()]
        plan = policy.plan([self._requests[b] for b in wanted], [self._budget(*anchor) for anchor in anchors])
        if plan.enabled is not None:
            left_out = plan.left_out or [()] * len(plan.enabled)  # what fits was settled for the whole proposal
            lower.enable([on and not others for on, others in zip(plan.enabled, left_out, strict=True)])
        trees = [grown.tree for grown in grow(_TrieScorer(self._lower.predict, self.tries, anchors), policy, plan)]
        proposals = [self.tries[b].nodes_of(tree, anchor) for (b, anchor), tree in zip(anchors, trees, strict=True)]
        unscored = list[TrieNode]()
        for (b, nodes), proposal in zip(wanted.items(), proposals, strict=True):
            self.proposed[b].update(proposal)
            unscored += [(b, node) for node in (*nodes, *proposal)]
        proposed = time.perf_counter()
        self._upper.predict(unscored, width)
        verify = time.perf_counter() - proposed
        cost = StepCost(len(trees), proposed - began, verify, 0.0, lower.passes - passes[0])
        outcomes = []
        for (b, anchor), tree, proposal in zip(anchors, trees, proposals, strict=True):
            predicted = [self._upper.candidates[b][node].tokens for node in (anchor, *proposal)]
            path, tokens = tree.follow([best[0] if best else -1 for best in predicted])  # B's most probable tokens
            outcomes.append(Outcome(self._requests[b], tree, path, tokens, len(tokens), cost))
        policy.observe(plan, outcomes)
        for outcome in outcomes:
            _count(outcome, upper.passes - passes[1])

    def _budget(self, b: int, anchor: int) -> Budget:
        """What B can score below a node: nothing below the deepest layer, and no leaf of it."""
        lower, upper = self._cascade.fits[self._requests[b]]
        most = upper.nodes if upper.depth is None else min(upper.nodes, upper.depth)
        if lower.depth is not None:
            most = min(most, lower.depth + 1)
        return Budget(min(upper.nodes, lower.nodes), max(0, most - 1 - len(self.tries[b].path(anchor))))


def _count(outcome: Outcome, passes: int) -> None:
    """Count a round in the request's statistics; ``passes`` are B's."""
    below, above = outcome.request.stats.figures[STAGES]
    above.rounds += 1
    above.passes += passes
    above.seconds += outcome.step.verify
    below.rounds += 1
    below.passes += outcome.step.draft_passes
    below.seconds += outcome.step.draft
    below.proposed += len(outcome.tree)
    below.accepted += len(outcome.path)


@dataclass
class CascadeSource(DraftSource):
    """A draft source that predicts what B predicts, in fewer passes of B.

    Attributes:
        lower: A, which proposes.
        upper: B, the intermediate verifier: a draft model or a head.
        policy: shapes the proposals.
        settings: when the pending run goes to the target.
        called: names of A and B; by default their own.
        fits: what each of them can draft within for the requests of the proposal.
    """

    learns = True

    lower: DraftSource
    upper: DraftSource
    policy: GrowthPolicy
    settings: LoopBack = LoopBack()
    called: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        self.stage_names = self.called or (self.lower.name, self.upper.name)
        self.sources, self.name = (self.lower, self.upper), ">".join(self.stage_names)
        self.fits = WeakKeyDictionary[Request, tuple[Budget, Budget]]()
        self._thresholds = WeakKeyDictionary[Request, Threshold]()
        self._rounds: _Rounds | None = None  # of the proposal under way

    def threshold(self, request: Request) -> Threshold:
        """The stopping threshold of a request."""
        return self._thresholds.setdefault(request, Threshold(self.settings.tau))

    def goes_on(self, request: Request, depth: int, entropy: float) -> bool:
        """Whether a round is made below a token that B has chosen and not scored.

        Args:
            request: whose run it ends.
            depth: of the token below the root.
            entropy: nats, of the distribution that it was taken from.
        """
        return depth < self.settings.pending and entropy <= self.threshold(request).value

    def prepare(self, target: LanguageModel, prefixes: int = 0) -> None:
        """Prepare both, and the policy for B, which verifies what it shapes.

        Raises:
            ConfigError: B is no model.
        """
        if self.upper.model is None:
            raise ConfigError(
                f"drafter {self.name}: {self.stage_names[1]} is no model, whose passes a cascade could save: use "
                f"drafter {'+'.join(self.stage_names)}"
            )
        super().prepare(target, prefixes)
        self.policy.prepare(self.upper.model, self.lower.parts or (self.lower,))

    def open(self, request: Request) -> None:
        request.stats.figures.setdefault(STAGES, [StageStats(name) for name in self.stage_names])  # once it was paused
        super().open(request)

    def fit(self, request: Request, budget: Budget) -> Budget:
        """What B can draft within."""
        self.fits[request] = self.lower.fit(request, budget), self.upper.fit(request, budget)
        return self.fits[request][1]

    def forget(self) -> None:
        self._rounds = None
        super().forget()

    def scorer(self, requests: Sequence[Request], coupled: bool) -> Scorer:
        rounds = self._rounds = _Rounds(self, requests, coupled)
        return _TrieScorer(rounds.predict, rounds.tries, [(b, ROOT) for b in range(len(requests))])

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
        """Settle the trees on A and B, which know a node by its number in the trie."""
        if self._rounds is not None:
            pairs = zip(self._rounds.tries, grown, strict=True)
            ours = [Grown(g.tree, trie.nodes_of(g.tree)) for trie, g in pairs]
            super().settle(requests, ours)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from what the target has verified, and count whose tokens it accepted."""
        if (rounds := self._rounds) is not None:
            for b, (outcome, trie) in enumerate(zip(outcomes, rounds.tries, strict=True)):
                nodes = trie.nodes_of(outcome.tree)
                self.threshold(outcome.request).learn(outcome)
                lower, upper = outcome.request.stats.figures[STAGES]
                accepted = outcome.path[: outcome.taken]
                upper.proposed += len(nodes)
                upper.accepted += len(accepted)
                proposed = sum(nodes[n] in rounds.proposed[b] for n in accepted)
                lower.emitted += proposed
                upper.emitted += len(accepted) - proposed
        self._rounds = None
        super().observe(outcomes)


def join(stages: Sequence[StageSpec], sources: Sequence[DraftSource], proposals: GrowthPolicy | None) -> CascadeSource:
    """Join the sources of two stages; ``proposals`` shapes those of a first stage without settings."""
    (below, last), (lower, upper) = stages, sources
    policy, loop_back = read_stages(below, last)
    if proposals is not None and not below.settings:
        policy = proposals
    return CascadeSource(lower, upper, policy, loop_back, (below.name, last.name))
