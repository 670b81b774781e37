"""The seam between decoding and a model: *here are new nodes with their parents; what follows each of them?*

Token ids only: nothing here knows of text, drafts or sampling. Every call takes a ragged batch of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from threading import RLock
from typing import Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from ..errors import CacheError, PromptError
from ..tree import ROOT, DraftTree

_PIECES = 64
"""Most pieces that a row's hidden states are kept in: a step adds one, and a copy of all is paid once in so many."""


EAGER = "eager"
"""The runner that makes each pass as it comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What was found out about a model when it was loaded.

    Attributes:
        name: what the user called it.
        architecture: its class.
        parameters: number of weights.
        max_length: most tokens of one sequence, prompt included; ``max_length_reason`` is what sets it.
        vocab_size: width V of its logits.
        eos_ids: tokens that end a sequence.
        attention: attention implementation in use.
        weight_format: of its linear layers (``draftree.models.cpu.quantization``); "stock": as they were loaded.
        fingerprint: of its weights (``draftree.models.probe``); "": they cannot be read.
        linear_layers: what they compute with, for people.
        slot_bytes: bytes of a token's keys and values in the cache.
        trees: what is known of passes over draft trees, for people.
        rounding: largest gap between two logits that their rounding by the number of tokens of a pass explains, where
            it was measured.
        runner: what makes its passes, and those of its draft heads.
    """

    name: str
    architecture: str
    parameters: int
    max_length: int
    max_length_reason: str
    vocab_size: int
    eos_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    attention: str
    weight_format: str = "stock"
    fingerprint: str = ""
    linear_layers: str = ""
    slot_bytes: int = 0
    trees: str = ""
    rounding: float | None = None
    runner: str = EAGER


FINAL = -1
"""The hidden state after the final norm, which the output layer reads (``FeatureSpec``)."""


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """Which hidden states of a token a model keeps, side by side in one vector of F = len(layers) x H numbers.

    Attributes:
        layers: k from 0 on is what decoder layer k reads, for the number of layers L what the last one gives before the
            final norm; or ``FINAL``. So k < L is ``hidden_states[k]`` of transformers, and FINAL its last.
    """

    layers: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.layers)

    def __or__(self, other: FeatureSpec) -> FeatureSpec:
        """Those of both, each once; its own first."""
        return FeatureSpec(tuple(dict.fromkeys(self.layers + other.layers)))

    def covers(self, other: FeatureSpec) -> bool:
        """All of another's are among its own."""
        return set(other.layers) <= set(self.layers)

    def part(self, states: Tensor, wanted: FeatureSpec) -> Tensor:
        """[..., F'] the wanted ones of its own [..., F].

        Raises:
            CacheError: some of them are missing.
        """
        if wanted == self:
            return states
        if not self.covers(wanted):
            raise CacheError(
                f"hidden states {list(wanted.layers)} are missing, {list(self.layers)} are kept: call the model's "
                "track_features before the row is opened"
            )
        each = dict(zip(self.layers, states.chunk(len(self.layers), dim=-1), strict=True))
        return torch.cat([each[layer] for layer in wanted.layers], dim=-1)


FINAL_STATE = FeatureSpec((FINAL,))
"""What the output layer reads."""


@dataclass(slots=True, eq=False)
class Row:
    """A sequence inside a model, which owns it: its committed tokens and the nodes that wait for a commit.

    Attributes:
        slot: the model's number for it; changes when other rows close.
        length: committed tokens.
        logits: [V] logits of the last token that ``prefill`` has read; empty where nothing was read by it.
        parents: [u] int64, parents of the uncommitted nodes, ROOT for children of the last committed token.
        features: hidden states of committed tokens in order, in pieces [n, F], since the model tracks them.
        read: how many of these ``drop_features`` has left behind.
        pending: hidden states of the uncommitted nodes, in pieces.
        kept: which hidden states these are.
    """

    slot: int
    length: int
    logits: Tensor
    parents: Tensor
    features: list[Tensor] = field(default_factory=list)
    read: int = 0
    pending: list[Tensor] = field(default_factory=list)
    kept: FeatureSpec = FINAL_STATE

    def add_features(self, states: Tensor, tracked: FeatureSpec) -> None:
        """Keep hidden states of new uncommitted nodes: the same ones that it keeps of its other tokens.

        Args:
            states: [n, F], those that the model tracks.
            tracked: which these are.
        """
        if not self.features and not self.pending:
            self.kept = tracked
        self.pending.append(tracked.part(states, self.kept))

    def waiting_features(self, wanted: FeatureSpec | None = None) -> Tensor:
        """[m, F] hidden states of the tokens committed since the last ``drop_features``, on the model's device.

        Args:
            wanted: which; None: all that are kept.

        Raises:
            CacheError: the model does not track them.
        """
        waiting = sum(map(len, self.features)) - self.read
        if not waiting:
            raise CacheError("no hidden states wait: call the model's track_features before the row is opened")
        return self.last_features(waiting, wanted)

    def last_features(self, count: int, wanted: FeatureSpec | None = None) -> Tensor:
        """[count, F] hidden states of the last committed tokens (``waiting_features``), on the model's device.

        Raises:
            CacheError: the model does not track them, or fewer are kept.
        """
        pieces: list[Tensor] = []
        for piece in reversed(self.features):
            if count <= 0:
                break
            pieces.append(piece[-count:])
            count -= len(piece)
        if count > 0 or not pieces:
            raise CacheError("hidden states are missing: call the model's track_features before the row is opened")
        found = _joined(pieces[::-1])
        return found if wanted is None else self.kept.part(found, wanted)

    def pending_feature(self, node: int, wanted: FeatureSpec | None = None) -> Tensor:
        """[F] hidden states of an uncommitted node (``waiting_features``), on the model's device.

        Raises:
            CacheError: the model does not track them, or there is no such node.
        """
        for piece in self.pending:
            if node < len(piece):
                return piece[node] if wanted is None else self.kept.part(piece[node], wanted)
            node -= len(piece)
        raise CacheError("the node has no hidden state: call the model's track_features before it is fed")

    def first_features(self, length: int) -> list[Tensor]:
        """Hidden states of the first ``length`` committed tokens, in pieces, as far as they are tracked."""
        left = length - self.length + sum(map(len, self.features))
        pieces: list[Tensor] = []
        for piece in self.features:
            if left > 0:
                pieces.append(piece[:left])
            left -= len(piece)
        return pieces

    def drop_features(self) -> None:
        """Let those of tokens that are committed now wait no more; they are kept."""
        self.read = sum(map(len, self.features))

    def keep_features(self, keep: Sequence[int], trunk: int) -> None:
        """Follow a commit or a prune: of the uncommitted nodes' hidden states those of ``keep`` stay.

        The first ``trunk`` of them are those of committed tokens from now on.
        """
        pieces, self.pending = self.pending, []
        if pieces and keep:
            pending = _joined(pieces)
            kept = pending if len(keep) == len(pending) else pending[list(keep)]
            if trunk:
                self.features.append(_owned(kept[:trunk]))
                if len(self.features) > _PIECES:
                    self.features = [torch.cat(self.features)]
            if trunk < len(keep):
                self.pending.append(kept[trunk:])

    def pruned(self, keep: Sequence[int], trunk: int) -> Tensor:
        """[len(keep) - trunk] int64 parents of the uncommitted nodes that stay after ``ForestModel.prune``."""
        count, kept = len(self.parents), torch.tensor(list(keep), dtype=torch.int64)
        if list(keep) != sorted(set(keep)) or not all(0 <= node < count for node in keep):
            raise CacheError(f"cannot keep {list(keep)} of {count} nodes: name each once, in ascending order")
        numbers = torch.full((count + 1,), ROOT - 1)
        numbers[kept], numbers[-1] = torch.arange(len(kept)), ROOT  # ROOT reads the last
        parents = numbers[self.parents[kept]]
        if bool((parents < ROOT).any()):
            raise CacheError(f"cannot keep {list(keep)}: a node would stay without its parent")
        chain = torch.equal(parents[:trunk], torch.arange(trunk) + ROOT)
        if not chain or len(keep) < trunk or bool((parents[trunk:] < trunk + ROOT).any()):
            raise CacheError(f"the first {trunk} of nodes {list(keep)} are no path that all the others descend from")
        return parents[trunk:] - trunk


def _joined(pieces: list[Tensor]) -> Tensor:
    """[m, F] of pieces [n, F], without a copy where there is but one."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _owned(states: Tensor) -> Tensor:
    """``states`` in memory of their own: a part of a pass's would keep all of these."""
    return states.clone() if states.untyped_storage().nbytes() > states.nbytes else states


@dataclass(frozen=True, slots=True)
class Nodes:
    """New nodes for one row.

    Attributes:
        tokens: [n] int64.
        parents: [n] int64, numbers among the row's uncommitted nodes in the order of their arrival, these ones
            included; ROOT (-1) is the last committed token.
        wanted: of so many of them, the last ones, the logits are wanted; None: of all.
    """

    tokens: Tensor
    parents: Tensor
    wanted: int | None = None

    @property
    def logits(self) -> int:
        """How many of them the logits are wanted of."""
        return len(self.tokens) if self.wanted is None else self.wanted

    @classmethod
    def chain(cls, tokens: Sequence[int], wanted: int | None = None) -> Nodes:
        """``tokens`` one after the other, below the last committed token."""
        return cls(torch.tensor(tokens, dtype=torch.int64), torch.arange(ROOT, len(tokens) + ROOT), wanted)

    @classmethod
    def below(cls, head: Sequence[int], tree: DraftTree) -> Nodes:
        """Tokens that are not committed yet, and below the last of them, which is the root, its draft tree."""
        if not len(tree):
            return cls.chain(head, 1)
        n = len(head)
        parents = torch.where(tree.parents == ROOT, n - 1, tree.parents + n)
        tokens = torch.cat([torch.tensor(head, dtype=torch.int64), tree.tokens])
        return cls(tokens, torch.cat([torch.arange(n) + ROOT, parents]), 1 + len(tree))


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model over token trees."""

    @property
    def capabilities(self) -> Capabilities: ...

    def reserve(self, rows: int, tokens: int) -> None:
        """Make room for ``rows`` sequences of ``tokens`` tokens at once, so that the cache need not grow."""

    def holds(self, lengths: Sequence[int]) -> bool:
        """Rows of so many tokens can be open together, within the memory that the model may use for its cache."""

    def open(self) -> Row:
        """A new row without tokens."""

    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Tensor:
        """Append uncommitted nodes to each row in one pass.

        Returns:
            [B, w, V] logits, w the most that are wanted of any row; entry (b, i) follows the i-th node of ``nodes[b]``
            whose logits are wanted; entries past a row's own mean nothing.

        Raises:
            CacheError: a node would lie beyond the longest sequence, a parent does not come before its child, or a row
                is closed; nothing has changed.
        """

    def commit(self, row: Row, path: Sequence[int]) -> None:
        """Keep these uncommitted nodes, a path from the last committed token down, and drop all others.

        Raises:
            CacheError: they are no such path; nothing has changed.
        """

    def fork(self, row: Row, length: int | None = None) -> Row:
        """A new row with the first ``length`` committed tokens, or all; uncommitted nodes are not copied.

        Raises:
            CacheError: there are not so many.
        """

    def close(self, row: Row) -> None:
        """Forget a row."""


def prefill(model: LanguageModel, ids: Sequence[int]) -> Row:
    """A new row that has read a text; its ``logits`` follow the last token.

    Raises:
        PromptError: the text is empty, too long, or holds an id outside the vocabulary.
    """
    check_text(model.capabilities, ids)
    row = model.open()
    try:
        logits = model.extend([row], [Nodes.chain(ids, wanted=1)])
        model.commit(row, range(len(ids)))
        row.logits = logits[0, 0].clone()
    except BaseException:
        model.close(row)
        raise
    return row


def check_text(can: Capabilities, ids: Sequence[int]) -> None:
    """Check that a model can read a text.

    Raises:
        PromptError: the text is empty, too long, or holds an id outside the vocabulary.
    """
    if not ids:
        raise PromptError("the prompt is empty: give at least one token")
    if len(ids) > can.max_length:
        raise PromptError(
            f"the prompt has {len(ids)} tokens but {can.name} takes {can.max_length} ({can.max_length_reason}): "
            "shorten the prompt"
        )
    if wrong := next((i for i in (min(ids), max(ids)) if not 0 <= i < can.vocab_size), None):
        raise PromptError(f"the prompt has token id {wrong} but those of {can.name} are 0 to {can.vocab_size - 1}")


@runtime_checkable
class ForestModel(LanguageModel, Protocol):
    """A language model whose rows can go on with more than one path: what beams need."""

    def prune(self, row: Row, keep: Sequence[int], trunk: int) -> None:
        """Keep these uncommitted nodes, in ascending order and closed under parents, and drop all others.

        The first ``trunk`` of them, a path from the last committed token down that all the others descend from, are
        committed; the others wait on, and the i-th of them is node i from now on.

        Raises:
            CacheError: ``keep`` or the trunk is none; nothing has changed.
        """


class Guarded(LanguageModel, Protocol):
    """A language model whose methods are ``alone``."""

    _lock: RLock


M = TypeVar("M", bound=Guarded)
P = ParamSpec("P")
T = TypeVar("T")


def alone(method: Callable[Concatenate[M, P], T]) -> Callable[Concatenate[M, P], T]:
    """A method without autograd that no two threads run at once.

    A pass is made in several moves on what the whole model shares: a second thread between them would change it, and
    both would get wrong tokens. Between calls, rows of several engines may take turns in any order.

    Raises:
        CacheError: another thread is inside the model.
    """

    @wraps(method)
    def run(self: M, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._lock.acquire(blocking=False):
            raise CacheError(
                f"{self.capabilities.name} is in use by another thread: give each thread a model of its own, or let "
                "one thread run all requests"
            )
        try:
            with torch.inference_mode():
                return method(self, *args, **kwargs)
        finally:
            self._lock.release()

    return run
