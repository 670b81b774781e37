"""One thread owns the engine; tasks of an event loop submit requests to it and wait for their tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from ..drafters.grow import TreeDrafter
from ..engine.engine import Engine, Handle
from ..engine.speculation import EngineRequest
from ..errors import RunError
from ..models.base import LanguageModel
from ..models.measuring import measure_missing
from ..request import Chunk


class Submission:
    """The requests of one body under way, for one task of the event loop.

    Attributes:
        watch: called in the event loop where tokens may have come, or the engine has ended.

    Args:
        ended: called in the event loop with the number of each that has ended, for whatever reason.
    """

    def __init__(
        self, owner: EngineLoop, handles: Sequence[Handle], ended: Callable[[int, EngineRequest], None]
    ) -> None:
        self._owner, self._handles, self._ended = owner, handles, ended
        self._under = [*range(len(handles))]
        self._taken = dict.fromkeys(range(len(handles)), 0)  # chunks of those whose end has not been taken
        self.watch: Callable[[], None] = lambda: None

    @property
    def requests(self) -> list[EngineRequest]:
        return [handle.request for handle in self._handles]

    @property
    def over(self) -> bool:
        """The ends of all requests have been taken."""
        return not self._taken

    def wake(self) -> bool:
        """Notify the watch; whether all requests have ended."""
        for index in [index for index in self._under if self._handles[index].done]:
            self._under.remove(index)
            self._ended(index, self._handles[index].request)
        self.watch()
        return not self._under

    def take(self) -> list[tuple[int, Sequence[Chunk], bool]]:
        """Of each request that has gained tokens or ended since the last call: its number, these, and whether it ended.

        The watch is not called again for what comes after an end of the engine: ``check`` behind each call.
        """
        gains = list[tuple[int, Sequence[Chunk], bool]]()
        for index, count in list(self._taken.items()):
            done, chunks = self._handles[index].done, self._handles[index].request.chunks[count:]
            if chunks or done:
                self._taken[index] += len(chunks)
                gains.append((index, chunks, done))
            if done:
                del self._taken[index]
        return gains

    def check(self) -> None:
        """Raise RunError where the engine has ended before the requests."""
        if not self.over:
            self._owner.check()

    async def end(self) -> None:
        """Wait for the end of all; a task that is cancelled meanwhile cancels them.

        Raises:
            the exception that ended one of them.
        """
        changed = asyncio.Event()
        self.watch = changed.set
        try:
            while True:
                changed.clear()
                for index, _, done in self.take():
                    if done and (error := self._handles[index].request.error) is not None:
                        raise error
                if self.over:
                    return
                self.check()
                await changed.wait()
        finally:
            self.cancel()

    def cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()


class EngineLoop:
    """A thread that loads an engine and makes its steps.

    Each thread that computes gets helpers of its own from OpenMP. Where there are more of them than processors, all
    sleep instead of spinning at the end of each loop of a pass: passes took 1.4 times as long on two processors.

    Args:
        load: returns the engine, with which nobody else works.

    Raises:
        what ``load`` raises.
    """

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._submissions: set[Submission] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due = False  # a look at the submissions is due in the event loop
        self._started, self._stopped = threading.Event(), False
        self.failure: BaseException | None = None
        loaded: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(load, loaded), name="draftree engine", daemon=True)
        self._thread.start()
        self.engine = loaded.result()

    @property
    def alive(self) -> bool:
        """Whether the thread makes steps."""
        return self._started.is_set() and self._thread.is_alive() and self.failure is None

    def check(self) -> None:
        """Raise RunError where the engine has ended by an error."""
        if self.failure is not None:
            raise RunError(f"the engine has ended: {self.failure}: start the server again")

    def start(self) -> None:
        """Begin to make steps; called in the event loop whose tasks will wait."""
        self._loop = asyncio.get_running_loop()
        self._started.set()

    async def stop(self) -> None:
        """Cancel what runs and make no more steps."""
        self._stopped = True
        self.cancel()
        self.engine.wake()
        await asyncio.to_thread(self._thread.join)

    def cancel(self) -> None:
        """End all requests with what they have."""
        for submission in self._submissions:
            submission.cancel()

    def _run(self, load: Callable[[], Engine], loaded: Future[Engine]) -> None:
        try:
            engine = load()
        except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it
            loaded.set_exception(error)
            return
        loaded.set_result(engine)
        self._started.wait()
        try:
            engine.wait(self._has_ended, partial(measure_missing, self._models()))
        except BaseException as error:  # noqa: BLE001 - a server without an engine says so from then on
            self.failure = error
        self._notify()

    def _has_ended(self) -> bool:
        """Notify the submissions of a step; return whether the loop is to end."""
        self._notify()
        return self._stopped and not self.engine.scheduler.jobs

    def _models(self) -> tuple[LanguageModel, ...]:
        """Return the models that run requests with the default drafter."""
        drafter = self.engine.speculation.drafter
        return self.engine.target, *(drafter.source.models if isinstance(drafter, TreeDrafter) else ())

    def _notify(self) -> None:
        if not self._due and self._loop is not None and not self._loop.is_closed():
            self._due = True
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        self._due = False
        self._submissions -= {submission for submission in self._submissions if submission.wake()}

    def submit(
        self,
        requests: Sequence[EngineRequest],
        ended: Callable[[int, EngineRequest], None],
        priority: int = 0,
        timeout: float | None = None,
    ) -> Submission:
        """Submit a body's requests, all of them or none, in the event loop.

        Args:
            ended: as for ``Submission``.
            priority, timeout: as for ``Engine.enqueue``.

        Raises:
            what ``Engine.enqueue`` raises.
        """
        submission = Submission(self, self.engine.enqueue(requests, priority, timeout), ended)
        if self._stopped:
            submission.cancel()
        if not submission.wake():
            self._submissions.add(submission)
        return submission
