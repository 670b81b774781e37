"""The trace of one request under way: its records for whoever reads them beside its tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ..request import Outcome, Request
from ..tracing.records import Record, plain
from ..tracing.trace import Observer, end_record, request_record, step_record


class LiveTrace(Observer):
    """Records of the request that it is an observer of, until they are taken.

    Made in the engine's thread, taken in another; nobody else holds it, so it goes with its request.

    Args:
        number: of the request, in its records.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._records = deque[Record]()

    def opened(self, request: Request) -> None:
        self._records.append(request_record(request, self._number))

    def stepped(self, outcomes: Sequence[Outcome], learned: float) -> None:
        self._records.extend(step_record(outcome, self._number, learned) for outcome in outcomes)

    def closed(self, request: Request) -> None:
        self._records.append(end_record(request, self._number))

    def take(self) -> list[Any]:
        """The records since the last call, as JSON has them."""
        return [plain(self._records.popleft()) for _ in range(len(self._records))]
