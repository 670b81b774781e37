"""Growth of trees by one call of C for all requests of a step (``native/draft.c``), where a policy is a rule.

The trees are those of the loop in ``grow.py``. C scores nodes by the texts of the requests, and by draft models (of any
vocabulary) and heads of the native engine; a part that it does not know is asked once a layer for all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import Budget
from ..errors import CacheError, NotNativeError
from ..models.native.binding import open_library
from ..models.native.draft_binding import (
    BY_CALLER,
    BY_DRAFT_HEAD,
    BY_MODEL,
    BY_TEXT,
    BY_TRANSLATION,
    MOST_DEPTH,
    MOST_WIDTH,
    CWarping,
    Drafting,
    GrownTree,
    Node,
    Scored,
    TextIndex,
)
from ..models.native.native_head import NativeHead, NativeHeadRow
from ..models.native.native_model import NativeModel, NativeRows
from ..models.native.translations import Key
from ..models.translated import TranslatedModel
from ..policies.base import GrowthRule, PartRule, Plan, Trial
from ..request import Outcome, Request
from ..sampling.warping import GOLDEN, mix
from ..tree import DraftTree
from .base import NOTHING_GROWN, DraftSource, Grown, NodeStates, Scorer, UnscoredNode, fitted_depth, scored
from .draft_model import EagleSource, ModelSource
from .native_translation import NativeTranslation
from .ngram import LONGEST, NgramSource

_ANY = PartRule()


def _kind(part: DraftSource) -> tuple[int, NativeRows[Any] | None]:
    """What C scores a source's nodes by, and the model whose passes it makes; a subclass may score otherwise."""
    if type(part) is NgramSource:
        return BY_TEXT, None
    if type(part) is EagleSource and type(part.model) is NativeHead:
        return BY_DRAFT_HEAD, part.model
    if type(part) is ModelSource:
        model = part.model
        if type(model) is NativeModel:
            return BY_MODEL, model
        if type(model) is TranslatedModel and type(model.inner) is NativeModel:
            return BY_TRANSLATION, model.inner
    return BY_CALLER, None


class NativeGrowth:
    """What C needs of a drafter's source, and keeps of its requests.

    Args:
        source: predicts what may follow.
        name: what messages call it.

    Attributes:
        vocab_size: tokens of the target, once it is known.
        layers: that were sought in the last proposal.
        seconds: what each of the source's parts took of it; none where it is the only one.
    """

    def __init__(self, source: DraftSource, name: str) -> None:
        parts = source.parts or (source,)
        self._name = name
        self._order = sorted(range(len(parts)), key=lambda part: parts[part].model is not None)
        """Number of each part in the ensemble, in the order in which they are tried."""
        self._parts = [parts[number] for number in self._order]
        scored_by = [*map(_kind, self._parts)]
        self._kinds = [kind for kind, _ in scored_by]
        self._by_texts = set(self._kinds) == {BY_TEXT}
        self._drafting = Drafting(self._order, self._scored, self._states_of, self._find_meanings)
        self._models: list[tuple[int, ModelSource | EagleSource, NativeRows[Any], int]] = []
        """Where each model's part stands in that order, its source, the model, and its kind."""
        self._translations: dict[int, NativeTranslation] = {}
        """By number of the part."""
        parts_of_c = zip(self._drafting.parts, self._parts, scored_by, strict=True)
        for at, (c_part, part, (kind, model)) in enumerate(parts_of_c):
            c_part.kind = kind
            if isinstance(part, (ModelSource, EagleSource)) and model is not None:
                c_part.model = model.loaded.address
                self._models.append((at, part, model, kind))
            if isinstance(part, ModelSource) and kind == BY_TRANSLATION:
                translation = self._translations[self._order[at]] = NativeTranslation(part)
                c_part.translation = translation.pointer
        self._texts: dict[Request, list[TextIndex]] = {}
        self._placed: list[Request | None] = []
        """Whose constant numbers each entry of C's requests has."""
        self._scorers: dict[int, Scorer] = {}
        """Of parts that C does not know, by their numbers."""
        self._tokens = list[int]()
        """In that order: how many each part's model reads at most, about."""
        self._states = NodeStates(())
        self._requests: Sequence[Request] = ()
        self._grown: list[GrownTree] = []
        self.vocab_size, self.layers, self.seconds = MOST_DEPTH, 0, tuple[float, ...]()

    @classmethod
    def find(cls, source: DraftSource, name: str) -> NativeGrowth | None:
        """None: the native engine was not built."""
        try:
            open_library()
        except NotNativeError:
            return None
        return cls(source, name)

    def grow(
        self,
        requests: Sequence[Request],
        plan: Plan,
        rule: GrowthRule,
        coupled: bool,
        reading: int | None,
    ) -> list[DraftTree]:
        """A tree for each request, within its budget of a plan.

        Args:
            reading: see ``Drafter.propose``.
        """
        drafting, self._requests = self._drafting, requests
        drafting.make_room(len(requests))
        self._set_rule(rule, plan.enabled)
        drafting.coupled = coupled
        self._scorers.clear()
        self._tokens = [0] * len(self._parts)
        for translation in self._translations.values():
            translation.begin()
        left_out = [plan.left_out[number] for number in self._order] if plan.left_out else [()] * len(self._parts)
        for at, (request, budget) in enumerate(zip(requests, plan.budgets, strict=True)):
            self._set_request(at, request, budget, reading, left_out)
        for c_part, number, kind, part in zip(drafting.parts, self._order, self._kinds, self._parts, strict=True):
            if kind == BY_CALLER and c_part.enabled:
                self._scorers[number] = part.scorer(requests, coupled)
        if any(map(attrgetter("state"), requests)):
            self._states = NodeStates(requests)
        grown = self._grown = self._called(len(requests))
        self.layers = drafting.layers
        for number in self._scorers:
            settled = [Grown(each.tree, each.numbers) if each.tree.part == number else NOTHING_GROWN for each in grown]
            self._parts[self._order.index(number)].settle(requests, settled)
        return [each.tree for each in grown]

    def knows_nothing(self, requests: Sequence[Request]) -> bool:
        """Only texts draft, and what ends those of these requests has never stood in them before."""
        if not self._by_texts:
            return False
        for request in requests:
            if request.state is not None or any([text.known for text in self._read(request)]):
                return False
        return True

    def _set_rule(self, rule: GrowthRule, enabled: Sequence[bool] | None) -> None:
        c_rule = self._drafting.rule
        c_rule.width, c_rule.depth, c_rule.threshold, c_rule.rate, c_rule.tokens = (
            min(rule.width, MOST_WIDTH),
            min(rule.depth, MOST_DEPTH),
            rule.threshold,
            rule.rate,
            rule.tokens,
        )
        self._drafting.set_curves(rule.seconds, rule.below)
        for number, part in zip(self._order, self._drafting.parts, strict=True):
            part.enabled = enabled is None or enabled[number]
            part.outputs = self.vocab_size
            part.trust, part.onward, part.layer = rule.parts[number] if rule.parts else _ANY
        for at, source, _, _ in self._models:
            self._drafting.parts[at].outputs = source.vocab_size

    def _set_request(
        self, at: int, request: Request, budget: Budget, reading: int | None, left_out: Sequence[Sequence[Request]]
    ) -> None:
        c_request, sources = self._drafting.requests[at], self._drafting.sources[at]
        most = min(budget.nodes, MOST_DEPTH if budget.depth is None else budget.depth)
        texts, drafting, deepest = self._read(request), list[DraftSource](), 0
        indexes = iter(texts)
        parts = zip(self._parts, self._kinds, sources, self._drafting.parts, left_out, strict=True)
        for part, kind, source, rule, others in parts:
            drafts = rule.enabled and request not in others
            if kind == BY_TEXT:
                source.index, source.limit = next(indexes).index, most if drafts else 0
            else:
                source.limit = int(min(fitted_depth(part, request, budget), MOST_DEPTH)) if drafts else 0
                if source.limit:
                    drafting.append(part)
            deepest = max(deepest, source.limit)
        # all of them read, whatever the first ones have left
        if reading is not None and not all([*map(methodcaller("read", request, reading), drafting)]):
            deepest = 0
        c_request.nodes, c_request.depth = budget.nodes if deepest else 0, min(most, deepest)
        c_request.position, c_request.constrained = len(request.ids), request.state is not None
        if at >= len(self._placed) or self._placed[at] is not request:
            self._place(at, request)
        for at, part, _, kind in self._models:
            source = sources[at]
            if not c_request.nodes:
                source.limit = 0
            if not source.limit:
                continue
            if kind == BY_TRANSLATION:
                self._tokens[at] += self._translations[self._order[at]].read(request, source) + 2 * c_request.nodes
                continue
            row = part.opened(request).row
            source.row = row.number
            self._tokens[at] += len(request.ids) - row.length + c_request.nodes
            source.unread, source.unread_count = texts[0].address, texts[0].count
            if kind == BY_DRAFT_HEAD:
                if request.row is None:
                    raise CacheError("a draft head reads the target's hidden states: give it a request with a row")
                c_request.target_row = request.row.number

    def _read(self, request: Request) -> list[TextIndex]:
        """Texts of a request, all of it: one for each part that looks tokens up there, or one that is no index."""
        texts = self._texts.get(request)
        if texts is None:
            shortest = [part.shortest for part in self._parts if type(part) is NgramSource]
            texts = self._texts[request] = [*map(TextIndex, shortest or [0])]
            if request.prediction:
                for text in texts:
                    text.predict([*request.ids[: request.prompt_length][-LONGEST:], *request.prediction])
        if new := request.ids[texts[0].count :]:
            for text in texts:
                text.extend(new)
        return texts

    def _place(self, at: int, request: Request) -> None:
        """Fill in what does not change of a request."""
        c_request, params = self._drafting.requests[at], request.params
        self._placed += [None] * (at + 1 - len(self._placed))
        self._placed[at] = request
        c_request.noise = mix(request.seed + GOLDEN)
        c_request.warping = CWarping(*params.warping)

    def _called(self, count: int) -> list[GrownTree]:
        """Call C, whose models no other thread may use meanwhile."""
        drafting, call = self._drafting, partial(self._drafting.draft, count)
        for at, _, model, _ in self._models:
            if drafting.parts[at].enabled:
                call = partial(model.lend, call, self._tokens[at])
        try:
            grown = call()
        finally:
            if self._models:
                self._follow(BY_DRAFT_HEAD)
        for at, part, model, _ in self._models:
            part.own_passes += drafting.work[at].passes
            model.pass_seconds += 1e-9 * drafting.work[at].nanoseconds
        if len(self._parts) > 1:
            seconds = [0.0] * len(self._parts)
            for number, work in zip(self._order, drafting.work, strict=True):
                seconds[number] = 1e-9 * work.nanoseconds
            self.seconds = tuple(seconds)
        return grown

    def _follow(self, wanted: int) -> None:
        """Let the rows of models of this kind have the lengths that C has given them."""
        for at, part, model, kind in self._models:
            if kind != wanted or not self._drafting.parts[at].enabled:
                continue
            for request, sources in zip(self._requests, self._drafting.sources, strict=False):
                if sources[at].limit:
                    row = part.opened(request).row
                    row.length, row.parents = model.loaded.length(sources[at].row), []
                    if isinstance(row, NativeHeadRow):
                        row.last, row.drafted = request.ids[min(row.length, len(request.ids) - 1)], []

    def _follow_translated(self, outcomes: Sequence[Outcome]) -> None:
        """Count among the committed tokens of translated rows what C has committed."""
        for at, _, model, kind in self._models:
            if kind != BY_TRANSLATION or not self._drafting.parts[at].enabled:
                continue
            number, translation = self._order[at], self._translations[self._order[at]]
            for outcome, grown, sources in zip(outcomes, self._grown, self._drafting.sources, strict=False):
                if sources[at].limit:
                    path = outcome.path if grown.tree.part == number else []
                    translation.observe(outcome.request, grown, path, model.loaded.length(sources[at].row))

    def observe(self, outcomes: Sequence[Outcome]) -> list[Trial]:
        """Commit what was accepted; return what became of candidates."""
        paths, tokens = list[Sequence[int]](), list[Sequence[int]]()
        for outcome in outcomes:
            paths.append(outcome.path)
            tokens.append(outcome.tokens[: outcome.taken])
        try:
            trials = self._drafting.accept(paths, tokens)
        finally:  # what fails has committed some rows
            if self._models:
                self._follow(BY_MODEL)
                self._follow_translated(outcomes)
        for kind, part in zip(self._kinds, self._parts, strict=True):
            if kind == BY_CALLER:
                part.observe(outcomes)
        return trials

    def close(self, request: Request) -> None:
        """A request has ended."""
        self._texts.pop(request, None)
        if request in self._placed:
            self._placed[self._placed.index(request)] = None
        for translation in self._translations.values():
            translation.close(request)

    def _scored(self, part: int, nodes: list[Node], width: int) -> Sequence[Scored]:
        candidates = scored(self._name, self._scorers[part], [UnscoredNode(*node) for node in nodes], width)
        return [(each.tokens, each.logprobs, each.entropy) for each in candidates]

    def _find_meanings(self, part: int, keys: Sequence[Key]) -> None:
        self._translations[part].find(keys)

    def _states_of(self, nodes: list[Node]) -> tuple[Sequence[NDArray[np.uint32] | None], Sequence[int]]:
        states = self._states.of([UnscoredNode(*node) for node in nodes])
        forced = [None if state is None else state.forced for state in states]
        masks = [None if state is None else state.mask for state in states]
        return masks, [-1 if token is None else token for token in forced]
