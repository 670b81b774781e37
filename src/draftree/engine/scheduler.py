"""Which requests run: a queue, admission by cache room, and how much of waiting prompts a step reads.

Makes no step.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from ..config import Checked, Count, Positive, Priority, Whole, check_type, option
from ..errors import FieldError, QueueFullError
from ..models.prefixes import PrefixCache
from .speculation import EngineRequest

_PRIORITY = 10.0
"""Seconds of waiting that one step of priority stands for: whoever waits long enough comes before all others."""
_ALONE = 2048
"""Prompt tokens of a step while nobody waits for a next token: bounds the memory of a pass and the time to cancel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerParams(Checked):
    """What an engine runs at once.

    Attributes:
        rows: most requests that run together; others wait.
        queue: most requests that wait; more are rejected.
        chunk: most prompt tokens that a step reads while other requests wait for their next token; None: as many as
            take ``ChunkSize.longest`` times as long as a step without them, as far as steps have been measured.
        prefixes: rows of ended requests that are kept, for prompts that begin as they do.

    Raises:
        ConfigError: a number is out of range.
    """

    rows: Count = option("Most requests that run together.", 8, metavar="N")
    queue: Count = option("Most requests that wait.", 256, metavar="N")
    chunk: Count | None = option("Most prompt tokens that a step reads while others decode.", metavar="N")
    prefixes: Whole = option("Rows of ended requests that are kept for prompts that begin as they do.", 0, metavar="N")


@dataclass(slots=True)
class ChunkSize:
    """How many prompt tokens a step may read: a quarter more after a step that was fast enough, else a quarter less.

    What a token costs depends on the context, the chunk and the machine; so no model of it is made.

    Attributes:
        fixed: so many, whatever they take.
        longest: the most time that a step with a chunk may take, as a multiple of a step without one. Streams should
            never wait longer than 3; 2.5 leaves room for steps that vary.
        least, most: tokens of a chunk.
        decay: share of the mean step without a chunk that each further one leaves.
    """

    fixed: int | None = None
    longest: float = 2.5
    least: int = 8
    most: int = 512
    decay: float = 0.8
    _size: float = 16.0
    _step: float = 0.0  # mean seconds of a step without a chunk

    @property
    def size(self) -> int:
        """Of the next chunk."""
        return self.fixed if self.fixed is not None else int(self._size)

    def observe(self, tokens: int, seconds: float) -> None:
        """A step in which some requests gained a token read so many tokens of prompts."""
        if not tokens:
            self._step = self.decay * self._step + (1 - self.decay) * seconds if self._step else seconds
        elif self._step and tokens >= self.size:
            change = 1.25 if seconds < self.longest * self._step else 0.75
            self._size = max(self.least, min(self.most, change * self._size))


@dataclass(slots=True, eq=False)
class Job:
    """A request with what decides when it runs.

    Attributes:
        length: most tokens that its row may come to hold.
        priority: lower runs sooner, by ten seconds of waiting a step.
        timeout: seconds from its arrival in which it has to end; None: any.
        cancelled: it is to end.
    """

    request: EngineRequest
    length: int
    priority: int = 0
    timeout: float | None = None
    arrival: float = field(default_factory=time.monotonic)
    cancelled: bool = False

    def __post_init__(self) -> None:
        check_type("priority", self.priority, Priority)
        check_type("timeout", self.timeout, Positive | None)

    @property
    def done(self) -> bool:
        """It has ended, and holds nothing."""
        return self.request.finish_reason is not None and self.request.row is None

    def due(self, now: float) -> str | None:
        """Why it has to end now, if it has."""
        if self.cancelled:
            return "cancelled"
        late = self.timeout is not None and now - self.arrival > self.timeout
        return "deadline" if late else None


class Scheduler:
    """Requests that wait and requests that run.

    Args:
        holds: whether the models can hold rows of these lengths at once.
        kept: rows of ended requests.
    """

    def __init__(
        self,
        params: SchedulerParams,
        holds: Callable[[Sequence[int]], bool],
        kept: PrefixCache,
    ) -> None:
        self._params, self._holds, self._kept = params, holds, kept
        self.chunk = ChunkSize(params.chunk)
        self._waiting: list[tuple[float, int, Job]] = []
        self._count = itertools.count()
        self.running: list[Job] = []

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def jobs(self) -> list[Job]:
        """Requests that run, and those that wait."""
        return [*self.running, *map(itemgetter(2), self._waiting)]

    def add(self, job: Job, *, bounded: bool = True) -> None:
        """Let a request wait for its turn.

        Args:
            bounded: reject it where the queue is full.

        Raises:
            FieldError: it needs more cache than there is.
            QueueFullError: the queue is full; it says when to come back.
        """
        if not self._holds([job.length]):
            raise FieldError(
                "max_tokens",
                f"the request needs {job.length} cache slots, more than the memory of the cache has: lower max_tokens, "
                "shorten the prompt, or give the cache more memory",
            )
        if bounded and len(self._waiting) >= self._params.queue:
            raise QueueFullError(len(self._waiting), self._retry_after())
        heapq.heappush(self._waiting, (job.priority * _PRIORITY + job.arrival, next(self._count), job))

    def _retry_after(self) -> float:
        """Seconds in which a place may be free: as long as those that run have taken so far, at most a minute."""
        now = time.monotonic()
        return min(60.0, max(1.0, max((now - job.arrival for job in self.running), default=1.0)))

    def ended(self) -> list[Job]:
        """Requests that have to end, or have ended; they are not scheduled any more."""
        now, found = time.monotonic(), list[Job]()
        for job in self.jobs:
            request = job.request
            if request.finish_reason is None:
                request.finish_reason = job.due(now)
            if request.finish_reason is not None:
                found.append(job)
        if found:
            out = set(map(id, found))
            self.running = [job for job in self.running if id(job) not in out]
            self._waiting = [entry for entry in self._waiting if id(entry[2]) not in out]
            heapq.heapify(self._waiting)
        return found

    def admit(self) -> list[Job]:
        """Requests whose turn it is, while there are rows and room for them; they run from now on.

        Nobody overtakes: a large request that waits for room is not passed by small ones for ever.
        """
        admitted = list[Job]()
        while self._waiting and len(self.running) < self._params.rows:
            job = self._waiting[0][2]
            lengths = [*(other.length for other in self.running), job.length]
            while not self._holds([*lengths, *self._kept.lengths]) and self._kept.lengths:
                self._kept.evict()
            if not self._holds([*lengths, *self._kept.lengths]):
                break
            heapq.heappop(self._waiting)
            self.running.append(job)
            admitted.append(job)
        return admitted

    @property
    def prompt_tokens(self) -> int:
        """How many tokens of prompts the next step may read."""
        beside = len(self.running) > 1 and any(job.request.decodes for job in self.running)
        return self.chunk.size if beside else _ALONE
