"""What a step did and cost: what drafters, policies and observers learn from."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .request import Request
from .tree import ROOT, DraftTree

_CHUNK = 256
"""Most tokens whose largest logit is found at once."""
_ROWS = 8
"""Nodes that are looked at together: bounds what is allocated beyond the logits."""


class Successors(NamedTuple):
    """The target's k most probable next tokens after R nodes, most probable first.

    Attributes:
        tokens: [R, k] int64.
        logprobs: [R, k] float32, at temperature 1, nats.
    """

    tokens: Tensor
    logprobs: Tensor

    @classmethod
    def unpack(cls, packed: Tensor) -> Successors:
        """Of [R, 2 k] on the host, as ``successors`` packs them."""
        tokens, logprobs = packed.tensor_split(2, dim=-1)
        return cls(tokens.long(), logprobs.float())


def successors(logits: Tensor, count: int) -> Tensor:
    """The ``count`` most probable successors by [B, R, V] logits.

    Returns:
        [B, R, 2 count] float64 on the logits' device: tokens, then log-probs, for one transfer to the host.
    """
    rows, count = logits.flatten(0, 1), min(count, logits.shape[-1])
    parts = []
    for some in rows.split(_ROWS):
        best = largest(some, count)
        logprobs = some.log_softmax(-1, dtype=torch.float32).gather(-1, best)
        parts.append(torch.cat([best.double(), logprobs.double()], dim=-1))
    return torch.cat(parts).view(*logits.shape[:2], 2 * count)


def largest(logits: Tensor, count: int) -> Tensor:
    """[R, count] int64 where the largest of [R, V] logits are, the largest first.

    All of them are in the chunks with the ``count`` largest maxima.
    """
    chunk = math.gcd(logits.shape[-1], _CHUNK)
    if min(chunk, logits.shape[-1] // chunk) <= 2 * count:
        return logits.topk(count).indices
    chunks = logits.reshape(len(logits), -1, chunk)
    where = chunks.amax(-1).topk(count).indices
    at = chunks.gather(1, where[..., None].expand(-1, -1, chunk)).flatten(1).topk(count).indices
    return where.gather(-1, at // chunk) * chunk + at % chunk


@dataclass(frozen=True, slots=True)
class StepCost:
    """Wall-clock seconds of one step, shared by its requests.

    Attributes:
        batch: requests in it.
        draft: proposing trees.
        verify: the target's pass, the draws and their transfer to the host.
        other: commits, text, bookkeeping.
        draft_passes: drafter model passes.
        beside: of verifying, what it took to find the successors that the drafter asked for.
        learned: what the drafter took to learn from the step before.
        drafters: of drafting, what each part of an ensemble took; none where there is one drafter.
    """

    batch: int
    draft: float
    verify: float
    other: float
    draft_passes: int
    beside: float = 0.0
    learned: float = 0.0
    drafters: tuple[float, ...] = ()


class StepClock:
    """Measures the stages of one step: ``with clock.time("draft"): ...``.

    Attributes:
        seconds: stage -> wall-clock seconds.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - began

    def cost(self, batch: int, draft_passes: int, learned: float) -> StepCost:
        """The cost of the step, once its stages are over."""
        s = self.seconds
        return StepCost(batch, s["draft"], s["verify"], s["other"], draft_passes, s["successors"], learned)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request's draft tree.

    Attributes:
        request: the request.
        tree: the tree that was verified.
        path: accepted nodes in order, by number.
        tokens: what the verification gave: the accepted tokens and the target's own.
        taken: how many of them the request took before it ended.
        step: what the whole step cost.
        successors: of the root and then of each node, what the target found most probable, as many as the drafter asked
            for; None where it asked for none.
    """

    request: Request
    tree: DraftTree
    path: list[int]
    tokens: list[int]
    taken: int
    step: StepCost
    successors: Successors | None = None

    @property
    def rejected_entropy(self) -> float | None:
        """Entropy (nats) of the draft law whose tokens were all rejected; None when nothing was rejected."""
        end = self.path[-1] if self.path else ROOT
        children = self.tree.children(end)
        return float(self.tree.entropies[children[0]]) if children else None

    def count(self, learned: float) -> None:
        """Add this step to the request's statistics; ``learned``: seconds that the drafter took to learn from it."""
        stats, cost = self.request.stats, self.step
        stats.steps += 1
        stats.tokens += self.taken
        stats.expected += self.tree.expected_acceptance_length if len(self.tree) else 1.0
        stats.draft_passes += cost.draft_passes
        stats.seconds.draft += cost.draft + learned
        stats.seconds.verify += cost.verify
        stats.seconds.other += cost.other
        if not len(self.tree):
            return
        accepted = min(self.taken, len(self.path))
        for counts, depths in (
            (stats.drafted, torch.bincount(self.tree.depths, minlength=1)[1:].tolist()),
            (stats.accepted, [1] * accepted),
        ):
            counts.extend([0] * (len(depths) - len(counts)))
            for d, n in enumerate(depths):
                counts[d] += n
        stats.accepted_entropies += self.tree.entropies[self.path[:accepted]].tolist()
        if self.taken == len(self.tokens) and (entropy := self.rejected_entropy) is not None:
            stats.rejected_entropies.append(entropy)
