"""Tensor parallel: one model over the processes of ``torchrun``, by transformers' plan of its layers.

    torchrun --nproc-per-node 2 -m draftree generate "..." --target MODEL

Rank 0 decides. It alone runs the command, its scheduler, drafters, random draws and clocks; its model sends each call
of the ``LanguageModel`` seam to the other ranks, which make the same call on their parts of the weights and of the
cache. So all ranks verify the same trees, whatever rank 0 decides by, and the text is that of one process (near-ties
aside: sums are taken in parts).
"""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import count
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist

from ...errors import DraftreeError, RunError, first_line
from ...progress import err
from ...scores import Scores
from ..base import Capabilities, LanguageModel, Nodes, Row
from .cache import bytes_of
from .hf_loading import load_part
from .hf_model import HFModel

_PATIENCE = timedelta(days=365)
"""How long a rank waits for the next call: until somebody asks again."""
_LOAD, _END = "load", "end"
_HOST = torch.device("cpu")


class Ranks:
    """The processes, seen from rank 0.

    Attributes:
        under_way: a call has been sent and not ended: the other ranks are inside it.
    """

    def __init__(self) -> None:
        self.under_way = False

    def send(self, *call: Any) -> None:
        """Let the other ranks make a call."""
        dist.broadcast_object_list([call], src=0, device=_HOST)

    @contextmanager
    def call(self, *call: Any) -> Iterator[None]:
        """The same; in here rank 0 makes it too.

        Raises:
            RunError: the last call failed on this rank alone, so that the others are still inside it.
        """
        if self.under_way:
            raise RunError("a pass has failed on one of several processes: start the command again")
        self.under_way = True
        self.send(*call)
        try:
            yield
        except DraftreeError:  # all ranks raise it
            self.under_way = False
            raise
        self.under_way = False


_ranks: Ranks | None = None


def run_on_ranks(command: Callable[[], int]) -> int:
    """Run a command by rank 0, whose target is loaded over all processes; its exit code."""
    global _ranks
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=_PATIENCE)
    try:
        if rank := dist.get_rank():
            return _follow(rank)
        _ranks = Ranks()
        try:
            return command()
        finally:
            if not _ranks.under_way:  # torchrun ends ranks that are inside a call
                _ranks.send(_END)
            _ranks = None
    finally:
        dist.destroy_process_group()


def _follow(rank: int) -> int:
    """Make rank 0's calls until it ends, and print nothing; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is rank 0's
    warnings.simplefilter("ignore")
    err.quiet = True
    parts: list[HFModel] = []
    try:
        while True:
            box: list[Any] = [None]
            dist.broadcast_object_list(box, src=0, device=_HOST)
            what, *given = box[0]
            if what == _END:
                return 0
            with contextlib.suppress(DraftreeError):  # rank 0 has raised it too
                if what == _LOAD:
                    name, options = given
                    parts.append(load_part(name, **options))
                else:
                    number, rows, arguments = given
                    model = parts[number]
                    _make(model, what, [model.row_at(row) for row in rows], arguments)
    except RuntimeError as error:  # of this part, or because another process is gone
        err.quiet = False
        err.print(f"draftree: process {rank} failed: {first_line(error)}", style="red")
        return 1


def _make(model: HFModel, method: str, rows: Sequence[Row], arguments: Sequence[Any]) -> Any:
    first = [list(rows)] if method == "extend" else rows
    return getattr(model, method)(*first, *arguments)


def load_over_ranks(name: str, options: dict[str, Any]) -> ParallelModel | None:
    """Load a model over all ranks; None: this is not rank 0 of processes that wait for its calls.

    Raises:
        InputError: the model or an option does not go with several processes.
    """
    if _ranks is None:
        return None
    with _ranks.call(_LOAD, name, options):
        part = load_part(name, **options)
    return ParallelModel(part, _ranks)


class ParallelModel(LanguageModel):
    """A model over several processes, as rank 0 has it.

    It verifies trees, beams included; what reads its weights (draft heads) it has not.

    Attributes:
        capabilities: those of the whole model; ``slot_bytes`` are of one process.
        tokenizer: the model's tokenizer.
    """

    _numbers = count()

    def __init__(self, part: HFModel, ranks: Ranks) -> None:
        self._part, self._ranks, self._lock = part, ranks, RLock()
        self._number = next(self._numbers)
        can, size = part.capabilities, dist.get_world_size()
        shares = size if can.device == "cpu" else 1  # all processes have found the same free memory there
        self.tokenizer, self.cache_bytes = part.tokenizer, part.cache_bytes // shares
        self.capabilities: Capabilities = replace(
            can,
            weight_format=f"{can.weight_format} over {size} processes",
            slot_bytes=can.slot_bytes // size,
        )

    def holds(self, lengths: Sequence[int]) -> bool:
        """Rows of so many tokens can be open together, within ``cache_bytes`` of each process."""
        return bytes_of(lengths, self.capabilities.slot_bytes) <= self.cache_bytes

    def reserve(self, rows: int, tokens: int) -> None:
        self._made("reserve", (), rows, tokens)

    def open(self) -> Row:
        row: Row = self._made("open", ())
        return row

    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        scores: Scores = self._made("extend", rows, list(nodes))
        return scores

    def commit(self, row: Row, path: Sequence[int]) -> None:
        self._made("commit", (row,), list(path))

    def prune(self, row: Row, keep: Sequence[int], trunk: int) -> None:
        self._made("prune", (row,), list(keep), trunk)

    def fork(self, row: Row, length: int | None = None) -> Row:
        fork: Row = self._made("fork", (row,), length)
        return fork

    def close(self, row: Row) -> None:
        self._made("close", (row,))

    def _made(self, method: str, rows: Sequence[Row], *arguments: Any) -> Any:
        """A call by all ranks on rows, which have the same numbers everywhere; what rank 0's part returns."""
        with self._lock:
            numbers = [self._part.checked(row).number for row in rows]
            with self._ranks.call(method, self._number, numbers, arguments):
                result = _make(self._part, method, rows, arguments)
            self.pass_seconds = self._part.pass_seconds
            return result
