"""The seam between decoding and a model: *here are new nodes with their parents; what follows each of them?*

Token ids only: nothing here knows of text, drafts or sampling. Every call takes a ragged batch of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from threading import RLock
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar, runtime_checkable

import numpy as np

from ..errors import CacheError, ModelFileError, PromptError, UnsupportedModelError
from ..scores import Scores
from ..text.encoding import Tokenizer
from ..tree import ROOT, DraftTree, Floats
from .memory import free_memory

EAGER = "eager"
"""The runner that makes each pass as it comes."""


STOCK = "stock"
"""The weight format of weights that are of the model's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What was found out about a model when it was loaded.

    Attributes:
        name: what the user called it; bytes of a path that are no UTF-8 are escaped.
        architecture: its class.
        parameters: number of weights.
        max_length: most tokens of one sequence, prompt included; ``max_length_reason`` is what sets it.
        vocab_size: width V of its logits.
        eos_ids: tokens that end a sequence.
        dtype: of its arithmetic, by torch's name ("float32").
        device: that it computes on, by torch's name ("cpu", "cuda:0").
        engine: what makes its passes, with all versions ("native 1").
        tier: the part of an engine whose passes cost alike, by the name of its table (``models.cost_profile``): for the
            native engine the instruction set ("avx2").
        threads: of the CPU, that share a pass; 1 where an accelerator makes it.
        accelerator: name of the device; "": a CPU.
        weights: numbers that a pass multiplies with each token; embeddings are looked up only.
        weight_bytes: that these are read from.
        expert_bytes: those of a token's experts among them, which other tokens of the pass may not share.
        expert_share: how many of a layer's experts a token has, over all of them.
        attention: attention implementation in use; "": the engine's only one.
        weight_format: of its linear layers, those of a GGUF file by llama.cpp's names; ``STOCK``: all of ``dtype``.
        fingerprint: of its weights (``draftree.models.huggingface.inspection``); "": they cannot be read.
        slot_bytes: bytes of a token's keys and values in the cache.
        row_bytes: bytes that a row takes beside them, whatever its length: recurrent states, with trees of up to 64
            nodes.
        trees: what is known of passes over draft trees, for people.
        no_trees: why its rows cannot branch, so that it decodes without drafts; "": they can.
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
    dtype: str
    device: str
    engine: str
    tier: str
    threads: int
    weights: int
    weight_bytes: int
    accelerator: str = ""
    attention: str = ""
    weight_format: str = STOCK
    fingerprint: str = ""
    expert_bytes: int = 0
    expert_share: float = 1.0
    slot_bytes: int = 0
    row_bytes: int = 0
    trees: str = ""
    no_trees: str = ""
    rounding: float | None = None
    runner: str = EAGER

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name.encode(errors="backslashreplace").decode())


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


FINAL_STATE = FeatureSpec((FINAL,))
"""What the output layer reads."""


@dataclass(slots=True, eq=False)
class Row:
    """A sequence inside a model, which owns it: its committed tokens and the nodes that wait for a commit.

    Attributes:
        number: the model's for it; changes when other rows close.
        length: committed tokens.
        parents: [u], parents of the uncommitted nodes, ROOT for children of the last committed token.
    """

    number: int = -1
    length: int = 0
    parents: list[int] = field(default_factory=list)

    def has_features(self, wanted: FeatureSpec) -> bool:
        """It keeps these hidden states of all its committed tokens."""
        return not wanted

    def prefix(self, length: int | None) -> int:
        """``length``, by default of all its tokens; CacheError unless it has committed so many."""
        length = self.length if length is None else length
        if not 0 <= length <= self.length:
            raise CacheError(f"cannot fork {length} tokens of a row of {self.length}")
        return length

    def check_path(self, path: Sequence[int]) -> None:
        """Raise CacheError unless uncommitted nodes are a path from the last committed token down."""
        last = ROOT
        for node in path:
            if not 0 <= node < len(self.parents) or self.parents[node] != last:
                raise CacheError(f"cannot commit {list(path)}: node {node} is not a child of {last}")
            last = node

    def pruned(self, keep: Sequence[int], trunk: int) -> list[int]:
        """[len(keep) - trunk] parents of the uncommitted nodes that stay after ``LanguageModel.prune``."""
        count, numbers = len(self.parents), {node: i for i, node in enumerate(keep)} | {ROOT: ROOT}
        nodes = [node for node in sorted(set(keep)) if 0 <= node < count]
        parents = [numbers.get(parent, ROOT - 1) for parent in map(self.parents.__getitem__, nodes)]
        chain = parents[:trunk] == list(range(ROOT, trunk + ROOT)) and len(keep) >= trunk
        if nodes != list(keep) or not chain or any(parent < trunk + ROOT for parent in parents[trunk:]):
            raise CacheError(
                f"cannot keep {list(keep)} of {count} nodes: name each once, in ascending order and with its parent, "
                f"the first {trunk} a path that all the others descend from"
            )
        return [parent - trunk for parent in parents[trunk:]]


@dataclass(frozen=True, slots=True)
class Nodes:
    """New nodes for one row.

    Attributes:
        tokens: [n].
        parents: [n], numbers among the row's uncommitted nodes in the order of their arrival, these ones included; ROOT
            (-1) is the last committed token.
        wanted: of so many of them, the last ones, the scores are wanted; None: of all.
    """

    tokens: list[int]
    parents: list[int]
    wanted: int | None = None

    @property
    def scored(self) -> int:
        """How many of them the scores are wanted of."""
        return len(self.tokens) if self.wanted is None else self.wanted

    @classmethod
    def chain(cls, tokens: Sequence[int], wanted: int | None = None) -> Nodes:
        """``tokens`` one after the other, below the last committed token."""
        return cls([*tokens], [*range(ROOT, len(tokens) + ROOT)], wanted)

    @classmethod
    def below(cls, head: Sequence[int], tree: DraftTree, wanted: int | None = None) -> Nodes:
        """Tokens that are not committed yet, and below the last of them, which is the root, its draft tree."""
        above = len(head)
        parents = [*range(ROOT, above + ROOT), *map(above.__add__, tree.parents)]
        return cls([*head, *tree.tokens], parents, wanted)


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model over token trees.

    Attributes:
        tokenizer: None for a model of bare token ids.
        cache_bytes: memory that the keys and values of its rows may take; 0: nothing bounds it.
        grows_by_row: a row takes memory as its text grows, and gives it back when it is closed; else all rows have as
            much as the longest, and requests are admitted for the longest texts that they may come to.
        pass_seconds: wall-clock seconds inside passes so far; 0: it measures none.
        most_read: tokens of the end of a text that it reads where it has read nothing of it; None: all.
    """

    capabilities: Capabilities
    tokenizer: Tokenizer | None = None
    most_read: int | None = None
    cache_bytes: int = 0
    grows_by_row: bool = False
    pass_seconds: float = 0.0

    @property
    def tracked(self) -> FeatureSpec:
        """Which hidden states of its tokens it keeps."""
        return FeatureSpec()

    @property
    def measured(self) -> LanguageModel:
        """The model whose passes are measured to know what its own cost."""
        return self

    def twin(self) -> LanguageModel:
        """A second model on the same weights, with rows and a cache of its own.

        Raises:
            UnsupportedModelError: its weights cannot be shared.
        """
        raise UnsupportedModelError(
            f"{self.capabilities.name} cannot draft for itself: use drafter 'lookup', another model, or "
            "backend 'transformers'"
        )

    def share_threads(self, other: LanguageModel) -> None:
        """Run on another model's threads from now on, where both can: two models of a step make passes in turn."""
        return

    def reserve(self, rows: int, tokens: int) -> None:
        """Make room for ``rows`` sequences of ``tokens`` tokens at once, so that the cache need not grow."""
        return

    def holds(self, lengths: Sequence[int]) -> bool:
        """Rows of so many tokens can be open together, within the memory that the model may use for its cache."""

    def open(self) -> Row:
        """A new row without tokens."""

    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        """Append uncommitted nodes to each row in one pass.

        Returns:
            the scores after the nodes that are wanted, row by row.

        Raises:
            CacheError: a node would lie beyond the longest sequence, a parent does not come before its child, or a row
                is closed; nothing has changed.
        """

    def commit(self, row: Row, path: Sequence[int]) -> None:
        """Keep these uncommitted nodes, a path from the last committed token down, and drop all others.

        Raises:
            CacheError: they are no such path; nothing has changed.
        """

    def prune(self, row: Row, keep: Sequence[int], trunk: int) -> None:
        """Keep these uncommitted nodes, in ascending order and closed under parents, and drop all others.

        The first ``trunk`` of them, a path from the last committed token down that all the others descend from, are
        committed; the others wait on, and the i-th of them is node i from now on.

        Raises:
            CacheError: ``keep`` or the trunk is none; nothing has changed.
        """

    def fork(self, row: Row, length: int | None = None) -> Row:
        """A new row with the first ``length`` committed tokens, or all; uncommitted nodes are not copied.

        Raises:
            CacheError: there are not so many.
        """

    def close(self, row: Row) -> None:
        """Forget a row."""


def prefill(model: LanguageModel, ids: Sequence[int]) -> Row:
    """A new row that has read a text (``prefill_scored``)."""
    return prefill_scored(model, ids)[0]


def prefill_scored(model: LanguageModel, ids: Sequence[int]) -> tuple[Row, Scores]:
    """A new row that has read a text, and what follows it: slot 0 of the scores.

    Raises:
        PromptError: the text is empty, too long, or holds an id outside the vocabulary.
    """
    check_text(model.capabilities, ids)
    row = model.open()
    try:
        scores = model.extend([row], [Nodes.chain(ids, wanted=1)])
        model.commit(row, range(len(ids)))
    except BaseException:
        model.close(row)
        raise
    return row, scores


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


PROMPT, DRAFTED = (1011, 707, 505, 303), (202, 1313, 1717, 1919)
"""Of the self-tests, modulo the vocabulary. Ordinary tokens: the lowest ids are often special, and hidden states of a
text of those alone can be so large that 16 bits leave nothing of the logits (SmolLM2)."""


def decoded(model: LanguageModel, row: Row, tokens: Sequence[int]) -> Floats:
    """[n, V] logits after each of ``tokens``, fed one by one and committed."""
    logits = []
    for token in tokens:
        logits.append(model.extend([row], [Nodes.chain([token])]).logits([0]))
        model.commit(row, [0])
    return np.concatenate(logits)


def difference(logits: Floats, wanted: Floats) -> float:
    """Largest difference of logits in standard deviations of ``wanted``."""
    return float(np.abs(logits - wanted).max() / max(float(wanted.std()), 1e-12))


def check_finite(can: Capabilities, logits: Floats) -> None:
    """Check that a model gives numbers: one weight that is none spreads to all logits.

    Raises:
        ModelFileError: it does not.
    """
    if not np.isfinite(logits).all():
        raise ModelFileError(
            f"{can.name} gives logits that are NaN or infinite: weights are damaged, or too large for "
            f"{can.dtype}: download it again, or use dtype float32"
        )


class Guarded(Protocol):
    """A model whose methods are ``exclusive``."""

    _lock: RLock

    @property
    def capabilities(self) -> Capabilities: ...


M = TypeVar("M", bound=Guarded)
P = ParamSpec("P")
T = TypeVar("T")


def exclusive(method: Callable[Concatenate[M, P], T]) -> Callable[Concatenate[M, P], T]:
    """A method that no two threads run at once.

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
            return method(self, *args, **kwargs)
        finally:
            self._lock.release()

    return run


R = TypeVar("R", bound=Row)


class OpenRows(LanguageModel, Generic[R]):
    """A model that knows its open rows by their numbers. One thread at a time can be inside it.

    Attributes:
        capabilities: what it can do.
        cache_bytes: by default half of what was free at load.
        pass_seconds: wall-clock seconds inside passes so far, first ones of a row not counted.

    Args:
        lock: whoever is inside holds it.
    """

    grows_by_row = True

    def __init__(self, lock: RLock) -> None:
        self._lock = lock
        self.cache_bytes = free_memory() // 2
        self.forget_rows()

    def forget_rows(self) -> None:
        """Begin without rows: those of the model that this is a copy of stay that model's."""
        self.pass_seconds = 0.0
        self._open: dict[int, R] = {}

    @property
    def rows(self) -> int:
        """How many rows are open."""
        return len(self._open)

    def checked(self, row: Row) -> R:
        """``row``, if it is open and this model's."""
        if (own_row := self._open.get(row.number)) is row and own_row is not None:
            return own_row
        raise CacheError("the row is closed, or another model's: open its prompt again")
