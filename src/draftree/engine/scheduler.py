"""Which requests run: a queue, and admission by free cache; how much a step reads of prompts, and how much it drafts.

Where rows grow with their texts, a request is admitted if the cache has room for its text and some more; where the
texts that run have become too long for the cache, one of them waits again, and is read anew in its turn. Elsewhere the
cache has to have room for the longest text that it may come to.
Makes no step.
"""

from __future__ import annotations

import math
import sys
import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated

from annotated_types import Ge

from ..config import MAX_NODES, Checked, Count, Positive, Priority, Whole, option
from ..errors import FieldError, QueueFullError
from ..models.base import LanguageModel
from ..models.prefixes import PrefixCache
from ..request import Outcome
from .speculation import EngineRequest

_PRIORITY = 10.0
"""Seconds of waiting that one step of priority stands for: whoever waits long enough comes before all others."""
_ALONE, _ALONE_ON_CPU = 2048, 256
"""Prompt tokens of a step while nobody waits for a next token: bounds the memory of a pass and the time to cancel. A
processor reads no faster in larger steps, and 2048 tokens take it ten seconds."""
_AHEAD = 1024
"""Tokens that each text that runs has room for when another one is admitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerParams(Checked):
    """What an engine runs at once.

    Attributes:
        rows: most requests that run together; others wait.
        queue: most requests that wait while as many as ``rows`` run; more are rejected.
        chunk: most prompt tokens that a step reads while other requests wait for their next token; None: as many as
            take ``ChunkSize.longest`` times as long as a step without them, as far as steps have been measured.
        prefixes: rows of ended requests that are kept, for prompts that begin as they do.
        slowdown: most time that drafts may make a step take that several requests share, as a multiple of a step
            without drafts (``NodeShare``); None: any.

    Raises:
        ConfigError: a number is out of range.
    """

    rows: Count = option("Most requests that run together.", 8, metavar="N")
    queue: Count = option("Most requests that wait.", 256, metavar="N")
    chunk: Count | None = option("Most prompt tokens that a step reads while others decode.", metavar="N")
    prefixes: Whole = option("Rows of ended requests that are kept for prompts that begin as they do.", 0, metavar="N")
    slowdown: Annotated[float, Ge(1)] | None = None


@dataclass(slots=True)
class ChunkSize:
    """How many prompt tokens a step may read: a quarter more after a step that was fast enough, else a quarter less.

    What a token costs depends on the context, the chunk and the machine; so no model of it is made.

    Attributes:
        longest: the most time that a step with a chunk may take, as a multiple of a step without one. Streams should
            never wait longer than 3; 2.5 leaves room for steps that vary.
        least, most: tokens of a chunk.
        decay: share of the mean step without a chunk that each further one leaves.
        size: of the next chunk.
    """

    longest: float = 2.5
    least: int = 8
    most: int = 512
    decay: float = 0.8
    size: int = 16
    _step: float = 0.0  # mean seconds of a step without a chunk

    def observe(self, tokens: int, seconds: float) -> None:
        """A step in which some requests gained a token read so many tokens of prompts."""
        if not tokens:
            self._step = self.decay * self._step + (1 - self.decay) * seconds if self._step else seconds
        elif self._step and tokens >= self.size:
            change = 1.25 if seconds < self.longest * self._step else 0.75
            self.size = max(self.least, min(self.most, int(change * self.size)))


@dataclass(slots=True)
class NodeShare:
    """How many tokens may be drafted in a step that several requests share: drafts of one slow down all of them.

    A quarter more after a step that was fast enough; after another one less by a quarter, or by what it was too slow.
    What a node costs depends on the drafter, the method, the context and the machine; so no model of it is made. Steps
    without drafts are what others are compared with: one is made for each number of requests, and again after
    ``renewal`` steps that drafted. Where less than a token a request is left nothing is drafted for some steps.

    Attributes:
        longest: the most time that a step may take, as a multiple of a step without drafts; None: any.
        margin: share of ``longest`` that is aimed at: steps vary, and a request that comes waits for the end of one.
        growth: most seconds, as a share of the last measurement, that a new one of a step without drafts may add;
            it keeps a stall of the machine from counting.
        renewal: steps with drafts after which one without is measured anew.
        size: tokens of the next step.
    """

    longest: float | None
    margin: float = 0.8
    growth: float = 1.1
    renewal: int = 64
    size: float = 4.0
    _plain: dict[int, float] = field(default_factory=dict)
    """Decoding requests -> seconds of a step without drafts."""
    _left: dict[int, int] = field(default_factory=dict)
    """Decoding requests -> steps until that is measured anew."""

    def most(self, decoding: int) -> int | None:
        """Most tokens that a step of so many decoding requests may draft; 0: to be measured; None: any."""
        if self.longest is None:
            return None
        return int(self.size) if self._left.get(decoding, 0) > 0 else 0

    def observe(self, decoding: int, drafted: int, seconds: float) -> None:
        """A step of so many decoding requests, which read no prompts, drafted so many tokens."""
        if self.longest is None:
            return
        if not drafted:
            plain = self._plain.get(decoding, math.inf)
            self._plain[decoding], self._left[decoding] = min(seconds, self.growth * plain), self.renewal
            if self.size < decoding:
                self.size *= 1.25
        elif self._left.get(decoding):
            self._left[decoding] -= 1
            if (fits := self.margin * self.longest * self._plain[decoding] / seconds) < 1:
                self.size = min(self.size, drafted) * min(0.75, max(0.25, fits))
            elif drafted >= 0.75 * self.size:
                self.size = min(1.25 * self.size, float(MAX_NODES))


@dataclass(slots=True, eq=False)
class Job(Checked):
    """A request with what decides when it runs.

    Attributes:
        priority: lower runs sooner, by ten seconds of waiting a step.
        timeout: seconds from its arrival in which it has to end; None: any.
        group: what it was asked for together with.
        place: its number there; each further one waits as if its priority were a step lower.
        cancelled: it is to end.
    """

    request: EngineRequest
    priority: Priority = 0
    timeout: Positive | None = None
    arrival: float = field(default_factory=time.monotonic)
    group: object = field(default_factory=object)
    place: Whole = 0
    cancelled: bool = False

    @property
    def turn(self) -> float:
        """Of two jobs that wait, the one with the lower number runs first."""
        return (self.priority + self.place) * _PRIORITY + self.arrival

    @property
    def length(self) -> int:
        """Most tokens that its row may come to hold."""
        return self.request.row_length(self.request.prompt_length + self.request.limit)

    @property
    def allotted(self) -> int:
        """Tokens that its row gets memory for when it is opened: as many as were asked for, else a part."""
        return self.row_length(_AHEAD if self.request.params.max_tokens is None else self.request.limit)

    def row_length(self, more: int) -> int:
        """Most tokens that its row may hold until its text has gained so many."""
        return min(self.length, self.request.row_length(len(self.request.ids) + more))


class Scheduler:
    """Requests that wait and requests that run.

    Args:
        kept: rows of ended requests.

    Attributes:
        waiting, running: the requests; those that wait in the order in which they will run.
    """

    def __init__(self, params: SchedulerParams, target: LanguageModel, kept: PrefixCache) -> None:
        self._params, self._holds, self._kept = params, target.holds, kept
        self._alone = _ALONE_ON_CPU if target.capabilities.device == "cpu" else _ALONE
        self._ahead = _AHEAD if target.grows_by_row else sys.maxsize
        self._reserved = 0 if target.grows_by_row else sys.maxsize  # that kept rows leave to each text that runs
        self.chunk, self.drafts = ChunkSize(), NodeShare(params.slowdown)
        self.waiting, self.running = list[Job](), list[Job]()

    @property
    def jobs(self) -> list[Job]:
        """Requests that run, and those that wait."""
        return [*self.running, *self.waiting]

    @property
    def most(self) -> int:
        """Requests that run and wait at once."""
        return self._params.rows + self._params.queue

    def add(self, *jobs: Job, bounded: bool = True) -> None:
        """Let requests wait for their turn: all of them, or none.

        Args:
            bounded: reject them where there is no place for so many.

        Raises:
            FieldError: one needs more cache than there is.
            QueueFullError: the queue is full; it says when to come back.
        """
        for job in jobs:
            self._check_fits(job)
        if bounded and len(self.jobs) + len(jobs) > self.most:
            # a place may be free in as much time as those that run have taken so far, at most a minute
            longest = time.monotonic() - min([job.arrival for job in self.running], default=math.inf)
            raise QueueFullError(len(self.waiting), min(60.0, max(1.0, longest)))
        for job in jobs:
            insort(self.waiting, job, key=attrgetter("turn"))

    def _check_fits(self, job: Job) -> None:
        """Raise FieldError where a request needs more cache than there is, even alone."""
        if not self._holds([job.length]):
            raise FieldError(
                "max_tokens",
                f"the request needs {job.length} cache slots, more than the memory of the cache has: lower "
                "max_tokens, shorten the prompt, or free memory and load the model again",
            )

    def ended(self) -> list[Job]:
        """Requests that must end, or have ended; they are not scheduled any more."""
        now, ended = time.monotonic(), list[Job]()
        for job in (*self.running, *self.waiting):
            if job.request.finish_reason is None:
                if job.cancelled:
                    job.request.cut_off("cancelled")
                elif job.timeout is not None and now - job.arrival > job.timeout:
                    job.request.cut_off("deadline")
            if job.request.finish_reason is not None:
                ended.append(job)
        if ended:
            self.running = [job for job in self.running if job.request.finish_reason is None]
            self.waiting = [job for job in self.waiting if job.request.finish_reason is None]
        return ended

    def make_room(self) -> list[Job]:
        """Requests that wait again, since texts have become longer than the cache has room for; their rows are freed.

        Kept rows go first; then whoever would run last waits, as long as another one runs.
        """
        paused = list[Job]()
        if self._kept.lengths:
            self._kept.make_room([job.row_length(self._reserved) for job in self.running])
        while len(self.running) > 1 and not self._holds([job.row_length(0) for job in self.running]):
            job = max(self.running, key=attrgetter("turn"))
            self.running.remove(job)
            insort(self.waiting, job, key=attrgetter("turn"))
            paused.append(job)
        return paused

    def admit(self) -> list[Job]:
        """Requests whose turn it is, while there are rows and free cache for them; they run from now on.

        None overtakes another: a large request that waits for cache is not passed by small ones for ever. Where one
        group has all rows there is one more for a request of another group. One that does not fit even alone ends with
        an error: since it came a draft head was loaded, whose hidden states take memory of each token.
        """
        admitted = list[Job]()
        while (job := self._next()) is not None:
            lengths = [each.row_length(self._ahead) for each in (*self.running, job)]
            if not self._holds(lengths):
                if not self.running:
                    with job.request.ended_by_errors():
                        self._check_fits(job)
                break
            live = [(each.request.ids, each.request.row) for each in self.running if each.request.row is not None]
            texts = [each.request.ids for each in (*admitted, job) if each.request.scored is None]
            self._kept.make_room(lengths, texts, live)
            self.waiting.remove(job)
            self.running.append(job)
            admitted.append(job)
        return admitted

    @property
    def reserved(self) -> tuple[int, int]:
        """Rows that the cache gets memory for, and tokens of each: of those that run, and of those that are kept.

        Where it has no room for all of these, some that are kept are taken over by some that run.
        """
        tokens, kept = max([job.allotted for job in self.running]), self._kept.lengths
        while kept and not self._holds([*[tokens] * len(self.running), *kept]):
            kept.pop()
        return len(self.running) + len(kept), tokens

    def _next(self) -> Job | None:
        """The request that waits for nothing but cache."""
        running, rows = len(self.running), self._params.rows
        if running < rows:
            return next(iter(self.waiting), None)
        groups = {running.group for running in self.running}
        if running > rows or rows == 1 or len(groups) > 1:
            return None
        return next((job for job in self.waiting if job.group not in groups), None)

    @property
    def limits(self) -> tuple[int, int | None]:
        """Most tokens that the next step reads of prompts, and most that it drafts (None: as the budgets allow)."""
        if len(self.running) < 2:
            return self._alone, None
        decoding = sum([job.request.decodes for job in self.running])
        return (self._params.chunk or self.chunk.size) if decoding else self._alone, self.drafts.most(decoding)

    def observe(self, read: int, outcomes: Sequence[Outcome], seconds: float) -> None:
        """A step of these outcomes read so many tokens of prompts."""
        self.chunk.observe(read, seconds)
        if not read and self.drafts.longest:
            self.drafts.observe(len(outcomes), sum([len(outcome.tree) for outcome in outcomes]), seconds)
