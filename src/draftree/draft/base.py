"""The seam between the engine and whatever proposes tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ..config import Budget
from ..models.base import LanguageModel
from ..outcome import Outcome
from ..request import Request
from ..tree import DraftTree
from .drawing import Drawing

if TYPE_CHECKING:
    from ..policies.base import GrowthPolicy


class Drafter(Protocol):
    """Proposes a draft tree for each request and keeps whatever state that takes.

    Attributes:
        name: what people call it: the name that ``load_drafter`` made it by.
        passes: drafter model passes so far; each brings its candidates to the host in one transfer, and its drawn
            children in another.
        policy: what shapes its trees; None: it drafts nothing.
        successors: how many of the target's most probable tokens after each verified node it wants to be told; 0: none.
        learns: what it says depends on other requests, so that drawn children would not repeat under the same seed.
        host: the target whose rows it drafts on; None: it needs none.
    """

    @property
    def name(self) -> str: ...

    @property
    def passes(self) -> int: ...

    @property
    def policy(self) -> GrowthPolicy | None: ...

    @property
    def successors(self) -> int: ...

    @property
    def learns(self) -> bool: ...

    @property
    def host(self) -> LanguageModel | None: ...

    def prepare(self, target: LanguageModel) -> None:
        """It will draft for ``target``: called once, before anything else."""

    def open(self, request: Request) -> None:
        """A request begins: its prompt is in ``request.ids``."""

    def propose(
        self, requests: Sequence[Request], budgets: Sequence[Budget], drawing: Drawing = Drawing.COUPLED
    ) -> list[DraftTree]:
        """One tree for each request, rooted at its last token and within its budget.

        ``drawing`` says how children come out of the draft law; a request at temperature 0 gets the most probable.
        """

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """What became of the proposed trees; ``request.ids`` already ends with the tokens gained."""

    def close(self, request: Request) -> None:
        """A request has ended."""


class NoDrafter:
    """Drafts nothing: the engine decodes plainly (AR)."""

    name = "none"
    passes = 0
    successors = 0
    learns = False
    policy: GrowthPolicy | None = None
    host: LanguageModel | None = None

    def prepare(self, target: LanguageModel) -> None: ...

    def open(self, request: Request) -> None: ...

    def propose(
        self, requests: Sequence[Request], budgets: Sequence[Budget], drawing: Drawing = Drawing.COUPLED
    ) -> list[DraftTree]:
        """Empty trees."""
        return [DraftTree.empty() for _ in requests]

    def observe(self, outcomes: Sequence[Outcome]) -> None: ...

    def close(self, request: Request) -> None: ...
