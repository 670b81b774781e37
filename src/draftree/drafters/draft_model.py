"""Draft models: any ``LanguageModel`` of the target's token ids, and EAGLE heads, which read its hidden states.

A draft model's KV cache is kept: accepted nodes that it has seen are committed, never fed again. What it has not seen
(the leaf that ended a fully accepted path, and the target's bonus token) is fed as a short chain when the next proposal
starts.

A head (Li et al., *EAGLE*) drafts with its own predictions of hidden states. Its cache keeps no prediction: accepted
tokens are fed with the target's hidden states when the next tree begins.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ..config import Budget
from ..errors import CacheError, CacheFullError
from ..models.base import LanguageModel, Nodes, Row
from ..models.prefixes import PrefixCache, shared_prefixes
from ..models.protocols import DraftHead
from ..policies.base import Candidates, DraftDistribution
from ..request import Outcome, Request
from ..sampling.warping import log_sum_exp, stream_key, warp
from ..scores import NO_EDIT, Draft, Edit, Scores, Top
from ..tree import ROOT
from .base import DraftSource, Grown, NodeStates, Scorer, UnscoredNode

log = logging.getLogger("draftree.drafters")


@dataclass(slots=True)
class State:
    """One request inside the draft model.

    Attributes:
        row: its row in the model; ``row.length`` tokens of the request are committed there.
        numbers: node -> its number among the row's uncommitted nodes; ROOT where it is the last committed token.
        kept: uncommitted nodes, the first ones, that outlive a proposal: those of beams.
    """

    row: Row
    numbers: dict[int, int] = field(default_factory=dict)
    kept: int = 0


@dataclass
class RowSource(DraftSource):
    """Predicts by a model that reads each request in a row of its own.

    Attributes:
        model: the draft model or the head; it scores no request that has outgrown its context.
        vocab_size: the target's; logits beyond it (padding of the output layer) are cut off.
    """

    model: LanguageModel = field()
    vocab_size: int

    def __post_init__(self) -> None:
        self.name, self._prefixes = self.model.capabilities.name, PrefixCache(self.model, 0)
        self._states: dict[Request, State] = {}
        self._outgrown = False  # some text was longer than its context
        self._speed = 1.0  # tokens that it reads while the target reads one, about

    def prepare(self, target: LanguageModel, prefixes: int = 0) -> None:
        self._speed = max(1.0, target.capabilities.weights / max(1, self.model.capabilities.weights))

    def read(self, request: Request, most: int) -> bool:
        """Read the next tokens of its text, unless the last pass of all is small enough.

        They are as many as it reads in the time in which the target reads ``most``.
        """
        if len(request.ids) >= self.model.capabilities.max_length:
            return True
        most, row = int(most * self._speed), self.opened(request).row
        if len(request.ids) - 1 - row.length <= most or (self.model.most_read and not row.length):
            return True  # where it reads the end of a text alone, no portion before that is read
        self._read_on(request, row, most)
        return False

    @abstractmethod
    def _read_on(self, request: Request, row: Row, count: int) -> None:
        """Commit so many further tokens of its text."""

    def fit(self, request: Request, budget: Budget) -> Budget:
        """The part that lies within the model's context; the request's statistics, and once the log, name its end."""
        most = self.model.capabilities.max_length
        room = max(0, most - len(request.ids))
        if not room:
            request.stats.out_of_context[self.name] = most
            if not self._outgrown:
                log.warning(
                    "drafter %s takes %d tokens, and a text has grown beyond: nothing is drafted by it from there on; "
                    "give a drafter with a longer context",
                    self.name,
                    most,
                )
            self._outgrown = True
        return Budget(budget.nodes, room if budget.depth is None else min(room, budget.depth))

    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        """A pass of its model, which reads its own last token for those of the target that it lacks: padding."""
        size = self.model.capabilities.vocab_size
        if size < self.vocab_size:
            nodes = [replace(new, tokens=[min(token, size - 1) for token in new.tokens]) for new in nodes]
        return self.model.extend(rows, nodes)

    def open(self, request: Request) -> None:
        """Take what is kept of its text, so that ``unread`` does not count it."""
        with suppress(CacheFullError):  # a proposal that finds no room makes some
            if self._prefixes.has(request.ids):
                self.opened(request)

    def opened(self, request: Request) -> State:
        """The state of a request that may be new; what is kept of others makes room for its text."""
        if request not in self._states:
            lengths = [*map(self._planned, (*self._states, request))]
            self._prefixes.make_room(lengths, [request.ids])
            self.model.reserve(1, lengths[-1])
            self._states[request] = State(self._prefixes.find(request.ids))
        return self._states[request]

    def _planned(self, request: Request) -> int:
        """Tokens that a row gets memory for when it is opened."""
        tokens = max(len(request.ids), request.prompt_length + (request.params.max_tokens or 0))
        return min(tokens, self.model.capabilities.max_length)

    def unread(self, request: Request) -> list[tuple[LanguageModel, int]]:
        """All but what it has committed, and one: the last token is fed as the root, or a head reads no first one."""
        state = self._states.get(request)
        if len(request.ids) >= self.model.capabilities.max_length:
            return []  # it never will
        count = len(request.ids) - 1 - (state.row.length if state else 0)
        return [(self.model, min(count, self.model.most_read or count))]

    def give_up(self, requests: Sequence[Request]) -> None:
        self._prefixes.clear()

    def close(self, request: Request) -> None:
        if request in self._states:
            row = self._states.pop(request).row
            self._prefixes.keep(request.ids, row)


class ModelSource(RowSource):
    """Predicts by a language model, below the last token of a request or below beams.

    A request with beams goes on with several paths below its last token. The target has read that token and some nodes
    below it; these have the numbers that they have in the target's row. Nodes that the model has not read are scored
    once more, those above them first.
    """

    def prepare(self, target: LanguageModel, prefixes: int = 0) -> None:
        """Keep so many rows, together with other sources of the model; share the target's threads."""
        super().prepare(target, prefixes)
        self.model.share_threads(target)
        self._prefixes = shared_prefixes(self.model, prefixes)

    def _read_on(self, request: Request, row: Row, count: int) -> None:
        self._drop([request])
        self.extend([row], [Nodes.chain(request.ids[row.length : row.length + count], 0)])
        self.model.commit(row, range(count))

    def scorer(self, requests: Sequence[Request], coupled: bool) -> Scorer:
        """Drop what a failed step may have left behind; a new request's prompt is fed when its root is scored."""
        self._drop(requests)
        return ModelScorer(self, requests, coupled)

    def give_up(self, requests: Sequence[Request]) -> None:
        self._drop(requests)
        super().give_up(requests)

    def _drop(self, requests: Iterable[Request]) -> None:
        """Whatever is not committed, nor kept for beams."""
        for state in filter(None, map(self._states.get, requests)):
            if state.kept:
                self.model.prune(state.row, range(state.kept), 0)
            else:
                self.model.commit(state.row, [])
            state.numbers = {node: number for node, number in state.numbers.items() if number < state.kept}

    def has_read(self, request: Request, node: int) -> bool:
        """It holds this node, or the root, so that nodes below can be scored."""
        return request in self._states and node in self._states[request].numbers

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
        """Follow the trees' pruning."""
        for request, (_, numbers) in zip(requests, grown, strict=True):
            if state := self._states.get(request):
                old, grown_as = state.numbers, enumerate([ROOT, *numbers], start=ROOT)
                state.numbers = {new: old[node] for new, node in grown_as if node in old}

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Commit what was fed and accepted: tokens that were waiting, then nodes until one that was never fed."""
        for outcome in outcomes:
            state = self._states.get(outcome.request)
            if state is None:
                continue
            waiting = state.numbers.get(ROOT, -1) + 1
            path = [state.numbers[n] for n in outcome.path if n in state.numbers]
            self.model.commit(state.row, [*range(waiting), *path])
            state.numbers.clear()

    def prune(self, request: Request, keep: Sequence[int], trunk: int) -> None:
        """Keep these nodes and drop all others, as ``LanguageModel.prune``; the first ``trunk`` are in ``request.ids``.

        The last of these is the root from now on, and the i-th of the others is node i.
        """
        if (state := self._states.get(request)) is None:
            return
        old, waiting = state.numbers, state.numbers.get(ROOT, ROOT) + 1
        committed = [old[node] for node in keep[:trunk] if node in old]
        running = sorted((old[node], new) for new, node in enumerate(keep[trunk:]) if node in old)
        kept = [*range(waiting), *committed, *(number for number, _ in running)]
        self.model.prune(state.row, kept, waiting + len(committed))
        state.numbers = {new: number for number, (_, new) in enumerate(running)}
        if (keep[trunk - 1] if trunk else ROOT) in old:
            state.numbers[ROOT] = ROOT
        state.kept = len(running)


class ModelScorer(Scorer):
    """Scores nodes of the trees under construction by model passes over them."""

    def __init__(self, source: RowSource, requests: Sequence[Request], coupled: bool) -> None:
        self._source, self._requests, self._coupled = source, requests, coupled
        self._depths: dict[tuple[int, int], int] = {}
        self._states = NodeStates(requests)
        self._scored: tuple[Scores, Sequence[UnscoredNode], list[Edit] | None] | None = None
        """Scores of the last pass, its nodes, and their edits."""

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        """Feed nodes, and the waiting tokens of requests whose roots are among them, in one pass."""
        fed: dict[int, tuple[list[int], list[int]]] = {}
        rows, scored, opened, depths = list[Row](), list[int](), self._source.opened, self._depths
        for b, node, parent, token in nodes:
            state = opened(self._requests[b])
            if b not in fed:
                fed[b] = [], []
                rows.append(state.row)
                scored.append(0)
            tokens, parents = fed[b]
            start = len(state.row.parents)
            if node == ROOT:
                tokens += self._requests[b].ids[state.row.length :]
                parents += range(ROOT, len(tokens) - 1)
            else:
                tokens.append(token)
                parents.append(state.numbers[parent])
            state.numbers[node] = start + len(tokens) - 1
            depths[b, node] = 0 if node == ROOT else depths.get((b, parent), 0) + 1
            scored[-1] += 1
        new = [Nodes(*columns, wanted) for columns, wanted in zip(fed.values(), scored, strict=True)]
        scores = self._source.extend(rows, new)
        self._source.own_passes += 1
        return self._candidates(scores, nodes, width)

    def _candidates(self, scores: Scores, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        """What follows nodes, which come in the order of their requests, by the scores of a pass over them."""
        slots, edits = range(len(nodes)), self._edits(nodes)
        requests = [self._requests[b] for b, *_ in nodes]
        draft = None
        if any([request.params.temperature for request in requests]):
            pairs = zip(requests, nodes, strict=True)
            keys = [stream_key(r.seed, len(r.ids) + self._depths[n.request, n.node]) for r, n in pairs]
            warpings = [request.params.warping for request in requests]
            draft = Draft(warpings, keys if self._coupled else None)
        self._scored = scores, nodes, edits
        return candidates_of_top(scores.top(slots, min(width, self._source.vocab_size), edits, draft))

    def distributions(self, nodes: Sequence[tuple[int, int]]) -> Sequence[DraftDistribution]:
        """Those after nodes of the last pass, warped as their requests'."""
        if self._scored is None:
            raise CacheError("distributions are read from a pass: score the nodes first")
        scores, scored, edits = self._scored
        slot_of = {(b, node): slot for slot, (b, node, *_) in enumerate(scored)}
        slots = [*map(slot_of.__getitem__, nodes)]
        head = self._source.model if isinstance(self._source.model, DraftHead) else None
        distributions, rows = list[DraftDistribution](), scores.logits(slots, edits and [edits[slot] for slot in slots])
        for logits, (b, _) in zip(rows, nodes, strict=True):
            request = self._requests[b]
            ids = None if head is None else head.vocabulary_of(self._source.opened(request).row)
            logits = logits[: self._source.vocab_size if ids is None else len(ids)]
            logits = warp(logits, request.params.warping) if request.params.temperature else logits
            distributions.append(DraftDistribution(logits - np.float32(log_sum_exp(logits)), ids))
        return distributions

    def _edits(self, nodes: Sequence[UnscoredNode]) -> list[Edit] | None:
        """What the requests' constraints and the target's vocabulary rule out."""
        states, vocab = self._states.of(nodes), self._source.vocab_size
        if (size := self._source.model.capabilities.vocab_size) <= vocab and not any(states):
            return None
        every, edits = _mask(vocab, -(-size // 32)), list[Edit]()
        for state in states:
            if state is None or (mask := state.mask) is None:
                edits.append(Edit(mask=every) if size > vocab else NO_EDIT)
                continue
            mask_within = every.copy()
            mask_within[: len(mask)] &= mask[: len(every)]
            edits.append(Edit(mask=mask_within if mask_within.any() else every))
        return edits


def candidates_of_top(top: Top) -> list[Candidates]:
    """Candidates of nodes by scores of a pass."""
    candidates = list[Candidates]()
    for tokens, logprobs, entropy in zip(
        top.tokens.tolist(), top.logprobs.tolist(), top.entropies.tolist(), strict=True
    ):
        count = len(logprobs) if logprobs[-1] > -math.inf else sum([x > -math.inf for x in logprobs])
        candidates.append(Candidates(tokens[:count], logprobs[:count], entropy))
    return candidates


@cache
def _mask(tokens: int, words: int) -> NDArray[np.uint32]:
    """[words] the mask of an ``Edit`` that allows the first so many tokens."""
    allowed = np.zeros(32 * words, np.bool_)
    allowed[:tokens] = True
    return np.packbits(allowed, bitorder="little").view(np.uint32)


@dataclass
class EagleSource(RowSource):
    """Predicts by an EAGLE head. Its rows hold a request's tokens but the first, which has no hidden state before it.

    It keeps no drafted node. Of ended requests it keeps rows where a part of one can be forked; elsewhere a head reads
    again what it has read of a text.

    Attributes:
        model: the head; the target tracks hidden states.
    """

    model: DraftHead = field()

    def prepare(self, target: LanguageModel, prefixes: int = 0) -> None:
        """Keep so many rows, together with other sources of the head."""
        super().prepare(target, prefixes)
        if self.model.grows_by_row:
            self._prefixes = shared_prefixes(self.model, prefixes, before=1)

    def _read_on(self, request: Request, row: Row, count: int) -> None:
        first = row.length + 1
        self.model.read([row], [request.ids[first : first + count]], [self.row_of(request)])

    def row_of(self, request: Request) -> Row:
        """The target's."""
        if request.row is None:
            raise CacheError("a draft head reads the target's hidden states: give it a request with an open row")
        return request.row

    def scorer(self, requests: Sequence[Request], coupled: bool) -> Scorer:
        """A request's new tokens are fed when its root is scored."""
        return _EagleScorer(self, requests, coupled)


class _EagleScorer(ModelScorer):
    """Scores nodes by passes over them; roots by a pass over the tokens that the target has committed since."""

    _source: EagleSource

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        """Feed nodes in as few passes as it takes: a node that follows a predicted hidden state comes after it."""
        waves: dict[tuple[int, int], int] = {}
        for b, node, parent, _ in nodes:
            waves[b, node] = 0 if node == ROOT else waves.get((b, parent), 0) + 1
        candidates: dict[int, Candidates] = {}
        order = sorted(set(waves.values()))
        for wave in order:
            score = super().score if wave else self._score_roots
            if len(order) == 1:
                return score(nodes, width)
            members = [i for i, n in enumerate(nodes) if waves[n.request, n.node] == wave]
            scored = score([nodes[i] for i in members], width)
            candidates |= zip(members, scored, strict=True)
        return [candidates[i] for i in range(len(nodes))]

    def _score_roots(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        """Feed each request's new tokens with the target's hidden states; the last of them is the root."""
        source, rows, texts, targets = self._source, list[Row](), list[list[int]](), list[Row]()
        for b, *_ in nodes:
            request = self._requests[b]
            state = source.opened(request)
            state.numbers = {ROOT: ROOT}
            rows.append(state.row)
            texts.append(request.ids[state.row.length + 1 :])
            targets.append(source.row_of(request))
            self._depths[b, ROOT] = 0
        scores = source.model.read(rows, texts, targets)
        source.own_passes += 1
        return self._candidates(scores, nodes, width)
