"""A few threads for long work, apart from the threads that all requests need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from ..errors import QueueFullError

T = TypeVar("T")
_RETRY = 5.0
"""Seconds after which a full queue is worth another try: a grammar takes no more of a processor."""


class WorkQueue:
    """A few threads, and a bounded number of calls that wait for them.

    Args:
        name: of the threads.
        threads: calls that run at once.
        most: calls that wait; more are rejected.

    Attributes:
        waiting: calls that wait.
    """

    def __init__(self, name: str, threads: int, most: int) -> None:
        self._threads, self._most = ThreadPoolExecutor(threads, thread_name_prefix=name), most
        self._free, self.waiting = asyncio.Semaphore(threads), 0

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Run a call and return its result. A cancelled task leaves the queue, or drops the result.

        Raises:
            QueueFullError: too many wait.
            what the call raises.
        """
        if self._free.locked() and self.waiting >= self._most:
            raise QueueFullError(self.waiting, _RETRY)
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        loop, future = asyncio.get_running_loop(), self._threads.submit(call, *args)

        def ended(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(self._free.release)

        future.add_done_callback(ended)  # a call that runs takes its thread until it has ended, whoever waits for it
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """Begin no more calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)
