"""The target's own draws: what a request's parameters make of the scores of its nodes.

Knows paths of tokens, but no trees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import SamplingParams
from ..scores import NO_EDIT, Changes, Edit, Scores
from .constraint import ConstraintState, followed
from .warping import derive_seed, draw, stream_key, uniform, warp

_ACCEPTANCE = 1
"""Label of the acceptance draws."""


class Penalties:
    """OpenAI's penalties and biases of one request in one step, as changes of logits: of each node by its own path.

    Args:
        history: committed token ids, of which the first ``prompt_length`` are the prompt's: frequency and presence
            count those behind it.
    """

    def __init__(self, params: SamplingParams, history: Sequence[int], prompt_length: int) -> None:
        self._params = params
        self._counted = params.frequency_penalty != 0 or params.presence_penalty != 0
        self._generated = Counter(history[prompt_length:]) if self._counted else Counter[int]()
        seen = set(history) if params.repetition_penalty != 1 else set[int]()
        self._base = self._changes(seen.union(self._generated, params.logit_bias or ()), seen, self._generated)

    @classmethod
    def of(cls, params: SamplingParams, history: Sequence[int], prompt_length: int) -> Penalties | None:
        """The penalties of a request; None where its parameters set none."""
        values = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        return cls(params, history, prompt_length) if values != (1.0, 0.0, 0.0) or params.logit_bias else None

    def _changes(self, tokens: Collection[int], seen: Collection[int], counts: Mapping[int, int]) -> Changes:
        """Of tokens, by those that the text has, and how often each was generated."""
        repetition, biases = self._params.repetition_penalty, self._params.logit_bias or {}
        frequency, presence = self._params.frequency_penalty, self._params.presence_penalty
        factors = np.array([repetition if token in seen else 1.0 for token in tokens], np.float32)
        penalties = [frequency * counts[token] + presence if token in counts else 0.0 for token in tokens]
        addend = [biases.get(token, 0.0) - penalty for token, penalty in zip(tokens, penalties, strict=True)]
        return Changes(np.array([*tokens], np.int32), np.reciprocal(factors), factors, np.array(addend, np.float32))

    def after(self, drawn: Sequence[int]) -> Changes:
        """The changes after tokens that follow the history."""
        base = self._base
        if not drawn or (self._params.repetition_penalty == 1 and not self._counted):
            return base
        counts = {token: self._generated[token] + times for token, times in Counter(drawn).items()}
        own = self._changes(counts, counts, counts)
        others = np.isin(base.tokens, own.tokens, invert=True)
        columns = [(getattr(base, each.name)[others], getattr(own, each.name)) for each in fields(Changes)]
        return Changes(*map(np.concatenate, columns))


@dataclass(slots=True, eq=False)
class Draws:
    """The random draws of one request in one step.

    Tokens take noise that is keyed by (seed, position). Acceptance draws are keyed by (seed, position of the step's
    root, number of the draw), and by a label that no other noise has: no step sees an acceptance draw or draft noise of
    another one, so nothing that an earlier step gave up can come back.

    Attributes:
        history: committed token ids; the first draw is at position ``len(history)``.
        prompt_length: of these, the prompt's.
        state: of the request's constraint there, if it has one.
    """

    params: SamplingParams
    seed: int
    history: Sequence[int]
    prompt_length: int = 0
    state: ConstraintState | None = None
    _penalties: Penalties | None = field(init=False, repr=False)
    _accepting: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self._penalties = Penalties.of(self.params, self.history, self.prompt_length)

    @property
    def walks(self) -> bool:
        """What is drawn at a node takes what was drawn above it: a constraint's state, or a processor's call."""
        return self.state is not None or bool(self.params.processors)

    def key(self, depth: int) -> int:
        """Of the noise ``depth`` tokens into this step."""
        return stream_key(self.seed, len(self.history) + depth)

    def edit(self, drawn: Sequence[int]) -> Edit:
        """What penalties, biases and the constraint change after tokens of this step."""
        if self._penalties is None and self.state is None:
            return NO_EDIT
        changes = None if self._penalties is None else self._penalties.after(drawn)
        return Edit(changes, None if self.state is None else followed(self.state, drawn).mask)

    def processed(self, logits: NDArray[np.float32], drawn: Sequence[int]) -> NDArray[np.float32]:
        """[V] edited logits by the request's processors."""
        for processor in self.params.processors:
            logits = np.asarray(processor(np.array([*self.history, *drawn], np.int64), logits), np.float32)
        return logits

    def warped(self, scores: Scores, slot: int, drawn: Sequence[int]) -> NDArray[np.float32]:
        """[V] warped logits after tokens of this step; only edited and processed at temperature 0."""
        logits = self.processed(scores.logits([slot], [self.edit(drawn)])[0], drawn)
        return warp(logits, self.params.warping) if self.params.temperature else logits

    def accepts(self, chance: float) -> bool:
        """A new acceptance draw at each call."""
        self._accepting += 1
        return uniform(derive_seed(self.seed, _ACCEPTANCE, self._accepting), len(self.history)) <= chance

    def draw(self, logits: NDArray[np.floating], depth: int) -> int:
        """The token of [V] warped logits; the argmax at temperature 0."""
        return draw(logits, self.key(depth)) if self.params.temperature else int(logits.argmax())


class DrawPlace(NamedTuple):
    """Where a token is drawn.

    Attributes:
        slot: of the scores.
        drawn: tokens of this step above it.
    """

    draws: Draws
    slot: int
    drawn: Sequence[int]


def draw_at(scores: Scores, places: Sequence[DrawPlace]) -> list[int]:
    """The target's own next token at each place; without processors of users in one call of ``scores``."""
    slots, every = [place.slot for place in places], {place.draws for place in places}
    if any([draws.params.processors for draws in every]):
        if len(places) > 1:
            return [draw_at(scores, [place])[0] for place in places]
        ((own, slot, drawn),) = places
        return [own.draw(own.warped(scores, slot, drawn), len(drawn))]
    every_edit = [draws.edit(drawn) for draws, _, drawn in places]
    edits = every_edit if any([edit is not NO_EDIT for edit in every_edit]) else None
    if any([draws.params.temperature for draws in every]):
        keys = [draws.key(len(drawn)) for draws, _, drawn in places]
        found = scores.draw(slots, keys, [p.draws.params.warping for p in places], edits)
    else:
        found = scores.argmax(slots, edits)
    return list(found.tolist())
