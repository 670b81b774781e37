"""The target itself as its own drafter, in cheaper numerics or with fewer layers, on the target's own cache.

What the target has read, the drafter has read: it reads no prompt, keeps no keys and values, and is never behind. Its
nodes lie behind the target's committed tokens while a tree grows, and are dropped before the target verifies. For
layers left out this is Zhang et al., *Draft & Verify* (ACL 2024), Section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import ConfigError, RunError
from ..models.base import LanguageModel
from ..models.huggingface import HFModel
from ..outcome import Outcome
from ..request import Request
from .model import ModelSource, State
from .source import Grown


@dataclass(slots=True)
class GuestSource(ModelSource):
    """Asks a model that shares the target's rows; one such source at a time.

    Attributes:
        model: the drafting model (``HFModel.on_rows_of``).
        target: whose rows it is on.
    """

    model: HFModel
    target: HFModel = field(kw_only=True)

    @property
    def host(self) -> LanguageModel:
        """The target."""
        return self.target

    def prepare(self, target: LanguageModel) -> None:
        """Make sure that it is on this target's rows.

        Raises:
            ConfigError: it is on another's.
        """
        if target is not self.target:
            raise ConfigError(
                f"drafter {self.model.capabilities.name} was loaded for another target: load it for the one in use"
            )

    def unread(self, request: Request) -> list[tuple[LanguageModel, int]]:
        """Nothing, ever."""
        return [] if len(request.ids) >= self.model.capabilities.max_length else [(self.model, 0)]

    def opened(self, request: Request) -> State:
        """On the target's row."""
        if request.row is None:
            raise RunError("the request is closed: open its prompt again")
        return self._states.setdefault(request, State(request.row))

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
        """The target goes on: drop all nodes."""
        self._drop(requests)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """The target has committed what was accepted."""

    def close(self, request: Request) -> None:
        """The row is the target's."""
        self._states.pop(request, None)
