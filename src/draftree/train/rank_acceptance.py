"""Measures how often a drafter is right, by rank and depth, along the target's own output.

Autoregressive decoding of each prompt gives the true path. From many positions of it the drafter then drafts with a
policy that keeps the true next token alone, wherever it is ranked. So nothing is censored: the child of rank 9 counts
although no tree had it, and no target pass is spent on drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Interval

from ..artifacts import JsonFormat
from ..config import Checked, Count, NodeCount, Temperature, option
from ..drafters.base import Drafter
from ..engine.replay import Replay
from ..errors import ConfigError
from ..models.base import LanguageModel
from ..policies.base import MAX_WIDTH, Child, Frontier, GrowthPolicy
from ..policies.fixed import Counts
from .responses import Response, replayed, respond

_ROWS = 8
"""Responses that are drawn together."""


@dataclass(slots=True)
class TruePath(GrowthPolicy):
    """Keeps the true next token alone, for one request at a time.

    Attributes:
        ranks: where the drafter ranked them, layer by layer; ends with None where it had no such candidate.
    """

    truth: list[int] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)

    def follow(self, truth: list[int]) -> None:
        """Before a proposal: what comes next."""
        self.truth, self.ranks = truth, []

    def width_for(self, nodes: int) -> int:
        return MAX_WIDTH

    def grow(self, frontier: Frontier) -> list[Child]:
        """The child that is the true token."""
        candidates, token = frontier.candidates[0].tokens, self.truth[frontier.depth]
        self.ranks.append(candidates.index(token) if token in candidates else None)
        return [Child(0, rank) for rank in self.ranks[-1:] if rank is not None]


@torch.inference_mode()
def ranks_along(replay: Replay, policy: TruePath, *, depth: int, stride: int) -> Iterator[list[int | None]]:
    """The ranks of the next ``depth`` tokens of an output, from every ``stride``-th position of it on.

    Args:
        replay: of the output, by a drafter with ``policy``.
    """
    while replay.left:
        policy.follow(replay.left[:depth])
        tree = replay.propose(len(policy.truth), len(policy.truth))
        yield policy.ranks
        gained = min(stride, len(replay.left))
        replay.advance(tree, list(range(min(len(tree), gained - 1))), gained)  # the last token is the next root


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions(Checked):
    """What is measured along how much text, and how large a tree is made of it."""

    nodes: NodeCount = option("Most nodes of the tree.", 64, metavar="N")
    depth: Annotated[int, Interval(ge=1, le=64)] = option("Deepest level of the tree.", 8, metavar="D")
    stride: Count = option("Tokens from one start of a draft to the next; 1 measures most.", 4, metavar="N")
    max_tokens: Annotated[int, Ge(2)] = option("Most tokens to decode after each prompt.", 128, metavar="N")
    temperature: Temperature = option("0 is greedy decoding.", 0.0, metavar="T")


@dataclass(slots=True)
class Tally:
    """Counts of the first prompts, in a file until all are done.

    Attributes:
        key: of what is measured.
        trials, accepted: as in ``Counts``, with ``MAX_WIDTH`` ranks.
        done: prompts that are counted.
    """

    key: str
    trials: list[int]
    accepted: list[list[int]]
    done: int = 0

    @classmethod
    def load(cls, path: Path, key: str, depth: int) -> Tally:
        """What is in the file; a fresh start where there is none.

        Raises:
            ConfigError: the file is of another calibration, or of none.
        """
        try:
            tally = TALLY_FILE.read(path)
        except FileNotFoundError:
            return cls(key, [0] * depth, [[0] * MAX_WIDTH for _ in range(depth)])
        if tally.key != key:
            raise ConfigError(
                f"{path} is of a calibration with other models, prompts or settings: repeat that one to finish it, "
                "or remove the file to start afresh"
            )
        return tally

    def add(self, ranks: Sequence[int | None]) -> None:
        for depth, rank in enumerate(ranks):
            self.trials[depth] += 1
            if rank is not None:
                self.accepted[depth][rank] += 1

    @property
    def counts(self) -> Counts:
        """Without the ranks that were never right."""
        used = max((rank + 1 for row in self.accepted for rank, count in enumerate(row) if count), default=1)
        return Counts(tuple(self.trials), tuple(tuple(row[:used]) for row in self.accepted))


TALLY_FILE = JsonFormat("draftree tally", 1, "calibration", "remove it, or give --out another file", Tally)


def measure(
    options: CalibrationOptions,
    target: LanguageModel,
    drafter: Drafter,
    policy: TruePath,
    prompts: Sequence[Sequence[int]],
    seed: int,
    tally: Tally,
) -> Iterator[int]:
    """Count at which ranks the drafter has what the target says after the prompts that are left.

    Gives out how many are done; ``tally`` has their counts.

    Args:
        drafter: with ``policy``.
        prompts: token ids.
        seed: of the first prompt; each has its own.
    """
    numbers = range(tally.done, len(prompts))
    early = dict[int, Response]()  # they wait: prompts are counted in order, so that ``done`` says which are left
    limits: dict[str, Any] = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    with closing(respond(target, prompts, numbers, rows=_ROWS, seed=seed, **limits)) as drawn:
        for ended in drawn:
            early[ended.number] = ended
            while (response := early.pop(tally.done, None)) is not None:
                with replayed(drafter, response, seed, target) as replay:
                    for ranks in ranks_along(replay, policy, depth=options.depth, stride=options.stride):
                        tally.add(ranks)
                tally.done += 1
                yield tally.done
