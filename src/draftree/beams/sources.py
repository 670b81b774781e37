"""What says which tokens may follow a node of a request's tree: the seam, and what all kinds with passes share.

A source keeps a tree of its own beside the target's, of what it has been fed; after each step it follows the running
beams. It shapes nothing (``drafting.py``). The kinds are in ``drafters.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..drafters.ngram import NgramIndex
from ..errors import CacheError
from ..models.base import ForestModel, Nodes, Row
from ..models.cost_profile import Profile, kept_or_measured
from ..models.eagle_model import HeadModel
from .beam_distributions import Chance, fitted
from .forest import BeamRequest, Node, TreeRow, feed


@dataclass(frozen=True, slots=True)
class Frontier:
    """Nodes of one request that a source is asked about.

    Attributes:
        request: theirs.
        nodes: at least one.
        counts: how often each was drawn.
        depth: drafted layers above what follows them in this step.
        left: layers that will be drafted below what follows them in this step.
        chance: draws what follows them; None: the most probable is chosen.
    """

    request: BeamRequest
    nodes: Sequence[Node]
    counts: Sequence[int]
    depth: int
    left: int
    chance: Chance | None = None


class BeamSource(ABC):
    """Says what may follow.

    Attributes:
        name: what people call it.
        gives_laws: it gives every token of the vocabulary a probability, so that beams can be drawn from it.
        hope: how often it may have drafted a beam of a layer, as long as nothing is known.
    """

    gives_laws: ClassVar[bool] = True
    hope: float = 0.7

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def passes(self) -> int:
        """Model passes so far, prefills not counted."""
        return 0

    def width(self, beams: int) -> int:
        """Drafted beams W_S that so many beams are best drafted with, at least as many and at most twice."""
        return 2 * beams

    def prepare(self) -> None:  # noqa: B027
        """Find out what its passes cost."""

    def seconds(self, nodes: float, context: int) -> float:
        """Of drafting a layer below so many nodes behind so many tokens."""
        return 0.0

    def reading(self, tokens: int) -> float:
        """Seconds of reading a prompt of so many tokens."""
        return 0.0

    @abstractmethod
    def open(self, request: BeamRequest) -> None:
        """A request begins; the target has read its prompt."""

    def room(self, request: BeamRequest) -> int:
        """Most layers that it can draft below the running beams."""
        return request.limit

    @abstractmethod
    def logits(self, asked: Sequence[Frontier]) -> list[Tensor]:
        """For each request [n, V] logits of the tokens after its n nodes."""

    def node(self, request: BeamRequest, parent: Node, token: int) -> Node:
        """The node below ``parent``; one that it knows already, if it does."""
        return Node(token, parent, parent.length + 1)

    def leave(self, requests: Sequence[BeamRequest]) -> None:  # noqa: B027
        """The step's drafts are made, or could not be: the target goes on."""

    def settle(self, request: BeamRequest) -> None:  # noqa: B027
        """A step is over: ``request.running`` go on."""

    @abstractmethod
    def close(self, request: BeamRequest) -> None:
        """A request has ended; twice is harmless."""


class PassBeams(BeamSource):
    """What makes passes of a model that keeps the beams in a cache of its own, as the target does.

    Attributes:
        model: the model.
    """

    model: ForestModel

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._trees: dict[BeamRequest, TreeRow] = {}
        self._passes = 0
        self._profile: Profile | None = None

    @property
    def passes(self) -> int:
        """See ``BeamSource``."""
        return self._passes

    def prepare(self) -> None:
        """See ``BeamSource``; kept from an earlier start, or measured now (seconds, once)."""
        self._profile = self._profile or kept_or_measured(self.model)

    def seconds(self, nodes: float, context: int) -> float:
        """See ``BeamSource``."""
        return 0.0 if self._profile is None else self._profile.seconds(nodes, context)

    def reading(self, tokens: int) -> float:
        """See ``BeamSource``."""
        return self.seconds(tokens, tokens)

    def tree(self, request: BeamRequest) -> TreeRow:
        """What its model has read of a request."""
        return self._trees[request]

    def lacks(self, request: BeamRequest, nodes: Sequence[Node]) -> bool:
        """It has not read all of these nodes."""
        return bool(self.tree(request).unfed(nodes))

    def read(self, requests: Sequence[BeamRequest], nodes: Sequence[Sequence[Node]]) -> None:
        """One pass over what it has not read of these nodes and those above them, if there is anything."""
        trees = [self.tree(request) for request in requests]
        fresh = [tree.unfed(own) for tree, own in zip(trees, nodes, strict=True)]
        self._passes += feed(trees, fresh, self._extend)

    @abstractmethod
    def _extend(self, rows: Sequence[Row], new: Sequence[Nodes], nodes: Sequence[Sequence[Node]]) -> Tensor:
        """[B, n, V] logits after new nodes of rows."""

    def close(self, request: BeamRequest) -> None:
        """Forget its row."""
        if request in self._trees:
            self.model.close(self._trees.pop(request).row)


_NEAR, _MODEL = 0.97, 0.9
"""What is hoped of a model whose laws are nearly the target's, and of another one: enough to find out."""


class ModelBeams(PassBeams):
    """A drafting model.

    Args:
        model: drafts; its own cache holds the beams as the target's does.
        vocab: the target's V; padding of the output layer is cut off.
        name: what people call it.
        near: its laws are nearly the target's, as those of the target's weights in other numerics are.
    """

    def __init__(self, model: ForestModel, vocab: int, name: str | None = None, near: bool = False) -> None:
        super().__init__(name or model.capabilities.name)
        self.model = model
        self.hope = _NEAR if near else _MODEL
        self._near, self._vocab = near, vocab

    def width(self, beams: int) -> int:
        """More than the beams where its laws are not the target's: of each layer all of these must be drafted."""
        return beams if self._near else 2 * beams

    def open(self, request: BeamRequest) -> None:
        """Read the prompt, if it fits."""
        if len(request.ids) < self.model.capabilities.max_length:
            self.model.reserve(1, len(request.ids) + (request.params.max_tokens or 0))
            self._trees[request] = TreeRow(self.model.open(request.ids), request.root)

    def room(self, request: BeamRequest) -> int:
        """As its context allows."""
        left = self.model.capabilities.max_length - len(request.ids) - request.length
        return max(0, left) if request in self._trees else 0

    def logits(self, asked: Sequence[Frontier]) -> list[Tensor]:
        """See ``BeamSource``; one pass over what it has not read."""
        self.read([one.request for one in asked], [one.nodes for one in asked])
        return [
            fitted(torch.stack([self.tree(one.request).logits[node] for node in one.nodes]), self._vocab)
            for one in asked
        ]

    def _extend(self, rows: Sequence[Row], new: Sequence[Nodes], nodes: Sequence[Sequence[Node]]) -> Tensor:
        return self.model.extend(rows, new)

    def settle(self, request: BeamRequest) -> None:
        """Drop what no running beam goes through."""
        if request in self._trees:
            tree = self._trees[request]
            tree.keep(self.model, request.ends)
            tree.row.drop_features()


class GuestBeams(ModelBeams):
    """A model that drafts on the target's own rows (``HFModel.on_rows_of``): it reads no prompt and keeps nothing.

    Its nodes lie behind the target's while a step drafts, and are dropped before the target goes on.
    """

    def reading(self, tokens: int) -> float:
        """None."""
        return 0.0

    def open(self, request: BeamRequest) -> None:
        """The target has read the prompt."""

    def room(self, request: BeamRequest) -> int:
        """As its context allows."""
        return max(0, self.model.capabilities.max_length - len(request.ids) - request.length)

    def tree(self, request: BeamRequest) -> TreeRow:
        """The target's, with what has been drafted in this step."""
        if request.tree is None:
            raise CacheError("the request is closed: open its prompt again")
        if request not in self._trees:
            self._trees[request] = request.tree.beside()
        return self._trees[request]

    def leave(self, requests: Sequence[BeamRequest]) -> None:
        """Drop what was drafted."""
        for request in requests:
            drafted = self._trees.pop(request, None)
            if request.tree is not None and drafted is not None:
                self.model.prune(request.tree.row, range(len(request.tree.numbers)), 0)

    def settle(self, request: BeamRequest) -> None:
        """Nothing is left to drop."""

    def close(self, request: BeamRequest) -> None:
        """The row is the target's."""


class HeadBeams(PassBeams):
    """A draft head.

    A token behind one that the target has seen is fed with the target's hidden state; any other with the head's own
    guess, and again when the target has seen it.

    Args:
        model: the head; its target tracks hidden states.
        name: what people call it.
    """

    def __init__(self, model: HeadModel, name: str) -> None:
        super().__init__(name)
        self.model: HeadModel = model
        self._guessed: set[Node] = set()  # fed after a token that the target had not seen

    def open(self, request: BeamRequest) -> None:
        """Feed the prompt; its first token has no hidden state before it."""
        if request.tree is None:
            raise CacheError("a draft head reads the target's hidden states: open the target's row first")
        hidden = request.tree.row.waiting_features()
        request.root.hidden = hidden[-1]
        self.model.reserve(1, len(request.ids) + (request.params.max_tokens or 0))
        row = self.model.start()
        row.logits = self.model.advance([row], [torch.tensor(request.ids[1:])], [hidden[:-1]])[0]
        self._trees[request] = TreeRow(row, request.root)

    def logits(self, asked: Sequence[Frontier]) -> list[Tensor]:
        """See ``BeamSource``; one pass over what it has not read."""
        self.read([one.request for one in asked], [one.nodes for one in asked])
        return [self._dense(self._trees[one.request], one.nodes) for one in asked]

    def _extend(self, rows: Sequence[Row], new: Sequence[Nodes], nodes: Sequence[Sequence[Node]]) -> Tensor:
        features = []
        for row, asked, own in zip(rows, new, nodes, strict=True):
            predicted, numbers = self.model.own(row).predicted, asked.parents.tolist()
            known = [node.parent.hidden if node.parent else None for node in own]
            self._guessed |= {node for node, hidden in zip(own, known, strict=True) if hidden is None}
            features.append(
                torch.stack([predicted[n + 1] if h is None else h for n, h in zip(numbers, known, strict=True)])
            )
        return self.model.extend(rows, new, features)

    def _dense(self, tree: TreeRow, ends: Sequence[Node]) -> Tensor:
        """[n, V] logits, -inf outside the draft vocabulary."""
        tokens = self.model.own(tree.row).tokens
        dense = tree.row.logits.new_full((len(ends), self.model.capabilities.vocab_size), float("-inf"))
        for i, end in enumerate(ends):
            own = tree.logits[end][: len(tokens)]  # its vocabulary may have grown since
            dense[i, tokens[: len(own)]] = own
        return dense

    def settle(self, request: BeamRequest) -> None:
        """Forget guesses, and what no running beam goes through."""
        tree = self._trees[request]
        guessed = self._guessed & tree.numbers.keys()
        for node in guessed:
            del tree.numbers[node]
            tree.logits.pop(node, None)
        self._guessed -= guessed
        tree.keep(self.model, request.ends)

    def close(self, request: BeamRequest) -> None:
        """Forget its row."""
        if request in self._trees:
            self._guessed -= self._trees[request].numbers.keys()
        super().close(request)


class LookupBeams(BeamSource):
    """Lookup: what followed earlier occurrences in the prompt and in the tokens that all beams share. It knows few
    tokens, so beams can be searched with it but not drawn."""

    gives_laws = False

    def __init__(self, name: str = "lookup", shortest: int = 2, longest: int = 6) -> None:
        super().__init__(name)
        self._lengths = shortest, longest
        self._texts: dict[BeamRequest, tuple[NgramIndex, Node]] = {}

    def open(self, request: BeamRequest) -> None:
        """Index the prompt."""
        index = NgramIndex(*self._lengths)
        index.extend(request.ids)
        self._texts[request] = index, request.root

    def logits(self, asked: Sequence[Frontier]) -> list[Tensor]:
        """See ``BeamSource``."""
        found = []
        for request, ends in ((one.request, one.nodes) for one in asked):
            if request.tree is None:
                raise CacheError("the request is closed: open its prompt again")
            index, last = self._texts[request]
            laws = torch.full_like(request.tree.row.logits, float("-inf"), dtype=torch.float32).repeat(len(ends), 1)
            for i, end in enumerate(ends):
                tail = (*index.tail, *(node.token for node in end.path(last)))
                tokens, law, _ = index.predict(tail, len(index))
                laws[i, tokens] = torch.tensor(law).log().to(laws)
            found.append(laws)
        return found

    def settle(self, request: BeamRequest) -> None:
        """Index what all beams share now."""
        if request.tree is not None:
            index, last = self._texts[request]
            index.extend([node.token for node in request.tree.base.path(last)])
            self._texts[request] = index, request.tree.base

    def close(self, request: BeamRequest) -> None:
        """Forget its index."""
        self._texts.pop(request, None)
