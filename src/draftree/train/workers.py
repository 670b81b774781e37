"""Responses drawn by several processes, each with one thread and a core of its own.

On a CPU that is faster than one process with all threads, which wait for each other many times a pass, and longest
where others take a core away. The parent deals out prompt numbers one by one, and what is finished comes back to it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from ..errors import DraftreeError, RunError
from ..models.huggingface import HFModel
from ..models.loading import load
from .responses import Response, respond

_WAY_OUT = "the same command goes on, with fewer --workers if memory was short"


@dataclass(frozen=True, slots=True)
class _Job:
    """A worker's task; the target is loaded anew by its name."""

    target: str
    dtype: str
    weight_format: str
    core: int | None
    prompts: Sequence[Sequence[int]]
    rows: int
    max_tokens: int
    seed: int


def affordable(target: HFModel, *, rows: int, tokens: int) -> int:
    """How many workers half of the memory holds, each with the target and ``rows`` rows of ``tokens``; at least one."""
    row = target.open([0])
    cache = target.cache
    per_token = cache.nbytes / (cache.placement.rows * cache.placement.slots)
    target.close(row)
    weights = 2 * target.capabilities.parameters * target.capabilities.dtype.itemsize  # and once more while they load
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, int(memory / 2 / (weights + rows * tokens * per_token)))


def respond_in(
    workers: int,
    target: HFModel,
    prompts: Sequence[Sequence[int]],
    numbers: Iterable[int],
    *,
    rows: int,
    max_tokens: int,
    seed: int,
) -> Generator[Response]:
    """``respond`` by so many processes; the same responses, in the order in which they end.

    Args:
        target: on a CPU, loaded by its name; it makes no pass itself.
        rows: responses that each process decodes together.

    Raises:
        RunError: a worker failed, or was killed.
    """
    can, context = target.capabilities, multiprocessing.get_context("spawn")
    dtype, waiting = str(can.dtype).removeprefix("torch."), iter(numbers)
    cores: list[int] = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    running: dict[Connection, BaseProcess] = {}
    try:
        for i in range(workers):
            core = cores[i % len(cores)] if cores else None
            job = _Job(can.name, dtype, can.weight_format, core, prompts, rows, max_tokens, seed)
            ours, theirs = context.Pipe()
            running[ours] = context.Process(target=_work, args=(theirs, job), daemon=True)
            with _interrupts_held():
                running[ours].start()
            theirs.close()
        while running:
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)  # noqa: S101 - it waits for nothing else
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    raise RunError(f"a worker that draws responses was killed: {_WAY_OUT}") from None
                if isinstance(message, str):
                    raise RunError(f"a worker that draws responses failed: {message}: {_WAY_OUT}")
                if message is _NEXT:
                    pipe.send(next(waiting, None))
                elif message is _DONE:
                    running.pop(pipe).join()
                else:
                    number, temperature, length, tokens, features = message
                    yield Response(number, temperature, length, torch.from_numpy(tokens), torch.from_numpy(features))
    finally:
        for process in running.values():
            process.terminate()
            process.join()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits: a process that is started meanwhile never sees it, not even while it imports."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_NEXT, _DONE = None, True
"""Messages of a worker: send the next number; all done. A text is an error, a tuple a response."""


def _work(pipe: Connection, job: _Job) -> None:
    """The main function of a worker. The parent handles Ctrl-C and has shown all warnings."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    try:
        if job.core is not None:
            os.sched_setaffinity(0, {job.core})
        torch.set_num_threads(1)
        weight_format = {} if job.weight_format == "stock" else {"weight_format": job.weight_format}
        target = load(job.target, dtype=job.dtype, device="cpu", **weight_format)
        target.track_features()
        numbers = iter(lambda: _next_number(pipe), None)
        drawn = respond(target, job.prompts, numbers, rows=job.rows, max_tokens=job.max_tokens, seed=job.seed)
        for r in drawn:
            pipe.send((r.number, r.temperature, r.prompt_length, r.tokens.numpy(), r.features.numpy()))
        pipe.send(_DONE)
    except (EOFError, BrokenPipeError):  # the parent has gone
        return
    except (DraftreeError, MemoryError, OSError, RuntimeError, ValueError) as error:
        pipe.send((str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".: "))


def _next_number(pipe: Connection) -> int | None:
    """The number of the next prompt; None: there are no more."""
    pipe.send(_NEXT)
    number: int | None = pipe.recv()
    return number
