"""The engine: requests are submitted, scheduled, and run to their end in steps that they share.

    submit -> [ end, admit, step ] * -> result

Any thread may submit and wait. One thread at a time works on the models: the one that runs ``run``, or else one of
those that wait, for all of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ..config import SamplingParams, typed
from ..drafters.base import Drafter
from ..errors import RunError
from ..models.base import LanguageModel
from ..request import Chunk, Request, Stats
from ..text.tokenizer import Prompt, Tokenizer
from ..tracing.trace import Observer
from ..verify.schemes import DEFAULT_SCHEME, Scheme
from .limits import each_params
from .scheduler import Job, Scheduler, SchedulerParams
from .speculation import Speculation, SpeculationParams
from .step import Stepper

_IDLE_SECONDS = 2.0
"""Without work for so long, the engine is idle."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request.

    Attributes:
        text: generated text, without what ended it unless that was wanted.
        token_ids: generated tokens, the end-of-request token included.
        finish_reason: one of ``draftree.request.FINISH_REASONS``.
        seed: reproduces it.
        lossy: the verification was a lossy one: the tokens do not follow the target distribution.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    seed: int
    chunks: list[Chunk]
    stats: Stats
    lossy: bool = False


class Handle:
    """A request that was submitted: its tokens as they come, or its result."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._job = engine, job
        self.request = job.request

    @property
    def done(self) -> bool:
        """It has ended, and holds nothing."""
        return self._job.done

    def cancel(self) -> None:
        """End it as soon as the step under way is over; its tokens stay readable. Twice is harmless."""
        self._job.cancelled = True
        self._engine.sweep()

    def __iter__(self) -> Iterator[Chunk]:
        """Its tokens as they come; leaving early cancels it.

        Raises:
            the exception that ended it.
        """
        given, chunks = 0, self.request.chunks
        try:
            while not (self.done and given == len(chunks)):
                self._engine.wait(partial(self._moved, given))
                while given < len(chunks):
                    given += 1
                    yield chunks[given - 1]
        finally:
            if not self.done:
                self.cancel()
        if self.request.error is not None:
            raise self.request.error

    def _moved(self, given: int) -> bool:
        return self.done or len(self.request.chunks) > given

    def result(self) -> Generation:
        """Wait for its end.

        Raises:
            the exception that ended it.
        """
        self._engine.wait(lambda: self.done)
        if self.request.error is not None:
            raise self.request.error
        return self.generation

    @property
    def generation(self) -> Generation:
        """What it has generated so far."""
        r = self.request
        lossy = r.speculation is not None and r.speculation.scheme.lossy
        return Generation(r.text, r.output_ids, r.finish_reason or "", r.seed, r.chunks, r.stats, lossy)


class Engine(Stepper):
    """Runs requests of one target (``Stepper`` for the other arguments).

    Args:
        scheduling: what runs at once.
    """

    @typed
    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None = None,
        *,
        nodes: int | None = None,
        tokenizer: Tokenizer | None = None,
        verification: str | Scheme = DEFAULT_SCHEME,
        candidates: str | None = None,
        observers: Sequence[Observer] = (),
        scheduling: SchedulerParams | None = None,
    ) -> None:
        scheduling = SchedulerParams() if scheduling is None else scheduling
        super().__init__(
            target,
            drafter,
            nodes=nodes,
            tokenizer=tokenizer,
            verification=verification,
            candidates=candidates,
            observers=observers,
            prefixes=scheduling.prefixes,
        )
        self.scheduler = Scheduler(scheduling, target.holds, self.prefixes)
        self._changed = threading.Condition()  # guards the scheduler and the tasks; notified after every step
        self._tasks: deque[tuple[Future[Speculation], Callable[[], Speculation]]] = deque()
        self._stepping = threading.Lock()  # held by the thread that works on the models
        self._worker: int | None = None  # that thread
        self._runs = self._stopped = False  # a thread is inside ``run``; it is to leave

    # Requests come and go: any thread.

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: SpeculationParams | Speculation | None = None,
        *,
        prediction: str | Sequence[int] = (),
        observers: Sequence[Observer] = (),
        priority: int = 0,
        timeout: float | None = None,
    ) -> Handle:
        """Let a request wait for its turn.

        Args:
            prompt, params, speculation, prediction, observers: as in ``request``.
            priority: lower runs sooner; a request that has waited ten seconds longer comes before the next lower one.
                While it runs, ``auto`` drafts more for it, and less for others, the lower it is.
            timeout: seconds in which it has to end; then it ends with what it has, for the reason "deadline". The less
                of them are left, the more ``auto`` drafts for it.

        Raises:
            InputError: it does not fit the model or its cache, or names what does not exist.
            QueueFullError: too many wait.
        """
        return self._submit(self.request(prompt, params, speculation, prediction, observers), priority, timeout)

    def _submit(
        self, request: Request, priority: int = 0, timeout: float | None = None, *, bounded: bool = True
    ) -> Handle:
        job = Job(request, self.slots(request, most=True), priority, timeout)
        with self._changed:
            self.scheduler.add(job, bounded=bounded)
            self._changed.notify_all()
        return Handle(self, job)

    def _speculation(self, given: SpeculationParams | Speculation | None) -> Speculation:
        """A new drafter is loaded and prepared between two steps, by the thread that works on the models."""
        find = super()._speculation
        if given is None or given in self._made or self._worker == threading.get_ident():
            return find(given)
        future: Future[Speculation] = Future()
        with self._changed:
            self._tasks.append((future, lambda: find(given)))
            self._changed.notify_all()
        self.wait(future.done)
        return future.result()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        speculation: SpeculationParams | Speculation | None = None,
    ) -> list[Generation]:
        """Decode prompts to their end, together.

        Args:
            prompts: texts (taken as they are), conversations or token ids.
            params: for all prompts, or one each; greedy to the end of the context by default.
            speculation: of all prompts.

        Raises:
            InputError: a prompt or its settings do not fit the model; found before anything is decoded.
            the exception that ended one of them.
        """
        each = each_params(prompts, params)
        requests = [self.request(p, one, speculation) for p, one in zip(prompts, each, strict=True)]
        handles = list[Handle]()
        try:
            for request in requests:
                handles.append(self._submit(request, bounded=False))
            self.wait(lambda: all(h.done for h in handles) or any(h.request.error for h in handles))
            if error := next((h.request.error for h in handles if h.request.error), None):
                raise error
            return [handle.generation for handle in handles]
        finally:
            for handle in handles:
                if not handle.done:
                    handle.cancel()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: SpeculationParams | Speculation | None = None,
    ) -> Iterator[Chunk]:
        """Decode one prompt, giving out tokens as they come (``request`` for the arguments).

        Raises:
            InputError: at once; it is submitted when the first token is wanted.
        """
        return self._stream(self.request(prompt, params, speculation))

    def _stream(self, request: Request) -> Iterator[Chunk]:
        yield from self._submit(request, bounded=False)

    # Steps are made: one thread at a time.

    def advance(self) -> bool:
        """End what has to end, admit what may run, and make one step of it; false where there was nothing to do.

        An exception ends the request that it comes from, which is found by stepping each of them alone.
        """
        worked = self._work_off() | self._end()
        running = self._admit()
        prompt_tokens, streams = self.scheduler.prompt_tokens, self.scheduler.streams
        unread = sum(request.unread for request in running if not request.decodes)
        began, failure = time.perf_counter(), None
        try:
            self.step(running, prompt_tokens, self.scheduler.weights, self.scheduler.batch_nodes)
            if streams:
                self.scheduler.chunk.observe(min(unread, prompt_tokens), time.perf_counter() - began)
        except Exception as error:  # noqa: BLE001 - whatever ends a request, the others go on
            failure = error
        if failure is not None:  # outside the handler, or its error would be the context of theirs
            for request in running:
                self._step_alone(request, prompt_tokens, failure if len(running) == 1 else None)
        return self._end() or worked or bool(running)

    def _work_off(self) -> bool:
        """Do what other threads wait for; whether there was anything."""
        worked = False
        while self._tasks:
            worked, (future, task) = True, self._tasks.popleft()
            try:
                future.set_result(task())
            except Exception as error:  # noqa: BLE001 - it is the caller's
                future.set_exception(error)
        return worked

    def _admit(self) -> list[Request]:
        """All requests that run, those included whose turn has come."""
        with self._changed:
            admitted = self.scheduler.admit()
        jobs, kept = self.scheduler.running, len(self.prefixes.lengths)
        for job in admitted:
            try:  # the cache grows once for all
                self.target.reserve(len(jobs) + kept, max(self.slots(each.request) for each in jobs))
                self.begin(job.request)
            except Exception as error:  # noqa: BLE001
                job.request.fail(error)
        return [job.request for job in jobs if job.request.finish_reason is None]

    def _step_alone(self, request: Request, prompt_tokens: int, error: Exception | None) -> None:
        """Step a request of a step that failed; ``error``: what it failed with, where it was alone."""
        try:
            if error is not None:
                raise error
            if request.finish_reason is None:
                self.step([request], prompt_tokens, batch_nodes=self.scheduler.batch_nodes)
        except Exception as own:  # noqa: BLE001
            request.fail(own)

    def _end(self) -> bool:
        """Close what has ended or has to; whether there was anything."""
        with self._changed:
            ended = self.scheduler.ended()
        for job in ended:
            try:
                self.close(job.request)
            except Exception as error:  # noqa: BLE001
                job.request.fail(error)
        return bool(ended)

    def run(
        self,
        stepped: Callable[[], None] = lambda: None,
        idle: Callable[[Callable[[], bool]], None] | None = None,
    ) -> None:
        """Make steps until ``shutdown``, waiting where there is nothing to do; no other thread makes any meanwhile.

        What still runs then is cancelled.

        Args:
            stepped: called after each step, by this thread.
            idle: called by this thread where there was no work for ``_IDLE_SECONDS``, once until there is again; its
                argument returns whether there is: then it should end.

        Raises:
            RunError: another thread is in here.
        """
        if self._runs:
            raise RunError("another thread runs this engine: one is enough")
        self._runs = True
        rested = idle is None
        try:
            with self._at_work(blocking=True):
                while not self._stopped:
                    worked = self.advance()
                    stepped()
                    with self._changed:
                        self._changed.notify_all()
                        woken = worked or self._changed.wait_for(self._is_wanted, None if rested else _IDLE_SECONDS)
                    if idle is not None and not woken:
                        idle(self._is_wanted)
                    rested = idle is None or not woken
                for job in self.scheduler.jobs:
                    job.cancelled = True
                self._end()
                stepped()
        finally:
            self._runs = self._stopped = False

    def _is_wanted(self) -> bool:
        """There is something to do for the thread that runs the engine."""
        return bool(self._stopped or self._tasks or self.scheduler.jobs)

    def shutdown(self) -> None:
        """Let ``run`` return after the step under way."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until something is so, making the steps for all meanwhile, unless another thread makes them.

        Raises:
            RunError: this thread is inside a step: a callback cannot wait for another request of its engine.
        """
        if self._worker == threading.get_ident():
            raise RunError("a callback waits for a request of the engine that runs it: give it another engine")
        while not ready():
            with self._at_work() as working:
                while working and not ready() and self.advance():
                    self._notify()
            if not working:
                with self._changed:
                    if not ready() and self._busy:
                        self._changed.wait(1.0)

    def sweep(self) -> None:
        """Close what was cancelled, unless a thread is at work, which does so itself."""
        with self._at_work() as working:
            if working:
                self._end()

    @property
    def _busy(self) -> bool:
        """A thread works on the models."""
        return self._runs or self._stepping.locked()

    @contextmanager
    def _at_work(self, *, blocking: bool = False) -> Iterator[bool]:
        """Be the thread that works on the models; false where another is and this one does not wait for it."""
        if self._runs and not blocking or not self._stepping.acquire(blocking=blocking):
            yield False
            return
        self._worker = threading.get_ident()
        try:
            yield True
        finally:
            self._worker = None
            self._stepping.release()
            self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
