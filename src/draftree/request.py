"""One request: its tokens, its text, why it ended, and what became of its draft trees and what they cost."""

from __future__ import annotations

import secrets
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .config import SamplingParams
from .draws import Draws
from .models.base import Row
from .sampling.constraint import ConstraintState, followed
from .scores import Scores
from .text.detokenizer import TextStream
from .tree import ROOT, DraftTree


@dataclass(slots=True)
class Seconds:
    """Wall-clock seconds of one request. Requests that share a step each count all of it.

    Attributes:
        prefill: steps in which its prompt was read.
        draft: proposing trees and learning from steps; at the first tree a drafting model reads the prompt.
        verify: the target's passes, the draws and their transfer to the host.
        other: commits, text, bookkeeping.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        return self.prefill + self.draft + self.verify + self.other


@dataclass(slots=True)
class DrafterStats:
    """What one drafter did for one request.

    Attributes:
        drafted: nodes that it proposed.
        accepted: of these, accepted.
    """

    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Stats:
    """What one request's decoding did.

    Attributes:
        tokens: generated tokens, end-of-sequence included.
        reused: tokens of the prompt that a kept row had.
        steps: target passes after the prefill.
        drafted, accepted: [d] nodes at depth d + 1 that were drafted and accepted.
        drafters: name -> what it did, the parts of an ensemble apart.
        out_of_context: name -> tokens that it takes, of the drafters whose context ended before the answer did: they
            drafted nothing from there on.
        drafted_layers: of beams: layers that were drafted, over all steps.
        expected: sum over steps of the tree's expected acceptance length E(A), root counted as 1.
        draft_passes: drafter model passes of the steps that this request took part in.
        accepted_entropies, rejected_entropies: nats, of the draft distribution at every accepted node, and of every
            one whose tokens were all rejected ("Dynamic Tree Speculative Decoding", Figure 1).
        figures: name -> what a drafter counts of its own, such as the stages of a cascade.
    """

    tokens: int = 0
    reused: int = 0
    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafters: dict[str, DrafterStats] = field(default_factory=dict)
    out_of_context: dict[str, int] = field(default_factory=dict)
    drafted_layers: int = 0
    expected: float = 0.0
    draft_passes: int = 0
    accepted_entropies: list[float] = field(default_factory=list)
    rejected_entropies: list[float] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def mal(self) -> float:
        """Mean acceptance length: tokens gained per target pass, bonus token included."""
        return (self.tokens - 1) / self.steps if self.steps else 1.0  # the prefill gives the first token

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over all the time, prefill included."""
        return self.tokens / self.seconds.total if self.seconds.total else 0.0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The target's own log-probabilities of one token; drafts move them by no more than passes of other widths do.

    Attributes:
        token: natural logarithm of its probability.
        best: the most probable tokens, each with its own, in descending order.
    """

    token: float
    best: list[tuple[int, float]]

    @classmethod
    def of(cls, scores: Scores, slots: Sequence[int], tokens: Sequence[int], count: int) -> list[Logprobs]:
        """Score ``tokens[i]`` after ``slots[i]``, and the ``count`` most probable tokens there."""
        logprobs = scores.log_probabilities(slots, tokens).tolist()
        if not count:
            return [cls(logprob, []) for logprob in logprobs]
        best = scores.top(slots, count)
        pairs = zip(best.tokens.tolist(), best.logprobs.tolist(), strict=True)
        return [cls(logprob, list(zip(*row, strict=True))) for logprob, row in zip(logprobs, pairs, strict=True)]


class Chunk(NamedTuple):
    """One generated token as it streams.

    Attributes:
        text: what became final with it; may be empty while a character is incomplete or a stop string may begin. What
            is held back when a request is cancelled or its deadline comes is in no chunk (``Request.rest``).
        drafted: it was drafted and accepted; otherwise the target drew it itself.
        depth: depth in the draft tree, 0 when it was not drafted.
        logprobs: where they were asked for (``SamplingParams.logprobs``).
    """

    token: int
    text: str
    drafted: bool
    depth: int
    logprobs: Logprobs | None = None


_chunk: Callable[[tuple[Any, ...]], Chunk] = partial(tuple.__new__, Chunk)
"""``Chunk._make`` without a Python call for each token."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request.

    Attributes:
        text: generated text, without what ended it unless that was wanted.
        token_ids: generated tokens, end-of-sequence included.
        finish_reason: why it ended (``draftree.request.Request``).
        seed: reproduces it.
        lossy: the verification was a lossy one: the tokens do not follow the target distribution.
        trace: records of what its steps did (docs/traces.md), where they were asked for; ``draftree.show`` draws them.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    seed: int
    chunks: list[Chunk]
    stats: Stats
    lossy: bool = False
    trace: Sequence[Mapping[str, Any]] = field(default=(), repr=False, compare=False)


class Request:
    """A prompt and what has been generated after it.

    Attributes:
        ids: prompt and generated tokens.
        arrival: when it was made, by ``time.monotonic()``.
        seed: the seed in use (drawn afresh when ``params.seed`` is None).
        limit: most tokens to generate.
        row: its row in the target; None once it is closed.
        decodes: its prompt is read.
        draws: the target's draws of its next step.
        prediction: token ids that its answer is likely to have in common with this; drafters by n-grams read them.
        finish_reason: None while it runs; then "eos" (an end-of-sequence token), "stop" (a stop string or token),
            "length" (``max_tokens`` or the context), "criteria" (one of its stopping criteria), "cancelled", "deadline"
            or "error" (an exception).
        error: what ended it where that is "error".
        chunks: one for each generated token.
        rest: text behind that of the chunks: what was held back when the request was cancelled or its deadline came.
        prompt_logprobs: of each token of the prompt but the first, as far as it is read, where they were asked for.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        limit: int,
        eos_ids: frozenset[int],
        stream: TextStream,
        prediction: Sequence[int] = (),
    ) -> None:
        self.arrival = time.monotonic()
        self.prediction = list(prediction)
        self.ids = list(prompt_ids)
        self.prompt_length = len(self.ids)
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.limit = limit
        self.row: Row | None = None
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.chunks: list[Chunk] = []
        self.rest = ""
        self.prompt_logprobs: list[Logprobs] = []
        self.stats = Stats()
        self.decodes = False
        state = None if params.constraint is None else params.constraint.start()
        self.draws = Draws(params, self.seed, self.ids, self.prompt_length, state)
        self._ends = dict.fromkeys(params.stop_token_ids, "stop")  # token -> why it ends the text
        self._ends |= dict.fromkeys(() if params.ignore_eos else eos_ids, "eos")
        self._stream = stream

    @property
    def output_ids(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def text(self) -> str:
        """Generated text; what ended it is left out unless it was wanted."""
        return "".join(chunk.text for chunk in self.chunks) + self.rest

    @property
    def stopped(self) -> str:
        """The stop string that ended it; empty: none did."""
        return self._stream.stopped

    @property
    def state(self) -> ConstraintState | None:
        """State of its constraint after the generated tokens; None: it has no constraint."""
        return self.draws.state

    @property
    def unread(self) -> int:
        """How many tokens its row lacks: 1 while it decodes; before that, the rest of the prompt."""
        return len(self.ids) - (self.row.length if self.row else 0)

    def fail(self, error: Exception) -> None:
        """End it by an error; its tokens stay readable.

        A note takes the place of the error's traceback, whose frames and their callers hold the logits of their step.
        """
        error.add_note("".join(traceback.format_tb(error.__traceback__)).rstrip())
        error.__traceback__ = None
        self.finish_reason, self.error = "error", error

    @contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """An exception inside ends it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self.fail(error)

    def cut_off(self, reason: str) -> None:
        """End it between two steps, "cancelled" or by its "deadline": its text gets what was held back."""
        if self.chunks:
            (self.rest,) = self._stream.push([None], last=True)
        self.finish_reason = reason

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be generated."""
        return self.limit - (len(self.ids) - self.prompt_length)

    def append(self, tokens: Sequence[int], accepted: int, logprobs: Sequence[Logprobs] = ()) -> None:
        """Append a step's tokens, of which the first ``accepted`` were drafted, up to the one that ends the request."""
        self.decodes, first, params = True, len(self.chunks), self.params
        depths = [*range(1, accepted + 1), *[0] * (len(tokens) - accepted)]
        scored: Sequence[Logprobs | None] = logprobs or [None] * len(tokens)
        # a criterion sees no token behind a stop string, and a dead end there does not matter
        for run in [[token] for token in tokens] if params.criteria or self.draws.state else [tokens]:
            start, done, why = len(self.ids), len(self.chunks) - first, self._add(run)
            added: list[int | None] = [*self.ids[start:]]
            if why in ("eos", "stop") and not params.include_stop_str_in_output:
                added[-1] = None
            texts = self._stream.push(added, last=why is not None)
            end = done + len(texts)
            if self._stream.stopped:
                del self.ids[start + len(texts) :]
                why = "stop"
            columns = self.ids[start:], texts, map(bool, depths[done:end]), depths[done:end], scored[done:end]
            self.chunks += map(_chunk, zip(*columns, strict=True))
            self.finish_reason = why
            if why is not None:
                return

    def _add(self, tokens: Sequence[int]) -> str | None:
        """Add tokens up to the one that ends the request, if one does by itself; returns why."""
        for token in tokens:
            if self.draws.state is not None:
                self.draws.state = followed(self.draws.state, [token])
            self.ids.append(token)
            if (why := self._ends.get(token)) is not None:
                return why
            if self.params.criteria:
                ids = np.array(self.ids, np.int64)
                if any(criterion(ids) for criterion in self.params.criteria):
                    return "criteria"
            if len(self.ids) - self.prompt_length >= self.limit:
                return "length"
        return None


@dataclass(frozen=True, slots=True)
class StepCost:
    """Wall-clock seconds of one step, shared by its requests that have the same drafter.

    Attributes:
        batch: requests in the step, those with other drafters and those whose prompts are read included.
        draft: of this drafter: its proposals, and what it took to learn from the step before.
        verify, other: as in ``Seconds``.
        draft_passes: drafter model passes.
        drafters: the part of ``draft`` that each drafter of an ensemble took; empty where there is one drafter.
        drafters_passes: of ``draft_passes``, those by each; empty where there is one drafter.
    """

    batch: int
    draft: float
    verify: float
    other: float
    draft_passes: int
    drafters: tuple[float, ...] = ()
    drafters_passes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request's draft tree.

    Attributes:
        path: accepted nodes in order, by number.
        tokens: what the verification gave: the accepted tokens and the target's own.
        taken: how many of them the request took before it ended.
        step: what the whole step cost.
    """

    request: Request
    tree: DraftTree
    path: list[int]
    tokens: list[int]
    taken: int
    step: StepCost

    @property
    def rejected_entropy(self) -> float | None:
        """Entropy (nats) of the draft distribution whose tokens were all rejected; None when nothing was rejected."""
        end = self.path[-1] if self.path else ROOT
        children = self.tree.children(end)
        return self.tree.entropies[children[0]] if children else None
