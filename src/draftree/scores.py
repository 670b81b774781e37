"""What a pass found at its nodes: scores stay where they are computed, and callers take what they need of them.

A pass numbers the nodes whose scores are wanted (``Nodes.wanted``) row by row: their *slots*. Scores are valid until
the model's next pass. ``NumpyScores`` is the reference for scores on a device and in C.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from .errors import CacheError
from .sampling.warping import Warping, draw, gumbel_noise, largest, warp


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of some logits of a node: x * positive if x > 0, else x * negative, then + addend.

    Attributes:
        tokens: [n] int32, each once.
        positive, negative, addend: [n] float32; the factors are positive.
    """

    tokens: NDArray[np.int32]
    positive: NDArray[np.float32]
    negative: NDArray[np.float32]
    addend: NDArray[np.float32]


class Edit(NamedTuple):
    """What is changed of a node's logits before anything is taken of them.

    Attributes:
        changes: come first.
        mask: [ceil(V / 32)] uint32, bit t % 32 of entry t // 32: token t may come; the others become -inf. A mask that
            allows nothing is left out.
    """

    changes: Changes | None = None
    mask: NDArray[np.uint32] | None = None


NO_EDIT = Edit()

Edits = Sequence[Edit]
"""One for each slot of a call."""

Slots = Sequence[int] | NDArray[np.integer]


class Top(NamedTuple):
    """The k most probable tokens after w nodes, most probable first; of equal ones the lower token first.

    Attributes:
        tokens: [w, k] int32.
        logprobs: [w, k] float32, nats.
        entropies: [w] float32, nats, of the whole distributions.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32]


class Draft(NamedTuple):
    """The distributions that drafts are made of, where they are not the model's own.

    Attributes:
        warpings: [w] of each slot; at temperature 0 the distribution is the model's own.
        keys: [w] of the noise that the target will draw with (``Scores.draw``). Then logits are temperature x (warped
            logits + noise): what is known of the target's draw, if its logits are about these. None: not known.
    """

    warpings: Sequence[Warping]
    keys: Sequence[int] | None = None


EXPIRED = "these scores are of an earlier pass of the model: take what you need before its next one"


class Scores(ABC):
    """Logits after the wanted nodes of one pass.

    Without edits a call is raw: of the model's own distribution at temperature 1.

    Attributes:
        starts: [rows + 1] the slots of the pass's row b are starts[b] to starts[b + 1] - 1.

    Args:
        counts: wanted nodes of each row.

    Every method raises a CacheError once the model has made another pass.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.starts = [0, *accumulate(counts)]
        self._expired = False

    def expire(self) -> None:
        """The model makes another pass."""
        self._expired = True

    def check(self) -> None:
        """Raise CacheError if they are not valid any more."""
        if self._expired:
            raise CacheError(EXPIRED)

    @abstractmethod
    def argmax(self, slots: Slots, edits: Edits | None = None) -> NDArray[np.int32]:
        """[w] the most probable token after each slot; of equal ones the lowest."""

    @abstractmethod
    def top(self, slots: Slots, count: int, edits: Edits | None = None, draft: Draft | None = None) -> Top:
        """The most probable tokens after each slot; of warped distributions where ``draft`` is given.

        Args:
            count: at least 1; at most V are given, and no more than the engine sorts (1024 of the native one).
        """

    @abstractmethod
    def log_probabilities(self, slots: Slots, tokens: Sequence[int]) -> NDArray[np.float32]:
        """[w] log-probability (nats) of one token after each slot."""

    @abstractmethod
    def draw(
        self, slots: Slots, keys: Sequence[int], warpings: Sequence[Warping], edits: Edits | None = None
    ) -> NDArray[np.int32]:
        """[w] one token after each slot: argmax of warped logits + noise (``sampling.warping``); edits come before.

        Args:
            keys: [w] of the noise (``sampling.warping.stream_key``), 64 bits each.
            warpings: [w]; at temperature 0 it is the argmax.
        """

    @abstractmethod
    def logits(self, slots: Slots, edits: Edits | None = None) -> NDArray[np.float32]:
        """[w, V] logits after each slot, a copy."""


class NumpyScores(Scores):
    """Scores by NumPy.

    Args:
        rows: [W, V] float32 logits by slot; they are not changed.
    """

    def __init__(self, rows: NDArray[np.float32], counts: Sequence[int]) -> None:
        super().__init__(counts)
        self._rows: NDArray[np.float32] | None = rows

    def expire(self) -> None:
        super().expire()
        self._rows = None  # whoever keeps the scores does not keep their memory

    @property
    def rows(self) -> NDArray[np.float32]:
        """[W, V] logits by slot, which must not be changed."""
        self.check()
        assert self._rows is not None  # noqa: S101
        return self._rows

    def _edited(self, slots: Slots, edits: Edits | None) -> list[NDArray[np.float32]]:
        rows = [self.rows[slot] for slot in slots]
        return rows if edits is None else [edited(logits, edit) for logits, edit in zip(rows, edits, strict=True)]

    def argmax(self, slots: Slots, edits: Edits | None = None) -> NDArray[np.int32]:
        return np.array([logits.argmax() for logits in self._edited(slots, edits)], dtype=np.int32)

    def top(self, slots: Slots, count: int, edits: Edits | None = None, draft: Draft | None = None) -> Top:
        count = min(count, self.rows.shape[1])
        tokens = np.empty((len(slots), count), dtype=np.int32)
        logprobs, entropies = np.empty((len(slots), count), np.float32), np.empty(len(slots), np.float32)
        for i, logits in enumerate(self._edited(slots, edits)):
            if draft is not None and (warping := draft.warpings[i]).temperature:
                logits = warp(logits, warping)
                if draft.keys is not None:
                    logits = (logits + gumbel_noise(draft.keys[i], len(logits)).astype(np.float32)) * logits.dtype.type(
                        warping.temperature
                    )
            tokens[i] = largest(logits, count)
            x, total, mass = _exponentials(logits)
            logprobs[i] = x[tokens[i]] - np.log(total)
            # H = log sum exp x - sum p x, where 0 log 0 = 0
            entropies[i] = np.log(total) - float(np.dot(mass, np.maximum(x, np.finfo(np.float32).min))) / total
        return Top(tokens, logprobs, entropies)

    def log_probabilities(self, slots: Slots, tokens: Sequence[int]) -> NDArray[np.float32]:
        logprobs = np.empty(len(slots), np.float32)
        for i, (logits, token) in enumerate(zip(self._edited(slots, None), tokens, strict=True)):
            x, total, _ = _exponentials(logits)
            logprobs[i] = x[token] - np.log(total)
        return logprobs

    def draw(
        self, slots: Slots, keys: Sequence[int], warpings: Sequence[Warping], edits: Edits | None = None
    ) -> NDArray[np.int32]:
        return np.array([*map(draw_warped, self._edited(slots, edits), keys, warpings)], np.int32)

    def logits(self, slots: Slots, edits: Edits | None = None) -> NDArray[np.float32]:
        return np.stack(self._edited(slots, edits))


def draw_warped(logits: NDArray[np.float32], key: int, warping: Warping) -> int:
    """The token that is drawn of [V] logits, by the noise of a key (``Scores.draw``)."""
    return draw(warp(logits, warping), key) if warping.temperature else int(logits.argmax())


def edited(logits: NDArray[np.float32], edit: Edit) -> NDArray[np.float32]:
    """[V] logits, in new memory where they are changed."""
    changes, mask = edit
    if changes is not None:
        logits = logits.copy()
        x = logits[changes.tokens]
        logits[changes.tokens] = x * np.where(x > 0, changes.positive, changes.negative) + changes.addend
    if mask is not None:
        allowed = allowed_tokens(mask, len(logits))
        if allowed.any():
            logits = np.where(allowed, logits, np.float32(-np.inf))
    return logits


def allowed_tokens(mask: NDArray[np.uint32], vocab: int) -> NDArray[np.bool_]:
    """[vocab] which tokens a mask allows (``Edit``)."""
    bits = np.unpackbits(mask.view(np.uint8), count=vocab, bitorder="little")
    return bits.view(np.bool_)


def _exponentials(logits: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, NDArray[np.float32]]:
    """x = logits - their largest, sum(exp(x)), exp(x)."""
    x = logits - logits.max()
    mass = np.exp(x)
    return x, float(mass.sum(dtype=np.float64)), mass


S = TypeVar("S", bound=Scores)


class LastScores:
    """The scores of a model's last pass: ``last``, while they are valid."""

    def __init__(self) -> None:
        self.last: Scores | None = None

    def expire(self) -> None:
        """A pass begins: those before it are not valid any more."""
        if self.last is not None:
            self.last.expire()
        self.last = None

    def keep(self, scores: S) -> S:
        """The scores of the pass that was made; ``expire`` came before it."""
        self.last = scores
        return scores
