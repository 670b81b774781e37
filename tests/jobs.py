"""Requests that wait for a scheduler, and schedulers that keep rows."""

from __future__ import annotations

from collections.abc import Sequence

from draftree.config import SamplingParams
from draftree.engine.scheduler import Job, Scheduler, SchedulerParams
from draftree.engine.speculation import EngineRequest, Speculation
from draftree.models.base import prefill
from draftree.models.prefixes import PrefixCache
from draftree.text.detokenizer import NoText

from .toy import ToyModel


def job(
    slots: int = 10,
    *,
    ids: Sequence[int] = (1, 2, 3),
    priority: int = 0,
    arrival: float = 0.0,
    timeout: float | None = None,
) -> Job:
    """A request whose row may come to hold so many slots: of its text, one more and a drafted one."""
    speculation, limit = Speculation(nodes=1), slots - 2 - len(ids)
    request = EngineRequest(ids, SamplingParams(), limit, frozenset(), NoText(), speculation=speculation)
    return Job(request, priority, timeout, arrival)


def kept(number: int, length: int) -> list[int]:
    """The text of a row that ``scheduler`` keeps."""
    return [number, *(i % 5 for i in range(length - 1))]


def scheduler(room: int = 1000, lengths: Sequence[int] = (), *, by_row: bool = True, **params: int) -> Scheduler:
    """Of a toy that has room for so many tokens, and keeps rows of such lengths."""
    target = ToyModel(max_length=600)
    target.most_tokens, target.grows_by_row = room, by_row
    rows = PrefixCache(target, len(lengths))
    for number, length in enumerate(lengths):
        rows.keep(kept(number, length), prefill(target, kept(number, length)))
    return Scheduler(SchedulerParams(**params), target, rows)
