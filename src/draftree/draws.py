"""The target's own draws: what a request's parameters make of the scores of its nodes.

Knows paths of tokens, but no trees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from .config import SamplingParams
from .sampling.constraint import ConstraintState, followed
from .sampling.warping import Warping, derive_seed, draw, stream_key, uniform, warp
from .scores import NO_EDIT, Changes, Edit, Scores

_ACCEPTANCE = 1
"""Label of the acceptance draws."""


class Penalties:
    """OpenAI's penalties and biases along one request, as changes of logits: of each node by its own path.

    A token of the history is read once, so that a step takes no longer behind a longer text.

    Args:
        prompt_length: tokens of the history that are the prompt's: frequency and presence count those behind it.
    """

    def __init__(self, params: SamplingParams, prompt_length: int) -> None:
        self._params, self._prompt_length = params, prompt_length
        self._repeats = params.repetition_penalty != 1
        self._counts = params.frequency_penalty != 0 or params.presence_penalty != 0
        self._generated = dict[int, int]()
        self._base, self._read = self._changes(params.logit_bias or (), {}, 1.0), 0
        """After the history, of which so many tokens are read."""

    def _changes(self, tokens: Collection[int], counts: Mapping[int, int], factor: float) -> Changes:
        """Of tokens, by how often each was generated.

        Args:
            factor: the repetition penalty, if the text has them.
        """
        biases = self._params.logit_bias or {}
        frequency, presence = self._params.frequency_penalty, self._params.presence_penalty
        factors = np.full(len(tokens), factor, np.float32)
        penalties = [frequency * counts[token] + presence if token in counts else 0.0 for token in tokens]
        addend = [biases.get(token, 0.0) - penalty for token, penalty in zip(tokens, penalties, strict=True)]
        return Changes(np.array([*tokens], np.int32), np.reciprocal(factors), factors, np.array(addend, np.float32))

    def after(self, history: Sequence[int], drawn: Sequence[int]) -> Changes:
        """The changes after tokens that follow the history.

        Args:
            history: committed token ids: those of the last call, and maybe more.
        """
        if not (self._repeats or self._counts):
            return self._base
        if len(history) != self._read:
            self._follow(history)
        if not drawn:
            return self._base
        counts = self._with(drawn)
        return _replaced(self._base, self._changes(counts, counts, self._params.repetition_penalty))

    def _follow(self, history: Sequence[int]) -> None:
        """Read what the history has gained."""
        new, length = history[self._read :], len(history)
        counts = self._with(new[max(0, self._prompt_length - self._read) :]) if self._counts else {}
        tokens: Collection[int] = set(new) if self._repeats else counts
        base = _replaced(self._base, self._changes(tokens, counts, self._params.repetition_penalty))
        self._generated |= counts
        self._base, self._read = base, length

    def _with(self, tokens: Sequence[int]) -> dict[int, int]:
        """How often each of these tokens has been generated, if they are."""
        return {token: self._generated.get(token, 0) + times for token, times in Counter(tokens).items()}


def _replaced(changes: Changes, later: Changes) -> Changes:
    """Changes with others in place of those of the same tokens."""
    kept = np.isin(changes.tokens, later.tokens, invert=True)
    columns = [(getattr(changes, f.name)[kept], getattr(later, f.name)) for f in fields(Changes)]
    return Changes(*map(np.concatenate, columns))


@dataclass(slots=True, eq=False)
class Draws:
    """The random draws of one request, from its history on.

    Tokens take noise that is keyed by (seed, position). Acceptance draws are keyed by (seed, position of the step's
    root, number of the draw), and by a label that no other noise has: no step sees an acceptance draw or draft noise of
    another one, so nothing that an earlier step gave up can come back.

    Attributes:
        history: committed token ids, which each step adds to and none takes away from; the next draw is at position
            ``len(history)``.
        prompt_length: of these, the prompt's.
        state: of the request's constraint there, if it has one.
        walks: what is drawn at a node takes what was drawn above it: a constraint's state, or a processor's call.
        edits: penalties, biases or a constraint change logits.
    """

    params: SamplingParams
    seed: int
    history: Sequence[int]
    prompt_length: int = 0
    state: ConstraintState | None = None
    walks: bool = field(init=False)
    edits: bool = field(init=False)
    warping: Warping = field(init=False, repr=False)
    _penalties: Penalties | None = field(default=None, init=False, repr=False)
    _accepting: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        p, constrained = self.params, self.state is not None
        self.warping, self.walks = p.warping, constrained or bool(p.processors)
        penalties = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
        if penalties != (1.0, 0.0, 0.0) or p.logit_bias:
            self._penalties = Penalties(p, self.prompt_length)
        self.edits = constrained or self._penalties is not None

    def begin(self) -> None:
        """A step begins: its acceptance draws are counted from 1."""
        self._accepting = 0

    def key(self, depth: int) -> int:
        """Of the noise ``depth`` tokens into this step."""
        return stream_key(self.seed, len(self.history) + depth)

    def edit(self, drawn: Sequence[int]) -> Edit:
        """What penalties, biases and the constraint change after tokens of this step."""
        if not self.edits:
            return NO_EDIT
        changes = None if self._penalties is None else self._penalties.after(self.history, drawn)
        return Edit(changes, None if self.state is None else followed(self.state, drawn).mask)

    def processed(self, logits: NDArray[np.float32], drawn: Sequence[int]) -> NDArray[np.float32]:
        """[V] edited logits by the request's processors."""
        for processor in self.params.processors:
            logits = np.asarray(processor(np.array([*self.history, *drawn], np.int64), logits), np.float32)
        return logits

    def warped(self, scores: Scores, slot: int, drawn: Sequence[int]) -> NDArray[np.float32]:
        """[V] warped logits after tokens of this step; only edited and processed at temperature 0."""
        logits = self.processed(scores.logits([slot], [self.edit(drawn)])[0], drawn)
        return warp(logits, self.warping) if self.warping.temperature else logits

    def accepts(self, chance: float) -> bool:
        """A new acceptance draw at each call."""
        self._accepting += 1
        return uniform(derive_seed(self.seed, _ACCEPTANCE, self._accepting), len(self.history)) <= chance

    def draw(self, logits: NDArray[np.floating], depth: int) -> int:
        """The token of [V] warped logits; the argmax at temperature 0."""
        return draw(logits, self.key(depth)) if self.warping.temperature else int(logits.argmax())
