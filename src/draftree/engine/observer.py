"""Observers of an engine, and the requests that it decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..models.base import LanguageModel
from ..request import Outcome, Request
from ..text.tokenizer import Tokenizer
from .speculation import Speculation


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine was built of, and when (ISO 8601, UTC)."""

    target: LanguageModel
    speculation: Speculation
    tokenizer: Tokenizer | None
    date: str = field(default_factory=_now)


class Observer:
    """An object that is notified of what an engine does; a subclass overrides what it observes."""

    def begin(self, setup: Setup) -> None:
        """An engine has been built with this observer."""

    def opened(self, request: EngineRequest) -> None:
        """A request has been prefilled and has its first token."""

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        """A step is over, with an outcome for each request; each ``request.ids`` already ends with the tokens taken."""

    def closed(self, request: EngineRequest) -> None:
        """A request is freed, even if its prefill failed; ``finish_reason`` is None when it was left early."""


class EngineRequest(Request):
    """A request with its speculation and with observers of its own."""

    def __init__(
        self, *args: Any, speculation: Speculation, observers: Sequence[Observer] = (), **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.speculation = speculation
        self.observers = tuple(observers)
