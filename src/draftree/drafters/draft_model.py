"""A drafting model: any ``LanguageModel`` with the target's vocabulary.

Its KV cache is kept: accepted nodes that it has seen are committed, never fed again. What it has not seen (the leaf
that ended a fully accepted path, and the target's bonus token) is fed as a short chain when the next proposal starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import Budget
from ..errors import ConfigError, RunError
from ..models.base import LanguageModel, Nodes, Row
from ..models.huggingface import HFModel
from ..outcome import Outcome
from ..policies.base import Candidates
from ..request import Request
from ..tree import ROOT
from .distributions import Drawing, Drawn, Laws
from .source import Asked, Grown, Scorer, Source


@dataclass(slots=True)
class State:
    """One request inside the drafting model.

    Attributes:
        row: its row in the model; ``row.length`` tokens of the request are committed there.
        numbers: tree node -> number among the row's uncommitted nodes.
    """

    row: Row
    numbers: dict[int, int] = field(default_factory=dict)

    def rename(self, numbers: Tensor) -> None:
        """Follow the tree's pruning: its node i was node ``numbers[i]`` of the pool."""
        old, self.numbers = self.numbers, {}
        for new, number in enumerate([ROOT, *numbers.tolist()], start=ROOT):
            if number in old:
                self.numbers[new] = old[number]


@dataclass(slots=True)
class ModelSource(Source):
    """Asks a language model.

    Attributes:
        model: the drafting model; it says nothing of a request that has outgrown its context.
        near: see ``Source``: it is the target in other numerics.
        vocab_size: the target's; logits beyond it (padding of the output layer) are cut off.
    """

    at_once = True

    model: LanguageModel = field()
    vocab_size: int
    near: bool = field(default=False, kw_only=True)
    _passes: int = field(default=0, repr=False)
    _states: dict[Request, State] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The model's."""
        return self.model.capabilities.name

    @property
    def fingerprint(self) -> str:
        """The model's."""
        return self.model.capabilities.fingerprint

    @property
    def passes(self) -> int:
        """See ``Source``."""
        return self._passes

    def fit(self, request: Request, budget: Budget) -> Budget:
        """The part that lies within the model's context."""
        room = max(0, self.model.capabilities.max_length - len(request.ids))
        return Budget(budget.nodes, room if budget.depth is None else min(room, budget.depth))

    def unread(self, request: Request) -> list[tuple[LanguageModel, int]]:
        """All but what it has committed, and the last token, which it is asked about."""
        state = self._states.get(request)
        if len(request.ids) >= self.model.capabilities.max_length:
            return []  # it is not going to
        return [(self.model, len(request.ids) - 1 - (state.row.length if state else 0))]

    def opened(self, request: Request) -> State:
        """The state of a request that may be new: then its prompt is read."""
        if request not in self._states:
            self.model.reserve(1, request.prompt_length + (request.params.max_tokens or 0))
            self._states[request] = State(self.model.open(request.ids[:-1]))
        return self._states[request]

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        """Drop what a failed step may have left behind; a new request's prompt is fed when its root is asked for."""
        self._drop(requests)
        return ModelScorer(self, requests, drawing)

    def _drop(self, requests: Iterable[Request]) -> None:
        """Whatever is not committed."""
        for known in filter(None, map(self._states.get, requests)):
            self.model.commit(known.row, [])
            known.numbers.clear()

    def tokens(self, rows: Sequence[Row]) -> Sequence[Tensor] | None:
        """For each row [K] int64, the ids of its logits' entries; None: entry i is token i."""
        return None

    def has_read(self, request: Request, node: int) -> bool:
        """Its model has been asked about this node of the proposal."""
        return request in self._states and node in self._states[request].numbers

    def hidden(self, request: Request, node: int) -> Tensor:
        """[H] its model's hidden state at a node that it has read; the model tracks them."""
        state = self._states[request]
        return state.row.pending_feature(state.numbers[node])

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
        """Follow the trees' pruning."""
        for request, (_, numbers) in zip(requests, grown, strict=True):
            if state := self._states.get(request):
                state.rename(numbers)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Commit what was fed and accepted: tokens that were waiting, then nodes until one that was never fed."""
        for outcome in outcomes:
            state = self._states.get(outcome.request)
            if state is None:
                continue
            waiting = state.numbers.get(ROOT, -1) + 1
            path = [state.numbers[n] for n in outcome.path if n in state.numbers]
            self.model.commit(state.row, [*range(waiting), *path])
            state.row.drop_features()  # of committed tokens nobody asks for them
            state.numbers.clear()

    def close(self, request: Request) -> None:
        """Forget a request's row."""
        if request in self._states:
            self.model.close(self._states.pop(request).row)


class ModelScorer:
    """Scores nodes of the trees under construction by model passes over them."""

    def __init__(self, source: ModelSource, requests: Sequence[Request], drawing: Drawing) -> None:
        self._source = source
        self._requests = requests
        self._laws = Laws(drawing)
        self._asked: list[tuple[Request, int]] = []  # which nodes of which requests are asked about
        self._depths: dict[tuple[int, int], int] = {}

    def _state(self, row: int) -> State:
        return self._source._states[self._requests[row]]

    def score_roots(self, rows: Sequence[int], width: int) -> Candidates:
        """Feed each request's waiting tokens; the last of them is the root."""
        return self.score_all([Asked(b, ROOT, ROOT, 0) for b in rows], width)

    def score(self, rows: Tensor, nodes: Tensor, parents: Tensor, tokens: Tensor, width: int) -> Candidates:
        """See ``Scorer``."""
        columns = torch.stack([rows, nodes, parents, tokens], 1)
        return self.score_all([Asked(*node) for node in columns.tolist()], width)

    def score_all(self, asked: Sequence[Asked], width: int) -> Candidates:
        """Feed nodes, and the waiting tokens of requests whose roots are among them, in one pass."""
        fed: dict[int, tuple[list[int], list[int]]] = {}
        column = []
        for b, node, parent, token in asked:
            state = self._source.opened(self._requests[b]) if node == ROOT else self._state(b)
            tokens, parents = fed.setdefault(b, ([], []))
            start = state.row.parents.shape[0]
            if node == ROOT:
                tokens += self._requests[b].ids[state.row.length :]
                parents += range(ROOT, len(tokens) - 1)
            else:
                tokens.append(token)
                parents.append(state.numbers[parent])
            state.numbers[node] = start + len(tokens) - 1
            self._depths[b, node] = 0 if node == ROOT else self._depths[b, parent] + 1
            column.append(len(tokens) - 1)
        rows = {b: i for i, b in enumerate(fed)}
        nodes = [Nodes(torch.tensor(tokens), torch.tensor(parents)) for tokens, parents in fed.values()]
        self._asked = [(self._requests[b], node) for b, node, _, _ in asked]
        depths = [self._depths[b, node] for b, node, _, _ in asked]
        batch = torch.tensor([rows[b] for b, *_ in asked])
        own = [self._state(b).row for b in rows]
        logits = self._pass(own, nodes, asked)[..., : self._source.vocab_size]
        self._source._passes += 1
        named = self._source.tokens(own)
        return self._laws.candidates(self._asked, logits, batch, torch.tensor(column), width, named, depths=depths)

    def _pass(self, rows: Sequence[Row], nodes: Sequence[Nodes], asked: Sequence[Asked]) -> Tensor:
        """[B, n, V] logits after the nodes that are ``asked`` about, and after what waits before them."""
        return self._source.model.extend(rows, nodes)

    def draw(self, counts: Tensor) -> Drawn:
        """See ``Scorer``; one more transfer to the host."""
        return self._laws.draw(counts)


@dataclass(slots=True)
class GuestSource(ModelSource):
    """Asks a model that shares the target's rows; one such source at a time.

    Attributes:
        model: the drafting model (``HFModel.on_rows_of``).
        target: whose rows it is on.
    """

    model: HFModel
    target: HFModel = field(kw_only=True)

    @property
    def host(self) -> LanguageModel:
        """The target."""
        return self.target

    def prepare(self, target: LanguageModel) -> None:
        """Make sure that it is on this target's rows.

        Raises:
            ConfigError: it is on another's.
        """
        if target is not self.target:
            raise ConfigError(
                f"drafter {self.model.capabilities.name} was loaded for another target: load it for the one in use"
            )

    def unread(self, request: Request) -> list[tuple[LanguageModel, int]]:
        """Nothing, ever."""
        return [] if len(request.ids) >= self.model.capabilities.max_length else [(self.model, 0)]

    def opened(self, request: Request) -> State:
        """On the target's row."""
        if request.row is None:
            raise RunError("the request is closed: open its prompt again")
        return self._states.setdefault(request, State(request.row))

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
        """The target goes on: drop all nodes."""
        self._drop(requests)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """The target has committed what was accepted."""

    def close(self, request: Request) -> None:
        """The row is the target's."""
        self._states.pop(request, None)
