"""The engine: requests are submitted, scheduled, and run to their end in steps that they share.

    submit -> [ end, admit, make room, step ] * -> result

Any thread may submit and wait. One of the waiting threads runs the models for all of them until its own wait is over;
then another takes over.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Unpack

from ..config import SamplingParams, typed
from ..errors import CacheFullError, ConfigError, RunError
from ..models.base import LanguageModel
from ..models.loading import ModelOptions, load
from ..models.model_files import DEFAULT_MODEL
from ..request import Chunk, Generation, Outcome
from ..text.encoding import Prompt
from .input_processor import InputProcessor, each_params
from .scheduler import Job, Scheduler, SchedulerParams
from .speculation import EngineRequest, Observer, Speculation, SpeculationParams, Speculations
from .step import Stepper
from .trace import RequestTrace, run_record

if TYPE_CHECKING:
    from ..sampling.grammar import Grammars

_IDLE_SECONDS = 2.0
"""Time without work after which the engine is idle."""


class Handle:
    """A request that was submitted: its tokens as they come, or its result."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._job = engine, job
        self.request = job.request

    @property
    def done(self) -> bool:
        """It has ended and its row is freed."""
        return self.request.finish_reason is not None and self.request not in self._engine.stepper.requests

    def cancel(self) -> None:
        """End it as soon as the step under way is over, if it has not ended; its tokens stay readable."""
        if not self.done:
            self._job.cancelled = True
            self._engine.sweep()

    def __iter__(self) -> Iterator[Chunk]:
        """Its tokens as they come; leaving early cancels it.

        Raises:
            the exception that ended it.
        """
        given, chunks, done = 0, self.request.chunks, False

        def moved() -> bool:
            return self.done or len(chunks) > given

        try:
            while not done:
                self._engine.wait(moved)
                done = self.done  # before the chunks are read: another thread may add the last ones meanwhile
                new = chunks[given:]
                given += len(new)
                yield from new
        finally:
            self.cancel()
        self._check()

    def _check(self) -> None:
        if self.request.error is not None:
            raise self.request.error

    def result(self) -> Generation:
        """Wait for its end.

        Raises:
            the exception that ended it.
        """
        self._engine.wait(lambda: self.done)
        self._check()
        return self.generation

    @property
    def generation(self) -> Generation:
        """What it has generated so far."""
        r = self.request
        lossy = r.speculation.scheme.lossy
        return Generation(r.text, r.output_ids, r.finish_reason or "", r.seed, r.chunks, r.stats, lossy)


class Engine:
    """Runs requests of one target.

    Args:
        speculation: how requests that choose nothing else are drafted for and verified; by default AR decoding.
        observers: notified in this order.
        scheduling: what runs at once.
        template_variables: what chat templates read, such as {"enable_thinking": False}; a conversation's own win.

    Raises:
        InputError: the drafter cannot be loaded for the target.
    """

    @typed
    def __init__(
        self,
        target: LanguageModel,
        speculation: SpeculationParams | Speculation | None = None,
        *,
        observers: Sequence[Observer] = (),
        scheduling: SchedulerParams | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        scheduling = SchedulerParams() if scheduling is None else scheduling
        self.target = target
        self.inputs = InputProcessor(target, template_variables)
        self._speculations = Speculations(target, scheduling.prefixes)
        self.speculation = self._speculations.find(speculation or Speculation())
        self.stepper = Stepper(target, observers, scheduling.prefixes)
        self.scheduler = Scheduler(scheduling, target, self.stepper.prefixes)
        self._guard = threading.RLock()  # of the scheduler and the tasks
        self._changed = threading.Condition(self._guard)  # notified of each step
        self._models = threading.Lock()  # of the thread that works on the models
        self._tasks: deque[tuple[Future[Speculation], SpeculationParams | Speculation]] = deque()
        self._worker: int | None = None  # that thread
        for observer in observers:
            observer.built(target, self.speculation)

    @property
    def grammars(self) -> Grammars:
        """Compiles grammars for ``SamplingParams.constraint``; any thread may use it.

        Raises:
            ConfigError: the model has no tokenizer, or none that says how tokens are spelled.
        """
        return self.inputs.grammars

    # Requests come and go: any thread.

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: SpeculationParams | Speculation | None = None,
        *,
        prediction: str | Sequence[int] = (),
        observers: Sequence[Observer] = (),
    ) -> EngineRequest:
        """A request that fits the model; nothing is held for it yet.

        Args:
            prompt: text (taken as it is), a conversation or token ids.
            params: greedy to the end of the context by default.
            speculation: how it is drafted for and verified; None: as the engine does by default.
            prediction: a text that the answer probably repeats, such as the file to edit; drafter "lookup" drafts from
                it. The output is the same with any prediction.
            observers: notified of this request alone.

        Raises:
            InputError: the prompt or a setting does not fit the model, or the drafter cannot be loaded for it.
        """
        if speculation is not None and not isinstance(speculation, (SpeculationParams, Speculation)):
            raise ConfigError(f"speculation is {speculation!r}: give SpeculationParams, a Speculation or None")
        return self.inputs.request(prompt, params, prediction, lambda: self._prepared(speculation), observers)

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
            timeout: seconds in which it has to end; then it ends with what it has, for the reason "deadline".

        Raises:
            InputError: it does not fit the model or its cache, or names what does not exist.
            QueueFullError: too many wait.
        """
        request = self.request(prompt, params, speculation, prediction=prediction, observers=observers)
        (handle,) = self.enqueue([request], priority, timeout)
        return handle

    def enqueue(
        self,
        requests: Sequence[EngineRequest],
        priority: int = 0,
        timeout: float | None = None,
        *,
        bounded: bool = True,
    ) -> list[Handle]:
        """Let requests that ``request`` has made wait for their turn: all of them, or none; waits for nothing.

        Args:
            priority, timeout: as in ``submit``, of each.
            bounded: reject them where the queue is full.

        Raises:
            InputError: one does not fit the cache; QueueFullError: too many wait.
        """
        group = object()
        jobs = [Job(request, priority, timeout, group=group, place=place) for place, request in enumerate(requests)]
        with self._changed:
            self.scheduler.add(*jobs, bounded=bounded)
            self._changed.notify_all()
        return [Handle(self, job) for job in jobs]

    def prepared(self, speculation: SpeculationParams | Speculation) -> Future[Speculation]:
        """A new drafter is loaded and prepared between two steps, by the thread that works on the models.

        The future is done when a thread that waits for something of the engine has done so.
        """
        future: Future[Speculation] = Future()
        if speculation in self._speculations or self._worker == threading.get_ident():
            self._speculations.resolve(future, speculation)
            return future
        with self._changed:
            self._tasks.append((future, speculation))
            self._changed.notify_all()
        return future

    def _prepared(self, speculation: SpeculationParams | Speculation | None) -> Speculation:
        if speculation is None:
            return self.speculation
        self.wait((future := self.prepared(speculation)).done)
        return future.result()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        speculation: SpeculationParams | Speculation | None = None,
        *,
        trace: bool = False,
    ) -> list[Generation]:
        """Decode prompts to their end, together.

        Args:
            prompts: texts (taken as they are), conversations or token ids.
            params: for all prompts, or one each; greedy to the end of the context by default.
            speculation: of all prompts.
            trace: keep what every step did (``Generation.trace``), for ``draftree.show``.

        Raises:
            InputError: a prompt or its settings do not fit the model; found before anything is decoded.
            the exception that ended one of them.
        """
        all_params = each_params(prompts, params)
        first = [run_record(self.target, self.speculation, {})] if trace else []
        traces = [RequestTrace(number, self.inputs.tokenizer, first) for number, _ in enumerate(all_params)]
        requests = [
            self.request(prompt, prompt_params, speculation, observers=[records] if trace else ())
            for prompt, prompt_params, records in zip(prompts, all_params, traces, strict=True)
        ]
        handles = self.enqueue(requests, bounded=False)
        try:
            self.wait(lambda: all(h.done for h in handles) or any(h.request.error for h in handles))
            if error := next((h.request.error for h in handles if h.request.error), None):
                raise error
            return [replace(h.generation, trace=records.take()) for h, records in zip(handles, traces, strict=True)]
        finally:
            for handle in handles:
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

    def _stream(self, request: EngineRequest) -> Iterator[Chunk]:
        (handle,) = self.enqueue([request], bounded=False)
        yield from handle

    # Steps are made: one thread at a time.

    def wait(
        self,
        ready: Callable[[], bool],
        idle: Callable[[Callable[[], bool]], object] = lambda is_wanted: None,
    ) -> None:
        """Wait until ``ready()``; meanwhile make steps for all requests, unless another thread makes them.

        Args:
            ready: called after each step, after ``wake``, and when requests arrive.
            idle: called by this thread after ``_IDLE_SECONDS`` without work, once until there is work again; should
                return when its argument returns true, for then there is.

        Raises:
            RunError: this thread is inside a step: a callback cannot wait for another request of its engine.
        """
        if self._worker == threading.get_ident():
            raise RunError("a callback waits for a request of the engine that runs it: give it another engine")
        while not ready():
            with self._at_work() as working:
                if working:
                    self._work(ready, idle)
                else:
                    with self._changed:
                        self._changed.wait_for(lambda: not self._models.locked() or ready())

    @contextmanager
    def _at_work(self) -> Iterator[bool]:
        """Become the thread that runs the models; yields false if another thread does."""
        if not self._models.acquire(blocking=False):
            yield False
            return
        self._worker = threading.get_ident()
        try:
            yield True
        finally:
            self._worker = None
            self._models.release()
            self.wake()

    def _work(self, ready: Callable[[], bool], idle: Callable[[Callable[[], bool]], object]) -> None:
        def is_wanted() -> bool:
            return bool(self._tasks or self.scheduler.jobs or ready())

        seconds: float | None = _IDLE_SECONDS
        while not ready():
            worked = self.advance()
            with self._guard:
                self._changed.notify_all()
                woken = worked or self._changed.wait_for(is_wanted, seconds)
            if not woken:
                idle(is_wanted)
            seconds = _IDLE_SECONDS if woken else None

    def wake(self) -> None:
        """Let waiting threads check their conditions."""
        with self._changed:
            self._changed.notify_all()

    def sweep(self) -> None:
        """Close what was cancelled, unless a thread is at work, which does so itself."""
        with self._at_work() as working:
            if working:
                self._end()
        self.wake()

    def advance(self) -> bool:
        """End what has to end, admit what may run, and make one step of it; false where there was nothing to do.

        An exception ends the request that it comes from, which is found by stepping each of them alone.
        """
        if worked := bool(self._tasks):
            self._load()
        worked |= self._end()
        if self.scheduler.waiting or len(self.scheduler.running) > 1 or self.stepper.prefixes.most:
            self._schedule()
        running = list[EngineRequest]()
        for job in self.scheduler.running:
            if job.request.finish_reason is None:
                running.append(job.request)
        began = time.perf_counter()
        prompt_tokens, nodes = self.scheduler.limits
        if outcomes := self._step(running, prompt_tokens, nodes):
            self.scheduler.observe(self.stepper.read, outcomes, time.perf_counter() - began)
        if any(map(attrgetter("finish_reason"), running)):
            self._end()
        return worked or bool(running)

    def _load(self) -> None:
        """Load the drafters that other threads wait for."""
        while self._tasks:
            future, speculation = self._tasks.popleft()
            if future.set_running_or_notify_cancel():
                self._speculations.resolve(future, speculation)

    def _schedule(self) -> None:
        """Let requests run whose turn has come, and those wait again whose rows the cache has no room for."""
        with self._guard:
            admitted = self.scheduler.admit()
        for job in admitted:
            with job.request.ended_by_errors():  # the cache grows once for all
                self.target.reserve(*self.scheduler.reserved)
                self.stepper.open_row(job.request)
        with self._guard:
            while paused := self.scheduler.make_room():  # what they have read is kept, and yields in turn
                for job in paused:
                    with job.request.ended_by_errors():
                        self.stepper.pause(job.request)

    def _step(self, requests: list[EngineRequest], prompt_tokens: int, nodes: int | None) -> list[Outcome]:
        """Step requests and return the outcomes of those that decode; if it fails, step each alone and return none."""
        try:
            return self.stepper.step(requests, prompt_tokens, nodes)
        except Exception as error:  # noqa: BLE001 - whatever ends a request, the others go on
            failure = error
        if isinstance(failure, CacheFullError) and (self.stepper.prefixes.lengths or nodes != 0):
            if evicted := bool(self.stepper.prefixes.lengths):  # they yield before drafts do
                self.stepper.prefixes.evict()
            return self._step(requests, prompt_tokens, nodes if evicted else 0)
        for request in requests:  # outside the handler, or its error would be the context of theirs
            if request.finish_reason is None and len(requests) == 1:
                request.fail(failure)
            elif request.finish_reason is None:
                self._step([request], prompt_tokens, nodes)
        return []

    def _end(self) -> bool:
        """Close requests that have ended or must end; return whether there were any."""
        with self._guard:
            ended = self.scheduler.ended()
        for job in ended:
            with job.request.ended_by_errors():
                self.stepper.close(job.request)
        return bool(ended)


@typed
def load_engine(
    target: str = DEFAULT_MODEL,
    speculation: SpeculationParams | None = None,
    *,
    observers: Sequence[Observer] = (),
    scheduling: SchedulerParams | None = None,
    **options: Unpack[ModelOptions],
) -> Engine:
    """An engine from names alone: ``load`` and ``Engine`` for the arguments; by default the default speculation."""
    chosen = speculation or SpeculationParams()
    return Engine(load(target, **options), chosen, observers=observers, scheduling=scheduling)
