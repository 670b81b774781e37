"""One thread owns the engine; tasks of an event loop submit requests to it and wait for their tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from ..config import SamplingParams
from ..drafters.grow import TreeDrafter
from ..engine.engine import Engine, Generation, Handle
from ..engine.speculation import EngineRequest, Observer, SpeculationParams
from ..errors import RunError
from ..models.base import LanguageModel
from ..models.cost_profile import measure_missing
from ..request import Chunk

T = TypeVar("T")


class EngineThread:
    """A thread that does one thing after another: it loads the models and makes the steps.

    Each thread that computes gets helpers of its own from OpenMP. Where there are more of them than processors, all
    sleep instead of spinning at the end of each loop of a pass: passes took 1.4 times as long on two processors.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._work, name="draftree engine", daemon=True).start()

    def do(self, call: Callable[[], T]) -> Future[T]:
        """Do this when all before it is done."""
        future: Future[T] = Future()

        def task() -> None:
            try:
                found = call()
            except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it
                future.set_exception(error)
            else:
                future.set_result(found)

        self._tasks.put(task)
        return future

    def _work(self) -> None:
        while True:
            self._tasks.get()()


class AsyncHandle:
    """A request under way, for one task of the event loop.

    Attributes:
        handle: of the engine.
    """

    def __init__(self, handle: Handle, owner: EngineLoop, ended: Callable[[EngineRequest], None] | None = None) -> None:
        self.handle, self._owner, self._ended = handle, owner, ended
        self._changed = asyncio.Event()

    def wake(self) -> bool:
        """Let the task look; whether the request has ended."""
        self._changed.set()
        done = self.handle.done
        if done and self._ended is not None:
            ended, self._ended = self._ended, None
            ended(self.handle.request)
        return done

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Tokens as they come; leaving early cancels the request.

        Raises:
            the exception that ended it; RunError: the engine has ended.
        """
        with closing(self.handle.chunks()) as chunks:
            for chunk in chunks:
                if chunk is not None:
                    yield chunk
                elif self._owner.failure is not None:
                    raise RunError(f"the engine has ended: {self._owner.failure}: start the server again")
                else:
                    await self._changed.wait()
                    self._changed.clear()

    async def result(self) -> Generation:
        """Its end; a task that is cancelled meanwhile cancels the request.

        Raises:
            the exception that ended it.
        """
        async for _ in self.chunks():
            pass
        return self.handle.generation

    def cancel(self) -> None:
        if not self.handle.done:
            self.handle.cancel()


class EngineLoop:
    """Runs an engine in a thread.

    Args:
        engine: nobody else works with it meanwhile.
        thread: the one that loaded its models; None: one of its own.
    """

    def __init__(self, engine: Engine, thread: EngineThread | None = None) -> None:
        self.engine, self._thread = engine, thread or EngineThread()
        self._handles: set[AsyncHandle] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: Future[None] | None = None
        self._due = False  # a look at the handles is due in the event loop
        self._stopped = False
        self.failure: BaseException | None = None

    @property
    def alive(self) -> bool:
        return self._running is not None and not self._running.done()

    def start(self) -> None:
        """Begin to make steps; called in the event loop whose tasks will wait."""
        self._loop = asyncio.get_running_loop()
        self._running = self._thread.do(self._run)

    async def stop(self) -> None:
        """Cancel what runs and let the thread make no more steps."""
        self._stopped = True
        self.cancel()
        self.engine.wake()
        if self._running is not None:
            await asyncio.wrap_future(self._running)

    def cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()

    def _run(self) -> None:
        try:
            self.engine.wait(self._has_ended, self._stepped, partial(measure_missing, self._models()))
        except BaseException as error:  # noqa: BLE001 - a server without an engine says so from then on
            self.failure = error
        self._stepped()

    def _has_ended(self) -> bool:
        return self._stopped and not self.engine.scheduler.jobs

    def _models(self) -> tuple[LanguageModel, ...]:
        """That make the passes of requests which choose no drafter of their own."""
        drafter = self.engine.speculation.drafter
        return self.engine.target, *(drafter.source.models if isinstance(drafter, TreeDrafter) else ())

    def _stepped(self) -> None:
        if not self._due and self._loop is not None and not self._loop.is_closed():
            self._due = True
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        self._due = False
        self._handles -= {handle for handle in self._handles if handle.wake()}

    async def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        speculation: SpeculationParams | None = None,
        *,
        prediction: str = "",
        observers: Sequence[Observer] = (),
        priority: int = 0,
        timeout: float | None = None,
        ended: Callable[[EngineRequest], None] | None = None,
    ) -> AsyncHandle:
        """``Engine.submit``, which may wait for a drafter to be loaded, off the event loop.

        Args:
            ended: called in the event loop when the request has ended, for whatever reason.
        """
        call = partial(
            self.engine.submit,
            prompt,
            params,
            speculation,
            prediction=prediction,
            observers=observers,
            priority=priority,
            timeout=timeout,
        )
        handle = AsyncHandle(await asyncio.to_thread(call), self, ended)
        if self._stopped:
            handle.cancel()
        if not handle.wake():
            self._handles.add(handle)
        return handle
