"""Is a greedy answer that of AR decoding, whatever the trees, the requests at once and the threads?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..config import SamplingParams
from ..engine.engine import Engine
from ..engine.replay import Difference, first_difference
from ..engine.scheduler import SchedulerParams
from ..engine.speculation import EngineRequest, Observer, SpeculationParams
from ..models.base import Capabilities, LanguageModel
from ..models.loading import ModelOptions
from .contestants import Models
from .entries import AR, Entry

NODES, REQUESTS = (2, 4, 8), (4, 16)
"""Node budgets of trees, a request at a time; requests at once, each with the largest of these trees."""


@dataclass(frozen=True, slots=True)
class Finding:
    """How one way of decoding compares with AR decoding of a request at a time.

    Attributes:
        method: a contestant's label.
        nodes: node budget; 0: no drafts.
        requests: that ran at once.
        threads: of a pass.
        answers: that were compared.
        differences: first difference of each answer that is another.
        exact: the engine claims to have no rounding that the way of decoding changes.
    """

    method: str
    nodes: int
    requests: int
    threads: int
    answers: int
    differences: Sequence[Difference]
    exact: bool

    @property
    def near_ties(self) -> int:
        """Differences that the rounding of this engine explains."""
        return 0 if self.exact else sum(each.near_tie for each in self.differences)

    @property
    def unexplained(self) -> int:
        return len(self.differences) - self.near_ties

    @property
    def cells(self) -> list[str]:
        """Under ``HEADER``."""
        first = min((each.index + 1 for each in self.differences), default="")
        numbers = (self.nodes or "", self.requests, self.threads)
        found = (f"{len(self.differences)} of {self.answers}", self.near_ties, first)
        return [self.method, *map(str, (*numbers, *found))]


HEADER = ("method", "nodes", "requests", "threads", "other answers", "near-ties", "first at token")


class ExactnessCheck(Observer):
    """Decodes prompts greedily and compares the answers with the first ones, those of AR decoding.

    Args:
        prompts: token ids.
        max_tokens: most tokens of an answer.
        notify: called after each answer with how many are done in all.
    """

    def __init__(self, prompts: Sequence[list[int]], max_tokens: int, notify: Callable[[int], None]) -> None:
        self._prompts, self._most, self._notify = prompts, max_tokens, notify
        self._done = 0
        self._ar: list[list[int]] = []

    def closed(self, request: EngineRequest) -> None:
        self._done += 1
        self._notify(self._done)

    def compare(self, models: Models, contestants: Sequence[Entry]) -> Iterator[Finding]:
        """AR decoding again, and each contestant with all trees and numbers of requests."""
        self._ar = self._answers(models.target, None, 1)
        yield self.compare_ar(models.target)
        for entry in contestants:
            drafter = models.drafter(str(entry.drafter))
            for nodes, requests in (*((nodes, 1) for nodes in NODES), *((NODES[-1], count) for count in REQUESTS)):
                speculation = replace(entry, nodes=nodes).speculation(drafter)
                yield self._finding(models.target, entry.label, nodes, requests, speculation)

    def compare_ar(self, target: LanguageModel) -> Finding:
        """AR decoding by a target, which may have other threads than the first one."""
        return self._finding(target, AR, 0, 1, None)

    def _finding(
        self, target: LanguageModel, method: str, nodes: int, requests: int, speculation: SpeculationParams | None
    ) -> Finding:
        answers, can = self._answers(target, speculation, requests), target.capabilities
        pairs = zip(self._prompts, self._ar, answers, self._params(can), strict=True)
        found = [first_difference(target, *pair) for pair in pairs]
        differences = [difference for difference in found if difference is not None]
        return Finding(
            method, nodes, min(requests, len(answers)), can.threads, len(answers), differences, exact=can.rounding == 0
        )

    def _answers(self, target: LanguageModel, speculation: SpeculationParams | None, requests: int) -> list[list[int]]:
        engine = Engine(target, speculation, observers=[self], scheduling=SchedulerParams(rows=requests))
        return [answer.token_ids for answer in engine.generate(self._prompts, self._params(target.capabilities))]

    def _params(self, can: Capabilities) -> list[SamplingParams]:
        most = (min(self._most, can.max_length - len(ids)) for ids in self._prompts)
        return [SamplingParams(max_tokens=tokens, seed=0) for tokens in most]


def ways(contestants: Sequence[Entry], can: Capabilities) -> int:
    """How many times each prompt is decoded."""
    return 2 + len(contestants) * (len(NODES) + len(REQUESTS)) + has_threads(can)


def has_threads(can: Capabilities) -> bool:
    """Its passes share several threads, so that one thread is another way of decoding."""
    return can.threads > 1


@contextmanager
def one_thread(options: ModelOptions, can: Capabilities) -> Iterator[ModelOptions]:
    """Options that load the same model on one thread; torch has one number of threads for all models."""
    if can.tier != "torch":
        yield {**options, "threads": 1}
        return
    from .transformers_peer import torch_threads

    with torch_threads(1):
        yield options
