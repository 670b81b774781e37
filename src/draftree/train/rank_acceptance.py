"""Measures how often a drafter is right, by rank and depth, along the target's own output.

Autoregressive decoding of each prompt gives the true path. From many positions of it the drafter then drafts with a
policy that keeps the true next token alone, wherever it is ranked. So nothing is censored: the child of rank 9 counts
although no tree had it, and no target pass is spent on drafts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..artifacts import read_bytes, write_whole
from ..config import SamplingParams
from ..drafters.base import Drafter, NoDrafter
from ..engine.engine import Engine
from ..engine.replay import Replay, pass_maker
from ..engine.speculation import Speculation
from ..errors import ConfigError, RunError
from ..models.base import FINAL_STATE, FeatureSpec, LanguageModel
from ..models.huggingface.features import FeatureRow
from ..models.protocols import tracked
from ..policies.base import MAX_WIDTH, Child, Frontier, GrowthPolicy, Provenance
from ..policies.fixed import Counts, TreeFile, best_size, best_tree, expected_acceptance_length
from ..request import Request


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
        found, token = frontier.candidates[0].tokens, self.truth[frontier.depth]
        self.ranks.append(found.index(token) if token in found else None)
        return [Child(0, rank) for rank in self.ranks[-1:] if rank is not None]


@torch.inference_mode()
def ranks_along(
    drafter: Drafter,
    policy: TruePath,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    *,
    depth: int,
    stride: int,
    features: Tensor | None = None,
    target: LanguageModel | None = None,
    kept: FeatureSpec = FINAL_STATE,
) -> Iterator[list[int | None]]:
    """The ranks of the next ``depth`` tokens of ``output``, from every ``stride``-th position of it on.

    Args:
        drafter: with ``policy``.
        prompt, output, params, features, target, kept: as ``Replay`` takes them.
    """
    with Replay(drafter, prompt, output, params, features, target, kept) as replay:
        while replay.left:
            policy.follow(replay.left[:depth])
            tree = replay.propose(len(policy.truth), len(policy.truth))
            yield policy.ranks
            gained = min(stride, len(replay.left))
            replay.advance(tree, list(range(min(len(tree), gained - 1))), gained)  # the last token is the next root


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceMeasurement:
    """What is measured: equal ones count the same, so that one can go on where another was interrupted.

    Attributes:
        prompts: token ids.
        depth: deepest level to measure.
        stride: tokens from one start of a draft to the next.
        max_tokens: most tokens to decode after a prompt, within the context.
        seed: of the first prompt; each has its own.
        dtype, weight_format: of the target's weights.

    Raises:
        ConfigError: a value is out of range.
    """

    made_for: Provenance
    prompts: tuple[tuple[int, ...], ...]
    depth: int
    stride: int
    max_tokens: int
    temperature: float
    seed: int
    dtype: str
    weight_format: str = "stock"

    def __post_init__(self) -> None:
        check_ranges(self.depth, self.stride, self.max_tokens)

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()


def check_ranges(depth: int, stride: int, max_tokens: int) -> None:
    """Make sure that something can be measured.

    Raises:
        ConfigError: a value is out of range.
    """
    if not 1 <= depth <= 64:
        raise ConfigError(f"tree depth is {depth}: use 1 to 64")
    if stride < 1:
        raise ConfigError(f"stride is {stride}: use at least 1")
    if max_tokens < 2:
        raise ConfigError(f"max_tokens is {max_tokens}: use at least 2, for one token to draft")


@dataclass(slots=True)
class Tally:
    """Counts of the first prompts, in a file beside the result until all are done.

    Attributes:
        key: of the calibration.
        done: prompts that are counted.
        trials, accepted: as in ``Counts``, with ``MAX_WIDTH`` ranks.
    """

    path: Path
    key: str
    done: int
    trials: list[int]
    accepted: list[list[int]]

    @classmethod
    def load(cls, path: Path, calibration: AcceptanceMeasurement, *, force: bool = False) -> Tally:
        """What is in the file; a fresh start where there is none, or with ``force`` where it is of another calibration.

        Raises:
            ConfigError: the file is of another calibration, or of none.
        """
        depth, key = calibration.depth, calibration.key
        fresh = cls(path, key, 0, [0] * depth, [[0] * MAX_WIDTH for _ in range(depth)])
        try:
            content = json.loads(read_bytes(path))
            counts = Counts(tuple(content["trials"]), tuple(map(tuple, content["accepted"])))
            if content["key"] == key:
                return cls(path, key, int(content["done"]), list(counts.trials), [list(row) for row in counts.accepted])
        except FileNotFoundError:
            return fresh
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            raise ConfigError(f"{path} is of no calibration: remove it, or give --out another file") from None
        if not force:
            raise ConfigError(
                f"{path} is of a calibration with other models, prompts or settings: repeat that one to finish it, "
                "or start afresh with --force"
            )
        return fresh

    def add(self, ranks: Sequence[int | None]) -> None:
        for d, rank in enumerate(ranks):
            self.trials[d] += 1
            if rank is not None:
                self.accepted[d][rank] += 1

    def save(self) -> None:
        fields = {"key": self.key, "done": self.done, "trials": self.trials, "accepted": self.accepted}
        write_whole(self.path, json.dumps(fields) + "\n")

    @property
    def counts(self) -> Counts:
        """Without the ranks that were never right."""
        used = max((r + 1 for row in self.accepted for r, n in enumerate(row) if n), default=1)
        return Counts(tuple(self.trials), tuple(tuple(row[:used]) for row in self.accepted))


def measure(
    calibration: AcceptanceMeasurement, target: LanguageModel, drafter: Drafter, policy: TruePath, tally: Tally
) -> Iterator[int]:
    """Count the prompts that are not done yet, one by one; gives out how many are done and saved."""
    engine = Engine(target, Speculation(NoDrafter()))
    for i, prompt in enumerate(calibration.prompts[tally.done :], start=tally.done):
        left = target.capabilities.max_length - len(prompt)
        params = SamplingParams(
            max_tokens=min(calibration.max_tokens, left),
            temperature=calibration.temperature,
            seed=(calibration.seed + i) % 2**63,
        )
        request, features = decoded(engine, prompt, params)
        output = request.output_ids
        passes, kept = pass_maker(target, drafter, features), tracked(target)
        for ranks in ranks_along(
            drafter,
            policy,
            prompt,
            output,
            params,
            depth=calibration.depth,
            stride=calibration.stride,
            features=features,
            target=passes,
            kept=kept,
        ):
            tally.add(ranks)
        tally.done = i + 1
        tally.save()
        yield tally.done


def decoded(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> tuple[Request, Tensor | None]:
    """A prompt's request when it has ended, and the target's hidden states where it tracks them."""
    request = engine.stepper.open(engine.request(list(prompt), params))
    try:
        while request.finish_reason is None:
            engine.stepper.step([request])
        row = request.row
        return request, row.waiting_features() if isinstance(row, FeatureRow) and row.features else None
    finally:
        engine.stepper.close(request)


class TreeCosts(NamedTuple):
    """Seconds of this machine: of a target pass, by its tokens, the root among them; and of drafting one layer."""

    verify: Callable[[int], float]
    layer: float


def conclude(calibration: AcceptanceMeasurement, tally: Tally, nodes: int, costs: TreeCosts | None = None) -> TreeFile:
    """The best tree of at most ``nodes`` nodes for what was counted; with ``costs`` the one that gains most a second.

    Raises:
        RunError: the drafter was never right, or too seldom to pay.
    """
    acceptance = tally.counts.acceptance
    tree = best_size(acceptance, costs.verify, costs.layer, nodes) if costs else best_tree(acceptance, nodes)
    if not tree and costs and best_tree(acceptance, 1):
        raise RunError(
            f"by measured costs no tree of drafter {calibration.made_for.drafter} is faster than AR decoding: use "
            "another drafter, or leave --by-cost out"
        )
    if not tree:
        raise RunError(
            f"drafter {calibration.made_for.drafter} was never right in {sum(tally.trials)} trials: "
            "use more prompts, a larger --max-tokens, or another drafter"
        )
    return TreeFile(
        made_for=calibration.made_for,
        temperature=calibration.temperature,
        prompts=tally.done,
        counts=tally.counts,
        expected_acceptance_length=expected_acceptance_length(acceptance, tree),
        tree=tree,
    )
