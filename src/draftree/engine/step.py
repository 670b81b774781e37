"""One step for the requests that run together: draft, verify in one target pass, commit, append.

    open_row -> [ draft -> extend -> verify -> commit -> append ] * -> close

Between two steps ``pause`` frees a request's row; ``open_row`` gives it another one, and its text is read again.

Joins drafting and verification, which know nothing of each other. A request whose prompt is not read yet takes part
with the next tokens of it in place of a tree; when the last of them is read, its first token is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from operator import attrgetter
from typing import Concatenate, ParamSpec, TypeVar

from ..config import MAX_NODES, Budget
from ..drafters.base import Drafter
from ..errors import ConfigError, RunError, call_named, check_tokens
from ..models.base import LanguageModel, Nodes, Row
from ..models.prefixes import WORTHWHILE, PrefixCache, common_prefix
from ..request import DrafterStats, Logprobs, Outcome, StepCost
from ..scores import Scores
from ..tree import ROOT, DraftTree
from ..verify.base import Scheme, Verdict
from .speculation import EngineRequest, Observer

_SCORED = 64
"""Most tokens of a prompt that a step reads where their log-probabilities are wanted: it computes all their logits."""

_NO_TREE, _NO_VERDICT = DraftTree.empty(), Verdict([], [])
_Groups = list[tuple[Drafter, list[EngineRequest]]]
_Trees = dict[EngineRequest, DraftTree]
_Verdicts = dict[EngineRequest, Verdict]
_TokenLogprobs = dict[EngineRequest, list[Logprobs]]
_Calls = list[Callable[[], object]]


@dataclass(frozen=True, slots=True, eq=False)
class _Feed:
    """What one request feeds to a step's pass, above its tree.

    Attributes:
        tokens: of a prompt as many as are read now, else the request's last token alone.
        decodes: its prompt was read before.
        ends: with the request's last token: the next one is drawn.
        scored: how many log-probabilities are wanted beside that of each token of the prompt; None: not even those.
    """

    request: EngineRequest
    row: Row
    tokens: list[int]
    decodes: bool
    ends: bool
    scored: int | None


P = ParamSpec("P")
T = TypeVar("T")


def _measured(phase: Callable[Concatenate[Stepper, P], T]) -> Callable[Concatenate[Stepper, P], T]:
    """A phase of a step whose wall-clock seconds the stepper keeps, by the method's name, until the next step."""

    @wraps(phase)
    def run(self: Stepper, /, *args: P.args, **kwargs: P.kwargs) -> T:
        began = time.perf_counter()
        result = phase(self, *args, **kwargs)
        self.seconds[phase.__name__] = time.perf_counter() - began
        return result

    return run


class Stepper:
    """Makes steps of requests; their output is the target's own, token for token, unless it was asked otherwise.

    Args:
        observers: are notified in this order.
        prefixes: most rows of closed requests that are kept, for prompts that begin as they do.

    Attributes:
        requests: those that were begun and are not closed, in the order in which they came.
        seconds: what the measured phases of the last step took.
        read: tokens of prompts that the last step read.
    """

    def __init__(self, target: LanguageModel, observers: Sequence[Observer] = (), prefixes: int = 0) -> None:
        self.prefixes = PrefixCache(target, prefixes)
        self._target, self._observers = target, tuple(observers)
        self.requests: dict[EngineRequest, None] = {}
        self.seconds: dict[str, float] = {}
        self.read = 0
        self._leaders: dict[EngineRequest, tuple[EngineRequest, int]] = {}
        """Request that waits -> the one that reads the beginning of both texts, and how many tokens that has."""

    def open_row(self, request: EngineRequest) -> None:
        """Give a request its row in the target, with what is kept of its prompt; steps read the rest."""
        scored = request.scored is not None
        # a row without trees is not forked where the texts part, behind which its request has read on
        alone = scored or bool(self._target.capabilities.no_trees)
        readers = [] if alone else [reader for reader in self.requests if reader.row and not reader.decodes]
        shared = [common_prefix(reader.ids, request.ids[:-1]) for reader in readers]
        if (longest := max(shared, default=0)) >= WORTHWHILE:
            self._leaders[request] = readers[shared.index(longest)], longest
        if scored or longest >= WORTHWHILE:
            request.row = self._target.open()
        else:
            self._reuse(request)
        self.requests[request] = None

    def _reuse(self, request: EngineRequest) -> None:
        """Give it a row with what rows hold of its text: those that are kept, and those of other requests."""
        live = [(r.ids, r.row) for r in self.requests if r.row is not None and r is not request]
        request.row = self.prefixes.find(request.ids, live)
        if not request.stats.seconds.prefill:  # else it has read of its text before a pause: the row may be its own
            request.stats.reused = request.row.length

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
            self._reuse(request)
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
        feeds = self._feeds(requests, prompt_tokens)
        if not feeds:
            return []
        groups, trees = self._draft(feeds, prompt_tokens, nodes)
        verdicts, logprobs = self._verify(feeds, trees)
        taken = self._commit(feeds, verdicts, logprobs)
        outcomes = self._notify(feeds, groups, trees, verdicts, taken)
        return [*filter(None, map(outcomes.get, requests))]

    def _feeds(self, requests: Sequence[EngineRequest], prompt_tokens: int | None) -> list[_Feed]:
        """What each request feeds, in the order of their rows."""
        if len(set(requests)) < len(requests):
            raise ConfigError("a request is in this step twice: step each once")
        if self._leaders:
            requests = [request for request in requests if not self._waits(request, requests)]
        feeds, reading, unread_tokens = list[_Feed](), list[tuple[EngineRequest, Row]](), list[int]()
        for request in requests:
            if (row := request.row) is None or request.finish_reason is not None:
                raise ConfigError("a closed or finished request cannot go on: open its prompt again")
            unread = len(request.ids) - row.length
            if unread < 1 or (request.decodes and unread > 1):
                raise RunError("a step of this request failed half-way: open its prompt again")
            if row.parents:  # a failed step has left them behind
                self._target.commit(row, [])
            if request.decodes:
                feeds.append(_Feed(request, row, request.ids[-1:], True, True, None))
            else:
                reading.append((request, row))
                unread_tokens.append(unread if request.scored is None else min(unread, _SCORED))
        self.read = 0
        if prompt_tokens is not None and reading:
            unread_tokens = _shares(unread_tokens, prompt_tokens)
        for (request, row), count in zip(reading, unread_tokens, strict=True):
            if count:
                self.read += count
                end = row.length + count
                tokens, ends = request.ids[row.length : end], end == len(request.ids)
                feeds.append(_Feed(request, row, tokens, False, ends, request.scored))
        return sorted(feeds, key=attrgetter("row.number"))

    def _draft(self, feeds: Sequence[_Feed], reading: int | None, nodes: int | None) -> tuple[_Groups, _Trees]:
        """Draft for the requests that decode: which drafter is whose, and the tree of each request of the step."""
        vocab = self._target.capabilities.vocab_size
        groups, trees = dict[int, tuple[Drafter, list[EngineRequest]]](), _Trees()
        for feed in feeds:
            trees[feed.request] = _NO_TREE
            if feed.decodes:
                drafter = feed.request.speculation.drafter
                groups.setdefault(id(drafter), (drafter, []))[1].append(feed.request)
        share = MAX_NODES
        if nodes is not None:
            drafting = [len(requests) for drafter, requests in groups.values() if drafter.policy is not None]
            share = nodes // max(1, sum(drafting))
        drafted = 0
        for drafter, requests in groups.values():
            if drafter.policy is None:
                continue
            # a path of depth d gains d + 1 tokens: no node is deeper than the tokens left, less the bonus token
            budgets = list[Budget]()
            for request in requests:
                budgets.append(Budget(min(request.speculation.nodes, share), request.tokens_left - 1))
            other_tokens = sum(map(len, map(attrgetter("tokens"), feeds))) - len(requests) + drafted
            scheme, name = requests[0].speculation.scheme, f"drafter {drafter.name}"
            given = scheme.coupled, other_tokens, reading, scheme.sampler
            proposed = call_named(name, drafter.propose, requests, budgets, *given)
            for request, tree in zip(requests, proposed, strict=True):
                if (tokens := tree.tokens) and not 0 <= min(tokens) <= max(tokens) < vocab:
                    check_tokens(name, tokens, vocab)
                trees[request] = tree
                drafted += len(tokens)
        return [*groups.values()], trees

    @_measured
    def _verify(self, feeds: Sequence[_Feed], trees: _Trees) -> tuple[_Verdicts, _TokenLogprobs]:
        """Score tokens and trees in one pass of the target, and verify trees by one scheme after the other.

        Returns:
            verdicts on the requests whose next token is drawn, and log-probabilities of their tokens where wanted.
        """
        rows, nodes = list[Row](), list[Nodes]()
        for feed in feeds:
            tree = trees[feed.request]
            drawn = 1 + len(tree.tokens) if feed.ends else 0
            rows.append(feed.row)
            nodes.append(Nodes.below(feed.tokens, tree, drawn if feed.scored is None else None))
        scores = self._target.extend(rows, nodes)
        groups = list[tuple[Scheme, dict[EngineRequest, int]]]()  # slots of trees' nodes 0
        for feed, start in zip(feeds, scores.starts, strict=False):
            if not feed.decodes:
                _read(feed, scores, start)
            if feed.ends:
                first = start + (1 if feed.scored is None else len(feed.tokens))
                scheme = feed.request.speculation.scheme
                for known, firsts in groups:
                    if known is scheme:
                        firsts[feed.request] = first
                        break
                else:
                    groups.append((scheme, {feed.request: first}))
        verdicts, logprobs = _Verdicts(), _TokenLogprobs()
        for scheme, firsts in groups:
            columns = [*firsts.values()], [*map(trees.__getitem__, firsts)], [*map(attrgetter("draws"), firsts)]
            verdicts.update(zip(firsts, scheme.verify(scores, *columns), strict=True))
            for request, first in firsts.items():
                if (best := request.params.logprobs) is not None:
                    verdict = verdicts[request]
                    slots = [first + node for node in (ROOT, *verdict.path)]
                    logprobs[request] = Logprobs.of(scores, slots, verdict.tokens, best)
        return verdicts, logprobs

    @_measured
    def _commit(
        self, feeds: Sequence[_Feed], verdicts: _Verdicts, logprobs: _TokenLogprobs
    ) -> dict[EngineRequest, int]:
        """Keep accepted paths in the cache and append their tokens to the requests; how many each of them took."""
        taken = dict[EngineRequest, int]()
        for feed in feeds:
            request, above = feed.request, len(feed.tokens)
            verdict = verdicts.get(request, _NO_VERDICT)
            self._target.commit(feed.row, [*range(above), *map(above.__add__, verdict.path)])
            if feed.ends:
                before = len(request.ids)
                try:
                    request.append(verdict.tokens, len(verdict.path), logprobs.get(request, ()))
                except Exception as error:  # noqa: BLE001 - a stopping criterion raises what it likes; it ends no other
                    request.fail(error)
                taken[request] = len(request.ids) - before
        return taken

    def _notify(
        self,
        feeds: Sequence[_Feed],
        groups: _Groups,
        trees: _Trees,
        verdicts: _Verdicts,
        taken: dict[EngineRequest, int],
    ) -> dict[EngineRequest, Outcome]:
        """Let drafters, statistics and observers know whose prompts are read, and what became of the trees.

        All are notified, even where one of them fails: the others' requests go on.
        """
        calls, errors = _Calls(), list[Exception]()
        draft, verify, other = 0.0, self.seconds["_verify"], self.seconds["_commit"]
        all_outcomes = dict[EngineRequest, Outcome]()
        for drafter, requests in groups:
            draft += drafter.seconds
            parts = drafter.part_seconds, drafter.part_passes
            cost = StepCost(len(feeds), drafter.seconds, verify, other, drafter.passes, *parts)
            outcomes = list[Outcome]()
            for request in requests:
                path, tokens = verdicts[request].path, verdicts[request].tokens
                outcomes.append(Outcome(request, trees[request], path, tokens, taken[request], cost))
            calls.append(partial(call_named, f"drafter {drafter.name}: observe", drafter.observe, outcomes))
            for outcome in outcomes:
                calls.append(partial(count, outcome, drafter))
            for observer in self._observers:
                calls.append(partial(observer.stepped, outcomes))
            for request, outcome in zip(requests, outcomes, strict=True):
                all_outcomes[request] = outcome
                for observer in request.observers:
                    calls.append(partial(observer.stepped, [outcome]))
        if self.read:
            calls = [*self._begun(feeds, verdicts, taken, draft + verify + other), *calls]
        for call in calls:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - the first one is raised
                errors.append(error)
        if errors:
            raise errors[0]
        return all_outcomes

    def _begun(
        self, feeds: Sequence[_Feed], verdicts: _Verdicts, taken: dict[EngineRequest, int], seconds: float
    ) -> Iterator[Callable[[], object]]:
        """Count the step for the requests whose prompts it read; the calls that notify observers of prompts' ends."""
        cost = StepCost(len(feeds), 0.0, 0.0, 0.0, 0)
        for feed in feeds:
            if not feed.decodes:
                feed.request.stats.seconds.prefill += seconds
                if feed.ends:
                    request, new = feed.request, taken[feed.request]
                    observers = (*self._observers, *request.observers)
                    if len(request.output_ids) > new:  # it was paused: the step is one without drafts
                        outcome = Outcome(request, _NO_TREE, [], verdicts[request].tokens, new, cost)
                        yield partial(count, outcome, request.speculation.drafter)
                        yield from [partial(observer.stepped, [outcome]) for observer in observers]
                    elif new:
                        request.stats.tokens = new
                        yield from [partial(observer.opened, request) for observer in observers]

    def pause(self, request: EngineRequest) -> None:
        """Free what a request holds in the models until ``open_row`` is called again."""
        try:
            self._free(request)
        finally:
            request.row, request.decodes = None, False

    def close(self, request: EngineRequest) -> None:
        """Free what a request holds in the models; its tokens and figures stay readable. Twice is harmless.

        All observers are notified, even where one of them fails.
        """
        if request in self.requests:
            with ExitStack() as closing:  # from the last to the first
                closing.callback(self.requests.pop, request)  # last: it is done when its observers know
                closing.callback(setattr, request, "row", None)
                for observer in reversed((*self._observers, *request.observers)):
                    closing.callback(observer.closed, request)
                self._free(request)

    def _free(self, request: EngineRequest) -> None:
        self._leaders.pop(request, None)
        if (row := request.row) is not None:
            drafter = request.speculation.drafter
            try:
                self.prefixes.keep(request.ids, row)
            finally:
                call_named(f"drafter {drafter.name}: close", drafter.close, request)


def _shares(unread: Sequence[int], most: int) -> list[int]:
    """How much is read of each prompt: half of ``most`` is for the first, and short ones do not wait for long ones."""
    shares = [0] * len(unread)
    shares[0] = min(unread[0], -(-most // 2))
    left = most - shares[0]
    for at in sorted(range(len(unread)), key=unread.__getitem__):
        more = min(unread[at] - shares[at], left)
        shares[at], left = shares[at] + more, left - more
    return shares


def _read(feed: _Feed, scores: Scores, start: int) -> None:
    """Keep the log-probabilities of a prompt's tokens, which begin at a slot; open the drafter at the prompt's end."""
    request, length = feed.request, feed.row.length
    if feed.scored is not None:
        tokens = request.ids[length + 1 : length + 1 + len(feed.tokens)]
        slots = range(start, start + len(tokens))
        request.prompt_logprobs[length:] = Logprobs.of(scores, slots, tokens, feed.scored)
    if feed.ends:
        drafter = request.speculation.drafter
        call_named(f"drafter {drafter.name}: open", drafter.open, request)


def count(outcome: Outcome, drafter: Drafter) -> None:
    """Add a step to the statistics of its request."""
    stats, cost, tree = outcome.request.stats, outcome.step, outcome.tree
    stats.steps += 1
    stats.tokens += outcome.taken
    stats.draft_passes += cost.draft_passes
    stats.seconds.draft += cost.draft
    stats.seconds.verify += cost.verify
    stats.seconds.other += cost.other
    if not tree.tokens:
        stats.expected += 1.0
        return
    accepted = outcome.path[: outcome.taken]
    stats.expected += tree.expected_acceptance_length
    count_depths(stats.drafted, tree.depths)
    count_depths(stats.accepted, range(1, len(accepted) + 1))
    total = stats.drafters.setdefault(drafter.parts[tree.part], DrafterStats())
    total.drafted += len(tree.tokens)
    total.accepted += len(accepted)
    stats.accepted_entropies += map(tree.entropies.__getitem__, accepted)
    if outcome.taken == len(outcome.tokens) and (entropy := outcome.rejected_entropy) is not None:
        stats.rejected_entropies.append(entropy)


def count_depths(counts: list[int], depths: Sequence[int]) -> None:
    """Count nodes by their depths, which ascend from 1 on, in ``Stats.drafted`` or ``accepted``."""
    if depths:
        counts += [0] * (depths[-1] - len(counts))
    for depth in depths:
        counts[depth - 1] += 1
