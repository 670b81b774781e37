"""What says which tokens may follow a node of a request's tree: a drafting model, a draft head, or lookup.

A source keeps a tree of its own beside the target's, of what it has been fed; after each step it follows the running
beams. It shapes nothing (``forest.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..draft.lookup import NgramIndex
from ..errors import CacheError
from ..models.base import ForestModel, Nodes, Row
from ..models.head_model import HeadModel
from .laws import fitted
from .nodes import Node, TreeRow, feed
from .request import Request


class BeamSource(ABC):
    """Says what may follow.

    Attributes:
        name: what people call it.
        gives_laws: it gives every token of the vocabulary a probability, so that beams can be drawn from it.
        passes: model passes so far, prefills not counted.
    """

    gives_laws: ClassVar[bool] = True
    passes: int = 0

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def open(self, request: Request) -> None:
        """A request begins; the target has read its prompt."""

    def room(self, request: Request) -> int:
        """Most layers that it can draft below the running beams."""
        return request.limit

    @abstractmethod
    def logits(self, requests: Sequence[Request], nodes: Sequence[Sequence[Node]]) -> list[Tensor]:
        """For each request [n, V] logits of the tokens after these nodes, at least one of a request."""

    def settle(self, request: Request) -> None:  # noqa: B027
        """A step is over: ``request.running`` go on."""

    @abstractmethod
    def close(self, request: Request) -> None:
        """A request has ended; twice is harmless."""


class ModelBeams(BeamSource):
    """A drafting model.

    Args:
        model: drafts; its own cache holds the beams as the target's does.
        vocab: the target's V; padding of the output layer is cut off.
        name: what people call it.
    """

    def __init__(self, model: ForestModel, vocab: int, name: str | None = None) -> None:
        super().__init__(name or model.capabilities.name)
        self.model = model
        self._vocab = vocab
        self._trees: dict[Request, TreeRow] = {}

    def open(self, request: Request) -> None:
        """Read the prompt, if it fits."""
        if len(request.ids) < self.model.capabilities.max_length:
            self.model.reserve(1, len(request.ids) + (request.params.max_tokens or 0))
            self._trees[request] = TreeRow(self.model.open(request.ids), request.root)

    def room(self, request: Request) -> int:
        """As its context allows."""
        left = self.model.capabilities.max_length - len(request.ids) - request.length
        return max(0, left) if request in self._trees else 0

    def logits(self, requests: Sequence[Request], nodes: Sequence[Sequence[Node]]) -> list[Tensor]:
        """See ``BeamSource``; one pass over what it has not been fed."""
        trees = [self._trees[request] for request in requests]
        fresh = [tree.unfed(ends) for tree, ends in zip(trees, nodes, strict=True)]
        self.passes += feed(trees, fresh, lambda rows, new, _: self.model.extend(rows, new))
        return [
            fitted(torch.stack([tree.logits[node] for node in ends]), self._vocab)
            for tree, ends in zip(trees, nodes, strict=True)
        ]

    def settle(self, request: Request) -> None:
        """Drop what no running beam goes through."""
        if request in self._trees:
            self._trees[request].keep(self.model, request.ends)

    def close(self, request: Request) -> None:
        """Forget its row."""
        if request in self._trees:
            self.model.close(self._trees.pop(request).row)


class HeadBeams(BeamSource):
    """A draft head.

    A token behind one that the target has seen is fed with the target's hidden state; any other with the head's own
    guess, and again when the target has seen it.

    Args:
        model: the head; its target tracks hidden states.
        name: what people call it.
    """

    def __init__(self, model: HeadModel, name: str) -> None:
        super().__init__(name)
        self.model = model
        self._trees: dict[Request, TreeRow] = {}
        self._guessed: set[Node] = set()  # fed after a token that the target had not seen

    def open(self, request: Request) -> None:
        """Feed the prompt; its first token has no hidden state before it."""
        if request.tree is None:
            raise CacheError("a draft head reads the target's hidden states: open the target's row first")
        hidden = request.tree.row.waiting_features()
        request.root.hidden = hidden[-1]
        self.model.reserve(1, len(request.ids) + (request.params.max_tokens or 0))
        row = self.model.start()
        row.logits = self.model.advance([row], [torch.tensor(request.ids[1:])], [hidden[:-1]])[0]
        self._trees[request] = TreeRow(row, request.root)

    def logits(self, requests: Sequence[Request], nodes: Sequence[Sequence[Node]]) -> list[Tensor]:
        """See ``BeamSource``; one pass over what it has not been fed."""
        trees = [self._trees[request] for request in requests]
        fresh = [tree.unfed(ends) for tree, ends in zip(trees, nodes, strict=True)]
        self.passes += feed(trees, fresh, self._extend)
        return [self._dense(tree, ends) for tree, ends in zip(trees, nodes, strict=True)]

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

    def settle(self, request: Request) -> None:
        """Forget guesses, and what no running beam goes through."""
        tree = self._trees[request]
        guessed = self._guessed & tree.numbers.keys()
        for node in guessed:
            del tree.numbers[node]
            tree.logits.pop(node, None)
        self._guessed -= guessed
        tree.keep(self.model, request.ends)

    def close(self, request: Request) -> None:
        """Forget its row."""
        if request in self._trees:
            tree = self._trees.pop(request)
            self._guessed -= tree.numbers.keys()
            self.model.close(tree.row)


class LookupBeams(BeamSource):
    """Lookup: what followed earlier occurrences in the prompt and in the tokens that all beams share. It knows few
    tokens, so beams can be searched with it but not drawn."""

    gives_laws = False

    def __init__(self, name: str = "lookup", shortest: int = 2, longest: int = 6) -> None:
        super().__init__(name)
        self._lengths = shortest, longest
        self._texts: dict[Request, tuple[NgramIndex, Node]] = {}

    def open(self, request: Request) -> None:
        """Index the prompt."""
        index = NgramIndex(*self._lengths)
        index.extend(request.ids)
        self._texts[request] = index, request.root

    def logits(self, requests: Sequence[Request], nodes: Sequence[Sequence[Node]]) -> list[Tensor]:
        """See ``BeamSource``."""
        found = []
        for request, ends in zip(requests, nodes, strict=True):
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

    def settle(self, request: Request) -> None:
        """Index what all beams share now."""
        if request.tree is not None:
            index, last = self._texts[request]
            index.extend([node.token for node in request.tree.base.path(last)])
            self._texts[request] = index, request.tree.base

    def close(self, request: Request) -> None:
        """Forget its index."""
        self._texts.pop(request, None)
