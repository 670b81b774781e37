"""The rounds of a hierarchy: the lower source proposes, the upper one answers for all of it in one pass.

A scorer that is asked about a node which the upper source has answered for already repeats the answer. Else a round
begins there, if the pending run is to be drafted further; if not, nothing follows that node, and so the run ends.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...config import Budget
from ...errors import ConfigError
from ...outcome import Outcome, StepCost
from ...policies.base import Candidates
from ...request import Request
from ...tree import ROOT, DraftTree
from ..distributions import Drawing, Drawn
from ..grow import grow
from ..source import Asked, Scorer, Source, ask
from .state import NO_LAW, Known, answer, laws_of
from .stopping_rule import Place

if TYPE_CHECKING:
    from .stages import HierarchySource


class Proposal(NamedTuple):
    """What the lower source proposed below one node.

    Attributes:
        row: of the request.
        anchor: the node.
        tree: the proposal.
        nodes: numbers of the tree's nodes.
    """

    row: int
    anchor: int
    tree: DraftTree
    nodes: list[int]


class HierarchyScorer:
    """Scores nodes by rounds of two sources.

    Attributes:
        known: of each request, what has been said.
    """

    def __init__(self, source: HierarchySource, requests: Sequence[Request], drawing: Drawing, fresh: bool) -> None:
        """
        Args:
            source: the hierarchy.
            requests: of the proposal.
            drawing: how children come out of the laws.
            fresh: some of the requests are new: models read their prompts, so that seconds say nothing.
        """
        self._source, self._requests, self._drawing, self._fresh = source, requests, drawing, fresh
        self._lower, self._upper = (part.begin(requests, drawing) for part in (source.lower, source.upper))
        self.known = [Known() for _ in requests]
        self._names: list[dict[int, int]] = [{ROOT: ROOT} for _ in requests]  # asker's number -> ours
        self._bases: set[tuple[int, int]] = set()
        self._ways: list[set[int]] = [set() for _ in requests]
        """The asker's numbers of the nodes above the begin of the run: the level above has said them, and more."""

    def score_roots(self, rows: Sequence[int], width: int) -> Candidates:
        """See ``Scorer``."""
        return self.score_all([Asked(b, ROOT, ROOT, 0) for b in rows], width)

    def score(self, rows: Tensor, nodes: Tensor, parents: Tensor, tokens: Tensor, width: int) -> Candidates:
        """See ``Scorer``."""
        columns = zip(*(x.tolist() for x in (rows, nodes, parents, tokens)), strict=True)
        return self.score_all([Asked(*column) for column in columns], width)

    def score_all(self, asked: Sequence[Asked], width: int) -> Candidates:
        """See ``TreeScorer``."""
        places = []
        leading = set[tuple[int, int]]()
        for b, node, parent, token in asked:
            own = ROOT if node == ROOT else self.known[b].child(self._names[b][parent], token)
            self._names[b][node] = own
            if (b, node) in self._bases:
                self.known[b].restart(own)
            places.append((b, own))
            if node in self._ways[b]:
                leading.add((b, own))
        wanted: dict[int, list[int]] = defaultdict(list)
        for b, node in places:
            known = self.known[b]
            if node not in known.laws:
                if node == known.base or (b, node) in leading or self._goes_on(b, node, wanted[b]):
                    wanted[b].append(node)
                else:
                    known.laws[node] = NO_LAW
        if any(wanted.values()):
            self._round({b: nodes for b, nodes in sorted(wanted.items()) if nodes}, width)
        found = answer([self.known[b].laws[node] for b, node in places])
        free = [
            [self.known[b].find(node, token) in self.known[b].laws for token in tokens]
            for (b, node), tokens in zip(places, found.tokens.tolist(), strict=True)
        ]
        return replace(found, known=torch.tensor(free), origins=None)  # these are of the parts of the upper source

    def draw(self, counts: Tensor) -> Drawn:
        """Never asked for: schemes that need it refuse what ``learns``."""
        raise ConfigError("a hierarchy does not draw children: use verification match")

    def restart(self, row: int, line: Sequence[int]) -> None:
        """The level above has said a token: a new run begins below it (see ``Restarts``; the numbers are its own)."""
        if line[-1] in self._names[row]:
            self.known[row].restart(self._names[row][line[-1]])
        self._bases.add((row, line[-1]))
        self._ways[row] = {ROOT, *line[:-1]}

    def level_of(self, row: int, parent: int, token: int) -> int:
        """The level that was the first to say a token below a node that was asked about."""
        known, top = self.known[row], len(self._source.levels) - 1
        return known.level.get(known.find(self._names[row][parent], token), top)

    def _goes_on(self, b: int, node: int, wanted: Sequence[int]) -> bool:
        """Whether the run is drafted further below a node."""
        known, decider = self.known[b], self._source.decider
        if known.parent(node) in wanted:
            return True
        law = known.laws[known.parent(node)]
        if law is NO_LAW:
            return False
        place = Place(known.depth(node) - known.depth(known.base), law.entropy, known.edges(node))
        if decider.goes_on(self._requests[b], place):
            known.rounds.append(node)
            return True
        if decider.unsure(place):
            known.refused = min(known.refused, law.entropy)
        return False

    def _round(self, wanted: dict[int, list[int]], width: int) -> None:
        """Propose below the likeliest wanted node of each request, and ask the upper source about all of it."""
        source, clock = self._source, [time.perf_counter()]
        passes = source.lower.passes, source.upper.passes
        proposals = self._propose({b: self._best(b, nodes) for b, nodes in wanted.items()})
        clock.append(time.perf_counter())
        asked = [
            self.known[p.row].asked(p.row, node) for p in proposals for node in dict.fromkeys(wanted[p.row] + p.nodes)
        ]
        laws = laws_of(ask(source.upper, self._upper, asked, width))
        for (b, node, _, _), law in zip(asked, laws, strict=True):
            self.known[b].laws[node] = law
        clock.append(time.perf_counter())
        draft, verify = clock[1] - clock[0], clock[2] - clock[1]
        cost = StepCost(len(proposals), draft, verify, 0.0, source.lower.passes - passes[0])
        outcomes = [self._verdict(p, cost) for p in proposals]
        source.judged(proposals, outcomes, source.upper.passes - passes[1], verify)
        if not self._fresh:
            source.decider.took(draft + verify)

    def _best(self, b: int, wanted: Sequence[int]) -> int:
        """Of the wanted nodes that no other wanted one lies below, the likeliest."""
        known = self.known[b]
        above = {known.parent(node) for node in wanted if node != ROOT}
        ends = [node for node in wanted if node not in above]
        return ends[0] if len(ends) == 1 else max(ends, key=lambda node: math.prod(known.edges(node)))

    def _propose(self, anchors: dict[int, int]) -> list[Proposal]:
        """What the lower source proposes below a node of each request."""
        source, rows = self._source, list(anchors)
        requests = [self._requests[b] for b in rows]
        budgets = source.policy.plan(requests, [self._budget(b, node) for b, node in anchors.items()])
        if (enabled := source.policy.enabled) is not None:
            source.lower.enable(enabled)
        scorer = BelowScorer(source.lower, self._lower, [(b, self.known[b], node) for b, node in anchors.items()])
        trees = [grown.tree for grown in grow(scorer, source.policy, budgets, self._drawing)]
        proposals = []
        for (b, anchor), tree in zip(anchors.items(), trees, strict=True):
            nodes: list[int] = []
            for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
                above = anchor if parent == ROOT else nodes[parent]
                nodes.append(self.known[b].child(above, token))
                self.known[b].level.setdefault(nodes[-1], self._said_by(b, above, token))
            proposals.append(Proposal(b, anchor, tree, nodes))
        return proposals

    def _said_by(self, b: int, parent: int, token: int) -> int:
        return self._lower.level_of(b, parent, token) if isinstance(self._lower, HierarchyScorer) else 0

    def _budget(self, b: int, anchor: int) -> Budget:
        """What the upper source can be asked about below a node: nothing below the deepest level, and no leaf of it."""
        room, lower = self._source.room(self._requests[b])
        depth, most = self.known[b].depth(anchor), room.nodes if room.depth is None else min(room.nodes, room.depth)
        if lower.depth is not None:
            most = min(most, lower.depth + 1)
        return Budget(min(room.nodes, lower.nodes), max(0, most - 1 - depth))

    def _verdict(self, proposal: Proposal, cost: StepCost) -> Outcome:
        """What the upper source makes of a proposal: it follows its own most probable tokens while they are there."""
        b, node, tree, nodes = proposal
        known, at = self.known[b], ROOT
        path: list[int] = []
        tokens: list[int] = []
        while True:
            tokens.append(known.laws[node].best)
            below = [child for child in tree.children(at) if int(tree.tokens[child]) == tokens[-1]]
            if not below:
                return Outcome(self._requests[b], tree, path, tokens, len(tokens), cost)
            at = below[0]
            node = nodes[at]
            path.append(at)


@runtime_checkable
class Restarts(Protocol):
    """A scorer that wants to know where the level above has said a token itself: a hierarchy's."""

    def restart(self, row: int, line: Sequence[int]) -> None:
        """``line``: the nodes from the root, left out, down to that token's."""


class BelowScorer:
    """Scores the nodes of trees below nodes.

    Args:
        source: the lower source.
        scorer: its scorer of the whole proposal.
        anchors: for each tree the row of its request, what is known of that, and the node that the tree is below.
    """

    def __init__(self, source: Source, scorer: Scorer, anchors: Sequence[tuple[int, Known, int]]) -> None:
        self._source, self._scorer, self._anchors = source, scorer, anchors
        self._names: dict[tuple[int, int], int] = {}  # tree and its node -> number in the whole proposal

    def score_roots(self, rows: Sequence[int], width: int) -> Candidates:
        """Tell it of the tokens on the way to the anchors that it has not been asked about."""
        asked, ends = [], []
        for tree in rows:
            b, known, anchor = self._anchors[tree]
            told = known.ways if self._source.rereads else known.told.keys()
            self._names[tree, ROOT] = anchor
            if anchor != ROOT and isinstance(self._scorer, Restarts):
                self._scorer.restart(b, known.line(anchor))
            new = [node for node in (ROOT, *known.line(anchor)) if node not in told]
            asked += [(known, known.asked(b, node)) for node in new]
            known.ways.update(new)
            ends.append((known, anchor))
        return self._said(asked, ends, width)

    def score(self, rows: Tensor, nodes: Tensor, parents: Tensor, tokens: Tensor, width: int) -> Candidates:
        """See ``Scorer``."""
        asked, ends = [], []
        for tree, node, parent, token in torch.stack([rows, nodes, parents, tokens], 1).tolist():
            b, known, _ = self._anchors[tree]
            above = self._names[tree, parent]
            own = self._names[tree, node] = known.child(above, token)
            if own not in known.told:
                asked.append((known, Asked(b, own, above, token)))
            ends.append((known, own))
        return self._said(asked, ends, width)

    def _said(self, asked: Sequence[tuple[Known, Asked]], ends: Sequence[tuple[Known, int]], width: int) -> Candidates:
        """Ask what has not been asked; what follows the ends."""
        if asked:
            laws = laws_of(ask(self._source, self._scorer, [node for _, node in asked], width))
            for (known, (_, node, _, _)), law in zip(asked, laws, strict=True):
                known.told[node] = law
        return answer([known.told[node] for known, node in ends])

    def draw(self, counts: Tensor) -> Drawn:
        """Never asked for: schemes that need it refuse what ``learns``."""
        raise ConfigError("a hierarchy does not draw children: use verification match")
