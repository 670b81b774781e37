"""One step for the requests that run together: draft, verify in one target pass, commit, append.

    open_row -> [ draft -> extend -> verify -> commit -> append ] * -> close

Joins drafting and verification, which know nothing of each other. A request whose prompt is not read yet takes part
with the next tokens of it in place of a tree; when the last of them is read, its first token is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ..config import MAX_NODES, Budget
from ..drafters.base import Drafter
from ..errors import ConfigError, RunError, call_named, check_tokens
from ..models.base import LanguageModel, Nodes, Row
from ..models.prefixes import WORTHWHILE, PrefixCache, common_prefix
from ..request import DrafterStats, Logprobs, Outcome, Request, StepCost
from ..sampling.draws import Draws
from ..scores import Scores
from ..tree import ROOT, DraftTree
from ..verify.base import Scheme, Verdict
from .speculation import EngineRequest, Observer

_RESERVED = 256
"""Most drafted nodes of a request that cache is reserved for."""
_SCORED = 64
"""Most tokens of a prompt that a step reads where their log-probabilities are wanted: it computes all their logits."""


@dataclass(slots=True, eq=False)
class _Part:
    """What one request adds to the step's pass.

    Attributes:
        head: tokens that its row has not: of a prompt as many as are read now, else the last token alone.
        decodes: its prompt has been read.
        ends: the head ends with the request's last token: the next one is drawn.
        scored: how many log-probabilities are wanted beside those of the prompt that it reads; None: not even those.
        tree: drafted below the last token of the head, its root.
        first: slot of node 0 of the tree; node n has slot first + n, ROOT included.
        verdict: on the tree; empty where the head does not end with the request's last token.
        logprobs: of its tokens, where they were asked for.
        taken: tokens that the request took of the verdict.
    """

    request: EngineRequest
    row: Row
    head: list[int]
    decodes: bool
    ends: bool
    scored: int | None = None
    tree: DraftTree = DraftTree.empty()
    first: int = 0
    verdict: Verdict = Verdict([], [])
    logprobs: list[Logprobs] = field(default_factory=list)
    taken: int = 0


class Stepper:
    """Makes steps of requests; their output is the target's own, token for token, unless it was asked otherwise.

    Args:
        observers: are notified in this order.
        prefixes: most rows of closed requests that are kept, for prompts that begin as they do.

    Attributes:
        requests: those that hold something, in the order in which they came.
    """

    def __init__(self, target: LanguageModel, observers: Sequence[Observer] = (), prefixes: int = 0) -> None:
        self.prefixes = PrefixCache(target, prefixes)
        self._target, self._observers = target, tuple(observers)
        self.requests: dict[EngineRequest, None] = {}
        self._leaders: dict[EngineRequest, tuple[EngineRequest, int]] = {}
        """Request that waits -> the one that reads the beginning of both texts, and how many tokens that has."""

    def open_row(self, request: EngineRequest) -> None:
        """Give a request its row in the target, with what is kept of its prompt; steps read the rest."""
        self._target.reserve(1, self.row_length(request))
        scored = request.params.prompt_logprobs is not None
        # a row without trees is not forked where the texts part, behind which the other one has read on
        alone = scored or bool(self._target.capabilities.no_trees)
        readers = [] if alone else [other for other in self.requests if not other.decodes]
        shared = [common_prefix(other.ids, request.ids[:-1]) for other in readers]
        if (longest := max(shared, default=0)) >= WORTHWHILE:
            self._leaders[request] = readers[shared.index(longest)], longest
        request.row = self._target.open() if scored or longest >= WORTHWHILE else self._found(request)
        request.stats.reused = request.row.length
        self.requests[request] = None

    def _found(self, request: EngineRequest) -> Row:
        """A row with what rows hold of a text: those that are kept, and those of other requests."""
        live = [(other.ids, other.row) for other in self.requests if other.row is not None and other is not request]
        return self.prefixes.find(request.ids, live)

    def _waits(self, request: EngineRequest, requests: Sequence[EngineRequest]) -> bool:
        """Another request of the step reads what both texts begin with; when it has, this one goes on from there."""
        if request not in self._leaders:
            return False
        leader, length = self._leaders[request]
        if leader in requests and leader.row is not None and leader.row.length < length:
            return True
        del self._leaders[request]
        if request.row is not None and not request.row.length:
            self._target.close(request.row)
            request.row = self._found(request)
            request.stats.reused = request.row.length
        return False

    def step(
        self, requests: Sequence[EngineRequest], prompt_tokens: int | None = None, nodes: int | None = None
    ) -> list[Outcome]:
        """Draft, verify and commit once for each of these requests, together.

        Args:
            requests: begun, each once.
            prompt_tokens: most tokens of prompts that are read (``_shares``); None: all.
            nodes: most tokens that are drafted, shared out evenly; None: as many as the requests' budgets have.

        Returns:
            an outcome for each request whose prompt had been read before.

        Raises:
            ConfigError: a request is closed or finished, or there twice.
            RunError: a step of one failed after its commit.
        """
        began = time.perf_counter()
        if len(set(requests)) < len(requests):
            raise ConfigError("a request is in this step twice: step each once")
        if self._leaders:
            requests = [request for request in requests if not self._waits(request, requests)]
        parts = _parts(requests, prompt_tokens)
        if not parts:
            return []
        rows, nodes_of = list[Row](), list[Nodes]()
        for part in parts:
            if len(part.row.parents):  # a failed step has left them behind
                self._target.commit(part.row, [])
        groups = _draft(parts, prompt_tokens, nodes, self._target.capabilities.vocab_size)
        drafted = time.perf_counter()
        for part in parts:
            rows.append(part.row)
            drawn = 1 + len(part.tree.tokens) if part.ends else 0
            nodes_of.append(Nodes.below(part.head, part.tree, drawn if part.scored is None else None))
        scores = self._target.extend(rows, nodes_of)
        opened = _read(parts, scores)
        _verify(parts, scores)
        verified = time.perf_counter()
        for part in parts:
            below = len(part.head)
            self._target.commit(part.row, [*range(below), *map(below.__add__, part.verdict.path)])
            if not part.ends:
                continue
            before = len(part.request.ids)
            try:
                part.request.append(part.verdict.tokens, len(part.verdict.path), part.logprobs)
            except Exception as error:  # noqa: BLE001 - a stopping criterion raises what it likes; it ends no other
                part.request.fail(error)
            part.taken = len(part.request.ids) - before
        verify, other = verified - drafted, time.perf_counter() - verified
        outcomes: dict[Request, Outcome] = {}
        for drafter, own in groups:
            cost = StepCost(len(parts), drafter.seconds, verify, other, drafter.passes, drafter.part_seconds)
            became = list[Outcome]()
            for part in own:
                request, found = part.request, part.verdict
                outcomes[request] = Outcome(request, part.tree, found.path, found.tokens, part.taken, cost)
                became.append(outcomes[request])
            self._observe(drafter, own, became)
        for part in parts:
            if not part.decodes:
                part.request.stats.seconds.prefill += time.perf_counter() - began
        for part in opened:
            part.request.stats.tokens = part.taken
            for observer in (*self._observers, *part.request.observers):
                observer.opened(part.request)
        return [*filter(None, map(outcomes.get, requests))]

    def _observe(self, drafter: Drafter, parts: Sequence[_Part], outcomes: Sequence[Outcome]) -> None:
        call_named(f"drafter {drafter.name}: observe", drafter.observe, outcomes)
        for outcome in outcomes:
            count(outcome, drafter)
        for observer in self._observers:
            observer.stepped(outcomes)
        for part, outcome in zip(parts, outcomes, strict=True):
            for observer in part.request.observers:
                observer.stepped([outcome])

    def close(self, request: EngineRequest) -> None:
        """Free what a request holds in the models; its tokens and figures stay readable. Twice is harmless.

        All observers are notified, even where one of them fails.
        """
        if (row := request.row) is not None:
            self._leaders.pop(request, None)
            with ExitStack() as closing:  # from the last to the first
                closing.callback(setattr, request, "row", None)  # last: it is done when its observers know
                closing.callback(self.requests.pop, request, None)
                for observer in reversed((*self._observers, *request.observers)):
                    closing.callback(observer.closed, request)
                drafter = request.speculation.drafter
                closing.callback(call_named, f"drafter {drafter.name}: close", drafter.close, request)
                self.prefixes.keep(request.ids, row)

    def row_length(self, request: EngineRequest, *, most: bool = False) -> int:
        """Tokens of a row to reserve for a request, or the most that it may come to need.

        Of a large node budget only a part: most trees stay far below it, and the cache grows for one that does not.
        """
        tokens = request.limit if most else request.params.max_tokens or 0
        return request.prompt_length + tokens + 1 + min(request.speculation.nodes, _RESERVED)


def _parts(requests: Sequence[EngineRequest], prompt_tokens: int | None) -> list[_Part]:
    """What each request feeds, in the order of their rows."""
    parts, counts, reading = list[_Part](), list[int](), list[int]()
    for at, request in enumerate(requests):
        if request.row is None or request.finish_reason is not None:
            raise ConfigError("a closed or finished request cannot go on: open its prompt again")
        unread = len(request.ids) - request.row.length
        if unread != 1 if request.decodes else unread < 1:
            raise RunError("a step of this request failed half-way: open its prompt again")
        if not request.decodes:
            reading.append(at)
            unread = unread if request.params.prompt_logprobs is None else min(unread, _SCORED)
        counts.append(unread)
    if prompt_tokens is not None and reading:
        for at, count in zip(reading, _shares([counts[at] for at in reading], prompt_tokens), strict=True):
            counts[at] = count
    for request, unread in zip(requests, counts, strict=True):
        row, decodes = request.row, request.decodes
        if unread and row is not None:
            head = request.ids[row.length : row.length + unread]
            ends = row.length + unread == len(request.ids)
            scored = None if decodes else request.params.prompt_logprobs
            parts.append(_Part(request, row, head, decodes, ends, scored))
    return sorted(parts, key=lambda part: part.row.number) if len(parts) > 1 else parts


def _shares(unread: Sequence[int], most: int) -> list[int]:
    """How much is read of each prompt: half of ``most`` is for the first, and short ones do not wait for long ones."""
    shares = [0] * len(unread)
    shares[0] = min(unread[0], -(-most // 2))
    left = most - shares[0]
    for at in sorted(range(len(unread)), key=unread.__getitem__):
        more = min(unread[at] - shares[at], left)
        shares[at], left = shares[at] + more, left - more
    return shares


def _draft(
    parts: Sequence[_Part], reading: int | None, nodes: int | None, vocab: int
) -> list[tuple[Drafter, list[_Part]]]:
    """Draft for the requests that decode, by one drafter after the other; what each of them drafts for."""
    groups: dict[int, tuple[Drafter, list[_Part]]] = {}
    for part in parts:
        if part.decodes:
            drafter = part.request.speculation.drafter
            groups.setdefault(id(drafter), (drafter, []))[1].append(part)
    share = MAX_NODES
    if nodes is not None:
        share = nodes // max(1, sum([len(own) for drafter, own in groups.values() if drafter.policy is not None]))
    for drafter, own in groups.values():
        if drafter.policy is not None:
            other_tokens = sum([len(part.head) + len(part.tree.tokens) for part in parts if part not in own])
            # a path of depth d gains d + 1 tokens: no node is deeper than the tokens left, less the bonus token
            requests, budgets = list[EngineRequest](), list[Budget]()
            for part in own:
                requests.append(part.request)
                most = min(part.request.speculation.nodes, share)
                budgets.append(Budget(most, part.request.tokens_left - 1))
            scheme = requests[0].speculation.scheme
            name = f"drafter {drafter.name}"
            given = scheme.coupled, other_tokens, reading, scheme.sampler
            trees = call_named(name, drafter.propose, requests, budgets, *given)
            for part, tree in zip(own, trees, strict=True):
                if (tokens := tree.tokens.tolist()) and not 0 <= min(tokens) <= max(tokens) < vocab:
                    check_tokens(name, tokens, vocab)
                part.tree = tree
    return list(groups.values())


def _read(parts: Sequence[_Part], scores: Scores) -> list[_Part]:
    """Take the pass's scores; returns the parts whose prompts are read to their end now."""
    opened = list[_Part]()
    for part, start in zip(parts, scores.starts, strict=False):
        part.first = start - ROOT
        if part.scored is not None:  # slots of the whole head come before those of the tree
            at, ids, part.first = part.row.length, part.request.ids, start + len(part.head)
            tokens = ids[at + 1 : at + 1 + len(part.head)]
            slots = range(start, start + len(tokens))
            part.request.prompt_logprobs[at:] = Logprobs.of(scores, slots, tokens, part.scored)
        if part.ends and not part.decodes:
            drafter = part.request.speculation.drafter
            call_named(f"drafter {drafter.name}: open", drafter.open, part.request)
            opened.append(part)
    return opened


def _verify(parts: Sequence[_Part], scores: Scores) -> None:
    """Find the verdicts, by one scheme after the other, and log-probabilities of their tokens where they are wanted."""
    groups: dict[Scheme, list[_Part]] = {}
    for part in parts:
        if part.ends:
            groups.setdefault(part.request.speculation.scheme, []).append(part)
    for scheme, own in groups.items():
        firsts, trees, draws = list[int](), list[DraftTree](), list[Draws]()
        for part in own:
            firsts.append(part.first)
            trees.append(part.tree)
            draws.append(part.request.draws)
        for part, verdict in zip(own, scheme.verify(scores, firsts, trees, draws), strict=True):
            part.verdict = verdict
            if (best := part.request.params.logprobs) is not None:
                slots = [part.first + node for node in (ROOT, *verdict.path)]
                part.logprobs = Logprobs.of(scores, slots, verdict.tokens, best)


def count(outcome: Outcome, drafter: Drafter) -> None:
    """Add a step to the statistics of its request."""
    stats, cost, tree = outcome.request.stats, outcome.step, outcome.tree
    stats.steps += 1
    stats.tokens += outcome.taken
    stats.draft_passes += cost.draft_passes
    stats.seconds.draft += cost.draft
    stats.seconds.verify += cost.verify
    stats.seconds.other += cost.other
    if not len(tree.tokens):
        stats.expected += 1.0
        return
    accepted = outcome.path[: outcome.taken]
    stats.expected += tree.expected_acceptance_length
    count_depths(stats.drafted, tree.depths.tolist())
    count_depths(stats.accepted, range(1, len(accepted) + 1))
    total = stats.drafters.setdefault(drafter.parts[tree.part], DrafterStats())
    total.drafted += len(tree.tokens)
    total.accepted += len(accepted)
    entropies = tree.entropies.tolist()
    stats.accepted_entropies += map(entropies.__getitem__, accepted)
    if outcome.taken == len(outcome.tokens) and (entropy := outcome.rejected_entropy) is not None:
        stats.rejected_entropies.append(entropy)


def count_depths(counts: list[int], depths: Sequence[int]) -> None:
    """Count nodes by their depths, which ascend from 1 on, in ``Stats.drafted`` or ``accepted``."""
    if depths:
        counts += [0] * (depths[-1] - len(counts))
    for depth in depths:
        counts[depth - 1] += 1
